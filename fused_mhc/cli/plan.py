"""``fused-mhc plan``: the task graph of a boundary in numbers and pictures, and a better one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import InputError
from .options import check_matplotlib, make_folder

__all__ = ["plan_command", "split_workers", "write_pictures"]

#: A critical path with more changes of stage is printed as sums by stage.
_LONGEST_PATH = 12


def split_workers(workers: int | None, cube: int | None, vector: int | None) -> dict[str, Any]:
    """Worker counts of a Program: ``workers`` mixed ones built from a third cube and the rest vector, or roles.

    Raises:
        InputError: both kinds, or only one role, are given.
    """
    if cube is not None and vector is not None and workers is None:
        return {"num_cube_workers": cube, "num_vector_workers": vector, "mixed_workers": None}
    if cube is not None or vector is not None:
        raise InputError("--workers: expected it alone, or --cube-workers and --vector-workers without it")
    workers = 132 if workers is None else workers
    if workers <= 0:
        raise InputError(f"--workers must be positive, got {workers}")
    third = max(1, workers // 3)
    return {
        "num_cube_workers": third,
        "num_vector_workers": max(1, workers - third),
        "mixed_workers": workers,
    }


def plan_command(
    tokens: Annotated[int, typer.Option(help="Tokens T.")] = 8192,
    hidden: Annotated[int, typer.Option(help="Hidden size C of one stream.")] = 5120,
    streams: Annotated[int, typer.Option(help="Streams n, 1 to 8.")] = 4,
    direction: Annotated[str, typer.Option(help="forward or backward.")] = "forward",
    graph: Annotated[
        str, typer.Option(help="fixed (stage barriers) or tiled (an event a tile, data stays in L2).")
    ] = "fixed",
    workers: Annotated[int | None, typer.Option(help="Mixed workers (default 132).")] = None,
    cube_workers: Annotated[int | None, typer.Option(help="Workers for cube tasks only.")] = None,
    vector_workers: Annotated[int | None, typer.Option(help="Workers for vector tasks only.")] = None,
    token_tile: Annotated[int | None, typer.Option(help="Tokens of a vector task.")] = None,
    propose: Annotated[
        bool, typer.Option("--propose/--no-propose", help="Search token tiles and waves for a faster plan.")
    ] = True,
    out: Annotated[
        Path, typer.Option(help="Folder for dag.svg, gantt.png, trace.json (Perfetto) and program.json.")
    ] = Path("plan"),
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Whether to write that folder.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Stages, tasks, events and critical path of a boundary's task graph, by the cost model of an H200."""
    from ..scheduler.plan import make_plan, search, summary

    if pictures:
        check_matplotlib("--pictures")
        make_folder("--out", out)
    counts = split_workers(workers, cube_workers, vector_workers)
    plan = make_plan(graph, direction, tokens, hidden, streams, token_tile=token_tile, **counts)
    best = search(graph, direction, tokens, hidden, streams, **counts)[0] if propose else None
    document: dict[str, Any] = {"plan": summary(plan)}
    if best is not None:
        gain = 1.0 - best.simulation.makespan / plan.simulation.makespan
        document["proposal"] = {"options": best.options, "gain": round(gain, 3), **summary(best)}
    files = write_pictures(plan, out) if pictures else []
    if as_json:
        typer.echo(json.dumps({**document, "files": [str(file) for file in files]}, indent=2))
        return
    _print(plan, document, files)


def write_pictures(plan: Any, folder: Path) -> list[Path]:
    """The DAG, the Gantt picture, the Perfetto trace and the Program itself."""
    from ..profiler import draw_gantt, export_chrome_trace, of_simulation
    from ..scheduler.plan import dag_svg

    dag, gantt, trace, program = (
        folder / name for name in ("dag.svg", "gantt.png", "trace.json", "program.json")
    )
    launch = of_simulation(plan.simulation)
    dag.write_text(dag_svg(plan.program), encoding="utf-8")
    draw_gantt(launch, gantt)
    export_chrome_trace(trace, [launch])
    program.write_text(plan.program.to_json(), encoding="utf-8")
    return [dag, gantt, trace, program]


def _print(plan: Any, document: dict[str, Any], files: list[Path]) -> None:
    from ..scheduler.plan import critical_stages, stage_rows

    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = 140  # a file or a pipe has no width of its own
    numbers = document["plan"]
    table = Table(
        title=f"{numbers['graph']}, {numbers['direction']}: {numbers['geometry']}", title_justify="left"
    )
    for name in ("stage", "workers", "tasks", "tokens a task", "first waits for", "us a task (model)"):
        table.add_column(name)
    for name, role, tasks, rows, waits, mean in stage_rows(plan):
        table.add_row(name, role, str(tasks), str(rows) if rows else "-", waits, f"{mean:.1f}")
    console.print(table)
    idle = ", ".join(f"{role} {share:.0%}" for role, share in numbers["idle_share"].items())
    console.print(
        f"{numbers['tasks']} tasks, {numbers['events']} of {numbers['event_capacity']} events, "
        f"{numbers['workers']} workers, digest {numbers['digest'][:12]}; proven: no race, no deadlock",
        highlight=False,
    )
    console.print(
        f"model of {numbers['machine']}: {numbers['makespan_us']} us, {numbers['dram_units']} units of DRAM traffic, "
        f"{numbers['l2_hit_share']:.0%} of reads from L2, {numbers['live_megabytes']} MB alive at most, idle {idle}",
        highlight=False,
    )
    steps = critical_stages(plan.simulation)
    separator = " -> "
    if len(steps) > _LONGEST_PATH:
        separator = ", "
        totals: dict[str, list[float]] = {}
        for name, count, length in steps:
            total = totals.setdefault(name, [0, 0.0])
            total[0], total[1] = total[0] + count, total[1] + length
        steps = [(name, int(count), length) for name, (count, length) in totals.items()]
    path = separator.join(f"{name} x{count} ({length:.0f} us)" for name, count, length in steps)
    console.print(f"critical path: {path}", highlight=False)
    if "proposal" in document:
        proposal = document["proposal"]
        chosen = ", ".join(
            f"{name} {value}"
            for name, value in proposal["options"].items()
            if value is not None and not name.endswith("workers")
        )
        gain = f"{proposal['gain']:.0%} less" if proposal["gain"] > 0 else "no faster"
        console.print(
            f"proposal: {chosen}: {proposal['makespan_us']} us ({gain}), {proposal['dram_units']} units",
            highlight=False,
        )
    for file in files:
        console.print(f"wrote {file}", highlight=False)
