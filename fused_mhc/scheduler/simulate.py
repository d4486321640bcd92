"""A cost model: how long a Program takes, who idles, and what leaves the L2 cache.

Bytes come from the accesses of the Program: a read that finds its bytes in a least-recently-used L2 costs L2
bandwidth, any other access DRAM bandwidth; each worker has an even share of both. A measured time of a stage
replaces that. Numbers of a model rank schedules; they are no measurements.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fused_mhc.errors import InputError, ScheduleError
from fused_mhc.scheduler.event import EVENT_INVALID_ID
from fused_mhc.scheduler.program import READ, WRITE, Program, cut
from fused_mhc.scheduler.task import TaskType

__all__ = ["H200", "Machine", "Simulation", "simulate"]

_MAPPINGS = (
    TaskType.TASK_MHC_MAPPING,
    TaskType.TASK_MHC_GRAD_PREV_A_AND_MAPPING,
    TaskType.TASK_TILE_MAPPING,
    TaskType.TASK_TILE_MAPPING_GRAD,
)


@dataclass(frozen=True)
class Machine:
    """What the model knows of a device; bandwidths in bytes a microsecond."""

    name: str
    dram_bandwidth: float
    l2_bandwidth: float
    l2_bytes: int
    task_us: float
    mapping_us: float


#: Copy bandwidth, usable part of the L2, cost of fetching a task and releasing an event, 20 Sinkhorn
#: iterations.
H200 = Machine(
    "H200", dram_bandwidth=4.1e6, l2_bandwidth=8.0e6, l2_bytes=50_000_000, task_us=1.0, mapping_us=7.0
)


@dataclass(frozen=True, eq=False)
class Simulation:
    """One simulated run; arrays have one entry for each task, times are microseconds.

    Attributes:
        worker: who ran it.
        ready: when its worker had nothing else to do.
        start, end: when it ran.
        idle_share: role -> part of the makespan in which its workers waited or were done.
        dram_bytes: read from and written back to DRAM.
        l2_hit_share: part of the bytes read that the L2 held.
        live_bytes: most bytes at one time that were touched and would be touched again.
        critical_path: tasks, first to last, each started by the end of the one before it.
    """

    program: Program
    machine: Machine
    worker: np.ndarray = field(repr=False)
    ready: np.ndarray = field(repr=False)
    start: np.ndarray = field(repr=False)
    end: np.ndarray = field(repr=False)
    idle_share: dict[str, float]
    dram_bytes: int
    l2_hit_share: float
    live_bytes: int
    critical_path: list[int] = field(repr=False)

    @property
    def makespan(self) -> float:
        """From the launch to the last end, in microseconds."""
        return float(self.end.max())

    @property
    def units(self) -> float:
        """DRAM bytes in units of one stream's values (T x C elements)."""
        stream = self.program.buffer("residual")
        unit = stream.shape[0] * stream.shape[2] * stream.item_size
        return self.dram_bytes / unit


class _Cache:
    """Least-recently-used cache of pieces; dirty ones are written back when they leave.

    What only one access touches passes by it: kernels mark such loads and stores as evict-first.
    """

    def __init__(self, capacity: int, once: list[bool]) -> None:
        self.capacity, self.once, self.used = capacity, once, 0
        self.pieces: OrderedDict[int, tuple[int, bool]] = OrderedDict()
        self.read_bytes = self.hit_bytes = self.missed_bytes = self.written_bytes = 0

    def touch(self, piece: int, size: int, mode: int) -> bool:
        """Bring a piece in; True for a read that finds it there."""
        if self.once[piece]:
            if mode & READ:
                self.read_bytes += size
                self.missed_bytes += size
            self.written_bytes += size if mode & WRITE else 0
            return False
        known = self.pieces.pop(piece, None)
        hit = known is not None
        dirty = mode & WRITE != 0 or (known is not None and known[1])
        self.pieces[piece] = (size, dirty)
        if not hit:
            self.used += size
            while self.used > self.capacity and len(self.pieces) > 1:
                _, (old_size, old_dirty) = self.pieces.popitem(last=False)
                self.used -= old_size
                self.written_bytes += old_size if old_dirty else 0
        if mode & READ:
            self.read_bytes += size
            self.hit_bytes += size if hit else 0
            self.missed_bytes += 0 if hit else size
        return hit and mode & READ != 0

    def flush(self) -> None:
        """Write back what is still dirty."""
        self.written_bytes += sum(size for size, dirty in self.pieces.values() if dirty)


