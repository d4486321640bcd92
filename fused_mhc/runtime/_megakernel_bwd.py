"""The task bodies of the fixed backward graph, what the tiled one shares with them, and the epilogue: the tokens
``start`` to ``stop`` of one task."""

from __future__ import annotations

import triton
import triton.language as tl

from fused_mhc.ops._triton_common import store, widen
from fused_mhc.ops.mega_mhc._triton_tiles import add_products, load_masked, load_parts, load_streams, split
from fused_mhc.ops.proj_rms_compute_h._triton_tiles import alpha_columns, load_columns, mapping_bwd_tile
from fused_mhc.ops.sinkhorn._triton import sinkhorn_wide_bwd_tile

from ._megakernel_tiles import (
    collapse,
    group_sums,
    load_column,
    load_inputs,
    load_pre,
    row_mask,
    stages,
    store_sums,
    tile_mask,
    zero_sums,
)

__all__ = [
    "add_dots",
    "add_norm_weight",
    "add_partials",
    "add_paths",
    "clear",
    "clear_task",
    "load_grad_parts",
    "load_phi",
    "mapping_grad_task",
    "phi_rms_task",
    "prev_a_task",
    "prev_x_task",
    "rms_norm_grad_task",
    "store_state_grads",
    "transposed",
    "weighted_grad",
]


