"""The proof: every mutant of a good Program is caught, and the answer equals brute force on small ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fused_mhc.errors import ScheduleError
from fused_mhc.scheduler import (
    EVENT_INVALID_ID,
    AccessTable,
    Buffer,
    Program,
    RuntimeConfigC,
    check_queues,
    lower_mega_mhc,
    lower_tiled_mhc,
    verify,
)
from fused_mhc.scheduler.program import READ, WRITE
from fused_mhc.scheduler.runtime_config import queue_array, task_array, trigger_array
from fused_mhc.scheduler.task import TaskAiCoreType

KINDS = [("fixed", "forward"), ("fixed", "backward"), ("tiled", "forward"), ("tiled", "backward")]


@lru_cache(maxsize=64)
def good(kind: str, direction: str, tokens: int, streams: int, mixed: int | None) -> Program:
    """A small Program with several tiles and macro-tiles; hidden 96 gives the tiled graphs several slices."""
    if kind == "fixed":
        return lower_mega_mhc(
            direction, tokens, 96, streams, num_cube_workers=1, num_vector_workers=2, mixed_workers=mixed
        )
    rows = 16 if direction == "forward" else 64
    return lower_tiled_mhc(
        direction,
        tokens,
        96,
        streams,
        num_cube_workers=1,
        num_vector_workers=2,
        mixed_workers=mixed,
        group_rows=rows,
        parts=3,
    )


programs = st.builds(
    lambda kind, tokens, streams, mixed: good(*kind, tokens, streams, mixed),
    st.sampled_from(KINDS),
    st.integers(200, 420),
    st.sampled_from([2, 4]),
    st.sampled_from([None, 1, 3]),
)


def edited(program: Program, edit: Callable[[RuntimeConfigC], None]) -> Program:
    config = RuntimeConfigC.from_buffer_copy(program.table)
    edit(config)
    return replace(program, table=bytes(config))


def caught(program: Program, *words: str) -> None:
    with pytest.raises(ScheduleError) as error:
        verify(program)
    for word in words:
        assert word in str(error.value)


def events_of(program: Program) -> np.ndarray:
    """Events that some task triggers."""
    return np.flatnonzero(program.triggers > 0)


@given(programs)
def test_the_originals_are_good(program: Program) -> None:
    verify(program)


@given(programs, st.data())
def test_wrong_trigger_count(program: Program, data: st.DataObject) -> None:
    event = int(data.draw(st.sampled_from(events_of(program).tolist())))
    count = data.draw(st.integers(0, 50).filter(lambda c: c != program.triggers[event]))

    def edit(config: RuntimeConfigC) -> None:
        trigger_array(config)[event] = count

    caught(
        edited(program, edit),
        f"event {event}",
        f"trigger count {count}",
        f"{program.triggers[event]} task(s)",
    )


@given(programs, st.data())
def test_swapped_edge(program: Program, data: st.DataObject) -> None:
    """Two tasks of one stage wait for each other's event. (input_mix is left out: it reads new_residual, which every
    norm event says is whole, so a swap there changes no byte.)"""
    depends = program.tasks["dependent_event"]
    several = [
        stage
        for stage in program.stages
        if stage.name != "mhc_input_mix"
        and len(set(depends[stage.first_task : stage.first_task + stage.task_count].tolist())) > 1
    ]
    stage = data.draw(st.sampled_from(several))
    tasks = range(stage.first_task, stage.first_task + stage.task_count)
    one = data.draw(st.sampled_from(tasks))
    two = data.draw(st.sampled_from([task for task in tasks if depends[task] != depends[one]]))

    def edit(config: RuntimeConfigC) -> None:
        column = task_array(config)["dependent_event"]
        column[one], column[two] = depends[two], depends[one]

    caught(edited(program, edit))


@given(programs, st.data())
def test_task_that_waits_for_nothing(program: Program, data: st.DataObject) -> None:
    task = data.draw(
        st.sampled_from(np.flatnonzero(program.tasks["dependent_event"] != EVENT_INVALID_ID).tolist())
    )

    def edit(config: RuntimeConfigC) -> None:
        task_array(config)["dependent_event"][task] = EVENT_INVALID_ID

    caught(edited(program, edit))


@given(programs, st.data())
def test_overlapping_write(program: Program, data: st.DataObject) -> None:
    table = program.accesses
    sizes = np.array([buffer.nbytes for buffer in program.buffers])[table.buffer]
    whole = table.stop - table.start == sizes
    row = data.draw(st.sampled_from(np.flatnonzero((table.mode == WRITE) & ~whole).tolist()))
    more = data.draw(st.integers(1, 8))
    start, stop = table.start.copy(), table.stop.copy()
    if stop[row] < sizes[row]:
        stop[row] += min(more, sizes[row] - stop[row])
    else:
        start[row] -= min(more, start[row])
    caught(
        replace(program, accesses=AccessTable(table.task, table.buffer, start, stop, table.mode)),
        "chain of events",
    )


@given(st.integers(260, 420), st.sampled_from([2, 4]), st.data())
def test_ring_slot_reused_too_early(tokens: int, streams: int, data: st.DataObject) -> None:
    program = good("fixed", "forward", tokens, streams, None)
    slots, (stage,) = program.geometry["ring_slots"], [s for s in program.stages if s.name == "mhc_norm_cast"]
    tile = data.draw(st.integers(slots, stage.task_count - 1))
    task = stage.first_task + tile
    projection = next(part for part in program.events if part.name == "projection")
    wrong = data.draw(st.sampled_from([0, *(projection.base + t for t in range(tile - slots))]))

    def edit(config: RuntimeConfigC) -> None:
        task_array(config)["dependent_event"][task] = wrong

    caught(edited(program, edit), "staged", f"task {task}")


@given(programs, st.data())
def test_missing_producer(program: Program, data: st.DataObject) -> None:
    """A task triggers the last event instead of its own, and the counts are made to match."""
    tasks, final = program.tasks, program.events[-1].base
    task = data.draw(st.sampled_from(np.flatnonzero(tasks["trigger_event"] != final).tolist()))
    event = int(tasks["trigger_event"][task])

    def edit(config: RuntimeConfigC) -> None:
        task_array(config)["trigger_event"][task] = final
        trigger_array(config)[event] -= 1
        trigger_array(config)[final] += 1

    caught(edited(program, edit))


@given(programs, st.data())
def test_missing_write(program: Program, data: st.DataObject) -> None:
    table = program.accesses
    # What init clears is written twice on purpose; its other writer alone can go unnoticed.
    cleared = {program.buffer_index[b.name] for b in program.buffers if b.role == "partial"}
    rows = table.mode == WRITE
    if program.graph == "mega_mhc_grad":
        rows &= ~np.isin(table.buffer, list(cleared))
    if program.graph == "mega_mhc":  # a slot that another tile wrote before still holds bytes
        rows &= table.buffer != program.buffer_index["staged"]
    row = data.draw(st.sampled_from(np.flatnonzero(rows).tolist()))
    name = program.buffers[table.buffer[row]].name
    caught(replace(program, accesses=table.drop(np.arange(len(table)) == row)), name)


@given(programs)
def test_reversed_queue_deadlocks(program: Program) -> None:
    def edit(config: RuntimeConfigC) -> None:
        queue = queue_array(config, TaskAiCoreType.TASK_AICORE_VECTOR)
        queue[:] = queue[::-1].copy()

    mutant = edited(program, edit)
    mutant = replace(mutant, num_vector_workers=1, mixed_workers=1 if program.mixed_workers else None)
    caught(mutant, "for ever", "triggers")


@given(programs, st.data())
def test_queue_that_loses_a_task(program: Program, data: st.DataObject) -> None:
    core = data.draw(st.sampled_from([TaskAiCoreType.TASK_AICORE_CUBE, TaskAiCoreType.TASK_AICORE_VECTOR]))
    length = len(program.queue(core))
    assume(length > 1)
    at, other = data.draw(st.permutations(range(min(length, 30))))[:2]

    def edit(config: RuntimeConfigC) -> None:
        queue = queue_array(config, core)
        queue[at] = queue[other]

    caught(edited(program, edit), "queue: expected task", "time(s)")


@given(programs, st.data())
def test_event_past_the_capacity(program: Program, data: st.DataObject) -> None:
    task = data.draw(st.integers(0, program.task_count - 1))
    field = data.draw(st.sampled_from(["dependent_event", "trigger_event"]))
    event = data.draw(st.sampled_from([program.event_count, 1024, 4096, 2**31, 2**32 - 2]))
    assume(event >= program.event_count)

    def edit(config: RuntimeConfigC) -> None:
        task_array(config)[field][task] = event

    caught(edited(program, edit), f"task {task}", f"{field} {event}", str(program.event_capacity))
    with pytest.raises(ScheduleError, match="event_count: expected 1"):
        verify(replace(program, event_count=program.event_capacity + 1))


@given(programs, st.data())
def test_circle(program: Program, data: st.DataObject) -> None:
    """A task that others wait for waits for the last event, which waits for all."""
    final = program.events[-1].base
    task = data.draw(st.sampled_from(np.flatnonzero(program.tasks["trigger_event"] != final).tolist()))

    def edit(config: RuntimeConfigC) -> None:
        task_array(config)["dependent_event"][task] = final

    caught(edited(program, edit), "circle", f"event {final}")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("task_type", 0, "task_type 0 is not one of"),
        ("task_aicore_type", 3, "task_aicore_type 3 is not one of"),
        ("task_index", 10_000, "task_index 10000 is not below task_split_num"),
        ("trigger_event", EVENT_INVALID_ID, "trigger_event 4294967295 is past"),
    ],
)
def test_bad_fields(field: str, value: int, message: str) -> None:
    def edit(config: RuntimeConfigC) -> None:
        task_array(config)[field][3] = value

    caught(edited(good("fixed", "forward", 200, 2, None), edit), message, "task 3")


@pytest.mark.parametrize(
    "change",
    [{"num_cube_workers": 0}, {"num_vector_workers": -1}, {"mixed_workers": 0}, {"mixed_workers": -2}],
)
def test_bad_workers(change: dict[str, int]) -> None:
    caught(replace(good("fixed", "forward", 200, 2, None), **change), "workers: expected positive counts")  # type: ignore[arg-type]


def test_bad_epilogue() -> None:
    program = good("fixed", "backward", 200, 2, None)
    caught(replace(program, epilogue=program.epilogue[1:]), "epilogue: expected a sum for every partial")
    twice = (program.epilogue[0], *program.epilogue)
    caught(replace(program, epilogue=twice), "each once", program.epilogue[0].result)
    swapped = (replace(program.epilogue[0], result=program.epilogue[1].result), *program.epilogue[1:])
    caught(replace(program, epilogue=swapped), "as the sum over the first axis of partial_norm_weight")


def test_bad_ranges(make_program: Callable[..., Program]) -> None:
    buffers = [Buffer("a", (4,), "float32", "scratch"), Buffer("in", (4,), "float32", "input")]
    for row, words in (
        ((0, 0, 8, 20, WRITE), "not a range inside its 16 bytes"),
        ((0, 0, 8, 8, WRITE), "not a range"),
        ((0, 2, 0, 4, READ), "buffer 2"),
        ((5, 0, 0, 4, WRITE), "task 5 (outside the table)"),
        ((0, 0, 0, 4, 4), "mode 4"),
        ((0, 1, 0, 4, WRITE), "role input"),
        ((0, 0, 0, 4, READ), "before any task writes them"),
        ((0, 0, 0, 4, READ | WRITE), "before any task writes them"),
    ):
        caught(make_program([EVENT_INVALID_ID], [0], [row], buffers), words)
    whole = make_program([EVENT_INVALID_ID], [0], [(0, 1, 0, 16, READ)], buffers)
    verify(whole)
    output = [Buffer("out", (4,), "float32", "output")]
    caught(
        make_program([EVENT_INVALID_ID], [0], [(0, 0, 0, 12, WRITE)], output),
        "no task writes bytes 12..16 of 16",
    )
    caught(make_program([EVENT_INVALID_ID], [0], [], output), "no task writes bytes 0..16 of 16")


def reachable(depends: list[int], triggers: list[int]) -> np.ndarray:
    """``[a, b]``: task ``a`` surely ended when ``b`` starts, by repeated multiplication."""
    count = len(depends)
    step = np.array([[depends[b] == triggers[a] for b in range(count)] for a in range(count)], bool)
    closure = step.copy()
    for _ in range(count):
        closure |= (closure.astype(int) @ step.astype(int)) > 0
    return closure


@st.composite
def random_tasks(draw: st.DrawFn) -> tuple[list[int], list[int], list[tuple[int, int, int, int, int]]]:
    """Up to eight tasks with random events (often cyclic, often unordered) and random accesses."""
    count = draw(st.integers(1, 8))
    triggers = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    choices = [EVENT_INVALID_ID, *sorted(set(triggers))]
    depends = draw(st.lists(st.sampled_from(choices), min_size=count, max_size=count))
    access = st.tuples(
        st.integers(0, count - 1),
        st.just(0),
        st.integers(0, 5),
        st.integers(1, 6),
        st.sampled_from([READ, WRITE, WRITE]),
    ).filter(lambda row: row[2] < row[3])
    return depends, triggers, draw(st.lists(access, min_size=1, max_size=8))


def brute_force(
    depends: list[int], triggers: list[int], accesses: list[tuple[int, int, int, int, int]]
) -> bool:
    """Whether the tasks are free of circles, races and reads of unwritten bytes, one byte at a time."""
    before = reachable(depends, triggers)
    if before.diagonal().any():
        return False
    for byte in range(6):
        touched: dict[int, int] = {}
        for task, _, start, stop, mode in accesses:
            if start <= byte < stop:
                touched[task] = touched.get(task, 0) | mode
        for one, how in touched.items():
            if how & READ and not any(m & WRITE and before[t, one] for t, m in touched.items()):
                return False
            for two, also in touched.items():
                if one != two and (how | also) & WRITE and not (before[one, two] or before[two, one]):
                    return False
    return True


@settings(max_examples=300)
@given(random_tasks())
def test_equals_brute_force(
    make_program: Callable[..., Program],
    tasks: tuple[list[int], list[int], list[tuple[int, int, int, int, int]]],
) -> None:
    program = make_program(*tasks, [Buffer("a", (3,), "bfloat16", "scratch")], workers=8)
    try:
        verify(program)
        good = True
    except ScheduleError:
        good = False
    assert good == brute_force(*tasks)


def naive_run(program: Program) -> bool:
    """Run whatever can run until nothing changes; whether everything ran."""
    remaining = program.triggers.copy()
    queues = [[list(queue) for queue in worker] for worker in program.queues_of_workers()]
    moved = True
    while moved:
        moved = False
        for worker in queues:
            for queue in worker:
                if not queue:
                    continue
                depend = program.tasks["dependent_event"][queue[0]]
                if depend == EVENT_INVALID_ID or remaining[depend] <= 0:
                    remaining[program.tasks["trigger_event"][queue.pop(0)]] -= 1
                    moved = True
    return not any(queue for worker in queues for queue in worker)


@given(
    st.integers(70, 200),
    st.sampled_from(KINDS),
    st.sampled_from([None, 1, 2]),
    st.integers(1, 3),
    st.randoms(),
)
def test_deadlock_answer_equals_a_naive_run(
    tokens: int, kind: tuple[str, str], mixed: int | None, swaps: int, random: object
) -> None:
    def edit(config: RuntimeConfigC) -> None:
        queue = queue_array(config, TaskAiCoreType.TASK_AICORE_VECTOR)
        for _ in range(swaps):
            one, two = (random.randrange(len(queue)) for _ in range(2))  # type: ignore[attr-defined]
            queue[one], queue[two] = queue[two], queue[one]

    program = edited(good(*kind, tokens, 2, mixed), edit)
    try:
        check_queues(program)
        runs = True
    except ScheduleError:
        runs = False
    assert runs == naive_run(program)
