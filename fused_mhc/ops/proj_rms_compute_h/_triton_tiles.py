"""Tile bodies of the projection, the RMS and the mapping, for this op's kernels and for those that fuse it.

fp32 operands are multiplied on the tensor cores as sums of bf16 parts: three of them hold all 24 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._triton_common import cast, dot_bf16, sigmoid, widen

__all__ = [
    "ORDER",
    "PARTS",
    "alpha_columns",
    "collect_tile",
    "dot_parts",
    "load_columns",
    "mapping_bwd_tile",
    "mapping_tile",
    "part",
    "project_bwd_tile",
    "project_tile",
    "rms_coefficient_tile",
    "rms_tile",
    "store_parts",
]

#: bf16 parts that hold every bit of a value of this dtype.
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
#: Products of parts i and j are taken where ``i + j`` is below this.
ORDER = {"fp32": 3, "tf32": 2}


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
def dot_parts(a, b, A_PARTS: tl.constexpr, B_PARTS: tl.constexpr, ORDER: tl.constexpr):
    """``a @ b`` from the products of bf16 parts i and j with ``i + j < ORDER``: 3 for fp32, 2 for (better than) tf32.

    The largest product and the small ones have an accumulator each: a tensor core rounds in units of the sum.
    """
    zero = tl.zeros((a.shape[0], b.shape[1]), tl.float32)
    total = dot_bf16(part(a, 0), part(b, 0), zero)
    if A_PARTS + B_PARTS > 2:
        small = zero
        for back in tl.static_range(A_PARTS + B_PARTS - 2):
            degree: tl.constexpr = A_PARTS + B_PARTS - 2 - back
            if degree < ORDER:
                for i in tl.static_range(A_PARTS):
                    if degree - i >= 0 and degree - i < B_PARTS:
                        small = dot_bf16(part(a, i), part(b, degree - i), small)
        total += small
    return total


@triton.jit
def project_tile(
    x_ptr,
    weight_ptr,
    rows,
    row_mask,
    cols,
    stride_x,
    width,
    size,
    begin,
    end,
    LEAF: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    ORDER: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Leaves ``begin`` to ``end`` of the projection of ``rows`` on ``cols``, and of the sum of squares."""
    proj = tl.zeros((rows.shape[0], cols.shape[0]), tl.float32)
    square = tl.zeros((rows.shape[0],), tl.float32)
    stride_x = tl.multiple_of(stride_x, ALIGN)
    width = tl.multiple_of(width, ALIGN)
    x_rows = x_ptr + rows[:, None] * stride_x
    w_cols = weight_ptr + cols[None, :] * width
    for index in range(begin, end):
        k = index * LEAF + tl.arange(0, LEAF)
        x = tl.load(x_rows + k[None, :], mask=row_mask[:, None] & (k[None, :] < width), other=0.0)
        w = tl.load(w_cols + k[:, None], mask=(cols[None, :] < size) & (k[:, None] < width), other=0.0)
        proj += dot_parts(x, w, X_PARTS, W_PARTS, ORDER)
        value = widen(x)
        square += tl.sum(value * value, axis=1)
    return proj, square


@triton.jit
def collect_tile(
    partial_ptr,
    square_ptr,
    rows,
    row_mask,
    cols,
    count,
    size,
    partials,
    per_group,
):
    """Projection and sum of squares of ``rows`` from ``partials`` partial sums, ``per_group`` of them a group."""
    mask = row_mask[:, None] & (cols[None, :] < size)
    at = rows[:, None] * size + cols[None, :]
    proj = tl.zeros((rows.shape[0], cols.shape[0]), tl.float32)
    square = tl.zeros((rows.shape[0],), tl.float32)
    for first in range(0, partials, per_group):
        group = tl.zeros_like(proj)
        group_square = tl.zeros_like(square)
        for index in range(first, tl.minimum(first + per_group, partials)):
            group += tl.load(partial_ptr + index * count * size + at, mask=mask, other=0.0)
            group_square += tl.load(square_ptr + index * count + rows, mask=row_mask, other=0.0)
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
    for back in tl.static_range(G_PARTS):
        i: tl.constexpr = G_PARTS - 1 - back
        g = tl.load(at + i * COLUMNS, mask=row_mask[:, None], other=0.0)
        if NEEDS_X:
            for j_back in tl.static_range(W_PARTS):
                if i + W_PARTS - 1 - j_back < G_PARTS:
                    g_x = dot_bf16(g, part(weight_tile, W_PARTS - 1 - j_back), g_x)
        if NEEDS_W:
            for j_back in tl.static_range(X_PARTS):
                if i + X_PARTS - 1 - j_back < 3:
                    g_w = dot_bf16(tl.trans(g), part(x, X_PARTS - 1 - j_back), g_w)
    if NEEDS_X:
        g_x += coefficient[:, None] * widen(x)
    return g_x, g_w
