"""How operators are cut into tasks: the topology with its counters, and the rule one operator is cut by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fused_mhc.errors import InputError

__all__ = ["SplitSpec", "TaskSplitValue", "ceil_div", "fixed_split", "round_up", "token_topology"]


def ceil_div(value: int, divisor: int) -> int:
    """``ceil(value / divisor)`` for integers."""
    return -(-value // divisor)


def round_up(value: int, granularity: int) -> int:
    """The smallest multiple of ``granularity`` that is not below ``value``."""
    return ceil_div(value, granularity) * granularity


@dataclass
class TaskSplitValue:
    """Sizes a graph is split by, and the counters its fill configurations advance.

    ``tp``, ``ep``, ``seq_size``, ``all_expert_num`` and ``top_k`` are given; the sizes derived from them are
    properties; ``rank_id`` and the ``pre_*`` counters belong to one run of :func:`build_runtime_config`.

    Raises:
        InputError: a size is not a positive integer, ``top_k > all_expert_num``, or ``ep`` does not divide
            ``all_expert_num``.
    """

    tp: int = 4
    ep: int = 4
    seq_size: int = 8192
    all_expert_num: int = 32
    top_k: int = 8

    rank_id: int = 0
    pre_pre_event_num: int = 0
    pre_event_num: int = 0
    pre_task_num: int = 0
    pre_cube_task_num: int = 0
    pre_vector_task_num: int = 0
    pre_mix_task_num: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "seq_size", "all_expert_num", "top_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise InputError(f"{name} must be a positive integer, got {value!r}")
        if self.top_k > self.all_expert_num:
            raise InputError(f"top_k cannot exceed all_expert_num ({self.all_expert_num}), got {self.top_k}")
        if self.all_expert_num % self.ep:
            raise InputError(f"all_expert_num must be divisible by ep ({self.ep}), got {self.all_expert_num}")

    @property
    def single_rank_expert_num(self) -> int:
        """Experts of one rank."""
        return self.all_expert_num // self.ep

    @property
    def seq_all(self) -> int:
        """Routed rows of all ranks."""
        return self.seq_size * self.ep * self.top_k // self.tp

    @property
    def per_expert_seq(self) -> int:
        """Rows one expert may get."""
        return self.seq_all // self.top_k

    @property
    def per_rank_seq(self) -> int:
        """Rows one rank sends."""
        return self.seq_all // self.ep

    @property
    def per_expert_seq_to_other(self) -> int:
        """Rows one rank sends to one expert."""
        return self.seq_all // (self.ep * self.top_k)

    def reset_counters(self) -> None:
        """Set every ``pre_*`` counter to zero, as before the first fill."""
        self.pre_pre_event_num = 0
        self.pre_event_num = 0
        self.pre_task_num = 0
        self.pre_cube_task_num = 0
        self.pre_vector_task_num = 0
        self.pre_mix_task_num = 0


@dataclass
class SplitSpec:
    """The rule one operator is split by.

    Attributes:
        split_inputs: None for a source (always split); else ``(input index, dim)`` pairs that must all carry
            that split already, or the operator stays one task.
        task_num_fn: topology -> number of tasks.
        split_output_dims: for each output the dimension it is split along, -1 for none.
    """

    split_inputs: list[tuple[int, int]] | None
    task_num_fn: Callable[[TaskSplitValue], int]
    split_output_dims: list[int] = field(default_factory=lambda: [0])


def fixed_split(task_num: int, split_output_dims: list[int]) -> SplitSpec:
    """The rule of a source of ``task_num`` tasks."""
    return SplitSpec(None, lambda topology: task_num, split_output_dims)


def token_topology(token_count: int) -> TaskSplitValue:
    """The topology of a graph that is cut along its tokens alone."""
    return TaskSplitValue(tp=1, ep=1, seq_size=token_count, all_expert_num=1, top_k=1)
