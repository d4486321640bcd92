"""Programs the scheduler's tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fused_mhc.scheduler import (
    MAX_EVENT_CAPACITY,
    AccessTable,
    Buffer,
    EventRange,
    Program,
    RuntimeConfigC,
    Stage,
    TaskAiCoreType,
    TaskSplitValue,
    TaskType,
    append_tasks,
)
from fused_mhc.scheduler.task import QUEUE_CAPACITY


def build(
    depends: Sequence[int] | np.ndarray,
    triggers: Sequence[int] | np.ndarray,
    accesses: Sequence[Sequence[int]] | np.ndarray,
    buffers: Sequence[Buffer],
    *,
    workers: int = 2,
    event_count: int | None = None,
) -> Program:
    """A Program of vector tasks: events of each task, and (task, buffer, start, stop, mode) rows."""
    depends, triggers = np.asarray(depends, np.int64), np.asarray(triggers, np.int64)
    config = RuntimeConfigC()
    config.num_workers, config.queue_capacity = workers, QUEUE_CAPACITY
    append_tasks(
        config,
        TaskSplitValue(tp=1, ep=1, seq_size=1, all_expert_num=1, top_k=1),
        task_type=TaskType.TASK_MHC_POST,
        core_type=TaskAiCoreType.TASK_AICORE_VECTOR,
        dependent_event=depends,
        trigger_event=triggers,
        task_num=len(depends),
        split_value=1,
    )
    config.task_num = len(depends)
    events = int(triggers.max()) + 1 if event_count is None else event_count
    core = int(TaskAiCoreType.TASK_AICORE_VECTOR)
    return Program(
        graph="synthetic",
        direction="forward",
        geometry={},
        table=bytes(config),
        event_count=events,
        event_capacity=MAX_EVENT_CAPACITY,
        num_cube_workers=1,
        num_vector_workers=workers,
        mixed_workers=None,
        stages=(Stage("work", "Work", int(TaskType.TASK_MHC_POST), core, 0, len(depends)),),
        events=(EventRange("event", 0, events),),
        buffers=tuple(buffers),
        accesses=AccessTable.of(np.asarray(accesses, np.int64).reshape(-1, 5).T),
    )


@pytest.fixture
def make_program() -> Callable[..., Program]:
    """See :func:`build`."""
    return build
