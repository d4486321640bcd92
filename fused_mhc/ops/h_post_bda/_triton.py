"""Residual update in Triton: mixing, bias, dropout and add in one pass, forward and backward.

The forward is elementwise along C, so its tiles are free. In the backward one program owns a token: residual, gradient
and branch output are read once for every result, lanes sum what they load for the n*n + n dot products, group by group
in order, and the lanes' sums meet once at the end. Where the gradient of the bias is wanted, a program owns a fixed
chunk of tokens, goes through them in order and leaves its sum for a second kernel, which adds the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._triton_common import (
    Launcher,
    alignment,
    block_sums,
    flatten,
    lane_sum,
    load_columns,
    load_scalars,
    load_streams,
    store,
    store_columns,
    widen,
)
from .config import BIAS_CHUNK, bwd_heuristic, fwd_heuristic

__all__ = [
    "branch_grad_tile",
    "dot_tile",
    "drop_tile",
    "h_post_bda_bwd",
    "h_post_bda_fwd",
    "keep_tile",
    "mix_tile",
    "unmix_tile",
]


@triton.jit
def mix_tile(streams, h_res, n: tl.constexpr):
    """``out[j] = sum_i h_res[i, j]*streams[i]``, first stream to last, in fp32."""
    mixed = ()
    for j in tl.static_range(n):
        total = h_res[j] * widen(streams[0])
        for i in tl.static_range(1, n):
            total = total + h_res[i * n + j] * widen(streams[i])
        mixed = mixed + (total,)
    return mixed


@triton.jit
def unmix_tile(grads, h_res, i: tl.constexpr, n: tl.constexpr):
    """Gradient of stream i: ``sum_j h_res[i, j]*grads[j]``, first stream to last, in fp32."""
    total = h_res[i * n] * widen(grads[0])
    for j in tl.static_range(1, n):
        total = total + h_res[i * n + j] * widen(grads[j])
    return total


@triton.jit
def branch_grad_tile(dropped, h_post, n: tl.constexpr):
    """Gradient of the branch's output: ``sum_j h_post[j]*dropped[j]``, first stream to last."""
    total = h_post[0] * dropped[0]
    for j in tl.static_range(1, n):
        total = total + h_post[j] * dropped[j]
    return total


@triton.jit
def dot_tile(sums, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, VECTOR: tl.constexpr):
    """Add ``left[i]*right[j]`` to the lanes' sums of all pairs."""
    added = ()
    for i in tl.static_range(LEFT):
        for j in tl.static_range(RIGHT):
            product = widen(left[i]) * widen(right[j])
            added = added + (sums[i * RIGHT + j] + lane_sum(product, VECTOR),)
    return added


@triton.jit
def _draw(seed, group):
    zero = (group * 0).to(tl.uint32)
    return tl.philox(seed, group.to(tl.uint32), (group >> 32).to(tl.uint32), zero, zero)


