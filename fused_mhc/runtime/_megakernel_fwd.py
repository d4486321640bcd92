"""The task bodies of the forward graphs: the tokens ``start`` to ``stop`` of one task.

Every loop walks ROWS tokens and WIDTH columns at a time, whatever the tile of the Program is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_mhc.ops._triton_common import store, widen
from fused_mhc.ops.mega_mhc._triton_tiles import load_masked, load_streams
from fused_mhc.ops.proj_rms_compute_h._triton_tiles import (
    alpha_columns,
    mapping_tile,
    project_tile,
    rms_tile,
)
from fused_mhc.ops.sinkhorn._triton import sinkhorn_load_tile, sinkhorn_store_tile, sinkhorn_tile

from ._megakernel_tiles import (
    collapse,
    load_inputs,
    load_pre,
    make_new,
    row_mask,
    stages,
    store_column,
    tile_mask,
)

__all__ = [
    "input_mix_task",
    "mapping_task",
    "norm_cast_task",
    "post_mix_norm_task",
    "post_task",
    "projection_task",
    "residual_logits",
    "rms_norm_task",
]


@triton.jit
def post_task(
    b,
    start,
    stop,
    stride,
    stream_stride,
    n: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """Step 1."""
    for first in range(start, stop, ROWS):
        rows, inside = row_mask(first, stop, ROWS)
        mixing, post = load_inputs(b, rows, inside, n, ENTRY)
        for column in tl.range(0, C, WIDTH, num_stages=stages(n, b.new_residual.dtype.element_ty)):
            columns, mask = tile_mask(inside, column, C, WIDTH)
            _, _, new = make_new(b, mixing, post, rows, columns, mask, stride, stream_stride, n, C, ENTRY)
            for j in tl.static_range(n):
                tl.store(b.new_residual + (rows[:, None] * n + j) * C + columns, new[j], mask=mask)


@triton.jit
def norm_cast_task(
    b, start, stop, slot_start, n: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Sums of squares, and a copy in the slot of the ring whose first row is ``slot_start``."""
    K: tl.constexpr = n * C
    for first in range(start, stop, ROWS):
        rows, inside = row_mask(first, stop, ROWS)
        square = tl.zeros((ROWS, WIDTH), tl.float32)
        for column in tl.range(0, K, WIDTH, num_stages=stages(n, b.new_residual.dtype.element_ty)):
            columns, mask = tile_mask(inside, column, K, WIDTH)
            new = tl.load(b.new_residual + rows[:, None] * K + columns, mask=mask, other=0.0)
            tl.store(b.staged + (rows - start + slot_start)[:, None] * K + columns, new, mask=mask)
            value = widen(new)
            square = tl.fma(value, value, square)
        tl.store(b.sum_of_squares + rows, tl.sum(square, axis=1), mask=inside)


