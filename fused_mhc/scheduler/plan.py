"""Plans: a Program and its simulated run, described in words and drawn, and the search for a better one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from fused_mhc.errors import InputError, ScheduleError
from fused_mhc.scheduler.lower import lower_mega_mhc
from fused_mhc.scheduler.lower_tiled import lower_tiled_mhc
from fused_mhc.scheduler.program import Program
from fused_mhc.scheduler.simulate import H200, Machine, Simulation, simulate
from fused_mhc.scheduler.task import TaskAiCoreType
from fused_mhc.scheduler.verify import verify

__all__ = [
    "GRAPHS",
    "Candidate",
    "critical_stages",
    "dag_svg",
    "make_plan",
    "search",
    "stage_rows",
    "summary",
]

#: Name of a kind of graph -> what lowers it.
GRAPHS: dict[str, Any] = {"fixed": lower_mega_mhc, "tiled": lower_tiled_mhc}

_SVG_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" \
font-family="sans-serif" font-size="12">
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">\
<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>
<rect width="{width}" height="{height}" fill="white"/>"""

_TILED_FORWARD = {
    "token_tile": (8, 16, 32),
    "group_rows": (64, 128),
    "parts": (4, 8),
    "wave_rows": (None, 256),
}
_TILED_BACKWARD = {
    "token_tile": (16, 32),
    "group_rows": (256, 512),
    "parts": (8, 16),
    "wave_rows": (None, 256),
}


@dataclass(frozen=True)
class Candidate:
    """One plan: the options it was lowered with, the proven Program, its simulated run."""

    options: dict[str, Any]
    program: Program
    simulation: Simulation


def make_plan(
    graph: str,
    direction: str,
    token_count: int,
    hidden_size: int,
    num_streams: int = 4,
    *,
    machine: Machine = H200,
    wave_tiles: int | None = None,
    **options: Any,
) -> Candidate:
    """Lower, prove and simulate one graph.

    Args:
        graph: ``"fixed"`` or ``"tiled"``.
        direction, token_count, hidden_size, num_streams, options: as in the function that lowers it.
        machine: of the cost model.
        wave_tiles: fixed graphs only: tiles of a wave of the vector queue (None: as the graph is built).

    Raises:
        InputError: an unknown graph, or bad sizes.
        ScheduleError: the Program is wrong.
    """
    if graph not in GRAPHS:
        raise InputError(f"graph: expected one of {', '.join(GRAPHS)}, got {graph!r}")
    program = GRAPHS[graph](direction, token_count, hidden_size, num_streams, **options)
    if wave_tiles is not None:
        program = _in_waves(program, wave_tiles)
    verify(program)
    return Candidate({**options, "wave_tiles": wave_tiles}, program, simulate(program, machine))


def _in_waves(program: Program, wave_tiles: int) -> Program:
    """A fixed graph with another wave size; its first stage (post, init) stays in front of the waves."""
    names = [s.name for s in program.stages if s.core_type == TaskAiCoreType.TASK_AICORE_VECTOR]
    rows = wave_tiles * program.geometry["token_tile"]
    if program.direction == "forward":
        post, norm_cast, input_mix, mapping, rms_norm = names
        return program.reordered([[post], [norm_cast, input_mix, rms_norm], [mapping]], rows)
    init, rms, prev_a, prev_x = names
    # The last stage waits for a macro-tile on the cube workers, so it runs a wave behind.
    return program.reordered([[init], [rms, prev_a, (prev_x, 1)]], rows)


