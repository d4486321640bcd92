"""What the task bodies of the megakernel share: the buffers by name, rows and columns of a task, loads of the mixes."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fused_mhc.ops._triton_common import store, widen
from fused_mhc.ops.h_aggregate._triton import aggregate_tile
from fused_mhc.ops.mega_mhc._triton_tiles import (
    load_masked,
    load_mixes,
    load_streams,
    update_tile,
)

__all__ = [
    "Buffers",
    "collapse",
    "group_sums",
    "load_column",
    "load_inputs",
    "load_pre",
    "make_new",
    "row_mask",
    "stages",
    "store_column",
    "store_sums",
    "tile_mask",
    "zero_sums",
]


class Buffers(NamedTuple):
    """A pointer to every buffer that a Program may have, by the names of the Program; None: absent, or not wanted.
    Dense and row-major, but for ``residual``, whose strides the kernel gets."""

    previous_output: Any = None
    residual: Any = None
    previous_pre_mix: Any = None
    previous_post_mix: Any = None
    previous_residual_mix: Any = None
    alpha: Any = None
    bias: Any = None
    norm_weight: Any = None
    new_residual: Any = None
    next_pre_mix: Any = None
    next_post_mix: Any = None
    next_residual_mix: Any = None
    block_input: Any = None
    logits: Any = None
    u: Any = None
    mixed_rstd: Any = None
    sum_of_squares: Any = None
    staged: Any = None
    mixed: Any = None
    logits_partial: Any = None
    g_block_input: Any = None
    g_new_residual: Any = None
    g_next_pre_mix: Any = None
    g_next_post_mix: Any = None
    g_next_residual_mix: Any = None
    g_previous_output: Any = None
    g_residual: Any = None
    g_previous_pre_mix: Any = None
    g_previous_post_mix: Any = None
    g_previous_residual_mix: Any = None
    g_phi: Any = None
    g_alpha: Any = None
    g_bias: Any = None
    g_norm_weight: Any = None
    g_mixed: Any = None
    g_scaled_logits: Any = None
    coefficient: Any = None
    g_projected: Any = None
    norm_dots: Any = None
    post_dots: Any = None
    partial_norm_weight: Any = None
    partial_alpha: Any = None
    partial_bias: Any = None
    partial_phi: Any = None


@triton.constexpr_function
def stages(n, stream):
    """Stages of a body's walk over columns (tiles to come are on their way to shared memory meanwhile), as far as
    shared memory goes; ``stream``: the streams' dtype in Triton."""
    return 3 if n * stream.primitive_bitwidth <= 64 else 1


@triton.jit
def row_mask(first, stop, ROWS: tl.constexpr):
    """``(rows, which of them are of the task)``."""
    rows = first + tl.arange(0, ROWS)
    return rows, rows < stop


@triton.jit
def tile_mask(inside, column, stop, WIDTH: tl.constexpr):
    """``(columns [1, WIDTH], mask [rows, WIDTH])``."""
    columns = (column + tl.arange(0, WIDTH))[None, :]
    return columns, inside[:, None] & (columns < stop)


@triton.jit
def load_column(pointer, rows, inside):
    """One number of every token as a column ``[rows, 1]`` in fp32."""
    return widen(tl.load(pointer + rows, mask=inside, other=0.0))[:, None]


@triton.jit
def store_column(pointer, rows, inside, value):
    """Write one number of every token from a column."""
    store(pointer + rows, tl.reshape(value, (value.shape[0],)), inside)


@triton.jit
def load_inputs(b, rows, inside, n: tl.constexpr, ENTRY: tl.constexpr):
    """``(residual mix, post mix)`` of a site before as columns; nothing at the ENTRY of a chain."""
    if ENTRY:
        return (), ()
    else:
        mixing = load_mixes(b.previous_residual_mix, n * n, rows, inside, n * n)
        post = load_mixes(b.previous_post_mix, n, rows, inside, n)
        return mixing, post


@triton.jit
def make_new(
    b,
    mixing,
    post,
    rows,
    columns,
    mask,
    stride,
    stream_stride,
    n: tl.constexpr,
    C: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """``(streams, output, new streams)`` of a tile; at the ENTRY the new streams are the old ones."""
    streams = load_streams(b.residual, stream_stride, rows[:, None] * stride + columns, mask, n)
    if ENTRY:
        return streams, streams[0], streams
    else:
        output = load_masked(b.previous_output + rows[:, None] * C + columns, mask)
        new = update_tile(streams, output, mixing, post, n, b.residual.dtype.element_ty)
        return streams, output, new


@triton.jit
def collapse(new, pre, n: tl.constexpr, ENTRY: tl.constexpr):
    """``mixed``: the streams by the pre mix, or (ENTRY) stream 0."""
    if ENTRY:
        return widen(new[0])
    else:
        return aggregate_tile(new, pre, n)


@triton.jit
def load_pre(b, rows, inside, n: tl.constexpr, ENTRY: tl.constexpr):
    """The pre mix of the site before as columns; nothing at the ENTRY."""
    if ENTRY:
        return ()
    else:
        return load_mixes(b.previous_pre_mix, n, rows, inside, n)


@triton.jit
def zero_sums(COUNT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """COUNT sums along the columns, each spread over groups of 8 neighbours (which one thread holds)."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros((ROWS, WIDTH // 8), tl.float32),)
    return sums


@triton.jit
def group_sums(value):
    """``[rows, columns]`` added over groups of 8 neighbours."""
    groups = tl.reshape(value, (value.shape[0], value.shape[1] // 8, 8))
    return tl.sum(groups, axis=2)


@triton.jit
def store_sums(pointer, stride, sums, rows, inside, COUNT: tl.constexpr):
    """Write COUNT sums of every token, in a row of ``stride``."""
    for k in tl.static_range(COUNT):
        store(pointer + rows * stride + k, tl.sum(sums[k], axis=1), inside)