@triton.jit
def projection_task(
    x_ptr,
    out_ptr,
    phi_ptr,
    start,
    stop,
    begin,
    end,
    width,
    n: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    RATIO: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    ORDER: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Steps ``begin`` to ``end`` of the projection of rows of ``x_ptr [.., width]``; phi in padded bf16 parts."""
    N: tl.constexpr = n * n + 2 * n
    cols = tl.arange(0, COLUMNS)
    padded = (width + STEP - 1) // STEP * STEP
    for first in range(start, stop, ROWS):
        rows, inside = row_mask(first, stop, ROWS)
        proj, _ = project_tile(
            x_ptr,
            phi_ptr,
            rows,
            inside,
            cols,
            width,
            width,
            padded * COLUMNS,
            padded,
            begin,
            end,
            STEP,
            RATIO,
            X_PARTS,
            W_PARTS,
            ORDER,
            ALIGN,
        )
        mask = inside[:, None] & (cols[None, :] < N)
        tl.store(out_ptr + rows[:, None] * N + cols[None, :], proj, mask=mask)


@triton.jit
def input_mix_task(
    b,
    start,
    stop,
    n: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """``mixed``, the first half of step 3."""
    for first in range(start, stop, ROWS):
        rows, inside = row_mask(first, stop, ROWS)
        pre = load_pre(b, rows, inside, n, ENTRY)
        for column in tl.range(0, C, WIDTH, num_stages=stages(n, b.new_residual.dtype.element_ty)):
            columns, mask = tile_mask(inside, column, C, WIDTH)
            new = load_streams(b.new_residual, C, rows[:, None] * (n * C) + columns, mask, n)
            tl.store(b.mixed + rows[:, None] * C + columns, collapse(new, pre, n, ENTRY), mask=mask)


@triton.jit
def store_normed(b, mixed, rstd, rows, columns, mask, C: tl.constexpr):
    """Write the block input of a tile."""
    normed = mixed * rstd
    if b.norm_weight is not None:
        normed = normed * widen(tl.load(b.norm_weight + columns, mask=columns < C, other=0.0))
    store(b.block_input + rows[:, None] * C + columns, normed, mask)


@triton.jit
def rms_norm_task(b, start, stop, norm_eps, C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The second half of step 3, from ``mixed``."""
    for first in range(start, stop, ROWS):
        rows, inside = row_mask(first, stop, ROWS)
        square = tl.zeros((ROWS, WIDTH), tl.float32)
        for column in tl.range(0, C, WIDTH, num_stages=stages(1, b.mixed.dtype.element_ty)):
            columns, mask = tile_mask(inside, column, C, WIDTH)
            mixed = load_masked(b.mixed + rows[:, None] * C + columns, mask)
            square = tl.fma(mixed, mixed, square)
        rstd, _ = rms_tile(tl.sum(square, axis=1)[:, None], tl.full((), C, tl.int64), norm_eps, True)
        store_column(b.mixed_rstd, rows, inside, rstd)
        for column in tl.range(0, C, WIDTH, num_stages=stages(1, b.mixed.dtype.element_ty)):
            columns, mask = tile_mask(inside, column, C, WIDTH)
            mixed = load_masked(b.mixed + rows[:, None] * C + columns, mask)
            store_normed(b, mixed, rstd, rows, columns, mask, C)


@triton.jit
def post_mix_norm_task(
    b,
    start,
    stop,
    stride,
    stream_stride,
    norm_eps,
    n: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """Steps 1 and 3 and the sums of squares. ``mixed`` is made a second time, from the new streams, for its norm."""
    for first in range(start, stop, ROWS):
        rows, inside = row_mask(first, stop, ROWS)
        mixing, post = load_inputs(b, rows, inside, n, ENTRY)
        pre = load_pre(b, rows, inside, n, ENTRY)
        square = tl.zeros((ROWS, WIDTH), tl.float32)
        mixed_square = tl.zeros((ROWS, WIDTH), tl.float32)
        for column in tl.range(0, C, WIDTH, num_stages=stages(n, b.new_residual.dtype.element_ty)):
            columns, mask = tile_mask(inside, column, C, WIDTH)
            _, _, new = make_new(b, mixing, post, rows, columns, mask, stride, stream_stride, n, C, ENTRY)
            for j in tl.static_range(n):
                tl.store(b.new_residual + (rows[:, None] * n + j) * C + columns, new[j], mask=mask)
                value = widen(new[j])
                square = tl.fma(value, value, square)
            mixed = collapse(new, pre, n, ENTRY)
            mixed_square = tl.fma(mixed, mixed, mixed_square)
        tl.store(b.sum_of_squares + rows, tl.sum(square, axis=1), mask=inside)
        rstd, _ = rms_tile(tl.sum(mixed_square, axis=1)[:, None], tl.full((), C, tl.int64), norm_eps, True)
        store_column(b.mixed_rstd, rows, inside, rstd)
        tl.debug_barrier()  # the streams come back from memory, and another thread may have written them
        for column in tl.range(0, C, WIDTH, num_stages=stages(n, b.new_residual.dtype.element_ty)):
            columns, mask = tile_mask(inside, column, C, WIDTH)
            new = load_streams(b.new_residual, C, rows[:, None] * (n * C) + columns, mask, n)
            store_normed(b, collapse(new, pre, n, ENTRY), rstd, rows, columns, mask, C)


@triton.jit
def residual_logits(raw, u, b, n: tl.constexpr):
    """Sinkhorn's logits from the raw projection: tuples of n*n vectors."""
    scale = widen(tl.load(b.alpha + 2))
    logits = ()
    for k in tl.static_range(n * n):
        logits = logits + (raw[k] * u * scale + widen(tl.load(b.bias + 2 * n + k)),)
    return logits


@triton.jit
def mapping_task(
    b,
    start,
    stop,
    count,
    norm_eps,
    hc_eps,
    n: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """Step 2 from the raw projection, which comes in PARTS slices to be added in order (0: whole)."""
    N: tl.constexpr = n * n + 2 * n
    cols = tl.arange(0, COLUMNS)
    alpha = alpha_columns(b.alpha, b.alpha + 1, b.alpha + 2, cols, n)
    bias = widen(tl.load(b.bias + cols, mask=cols < N, other=0.0))
    for first in range(start, stop, ROWS):
        rows, inside = row_mask(first, stop, ROWS)
        at = rows[:, None] * N + cols[None, :]
        mask = inside[:, None] & (cols[None, :] < N)
        if PARTS > 0:
            proj = load_masked(b.logits_partial + at, mask)
            for index in range(1, PARTS):
                proj += load_masked(b.logits_partial + index * count * N + at, mask)
            tl.store(b.logits + at, proj, mask=mask)
            tl.debug_barrier()  # Sinkhorn's part is read back below, by other threads
        else:
            proj = load_masked(b.logits + at, mask)
        square = tl.load(b.sum_of_squares + rows, mask=inside, other=0.0)
        u, _ = rms_tile(square, tl.full((), n * C, tl.int64), norm_eps, True)
        tl.store(b.u + rows, u, mask=inside)
        mixes = mapping_tile(proj * u[:, None] * alpha[None, :] + bias[None, :], cols, hc_eps, n)
        row, col = rows[:, None], cols[None, :]
        store(b.next_pre_mix + row * n + col, mixes, inside[:, None] & (col < n))
        store(b.next_post_mix + row * n + col - n, mixes, inside[:, None] & (col >= n) & (col < 2 * n))
        # Sinkhorn holds a token in one thread, so it reads its logits again.
        raw = sinkhorn_load_tile(b.logits + 2 * n, N, rows, inside, n, 1)
        matrix = sinkhorn_tile(residual_logits(raw, u, b, n), hc_eps, n, ITERATIONS, False)
        sinkhorn_store_tile(b.next_residual_mix, matrix, rows, inside, n)
