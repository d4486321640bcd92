"""The persistent megakernel beside the fused kernels: plans that the cost model likes best, then each of them measured.

``python -m benchmarks.megakernel search --out PLANS.json`` needs no GPU: it searches by simulation.
``python -m benchmarks.megakernel measure --plans PLANS.json --out FILE.json [--trace FOLDER]`` runs what was found on a
CUDA device. A row's note holds the graph, its options, and the span that the cost model gave it.
"""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from fused_mhc.errors import InputError
from fused_mhc.ops.mega_mhc import _triton as fused
from fused_mhc.profiler import draw_gantt, export_chrome_trace, profile
from fused_mhc.runtime import GpuExecutor, check_launches
from fused_mhc.scheduler.plan import GRAPHS, Candidate, make_plan, search
from fused_mhc.testing.bench import BenchRow, run_bench
from fused_mhc.testing.byte_counts import fewest_bytes
from fused_mhc.testing.timing import copy_bandwidth, measure

STATE = ("previous_output", "residual", "previous_pre_mix", "previous_post_mix", "previous_residual_mix")
SITE = ("phi", "alpha", "bias", "norm_weight")
RESULTS = ("new_residual", "next_pre_mix", "next_post_mix", "next_residual_mix", "block_input")
SAVED = ("logits", "u", "mixed_rstd")
SETTINGS = (1e-6, 1e-6, 20)
#: What the search found for one H200.
PLANS = Path(__file__).parent / "results" / "plans.json"
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


app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command("search")
def search_plans(
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = PLANS,
    workers: Annotated[int, typer.Option(help="Multiprocessors of the device to plan for.")] = 132,
    tokens: Annotated[int, typer.Option(help="Tokens T.")] = 8192,
    streams: Annotated[int, typer.Option(help="Streams n.")] = 4,
    hidden: Annotated[list[int] | None, typer.Option(help="Hidden sizes C. Default: 5120 and 4096.")] = None,
    best: Annotated[int, typer.Option(help="Plans of each graph to keep, the shortest first.")] = 3,
) -> None:
    """Find the plans with the shortest simulated runs."""
    found = []
    for width in hidden or [5120, 4096]:
        for direction, graph in itertools.product(DIRECTIONS, GRAPHS):
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
            for plan in plans[:best]:
                shape = {"tokens": tokens, "streams": streams, "hidden": width}
                model = {"model_us": round(plan.simulation.makespan, 1)}
                found.append(
                    {"graph": graph, "direction": direction, **shape, "options": plan.options, **model}
                )
    out.write_text(json.dumps(found, indent=1) + "\n")


@app.command("measure")
def measure_plans(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    plans: Annotated[Path, typer.Option(help="What the search found.")] = PLANS,
    trace: Annotated[
        Path | None, typer.Option(help="Folder for a trace of the best plan of each graph.")
    ] = None,
    commit: Annotated[str, typer.Option(help="Recorded in the result.")] = "unknown",
) -> None:
    """Measure plans and the fused kernels on the current CUDA device."""
    if not torch.cuda.is_available():
        raise InputError("device: expected a CUDA device, got none")
    device = torch.device("cuda", torch.cuda.current_device())
    bandwidth = copy_bandwidth(device)
    head = run_bench([], [], device=device, commit=commit, copy_gbps=bandwidth)

    def add(plan: dict[str, Any], us: float, note: str) -> None:
        code, width = DIRECTIONS[plan["direction"]], plan["hidden"]
        size = fewest_bytes("mega_mhc", code, plan["tokens"], plan["streams"], width)
        percent = round(100 * size / us / 1e3 / bandwidth, 1)
        shape = (plan["tokens"], plan["streams"], width, "bfloat16")
        head.rows.append(BenchRow("mega_mhc", code, "triton", *shape, round(us, 2), size, percent, note))
        print(f"{plan['direction']} C={width} {note}: {us:.1f} us, {percent:.1f} % of copy", flush=True)
        out.write_text(json.dumps(head.to_dict(), indent=1) + "\n")  # kept, whatever becomes of the next

    def shape_of(plan: dict[str, Any]) -> tuple[int, int, int]:
        return plan["tokens"], plan["streams"], plan["hidden"]

    def site_of(plan: dict[str, Any]) -> tuple[Any, ...]:
        return plan["direction"], *shape_of(plan)

    tensors: dict[str, Tensor] = {}
    made_for: tuple[int, int, int] | None = None
    for _, same_site in itertools.groupby(json.loads(plans.read_text()), site_of):
        for k, (graph, same_graph) in enumerate(itertools.groupby(same_site, lambda plan: plan["graph"])):
            timed = []
            for plan in same_graph:
                if made_for != shape_of(plan):
                    made_for = shape_of(plan)
                    tensors = make_tensors(*made_for, device)
                if k == 0 and not timed:
                    us = measure(partial(run_fused, plan["direction"], tensors), device).median
                    add(plan, us, "fused")
                tokens, streams, width = shape_of(plan)
                candidate = make_plan(graph, plan["direction"], tokens, width, streams, **plan["options"])
                executor, inputs = GpuExecutor(candidate.program, device), inputs_of(candidate, tensors)
                us = measure(partial(executor.run, inputs), device).median
                check_launches(device)
                options = ", ".join(f"{k}={v}" for k, v in plan["options"].items() if "workers" not in k)
                add(plan, us, f"{graph}: {options}; model {plan['model_us']:.0f} us")
                timed.append((us, executor, inputs, plan))
            if trace is not None:
                _, executor, inputs, plan = min(timed, key=lambda entry: entry[0])
                with profile(capacity=65_536) as session:
                    executor.run(inputs)
                trace.mkdir(parents=True, exist_ok=True)
                name = f"{graph}-{plan['direction']}-{plan['hidden']}"
                export_chrome_trace(trace / f"{name}.json", session.launches)
                draw_gantt(session.launches[0], trace / f"{name}.png")


if __name__ == "__main__":
    app()