def _options(graph: str, direction: str, workers: int) -> Iterator[dict[str, Any]]:
    """What the search tries."""
    if graph == "fixed":
        for tile in (32, 64, 128):
            yield {"token_tile": tile}
            for tiles in (workers // 2, workers, 2 * workers):
                yield {"token_tile": tile, "wave_tiles": max(1, tiles)}
        return
    space: dict[str, Any] = _TILED_FORWARD if direction == "forward" else _TILED_BACKWARD
    for tile in space["token_tile"]:
        for rows in space["group_rows"]:
            for parts in space["parts"]:
                for wave in space["wave_rows"]:
                    yield {"token_tile": tile, "group_rows": rows, "parts": parts, "wave_rows": wave}


def search(
    graph: str,
    direction: str,
    token_count: int,
    hidden_size: int,
    num_streams: int = 4,
    *,
    machine: Machine = H200,
    **workers: Any,
) -> list[Candidate]:
    """Plans over token tiles and waves, the one with the shortest simulated run first.

    Combinations that do not fit (a tile beyond the staging ring, an order that would deadlock) are left out.

    Raises:
        InputError: nothing fits, or bad sizes.
    """
    found: list[Candidate] = []
    refused = ""
    total = workers.get("mixed_workers") or workers["num_cube_workers"] + workers["num_vector_workers"]
    for options in _options(graph, direction, total):
        try:
            candidate = make_plan(
                graph, direction, token_count, hidden_size, num_streams, machine=machine, **workers, **options
            )
        except (InputError, ScheduleError) as error:
            refused = str(error)
            continue
        found.append(candidate)
    if not found:
        raise InputError(f"search: expected sizes that some plan fits, got none; the last one: {refused}")
    return sorted(found, key=lambda candidate: candidate.simulation.makespan)


def stage_rows(candidate: Candidate) -> list[tuple[str, str, int, int, str, float]]:
    """For each stage: name, workers, tasks, rows of a task, the event its first task waits for, mean
    microseconds."""
    program, simulation = candidate.program, candidate.simulation
    rows = []
    for stage in program.stages:
        part = slice(stage.first_task, stage.first_task + stage.task_count)
        head = program.tasks[stage.first_task]
        mean = float((simulation.end[part] - simulation.start[part]).mean())
        role = "cube" if stage.core_type == TaskAiCoreType.TASK_AICORE_CUBE else "vector"
        waits = program.describe_event(int(head["dependent_event"]))
        rows.append((stage.name, role, stage.task_count, int(head["task_split_value"]), waits, mean))
    return rows


def critical_stages(simulation: Simulation) -> list[tuple[str, int, float]]:
    """The critical path, neighbours of one stage joined: name, tasks, microseconds."""
    program = simulation.program
    joined: list[tuple[str, int, float]] = []
    for task in simulation.critical_path:
        name = program.stages[program.stage_of_task[task]].name
        length = float(simulation.end[task] - simulation.start[task])
        if joined and joined[-1][0] == name:
            joined[-1] = (name, joined[-1][1] + 1, joined[-1][2] + length)
        else:
            joined.append((name, 1, length))
    return joined


def summary(candidate: Candidate) -> dict[str, Any]:
    """The numbers of a plan, ready for JSON."""
    program, simulation = candidate.program, candidate.simulation
    return {
        "graph": program.graph,
        "direction": program.direction,
        "digest": program.digest,
        "geometry": program.geometry,
        "workers": program.workers,
        "tasks": program.task_count,
        "events": program.event_count,
        "event_capacity": program.event_capacity,
        "machine": simulation.machine.name,
        "makespan_us": round(simulation.makespan, 1),
        "dram_units": round(simulation.units, 2),
        "l2_hit_share": round(simulation.l2_hit_share, 3),
        "live_megabytes": round(simulation.live_bytes / 1e6, 1),
        "idle_share": {role: round(share, 3) for role, share in simulation.idle_share.items()},
    }


def dag_svg(program: Program) -> str:
    """The stages and the events between them as an SVG picture: boxes are stages, arrows are waits."""
    columns = _columns(program)
    width, height, gap_x, gap_y, margin = 210, 64, 84, 28, 20
    place = {
        name: (margin + column * (width + gap_x), margin + row * (height + gap_y))
        for column, names in enumerate(columns)
        for row, name in enumerate(names)
    }
    full_width = 2 * margin + len(columns) * (width + gap_x) - gap_x
    full_height = 2 * margin + max(map(len, columns)) * (height + gap_y) - gap_y
    parts = [_SVG_HEAD.format(width=full_width, height=full_height)]
    for source, target, event in _stage_edges(program):
        (x0, y0), (x1, y1) = place[source], place[target]
        back = x1 <= x0  # a slot that is used again: an arrow back, below the boxes
        from_x, from_y = (x0 + width / 2, y0 + height) if back else (x0 + width, y0 + height / 2)
        to_x, to_y = (x1 + width / 2, y1 + height) if back else (x1, y1 + height / 2)
        mid_x, mid_y = (from_x + to_x) / 2, (from_y + to_y) / 2 + (24 if back else 0)
        text_x, text_y = (from_x - width / 4, from_y + 20) if back else (mid_x, mid_y - 4)
        parts.append(
            f'<path d="M{from_x:g},{from_y:g} Q{mid_x:g},{mid_y:g} {to_x:g},{to_y:g}" '
            'fill="none" stroke="#555" marker-end="url(#tip)"/>'
            f'<text x="{text_x:g}" y="{text_y:g}" text-anchor="middle" font-size="9" fill="#555">'
            f"{escape(event)}</text>"
        )
    for stage in program.stages:
        x, y = place[stage.name]
        cube = stage.core_type == TaskAiCoreType.TASK_AICORE_CUBE
        rows = int(program.tasks["task_split_value"][stage.first_task])
        note = f"{stage.task_count} tasks" + (f" x {rows} tokens" if rows else "")
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{"#fde7c8" if cube else "#dbe9f6"}" '
            'stroke="#333"/>'
            f'<text x="{x + width / 2:g}" y="{y + 26}" text-anchor="middle">{escape(stage.name)}</text>'
            f'<text x="{x + width / 2:g}" y="{y + 46}" text-anchor="middle" fill="#333">'
            f"{'cube' if cube else 'vector'}, {escape(note)}</text>"
        )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _stage_edges(program: Program) -> list[tuple[str, str, str]]:
    """(producer stage, waiting stage, event name) without repeats, in task order."""
    tasks = program.tasks
    producers: dict[int, set[int]] = {}
    for stage, event in zip(program.stage_of_task.tolist(), tasks["trigger_event"].tolist(), strict=True):
        producers.setdefault(event, set()).add(stage)
    names: dict[int, str] = {}
    for part in program.events:
        names |= dict.fromkeys(range(part.base, part.base + part.count), part.name)
    found: dict[tuple[str, str, str], None] = {}
    for stage, event in zip(program.stage_of_task.tolist(), tasks["dependent_event"].tolist(), strict=True):
        for source in sorted(producers.get(event, ())):
            found[program.stages[source].name, program.stages[stage].name, names.get(event, "")] = None
    return list(found)


def _columns(program: Program) -> list[list[str]]:
    """Stages by their distance from the first ones, in task order (which is topological)."""
    order = {stage.name: index for index, stage in enumerate(program.stages)}
    depth = dict.fromkeys(order, 0)
    for source, target, _ in sorted(_stage_edges(program), key=lambda edge: order[edge[1]]):
        if order[source] < order[target]:
            depth[target] = max(depth[target], depth[source] + 1)
    return [[name for name in order if depth[name] == level] for level in range(max(depth.values()) + 1)]