@triton.jit
def keep_tile(seed, row, start, p, C: tl.constexpr, BLOCK: tl.constexpr):
    """Which of BLOCK elements from column ``start`` (a multiple of 4) of row ``row`` (token * n + stream, 64-bit) of
    width C are kept: Philox 4x32-10, counter = element // 4, word = element % 4, kept where ``word * 2^-32 >= p``.

    Where rows hold whole groups of four, a group is drawn once; otherwise every element draws its own.
    """
    if C % 4 == 0:
        w0, w1, w2, w3 = _draw(seed, row * (C // 4) + start // 4 + tl.arange(0, BLOCK // 4))
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))
    else:
        element = row * C + start + tl.arange(0, BLOCK)
        w0, w1, w2, w3 = _draw(seed, element // 4)
        lane = element % 4
        word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return word.to(tl.float32) * 2.3283064365386963e-10 >= p


@triton.jit
def drop_tile(value, seed, row, start, p, scale, C: tl.constexpr, BLOCK: tl.constexpr, DROP: tl.constexpr):
    """``value * scale`` where kept, 0 elsewhere; ``value`` itself without dropout."""
    if DROP:
        return tl.where(keep_tile(seed, row, start, p, C, BLOCK), value * scale, 0.0)
    else:
        return value


@triton.jit
def _branch(x, bias_ptr, columns, C: tl.constexpr, FULL: tl.constexpr):
    """``x + bias`` in fp32."""
    value = widen(x)
    if bias_ptr is not None:
        value = value + widen(load_columns(bias_ptr, columns, C, FULL))
    return value


@triton.jit(
    do_not_specialize=[
        "h_res_stride",
        "residual_stride",
        "residual_stream_stride",
        "h_post_stride",
        "x_stride",
    ]
)
def h_post_bda_fwd_kernel(
    residual_ptr,
    x_ptr,
    h_res_ptr,
    h_post_ptr,
    bias_ptr,
    seed_ptr,
    out_ptr,
    residual_stride: tl.int64,
    residual_stream_stride: tl.int64,
    x_stride: tl.int64,
    h_res_stride: tl.int64,
    h_post_stride: tl.int64,
    p: tl.float32,
    scale: tl.float32,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    DROP: tl.constexpr = seed_ptr is not None
    FULL: tl.constexpr = C % BLOCK == 0
    token = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    h_res = load_scalars(h_res_ptr + token * h_res_stride, n * n)
    h_post = load_scalars(h_post_ptr + token * h_post_stride, n)
    residual_row = residual_ptr + token * (residual_stride * ALIGN)
    streams = load_streams(residual_row, residual_stream_stride * ALIGN, columns, n, C, FULL)
    x = load_columns(x_ptr + token * (x_stride * ALIGN), columns, C, FULL)
    branch = _branch(x, bias_ptr, columns, C, FULL)
    seed = tl.load(seed_ptr) if DROP else None
    mixed = mix_tile(streams, h_res, n)
    for j in tl.static_range(n):
        added = drop_tile(h_post[j] * branch, seed, token * n + j, start, p, scale, C, BLOCK, DROP)
        store_columns(out_ptr + (token * n + j) * C, columns, mixed[j] + added, C, FULL)


@triton.jit
def _lane_zeros(COUNT: tl.constexpr, LANES: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros = zeros + (tl.zeros((LANES,), tl.float32),)
    return zeros


@triton.jit
def _dropped_grads(
    grads,
    seed,
    token,
    start,
    p,
    scale,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    DROP: tl.constexpr,
):
    """The gradients of the n streams as the branch sees them, in fp32."""
    dropped = ()
    for j in tl.static_range(n):
        dropped = dropped + (
            drop_tile(widen(grads[j]), seed, token * n + j, start, p, scale, C, BLOCK, DROP),
        )
    return dropped


@triton.jit
def _bwd_columns(
    grad_row, residual_row, x_row, bias_ptr, g_residual_ptr, g_x_ptr, grad_stream_stride, residual_stream_stride,
    token, start, seed, p, scale, h_res, h_post, res_sums, post_sums,
    n: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, DROP: tl.constexpr,
    RES: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr, X: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a token from ``start``: writes their gradients, adds to the lanes' dot products, returns the
    branch's gradient (None where nobody asks) and the sums."""
    FULL: tl.constexpr = C % BLOCK == 0
    columns = start + tl.arange(0, BLOCK)
    grads = load_streams(grad_row, grad_stream_stride, columns, n, C, FULL)
    streams = load_streams(residual_row, residual_stream_stride, columns, n if RES else 0, C, FULL)
    branch = _branch(load_columns(x_row, columns, C, FULL), bias_ptr, columns, C, FULL) if POST else None
    if RESIDUAL:
        for i in tl.static_range(n):
            g_row = g_residual_ptr + (token * n + i) * C
            store_columns(g_row, columns, unmix_tile(grads, h_res, i, n), C, FULL)
    g_branch = None
    if POST or X or BIAS:
        dropped = _dropped_grads(grads, seed, token, start, p, scale, n, C, BLOCK, DROP)
        if X or BIAS:
            g_branch = branch_grad_tile(dropped, h_post, n)
        if X:
            store_columns(g_x_ptr + token * C, columns, g_branch, C, FULL)
        if POST:
            post_sums = dot_tile(post_sums, (branch,), dropped, 1, n, VECTOR)
    if RES:
        res_sums = dot_tile(res_sums, streams, grads, n, n, VECTOR)
    return g_branch, res_sums, post_sums


@triton.jit(
    do_not_specialize=[
        "grad_stride",
        "grad_stream_stride",
        "residual_stride",
        "residual_stream_stride",
        "x_stride",
        "h_res_stride",
        "h_post_stride",
        "T",
    ]
)
def h_post_bda_bwd_kernel(
    grad_ptr,
    residual_ptr,
    x_ptr,
    h_res_ptr,
    h_post_ptr,
    bias_ptr,
    seed_ptr,
    g_h_res_ptr,
    g_residual_ptr,
    g_h_post_ptr,
    g_x_ptr,
    partial_ptr,
    grad_stride: tl.int64,
    grad_stream_stride: tl.int64,
    residual_stride: tl.int64,
    residual_stream_stride: tl.int64,
    x_stride: tl.int64,
    h_res_stride: tl.int64,
    h_post_stride: tl.int64,
    T: tl.int64,
    p: tl.float32,
    scale: tl.float32,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIGN: tl.constexpr,
):
    DROP: tl.constexpr = seed_ptr is not None
    RES: tl.constexpr = g_h_res_ptr is not None
    RESIDUAL: tl.constexpr = g_residual_ptr is not None
    POST: tl.constexpr = g_h_post_ptr is not None
    X: tl.constexpr = g_x_ptr is not None
    BIAS: tl.constexpr = partial_ptr is not None
    CHUNKS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    chunk = tl.program_id(0).to(tl.int64)
    seed = tl.load(seed_ptr) if DROP else None
    totals = _lane_zeros(CHUNKS if BIAS else 0, BLOCK)
    for token in range(chunk * TOKENS, tl.minimum(chunk * TOKENS + TOKENS, T)):
        grad_row = grad_ptr + token * (grad_stride * ALIGN)
        residual_row = residual_ptr + token * (residual_stride * ALIGN)
        x_row = x_ptr + token * (x_stride * ALIGN)
        h_res = load_scalars(h_res_ptr + token * h_res_stride, n * n if RESIDUAL else 0)
        h_post = load_scalars(h_post_ptr + token * h_post_stride, n if X or BIAS else 0)
        res_sums = _lane_zeros(n * n if RES else 0, BLOCK // VECTOR)
        post_sums = _lane_zeros(n if POST else 0, BLOCK // VECTOR)
        if BIAS:
            # Every block of columns has its own registers, so the loop over them is unrolled.
            added = ()
            for k in tl.static_range(CHUNKS):
                g_branch, res_sums, post_sums = _bwd_columns(
                    grad_row, residual_row, x_row, bias_ptr, g_residual_ptr, g_x_ptr,
                    grad_stream_stride * ALIGN, residual_stream_stride * ALIGN,
                    token, k * BLOCK, seed, p, scale, h_res, h_post, res_sums, post_sums,
                    n, C, BLOCK, VECTOR, DROP, RES, RESIDUAL, POST, X, BIAS,
                )  # fmt: skip
                added = added + (totals[k] + g_branch,)
            totals = added
        else:
            for start in range(0, C, BLOCK):
                _, res_sums, post_sums = _bwd_columns(
                    grad_row, residual_row, x_row, bias_ptr, g_residual_ptr, g_x_ptr,
                    grad_stream_stride * ALIGN, residual_stream_stride * ALIGN,
                    token, start, seed, p, scale, h_res, h_post, res_sums, post_sums,
                    n, C, BLOCK, VECTOR, DROP, RES, RESIDUAL, POST, X, BIAS,
                )  # fmt: skip
        res_totals = block_sums(res_sums, n * n if RES else 0)
        for k in tl.static_range(n * n if RES else 0):
            store(g_h_res_ptr + token * (n * n) + k, res_totals[k])
        post_totals = block_sums(post_sums, n if POST else 0)
        for k in tl.static_range(n if POST else 0):
            store(g_h_post_ptr + token * n + k, post_totals[k])
    for k in tl.static_range(CHUNKS if BIAS else 0):
        store_columns(partial_ptr + chunk * C, k * BLOCK + tl.arange(0, BLOCK), totals[k], C, C % BLOCK == 0)


@triton.jit(do_not_specialize=["grad_stride", "grad_stream_stride", "h_post_stride", "T"])
def h_post_bda_bias_kernel(
    grad_ptr,
    h_post_ptr,
    seed_ptr,
    partial_ptr,
    grad_stride: tl.int64,
    grad_stream_stride: tl.int64,
    h_post_stride: tl.int64,
    T: tl.int64,
    p: tl.float32,
    scale: tl.float32,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The chunk sums of the bias gradient alone, for widths that a program cannot hold in registers."""
    DROP: tl.constexpr = seed_ptr is not None
    FULL: tl.constexpr = C % BLOCK == 0
    chunk = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    seed = tl.load(seed_ptr) if DROP else None
    total = tl.zeros((BLOCK,), tl.float32)
    for token in range(chunk * TOKENS, tl.minimum(chunk * TOKENS + TOKENS, T)):
        h_post = load_scalars(h_post_ptr + token * h_post_stride, n)
        grads = load_streams(
            grad_ptr + token * (grad_stride * ALIGN), grad_stream_stride * ALIGN, columns, n, C, FULL
        )
        dropped = _dropped_grads(grads, seed, token, start, p, scale, n, C, BLOCK, DROP)
        total = total + branch_grad_tile(dropped, h_post, n)
    store_columns(partial_ptr + chunk * C, columns, total, C, FULL)


@triton.jit(do_not_specialize=["count"])
def h_post_bda_bias_sum_kernel(
    partial_ptr,
    out_ptr,
    count: tl.int64,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds the chunk sums in order; ROWS of them are on their way at a time."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, ROWS):
        rows = ()
        for k in tl.static_range(ROWS):
            row = tl.full((BLOCK,), first + k, tl.int64)
            mask = (columns < C) & (row < count)
            rows = rows + (tl.load(partial_ptr + row * C + columns, mask=mask, other=0.0),)
        for k in tl.static_range(ROWS):
            total = total + rows[k]
    store_columns(out_ptr, columns, total, C, False)


_fwd = Launcher(h_post_bda_fwd_kernel)
_bwd = Launcher(h_post_bda_bwd_kernel)
_bias = Launcher(h_post_bda_bias_kernel)
_bias_sum = Launcher(h_post_bda_bias_sum_kernel)


def _scale(dropout_p: float) -> float:
    return 1.0 / (1.0 - dropout_p)


def h_post_bda_fwd(
    h_res: Tensor,
    original_residual: Tensor,
    h_post: Tensor,
    x: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    n, width = original_residual.shape[-2:]
    out = torch.empty(original_residual.shape, dtype=original_residual.dtype, device=x.device)
    count = h_post.numel() // n
    if count == 0:
        return out
    residual, residual_stride = flatten(original_residual, 2)
    residual_stream_stride = residual.stride(-2)
    x, x_stride = flatten(x, 1)
    h_res, h_res_stride = flatten(h_res, 2, dense=True)
    h_post, h_post_stride = flatten(h_post, 1)
    bias = bias.contiguous() if bias is not None else None
    config = fwd_heuristic(n, width, residual.element_size())
    align = alignment(width, residual_stride, residual_stream_stride, x_stride)
    strides = (residual_stride // align, residual_stream_stride // align, x_stride // align)
    _fwd(
        (count, triton.cdiv(width, config.block)),
        (residual, x, h_res, h_post, bias, seed, out, *strides, h_res_stride, h_post_stride)
        + (dropout_p, _scale(dropout_p)),
        (n, width, config.block, align),
        config.num_warps,
    )
    return out


def h_post_bda_bwd(
    grad: Tensor,
    h_res: Tensor,
    original_residual: Tensor,
    h_post: Tensor,
    x: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    needs: Sequence[bool],
) -> list[Tensor]:
    n, width = original_residual.shape[-2:]
    inputs = (h_res, original_residual, h_post, x)
    g_h_res, g_residual, g_h_post, g_x = (
        torch.empty(t.shape, dtype=t.dtype, device=x.device) if need else None
        for t, need in zip(inputs, needs, strict=False)
    )
    count = h_post.numel() // n
    chunks = triton.cdiv(count, BIAS_CHUNK)
    need_bias = needs[4] and bias is not None
    partial = torch.empty((chunks, width), dtype=torch.float32, device=x.device) if need_bias else None
    if count:
        grad, grad_stride = flatten(grad, 2)
        residual, residual_stride = flatten(original_residual, 2)
        x, x_stride = flatten(x, 1)
        h_res, h_res_stride = flatten(h_res, 2, dense=True)
        h_post, h_post_stride = flatten(h_post, 1)
        config = bwd_heuristic(n, width, residual.element_size())
        stream_strides = (grad.stride(-2), residual.stride(-2))
        align = alignment(width, grad_stride, residual_stride, x_stride, *stream_strides)
        grad_strides = (grad_stride // align, stream_strides[0] // align)
        residual_strides = (residual_stride // align, stream_strides[1] // align)
        dropout = (dropout_p, _scale(dropout_p))
        together = partial if config.holds(width) else None
        if any(needs[:4]) or together is not None:
            tokens = 1 if together is None else BIAS_CHUNK
            _bwd(
                (triton.cdiv(count, tokens),),
                (grad, residual, x, h_res, h_post, bias.contiguous() if bias is not None else None, seed)
                + (g_h_res, g_residual, g_h_post, g_x, together)
                + (*grad_strides, *residual_strides, x_stride // align, h_res_stride, h_post_stride, count)
                + dropout,
                (n, width, config.block, tokens, 16 // residual.element_size(), align),
                config.num_warps,
            )
        if partial is not None and together is None:
            block = min(config.block, 1024)
            _bias(
                (chunks, triton.cdiv(width, block)),
                (grad, h_post, seed, partial, *grad_strides, h_post_stride, count, *dropout),
                (n, width, block, BIAS_CHUNK, align),
                4,
            )
    g_bias = None
    if partial is not None and bias is not None:
        g_bias = torch.empty(bias.shape, dtype=bias.dtype, device=x.device)
        _bias_sum((triton.cdiv(width, 32),), (partial, g_bias, chunks), (width, 32, 64), 1)
    return [g for g in (g_h_res, g_residual, g_h_post, g_x, g_bias) if g is not None]
