"""The ctypes table: layout, round trip, bad bytes."""

from __future__ import annotations

import ctypes

import pytest

from fused_mhc.errors import InputError
from fused_mhc.scheduler import (
    ATOMIC_ADD_VALUE_LEN,
    EVENT_INVALID_ID,
    FAST_DEPENDENCY_POLL_INTERVAL_US,
    MIN_EVENT_CAPACITY,
    QUEUE_CAPACITY,
    ComputeGraph,
    EventDescC,
    FillConfig,
    OperatorNode,
    OpType,
    RuntimeConfigC,
    SplitSpec,
    TaskAiCoreType,
    TaskDescC,
    TaskSplitValue,
    TaskType,
    append_tasks,
    build_runtime_config,
    event_descriptors,
    load_runtime_config,
    lower_mega_mhc,
)


def test_numbers_are_fixed() -> None:
    assert (ATOMIC_ADD_VALUE_LEN, MIN_EVENT_CAPACITY, QUEUE_CAPACITY) == (8, 1024, 100)
    assert (FAST_DEPENDENCY_POLL_INTERVAL_US, EVENT_INVALID_ID) == (5, 0xFFFFFFFF)
    assert [core.value for core in TaskAiCoreType] == [0, 1, 2, 3]
    assert [core.name for core in TaskAiCoreType] == [
        "TASK_AICORE_INVALID",
        "TASK_AICORE_CUBE",
        "TASK_AICORE_VECTOR",
        "TASK_AICORE_MIX",
    ]
    assert ctypes.sizeof(TaskDescC) == 48
    assert ctypes.sizeof(EventDescC) == 16
    assert RuntimeConfigC.task_num.offset == 0
    assert len(RuntimeConfigC().all_tasks) == 25_600


def test_bytes_round_trip() -> None:
    for direction in ("forward", "backward"):
        config = lower_mega_mhc(direction, 200, 64, num_cube_workers=2, num_vector_workers=4).config
        again = load_runtime_config(bytes(config))
        assert bytes(again) == bytes(config)
        assert again.all_tasks[3].task_index == config.all_tasks[3].task_index


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "expected the [0-9]+ bytes of a table, got"),
        (lambda data: data + b"\0", "bytes of a table, got"),
        (lambda data: b"", "got 0"),
        (lambda data: bytes(len(data)), "queue_capacity 0"),
        (lambda data: b"\0\0\0\0" + data[4:], "task_num 0"),
        (lambda data: b"\1\0\0\0" + data[4:], "task_index_num"),
        (lambda data: b"\xff" * len(data), "queue_capacity"),
    ],
)
def test_truncated_or_foreign_bytes(damage: object, message: str) -> None:
    data = bytes(lower_mega_mhc("forward", 64, 64, num_cube_workers=2, num_vector_workers=4).config)
    with pytest.raises(InputError, match=message):
        load_runtime_config(damage(data))  # type: ignore[operator]


def test_foreign_types_and_queue_entries() -> None:
    config = lower_mega_mhc("forward", 64, 64, num_cube_workers=2, num_vector_workers=4).config
    changed = RuntimeConfigC.from_buffer_copy(bytes(config))
    changed.all_tasks[5].task_type = 99
    with pytest.raises(InputError, match="task_type 99 of task 5"):
        load_runtime_config(bytes(changed))
    changed = RuntimeConfigC.from_buffer_copy(bytes(config))
    changed.all_tasks[2].task_aicore_type = 3
    with pytest.raises(InputError, match="task_aicore_type 3 of task 2"):
        load_runtime_config(bytes(changed))
    changed = RuntimeConfigC.from_buffer_copy(bytes(config))
    changed.vector_task_indices[0] = config.task_num
    with pytest.raises(InputError, match=r"queue entry outside 0\.\.11"):
        load_runtime_config(bytes(changed))


class _Fill(FillConfig):
    def __init__(self, core: TaskAiCoreType, direct: bool) -> None:
        self.core, self.direct = core, direct

    def fill(self, cfg: RuntimeConfigC, op: OperatorNode, tsv: TaskSplitValue) -> None:
        if self.direct:
            cfg.all_tasks[0] = TaskDescC(task_type=TaskType.TASK_MHC_POST, task_aicore_type=self.core)
            return
        append_tasks(
            cfg,
            tsv,
            task_type=TaskType.TASK_MHC_POST,
            core_type=self.core,
            dependent_event=EVENT_INVALID_ID,
            trigger_event=0,
            task_num=op.task_num,
            split_value=1,
        )


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("core", [TaskAiCoreType.TASK_AICORE_MIX, TaskAiCoreType.TASK_AICORE_INVALID])
def test_a_task_is_cube_or_vector(core: TaskAiCoreType, direct: bool) -> None:
    op = OperatorNode(
        "a", OpType.MHC_POST, [], [], [], 1, SplitSpec(None, lambda topology: 1), 0, _Fill(core, direct), "A"
    )
    with pytest.raises(ValueError, match=r"cube.*vector"):
        build_runtime_config(ComputeGraph().add_op(op), TaskSplitValue())


def test_table_limits() -> None:
    config, topology = RuntimeConfigC(), TaskSplitValue()
    common = {
        "task_type": TaskType.TASK_MHC_POST,
        "core_type": TaskAiCoreType.TASK_AICORE_VECTOR,
        "dependent_event": EVENT_INVALID_ID,
        "split_value": 1,
    }
    with pytest.raises(InputError, match=r"expected at most 25600 tasks in a table, got 0 \+ 25601"):
        append_tasks(config, topology, trigger_event=0, task_num=25_601, **common)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"expected trigger events 0\.\.4095"):
        append_tasks(config, topology, trigger_event=4096, task_num=1, **common)  # type: ignore[arg-type]
    assert topology.pre_task_num == 0
    assert bytes(config) == bytes(RuntimeConfigC())


def test_event_descriptors() -> None:
    program = lower_mega_mhc("backward", 128, 64, num_cube_workers=2, num_vector_workers=4)
    events = event_descriptors(program.config, program.event_count)
    first = events[0]
    assert (first.event_type, first.num_triggers, first.first_task_id, first.last_task_id) == (1, 4, 4, 7)
    final = events[program.events[-1].base]
    assert (final.event_type, final.num_triggers, final.first_task_id) == (2, 4, EVENT_INVALID_ID)
