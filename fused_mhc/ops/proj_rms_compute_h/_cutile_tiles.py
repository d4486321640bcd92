"""Tile bodies of the projection, the RMS and the mapping in cuTile, for this op's kernels and for those that fuse it.

fp32 operands are multiplied on the tensor cores as sums of bf16 parts: three of them hold all 24 bits.
"""

from __future__ import annotations

import cuda.tile as ct

from .._cutile_common import sigmoid, widen

__all__ = [
    "alpha_columns",
    "collect_tile",
    "load_mix_columns",
    "mapping_bwd_tile",
    "mapping_tile",
    "part",
    "rms_coefficient_tile",
    "rms_tile",
    "store_mapping",
    "store_parts",
]


def part(value, INDEX):
    """bf16 part INDEX of ``value``: the value less the parts before it, rounded to bf16."""
    rest = widen(value)
    high = ct.astype(rest, ct.bfloat16)
    for _ in ct.static_iter(range(INDEX)):
        rest = rest - widen(high)
        high = ct.astype(rest, ct.bfloat16)
    return high


def collect_tile(partial, square, rows, cols, T, size, partials, COLUMNS, TOKENS, PER_GROUP):
    """Projection and sum of squares of ``rows`` from ``partials`` partial sums, PER_GROUP of them a group."""
    at = rows[:, None] * size + cols[None, :]
    proj = ct.zeros((TOKENS, COLUMNS), ct.float32)
    total = ct.zeros((TOKENS,), ct.float32)
    for first in range(0, partials, PER_GROUP):
        group = ct.zeros((TOKENS, COLUMNS), ct.float32)
        group_square = ct.zeros((TOKENS,), ct.float32)
        # Unrolled, so that the loads of a group are in flight together.
        for k in ct.static_iter(range(PER_GROUP)):
            index = first + k
            inside = (rows < T) & (index < partials)
            group = group + partial.load_offset(
                index * (T * size) + at, mask=inside[:, None] & (cols < size)[None, :], padding_value=0
            )
            group_square = group_square + square.load_offset(index * T + rows, mask=inside, padding_value=0)
        proj = proj + group
        total = total + group_square
    return proj, total


def rms_tile(square, width, eps, INSIDE):
    """``(u, r)``: the factor that normalises, and the RMS, from the sum of squares."""
    mean = square / width
    r = ct.sqrt(mean + eps) if INSIDE else ct.sqrt(mean)
    u = 1.0 / r if INSIDE else 1.0 / (r + eps)
    return u, r


def alpha_columns(alpha_pre, alpha_post, alpha_res, cols, n):
    """The scale of each column of the projection, from three fp32 scalars."""
    return ct.where(cols < n, alpha_pre, ct.where(cols < 2 * n, alpha_post, alpha_res))


def mapping_tile(h, cols, compute_h_eps, n):
    """Every column's output: ``sigmoid(h) + eps``, ``2*sigmoid(h)`` or ``h``, by its group."""
    s = sigmoid(h)
    return ct.where(cols[None, :] < n, s + compute_h_eps, ct.where(cols[None, :] < 2 * n, 2.0 * s, h))


def store_mapping(proj_out, pre_out, post_out, res_out, proj, mixes, rows, inside, cols, n):
    """Write the projection and the mixes ``[rows, cols]``, each group of columns to its own tensor."""
    SIZE = n * n + 2 * n
    row, col = rows[:, None], cols[None, :]
    is_post, is_res = (cols >= n) & (cols < 2 * n), (cols >= 2 * n) & (cols < SIZE)
    proj_out.store_offset(row * SIZE + col, proj, mask=inside[:, None] & (cols < SIZE)[None, :])
    pre_out.store_offset(row * n + col, mixes, mask=inside[:, None] & (cols < n)[None, :])
    post_out.store_offset(row * n + (col - n), mixes, mask=inside[:, None] & is_post[None, :])
    res_out.store_offset(row * (n * n) + (col - 2 * n), mixes, mask=inside[:, None] & is_res[None, :])


def load_mix_columns(memory, rows, inside, cols, stride, first, SIZE, THERE, TOKENS, COLUMNS):
    """``[rows, cols]`` of a gradient whose SIZE columns start at column ``first``; 0 outside, and everywhere when it is
    not THERE."""
    if THERE:
        col = cols - first
        mask = inside[:, None] & ((col >= 0) & (col < SIZE))[None, :]
        at = rows[:, None] * stride + col[None, :]
        value = widen(memory.load_offset(at, mask=mask, padding_value=0))
    else:
        value = ct.zeros((TOKENS, COLUMNS), ct.float32)
    return value


def mapping_bwd_tile(g_mix, cols, proj, u, alpha, bias, n):
    """Backward of ``h = proj*alpha*u + bias`` and of the sigmoids: the gradients of the raw projection, of u, of h, and
    each column's term of the alphas' gradient."""
    scaled = proj * alpha[None, :]
    h = scaled * u[:, None] + bias[None, :]
    slope = sigmoid(h) * sigmoid(-h)
    slope = ct.where(cols[None, :] < n, slope, ct.where(cols[None, :] < 2 * n, 2.0 * slope, 1.0))
    g_h = g_mix * slope
    return g_h * alpha[None, :] * u[:, None], ct.sum(g_h * scaled, 1), g_h, g_h * proj * u[:, None]


def rms_coefficient_tile(g_r, g_u, u, r, width):
    """Factor of x in its gradient: ``(g_r - u*u*g_u)/(K*r)``, and 0 where r is 0."""
    vanished = r == 0.0
    divisor = width * ct.where(vanished, 1.0, r)
    return ct.where(vanished, 0.0, (g_r - u * u * g_u) / divisor)


def store_parts(parts, value, rows, inside, cols, COLUMNS, G_PARTS):
    """Write ``value [rows, COLUMNS]`` as bf16 parts, ``[T, G_PARTS, COLUMNS]``."""
    at = rows[:, None] * (G_PARTS * COLUMNS) + cols[None, :]
    for index in ct.static_iter(range(G_PARTS)):
        parts.store_offset(
            at + index * COLUMNS, part(value, index), mask=inside[:, None] & (cols >= 0)[None, :]
        )
