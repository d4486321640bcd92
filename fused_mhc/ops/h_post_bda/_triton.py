"""Residual update in Triton: mixing, bias, dropout and add in one pass, forward and backward.

Forward and backward read everything once: a program owns a token, with all loads of a group of columns on their way
before the first store. In the backward lanes sum what they load for the n*n + n dot products, in order, and the lanes'
sums meet once at the end.

A gradient of the bias is a sum over tokens, for which a program would hold a whole row of fp32 sums. So then a program
owns one group of columns of a fixed chunk of tokens, which it goes through in order; a second, small kernel adds the
chunks' bias sums and, of every token, the groups' shares of the dot products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._strides import alignment, flatten
from .._triton_common import (
    Launcher,
    block_sums,
    elements,
    follow,
    lane_dots,
    lane_zeros,
    last_first,
    lead,
    load_columns,
    load_scalars,
    load_streams,
    store,
    store_columns,
    widen,
)
from .._tuning import tuned
from .config import BIAS_CHUNK, BIAS_STAGES, bwd_heuristic, fwd_candidates, fwd_heuristic
from .philox import dropout_numbers

__all__ = [
    "branch_grad_tile",
    "drop_tile",
    "h_post_bda_bwd",
    "h_post_bda_fwd",
    "keep_tile",
    "mix_tile",
    "unmix_tile",
]

#: Columns, and dot products, that a program of the second stage takes.
_BIAS_BLOCK, _SUM_BLOCK = 32, 1024


@triton.jit
def mix_tile(streams, weights, n: tl.constexpr):
    """One new stream: ``sum_i weights[i]*streams[i]``, first stream to last, in fp32; weights a column of the mixing
    matrix."""
    total = weights[0] * widen(streams[0])
    for i in tl.static_range(1, n):
        total = total + weights[i] * widen(streams[i])
    return total


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
def _draw(seed, group):
    """Philox 4x32-10 of counter (group, 0, 0): four uint32 words for every 64-bit group."""
    zero = (group * 0).to(tl.uint32)
    return tl.philox(seed, group.to(tl.uint32), (group >> 32).to(tl.uint32), zero, zero)


@triton.jit
def keep_tile(seed, row, start, threshold, C: tl.constexpr, BLOCK: tl.constexpr):
    """Which of BLOCK elements from column ``start`` (a multiple of 4) of row ``row`` (token * n + stream, 64-bit) of
    width C are kept: Philox, counter = element // 4, word = element % 4, kept from ``threshold`` on.

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
    return word >= threshold.to(tl.uint32)


@triton.jit
def drop_tile(
    value, seed, row, start, threshold, scale, C: tl.constexpr, BLOCK: tl.constexpr, DROP: tl.constexpr
):
    """``value * scale`` where kept, 0 elsewhere; ``value`` itself without dropout."""
    if DROP:
        return tl.where(keep_tile(seed, row, start, threshold, C, BLOCK), value * scale, 0.0)
    else:
        return value


@triton.jit
def _load_branch(x_row, bias_ptr, columns, C: tl.constexpr, FULL: tl.constexpr):
    """The branch's output and, where there is one, the bias."""
    if bias_ptr is not None:
        return load_columns(x_row, columns, C, FULL), load_columns(bias_ptr, columns, C, FULL)
    else:
        return (load_columns(x_row, columns, C, FULL),)


@triton.jit
def _branch(loaded, BIAS: tl.constexpr):
    """``x + bias`` in fp32."""
    if BIAS:
        return widen(loaded[0]) + widen(loaded[1])
    else:
        return widen(loaded[0])


@triton.jit
def _dropped_grads(
    grads,
    seed,
    token,
    start,
    threshold,
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
            drop_tile(widen(grads[j]), seed, token * n + j, start, threshold, scale, C, BLOCK, DROP),
        )
    return dropped