@triton.jit
def clear(pointer, size, worker, workers, BLOCK: tl.constexpr):
    """Zeros in slice ``worker`` of ``workers`` even ones."""
    if pointer is not None:
        last = (worker + 1) * size // workers
        for first in range(worker * size // workers, last, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(pointer + at, tl.zeros((BLOCK,), tl.float32), mask=at < last)


@triton.jit
def clear_task(b, worker, workers, tiles, chunks, n: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in this worker's slice of every buffer of partial sums."""
    N: tl.constexpr = n * n + 2 * n
    clear(b.partial_norm_weight, tiles * C, worker, workers, BLOCK)
    clear(b.partial_alpha, tiles * 3, worker, workers, BLOCK)
    clear(b.partial_bias, tiles * N, worker, workers, BLOCK)
    clear(b.partial_phi, chunks * (N * n * C), worker, workers, BLOCK)


@triton.jit
def add_norm_weight(b, index, terms, columns, first, start, stop, C: tl.constexpr):
    """Add a tile's terms ``[rows, WIDTH]`` of g_norm_weight to its partial sum. The rows of a task come in turn: each
    but the first adds to what the one before has left."""
    at = b.partial_norm_weight + index * C + columns
    before = tl.load(at, mask=columns < tl.where(first > start, stop, 0), other=0.0)
    tl.store(at, before + tl.sum(terms, axis=0)[None, :], mask=columns < stop)


@triton.jit
def weighted_grad(b, rows, columns, mask, C: tl.constexpr):
    """``(g_block_input, the same times norm_weight)`` of a tile."""
    grad = widen(load_masked(b.g_block_input + rows[:, None] * C + columns, mask))
    if b.norm_weight is None:
        return grad, grad
    else:
        return grad, grad * widen(tl.load(b.norm_weight + columns, mask=columns < C, other=0.0))


@triton.jit
def rms_norm_grad_task(
    b,
    index,
    start,
    stop,
    n: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """``g_mixed``, and the partial sum of g_norm_weight of tile ``index``."""
    if b.g_block_input is not None:
        for first in range(start, stop, ROWS):
            rows, inside = row_mask(first, stop, ROWS)
            pre = load_pre(b, rows, inside, n, ENTRY)
            rstd = load_column(b.mixed_rstd, rows, inside)
            total = tl.zeros((ROWS, WIDTH), tl.float32)
            for column in tl.range(0, C, WIDTH, num_stages=stages(n, b.new_residual.dtype.element_ty)):
                columns, mask = tile_mask(inside, column, C, WIDTH)
                new = load_streams(b.new_residual, C, rows[:, None] * (n * C) + columns, mask, n)
                _, g_normed = weighted_grad(b, rows, columns, mask, C)
                total += g_normed * (collapse(new, pre, n, ENTRY) * rstd)
            mean = tl.sum(total, axis=1)[:, None] / C
            if b.partial_norm_weight is not None:
                tl.debug_barrier()  # the rows before have left their part of the sum
            for column in tl.range(0, C, WIDTH, num_stages=stages(n, b.new_residual.dtype.element_ty)):
                columns, mask = tile_mask(inside, column, C, WIDTH)
                new = load_streams(b.new_residual, C, rows[:, None] * (n * C) + columns, mask, n)
                grad, g_normed = weighted_grad(b, rows, columns, mask, C)
                normed = collapse(new, pre, n, ENTRY) * rstd
                tl.store(
                    b.g_mixed + rows[:, None] * C + columns, rstd * (g_normed - normed * mean), mask=mask
                )
                if b.partial_norm_weight is not None:
                    add_norm_weight(b, index, grad * normed, columns, first, start, C, C)


@triton.jit
def prev_a_task(b, start, stop, n: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """``g_previous_pre[i] = <g_mixed, new_residual[i]>``."""
    if b.g_previous_pre_mix is not None:
        for first in range(start, stop, ROWS):
            rows, inside = row_mask(first, stop, ROWS)
            sums = zero_sums(n, ROWS, WIDTH)
            if b.g_block_input is not None:
                for column in tl.range(0, C, WIDTH, num_stages=stages(n, b.new_residual.dtype.element_ty)):
                    columns, mask = tile_mask(inside, column, C, WIDTH)
                    g_mixed = load_masked(b.g_mixed + rows[:, None] * C + columns, mask)
                    new = load_streams(b.new_residual, C, rows[:, None] * (n * C) + columns, mask, n)
                    added = ()
                    for i in tl.static_range(n):
                        added = added + (sums[i] + group_sums(g_mixed * widen(new[i])),)
                    sums = added
            store_sums(b.g_previous_pre_mix, n, sums, rows, inside, n)


@triton.jit
def sinkhorn_grad(
    b, out_ptr, u, rows, inside, hc_eps, n: tl.constexpr, ITERATIONS: tl.constexpr, SEGMENT: tl.constexpr
):
    """Gradient of Sinkhorn's logits, ``[T, n*n]``. A group of threads shares a matrix: the body that holds one in the
    registers of a thread is thousands of operations long, and the compiler's time grows with their number times that of
    all loads and stores of the kernel."""
    N: tl.constexpr = n * n + 2 * n
    P: tl.constexpr = triton.next_power_of_2(n)
    row = tl.arange(0, P)
    valid = (row[:, None] < n) & (row[None, :] < n)
    entry = (row[:, None] * n + row[None, :])[None, :, :]
    mask = inside[:, None, None] & valid[None, :, :]
    raw = load_masked(b.logits + rows[:, None, None] * N + 2 * n + entry, mask)
    bias = widen(load_masked(b.bias + 2 * n + entry, valid[None, :, :]))
    logits = raw * u[:, None, None] * widen(tl.load(b.alpha + 2)) + bias
    grad = widen(load_masked(b.g_next_residual_mix + rows[:, None, None] * (n * n) + entry, mask))
    g_logits = sinkhorn_wide_bwd_tile(grad, logits, mask, hc_eps, n, ITERATIONS, False, SEGMENT)
    tl.store(out_ptr + rows[:, None, None] * (n * n) + entry, g_logits, mask=mask)


@triton.jit
def mapping_grad_task(
    b,
    index,
    start,
    stop,
    hc_eps,
    n: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Backward of step 2 down to the raw projection, and the partial sums of g_alpha and g_bias of tile ``index``."""
    N: tl.constexpr = n * n + 2 * n
    cols = tl.arange(0, COLUMNS)
    alpha = alpha_columns(b.alpha, b.alpha + 1, b.alpha + 2, cols, n)
    bias = widen(tl.load(b.bias + cols, mask=cols < N, other=0.0))
    factor = tl.where(cols < n, 1.0, tl.where(cols < 2 * n, 2.0, 0.0))
    alpha_sum = tl.zeros((COLUMNS,), tl.float32)
    bias_sum = tl.zeros((COLUMNS,), tl.float32)
    for first in range(start, stop, ROWS):
        rows, inside = row_mask(first, stop, ROWS)
        u = tl.load(b.u + rows, mask=inside, other=0.0)
        scaled = load_columns(b.logits, rows, inside, cols, N, N) * u[:, None]
        g_mix = load_columns(b.g_next_pre_mix, rows, inside, cols, n, n)
        g_mix += load_columns(b.g_next_post_mix, rows, inside, cols - n, n, n)
        if b.g_next_residual_mix is not None:
            # Sinkhorn's gradient changes hands through the rows of g_scaled_logits that get their values below.
            scratch = b.g_scaled_logits + first * (2 * n)
            sinkhorn_grad(b, scratch, u, rows, inside, hc_eps, n, ITERATIONS, SEGMENT)
            tl.debug_barrier()
            g_mix += load_columns(scratch, rows, inside, cols - 2 * n, n * n, n * n)
            tl.debug_barrier()
        one = tl.zeros_like(u) + 1.0
        g_scaled, g_u, g_h, alpha_terms = mapping_bwd_tile(g_mix, factor[None, :], scaled, one, alpha, bias)
        at = b.g_scaled_logits + rows[:, None] * N + cols[None, :]
        tl.store(at, g_scaled * u[:, None], mask=inside[:, None] & (cols[None, :] < N))
        tl.store(b.coefficient + rows, -(u * u / (n * C)) * g_u, mask=inside)
        alpha_sum += tl.sum(alpha_terms, axis=0)
        bias_sum += tl.sum(g_h, axis=0)
    if b.partial_alpha is not None:
        at = b.partial_alpha + index * 3
        tl.store(at, tl.sum(tl.where(cols < n, alpha_sum, 0.0)))
        tl.store(at + 1, tl.sum(tl.where((cols >= n) & (cols < 2 * n), alpha_sum, 0.0)))
        tl.store(at + 2, tl.sum(tl.where(cols >= 2 * n, alpha_sum, 0.0)))
    if b.partial_bias is not None:
        tl.store(b.partial_bias + index * N + cols, bias_sum, mask=cols < N)


@triton.jit
def load_grad_parts(b, rows, inside, n: tl.constexpr, COLUMNS: tl.constexpr, G_PARTS: tl.constexpr):
    """``g_logits*u`` of a tile as bf16 parts ``[rows, COLUMNS]``."""
    N: tl.constexpr = n * n + 2 * n
    cols = tl.arange(0, COLUMNS)[None, :]
    mask = inside[:, None] & (cols < N)
    return split(load_masked(b.g_scaled_logits + rows[:, None] * N + cols, mask), G_PARTS)


@triton.jit
def transposed(tiles, COUNT: tl.constexpr):
    """Each tile transposed."""
    turned = ()
    for k in tl.static_range(COUNT):
        turned = turned + (tl.trans(tiles[k]),)
    return turned


@triton.jit
def load_phi(
    phi_ptr, columns, K: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, W_PARTS: tl.constexpr
):
    """The bf16 parts of some columns of phi, ``[COLUMNS, width]`` each. Past its last column phi is read where it is
    another row: what is made of that is never stored."""
    PADDED: tl.constexpr = (K + STEP - 1) // STEP * STEP
    at = tl.arange(0, COLUMNS)[:, None] * PADDED + columns
    return load_parts(phi_ptr, COLUMNS * PADDED, at, columns < K, W_PARTS)


@triton.jit
def phi_rms_task(
    b,
    phi_ptr,
    index,
    start,
    stop,
    n: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    G_PARTS: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
):
    """``(g_logits*u) @ phi``, and the partial sum of g_phi of macro-tile ``index``."""
    N: tl.constexpr = n * n + 2 * n
    K: tl.constexpr = n * C
    cols = tl.arange(0, COLUMNS)
    for column in range(0, K, WIDTH):
        share = tl.zeros((COLUMNS, WIDTH), tl.float32)
        for first in range(start, stop, ROWS):
            rows, inside = row_mask(first, stop, ROWS)
            columns, mask = tile_mask(inside, column, K, WIDTH)
            g = load_grad_parts(b, rows, inside, n, COLUMNS, G_PARTS)
            if b.g_projected is not None:
                w = load_phi(phi_ptr, columns, K, COLUMNS, STEP, W_PARTS)
                zero = tl.zeros((ROWS, WIDTH), tl.float32)
                through = add_products(g, w, zero, G_PARTS, W_PARTS, G_PARTS)
                tl.store(b.g_projected + rows[:, None] * K + columns, through, mask=mask)
            if b.partial_phi is not None:
                x = split(load_masked(b.new_residual + rows[:, None] * K + columns, mask), X_PARTS)
                share = add_products(transposed(g, G_PARTS), x, share, G_PARTS, X_PARTS, 3)
        if b.partial_phi is not None:
            columns = (column + tl.arange(0, WIDTH))[None, :]
            at = b.partial_phi + (index * N + cols[:, None]) * K + columns
            tl.store(at, share, mask=(cols[:, None] < N) & (columns < K))


@triton.jit
def unmix(totals, mixing, n: tl.constexpr):
    """Gradient of the streams before step 1: ``sum_j mixing[i, j]*totals[j]``, first stream to last."""
    grads = ()
    for i in tl.static_range(n):
        grad = mixing[i * n] * totals[0]
        for j in tl.static_range(1, n):
            grad = grad + mixing[i * n + j] * totals[j]
        grads = grads + (grad,)
    return grads


@triton.jit
def add_dots(sums, totals, output, streams, n: tl.constexpr):
    """Sums of ``<totals[j], output>``, then of ``<streams[i], totals[j]>``."""
    value = widen(output)
    added = ()
    for j in tl.static_range(n):
        added = added + (sums[j] + group_sums(totals[j] * value),)
    for i in tl.static_range(n):
        value = widen(streams[i])
        for j in tl.static_range(n):
            added = added + (sums[n + i * n + j] + group_sums(value * totals[j]),)
    return added


@triton.jit
def store_state_grads(
    b, totals, mixing, post, rows, columns, mask, n: tl.constexpr, C: tl.constexpr, ENTRY: tl.constexpr
):
    """Gradients of the streams and of the output before (at the ENTRY: of x, which filled all streams)."""
    if ENTRY:
        if b.g_previous_output is not None:
            grad = totals[0]
            for j in tl.static_range(1, n):
                grad = grad + totals[j]
            store(b.g_previous_output + rows[:, None] * C + columns, grad, mask)
    else:
        if b.g_residual is not None:
            grads = unmix(totals, mixing, n)
            for i in tl.static_range(n):
                store(b.g_residual + (rows[:, None] * n + i) * C + columns, grads[i], mask)
        if b.g_previous_output is not None:
            grad = post[0] * totals[0]
            for j in tl.static_range(1, n):
                grad = grad + post[j] * totals[j]
            store(b.g_previous_output + rows[:, None] * C + columns, grad, mask)


@triton.jit
def add_paths(
    b,
    through,
    coefficient,
    g_mixed,
    new,
    pre,
    rows,
    columns,
    mask,
    n: tl.constexpr,
    C: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """``G_total``: every path into the new streams; ``through``: that of the projection."""
    totals = ()
    for j in tl.static_range(n):
        total = through[j] + coefficient * widen(new[j])
        if b.g_block_input is not None:
            if not ENTRY:
                total = total + pre[j] * g_mixed
            elif j == 0:
                total = total + g_mixed
        if b.g_new_residual is not None:
            total = total + widen(load_masked(b.g_new_residual + (rows[:, None] * n + j) * C + columns, mask))
        totals = totals + (total,)
    return totals


@triton.jit
def prev_x_task(
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
    """The gradients of the state, of all columns, from what the stages before have left."""
    for first in range(start, stop, ROWS):
        rows, inside = row_mask(first, stop, ROWS)
        mixing, post = load_inputs(b, rows, inside, n, ENTRY)
        pre = load_pre(b, rows, inside, n, ENTRY)
        coefficient = load_column(b.coefficient, rows, inside)
        sums = zero_sums(n + n * n, ROWS, WIDTH)
        for column in tl.range(0, C, WIDTH, num_stages=stages(n, b.new_residual.dtype.element_ty)):
            columns, mask = tile_mask(inside, column, C, WIDTH)
            at = rows[:, None] * (n * C) + columns
            new = load_streams(b.new_residual, C, at, mask, n)
            through = load_streams(b.g_projected, C, at, mask, n)
            g_mixed = coefficient
            if b.g_block_input is not None:
                g_mixed = load_masked(b.g_mixed + rows[:, None] * C + columns, mask)
            totals = add_paths(b, through, coefficient, g_mixed, new, pre, rows, columns, mask, n, C, ENTRY)
            store_state_grads(b, totals, mixing, post, rows, columns, mask, n, C, ENTRY)
            if not ENTRY:
                if b.g_previous_post_mix is not None or b.g_previous_residual_mix is not None:
                    output = load_masked(b.previous_output + rows[:, None] * C + columns, mask)
                    streams = load_streams(
                        b.residual, stream_stride, rows[:, None] * stride + columns, mask, n
                    )
                    sums = add_dots(sums, totals, output, streams, n)
        if b.g_previous_post_mix is not None:
            store_sums(b.g_previous_post_mix, n, sums[:n], rows, inside, n)
        if b.g_previous_residual_mix is not None:
            store_sums(b.g_previous_residual_mix, n * n, sums[n:], rows, inside, n * n)


@triton.jit
def add_rows(partial_ptr, result_ptr, parts, size, worker, workers, BLOCK: tl.constexpr):
    """``result = sum(partial, axis 0)``, first row to last; this worker's blocks of it."""
    if result_ptr is not None:
        for first in range(worker * BLOCK, size, workers * BLOCK):
            at = first + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            for index in range(parts):
                total += tl.load(partial_ptr + index * size + at, mask=at < size, other=0.0)
            store(result_ptr + at, total, at < size)


@triton.jit
def add_partials(b, worker, workers, tiles, chunks, n: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """The epilogue: every result is the sum of its partial sums, added in tile order."""
    N: tl.constexpr = n * n + 2 * n
    add_rows(b.partial_norm_weight, b.g_norm_weight, tiles, C, worker, workers, BLOCK)
    add_rows(b.partial_alpha, b.g_alpha, tiles, 3, worker, workers, BLOCK)
    add_rows(b.partial_bias, b.g_bias, tiles, N, worker, workers, BLOCK)
    add_rows(b.partial_phi, b.g_phi, chunks, N * n * C, worker, workers, BLOCK)
