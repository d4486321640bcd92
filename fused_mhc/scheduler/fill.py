"""The one fill configuration every graph here uses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fused_mhc.scheduler.graph import FillConfig, OperatorNode
from fused_mhc.scheduler.runtime_config import RuntimeConfigC, append_tasks
from fused_mhc.scheduler.split import TaskSplitValue
from fused_mhc.scheduler.task import TaskAiCoreType, TaskType

__all__ = ["StageFill"]


@dataclass(frozen=True)
class StageFill(FillConfig):
    """Appends the tasks of one operator in index order.

    Attributes:
        task_type, core_type: opcode, and the workers that run it.
        depends, triggers: the event each task waits for and triggers; one for all, or an array.
        poll_interval_us: dependency poll interval.
        parts: tasks that share a tile; task ``k`` is part ``k % parts`` (``extra_value_0``) of ``parts``
            (``extra_value_1``) of tile ``k // parts``. 1 leaves both zero.
    """

    task_type: TaskType
    core_type: TaskAiCoreType
    depends: int | np.ndarray
    triggers: int | np.ndarray
    poll_interval_us: int = 0
    parts: int = 1

    def fill(self, cfg: RuntimeConfigC, op: OperatorNode, tsv: TaskSplitValue) -> None:
        append_tasks(
            cfg,
            tsv,
            task_type=self.task_type,
            core_type=self.core_type,
            dependent_event=self.depends,
            trigger_event=self.triggers,
            task_num=op.task_num,
            split_value=op.split_value,
            poll_interval_us=self.poll_interval_us,
            extra_value_0=np.arange(op.task_num) % self.parts,
            extra_value_1=self.parts if self.parts > 1 else 0,
        )
