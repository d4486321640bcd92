"""The fixed forward graph of the shifted single pass: six stages a token tile.

::

    post --(all tiles)--> norm_cast --> projection --> mapping
                                   \\--> input_mix --> rms_norm

``norm_cast`` stages its tile for ``projection`` in a ring; its slot is used again by the tile ``ring_slots``
later, which therefore waits for that projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fused_mhc.errors import InputError
from fused_mhc.scheduler.event import EVENT_INVALID_ID, MIN_EVENT_CAPACITY
from fused_mhc.scheduler.fill import StageFill
from fused_mhc.scheduler.graph import ComputeGraph, FillConfig, OperatorNode, OpType, TensorSpec
from fused_mhc.scheduler.order import order_queue
from fused_mhc.scheduler.runtime_config import RuntimeConfigC
from fused_mhc.scheduler.split import TaskSplitValue, ceil_div, fixed_split, round_up, token_topology
from fused_mhc.scheduler.task import TaskAiCoreType, TaskType

__all__ = [
    "DEFAULT_TOKEN_TILE",
    "NORM_EVENT_BASE",
    "POST_DONE_EVENT",
    "MegaMhcEventLayout",
    "build_event_layout",
    "build_mega_mhc_graph",
    "resolve_ring_slots",
    "resolve_token_tile",
]

DEFAULT_TOKEN_TILE = 32
POST_DONE_EVENT = 0
NORM_EVENT_BASE = 1
_ROW_GRANULARITY = 32
_CUBE, _VECTOR = TaskAiCoreType.TASK_AICORE_CUBE, TaskAiCoreType.TASK_AICORE_VECTOR


@dataclass(frozen=True)
class MegaMhcEventLayout:
    """First event id of each purpose."""

    post_done: int
    norm_base: int
    input_mix_base: int
    projection_base: int
    final: int
    event_count: int


def build_event_layout(tile_count: int) -> MegaMhcEventLayout:
    """Events of ``tile_count`` tiles: all posts done, then norm, input_mix and projection of each tile, then
    the end.

    Raises:
        InputError: ``tile_count`` is not positive, or needs more than 1024 events.
    """
    if tile_count <= 0:
        raise InputError(f"tile_count must be positive, got {tile_count}")
    final = NORM_EVENT_BASE + 3 * tile_count
    if final + 1 > MIN_EVENT_CAPACITY:
        raise InputError(
            f"tile_count: {tile_count} tiles need {final + 1} events, the graph supports only {MIN_EVENT_CAPACITY}"
        )
    return MegaMhcEventLayout(
        post_done=POST_DONE_EVENT,
        norm_base=NORM_EVENT_BASE,
        input_mix_base=NORM_EVENT_BASE + tile_count,
        projection_base=NORM_EVENT_BASE + 2 * tile_count,
        final=final,
        event_count=final + 1,
    )


def _workspace_rows(num_cube_cores: int) -> int:
    """Rows of the staging ring."""
    return 4 * num_cube_cores * _ROW_GRANULARITY


def resolve_token_tile(token_count: int, requested_tile: int, num_cube_cores: int) -> int:
    """The token tile to use: the requested one, or the smallest that fits the event table; a multiple of 32.

    Raises:
        InputError: an argument is not positive, or the tile does not fit the staging ring
            (``4 * num_cube_cores * 32`` rows).
    """
    if token_count <= 0 or requested_tile <= 0 or num_cube_cores <= 0:
        raise InputError(
            "token_count, requested_tile and num_cube_cores must all be positive, "
            f"got {(token_count, requested_tile, num_cube_cores)}"
        )
    most_tiles = (MIN_EVENT_CAPACITY - 2) // 3
    tile = round_up(max(requested_tile, ceil_div(token_count, most_tiles)), _ROW_GRANULARITY)
    if tile > _workspace_rows(num_cube_cores):
        raise InputError(
            f"token_tile: expected at most the {_workspace_rows(num_cube_cores)} staging rows of {num_cube_cores} "
            f"cube cores, got {tile} for {token_count} tokens"
        )
    return tile


def resolve_ring_slots(tile_count: int, token_tile: int, num_cube_cores: int) -> int:
    """Tiles the staging ring holds at once."""
    return min(tile_count, _workspace_rows(num_cube_cores) // token_tile)


@dataclass(frozen=True)
class _OrderingFill(StageFill):
    """Fills the stage that comes last in topological order, then puts the vector queue in order: all post
    tasks, waves of tiles through the three middle stages, all mapping tasks."""

    wave_tiles: int = 1

    def fill(self, cfg: RuntimeConfigC, op: OperatorNode, tsv: TaskSplitValue) -> None:
        super().fill(cfg, op, tsv)
        order_queue(
            cfg,
            _VECTOR,
            [
                [TaskType.TASK_MHC_POST],
                [TaskType.TASK_MHC_NORM_CAST, TaskType.TASK_MHC_INPUT_MIX, TaskType.TASK_RMS_NORM],
                [TaskType.TASK_MHC_MAPPING],
            ],
            self.wave_tiles * op.split_value,
            owner="mega_mhc",
        )


def build_mega_mhc_graph(
    token_count: int, hidden_size: int, num_cube_cores: int, token_tile: int = DEFAULT_TOKEN_TILE
) -> tuple[ComputeGraph, TaskSplitValue]:
    """The forward graph and its topology, split.

    Args:
        token_count: T, all leading dimensions multiplied.
        hidden_size: C, of one stream.
        num_cube_cores: cube workers; the vector queue comes in waves of twice as many tiles.
        token_tile: tokens of a task, see :func:`resolve_token_tile`.

    Raises:
        InputError: a size is not positive, or the tile does not fit.
    """
    if token_count <= 0 or hidden_size <= 0 or num_cube_cores <= 0:
        raise InputError(
            "token_count, hidden_size and num_cube_cores must be positive, "
            f"got {(token_count, hidden_size, num_cube_cores)}"
        )
    tile = resolve_token_tile(token_count, token_tile, num_cube_cores)
    tile_count = ceil_div(token_count, tile)
    layout = build_event_layout(tile_count)
    ring_slots = resolve_ring_slots(tile_count, tile, num_cube_cores)
    tiles = np.arange(tile_count)
    norm, input_mix = layout.norm_base + tiles, layout.input_mix_base + tiles
    projection = layout.projection_base + tiles
    slot_free = np.where(tiles < ring_slots, layout.post_done, projection - ring_slots)
    fills: dict[str, FillConfig] = {
        "mhc_post": StageFill(TaskType.TASK_MHC_POST, _VECTOR, EVENT_INVALID_ID, layout.post_done),
        "mhc_norm_cast": StageFill(TaskType.TASK_MHC_NORM_CAST, _VECTOR, slot_free, norm),
        "mhc_projection": StageFill(TaskType.TASK_MHC_PROJECTION, _CUBE, norm, projection),
        "mhc_input_mix": StageFill(TaskType.TASK_MHC_INPUT_MIX, _VECTOR, norm, input_mix),
        "mhc_mapping": StageFill(TaskType.TASK_MHC_MAPPING, _VECTOR, projection, layout.final),
        "mhc_rms_norm": _OrderingFill(
            TaskType.TASK_RMS_NORM, _VECTOR, input_mix, layout.final, wave_tiles=2 * num_cube_cores
        ),
    }
    return _connect(token_count, hidden_size, tile, tile_count, fills)


def _connect(
    token_count: int, hidden_size: int, tile: int, tile_count: int, fills: dict[str, FillConfig]
) -> tuple[ComputeGraph, TaskSplitValue]:
    """The six operators with their edges; every stage is a source of ``tile_count`` tasks."""
    shape = [token_count, hidden_size]
    names = ("residual", "new_residual", "staged", "logits", "mixed", "block_input", "next_mixes")
    spec = {name: TensorSpec(name, shape, position) for position, name in enumerate(names)}
    operators = (
        ("mhc_post", OpType.MHC_POST, "residual", "new_residual", "MhcPost"),
        ("mhc_norm_cast", OpType.MHC_NORM_CAST, "new_residual", "staged", "MhcNormCast"),
        ("mhc_projection", OpType.MHC_PROJECTION, "staged", "logits", "MhcProjection"),
        ("mhc_input_mix", OpType.MHC_INPUT_MIX, "new_residual", "mixed", "MhcInputMix"),
        ("mhc_rms_norm", OpType.RMS_NORM, "mixed", "block_input", "MhcRmsNorm"),
        ("mhc_mapping", OpType.MHC_MAPPING, "logits", "next_mixes", "MhcMapping"),
    )
    graph = ComputeGraph()
    for name, op_type, source, target, diagnostic_name in operators:
        graph.add_op(
            OperatorNode(
                name=name,
                op_type=op_type,
                inputs=[spec[source]],
                outputs=[spec[target]],
                param_positions=[spec[source].param_position, spec[target].param_position],
                split_value=tile,
                split_spec=fixed_split(tile_count, [0]),
                fill_config=fills[name],
                diagnostic_name=diagnostic_name,
            )
        )
    graph.add_edge("mhc_post", "mhc_norm_cast").add_edge("mhc_norm_cast", "mhc_projection")
    graph.add_edge("mhc_projection", "mhc_mapping").add_edge("mhc_norm_cast", "mhc_input_mix")
    graph.add_edge("mhc_input_mix", "mhc_rms_norm")
    topology = token_topology(token_count)
    graph.propagate_splits(topology)
    return graph, topology
