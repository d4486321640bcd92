"""The order of a queue: stage after stage, or in waves of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fused_mhc.errors import InputError, ScheduleError
from fused_mhc.scheduler.runtime_config import RuntimeConfigC, queue_array, task_array
from fused_mhc.scheduler.task import TaskAiCoreType, TaskType

__all__ = ["Stages", "first_rows", "order_queue"]

#: Groups of stages; a stage is a task type, or a task type and how many waves it stays behind its group.
Stages = Sequence[Sequence["TaskType | tuple[TaskType, int]"]]


def first_rows(tasks: np.ndarray) -> np.ndarray:
    """The first token of each task: its tile (``task_index`` over the parts of a tile) times the rows of a
    tile."""
    parts = np.maximum(tasks["extra_value_1"], 1)
    return (tasks["task_index"] // parts).astype(np.int64) * tasks["task_split_value"]


def order_queue(
    config: RuntimeConfigC, core: TaskAiCoreType, groups: Stages, wave_rows: int | None = None, *, owner: str
) -> None:
    """Put one queue of the table in order.

    The groups follow one another. Inside a group come waves of ``wave_rows`` tokens (None: all of them),
    inside a wave its stages, inside a stage its tasks by index. A stage with a lag of ``k`` runs with the
    wave ``k`` later (``-k``: earlier).

    Raises:
        InputError: ``wave_rows`` is not positive.
        ScheduleError: the groups, or the queue as it was, would lose or double a task.
    """
    if wave_rows is not None and wave_rows <= 0:
        raise InputError(f"wave_rows must be positive, got {wave_rows}")
    queue = queue_array(config, core)
    table = task_array(config, sum(config.task_index_num))
    tasks = table[queue]
    rank = np.full(len(queue), -1, np.int64)
    group = np.zeros(len(queue), np.int64)
    wave = first_rows(tasks) // wave_rows if wave_rows else np.zeros(len(queue), np.int64)
    stages = [
        (number, *(stage if isinstance(stage, tuple) else (stage, 0)))
        for number, members in enumerate(groups)
        for stage in members
    ]
    for position, (number, task_type, lag) in enumerate(stages):
        mine = tasks["task_type"] == task_type
        rank[mine], group[mine] = position, number
        wave[mine] += lag
    ordered = queue[np.lexsort((tasks["task_index"], rank, wave, group))]
    expected = np.flatnonzero(table["task_aicore_type"] == core)
    if (rank < 0).any() or not np.array_equal(np.sort(ordered), expected):
        kept = queue[rank >= 0]
        raise ScheduleError(
            f"{owner}: ordering the {core.name} queue lost or duplicated a task; expected each of {len(expected)} "
            f"tasks once, got {len(np.unique(kept))} different ones in {len(kept)} places"
        )
    queue[:] = ordered
