"""The table a device runtime reads, as ``ctypes`` structures, and what fills, reads and checks it."""

from __future__ import annotations

import ctypes

import numpy as np

from fused_mhc.errors import InputError
from fused_mhc.scheduler.event import EVENT_INVALID_ID, MAX_EVENT_CAPACITY
from fused_mhc.scheduler.graph import ComputeGraph
from fused_mhc.scheduler.split import TaskSplitValue
from fused_mhc.scheduler.task import MAX_TASK_NUM, QUEUE_CAPACITY, TaskAiCoreType, TaskType

__all__ = [
    "EVENT_WAITED",
    "EVENT_TERMINAL",
    "TASK_DTYPE",
    "EventDescC",
    "RuntimeConfigC",
    "TaskDescC",
    "append_tasks",
    "build_runtime_config",
    "event_descriptors",
    "load_runtime_config",
    "queue_array",
    "task_array",
    "trigger_array",
]

#: ``EventDescC.event_type``: tasks wait for it, or the launch ends with it.
EVENT_WAITED = 1
EVENT_TERMINAL = 2


class TaskDescC(ctypes.Structure):
    """One task.

    ``task_split_num`` is the number of tasks of its operator, ``task_split_value`` their rows (0 where a task
    is not a range of tokens), ``extra_value_2`` the dependency poll interval in microseconds; the other extra
    values belong to the opcode.
    """

    _fields_ = [
        (name, ctypes.c_uint32)
        for name in (
            "task_type",
            "task_aicore_type",
            "dependent_event",
            "trigger_event",
            "task_index",
            "task_split_num",
            "task_split_value",
            "extra_value_0",
            "extra_value_1",
            "extra_value_2",
            "extra_value_3",
            "extra_value_4",
        )
    ]


class EventDescC(ctypes.Structure):
    """One event: its kind, its trigger count, and the lowest and highest task that wait for it
    (``EVENT_INVALID_ID`` twice where none does)."""

    _fields_ = [
        (name, ctypes.c_uint32) for name in ("event_type", "num_triggers", "first_task_id", "last_task_id")
    ]


class RuntimeConfigC(ctypes.Structure):
    """The whole table: ``bytes(config)`` is what a device reads, :func:`load_runtime_config` the way back."""

    _fields_ = [
        ("task_num", ctypes.c_uint32),
        ("num_workers", ctypes.c_uint32),
        ("queue_capacity", ctypes.c_uint32),
        ("all_event_num_triggers", ctypes.c_int32 * MAX_EVENT_CAPACITY),
        ("all_tasks", TaskDescC * MAX_TASK_NUM),
        ("task_index_num", ctypes.c_int32 * 4),
        ("cube_task_indices", ctypes.c_int32 * MAX_TASK_NUM),
        ("vector_task_indices", ctypes.c_int32 * MAX_TASK_NUM),
        ("mix_task_indices", ctypes.c_int32 * MAX_TASK_NUM),
    ]


TASK_DTYPE = np.dtype([(field[0], "<u4") for field in TaskDescC._fields_])
_QUEUES = (
    (TaskAiCoreType.TASK_AICORE_CUBE, "cube_task_indices", "pre_cube_task_num"),
    (TaskAiCoreType.TASK_AICORE_VECTOR, "vector_task_indices", "pre_vector_task_num"),
)


def task_array(config: RuntimeConfigC, count: int | None = None) -> np.ndarray:
    """A writable view of the first ``count`` tasks (default: ``task_num``) with the field names of
    ``TaskDescC``."""
    return np.frombuffer(config.all_tasks, TASK_DTYPE)[: config.task_num if count is None else count]


def queue_array(config: RuntimeConfigC, core: TaskAiCoreType) -> np.ndarray:
    """A writable view of the used part of the cube or vector queue."""
    slot = 0 if core == TaskAiCoreType.TASK_AICORE_CUBE else 1
    _, name, _ = _QUEUES[slot]
    return np.frombuffer(getattr(config, name), "<i4")[: config.task_index_num[slot]]


def trigger_array(config: RuntimeConfigC, count: int = MAX_EVENT_CAPACITY) -> np.ndarray:
    """A writable view of the trigger counts of the first ``count`` events."""
    return np.frombuffer(config.all_event_num_triggers, "<i4")[:count]


def append_tasks(
    config: RuntimeConfigC,
    topology: TaskSplitValue,
    *,
    task_type: TaskType,
    core_type: TaskAiCoreType,
    dependent_event: int | np.ndarray,
    trigger_event: int | np.ndarray,
    task_num: int,
    split_value: int,
    poll_interval_us: int = 0,
    extra_value_0: int | np.ndarray = 0,
    extra_value_1: int | np.ndarray = 0,
) -> None:
    """Append the ``task_num`` tasks of one operator to the table and to the queue of their core type, in
    index order, and add them to the trigger counts of their events.

    An argument is one value for all tasks or an array with one value each.

    Raises:
        InputError: the tasks are neither cube nor vector tasks, the table is full, or an event is past its
            capacity.
    """
    for slot, (core, queue_name, counter) in enumerate(_QUEUES):
        if core == core_type:
            break
    else:
        raise InputError(
            f"{task_type.name}: expected core type cube or vector, got {TaskAiCoreType(core_type).name}"
        )
    first = topology.pre_task_num
    if first + task_num > MAX_TASK_NUM:
        raise InputError(
            f"{task_type.name}: expected at most {MAX_TASK_NUM} tasks in a table, got {first} + {task_num}"
        )
    events = np.broadcast_to(np.asarray(trigger_event, np.int64), (task_num,))
    if events.min() < 0 or events.max() >= MAX_EVENT_CAPACITY:
        raise InputError(
            f"{task_type.name}: expected trigger events 0..{MAX_EVENT_CAPACITY - 1} (the capacity of the table), "
            f"got {int(events.min())}..{int(events.max())}"
        )
    tasks = task_array(config, first + task_num)[first:]
    tasks["task_type"] = task_type
    tasks["task_aicore_type"] = core_type
    tasks["dependent_event"] = dependent_event
    tasks["trigger_event"] = trigger_event
    tasks["task_index"] = np.arange(task_num)
    tasks["task_split_num"] = task_num
    tasks["task_split_value"] = split_value
    tasks["extra_value_0"] = extra_value_0
    tasks["extra_value_1"] = extra_value_1
    tasks["extra_value_2"] = poll_interval_us
    trigger_array(config)[:] += np.bincount(events, minlength=MAX_EVENT_CAPACITY).astype("<i4")

    queued = getattr(topology, counter)
    np.frombuffer(getattr(config, queue_name), "<i4")[queued : queued + task_num] = np.arange(
        first, first + task_num
    )
    topology.pre_task_num = first + task_num
    setattr(topology, counter, queued + task_num)
    config.task_index_num[slot] = queued + task_num


