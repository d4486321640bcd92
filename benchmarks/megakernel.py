"""The persistent megakernel beside the fused kernels: plans that the cost model likes best, then each of them measured.

``python -m benchmarks.megakernel --out FILE.json [--trace FOLDER]`` on a CUDA device. A row's note holds the graph, its
options, and the span that the cost model gave it.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from fused_mhc.device import device_info
from fused_mhc.errors import InputError
from fused_mhc.ops.mega_mhc import _triton as fused
from fused_mhc.profiler import draw_gantt, export_chrome_trace, profile
from fused_mhc.runtime import GpuExecutor, check_launches
from fused_mhc.scheduler.plan import GRAPHS, Candidate, search
from fused_mhc.testing.bench import BenchRow, run_bench
from fused_mhc.testing.byte_counts import fewest_bytes
from fused_mhc.testing.timing import copy_bandwidth, measure

STATE = ("previous_output", "residual", "previous_pre_mix", "previous_post_mix", "previous_residual_mix")
SITE = ("phi", "alpha", "bias", "norm_weight")
RESULTS = ("new_residual", "next_pre_mix", "next_post_mix", "next_residual_mix", "block_input")
SAVED = ("logits", "u", "mixed_rstd")
SETTINGS = (1e-6, 1e-6, 20)
DIRECTIONS = {"forward": "fwd", "backward": "bwd"}


def make_tensors(tokens: int, n: int, width: int, device: torch.device) -> dict[str, Tensor]:
    """Everything that one boundary reads, forward and backward, in the shapes of the Program's buffers."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    size, wide = n * n + 2 * n, torch.bfloat16
    values = (
        draw(tokens, width, dtype=wide),
        draw(tokens, n, width, dtype=wide),
        draw(tokens, n).sigmoid(),
        2 * draw(tokens, n).sigmoid(),
        draw(tokens, n, n).softmax(-1),
        0.01 * draw(size, n * width),
        draw(3),
        draw(size),
        1 + 0.1 * draw(width),
    )
    tensors = dict(zip((*STATE, *SITE), values, strict=True))
    results = fused.mega_mhc_fwd(*values, *SETTINGS)
    tensors |= dict(zip((*RESULTS, *SAVED), results, strict=True))
    tensors |= {f"g_{name}": draw(*t.shape).to(t.dtype) for name, t in zip(RESULTS, results, strict=False)}
    return tensors | {name: tensors[name].squeeze(1) for name in ("u", "mixed_rstd")}


def run_fused(direction: str, tensors: dict[str, Tensor]) -> Any:
    """The same by the backend's own kernels."""
    inputs = [tensors[name] for name in (*STATE, *SITE)]
    if direction == "forward":
        return fused.mega_mhc_fwd(*inputs, *SETTINGS)
    grads = [tensors[f"g_{name}"] for name in RESULTS]
    new, *mixes, _ = (tensors[name] for name in RESULTS)
    saved = [new, *(tensors[name] for name in SAVED), *mixes]
    return fused.mega_mhc_bwd(*grads, *inputs, *saved, *SETTINGS, [True] * 9)


def inputs_of(candidate: Candidate, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What its Program reads."""
    return {b.name: tensors[b.name] for b in candidate.program.buffers if b.role == "input"}


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    trace: Annotated[
        Path | None, typer.Option(help="Folder for a trace of the best plan of each graph.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens T.")] = 8192,
    streams: Annotated[int, typer.Option(help="Streams n.")] = 4,
    hidden: Annotated[list[int] | None, typer.Option(help="Hidden sizes C. Default: 5120 and 4096.")] = None,
    best: Annotated[
        int, typer.Option(help="Plans of each graph to measure, those with the shortest model first.")
    ] = 3,
    commit: Annotated[str, typer.Option(help="Recorded in the result.")] = "unknown",
) -> None:
    """Measure on the current CUDA device."""
    if not torch.cuda.is_available():
        raise InputError("device: expected a CUDA device, got none")
    device = torch.device("cuda", torch.cuda.current_device())
    workers = device_info(device).sm_count
    bandwidth = copy_bandwidth(device)
    rows = []

    def add(direction: str, width: int, us: float, note: str) -> None:
        code = DIRECTIONS[direction]
        size = fewest_bytes("mega_mhc", code, tokens, streams, width)
        percent = 100 * size / us / 1e3 / bandwidth
        shape = (tokens, streams, width, "bfloat16")
        rows.append(BenchRow("mega_mhc", code, "triton", *shape, us, size, percent, note))
        print(f"{direction} C={width} {note}: {us:.1f} us, {percent:.1f} % of copy")

    for width in hidden or [5120, 4096]:
        tensors = make_tensors(tokens, streams, width, device)
        for direction in DIRECTIONS:
            add(direction, width, measure(partial(run_fused, direction, tensors), device).median, "fused")
            for graph in GRAPHS:
                timed = []
                plans = search(
                    graph,
                    direction,
                    tokens,
                    width,
                    streams,
                    num_cube_workers=workers // 3,
                    num_vector_workers=workers - workers // 3,
                    mixed_workers=workers,
                )
                for candidate in plans[:best]:
                    executor, inputs = GpuExecutor(candidate.program, device), inputs_of(candidate, tensors)
                    us = measure(partial(executor.run, inputs), device).median
                    check_launches(device)
                    options = ", ".join(
                        f"{k}={v}" for k, v in candidate.options.items() if "workers" not in k
                    )
                    add(
                        direction,
                        width,
                        us,
                        f"{graph}: {options}; model {candidate.simulation.makespan:.0f} us",
                    )
                    timed.append((us, executor, inputs))
                if trace is not None:
                    _, executor, inputs = min(timed, key=lambda entry: entry[0])
                    with profile(capacity=65_536) as session:
                        executor.run(inputs)
                    trace.mkdir(parents=True, exist_ok=True)
                    name = f"{graph}-{direction}-{width}"
                    export_chrome_trace(trace / f"{name}.json", session.launches)
                    draw_gantt(session.launches[0], trace / f"{name}.png")
    head = run_bench([], [], device=device, commit=commit, copy_gbps=bandwidth)
    head.rows.extend(rows)
    out.write_text(json.dumps(head.to_dict(), indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
