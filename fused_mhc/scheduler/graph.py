"""The operator graph: tensors, operators, edges, and how a split travels along them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from fused_mhc.errors import InputError
from fused_mhc.scheduler.split import SplitSpec, TaskSplitValue

if TYPE_CHECKING:
    from fused_mhc.scheduler.runtime_config import RuntimeConfigC

__all__ = ["ComputeGraph", "FillConfig", "OpType", "OperatorNode", "TensorSpec"]


class OpType(Enum):
    """What an operator computes."""

    MHC_POST = "mhc_post"
    MHC_NORM_CAST = "mhc_norm_cast"
    MHC_PROJECTION = "mhc_projection"
    MHC_INPUT_MIX = "mhc_input_mix"
    RMS_NORM = "rms_norm"
    MHC_MAPPING = "mhc_mapping"
    MHC_PIPELINE = "mhc_pipeline"


@dataclass
class TensorSpec:
    """A tensor on an edge of the graph. ``split_dim`` (-1: not split) and ``split_num`` are filled in by
    :meth:`ComputeGraph.propagate_splits`; ``tensor_type`` 0 is a tensor, 1 a list of tensors."""

    name: str
    shape: list[int]
    param_position: int
    dtype_size: int = 2
    tensor_type: int = 0
    transpose: bool = False
    is_dynamic: bool = False
    split_dim: int = field(default=-1, init=False)
    split_num: int = field(default=1, init=False)


class FillConfig(ABC):
    """Writes the tasks and trigger counts of one operator into the table."""

    @abstractmethod
    def fill(self, cfg: RuntimeConfigC, op: OperatorNode, tsv: TaskSplitValue) -> None:
        """Append ``op.task_num`` tasks to ``cfg`` and advance the counters of ``tsv``."""


@dataclass(eq=False)
class OperatorNode:
    """An operator of the graph; ``task_num`` is filled in by :meth:`ComputeGraph.propagate_splits`."""

    name: str
    op_type: OpType
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    param_positions: list[int]
    split_value: int
    split_spec: SplitSpec
    tiling_position: int = -1
    fill_config: FillConfig | None = None
    diagnostic_name: str | None = None
    predecessors: list[OperatorNode] = field(default_factory=list, init=False, repr=False)
    successors: list[OperatorNode] = field(default_factory=list, init=False, repr=False)
    task_num: int = field(default=0, init=False)


class ComputeGraph:
    """A directed acyclic graph of operators. :meth:`add_op` and :meth:`add_edge` return the graph, so calls
    chain."""

    def __init__(self) -> None:
        self._nodes: dict[str, OperatorNode] = {}

    def add_op(self, op: OperatorNode) -> ComputeGraph:
        """Add an operator; its name must be new."""
        if op.name in self._nodes:
            raise InputError(f"op: expected a name that is not in the graph yet, got {op.name!r} again")
        self._nodes[op.name] = op
        return self

    def add_edge(self, src: OperatorNode | str, dst: OperatorNode | str) -> ComputeGraph:
        """Let ``dst`` follow ``src`` (operators of this graph, or their names); a second call changes
        nothing."""
        source, target = self._resolve("src", src), self._resolve("dst", dst)
        if target not in source.successors:
            source.successors.append(target)
            target.predecessors.append(source)
        return self

    def get_op(self, name: str) -> OperatorNode:
        """The operator of that name."""
        return self._resolve("name", name)

    def topological_sort(self) -> list[OperatorNode]:
        """Operators in an order in which each follows what it needs.

        Kahn's algorithm with a FIFO: roots in insertion order, then operators as they become ready,
        successors in the order their edges were added.

        Raises:
            InputError: the graph has a cycle.
        """
        missing = {name: len(op.predecessors) for name, op in self._nodes.items()}
        ready = deque(op for op in self._nodes.values() if not op.predecessors)
        order: list[OperatorNode] = []
        while ready:
            op = ready.popleft()
            order.append(op)
            for successor in op.successors:
                missing[successor.name] -= 1
                if missing[successor.name] == 0:
                    ready.append(successor)
        if len(order) != len(self._nodes):
            stuck = [name for name, count in missing.items() if count]
            raise InputError(f"graph: expected no cycle, got one through or before {', '.join(stuck)}")
        return order

    def propagate_splits(self, topology: TaskSplitValue) -> None:
        """Fill in every ``task_num``, ``split_dim`` and ``split_num``.

        A source gets ``task_num_fn(topology)`` tasks. Any other operator does if every input its
        ``split_spec`` names already carries the named split, else one task. The outputs of a split operator
        carry its ``split_output_dims``.
        """
        order = self.topological_sort()
        for op in order:
            for tensor in (*op.inputs, *op.outputs):
                tensor.split_dim, tensor.split_num = -1, 1
        for op in order:
            spec = op.split_spec
            needed = spec.split_inputs or []
            is_split = all(op.inputs[index].split_dim == dim for index, dim in needed)
            op.task_num = spec.task_num_fn(topology) if is_split else 1
            if op.task_num <= 0:
                raise InputError(f"{op.name}: expected a positive number of tasks, got {op.task_num}")
            for tensor, dim in zip(op.outputs, spec.split_output_dims, strict=False):
                if op.task_num > 1 and dim >= 0:
                    tensor.split_dim, tensor.split_num = dim, op.task_num

    def _resolve(self, argument: str, op: OperatorNode | str) -> OperatorNode:
        name = op.name if isinstance(op, OperatorNode) else op
        if name not in self._nodes:
            raise InputError(
                f"{argument}: expected an operator of this graph ({', '.join(self._nodes)}), got {name!r}"
            )
        return self._nodes[name]