def simulate(
    program: Program, machine: Machine = H200, *, stage_us: Mapping[str, float] | None = None
) -> Simulation:
    """Run the in-order queues of a Program on paper.

    Args:
        program: a proven Program.
        machine: bandwidths, cache size and latencies.
        stage_us: measured microseconds of one task, by stage name; replaces the model for that stage.

    Raises:
        InputError: ``stage_us`` names no stage of the Program, or a time is not positive.
        ScheduleError: the queues deadlock.
    """
    measured = _measured(program, stage_us or {})
    pieces, once = _pieces(program)
    dram, cached = machine.dram_bandwidth / program.workers, machine.l2_bandwidth / program.workers
    cache = _Cache(machine.l2_bytes, once)
    depends = program.tasks["dependent_event"].tolist()
    triggers = program.tasks["trigger_event"].tolist()
    latency = (
        np.where(np.isin(program.tasks["task_type"], _MAPPINGS), machine.mapping_us, 0.0) + machine.task_us
    )
    count = program.task_count
    remaining, fired_by = program.triggers.tolist(), [-1] * program.event_count
    queues = [[queue.tolist() for queue in worker] for worker in program.queues_of_workers()]
    heads = [[0] * len(worker) for worker in queues]
    last_of_worker = [-1] * len(queues)
    ready, start, end = (np.zeros(count) for _ in range(3))
    ran_on = np.full(count, -1)
    cause = np.full(count, -1)
    idle_since = [0.0] * len(queues)
    waiting: dict[int, set[int]] = {}
    # (time, order, worker, task that ends then or -1); the order keeps equal times deterministic.
    agenda: list[tuple[float, int, int, int]] = [(0.0, worker, worker, -1) for worker in range(len(queues))]
    issued = len(agenda)
    busy = [False] * len(queues)
    while agenda:
        now, _, worker, ended = heapq.heappop(agenda)
        if ended >= 0:
            busy[worker], idle_since[worker], last_of_worker[worker] = False, now, ended
            event = triggers[ended]
            remaining[event] -= 1
            if remaining[event] == 0:
                fired_by[event] = ended
                for other in sorted(waiting.pop(event, ())):
                    heapq.heappush(agenda, (now, issued, other, -1))
                    issued += 1
        if busy[worker]:
            continue
        for slot, queue in enumerate(queues[worker]):
            at = heads[worker][slot]
            if at == len(queue):
                continue
            task = queue[at]
            event = depends[task]
            if event != EVENT_INVALID_ID and remaining[event] > 0:
                waiting.setdefault(event, set()).add(worker)
                continue
            heads[worker][slot] += 1
            busy[worker] = True
            ready[task], start[task], ran_on[task] = idle_since[worker], now, worker
            waited = event != EVENT_INVALID_ID and now > idle_since[worker]
            cause[task] = fired_by[event] if waited else last_of_worker[worker]
            end[task] = now + _duration(pieces[task], cache, dram, cached, latency[task], measured[task])
            heapq.heappush(agenda, (float(end[task]), issued, worker, task))
            issued += 1
            break
    if (ran_on < 0).any():
        stuck = int(np.flatnonzero(ran_on < 0)[0])
        raise ScheduleError(f"{program.describe_task(stuck)} never ran: the queues deadlock")
    cache.flush()
    return Simulation(
        program=program,
        machine=machine,
        worker=ran_on,
        ready=ready,
        start=start,
        end=end,
        idle_share=_idle_share(program, ran_on, start, end),
        dram_bytes=cache.missed_bytes + cache.written_bytes,
        l2_hit_share=cache.hit_bytes / max(cache.read_bytes, 1),
        live_bytes=_live_bytes(pieces, start, end),
        critical_path=_critical_path(cause, end),
    )


