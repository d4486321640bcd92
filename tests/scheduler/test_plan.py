"""The cost model, plans and the search."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from fused_mhc.errors import InputError, ScheduleError
from fused_mhc.scheduler import EVENT_INVALID_ID, Program, lower_mega_mhc, lower_tiled_mhc, verify
from fused_mhc.scheduler.plan import GRAPHS, critical_stages, dag_svg, make_plan, search, stage_rows, summary
from fused_mhc.scheduler.simulate import H200, simulate

KINDS = [(graph, direction) for graph in GRAPHS for direction in ("forward", "backward")]
each = pytest.mark.parametrize(("graph", "direction"), KINDS)
ROLES = {"num_cube_workers": 2, "num_vector_workers": 4}


def lowered(graph: str, direction: str, **options: object) -> Program:
    return GRAPHS[graph](direction, 600, 256, 4, **{**ROLES, **options})


@each
@pytest.mark.parametrize("mixed", [None, 1, 6])
def test_a_simulated_run_is_legal(graph: str, direction: str, mixed: int | None) -> None:
    program = lowered(graph, direction, mixed_workers=mixed)
    run = simulate(program)
    tasks = program.tasks
    assert (run.end > run.start).all()
    assert (run.start >= run.ready).all()
    for task in range(program.task_count):
        event = tasks["dependent_event"][task]
        if event != EVENT_INVALID_ID:
            assert run.end[tasks["trigger_event"] == event].max() <= run.start[task]
    for worker, queues in enumerate(program.queues_of_workers()):
        mine = np.flatnonzero(run.worker == worker)
        assert sorted(mine.tolist()) == sorted(np.concatenate(queues).tolist())
        order = mine[np.argsort(run.start[mine], kind="stable")]
        assert (run.start[order][1:] >= run.end[order][:-1]).all()
        for queue in queues:
            assert [task for task in order.tolist() if task in set(queue.tolist())] == queue.tolist()
    assert run.makespan == run.end.max()
    path = run.critical_path
    assert run.end[path[-1]] == run.makespan
    assert run.start[path[0]] == 0
    assert all(run.end[a] == run.start[b] for a, b in pairwise(path))


def test_one_worker_takes_the_sum_of_all_tasks() -> None:
    program = lowered("fixed", "backward", mixed_workers=1)
    names = [stage.name for stage in program.stages]
    run = simulate(program, stage_us=dict.fromkeys(names, 3.0))
    assert run.makespan == pytest.approx(3.0 * program.task_count)
    assert run.idle_share == {"mixed": pytest.approx(0.0)}
    assert run.critical_path == sorted(range(program.task_count), key=lambda task: run.start[task])


def test_a_large_cache_leaves_only_what_must_move() -> None:
    """With an endless L2 the fixed forward graph moves each input and output once, and its scratch once."""
    program = lower_mega_mhc("forward", 600, 256, 4, **ROLES)
    run = simulate(program, replace(H200, l2_bytes=10**12))
    table = program.accesses
    touched = set(table.buffer.tolist())
    assert run.dram_bytes == sum(
        buffer.nbytes for i, buffer in enumerate(program.buffers) if i in touched
    ) - _padding(program)
    assert run.units > 10


def _padding(program: Program) -> int:
    """Rows of the staging ring that no tile of this size fills."""
    staged = program.buffer_index["staged"]
    return program.buffers[staged].nbytes - int(
        program.accesses.stop[program.accesses.buffer == staged].max()
    )


def test_the_cache_matters() -> None:
    program = lower_tiled_mhc(
        "backward", 8192, 5120, num_cube_workers=44, num_vector_workers=88, mixed_workers=132
    )
    small, large = (simulate(program, replace(H200, l2_bytes=size)) for size in (1_000_000, 10**10))
    assert small.dram_bytes > large.dram_bytes
    assert small.makespan > large.makespan
    assert small.l2_hit_share < large.l2_hit_share


def test_tiled_graphs_keep_data_in_the_cache() -> None:
    """8192 tokens, 5120 wide, 132 mixed workers: less than half of the time and traffic of the fixed graphs."""
    counts = {"num_cube_workers": 44, "num_vector_workers": 88, "mixed_workers": 132}
    for direction in ("forward", "backward"):
        fixed = simulate(lower_mega_mhc(direction, 8192, 5120, **counts))  # type: ignore[arg-type]
        tiled = simulate(lower_tiled_mhc(direction, 8192, 5120, **counts))  # type: ignore[arg-type]
        assert tiled.dram_bytes < 0.5 * fixed.dram_bytes
        assert tiled.makespan < 0.5 * fixed.makespan
        assert tiled.live_bytes < 0.5 * fixed.live_bytes


def test_a_window_leaves_only_what_must_move() -> None:
    """768 tokens in flight stay in an H200's L2: 10 units of traffic, and the logits and mixes."""
    counts = {"num_cube_workers": 44, "num_vector_workers": 88, "mixed_workers": 132}
    free, held = (
        simulate(lower_tiled_mhc("forward", 8192, 5120, group_rows=32, window_rows=rows, **counts))  # type: ignore[arg-type]
        for rows in (None, 768)
    )
    assert 10.0 < held.units < 10.3 < free.units