@triton.jit(
    do_not_specialize=[
        "residual_stride",
        "residual_stream_stride",
        "x_stride",
        "h_res_stride",
        "h_post_stride",
        "threshold",
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
    threshold: tl.int64,
    scale: tl.float32,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    lead()
    DROP: tl.constexpr = seed_ptr is not None
    FULL: tl.constexpr = C % (BLOCK * GROUP) == 0
    token = last_first()
    residual_row = residual_ptr + token * elements(residual_stride, ALIGN)
    x_row = x_ptr + token * elements(x_stride, ALIGN)
    h_res_row = h_res_ptr + token * h_res_stride
    # More than eight streams have more weights than a thread has registers: those are loaded where they are used.
    HELD: tl.constexpr = n * n if n <= 8 else 0
    h_res = load_scalars(h_res_row, HELD)
    h_post = load_scalars(h_post_ptr + token * h_post_stride, n)
    seed = tl.load(seed_ptr) if DROP else None
    for start in range(0, C, BLOCK * GROUP):
        streams = ()
        branches = ()
        for k in tl.static_range(GROUP):
            columns = start + k * BLOCK + tl.arange(0, BLOCK)
            streams = streams + load_streams(
                residual_row, elements(residual_stream_stride, ALIGN), columns, n, C, FULL
            )
            branches = branches + (_load_branch(x_row, bias_ptr, columns, C, FULL),)
        for k in tl.static_range(GROUP):
            columns = start + k * BLOCK + tl.arange(0, BLOCK)
            branch = _branch(branches[k], bias_ptr is not None)
            for j in tl.static_range(n):
                weights = h_res[j:HELD:n] if HELD > 0 else load_scalars(h_res_row + j, n, n)
                mixed = mix_tile(streams[k * n : k * n + n], weights, n)
                row = token * n + j
                added = drop_tile(
                    h_post[j] * branch, seed, row, start + k * BLOCK, threshold, scale, C, BLOCK, DROP
                )
                store_columns(out_ptr + row * C, columns, mixed + added, C, FULL)


@triton.jit
def _bwd_columns(
    grad_row,
    grad_stream_stride,
    residual_row,
    residual_stream_stride,
    x_row,
    bias_ptr,
    g_residual_ptr,
    g_x_ptr,
    h_res,
    h_post,
    res_dots,
    post_dots,
    bias_sums,
    seed,
    token,
    start,
    threshold,
    scale,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    VECTOR: tl.constexpr,
    FULL: tl.constexpr,
    RES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    POST: tl.constexpr,
    X: tl.constexpr,
    BIAS: tl.constexpr,
    DROP: tl.constexpr,
):
    """One group of columns of a token: the gradients of its streams and of the branch are written, the lanes' dot
    products and the columns' bias gradients are added to. Every load comes before the first store."""
    all_grads = ()
    all_streams = ()
    branches = ()
    for k in tl.static_range(GROUP):
        columns = start + k * BLOCK + tl.arange(0, BLOCK)
        all_grads = all_grads + load_streams(grad_row, grad_stream_stride, columns, n, C, FULL)
        all_streams = all_streams + load_streams(residual_row, residual_stream_stride, columns, RES, C, FULL)
        if POST > 0:
            branches = branches + (_load_branch(x_row, bias_ptr, columns, C, FULL),)
    added = ()
    for k in tl.static_range(GROUP):
        columns = start + k * BLOCK + tl.arange(0, BLOCK)
        grads = all_grads[k * n : k * n + n]
        for i in tl.static_range(RESIDUAL):
            g_row = g_residual_ptr + (token * n + i) * C
            store_columns(g_row, columns, unmix_tile(grads, h_res, i, n), C, FULL)
        if POST > 0 or X or BIAS:
            dropped = _dropped_grads(
                grads, seed, token, start + k * BLOCK, threshold, scale, n, C, BLOCK, DROP
            )
            if X or BIAS:
                g_branch = branch_grad_tile(dropped, h_post, n)
                if X:
                    store_columns(g_x_ptr + token * C, columns, g_branch, C, FULL)
                if BIAS:
                    added = added + (bias_sums[k] + g_branch,)
            if POST > 0:
                branch = _branch(branches[k], bias_ptr is not None)
                post_dots = lane_dots(post_dots, (branch,), dropped, 1, n, VECTOR)
        res_dots = lane_dots(res_dots, all_streams[k * RES : k * RES + RES], grads, RES, n, VECTOR)
    return res_dots, post_dots, added


@triton.jit
def _store_sums(pointer, vectors, COUNT: tl.constexpr):
    """The program's sum of each of COUNT vectors, side by side."""
    sums = block_sums(vectors, COUNT)
    for k in tl.static_range(COUNT):
        store(pointer + k, sums[k])


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
        "threshold",
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
    bias_sums_ptr,
    grad_stride: tl.int64,
    grad_stream_stride: tl.int64,
    residual_stride: tl.int64,
    residual_stream_stride: tl.int64,
    x_stride: tl.int64,
    h_res_stride: tl.int64,
    h_post_stride: tl.int64,
    T: tl.int64,
    threshold: tl.int64,
    scale: tl.float32,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Without a bias gradient (TOKENS = 1) a program owns a token. With one it owns a group of columns of TOKENS
    tokens: ``bias_sums [chunks, C]`` takes its sum over the tokens, and ``g_h_res`` and ``g_h_post`` are then
    ``[T, groups, ...]`` in fp32: what each group adds to the dot products. The loads of STAGES - 1 tokens to come are
    in flight meanwhile, through shared memory."""
    lead()
    DROP: tl.constexpr = seed_ptr is not None
    RES: tl.constexpr = n if g_h_res_ptr is not None else 0
    RESIDUAL: tl.constexpr = n if g_residual_ptr is not None else 0
    POST: tl.constexpr = n if g_h_post_ptr is not None else 0
    X: tl.constexpr = g_x_ptr is not None
    BIAS: tl.constexpr = bias_sums_ptr is not None
    SPAN: tl.constexpr = BLOCK * GROUP
    FULL: tl.constexpr = C % SPAN == 0
    LANES: tl.constexpr = BLOCK // VECTOR
    chunk = last_first()
    grad_stream = elements(grad_stream_stride, ALIGN)
    residual_stream = elements(residual_stream_stride, ALIGN)
    seed = tl.load(seed_ptr) if DROP else None
    if BIAS:
        part = tl.program_id(1)
        parts = tl.num_programs(1)
        start = part * SPAN
        first = chunk * TOKENS
        end = tl.minimum(first + TOKENS, T)
        bias_sums = lane_zeros(GROUP, BLOCK)
        # Mixes are scalars, which Triton does not load ahead: those of the next token are asked for here.
        h_res = load_scalars(h_res_ptr + first * h_res_stride, RESIDUAL * n)
        h_post = load_scalars(h_post_ptr + first * h_post_stride, n)
        for token in tl.range(first, end, num_stages=STAGES):
            following = tl.minimum(token + 1, end - 1)
            next_h_res = load_scalars(h_res_ptr + following * h_res_stride, RESIDUAL * n)
            next_h_post = load_scalars(h_post_ptr + following * h_post_stride, n)
            res_dots, post_dots, bias_sums = _bwd_columns(
                grad_ptr + token * elements(grad_stride, ALIGN),
                grad_stream,
                residual_ptr + token * elements(residual_stride, ALIGN),
                residual_stream,
                x_ptr + token * elements(x_stride, ALIGN),
                bias_ptr,
                g_residual_ptr,
                g_x_ptr,
                h_res,
                h_post,
                lane_zeros(RES * n, LANES),
                lane_zeros(POST, LANES),
                bias_sums,
                seed,
                token,
                start,
                threshold,
                scale,
                n,
                C,
                BLOCK,
                GROUP,
                VECTOR,
                FULL,
                RES,
                RESIDUAL,
                POST,
                X,
                BIAS,
                DROP,
            )
            _store_sums(
                g_h_res_ptr + (token * parts + part) * (n * n) if RES > 0 else None, res_dots, RES * n
            )
            _store_sums(g_h_post_ptr + (token * parts + part) * n if POST > 0 else None, post_dots, POST)
            h_res = next_h_res
            h_post = next_h_post
        for k in tl.static_range(GROUP):
            columns = start + k * BLOCK + tl.arange(0, BLOCK)
            store_columns(bias_sums_ptr + chunk * C, columns, bias_sums[k], C, FULL)
    else:
        h_res = load_scalars(h_res_ptr + chunk * h_res_stride, RESIDUAL * n)
        h_post = load_scalars(h_post_ptr + chunk * h_post_stride, n if X else 0)
        res_dots = lane_zeros(RES * n, LANES)
        post_dots = lane_zeros(POST, LANES)
        for start in range(0, C, SPAN):
            res_dots, post_dots, _ = _bwd_columns(
                grad_ptr + chunk * elements(grad_stride, ALIGN),
                grad_stream,
                residual_ptr + chunk * elements(residual_stride, ALIGN),
                residual_stream,
                x_ptr + chunk * elements(x_stride, ALIGN),
                bias_ptr,
                g_residual_ptr,
                g_x_ptr,
                h_res,
                h_post,
                res_dots,
                post_dots,
                (),
                seed,
                chunk,
                start,
                threshold,
                scale,
                n,
                C,
                BLOCK,
                GROUP,
                VECTOR,
                FULL,
                RES,
                RESIDUAL,
                POST,
                X,
                BIAS,
                DROP,
            )
        _store_sums(g_h_res_ptr + chunk * (n * n) if RES > 0 else None, res_dots, RES * n)
        _store_sums(g_h_post_ptr + chunk * n if POST > 0 else None, post_dots, POST)


@triton.jit
def _sum_chunks(sums_ptr, out_ptr, block, chunks, C: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the chunks' sums for one block of columns: 64 neighbours in order, and eight such runs side by side."""
    RUN: tl.constexpr = 64
    RUNS: tl.constexpr = 8
    columns = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, chunks, RUN * RUNS):
        first = start + tl.arange(0, RUNS).to(tl.int64) * RUN
        rows = ()
        for k in tl.static_range(RUN):
            mask = (first + k < chunks)[:, None] & (columns < C)[None, :]
            at = sums_ptr + (first + k)[:, None] * C + columns[None, :]
            rows = rows + (tl.load(at, mask=mask, other=0.0),)
        runs = tl.zeros((RUNS, BLOCK), tl.float32)
        for k in tl.static_range(RUN):
            runs = runs + rows[k]
        total = total + tl.sum(runs, 0)
    store_columns(out_ptr, columns, total, C, False)


@triton.jit
def _sum_parts(
    parts_ptr, out_ptr, block, count, SIZE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds the PARTS of every token's SIZE dot products, first to last."""
    element = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = element < count * SIZE
    at = parts_ptr + (element // SIZE) * (PARTS * SIZE) + element % SIZE
    total = tl.load(at, mask=inside, other=0.0)
    for k in tl.static_range(1, PARTS):
        total = total + tl.load(at + k * SIZE, mask=inside, other=0.0)
    store(out_ptr + element, total, inside)


@triton.jit(do_not_specialize=["T", "chunks", "res_blocks"])
def h_post_bda_sum_kernel(
    bias_sums_ptr,
    res_parts_ptr,
    post_parts_ptr,
    g_bias_ptr,
    g_h_res_ptr,
    g_h_post_ptr,
    T: tl.int64,
    chunks: tl.int64,
    res_blocks: tl.int64,
    n: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The second stage of a backward with a bias gradient, everything in one launch."""
    follow()
    BIAS_BLOCKS: tl.constexpr = (C + BIAS_BLOCK - 1) // BIAS_BLOCK
    program = tl.program_id(0).to(tl.int64)
    if program < BIAS_BLOCKS:
        _sum_chunks(bias_sums_ptr, g_bias_ptr, program, chunks, C, BIAS_BLOCK)
    elif program < BIAS_BLOCKS + res_blocks:
        if g_h_res_ptr is not None:
            _sum_parts(res_parts_ptr, g_h_res_ptr, program - BIAS_BLOCKS, T, n * n, PARTS, BLOCK)
    else:
        if g_h_post_ptr is not None:
            _sum_parts(post_parts_ptr, g_h_post_ptr, program - BIAS_BLOCKS - res_blocks, T, n, PARTS, BLOCK)


_fwd = Launcher(h_post_bda_fwd_kernel, follows=False)
_bwd = Launcher(h_post_bda_bwd_kernel, follows=False)
_sum = Launcher(h_post_bda_sum_kernel)


def _fp32_empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


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
    itemsize = residual.element_size()
    config = tuned(
        "h_post_bda_fwd", out.device, fwd_heuristic, fwd_candidates, n, width, itemsize, bias is not None
    )
    align = alignment(width, residual_stride, residual_stream_stride, x_stride)
    strides = (residual_stride // align, residual_stream_stride // align, x_stride // align)
    _fwd(
        (count,),
        (residual, x, h_res, h_post, bias, seed, out, *strides, h_res_stride, h_post_stride)
        + dropout_numbers(dropout_p),
        (n, width, config.block, config.group, align),
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
    inputs = (h_res, original_residual, h_post, x, bias)
    g_h_res, g_residual, g_h_post, g_x, g_bias = results = [
        torch.empty(t.shape, dtype=t.dtype, device=x.device) if need and t is not None else None
        for t, need in zip(inputs, needs, strict=True)
    ]
    count = h_post.numel() // n
    if count == 0:
        return [g.zero_() for g in results if g is not None]
    grad, grad_stride = flatten(grad, 2)
    residual, residual_stride = flatten(original_residual, 2)
    x, x_stride = flatten(x, 1)
    h_res, h_res_stride = flatten(h_res, 2, dense=True)
    h_post, h_post_stride = flatten(h_post, 1)
    bias = bias.contiguous() if bias is not None else None
    config = bwd_heuristic(n, width, residual.element_size(), g_bias is not None)
    stream_strides = (grad.stride(-2), residual.stride(-2))
    align = alignment(width, grad_stride, residual_stride, x_stride, *stream_strides)
    strides = (grad_stride, stream_strides[0], residual_stride, stream_strides[1], x_stride)
    tokens, parts, bias_sums, res_parts, post_parts = 1, 1, None, g_h_res, g_h_post
    if g_bias is not None:
        tokens, parts = BIAS_CHUNK, triton.cdiv(width, config.block * config.group)
        bias_sums = _fp32_empty(g_bias, triton.cdiv(count, tokens), width)
        res_parts = _fp32_empty(g_bias, count, parts, n * n) if g_h_res is not None else None
        post_parts = _fp32_empty(g_bias, count, parts, n) if g_h_post is not None else None
    chunks = triton.cdiv(count, tokens)
    _bwd(
        (chunks, parts),
        (grad, residual, x, h_res, h_post, bias, seed, res_parts, g_residual, post_parts, g_x, bias_sums)
        + tuple(stride // align for stride in strides)
        + (h_res_stride, h_post_stride, count, *dropout_numbers(dropout_p)),
        (n, width, config.block, config.group, tokens, BIAS_STAGES, 16 // residual.element_size(), align),
        config.num_warps,
    )
    if g_bias is not None:
        res_blocks = triton.cdiv(count * n * n, _SUM_BLOCK) if g_h_res is not None else 0
        post_blocks = triton.cdiv(count * n, _SUM_BLOCK) if g_h_post is not None else 0
        _sum(
            (triton.cdiv(width, _BIAS_BLOCK) + res_blocks + post_blocks,),
            (bias_sums, res_parts, post_parts, g_bias, g_h_res, g_h_post, count, chunks, res_blocks),
            (n, width, parts, _BIAS_BLOCK, _SUM_BLOCK),
            8,
        )
    return [g for g in results if g is not None]
