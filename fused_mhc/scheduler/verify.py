"""The proof before a launch: :func:`verify` finds what is wrong with a Program, without running it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from fused_mhc.errors import ScheduleError
from fused_mhc.scheduler.event import EVENT_INVALID_ID, MAX_EVENT_CAPACITY
from fused_mhc.scheduler.program import READ, WRITE, Program, cut
from fused_mhc.scheduler.task import MAX_TASK_NUM, TaskAiCoreType, TaskType

__all__ = ["EventOrder", "check_queues", "event_order", "verify"]

_CORES = (TaskAiCoreType.TASK_AICORE_CUBE, TaskAiCoreType.TASK_AICORE_VECTOR)


@dataclass(frozen=True)
class EventOrder:
    """What events alone say about the order of tasks.

    ``level[t]`` rises strictly along every chain of events, so sorting by it gives an order all chains agree
    with; ``ancestors[e, d]`` (bits, packed along the second axis) says that ``d`` has fired whenever ``e``
    has.
    """

    level: np.ndarray
    ancestors: np.ndarray

    def before(self, trigger: np.ndarray, depend: np.ndarray) -> np.ndarray:
        """Whether a task that triggers ``trigger`` surely ended when one that waits for ``depend`` starts."""
        waits = depend != EVENT_INVALID_ID
        safe = np.where(waits, depend, 0)
        bits = self.ancestors[safe, trigger >> 3] >> (trigger & 7).astype(np.uint8)
        return waits & (bits & 1).astype(bool)


def verify(program: Program) -> None:
    """Prove that a Program can run: limits, queues, trigger counts, no cycle, no race, no read before a
    write, every output written, an epilogue that makes every result, and no deadlock of its in-order queues.

    Two tasks that events leave unordered may not touch the same bytes unless both only read; the order of a
    queue does not count, so any executor that respects events gives the same bytes.

    Raises:
        ScheduleError: what is wrong, with the task, the event and the numbers.
    """
    _check_limits(program)
    _check_queue_entries(program)
    _check_triggers(program)
    order = event_order(program)
    _check_accesses(program, order)
    _check_epilogue(program)
    check_queues(program)


def _check_limits(program: Program) -> None:
    count, config = program.task_count, program.config
    if not 0 < count <= MAX_TASK_NUM:
        raise ScheduleError(f"task_num: expected 1..{MAX_TASK_NUM}, got {count}")
    if not 0 < program.event_count <= program.event_capacity <= MAX_EVENT_CAPACITY:
        raise ScheduleError(
            f"event_count: expected 1..{program.event_capacity} (capacity, at most {MAX_EVENT_CAPACITY}), "
            f"got {program.event_count}"
        )
    workers = (program.num_cube_workers, program.num_vector_workers, program.mixed_workers)
    if any(number is not None and number <= 0 for number in workers):
        raise ScheduleError(f"workers: expected positive counts (cube, vector, mixed or None), got {workers}")
    tasks = program.tasks
    for name, allowed in (("task_type", list(TaskType)), ("task_aicore_type", list(_CORES))):
        wrong = np.flatnonzero(~np.isin(tasks[name], allowed))
        if wrong.size:
            task = int(wrong[0])
            raise ScheduleError(
                f"task {task}: {name} {int(tasks[name][task])} is not one of {[int(x) for x in allowed]}"
            )
    for name in ("dependent_event", "trigger_event"):
        events = tasks[name]
        wrong = np.flatnonzero(
            (events >= program.event_count) & ~((name == "dependent_event") & (events == EVENT_INVALID_ID))
        )
        if wrong.size:
            task = int(wrong[0])
            raise ScheduleError(
                f"{program.describe_task(task)}: {name} {int(events[task])} is past the {program.event_count} events "
                f"in use (capacity {program.event_capacity})"
            )
    wrong = np.flatnonzero(tasks["task_index"] >= tasks["task_split_num"])
    if wrong.size:
        task = int(wrong[0])
        raise ScheduleError(
            f"{program.describe_task(task)}: task_index {int(tasks['task_index'][task])} is not below task_split_num "
            f"{int(tasks['task_split_num'][task])}"
        )
    covered = np.zeros(count, np.int64)
    for stage in program.stages:
        covered[stage.first_task : stage.first_task + stage.task_count] += 1
    if (covered != 1).any() or sum(stage.task_count for stage in program.stages) != count:
        raise ScheduleError(
            f"stages: expected each of {count} tasks in one stage, got counts {np.unique(covered)}"
        )
    if list(config.task_index_num)[2:] != [0, 0]:
        raise ScheduleError(f"task_index_num: expected no mix tasks, got {list(config.task_index_num)}")


def _check_queue_entries(program: Program) -> None:
    """Each task stands exactly once, in the queue of its core type."""
    for core in _CORES:
        queue = program.queue(core)
        wanted = np.flatnonzero(program.tasks["task_aicore_type"] == core)
        if np.array_equal(np.sort(queue), wanted):
            continue
        seen = np.bincount(queue[(queue >= 0) & (queue < program.task_count)], minlength=program.task_count)
        expected = np.zeros(program.task_count, np.int64)
        expected[wanted] = 1
        wrong = np.flatnonzero(seen != expected)
        if not wrong.size:
            raise ScheduleError(f"{core.name} queue: an entry is outside 0..{program.task_count - 1}")
        task = int(wrong[0])
        raise ScheduleError(
            f"{core.name} queue: expected {program.describe_task(task)} {int(expected[task])} time(s), "
            f"got it {int(seen[task])} time(s)"
        )


def _check_triggers(program: Program) -> None:
    """The trigger count of every event equals its producers; what is waited for has some."""
    tasks, triggers = program.tasks, program.triggers
    producers = np.bincount(tasks["trigger_event"], minlength=program.event_count)
    wrong = np.flatnonzero(producers != triggers)
    if wrong.size:
        event = int(wrong[0])
        who = "no task waits for it"
        for verb, field in (("waits for", "dependent_event"), ("triggers", "trigger_event")):
            found = np.flatnonzero(tasks[field] == event)
            who = f"{program.describe_task(int(found[0]))} {verb} it" if found.size else who
        raise ScheduleError(
            f"{program.describe_event(event)}: trigger count {int(triggers[event])}, but {int(producers[event])} "
            f"task(s) trigger it ({who})"
        )
    depends = tasks["dependent_event"]
    waiting = np.flatnonzero(depends != EVENT_INVALID_ID)
    orphans = waiting[producers[depends[waiting]] == 0]
    if orphans.size:
        task = int(orphans[0])
        raise ScheduleError(
            f"{program.describe_task(task)} waits for {program.describe_event(int(depends[task]))}, "
            "which no task triggers (0 producers)"
        )


def event_order(program: Program) -> EventOrder:
    """The order events give, see :class:`EventOrder`.

    Raises:
        ScheduleError: events wait for each other in a circle.
    """
    tasks, count = program.tasks, program.event_count
    depends, triggers = tasks["dependent_event"], tasks["trigger_event"]
    waiting = depends != EVENT_INVALID_ID
    edges = np.unique(depends[waiting].astype(np.int64) * count + triggers[waiting])
    sources, targets = (edges // count).tolist(), (edges % count).tolist()
    successors: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for source, target in zip(sources, targets, strict=True):
        successors[source].append(target)
        missing[target] += 1

    depth = [0] * count
    ancestors = [1 << event for event in range(count)]
    ready = deque(event for event in range(count) if missing[event] == 0)
    done = 0
    while ready:
        event = ready.popleft()
        done += 1
        bits, below = ancestors[event], depth[event] + 1
        for target in successors[event]:
            ancestors[target] |= bits
            depth[target] = max(depth[target], below)
            missing[target] -= 1
            if missing[target] == 0:
                ready.append(target)
    if done != count:
        raise ScheduleError(_describe_cycle(program, successors, missing))

    width = (count + 7) // 8
    packed = np.frombuffer(b"".join(bits.to_bytes(width, "little") for bits in ancestors), np.uint8)
    level = np.zeros(len(tasks), np.int64)
    level[waiting] = np.asarray(depth)[depends[waiting]] + 1
    return EventOrder(level, packed.reshape(count, width))


def _describe_cycle(program: Program, successors: list[list[int]], missing: list[int]) -> str:
    """Name one circle among the events that never fire."""
    stuck = {event for event, count in enumerate(missing) if count}
    predecessor = {target: source for source in stuck for target in successors[source] if target in stuck}
    event = next(iter(predecessor))
    seen: list[int] = []
    while event not in seen:
        seen.append(event)
        event = predecessor[event]
    circle = [*reversed(seen[seen.index(event) :])]
    tasks = program.tasks
    links = []
    for source, target in zip(circle, circle[1:] + circle[:1], strict=True):
        task = np.flatnonzero((tasks["dependent_event"] == source) & (tasks["trigger_event"] == target))[0]
        links.append(
            f"{program.describe_task(int(task))} waits for {program.describe_event(source)} and triggers "
            f"{program.describe_event(target)}"
        )
    return "events wait for each other in a circle: " + "; ".join(links)


def _check_accesses(program: Program, order: EventOrder) -> None:
    """No race, no read before a write, no write to an input, every output and partial sum written whole."""
    table = program.accesses
    _check_bounds(program)
    by_buffer = np.argsort(table.buffer, kind="stable")
    borders = np.searchsorted(table.buffer[by_buffer], np.arange(len(program.buffers) + 1))
    for index, buffer in enumerate(program.buffers):
        rows = by_buffer[borders[index] : borders[index + 1]]
        task, mode = table.task[rows], table.mode[rows]
        writes = mode & WRITE != 0
        if buffer.role in ("input", "result"):
            touched = rows[writes] if buffer.role == "input" else rows
            if touched.size:
                raise ScheduleError(
                    f"{program.describe_task(int(table.task[touched[0]]))} touches {buffer.name}, "
                    f"a buffer of role {buffer.role}, in a way that role forbids (mode {int(table.mode[touched[0]])})"
                )
            continue
        start, stop = table.start[rows], table.stop[rows]
        if buffer.role in ("output", "partial"):
            _check_coverage(program, index, start[writes], stop[writes])
        if rows.size:
            _check_buffer(program, order, index, task, start, stop, mode)


def _check_epilogue(program: Program) -> None:
    """Every result is the sum of one buffer of partial sums, and every such buffer makes one result."""
    shapes = {
        role: {b.name: b.shape for b in program.buffers if b.role == role} for role in ("partial", "result")
    }
    for step in program.epilogue:
        partial, result = shapes["partial"].pop(step.partial, None), shapes["result"].pop(step.result, None)
        if partial is None or result is None or partial[1:] != result:
            raise ScheduleError(
                f"epilogue: expected {step.result} (role result) as the sum over the first axis of {step.partial} (role "
                f"partial), each once, got shapes {result} and {partial}"
            )
    left = [*shapes["partial"], *shapes["result"]]
    if left:
        raise ScheduleError(
            f"epilogue: expected a sum for every partial and result buffer, got none for {left[0]}"
        )


def _check_bounds(program: Program) -> None:
    table = program.accesses
    sizes = np.array([buffer.nbytes for buffer in program.buffers], np.int64)
    known = (
        (table.buffer >= 0)
        & (table.buffer < len(sizes))
        & (table.task >= 0)
        & (table.task < program.task_count)
    )
    size = sizes[np.where(known, table.buffer, 0)]
    good = known & (table.start >= 0) & (table.start < table.stop) & (table.stop <= size)
    good &= np.isin(table.mode, (READ, WRITE, READ | WRITE))
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        name = program.buffers[table.buffer[row]].name if known[row] else f"buffer {int(table.buffer[row])}"
        raise ScheduleError(
            f"{program.describe_task(int(table.task[row]))}: bytes {int(table.start[row])}..{int(table.stop[row])} of "
            f"{name} (mode {int(table.mode[row])}) are not a range inside its {int(size[row])} bytes"
        )


def _check_coverage(program: Program, index: int, start: np.ndarray, stop: np.ndarray) -> None:
    """Writes leave no byte of an output out."""
    buffer = program.buffers[index]
    by_start = np.argsort(start, kind="stable")
    reach = (
        np.concatenate([[0], np.maximum.accumulate(stop[by_start])]) if start.size else np.zeros(1, np.int64)
    )
    following = np.concatenate([start[by_start], [buffer.nbytes]])
    gaps = np.flatnonzero(following > reach)
    if gaps.size:
        gap = int(gaps[0])
        raise ScheduleError(
            f"{buffer.name} ({buffer.role}): no task writes bytes {int(reach[gap])}..{int(following[gap])} "
            f"of {buffer.nbytes}"
        )


def _check_buffer(
    program: Program,
    order: EventOrder,
    index: int,
    task: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    mode: np.ndarray,
) -> None:
    """One buffer, cut at every border of a range; in each piece the accesses stand in event order.

    It is enough to compare each access with the write before it and each read with the write after it: the
    rest follows, because "ends before" is transitive.
    """
    points, access, piece = cut(start, stop)
    who, how = task[access], mode[access]
    rank = np.lexsort((who, order.level[who], piece))
    piece, who, how = piece[rank], who[rank], how[rank]
    heads = np.flatnonzero(np.r_[True, (piece[1:] != piece[:-1]) | (who[1:] != who[:-1])])
    piece, who, how = piece[heads], who[heads], np.bitwise_or.reduceat(how, heads)

    place = np.arange(len(who))
    writes = how & WRITE != 0
    previous = np.r_[-1, np.maximum.accumulate(np.where(writes, place, -1))[:-1]]
    previous[(previous >= 0) & (piece[previous] != piece)] = -1
    following = np.minimum.accumulate(np.where(writes, place, len(who))[::-1])[::-1]
    following = np.r_[following[1:], len(who)]
    inside = following < len(who)
    inside[inside] = piece[following[inside]] == piece[inside]

    unwritten = np.flatnonzero((how & READ != 0) & (previous < 0))
    if unwritten.size:
        at = int(unwritten[0])
        raise ScheduleError(
            f"{program.describe_task(int(who[at]))} reads bytes {int(points[piece[at]])}..{int(points[piece[at] + 1])} "
            f"of {program.buffers[index].name} before any task writes them"
        )
    after = np.flatnonzero(previous >= 0)
    reads = np.flatnonzero(~writes & inside)
    earlier = np.concatenate([previous[after], reads])
    later = np.concatenate([after, following[reads]])
    depends, triggers = program.tasks["dependent_event"], program.tasks["trigger_event"]
    ordered = order.before(triggers[who[earlier]].astype(np.int64), depends[who[later]].astype(np.int64))
    if not ordered.all():
        at = int(np.flatnonzero(~ordered)[0])
        one, two = int(earlier[at]), int(later[at])
        verbs = {READ: "reads", WRITE: "writes", READ | WRITE: "reads and writes"}
        raise ScheduleError(
            f"{program.describe_task(int(who[one]))} {verbs[int(how[one])]} and {program.describe_task(int(who[two]))} "
            f"{verbs[int(how[two])]} bytes {int(points[piece[one]])}..{int(points[piece[one] + 1])} of "
            f"{program.buffers[index].name}, but no chain of events leads from "
            f"{program.describe_event(int(triggers[who[one]]))} to {program.describe_event(int(depends[who[two]]))}"
        )


def check_queues(program: Program) -> None:
    """Prove that the in-order queues cannot deadlock with the workers of this Program.

    Running a task never takes an event back, so if workers that always run what they can get stuck, every
    run does, and if they do not, none does.

    Raises:
        ScheduleError: which task waits for which event for ever, and how far its counter came.
    """
    depends = program.tasks["dependent_event"].tolist()
    triggers = program.tasks["trigger_event"].tolist()
    remaining = program.triggers.tolist()
    queues = [[queue.tolist() for queue in worker] for worker in program.queues_of_workers()]
    heads = [[0] * len(worker) for worker in queues]
    waiting: dict[int, set[int]] = {}
    ready = deque(range(len(queues)))
    done = 0
    while ready:
        worker = ready.popleft()
        progress = True
        while progress:
            progress = False
            for slot, queue in enumerate(queues[worker]):
                at = heads[worker][slot]
                if at == len(queue):
                    continue
                event = depends[queue[at]]
                if event != EVENT_INVALID_ID and remaining[event] > 0:
                    waiting.setdefault(event, set()).add(worker)
                    continue
                heads[worker][slot] += 1
                done += 1
                fired = triggers[queue[at]]
                remaining[fired] -= 1
                if remaining[fired] == 0:
                    ready.extend(sorted(waiting.pop(fired, ())))
                progress = True
                break
    if done == program.task_count:
        return
    for worker, worker_queues in enumerate(queues):
        for slot, queue in enumerate(worker_queues):
            if heads[worker][slot] < len(queue):
                task = queue[heads[worker][slot]]
                event = depends[task]
                total = int(program.triggers[event])
                raise ScheduleError(
                    f"worker {worker}: {program.describe_task(task)} waits for {program.describe_event(event)} for "
                    f"ever; it has {total - remaining[event]} of {total} triggers and every other worker waits too "
                    f"({done} of {program.task_count} tasks ran)"
                )
