"""The task bodies of the tiled backward graph: the tokens ``start`` to ``stop`` of one task, and its columns ``begin`` to
``end`` where it has a slice."""

from __future__ import annotations

import triton
import triton.language as tl

from fused_mhc.ops._triton_common import store, widen
from fused_mhc.ops.mega_mhc._triton_tiles import add_products, load_masked, split

from ._megakernel_bwd import (
    add_dots,
    add_norm_weight,
    add_paths,
    clear,
    load_grad_parts,
    load_phi,
    store_state_grads,
    transposed,
    weighted_grad,
)
from ._megakernel_tiles import (
    collapse,
    group_sums,
    load_column,
    load_inputs,
    load_pre,
    make_new,
    row_mask,
    stages,
    store_sums,
    tile_mask,
    zero_sums,
)

__all__ = ["mix_grad_task", "norm_grad_task", "phi_grad_task", "post_grad_task"]


@triton.jit
def norm_grad_task(
    b,
    tile,
    part,
    start,
    stop,
    begin,
    end,
    count,
    stride,
    stream_stride,
    n: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sums over the columns ``begin`` to ``end`` that others need, and those columns of the partial sum of
    g_norm_weight."""
    SUMS: tl.constexpr = 2 * n + 1
    if b.g_block_input is not None:
        for first in range(start, stop, ROWS):
            rows, inside = row_mask(first, stop, ROWS)
            mixing, post = load_inputs(b, rows, inside, n, False)
            pre = load_pre(b, rows, inside, n, False)
            rstd = load_column(b.mixed_rstd, rows, inside)
            sums = zero_sums(SUMS, ROWS, WIDTH)
            if b.partial_norm_weight is not None:
                tl.debug_barrier()  # the rows before have left their part of the sum
            for column in tl.range(begin, end, WIDTH, num_stages=stages(n, b.new_residual.dtype.element_ty)):
                columns, mask = tile_mask(inside, column, end, WIDTH)
                _, _, new = make_new(b, mixing, post, rows, columns, mask, stride, stream_stride, n, C, False)
                mixed = collapse(new, pre, n, False)
                grad, g_normed = weighted_grad(b, rows, columns, mask, C)
                added = (sums[0] + group_sums(g_normed * mixed),)
                for i in tl.static_range(n):
                    added = added + (sums[1 + i] + group_sums(g_normed * widen(new[i])),)
                for i in tl.static_range(n):
                    added = added + (sums[1 + n + i] + group_sums(mixed * widen(new[i])),)
                sums = added
                if b.partial_norm_weight is not None:
                    add_norm_weight(b, tile, grad * (mixed * rstd), columns, first, start, end, C)
            store_sums(b.norm_dots + part * count * SUMS, SUMS, sums, rows, inside, SUMS)
    else:
        if b.partial_norm_weight is not None:
            clear(b.partial_norm_weight + tile * C + begin, end - begin, 0, 1, WIDTH)


@triton.jit
def add_dots_of_parts(
    pointer,
    rows,
    inside,
    count,
    stride: tl.constexpr,
    USED: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The first USED numbers of each token's row, ``[rows, WIDTH]``, added over PARTS slices in order."""
    cols = tl.arange(0, WIDTH)[None, :]
    at = pointer + rows[:, None] * stride + cols
    mask = inside[:, None] & (cols < USED)
    total = load_masked(at, mask)
    for index in range(1, PARTS):
        total += load_masked(at + index * count * stride, mask)
    return total


@triton.jit
def post_grad_task(
    b,
    phi_ptr,
    part,
    start,
    stop,
    begin,
    end,
    count,
    stride,
    stream_stride,
    n: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
    G_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
):
    """The gradients of the state in the columns ``begin`` to ``end``, and their sums for the mixes."""
    DOTS: tl.constexpr = n + n * n
    for first in range(start, stop, ROWS):
        rows, inside = row_mask(first, stop, ROWS)
        mixing, post = load_inputs(b, rows, inside, n, False)
        pre = load_pre(b, rows, inside, n, False)
        coefficient = load_column(b.coefficient, rows, inside)
        g = load_grad_parts(b, rows, inside, n, COLUMNS, G_PARTS)
        rstd = coefficient
        mean = coefficient
        if b.g_block_input is not None:
            rstd = load_column(b.mixed_rstd, rows, inside)
            mean = add_dots_of_parts(b.norm_dots, rows, inside, count, 2 * n + 1, 1, 1, PARTS) * rstd / C
        sums = zero_sums(DOTS, ROWS, WIDTH)
        for column in tl.range(begin, end, WIDTH, num_stages=stages(n, b.new_residual.dtype.element_ty)):
            columns, mask = tile_mask(inside, column, end, WIDTH)
            streams, output, new = make_new(
                b, mixing, post, rows, columns, mask, stride, stream_stride, n, C, False
            )
            g_mixed = coefficient
            if b.g_block_input is not None:
                _, g_normed = weighted_grad(b, rows, columns, mask, C)
                g_mixed = rstd * (g_normed - collapse(new, pre, n, False) * rstd * mean)
            through = ()
            for j in tl.static_range(n):
                w = load_phi(phi_ptr, j * C + columns, n * C, COLUMNS, STEP, W_PARTS)
                zero = tl.zeros((ROWS, WIDTH), tl.float32)
                through = through + (add_products(g, w, zero, G_PARTS, W_PARTS, G_PARTS),)
            totals = add_paths(b, through, coefficient, g_mixed, new, pre, rows, columns, mask, n, C, False)
            store_state_grads(b, totals, mixing, post, rows, columns, mask, n, C, False)
            # Columns past the slice hold the next one's phi.
            kept = ()
            for j in tl.static_range(n):
                kept = kept + (tl.where(mask, totals[j], 0.0),)
            sums = add_dots(sums, kept, output, streams, n)
        store_sums(b.post_dots + part * count * DOTS, DOTS, sums, rows, inside, DOTS)


@triton.jit
def mix_grad_task(
    b, start, stop, count, n: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr
):
    """The gradients of the mixes before, from the sums of all slices."""
    WIDTH: tl.constexpr = triton.next_power_of_2(n)
    SQUARE: tl.constexpr = triton.next_power_of_2(n * n)
    for first in range(start, stop, ROWS):
        rows, inside = row_mask(first, stop, ROWS)
        cols = tl.arange(0, WIDTH)[None, :]
        mask = inside[:, None] & (cols < n)
        if b.g_previous_pre_mix is not None:
            value = tl.zeros((ROWS, WIDTH), tl.float32)
            if b.g_block_input is not None:
                SUMS: tl.constexpr = 2 * n + 1
                rstd = load_column(b.mixed_rstd, rows, inside)
                total = add_dots_of_parts(b.norm_dots, rows, inside, count, SUMS, 1, 1, PARTS)
                normed = add_dots_of_parts(b.norm_dots + 1, rows, inside, count, SUMS, n, WIDTH, PARTS)
                mixed = add_dots_of_parts(b.norm_dots + 1 + n, rows, inside, count, SUMS, n, WIDTH, PARTS)
                value = rstd * (normed - rstd * rstd * total / C * mixed)
            store(b.g_previous_pre_mix + rows[:, None] * n + cols, value, mask)
        DOTS: tl.constexpr = n + n * n
        if b.g_previous_post_mix is not None:
            value = add_dots_of_parts(b.post_dots, rows, inside, count, DOTS, n, WIDTH, PARTS)
            store(b.g_previous_post_mix + rows[:, None] * n + cols, value, mask)
        if b.g_previous_residual_mix is not None:
            cols = tl.arange(0, SQUARE)[None, :]
            value = add_dots_of_parts(b.post_dots + n, rows, inside, count, DOTS, n * n, SQUARE, PARTS)
            at = b.g_previous_residual_mix + rows[:, None] * (n * n) + cols
            store(at, value, inside[:, None] & (cols < n * n))


@triton.jit
def phi_grad_task(
    b,
    chunk,
    start,
    stop,
    begin,
    end,
    stride,
    stream_stride,
    n: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    G_PARTS: tl.constexpr,
    X_PARTS: tl.constexpr,
):
    """The columns ``begin`` to ``end`` of every stream of a chunk's partial sum of g_phi."""
    N: tl.constexpr = n * n + 2 * n
    if b.partial_phi is not None:
        cols = tl.arange(0, COLUMNS)[:, None]
        for column in range(begin, end, WIDTH):
            shares = ()
            for j in tl.static_range(n):
                shares = shares + (tl.zeros((COLUMNS, WIDTH), tl.float32),)
            for first in range(start, stop, ROWS):
                rows, inside = row_mask(first, stop, ROWS)
                columns, mask = tile_mask(inside, column, end, WIDTH)
                mixing, post = load_inputs(b, rows, inside, n, False)
                _, _, new = make_new(b, mixing, post, rows, columns, mask, stride, stream_stride, n, C, False)
                g = transposed(load_grad_parts(b, rows, inside, n, COLUMNS, G_PARTS), G_PARTS)
                added = ()
                for j in tl.static_range(n):
                    added = added + (add_products(g, split(new[j], X_PARTS), shares[j], G_PARTS, X_PARTS, 3),)
                shares = added
            columns = (column + tl.arange(0, WIDTH))[None, :]
            for j in tl.static_range(n):
                at = b.partial_phi + (chunk * N + cols) * (n * C) + j * C + columns
                tl.store(at, shares[j], mask=(cols < N) & (columns < end))
