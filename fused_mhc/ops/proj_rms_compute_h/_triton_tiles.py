"""Tile bodies of the projection, the RMS and the mapping, for this op's kernels and for those that fuse it.

fp32 operands are multiplied on the tensor cores as sums of bf16 parts: three of them hold all 24 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._triton_common import cast, dot_bf16, sigmoid, widen

__all__ = [
    "alpha_columns",
    "collect_tile",
    "dot_weight_parts",
    "load_columns",
    "mapping_bwd_tile",
    "mapping_tile",
    "part",
    "project_bwd_tile",
    "project_tile",
    "rms_coefficient_tile",
    "rms_tile",
    "store_interleaved_parts",
    "store_parts",
]


@triton.jit
def part(value, index: tl.constexpr):
    """bf16 part ``index`` of ``value``: the value less the parts before it, rounded to bf16."""
    if value.dtype == tl.bfloat16:
        return value
    else:
        rest = widen(value)
        high = cast(rest, tl.bfloat16)
        for _ in tl.static_range(index):
            rest = rest - widen(high)
            high = cast(rest, tl.bfloat16)
        return high


@triton.jit
def dot_weight_parts(
    x, parts_ptr, rows, part_stride, k, X_PARTS: tl.constexpr, W_PARTS: tl.constexpr, ORDER: tl.constexpr
):
    """``x [t, k] @ weight[rows, k].T`` with the weight in bf16 parts ``[W_PARTS, part_stride]``.

    Products of parts i and j are taken where ``i + j < ORDER``, the small ones first: what is far below the sum adds
    up before it meets it.
    """
    total = tl.zeros((x.shape[0], rows.shape[0]), tl.float32)
    for less in tl.static_range(W_PARTS):
        w = tl.load(parts_ptr + (W_PARTS - 1 - less) * part_stride + rows[None, :] + k[:, None])
        for i in tl.static_range(X_PARTS):
            if X_PARTS - 1 - i + W_PARTS - 1 - less < ORDER:
                total = dot_bf16(part(x, X_PARTS - 1 - i), w, total)
    return total


@triton.jit
def project_tile(
    x_ptr,
    parts_ptr,
    rows,
    row_mask,
    cols,
    stride_x,
    width,
    part_stride,
    part_width,
    begin,
    end,
    STEP: tl.constexpr,
    RATIO: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    ORDER: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Steps ``begin`` to ``end`` of the projection of ``rows`` on ``cols``, and of the sum of squares.

    The products of one step have an accumulator of their own, since tensor cores do not add as exactly as fp32 does;
    RATIO steps make a slice, and slices are added in order. The weight comes in parts of zero-padded rows.
    """
    stride_x = (stride_x // ALIGN) * ALIGN
    width = (width // ALIGN) * ALIGN
    part_stride, part_width = (part_stride // STEP) * STEP, (part_width // STEP) * STEP
    x_rows = x_ptr + rows[:, None] * stride_x
    w_rows = cols * part_width
    proj = tl.zeros((rows.shape[0], cols.shape[0]), tl.float32)
    slice_proj = tl.zeros_like(proj)
    square = tl.zeros((rows.shape[0],), tl.float32)
    slice_square = tl.zeros((rows.shape[0], STEP), tl.float32)
    for step in range(begin, end):
        k = step * STEP + tl.arange(0, STEP)
        x = tl.load(x_rows + k[None, :], mask=row_mask[:, None] & (k[None, :] < width), other=0.0)
        value = widen(x)
        slice_square = tl.fma(value, value, slice_square)
        slice_proj += dot_weight_parts(x, parts_ptr, w_rows, part_stride, k, X_PARTS, W_PARTS, ORDER)
        if step % RATIO == RATIO - 1:
            proj += slice_proj
            square += tl.sum(slice_square, axis=1)
            slice_proj = tl.zeros_like(proj)
            slice_square = tl.zeros((rows.shape[0], STEP), tl.float32)
    return proj + slice_proj, square + tl.sum(slice_square, axis=1)


@triton.jit
def collect_tile(
    partial_ptr,
    square_ptr,
    rows,
    cols,
    count,
    size,
    partials,
    PER_GROUP: tl.constexpr,
):
    """Projection and sum of squares of ``rows`` from ``partials`` partial sums, PER_GROUP of them a group."""
    # Unrolled, so that the loads of some groups are in flight together.
    GROUPS: tl.constexpr = 8 if PER_GROUP == 1 else (15 + PER_GROUP) // PER_GROUP
    at = rows[:, None] * size + cols[None, :]
    proj = tl.zeros((rows.shape[0], cols.shape[0]), tl.float32)
    square = tl.zeros((rows.shape[0],), tl.float32)
    for first in range(0, partials, GROUPS * PER_GROUP):
        for begin in tl.static_range(0, GROUPS * PER_GROUP, PER_GROUP):
            group = tl.zeros_like(proj)
            group_square = tl.zeros_like(square)
            for index in tl.static_range(begin, begin + PER_GROUP):
                mask = rows < tl.where(first + index < partials, count, 0)
                group += tl.load(
                    partial_ptr + (first + index) * count * size + at,
                    mask=mask[:, None] & (cols[None, :] < size),
                    other=0.0,
                )
                group_square += tl.load(square_ptr + (first + index) * count + rows, mask=mask, other=0.0)
            proj += group
            square += group_square
    return proj, square


@triton.jit
def rms_tile(square, width, eps, INSIDE: tl.constexpr):
    """``(u, r)``: the factor that normalises, and the RMS, from the sum of squares."""
    mean = tl.div_rn(square, tl.zeros_like(square) + width.to(tl.float32))
    if INSIDE:
        r = tl.sqrt_rn(mean + eps)
        u = tl.div_rn(tl.full(r.shape, 1.0, tl.float32), r)
    else:
        r = tl.sqrt_rn(mean)
        u = tl.div_rn(tl.full(r.shape, 1.0, tl.float32), r + eps)
    return u, r


@triton.jit
def alpha_columns(alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, cols, N_STREAMS: tl.constexpr):
    """The scale of each column of the projection."""
    pre = tl.load(alpha_pre_ptr).to(tl.float32)
    post = tl.load(alpha_post_ptr).to(tl.float32)
    res = tl.load(alpha_res_ptr).to(tl.float32)
    return tl.where(cols < N_STREAMS, pre, tl.where(cols < 2 * N_STREAMS, post, res))


@triton.jit
def mapping_tile(h, cols, compute_h_eps, N_STREAMS: tl.constexpr):
    """Every column's output: ``sigmoid(h) + eps``, ``2*sigmoid(h)`` or ``h``, by its group."""
    s = sigmoid(h)
    pre = cols[None, :] < N_STREAMS
    post = cols[None, :] < 2 * N_STREAMS
    return tl.where(pre, s + compute_h_eps, tl.where(post, 2.0 * s, h))


@triton.jit
def load_columns(ptr, rows, row_mask, cols, stride, SIZE: tl.constexpr):
    """``[rows, cols]`` of a gradient with ``SIZE`` columns; 0 outside, and everywhere when there is none."""
    if ptr is None:
        return tl.zeros((rows.shape[0], cols.shape[0]), tl.float32)
    else:
        mask = row_mask[:, None] & (cols[None, :] >= 0) & (cols[None, :] < SIZE)
        return widen(tl.load(ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0))


@triton.jit
def mapping_bwd_tile(g_mix, sigmoid_scale, proj, u, alpha, bias):
    """Backward of ``h = proj*alpha*u + bias`` and of the sigmoids.

    ``sigmoid_scale`` is the factor of each column's sigmoid, 0 where the column has none. Returns the gradients of
    the raw projection, of u, of h, and each column's term of the alphas' gradient.
    """
    scaled = proj * alpha[None, :]
    h = scaled * u[:, None] + bias[None, :]
    slope = tl.where(sigmoid_scale == 0.0, 1.0, sigmoid_scale * sigmoid(h) * sigmoid(-h))
    g_h = g_mix * slope
    return g_h * alpha[None, :] * u[:, None], tl.sum(g_h * scaled, axis=1), g_h, g_h * proj * u[:, None]


@triton.jit
def rms_coefficient_tile(g_r, g_u, u, r, width):
    """Factor of x in its gradient: ``(g_r - u*u*g_u)/(K*r)``, and 0 where r is 0."""
    vanished = r == 0.0
    divisor = width.to(tl.float32) * tl.where(vanished, 1.0, r)
    return tl.where(vanished, 0.0, tl.div_rn(g_r - u * u * g_u, divisor))


@triton.jit
def store_parts(parts_ptr, value, rows, row_mask, cols, COLUMNS: tl.constexpr, G_PARTS: tl.constexpr):
    """Write ``value [rows, COLUMNS]`` as bf16 parts, ``[T, G_PARTS, COLUMNS]``."""
    at = parts_ptr + rows[:, None] * (G_PARTS * COLUMNS) + cols[None, :]
    for index in tl.static_range(G_PARTS):
        tl.store(at + index * COLUMNS, part(value, index), mask=row_mask[:, None])


@triton.jit
def store_interleaved_parts(parts_ptr, value, rows, row_mask, cols):
    """Write ``value [rows, 32]`` as two bf16 parts, ``[T, 64]``: eight high, then the eight low of the same columns.

    In the accumulator of a product with these columns as rows, both parts of one column are in one thread.
    """
    at = parts_ptr + rows[:, None] * 64 + (cols // 8 * 16 + cols % 8)[None, :]
    tl.store(at, part(value, 0), mask=row_mask[:, None])
    tl.store(at + 8, part(value, 1), mask=row_mask[:, None])


@triton.jit
def project_bwd_tile(
    x,
    parts_ptr,
    weight_tile,
    coefficient,
    rows,
    row_mask,
    cols,
    COLUMNS: tl.constexpr,
    G_PARTS: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    NEEDS_X: tl.constexpr,
    NEEDS_W: tl.constexpr,
):
    """One tile ``x [rows, k]``: its gradient in fp32, and its share ``[cols, k]`` of the weight's."""
    at = parts_ptr + rows[:, None] * (G_PARTS * COLUMNS) + cols[None, :]
    g_x = tl.zeros(x.shape, tl.float32)
    g_w = tl.zeros((cols.shape[0], x.shape[1]), tl.float32)
    # Small products first: what is far below the sum adds up before it meets it.
    for less in tl.static_range(G_PARTS):
        g = tl.load(at + (G_PARTS - 1 - less) * COLUMNS, mask=row_mask[:, None], other=0.0)
        if NEEDS_X:
            for j in tl.static_range(less + 1):
                if less - j < W_PARTS:
                    g_x = dot_bf16(g, part(weight_tile, less - j), g_x)
        if NEEDS_W:
            for j in tl.static_range(X_PARTS):
                g_w = dot_bf16(tl.trans(g), part(x, X_PARTS - 1 - j), g_w)
    if NEEDS_X:
        g_x += coefficient[:, None] * widen(x)
    return g_x, g_w
