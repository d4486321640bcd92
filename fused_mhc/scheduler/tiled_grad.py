"""Our backward graph: column slices of small tiles, nothing waits for all tiles, no partial sum is cleared
first.

::

    tile_mapping_grad --(tile)--+
                                +--> tile_post_grad --(chunk)--> tile_mix_grad
    tile_norm_grad ----(tile)---+                      (chunk)--> tile_phi_grad

A token tile has one mapping task and ``parts`` tasks, one for each slice of C, in ``tile_norm_grad`` (sums
over C leave as one partial sum a slice) and ``tile_post_grad`` (adds those in slice order, then makes the
gradients of its slice, ``(g_logits*u) @ phi`` included, so that it never passes through memory).
new_residual and mixed are made again from residual and previous_output. A chunk of tokens is small enough to
be still in the L2 cache when ``tile_phi_grad`` (cube) multiplies it: at best 15 units of traffic a token and
the partial sums of g_phi, one for each chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fused_mhc.errors import InputError
from fused_mhc.scheduler.event import EVENT_INVALID_ID, MAX_EVENT_CAPACITY
from fused_mhc.scheduler.fill import StageFill
from fused_mhc.scheduler.graph import ComputeGraph, OperatorNode, OpType, TensorSpec
from fused_mhc.scheduler.split import TaskSplitValue, ceil_div, fixed_split, token_topology
from fused_mhc.scheduler.task import MAX_TASK_NUM, TaskAiCoreType, TaskType
from fused_mhc.scheduler.tiled import PART_GRANULARITY, check_token_tile, split_columns

__all__ = [
    "TiledGradEventLayout",
    "TiledGradTiling",
    "build_event_layout",
    "build_tiled_grad_graph",
    "make_tiling",
]

DEFAULT_TOKEN_TILE = 32
DEFAULT_CHUNK_ROWS = 256
DEFAULT_PARTS = 8
_PHI_CUTS = (4, 2, 1)
_CUBE, _VECTOR = TaskAiCoreType.TASK_AICORE_CUBE, TaskAiCoreType.TASK_AICORE_VECTOR


@dataclass(frozen=True)
class TiledGradTiling:
    """Tiles, chunks (a whole number of tiles; the unit of the sum over tokens of g_phi) and slices of C.

    A chunk has more rows than a tile, so ``tile_phi_grad`` takes narrower slices (a whole number in each
    other one).
    """

    token_count: int
    token_tile: int
    chunk_rows: int
    parts: int
    part_width: int
    phi_parts: int
    phi_width: int
    tile_count: int
    chunk_count: int


@dataclass(frozen=True)
class TiledGradEventLayout:
    """First event id of each purpose."""

    tile_base: int
    chunk_base: int
    final: int
    event_count: int


def build_event_layout(tile_count: int, chunk_count: int) -> TiledGradEventLayout:
    """Events: sums of each tile, gradients of each chunk, the end."""
    final = tile_count + chunk_count
    return TiledGradEventLayout(0, tile_count, final, final + 1)


def make_tiling(
    token_count: int,
    hidden_size: int,
    token_tile: int = DEFAULT_TOKEN_TILE,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
    parts: int = DEFAULT_PARTS,
) -> TiledGradTiling:
    """Tiles of ``token_count`` tokens and slices of C; tiles and chunks double until the tables hold the
    graph."""
    check_token_tile(token_tile)
    if chunk_rows <= 0 or chunk_rows % token_tile:
        raise InputError(f"chunk_rows: expected a multiple of token_tile ({token_tile}), got {chunk_rows}")
    count, width = split_columns(hidden_size, parts)
    phi_width = next(width // cuts for cuts in _PHI_CUTS if width % (cuts * PART_GRANULARITY) == 0)
    phi_parts = ceil_div(hidden_size, phi_width)
    while True:
        tiles, chunks = ceil_div(token_count, token_tile), ceil_div(token_count, chunk_rows)
        fits_tasks = tiles * (2 * parts + 1) + chunks * (_PHI_CUTS[0] * parts + 1) <= MAX_TASK_NUM
        if fits_tasks and build_event_layout(tiles, chunks).event_count <= MAX_EVENT_CAPACITY:
            return TiledGradTiling(
                token_count, token_tile, chunk_rows, count, width, phi_parts, phi_width, tiles, chunks
            )
        token_tile, chunk_rows = 2 * token_tile, 2 * chunk_rows


def build_tiled_grad_graph(tiling: TiledGradTiling, hidden_size: int) -> tuple[ComputeGraph, TaskSplitValue]:
    """The graph of that tiling and its topology, split."""
    layout = build_event_layout(tiling.tile_count, tiling.chunk_count)
    tiles, chunks = np.arange(tiling.tile_count), np.arange(tiling.chunk_count)
    tile_pieces, chunk_pieces = np.repeat(tiles, tiling.parts), np.repeat(chunks, tiling.phi_parts)
    chunk_of_piece = tile_pieces * tiling.token_tile // tiling.chunk_rows
    data = TensorSpec("grad_data", [tiling.token_count, hidden_size], 0)
    graph = ComputeGraph()
    for name, count, rows, fill in (
        (
            "tile_mapping_grad",
            tiling.tile_count,
            tiling.token_tile,
            StageFill(TaskType.TASK_TILE_MAPPING_GRAD, _VECTOR, EVENT_INVALID_ID, layout.tile_base + tiles),
        ),
        (
            "tile_norm_grad",
            len(tile_pieces),
            tiling.token_tile,
            StageFill(
                TaskType.TASK_TILE_NORM_GRAD,
                _VECTOR,
                EVENT_INVALID_ID,
                layout.tile_base + tile_pieces,
                parts=tiling.parts,
            ),
        ),
        (
            "tile_post_grad",
            len(tile_pieces),
            tiling.token_tile,
            StageFill(
                TaskType.TASK_TILE_POST_GRAD,
                _VECTOR,
                layout.tile_base + tile_pieces,
                layout.chunk_base + chunk_of_piece,
                parts=tiling.parts,
            ),
        ),
        (
            "tile_phi_grad",
            len(chunk_pieces),
            tiling.chunk_rows,
            StageFill(
                TaskType.TASK_TILE_PHI_GRAD,
                _CUBE,
                layout.chunk_base + chunk_pieces,
                layout.final,
                parts=tiling.phi_parts,
            ),
        ),
        (
            "tile_mix_grad",
            tiling.chunk_count,
            tiling.chunk_rows,
            StageFill(TaskType.TASK_TILE_MIX_GRAD, _VECTOR, layout.chunk_base + chunks, layout.final),
        ),
    ):
        graph.add_op(
            OperatorNode(
                name=name,
                op_type=OpType.MHC_PIPELINE,
                inputs=[data],
                outputs=[],
                param_positions=[0],
                split_value=rows,
                split_spec=fixed_split(count, []),
                fill_config=fill,
                diagnostic_name="".join(word.capitalize() for word in name.split("_")),
            )
        )
    graph.add_edge("tile_mapping_grad", "tile_post_grad").add_edge("tile_norm_grad", "tile_post_grad")
    graph.add_edge("tile_post_grad", "tile_phi_grad").add_edge("tile_post_grad", "tile_mix_grad")
    topology = token_topology(tiling.token_count)
    graph.propagate_splits(topology)
    return graph, topology
