"""``fused-mhc demo``: one byte-level transformer, three ways to carry its residual stream.

The heavy imports (torch, matplotlib) happen when the command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from ... import __version__
from ...errors import BackendError, InputError
from ..options import check_matplotlib, chosen_device, make_folder

if TYPE_CHECKING:
    import torch

__all__ = ["demo_command"]

#: The operations of the three models.
USED = {
    "h_post_bda",
    "input_expand",
    "mega_mhc",
    "mega_mhc_entry",
    "mega_mhc_exit",
    "mhc_pre",
    "output_contract",
}


def _check_hidden(hidden: int) -> None:
    from .model import HEAD_SIZE

    if hidden < HEAD_SIZE or hidden % HEAD_SIZE:
        raise InputError(f"--hidden: expected a multiple of {HEAD_SIZE}, got {hidden}")


def _check_backends(device: torch.device) -> None:
    """The environment's choice of backend is understood, and runs what the models use."""
    from ...dispatch import backend_status

    for row in backend_status(device=device):
        if row.op in USED and row.chosen == "none":
            raise BackendError(f"demo: no backend runs {row}")


def demo_command(
    steps: Annotated[int, typer.Option(help="Training steps of each model.")] = 300,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:1.")] = "auto",
    streams: Annotated[int, typer.Option(help="Residual streams of the mHC models, 1 to 16.")] = 4,
    hidden: Annotated[int, typer.Option(help="Width of one stream, a multiple of 32.")] = 160,
    seed: Annotated[int, typer.Option(help="Same seed, same numbers.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the report; made if it is not there.")] = Path(
        "report"
    ),
) -> None:
    """Train a byte-level transformer on the Python standard library's source, three times from one seed.

    Plain residual, two-pass mHC and single-pass mHC see the same batches. Prints held-out loss, step time, parameters
    and peak memory of each, and writes OUT/index.html with pictures.
    """
    check_matplotlib("demo")

    import torch

    from ...checks import check_count, check_streams
    from .corpus import load_corpus
    from .model import MODELS, build
    from .report import TABLE_HEAD, table_row, write_report
    from .training import Settings, train

    check_count("--steps", steps)
    check_streams("--streams", streams)
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed: expected 0 to 2**63 - 1, got {seed}")
    _check_hidden(hidden)
    where = chosen_device(device)
    _check_backends(where)
    corpus = load_corpus()
    make_folder("--out", out)

    settings = Settings(steps=steps, device=where, streams=streams, hidden=hidden, seed=seed)
    console = Console()
    console.print(
        f"{corpus.files:,} files below {corpus.root}: {len(corpus.train):,} bytes to train on, "
        f"{len(corpus.held_out):,} held out"
    )
    results, matrices = [], {}
    tokens = settings.batch * settings.length
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = {
            name: progress.add_task(name, total=steps, start=False, loss=float("nan"), rate=0.0)
            for name in MODELS
        }
        for name, bar in bars.items():
            model = build(name, hidden, settings.layers, streams, seed).to(where)
            progress.start_task(bar)

            def show(loss: float, bar: TaskID = bar) -> None:
                progress.update(bar, advance=1, loss=loss, rate=tokens * (progress.tasks[bar].speed or 0.0))

            results.append(train(name, model, corpus, settings, show))
            sample = corpus.held_out[: settings.length].long()[None].to(where)
            with torch.no_grad():
                matrices[name] = model.mixing(sample).cpu()
    facts = {
        "fused-mhc": __version__,
        "torch": torch.__version__,
        "device": str(where),
        "steps": str(steps),
        "tokens a step": str(tokens),
        "streams": str(streams),
        "hidden": str(hidden),
        "layers": str(settings.layers),
        "seed": str(seed),
    }
    table = Table(
        title="Loss in nats a byte",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, column in enumerate(TABLE_HEAD):
        table.add_column(column, justify="left" if index == 0 else "right")
    for result in results:
        table.add_row(*table_row(result))
    console.print(table)
    console.print(f"report: {write_report(out, facts, results, matrices)}")
