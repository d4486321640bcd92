"""Lowering of our own graphs (:mod:`tiled`, :mod:`tiled_grad`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fused_mhc.errors import InputError
from fused_mhc.scheduler import tiled, tiled_grad
from fused_mhc.scheduler.boundary import check_sizes, task_rows
from fused_mhc.scheduler.event import MAX_EVENT_CAPACITY
from fused_mhc.scheduler.lower import Dtypes, Lowered, Workers, lower
from fused_mhc.scheduler.order import order_queue
from fused_mhc.scheduler.program import READ, WRITE, AccessWriter, Buffer, EventRange, Program, Stage
from fused_mhc.scheduler.runtime_config import build_runtime_config
from fused_mhc.scheduler.split import ceil_div, round_up
from fused_mhc.scheduler.task import TaskAiCoreType, TaskType

__all__ = ["lower_tiled_mhc"]


def lower_tiled_mhc(
    direction: str,
    token_count: int,
    hidden_size: int,
    num_streams: int = 4,
    *,
    num_cube_workers: int,
    num_vector_workers: int,
    mixed_workers: int | None = None,
    token_tile: int | None = None,
    group_rows: int | None = None,
    parts: int | None = None,
    wave_rows: int | None = None,
    window_rows: int | None = None,
    stream_dtype: str = "bfloat16",
    compute_dtype: str = "float32",
    dtypes: Mapping[str, str] | None = None,
    has_norm_weight: bool = True,
) -> Program:
    """Lower one of our own graphs for the same boundary as :func:`lower_mega_mhc`; the further arguments are
    its.

    Args:
        token_tile: 8, 16 or 32 tokens; None for 8 forward, 32 backward. Doubles until the tables hold the
            graph.
        group_rows: tokens of a macro-tile (forward, default 64) or of a chunk of g_phi (backward, default
            256).
        parts: slices of phi's columns (forward, default 4) or of C (backward, default 8), at the most.
        wave_rows: tokens of a wave of the vector queue; None for about one task a worker, in whole groups.
        window_rows: forward only: tokens that may be between post and projection, so that new_residual is still in the
            L2 cache when it is projected; fewer of them idle more workers. None (default): no limit.

    Raises:
        InputError: a bad size or direction, or tiles that do not fit one another.
    """
    check_sizes(
        direction,
        {
            "token_count": token_count,
            "hidden_size": hidden_size,
            "num_streams": num_streams,
            "num_cube_workers": num_cube_workers,
            "num_vector_workers": num_vector_workers,
            "mixed_workers": mixed_workers,
            "token_tile": token_tile,
            "group_rows": group_rows,
            "parts": parts,
            "wave_rows": wave_rows,
            "window_rows": window_rows,
        },
    )
    workers = Workers(num_cube_workers, num_vector_workers, mixed_workers)
    given = {"token_tile": token_tile, "parts": parts}
    if direction == "forward":
        given |= {"macro_tile": group_rows, "window_rows": window_rows}
        chosen = {name: value for name, value in given.items() if value is not None}
        lowered = _forward(
            tiled.make_tiling(token_count, num_streams * hidden_size, **chosen),
            hidden_size,
            workers,
            wave_rows,
        )
    else:
        if window_rows is not None:
            raise InputError(f"window_rows: expected None for the backward graph, got {window_rows}")
        given["chunk_rows"] = group_rows
        chosen = {name: value for name, value in given.items() if value is not None}
        lowered = _backward(
            tiled_grad.make_tiling(token_count, hidden_size, **chosen), hidden_size, workers, wave_rows
        )
    sizes = (token_count, hidden_size, num_streams)
    return lower(
        lowered, direction, sizes, workers, Dtypes(stream_dtype, compute_dtype, dtypes or {}), has_norm_weight
    )


def _wave_rows(wave_rows: int | None, tile: int, group: int, tasks_of_tile: int, workers: Workers) -> int:
    """Tokens of a wave in whole tiles: as asked, or so many that every vector worker is busy once (in whole groups,
    if that is more than one)."""
    if wave_rows is not None:
        return round_up(wave_rows, tile)
    rows = ceil_div(workers.mixed or workers.vector, tasks_of_tile) * tile
    return rows if rows < group else rows // group * group


def _forward(tiling: tiled.TiledTiling, hidden_size: int, workers: Workers, wave_rows: int | None) -> Lowered:
    graph, topology = tiled.build_tiled_graph(tiling, hidden_size)
    config = build_runtime_config(graph, topology, num_cube_cores=workers.cube)
    wave = _wave_rows(wave_rows, tiling.token_tile, tiling.macro_tile, 1, workers)
    # A mapping task stays two waves behind the last post task of its macro-tile: its projection runs in
    # between.
    lag = ceil_div(tiling.macro_tile, wave) + 2
    order_queue(
        config,
        TaskAiCoreType.TASK_AICORE_VECTOR,
        [[TaskType.TASK_TILE_POST_MIX_NORM, (TaskType.TASK_TILE_MAPPING, lag)]],
        wave,
        owner="tiled",
    )
    layout = tiled.build_event_layout(tiling.macro_count)
    return Lowered(
        "tiled",
        graph,
        config,
        (
            EventRange("post", layout.post_base, tiling.macro_count),
            EventRange("projection", layout.projection_base, tiling.macro_count),
            EventRange("final", layout.final, 1),
        ),
        layout.event_count,
        MAX_EVENT_CAPACITY,
        {
            "token_tile": tiling.token_tile,
            "macro_tile": tiling.macro_tile,
            "parts": tiling.parts,
            "part_width": tiling.part_width,
            "wave_rows": wave,
        },
        "sum_of_squares T compute scratch | logits_partial parts,T,N compute scratch",
        {"parts": tiling.parts},
        _forward_accesses,
        tiling.parts,
        "new_residual",
    )


def _forward_accesses(
    writer: AccessWriter, stages: dict[str, Stage], geometry: dict[str, int], buffers: tuple[Buffer, ...]
) -> None:
    tokens, parts, macro = geometry["token_count"], geometry["parts"], geometry["macro_tile"]
    streams, width = geometry["num_streams"], geometry["part_width"]
    outputs, columns = streams * streams + 2 * streams, streams * geometry["hidden_size"]

    tasks, start, stop = task_rows(stages["tile_post_mix_norm"], geometry["token_tile"], tokens)
    writer.rows(
        tasks,
        READ,
        "residual previous_output previous_pre_mix previous_post_mix previous_residual_mix",
        start,
        stop,
    )
    writer.whole(tasks, READ, "norm_weight" if writer.has("norm_weight") else "")
    writer.rows(tasks, WRITE, "sum_of_squares block_input mixed_rstd", start, stop)
    block = (start // macro * macro, np.minimum(start // macro * macro + macro, tokens))
    for piece in range(parts):
        writer.slices(tasks, WRITE, "new_residual", start, stop, piece, width, columns, block)

    tasks, start, stop = task_rows(stages["tile_projection"], macro, tokens, parts)
    part = np.arange(len(tasks)) % parts
    writer.slices(tasks, READ, "new_residual", start, stop, part, width, columns)
    writer.slices(tasks, READ, "phi", 0, outputs, part, width, columns)
    base = (part * tokens + start) * outputs
    writer.elements(tasks, WRITE, "logits_partial", base, base + (stop - start) * outputs)

    tasks, start, stop = task_rows(stages["tile_mapping"], macro, tokens)
    for piece in range(parts):
        base = (piece * tokens + start) * outputs
        writer.elements(tasks, READ, "logits_partial", base, base + (stop - start) * outputs)
    writer.rows(tasks, READ, "sum_of_squares", start, stop)
    writer.whole(tasks, READ, "alpha bias")
    writer.rows(tasks, WRITE, "logits u next_pre_mix next_post_mix next_residual_mix", start, stop)


def _backward(
    tiling: tiled_grad.TiledGradTiling, hidden_size: int, workers: Workers, wave_rows: int | None
) -> Lowered:
    graph, topology = tiled_grad.build_tiled_grad_graph(tiling, hidden_size)
    config = build_runtime_config(graph, topology, num_cube_cores=workers.cube)
    wave = _wave_rows(wave_rows, tiling.token_tile, tiling.chunk_rows, tiling.parts, workers)
    # Mapping tasks are few and slow, so they run two waves ahead; the mixes' gradients follow the last of
    # their chunk.
    order_queue(
        config,
        TaskAiCoreType.TASK_AICORE_VECTOR,
        [
            [
                (TaskType.TASK_TILE_MAPPING_GRAD, -2),
                TaskType.TASK_TILE_NORM_GRAD,
                TaskType.TASK_TILE_POST_GRAD,
                (TaskType.TASK_TILE_MIX_GRAD, ceil_div(tiling.chunk_rows, wave) + 1),
            ]
        ],
        wave,
        owner="tiled_grad",
    )
    layout = tiled_grad.build_event_layout(tiling.tile_count, tiling.chunk_count)
    return Lowered(
        "tiled_grad",
        graph,
        config,
        (
            EventRange("tile_sums", layout.tile_base, tiling.tile_count),
            EventRange("chunk_done", layout.chunk_base, tiling.chunk_count),
            EventRange("final", layout.final, 1),
        ),
        layout.event_count,
        MAX_EVENT_CAPACITY,
        {
            "token_tile": tiling.token_tile,
            "chunk_rows": tiling.chunk_rows,
            "parts": tiling.parts,
            "part_width": tiling.part_width,
            "phi_parts": tiling.phi_parts,
            "phi_width": tiling.phi_width,
            "wave_rows": wave,
        },
        """
        norm_dots parts,T,2n+1 compute scratch | post_dots parts,T,n+nn compute scratch
        g_scaled_logits T,N compute scratch | coefficient T compute scratch
        partial_norm_weight tiles,C compute partial | partial_alpha tiles,3 compute partial
        partial_bias tiles,N compute partial | partial_phi chunks,N,K compute partial
        """,
        {"parts": tiling.parts, "tiles": tiling.tile_count, "chunks": tiling.chunk_count},
        _backward_accesses,
        tiling.parts,
        "residual previous_output g_block_input g_new_residual g_residual g_previous_output partial_norm_weight "
        "partial_phi",
    )


def _backward_accesses(
    writer: AccessWriter, stages: dict[str, Stage], geometry: dict[str, int], buffers: tuple[Buffer, ...]
) -> None:
    tokens, parts, tile = geometry["token_count"], geometry["parts"], geometry["token_tile"]
    columns, width, chunk = geometry["hidden_size"], geometry["part_width"], geometry["chunk_rows"]
    streams = geometry["num_streams"]
    weight = "norm_weight" if writer.has("norm_weight") else ""
    mixes = "previous_pre_mix previous_post_mix previous_residual_mix"

    def dots(
        tasks: np.ndarray, mode: int, name: str, piece: np.ndarray | int, start: np.ndarray, stop: np.ndarray
    ) -> None:
        """Rows ``start:stop`` of one slice's sums."""
        sums = 2 * streams + 1 if name == "norm_dots" else streams + streams * streams
        base = (piece * tokens + start) * sums
        writer.elements(tasks, mode, name, base, base + (stop - start) * sums)

    tasks, start, stop = task_rows(stages["tile_mapping_grad"], tile, tokens)
    index = np.arange(len(tasks))
    writer.rows(tasks, READ, "g_next_pre_mix g_next_post_mix g_next_residual_mix logits u", start, stop)
    writer.rows(tasks, READ, "next_pre_mix next_post_mix next_residual_mix", start, stop)
    writer.whole(tasks, READ, "alpha bias")
    writer.rows(tasks, WRITE, "g_scaled_logits coefficient", start, stop)
    writer.rows(tasks, WRITE, "partial_alpha partial_bias", index, index + 1)

    tasks, start, stop = task_rows(stages["tile_norm_grad"], tile, tokens, parts)
    part, tile_index = np.arange(len(tasks)) % parts, np.arange(len(tasks)) // parts
    pieces = (start, stop, part, width, columns)
    writer.slices(tasks, READ, "residual previous_output g_block_input", *pieces)
    writer.rows(tasks, READ, f"{mixes} mixed_rstd", start, stop)
    writer.slices(tasks, READ, weight, 0, 1, part, width, columns)
    dots(tasks, WRITE, "norm_dots", part, start, stop)
    if weight:
        writer.slices(tasks, WRITE, "partial_norm_weight", tile_index, tile_index + 1, part, width, columns)

    tasks, start, stop = task_rows(stages["tile_post_grad"], tile, tokens, parts)
    writer.slices(tasks, READ, "residual previous_output g_block_input g_new_residual", *pieces)
    writer.rows(tasks, READ, f"{mixes} mixed_rstd g_scaled_logits coefficient", start, stop)
    writer.slices(tasks, READ, weight, 0, 1, part, width, columns)
    outputs = streams * streams + 2 * streams
    writer.slices(tasks, READ, "phi", 0, outputs, part, width, columns)
    for piece in range(parts):
        dots(tasks, READ, "norm_dots", piece, start, stop)
    writer.slices(tasks, WRITE, "g_residual g_previous_output", *pieces)
    dots(tasks, WRITE, "post_dots", part, start, stop)

    phi_parts, phi_width = geometry["phi_parts"], geometry["phi_width"]
    tasks, start, stop = task_rows(stages["tile_phi_grad"], chunk, tokens, phi_parts)
    part, chunk_index = np.arange(len(tasks)) % phi_parts, np.arange(len(tasks)) // phi_parts
    writer.rows(tasks, READ, f"{mixes} g_scaled_logits", start, stop)
    writer.slices(tasks, WRITE, "partial_phi", chunk_index, chunk_index + 1, part, phi_width, columns)
    tiles = (stop - start + tile - 1) // tile
    owner = np.repeat(np.arange(len(tasks)), tiles)
    first = start[owner] + (np.arange(len(owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile
    last = np.minimum(first + tile, tokens)
    writer.slices(
        tasks[owner], READ, "residual previous_output", first, last, part[owner], phi_width, columns
    )

    tasks, start, stop = task_rows(stages["tile_mix_grad"], chunk, tokens)
    for piece in range(parts):
        dots(tasks, READ, "norm_dots", piece, start, stop)
        dots(tasks, READ, "post_dots", piece, start, stop)
    writer.rows(tasks, READ, "previous_pre_mix mixed_rstd", start, stop)
    writer.rows(tasks, WRITE, "g_previous_pre_mix g_previous_post_mix g_previous_residual_mix", start, stop)
