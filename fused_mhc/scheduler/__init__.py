"""The task graph: operators split into token tiles, events between them, queues of workers, and the proof.

Needs neither a GPU nor torch. ``mega_mhc`` and ``mega_mhc_grad`` build the two fixed graphs, ``tiled`` and
``tiled_grad`` graphs for the same boundary whose intermediate data stays in the L2 cache.
"""

from __future__ import annotations

from fused_mhc.scheduler.event import (
    ATOMIC_ADD_VALUE_LEN,
    EVENT_INVALID_ID,
    MAX_EVENT_CAPACITY,
    MIN_EVENT_CAPACITY,
)
from fused_mhc.scheduler.graph import ComputeGraph, FillConfig, OperatorNode, OpType, TensorSpec
from fused_mhc.scheduler.lower import lower_mega_mhc
from fused_mhc.scheduler.lower_tiled import lower_tiled_mhc
from fused_mhc.scheduler.order import order_queue
from fused_mhc.scheduler.program import (
    AccessTable,
    AccessWriter,
    Buffer,
    EventRange,
    Program,
    Reduction,
    Stage,
)
from fused_mhc.scheduler.runtime_config import (
    EventDescC,
    RuntimeConfigC,
    TaskDescC,
    append_tasks,
    build_runtime_config,
    event_descriptors,
    load_runtime_config,
)
from fused_mhc.scheduler.split import SplitSpec, TaskSplitValue
from fused_mhc.scheduler.task import (
    FAST_DEPENDENCY_POLL_INTERVAL_US,
    MAX_TASK_NUM,
    QUEUE_CAPACITY,
    TaskAiCoreType,
    TaskType,
)
from fused_mhc.scheduler.verify import check_queues, verify

__all__ = [
    "ATOMIC_ADD_VALUE_LEN",
    "EVENT_INVALID_ID",
    "FAST_DEPENDENCY_POLL_INTERVAL_US",
    "MAX_EVENT_CAPACITY",
    "MAX_TASK_NUM",
    "MIN_EVENT_CAPACITY",
    "QUEUE_CAPACITY",
    "AccessTable",
    "AccessWriter",
    "Buffer",
    "ComputeGraph",
    "EventDescC",
    "EventRange",
    "FillConfig",
    "OpType",
    "OperatorNode",
    "Program",
    "Reduction",
    "RuntimeConfigC",
    "SplitSpec",
    "Stage",
    "TaskAiCoreType",
    "TaskDescC",
    "TaskSplitValue",
    "TaskType",
    "TensorSpec",
    "append_tasks",
    "build_runtime_config",
    "check_queues",
    "event_descriptors",
    "load_runtime_config",
    "lower_mega_mhc",
    "lower_tiled_mhc",
    "order_queue",
    "verify",
]
