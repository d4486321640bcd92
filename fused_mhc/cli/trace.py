"""``fused-mhc trace``: run one boundary as a Program, record what every worker did, draw it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import InputError
from .options import check_matplotlib, chosen_device, make_folder

__all__ = ["trace_command"]


def trace_command(
    tokens: Annotated[int, typer.Option(help="Tokens T.")] = 256,
    hidden: Annotated[int, typer.Option(help="Hidden size C of one stream.")] = 512,
    streams: Annotated[int, typer.Option(help="Streams n, 1 to 8.")] = 4,
    device: Annotated[
        str, typer.Option(help="cpu (the CPU executor), cuda or cuda:1 (the persistent megakernel), auto.")
    ] = "cpu",
    out: Annotated[
        Path, typer.Option(help="Folder for trace.json (Perfetto) and a Gantt picture a direction.")
    ] = Path("trace"),
    flows: Annotated[
        bool, typer.Option("--flows/--no-flows", help="Arrows from events to those who wait.")
    ] = True,
) -> None:
    """Run forward and backward of one boundary with schedule "mega" and write what its workers did."""
    import torch

    from ..ops.mega_mhc import mega_mhc
    from ..profiler import draw_gantt, export_chrome_trace, profile
    from ..runtime import last_launch

    where = chosen_device(device)
    for name, value in (("--tokens", tokens), ("--hidden", hidden), ("--streams", streams)):
        if value <= 0:
            raise InputError(f"{name} must be positive, got {value}")
    generator = torch.Generator().manual_seed(0)
    size = streams * streams + 2 * streams
    shapes = (
        (tokens, hidden),
        (tokens, streams, hidden),
        (tokens, streams),
        (tokens, streams),
        (tokens, streams, streams),
        (size, streams * hidden),
        (3,),
        (size,),
        (hidden,),
    )
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values[5] *= 0.01
    values[:2] = [value.bfloat16() for value in values[:2]]
    tensors = [value.to(where).requires_grad_() for value in values]
    check_matplotlib("--out")
    make_folder("--out", out)
    with profile(capacity=65_536) as session:
        results = mega_mhc(*tensors, schedule="mega")
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    launches = session.launches
    export_chrome_trace(out / "trace.json", launches, flows=flows)
    console = Console(soft_wrap=True)
    for launch in launches:
        record = last_launch(launch.direction)
        assert record is not None
        idle = ", ".join(f"{role} {share:.0%}" for role, share in launch.idle_share().items())
        console.print(
            f"{launch.direction}: {record.tasks} tasks on {record.workers} {record.executor} workers, "
            f"{launch.span_ns / 1e3:.0f} us, idle {idle}, {launch.dropped} records dropped",
            highlight=False,
        )
        draw_gantt(launch, out / f"{launch.direction}.png")
        console.print(f"wrote {out / f'{launch.direction}.png'}", highlight=False)
    console.print(f"wrote {out / 'trace.json'} (open it in ui.perfetto.dev)", highlight=False)
