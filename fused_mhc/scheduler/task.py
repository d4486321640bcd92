"""What a task is and who runs it: numbers that exist once, here, and reach kernels and pictures from here."""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "FAST_DEPENDENCY_POLL_INTERVAL_US",
    "MAX_TASK_NUM",
    "QUEUE_CAPACITY",
    "TaskAiCoreType",
    "TaskType",
]

#: Tasks one table can hold.
MAX_TASK_NUM = 25_600
#: Written to ``queue_capacity`` for compatibility; no queue is limited by it.
QUEUE_CAPACITY = 100
#: Poll interval (``extra_value_2``, microseconds) of tasks whose event fires soon after they reach their
#: queue's head.
FAST_DEPENDENCY_POLL_INTERVAL_US = 5


class TaskAiCoreType(IntEnum):
    """The kind of worker a task needs: cube = tensor cores, vector = everything else."""

    TASK_AICORE_INVALID = 0
    TASK_AICORE_CUBE = 1
    TASK_AICORE_VECTOR = 2
    TASK_AICORE_MIX = 3


class TaskType(IntEnum):
    """The opcode of a task.

    The first twelve belong to the two fixed graphs (``TASK_MHC_GRAD_PREV_A`` clears the partial sums;
    ``TASK_MHC_MAPPING`` serves the forward graphs). The ``TASK_TILE_*`` ones belong to the tiled graphs
    (:mod:`fused_mhc.scheduler.tiled`, :mod:`fused_mhc.scheduler.tiled_grad`), which cut the stages elsewhere.
    """

    TASK_MHC_POST = 1
    TASK_MHC_NORM_CAST = 2
    TASK_MHC_PROJECTION = 3
    TASK_MHC_INPUT_MIX = 4
    TASK_RMS_NORM = 5
    TASK_MHC_MAPPING = 6
    TASK_RMS_NORM_GRAD = 7
    TASK_MHC_GRAD_PREV_A = 8
    TASK_MHC_GRAD_PREV_A_AND_MAPPING = 9
    TASK_MHC_GRAD_PHI_RMS = 10
    TASK_MHC_GRAD_PREV_X_AND_POST = 11
    TASK_MHC_POST_GRAD = 12
    TASK_TILE_POST_MIX_NORM = 13
    TASK_TILE_PROJECTION = 14
    TASK_TILE_MAPPING = 15
    TASK_TILE_NORM_GRAD = 16
    TASK_TILE_MAPPING_GRAD = 17
    TASK_TILE_POST_GRAD = 18
    TASK_TILE_MIX_GRAD = 19
    TASK_TILE_PHI_GRAD = 20