_Pieces = list[list[tuple[int, int, int]]]  # of each task: (piece id, bytes, mode)


def _measured(program: Program, stage_us: Mapping[str, float]) -> list[float]:
    """Measured time of every task, 0 where there is none."""
    names = {stage.name: stage for stage in program.stages}
    result = [0.0] * program.task_count
    for name, value in stage_us.items():
        if name not in names or not value > 0:
            raise InputError(
                f"stage_us: expected positive times of {', '.join(names)}, got {name!r}: {value!r}"
            )
        stage = names[name]
        result[stage.first_task : stage.first_task + stage.task_count] = [float(value)] * stage.task_count
    return result


def _pieces(program: Program) -> tuple[_Pieces, list[bool]]:
    """The pieces each task touches, and for each piece whether only one access touches it."""
    table = program.accesses
    result: _Pieces = [[] for _ in range(program.task_count)]
    once: list[bool] = []
    base = 0
    for index in range(len(program.buffers)):
        rows = np.flatnonzero(table.buffer == index)
        if not rows.size:
            continue
        points, owner, piece = cut(table.start[rows], table.stop[rows])
        tasks, modes = table.task[rows][owner].tolist(), table.mode[rows][owner].tolist()
        sizes = np.diff(points)[piece].tolist()
        for task, number, size, mode in zip(tasks, (piece + base).tolist(), sizes, modes, strict=True):
            result[task].append((number, size, mode))
        once += (np.bincount(piece, minlength=len(points)) == 1).tolist()
        base += len(points)
    return result, once


def _duration(
    pieces: list[tuple[int, int, int]],
    cache: _Cache,
    dram: float,
    cached: float,
    latency: float,
    measured: float,
) -> float:
    """Time of one task; the cache moves on either way."""
    from_dram = from_l2 = 0
    for piece, size, mode in pieces:
        if cache.touch(piece, size, mode):
            from_l2 += size
        else:
            from_dram += size
    return measured or latency + from_dram / dram + from_l2 / cached


def _idle_share(program: Program, worker: np.ndarray, start: np.ndarray, end: np.ndarray) -> dict[str, float]:
    makespan = float(end.max())
    busy = np.bincount(worker, end - start, minlength=program.workers)
    if program.mixed_workers:
        roles = {"mixed": slice(0, program.workers)}
    else:
        roles = {"cube": slice(0, program.num_cube_workers), "vector": slice(program.num_cube_workers, None)}
    return {role: 1.0 - float(busy[part].mean()) / makespan for role, part in roles.items()}


def _live_bytes(pieces: _Pieces, start: np.ndarray, end: np.ndarray) -> int:
    """Most bytes that were touched and would be touched again, at any one time."""
    first: dict[int, tuple[float, int]] = {}
    last: dict[int, tuple[float, int]] = {}
    for task, touched in enumerate(pieces):
        for piece, size, _ in touched:
            if piece not in first or start[task] < first[piece][0]:
                first[piece] = (float(start[task]), task)
            if piece not in last or end[task] > last[piece][0]:
                last[piece] = (float(end[task]), size)
    changes = []
    for piece, (begin, _) in first.items():
        finish, size = last[piece]
        changes += [(begin, size), (finish, -size)]
    changes.sort()
    live = np.cumsum([size for _, size in changes])
    return int(live.max()) if len(live) else 0


def _critical_path(cause: np.ndarray, end: np.ndarray) -> list[int]:
    """Back from the task that ended last to the one that nothing held up."""
    task = int(end.argmax())
    path = [task]
    while cause[task] >= 0:
        task = int(cause[task])
        path.append(task)
    return path[::-1]
