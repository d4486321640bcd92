"""Our forward graph: small tiles and an event a macro-tile, so that a stage reads from the L2 cache what the
last left.

::

    tile_post_mix_norm --(macro-tile)--> tile_projection --(macro-tile)--> tile_mapping

``tile_post_mix_norm`` (vector, 8..32 tokens) makes new_residual, its sums of squares, mixed and block_input
of one tile, so no stage reads or writes mixed in memory. ``tile_projection`` (cube) multiplies a macro-tile
with one of ``parts`` slices of phi's columns; ``tile_mapping`` (vector) adds those in slice order. Nothing
waits for all tiles: at best 10 units of traffic a token (a unit is the C values of one stream), where the
fixed graph's barrier costs 14. As many workers as an H200 has hold more rows than its L2 at once; a window keeps the
posts from running ahead: those of a macro-tile then wait for the projection of the one so many rows before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fused_mhc.errors import InputError
from fused_mhc.scheduler.event import EVENT_INVALID_ID, MAX_EVENT_CAPACITY
from fused_mhc.scheduler.fill import StageFill
from fused_mhc.scheduler.graph import ComputeGraph, OperatorNode, OpType, TensorSpec
from fused_mhc.scheduler.split import TaskSplitValue, ceil_div, fixed_split, round_up, token_topology
from fused_mhc.scheduler.task import MAX_TASK_NUM, TaskAiCoreType, TaskType

__all__ = [
    "MAX_PARTS",
    "PART_GRANULARITY",
    "TiledEventLayout",
    "TiledTiling",
    "build_event_layout",
    "build_tiled_graph",
    "check_token_tile",
    "make_tiling",
    "split_columns",
]

DEFAULT_TOKEN_TILE = 8
DEFAULT_MACRO_TILE = 64
DEFAULT_PARTS = 4
#: Column slices are whole multiples of this, but for the last.
PART_GRANULARITY = 32
#: Slices at the most: narrower ones would be shorter than what one memory transaction moves.
MAX_PARTS = 64
_TOKEN_TILES = (8, 16, 32)
_CUBE, _VECTOR = TaskAiCoreType.TASK_AICORE_CUBE, TaskAiCoreType.TASK_AICORE_VECTOR


def check_token_tile(token_tile: int) -> None:
    """Refuse a token tile that is not 8, 16 or 32."""
    if token_tile not in _TOKEN_TILES:
        raise InputError(f"token_tile: expected one of {_TOKEN_TILES} for a tiled graph, got {token_tile!r}")


def split_columns(columns: int, parts: int) -> tuple[int, int]:
    """``(parts, width)``: at most ``parts`` slices of ``width`` columns, a multiple of 32 each but the
    last."""
    if parts > MAX_PARTS:
        raise InputError(f"parts: expected at most {MAX_PARTS} slices, got {parts}")
    width = round_up(ceil_div(columns, parts), PART_GRANULARITY)
    return ceil_div(columns, width), width


@dataclass(frozen=True)
class TiledTiling:
    """Tiles, macro-tiles (a whole number of tiles) and column slices of the projection; ``window`` macro-tiles may be
    between their posts and their projection (None: any number)."""

    token_count: int
    token_tile: int
    macro_tile: int
    parts: int
    part_width: int
    tile_count: int
    macro_count: int
    window: int | None


@dataclass(frozen=True)
class TiledEventLayout:
    """First event id of each purpose."""

    post_base: int
    projection_base: int
    final: int
    event_count: int


def build_event_layout(macro_count: int) -> TiledEventLayout:
    """Events: posts of each macro-tile, projection of each macro-tile, the end."""
    return TiledEventLayout(0, macro_count, 2 * macro_count, 2 * macro_count + 1)


def make_tiling(
    token_count: int,
    columns: int,
    token_tile: int = DEFAULT_TOKEN_TILE,
    macro_tile: int = DEFAULT_MACRO_TILE,
    parts: int = DEFAULT_PARTS,
    window_rows: int | None = None,
) -> TiledTiling:
    """Tiles of ``token_count`` tokens and slices of the projection's ``columns``; all tiles double together
    until the tables hold the graph."""
    check_token_tile(token_tile)
    if macro_tile <= 0 or macro_tile % token_tile:
        raise InputError(f"macro_tile: expected a multiple of token_tile ({token_tile}), got {macro_tile}")
    count, width = split_columns(columns, parts)
    while True:
        tiles, macros = ceil_div(token_count, token_tile), ceil_div(token_count, macro_tile)
        fits_tasks = tiles + macros * (parts + 1) <= MAX_TASK_NUM
        if fits_tasks and build_event_layout(macros).event_count <= MAX_EVENT_CAPACITY:
            window = None if window_rows is None else max(1, window_rows // macro_tile)
            return TiledTiling(token_count, token_tile, macro_tile, count, width, tiles, macros, window)
        token_tile, macro_tile = 2 * token_tile, 2 * macro_tile


def build_tiled_graph(tiling: TiledTiling, hidden_size: int) -> tuple[ComputeGraph, TaskSplitValue]:
    """The graph of that tiling and its topology, split."""
    layout = build_event_layout(tiling.macro_count)
    tiles, macros = np.arange(tiling.tile_count), np.arange(tiling.macro_count)
    macro_of_tile = tiles * tiling.token_tile // tiling.macro_tile
    before = macro_of_tile - (tiling.window or tiling.macro_count)
    may_start = np.where(before >= 0, layout.projection_base + before, EVENT_INVALID_ID)
    pieces = np.repeat(macros, tiling.parts)
    shape = [tiling.token_count, hidden_size]
    names = ("residual", "new_residual", "logits_partial", "next_mixes")
    spec = {name: TensorSpec(name, shape, position) for position, name in enumerate(names)}
    graph = ComputeGraph()
    previous = None
    for name, op_type, source, target, count, rows, fill in (
        (
            "tile_post_mix_norm",
            OpType.MHC_POST,
            "residual",
            "new_residual",
            tiling.tile_count,
            tiling.token_tile,
            StageFill(TaskType.TASK_TILE_POST_MIX_NORM, _VECTOR, may_start, layout.post_base + macro_of_tile),
        ),
        (
            "tile_projection",
            OpType.MHC_PROJECTION,
            "new_residual",
            "logits_partial",
            len(pieces),
            tiling.macro_tile,
            StageFill(
                TaskType.TASK_TILE_PROJECTION,
                _CUBE,
                layout.post_base + pieces,
                layout.projection_base + pieces,
                parts=tiling.parts,
            ),
        ),
        (
            "tile_mapping",
            OpType.MHC_MAPPING,
            "logits_partial",
            "next_mixes",
            tiling.macro_count,
            tiling.macro_tile,
            StageFill(TaskType.TASK_TILE_MAPPING, _VECTOR, layout.projection_base + macros, layout.final),
        ),
    ):
        op = OperatorNode(
            name=name,
            op_type=op_type,
            inputs=[spec[source]],
            outputs=[spec[target]],
            param_positions=[spec[source].param_position, spec[target].param_position],
            split_value=rows,
            split_spec=fixed_split(count, [0]),
            fill_config=fill,
            diagnostic_name="".join(word.capitalize() for word in name.split("_")),
        )
        graph.add_op(op)
        if previous is not None:
            graph.add_edge(previous, op)
        previous = op
    topology = token_topology(tiling.token_count)
    graph.propagate_splits(topology)
    return graph, topology
