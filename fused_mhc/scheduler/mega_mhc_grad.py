"""The fixed backward graph of the shifted single pass.

::

    grad_output_init --(all)--> rms_norm_grad --> mhc_grad_prev_a_and_mapping
        --(macro-tile)--> mhc_grad_phi_rms --> mhc_grad_prev_x_and_post

Vector stages work on token tiles; the cube stage works on macro-tiles of at least 64 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fused_mhc.errors import InputError
from fused_mhc.scheduler.event import ATOMIC_ADD_VALUE_LEN, EVENT_INVALID_ID, MIN_EVENT_CAPACITY
from fused_mhc.scheduler.fill import StageFill
from fused_mhc.scheduler.graph import ComputeGraph, FillConfig, OperatorNode, OpType, TensorSpec
from fused_mhc.scheduler.order import order_queue
from fused_mhc.scheduler.runtime_config import RuntimeConfigC
from fused_mhc.scheduler.split import TaskSplitValue, ceil_div, fixed_split, round_up, token_topology
from fused_mhc.scheduler.task import FAST_DEPENDENCY_POLL_INTERVAL_US, TaskAiCoreType, TaskType

__all__ = [
    "DEFAULT_GRAD_TOKEN_TILE",
    "INIT_DONE_EVENT",
    "NATIVE_GRAD_CUBE_TILE",
    "NATIVE_GRAD_VECTOR_TILE",
    "MegaMhcGradEventLayout",
    "MegaMhcGradTiling",
    "build_event_layout",
    "build_mega_mhc_grad_graph",
    "make_grad_tiling",
    "order_vector_tasks_by_stage",
    "resolve_grad_token_tile",
]

DEFAULT_GRAD_TOKEN_TILE = 32
NATIVE_GRAD_VECTOR_TILE = 32
NATIVE_GRAD_CUBE_TILE = 64
INIT_DONE_EVENT = 0
_TILING_POSITION = 34
_CUBE, _VECTOR = TaskAiCoreType.TASK_AICORE_CUBE, TaskAiCoreType.TASK_AICORE_VECTOR


@dataclass(frozen=True)
class MegaMhcGradTiling:
    """Token tiles of the vector stages, macro-tiles of the cube stage."""

    token_count: int
    token_tile: int
    cube_tile: int
    tile_count: int
    macro_count: int

    def macro_for_tile(self, task_index: int) -> int:
        """The macro-tile that token tile ``task_index`` belongs to."""
        return task_index * self.token_tile // self.cube_tile

    def vector_tiles_in_macro(self, macro_index: int) -> int:
        """How many token tiles belong to that macro-tile."""
        first = ceil_div(macro_index * self.cube_tile, self.token_tile)
        after = ceil_div((macro_index + 1) * self.cube_tile, self.token_tile)
        return max(0, min(after, self.tile_count) - min(first, self.tile_count))


@dataclass(frozen=True)
class MegaMhcGradEventLayout:
    """First event id of each purpose."""

    init_done: int
    rms_ready_base: int
    macro_ready_base: int
    phi_rms_base: int
    final: int
    event_count: int


def make_grad_tiling(token_count: int, token_tile: int) -> MegaMhcGradTiling:
    """Tiles and macro-tiles of ``token_count`` tokens.

    Raises:
        InputError: an argument is not positive, or ``token_tile`` neither divides 64 nor is at least 64
            (such tiles would leave a macro-tile without its rows).
    """
    if token_count <= 0 or token_tile <= 0:
        raise InputError(f"token_count and token_tile must both be positive, got {(token_count, token_tile)}")
    if token_tile < NATIVE_GRAD_CUBE_TILE and NATIVE_GRAD_CUBE_TILE % token_tile:
        raise InputError(
            f"token_tile: expected a divisor of {NATIVE_GRAD_CUBE_TILE} or at least {NATIVE_GRAD_CUBE_TILE}, "
            f"got {token_tile}"
        )
    cube_tile = max(token_tile, NATIVE_GRAD_CUBE_TILE)
    return MegaMhcGradTiling(
        token_count,
        token_tile,
        cube_tile,
        ceil_div(token_count, token_tile),
        ceil_div(token_count, cube_tile),
    )


def _event_count(tile_count: int, macro_count: int) -> int:
    """init, rms_ready, macro_ready, phi_rms, final and the gap after it."""
    return 1 + tile_count + 2 * macro_count + ATOMIC_ADD_VALUE_LEN


def build_event_layout(tile_count: int, macro_count: int) -> MegaMhcGradEventLayout:
    """Events of the backward graph, in order: init done, RMS of each tile, each macro-tile ready, phi of each
    macro-tile, the end.

    Raises:
        InputError: a count is not positive, or more than 1024 events are needed.
    """
    if tile_count <= 0 or macro_count <= 0:
        raise InputError(f"tile_count and macro_count must both be positive, got {(tile_count, macro_count)}")
    event_count = _event_count(tile_count, macro_count)
    if event_count > MIN_EVENT_CAPACITY:
        raise InputError(
            f"tile_count: {tile_count} tiles and {macro_count} macro-tiles need {event_count} events, "
            f"the graph supports only {MIN_EVENT_CAPACITY}"
        )
    macro_ready_base = INIT_DONE_EVENT + 1 + tile_count
    return MegaMhcGradEventLayout(
        init_done=INIT_DONE_EVENT,
        rms_ready_base=INIT_DONE_EVENT + 1,
        macro_ready_base=macro_ready_base,
        phi_rms_base=macro_ready_base + macro_count,
        final=macro_ready_base + 2 * macro_count,
        event_count=event_count,
    )


def resolve_grad_token_tile(token_count: int, requested_tile: int) -> int:
    """The token tile to use: the requested one rounded up to 32, grown by 32 until the event table holds the
    graph.

    Raises:
        InputError: an argument is not positive.
    """
    if token_count <= 0 or requested_tile <= 0:
        raise InputError(
            f"token_count and requested_tile must both be positive, got {(token_count, requested_tile)}"
        )
    tile = round_up(requested_tile, NATIVE_GRAD_VECTOR_TILE)
    tiling = make_grad_tiling(token_count, tile)
    if _event_count(tiling.tile_count, tiling.macro_count) <= MIN_EVENT_CAPACITY:
        return tile
    # From 64 rows on a macro-tile is one tile, which then takes three events.
    most_tiles = (MIN_EVENT_CAPACITY - _event_count(0, 0)) // 3
    return max(
        tile, NATIVE_GRAD_CUBE_TILE, round_up(ceil_div(token_count, most_tiles), NATIVE_GRAD_VECTOR_TILE)
    )


def order_vector_tasks_by_stage(config: RuntimeConfigC) -> None:
    """Queue the init tasks, then all tiles of one vector stage before the next, tiles ascending.

    Raises:
        ScheduleError: the queue would lose or double a task.
    """
    order_queue(
        config,
        _VECTOR,
        [
            [TaskType.TASK_MHC_GRAD_PREV_A],
            [TaskType.TASK_RMS_NORM_GRAD],
            [TaskType.TASK_MHC_GRAD_PREV_A_AND_MAPPING],
            [TaskType.TASK_MHC_GRAD_PREV_X_AND_POST],
        ],
        owner="mega_mhc_grad",
    )


def build_mega_mhc_grad_graph(
    token_count: int, hidden_size: int, token_tile: int = DEFAULT_GRAD_TOKEN_TILE, *, num_vector_cores: int
) -> tuple[ComputeGraph, TaskSplitValue]:
    """The backward graph and its topology, split.

    Args:
        token_count: T, all leading dimensions multiplied.
        hidden_size: C, of one stream.
        token_tile: tokens of a vector task, see :func:`resolve_grad_token_tile`.
        num_vector_cores: vector workers; each clears one slice of the partial sums.

    Raises:
        InputError: a size is not positive.
    """
    if token_count <= 0 or hidden_size <= 0 or num_vector_cores <= 0:
        raise InputError(
            "token_count, hidden_size and num_vector_cores must be positive, "
            f"got {(token_count, hidden_size, num_vector_cores)}"
        )
    tiling = make_grad_tiling(token_count, resolve_grad_token_tile(token_count, token_tile))
    layout = build_event_layout(tiling.tile_count, tiling.macro_count)
    fast = FAST_DEPENDENCY_POLL_INTERVAL_US
    tile, tiles, macros = tiling.token_tile, tiling.tile_count, tiling.macro_count
    tile_index, macro_index = np.arange(tiles), np.arange(macros)
    macro_of_tile = tile_index * tile // tiling.cube_tile
    rms_ready = layout.rms_ready_base + tile_index
    macro_ready, phi_rms = layout.macro_ready_base + macro_index, layout.phi_rms_base + macro_index
    stages: tuple[tuple[str, str, int, int, FillConfig], ...] = (
        (
            "grad_output_init",
            "GradOutputInit",
            num_vector_cores,
            0,
            StageFill(TaskType.TASK_MHC_GRAD_PREV_A, _VECTOR, EVENT_INVALID_ID, layout.init_done),
        ),
        (
            "rms_norm_grad",
            "RmsNormGrad",
            tiles,
            tile,
            StageFill(TaskType.TASK_RMS_NORM_GRAD, _VECTOR, layout.init_done, rms_ready, fast),
        ),
        (
            "mhc_grad_prev_a_and_mapping",
            "MhcGradPrevAAndMapping",
            tiles,
            tile,
            StageFill(
                TaskType.TASK_MHC_GRAD_PREV_A_AND_MAPPING,
                _VECTOR,
                rms_ready,
                macro_ready[macro_of_tile],
                fast,
            ),
        ),
        (
            "mhc_grad_phi_rms",
            "MhcGradPhiRms",
            macros,
            tiling.cube_tile,
            StageFill(TaskType.TASK_MHC_GRAD_PHI_RMS, _CUBE, macro_ready, phi_rms),
        ),
        (
            "mhc_grad_prev_x_and_post",
            "MhcGradPrevXAndPost",
            tiles,
            tile,
            StageFill(TaskType.TASK_MHC_GRAD_PREV_X_AND_POST, _VECTOR, phi_rms[macro_of_tile], layout.final),
        ),
    )
    data = TensorSpec("grad_data", [token_count, hidden_size], 0)
    graph = ComputeGraph()
    for name, diagnostic_name, count, split_value, fill in stages:
        graph.add_op(
            OperatorNode(
                name=name,
                op_type=OpType.MHC_PIPELINE,
                inputs=[data],
                outputs=[],
                param_positions=[0],
                split_value=split_value,
                split_spec=fixed_split(count, []),
                tiling_position=_TILING_POSITION,
                fill_config=fill,
                diagnostic_name=diagnostic_name,
            )
        )
    for source, target in pairwise(stages):
        graph.add_edge(source[0], target[0])
    topology = token_topology(token_count)
    graph.propagate_splits(topology)
    return graph, topology