def test_simulate_refuses() -> None:
    program = lowered("fixed", "forward")
    with pytest.raises(
        InputError, match=r"stage_us: expected positive times of mhc_post, .*, got 'nothing': 1.0"
    ):
        simulate(program, stage_us={"nothing": 1.0})
    with pytest.raises(InputError, match="stage_us: expected positive times"):
        simulate(program, stage_us={"mhc_post": 0.0})
    names = ["mhc_mapping", "mhc_rms_norm", "mhc_input_mix", "mhc_norm_cast", "mhc_post"]
    with pytest.raises(ScheduleError, match="never ran: the queues deadlock"):
        simulate(program.reordered([[name] for name in names]))


@each
def test_plan_in_words(graph: str, direction: str) -> None:
    plan = make_plan(graph, direction, 600, 256, **ROLES)
    rows = stage_rows(plan)
    assert [row[0] for row in rows] == [stage.name for stage in plan.program.stages]
    assert sum(row[2] for row in rows) == plan.program.task_count
    numbers = json.loads(json.dumps(summary(plan)))
    assert numbers["tasks"] == plan.program.task_count
    assert numbers["digest"] == plan.program.digest
    assert sum(count for _, count, _ in critical_stages(plan.simulation)) == len(
        plan.simulation.critical_path
    )


@each
def test_search_finds_plans_that_are_proven_and_no_slower(graph: str, direction: str) -> None:
    found = search(graph, direction, 700, 512, **ROLES)
    spans = [candidate.simulation.makespan for candidate in found]
    assert spans == sorted(spans)
    assert spans[0] <= make_plan(graph, direction, 700, 512, **ROLES).simulation.makespan
    verify(found[0].program)
    again = search(graph, direction, 700, 512, **ROLES)
    assert [c.program.digest for c in again] == [c.program.digest for c in found]


def test_plan_refuses() -> None:
    with pytest.raises(InputError, match="graph: expected one of fixed, tiled, got 'other'"):
        make_plan("other", "forward", 600, 256, **ROLES)
    with pytest.raises(InputError, match="search: expected sizes that some plan fits"):
        search("fixed", "forward", 10**9, 256, **ROLES)


@each
def test_dag(graph: str, direction: str) -> None:
    program = lowered(graph, direction)
    root = ET.fromstring(dag_svg(program))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {stage.name for stage in program.stages} <= set(texts)
    arrows = [e for e in root.iter("{http://www.w3.org/2000/svg}path") if e.get("marker-end")]
    assert len(arrows) >= len(program.stages) - 1