def build_runtime_config(
    graph: ComputeGraph, topology: TaskSplitValue, rank_id: int = 0, num_cube_cores: int = 24
) -> RuntimeConfigC:
    """Fill the table of a graph.

    Resets the counters of ``topology``, lets every operator fill in its tasks in topological order, and sets
    ``task_num`` (sum over the operators) and ``num_workers = 2 * num_cube_cores``. A graph that has not been
    split yet is split first.

    Raises:
        InputError: ``num_cube_cores`` is not positive, the graph has a cycle, an operator has no fill
            configuration, the table is too small, or a task is neither a cube nor a vector task.
    """
    if num_cube_cores <= 0:
        raise InputError(f"num_cube_cores must be positive, got {num_cube_cores}")
    order = graph.topological_sort()
    if any(op.task_num == 0 for op in order):
        graph.propagate_splits(topology)
    total = sum(op.task_num for op in order)
    if total > MAX_TASK_NUM:
        raise InputError(f"graph: expected at most {MAX_TASK_NUM} tasks, got {total}")

    config = RuntimeConfigC()
    topology.reset_counters()
    topology.rank_id = rank_id
    for op in order:
        if op.fill_config is None:
            raise InputError(f"{op.name}: expected a fill_config, got None")
        op.fill_config.fill(config, op, topology)
    config.task_num = total
    config.num_workers = 2 * num_cube_cores
    config.queue_capacity = QUEUE_CAPACITY

    tasks = task_array(config)
    placed = np.isin(tasks["task_aicore_type"], [core for core, _, _ in _QUEUES])
    stray = np.flatnonzero((tasks["task_type"] != 0) & ~placed)
    if stray.size:
        task = int(stray[0])
        raise InputError(
            f"task {task}: expected core type cube (1) or vector (2), got {int(tasks['task_aicore_type'][task])}"
        )
    return config


def load_runtime_config(data: bytes) -> RuntimeConfigC:
    """The table that ``bytes(config)`` gave.

    Raises:
        InputError: ``data`` is truncated, too long, or not such a table.
    """
    size = ctypes.sizeof(RuntimeConfigC)
    if len(data) != size:
        raise InputError(f"data: expected the {size} bytes of a table, got {len(data)}")
    config = RuntimeConfigC.from_buffer_copy(data)
    problem = _foreign(config)
    if problem:
        raise InputError(f"data: expected a table written by bytes(config), got {problem}")
    return config


def _foreign(config: RuntimeConfigC) -> str | None:
    """Why these bytes cannot be a table of ours, or None."""
    count = config.task_num
    if config.queue_capacity != QUEUE_CAPACITY:
        return f"queue_capacity {config.queue_capacity} (not {QUEUE_CAPACITY})"
    if not 0 < count <= MAX_TASK_NUM:
        return f"task_num {count} (not 1..{MAX_TASK_NUM})"
    lengths = list(config.task_index_num)
    if min(lengths) < 0 or sum(lengths) != count or any(lengths[2:]):
        return f"task_index_num {lengths} (not cube + vector = {count})"
    for name, known in (
        ("task_type", list(TaskType)),
        ("task_aicore_type", [core for core, _, _ in _QUEUES]),
    ):
        values = task_array(config)[name]
        unknown = np.flatnonzero(~np.isin(values, known))
        if unknown.size:
            return f"{name} {int(values[unknown[0]])} of task {int(unknown[0])}"
    for core, _, _ in _QUEUES:
        queue = queue_array(config, core)
        if queue.size and not 0 <= queue.min() <= queue.max() < count:
            return f"a {core.name} queue entry outside 0..{count - 1}"
    return None


def event_descriptors(config: RuntimeConfigC, event_count: int) -> ctypes.Array[EventDescC]:
    """One :class:`EventDescC` for each of the first ``event_count`` events."""
    events = (EventDescC * event_count)()
    table = np.ctypeslib.as_array(events)
    table["num_triggers"] = trigger_array(config, event_count)
    table["first_task_id"] = table["last_task_id"] = EVENT_INVALID_ID
    depends = task_array(config)["dependent_event"]
    waiting = np.flatnonzero(depends < event_count)
    table["last_task_id"][depends[waiting]] = waiting
    table["first_task_id"][depends[waiting[::-1]]] = waiting[::-1]
    waited = table["first_task_id"] != EVENT_INVALID_ID
    table["event_type"] = np.where(
        waited, EVENT_WAITED, np.where(table["num_triggers"] > 0, EVENT_TERMINAL, 0)
    )
    return events
