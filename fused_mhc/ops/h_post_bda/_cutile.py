"""Residual update in cuTile: mixing, bias, dropout and add in one pass, forward and backward.

Forward and backward read everything once: a program owns a token, with all loads of a group of columns on their way
before the first store. In the backward lanes sum what they load for the n*n + n dot products, in order, and the lanes'
sums meet once at the end.

A gradient of the bias is a sum over tokens, for which a program would hold a whole row of fp32 sums. So then a program
owns one group of columns of a fixed chunk of tokens, which it goes through in order; two small kernels add the chunks'
bias sums and, of every token, the groups' shares of the dot products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import cuda.tile as ct
import torch
from torch import Tensor

from .._cutile_common import (
    WARPS,
    Launcher,
    architecture,
    dot_sums,
    kernel,
    lane_dots,
    lane_zeros,
    load_columns,
    load_scalars,
    load_streams,
    row_offset,
    store_columns,
    store_scalars,
    widen,
    widen_streams,
)
from .._rows import RowConfig, row_candidates
from .._strides import alignment, flatten
from .config import BIAS_CHUNK
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

#: Columns, and runs of 64 chunks, that a program of the bias gradient's second stage takes; dot products of the other.
_BIAS_BLOCK, _RUNS, _RUN, _SUM_BLOCK = 32, 8, 64, 1024
#: Philox 4x32: multipliers, key increments, and the low word's bits.
_M0, _M1, _W0, _W1, _LOW = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF


def mix_tile(streams, weights, n, j, first):
    """New stream j: ``sum_i weights[i*n + j]*streams[first + i]``, first stream to last, in fp32."""
    total = weights[j] * widen(streams[first])
    for i in ct.static_iter(range(1, n)):
        total = total + weights[i * n + j] * widen(streams[first + i])
    return total


def unmix_tile(grads, h_res, i, n):
    """Gradient of stream i: ``sum_j h_res[i, j]*grads[j]``, first stream to last; grads in fp32."""
    total = h_res[i * n] * grads[0]
    for j in ct.static_iter(range(1, n)):
        total = total + h_res[i * n + j] * grads[j]
    return total


def branch_grad_tile(dropped, h_post, n):
    """Gradient of the branch's output: ``sum_j h_post[j]*dropped[j]``, first stream to last."""
    total = h_post[0] * dropped[0]
    for j in ct.static_iter(range(1, n)):
        total = total + h_post[j] * dropped[j]
    return total


def _draw(seed, group):
    """Philox 4x32-10 of counter (group, 0, 0): four words, each in a uint64, for every 64-bit group."""
    key0, key1 = seed & _LOW, (seed >> 32) & _LOW
    c0 = ct.astype(group, ct.uint64) & _LOW
    c1 = (ct.astype(group, ct.uint64) >> 32) & _LOW
    c2, c3 = c0 & 0, c0 & 0
    for _ in ct.static_iter(range(10)):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _LOW) ^ c1 ^ key0,
            p1 & _LOW,
            ((p0 >> 32) & _LOW) ^ c3 ^ key1,
            p0 & _LOW,
        )
        key0, key1 = (key0 + _W0) & _LOW, (key1 + _W1) & _LOW
    return c0, c1, c2, c3


def keep_tile(seed, row, start, threshold, C, BLOCK):
    """Which of BLOCK elements from column ``start`` (a multiple of 4) of row ``row`` (token * n + stream, 64-bit) of
    width C are kept: Philox, counter = element // 4, word = element % 4, kept from ``threshold`` on.

    Where rows hold whole groups of four, a group is drawn once; otherwise every element draws its own.
    """
    if C % 4 == 0 and BLOCK >= 4:
        w0, w1, w2, w3 = _draw(seed, row * (C // 4) + start // 4 + ct.arange(BLOCK // 4, dtype=ct.int64))
        half = (BLOCK // 4, 2, 1)
        evens = ct.reshape(ct.cat((w0[:, None], w2[:, None]), 1), half)
        odds = ct.reshape(ct.cat((w1[:, None], w3[:, None]), 1), half)
        word = ct.reshape(ct.cat((evens, odds), 2), (BLOCK,))
    else:
        element = row * C + start + ct.arange(BLOCK, dtype=ct.int64)
        w0, w1, w2, w3 = _draw(seed, element // 4)
        lane = element % 4
        word = ct.where(lane < 2, ct.where(lane == 0, w0, w1), ct.where(lane == 2, w2, w3))
    return word >= ct.astype(threshold, ct.uint64)


def drop_tile(value, seed, row, start, threshold, scale, C, BLOCK, DROP):
    """``value * scale`` where kept, 0 elsewhere; ``value`` itself without dropout."""
    return ct.where(keep_tile(seed, row, start, threshold, C, BLOCK), value * scale, 0.0) if DROP else value


def _drop_streams(grads, seed, token, start, threshold, scale, n, C, BLOCK, DROP):
    """`drop_tile` of the n streams of a token."""
    dropped = ()
    for j in ct.static_iter(range(n)):
        dropped = dropped + (
            drop_tile(grads[j], seed, token * n + j, start, threshold, scale, C, BLOCK, DROP),
        )
    return dropped


def _load_branch(x, row, bias, columns, C, FULL, BIAS):
    """The branch's output and, where there is one, the bias."""
    loaded = (load_columns(x, row, columns, C, FULL),)
    return loaded + (load_columns(bias, 0, columns, C, FULL),) if BIAS else loaded


def _branch(loaded, BIAS):
    """``x + bias`` in fp32."""
    return widen(loaded[0]) + widen(loaded[1]) if BIAS else widen(loaded[0])


def _load_seed(seed, DROP):
    return ct.astype(seed.load_offset(0), ct.uint64) if DROP else 0


@kernel
def h_post_bda_fwd_kernel(
    residual_,
    x_,
    h_res_,
    h_post_,
    bias_,
    seed_,
    out_,
    first: ct.ScalarInt64,
    residual_stride: ct.ScalarInt64,
    residual_stream_stride: ct.ScalarInt64,
    x_stride: ct.ScalarInt64,
    h_res_stride: ct.ScalarInt64,
    h_post_stride: ct.ScalarInt64,
    threshold: ct.ScalarInt64,
    scale: float,
    n: ct.Constant[int],
    C: ct.Constant[int],
    BLOCK: ct.Constant[int],
    GROUP: ct.Constant[int],
    ALIGN: ct.Constant[int],
    BIAS: ct.Constant[bool],
    DROP: ct.Constant[bool],
):
    FULL = C % (BLOCK * GROUP) == 0
    token = first + ct.bid(0)
    residual, x, bias, out = (
        residual_.get_raw_memory(),
        x_.get_raw_memory(),
        bias_.get_raw_memory(),
        out_.get_raw_memory(),
    )
    seed = _load_seed(seed_.get_raw_memory(), DROP)
    row, x_row = row_offset(token, residual_stride, ALIGN), row_offset(token, x_stride, ALIGN)
    h_res = load_scalars(h_res_.get_raw_memory(), token * h_res_stride, n * n)
    h_post = load_scalars(h_post_.get_raw_memory(), token * h_post_stride, n)
    for start in range(0, C, BLOCK * GROUP):
        streams = ()
        branches = ()
        for k in ct.static_iter(range(GROUP)):
            columns = start + k * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
            streams = streams + load_streams(
                residual, row, residual_stream_stride, columns, n, C, FULL, ALIGN
            )
            branches = branches + (_load_branch(x, x_row, bias, columns, C, FULL, BIAS),)
        for k in ct.static_iter(range(GROUP)):
            columns = start + k * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
            branch = _branch(branches[k], BIAS)
            for j in ct.static_iter(range(n)):
                stream = token * n + j
                mixed = mix_tile(streams, h_res, n, j, k * n)
                added = drop_tile(
                    h_post[j] * branch, seed, stream, start + k * BLOCK, threshold, scale, C, BLOCK, DROP
                )
                store_columns(out, stream * C, columns, mixed + added, C, FULL)


@kernel
def h_post_bda_bwd_kernel(
    grad_,
    residual_,
    x_,
    h_res_,
    h_post_,
    bias_,
    seed_,
    g_h_res_,
    g_residual_,
    g_h_post_,
    g_x_,
    first: ct.ScalarInt64,
    grad_stride: ct.ScalarInt64,
    grad_stream_stride: ct.ScalarInt64,
    residual_stride: ct.ScalarInt64,
    residual_stream_stride: ct.ScalarInt64,
    x_stride: ct.ScalarInt64,
    h_res_stride: ct.ScalarInt64,
    h_post_stride: ct.ScalarInt64,
    threshold: ct.ScalarInt64,
    scale: float,
    n: ct.Constant[int],
    C: ct.Constant[int],
    BLOCK: ct.Constant[int],
    GROUP: ct.Constant[int],
    VECTOR: ct.Constant[int],
    ALIGN: ct.Constant[int],
    BIAS: ct.Constant[bool],
    DROP: ct.Constant[bool],
    RES: ct.Constant[int],
    RESIDUAL: ct.Constant[int],
    POST: ct.Constant[int],
    X: ct.Constant[bool],
):
    """A program owns a token. RES, RESIDUAL and POST are n where those gradients are wanted, else 0."""
    FULL = C % (BLOCK * GROUP) == 0
    token = first + ct.bid(0)
    grad, residual, x, bias = (
        grad_.get_raw_memory(),
        residual_.get_raw_memory(),
        x_.get_raw_memory(),
        bias_.get_raw_memory(),
    )
    g_h_res, g_residual, g_h_post, g_x = (
        g_h_res_.get_raw_memory(),
        g_residual_.get_raw_memory(),
        g_h_post_.get_raw_memory(),
        g_x_.get_raw_memory(),
    )
    seed = _load_seed(seed_.get_raw_memory(), DROP)
    grad_row = row_offset(token, grad_stride, ALIGN)
    row, x_row = row_offset(token, residual_stride, ALIGN), row_offset(token, x_stride, ALIGN)
    h_res = load_scalars(h_res_.get_raw_memory(), token * h_res_stride, RESIDUAL * n)
    h_post = load_scalars(h_post_.get_raw_memory(), token * h_post_stride, n if X else 0)
    res_dots = lane_zeros(RES * n, BLOCK // VECTOR)
    post_dots = lane_zeros(POST, BLOCK // VECTOR)
    for start in range(0, C, BLOCK * GROUP):
        all_grads = ()
        all_streams = ()
        branches = ()
        for k in ct.static_iter(range(GROUP)):
            columns = start + k * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
            all_grads = all_grads + load_streams(
                grad, grad_row, grad_stream_stride, columns, n, C, FULL, ALIGN
            )
            all_streams = all_streams + load_streams(
                residual, row, residual_stream_stride, columns, RES, C, FULL, ALIGN
            )
            if POST > 0:
                branches = branches + (_load_branch(x, x_row, bias, columns, C, FULL, BIAS),)
        for k in ct.static_iter(range(GROUP)):
            columns = start + k * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
            grads = widen_streams(all_grads, k * n, n)
            for i in ct.static_iter(range(RESIDUAL)):
                store_columns(
                    g_residual, (token * n + i) * C, columns, unmix_tile(grads, h_res, i, n), C, FULL
                )
            if POST > 0 or X:
                dropped = _drop_streams(
                    grads, seed, token, start + k * BLOCK, threshold, scale, n, C, BLOCK, DROP
                )
                if X:
                    store_columns(g_x, token * C, columns, branch_grad_tile(dropped, h_post, n), C, FULL)
                if POST > 0:
                    branch = _branch(branches[k], BIAS)
                    post_dots = lane_dots(post_dots, (branch,), dropped, 1, n, BLOCK, VECTOR)
            streams = widen_streams(all_streams, k * RES, RES)
            res_dots = lane_dots(res_dots, streams, grads, RES, n, BLOCK, VECTOR)
    store_scalars(g_h_res, token * (n * n), dot_sums(res_dots, RES * n), RES * n)
    store_scalars(g_h_post, token * n, dot_sums(post_dots, POST), POST)


@kernel
def h_post_bda_bias_bwd_kernel(
    grad_,
    residual_,
    x_,
    h_res_,
    h_post_,
    bias_,
    seed_,
    res_parts_,
    g_residual_,
    post_parts_,
    g_x_,
    bias_sums_,
    grad_stride: ct.ScalarInt64,
    grad_stream_stride: ct.ScalarInt64,
    residual_stride: ct.ScalarInt64,
    residual_stream_stride: ct.ScalarInt64,
    x_stride: ct.ScalarInt64,
    h_res_stride: ct.ScalarInt64,
    h_post_stride: ct.ScalarInt64,
    T: ct.ScalarInt64,
    parts: ct.ScalarInt64,
    threshold: ct.ScalarInt64,
    scale: float,
    n: ct.Constant[int],
    C: ct.Constant[int],
    BLOCK: ct.Constant[int],
    GROUP: ct.Constant[int],
    TOKENS: ct.Constant[int],
    VECTOR: ct.Constant[int],
    ALIGN: ct.Constant[int],
    BIAS: ct.Constant[bool],
    DROP: ct.Constant[bool],
    RES: ct.Constant[int],
    RESIDUAL: ct.Constant[int],
    POST: ct.Constant[int],
    X: ct.Constant[bool],
):
    """The backward with a bias gradient: a program owns GROUP blocks of columns of TOKENS tokens. ``bias_sums [chunks,
    C]`` takes its sum over the tokens; ``res_parts`` and ``post_parts`` (``[T, parts, ...]``) what its columns add to
    the dot products."""
    FULL = C % (BLOCK * GROUP) == 0
    chunk = ct.astype(ct.bid(0), ct.int64)
    part = ct.astype(ct.bid(1), ct.int64)
    grad, residual, x, bias = (
        grad_.get_raw_memory(),
        residual_.get_raw_memory(),
        x_.get_raw_memory(),
        bias_.get_raw_memory(),
    )
    res_parts, g_residual, post_parts, g_x = (
        res_parts_.get_raw_memory(),
        g_residual_.get_raw_memory(),
        post_parts_.get_raw_memory(),
        g_x_.get_raw_memory(),
    )
    h_res_memory, h_post_memory = h_res_.get_raw_memory(), h_post_.get_raw_memory()
    seed = _load_seed(seed_.get_raw_memory(), DROP)
    first = ct.bid(1) * (BLOCK * GROUP)
    bias_sums = lane_zeros(GROUP, BLOCK)
    for token in range(chunk * TOKENS, ct.minimum(chunk * TOKENS + TOKENS, T)):
        grad_row = row_offset(token, grad_stride, ALIGN)
        row, x_row = row_offset(token, residual_stride, ALIGN), row_offset(token, x_stride, ALIGN)
        h_res = load_scalars(h_res_memory, token * h_res_stride, RESIDUAL * n)
        h_post = load_scalars(h_post_memory, token * h_post_stride, n)
        res_dots = lane_zeros(RES * n, BLOCK // VECTOR)
        post_dots = lane_zeros(POST, BLOCK // VECTOR)
        added = ()
        for k in ct.static_iter(range(GROUP)):
            start = first + k * BLOCK
            columns = start + ct.arange(BLOCK, dtype=ct.int32)
            narrow = load_streams(grad, grad_row, grad_stream_stride, columns, n, C, FULL, ALIGN)
            narrow_streams = load_streams(residual, row, residual_stream_stride, columns, RES, C, FULL, ALIGN)
            grads = widen_streams(narrow, 0, n)
            dropped = _drop_streams(grads, seed, token, start, threshold, scale, n, C, BLOCK, DROP)
            g_branch = branch_grad_tile(dropped, h_post, n)
            added = added + (bias_sums[k] + g_branch,)
            for i in ct.static_iter(range(RESIDUAL)):
                store_columns(
                    g_residual, (token * n + i) * C, columns, unmix_tile(grads, h_res, i, n), C, FULL
                )
            if X:
                store_columns(g_x, token * C, columns, g_branch, C, FULL)
            if POST > 0:
                branch = _branch(_load_branch(x, x_row, bias, columns, C, FULL, BIAS), BIAS)
                post_dots = lane_dots(post_dots, (branch,), dropped, 1, n, BLOCK, VECTOR)
            streams = widen_streams(narrow_streams, 0, RES)
            res_dots = lane_dots(res_dots, streams, grads, RES, n, BLOCK, VECTOR)
        bias_sums = added
        place = token * parts + part
        store_scalars(res_parts, place * (n * n), dot_sums(res_dots, RES * n), RES * n)
        store_scalars(post_parts, place * n, dot_sums(post_dots, POST), POST)
    for k in ct.static_iter(range(GROUP)):
        columns = first + k * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
        store_columns(bias_sums_.get_raw_memory(), chunk * C, columns, bias_sums[k], C, FULL)


@kernel
def h_post_bda_bias_kernel(
    sums_,
    g_bias_,
    chunks: ct.ScalarInt64,
    C: ct.Constant[int],
):
    """Adds the chunks' sums ``[chunks, C]`` for one block of columns: 64 neighbours in order, and eight such runs side
    by side."""
    sums = sums_.get_raw_memory()
    columns = ct.bid(0) * _BIAS_BLOCK + ct.arange(_BIAS_BLOCK, dtype=ct.int32)
    run = ct.arange(_RUNS, dtype=ct.int64) * _RUN
    total = ct.zeros((_BIAS_BLOCK,), ct.float32)
    for start in range(0, chunks, _RUN * _RUNS):
        runs = ct.zeros((_RUNS, _BIAS_BLOCK), ct.float32)
        for k in range(_RUN):
            chunk = start + run + k
            mask = (chunk < chunks)[:, None] & (columns < C)[None, :]
            at = (chunk * C)[:, None] + columns[None, :]
            runs = runs + sums.load_offset(at, mask=mask, padding_value=0)
        total = total + ct.sum(runs, 0)
    store_columns(g_bias_.get_raw_memory(), 0, columns, total, C, False)


@kernel
def h_post_bda_parts_kernel(
    parts_,
    out_,
    elements: ct.ScalarInt64,
    SIZE: ct.Constant[int],
    PARTS: ct.Constant[int],
):
    """Adds the PARTS of every token's SIZE dot products, first to last."""
    parts, out = parts_.get_raw_memory(), out_.get_raw_memory()
    element = ct.astype(ct.bid(0), ct.int64) * _SUM_BLOCK + ct.arange(_SUM_BLOCK, dtype=ct.int64)
    inside = element < elements
    at = (element // SIZE) * (PARTS * SIZE) + element % SIZE
    total = parts.load_offset(at, mask=inside, padding_value=0)
    for k in range(1, PARTS):
        total = total + parts.load_offset(at + k * SIZE, mask=inside, padding_value=0)
    out.store_offset(element, ct.astype(total, out.dtype), mask=inside)


_fwd = Launcher(h_post_bda_fwd_kernel)
_bwd = Launcher(h_post_bda_bwd_kernel)
_bias_bwd = Launcher(h_post_bda_bias_bwd_kernel)
_bias = Launcher(h_post_bda_bias_kernel)
_parts = Launcher(h_post_bda_parts_kernel)


def _fp32_empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _fwd_rows(n: int, width: int, itemsize: int, drop: bool) -> RowConfig:
    """The n*n weights take registers too, and so does the drawing of masks."""
    return row_candidates(width, itemsize, n + 1, 1 if drop else 80 if n <= 5 else 48, WARPS)[0]


def _bwd_rows(n: int, width: int, itemsize: int, bias: bool, drop: bool, arch: str) -> RowConfig:
    """The n*n + n dot products take registers, beside the loads and their fp32 values. With ``bias`` a program keeps to
    one group of columns, whose fp32 sums lie in registers, where the rest leaves some."""
    rows = row_candidates(width, itemsize, 2 * n + 1, 1, WARPS)[0]
    blocks = -(-width // rows.block)
    most = 1 if n > 4 or drop else 4 if arch == "sm_90" else 2
    return replace(rows, group=min(blocks, most)) if bias else rows


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
    rows = _fwd_rows(n, width, residual.element_size(), seed is not None)
    align = alignment(width, residual_stride, residual_stream_stride, x_stride)
    _fwd.by_token(
        count,
        (residual, x, h_res, h_post, bias, seed, out),
        (
            residual_stride,
            residual_stream_stride,
            x_stride,
            h_res_stride,
            h_post_stride,
            *dropout_numbers(dropout_p),
        ),
        (n, width, rows.block, rows.group, align, bias is not None, seed is not None),
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
    rows = _bwd_rows(
        n, width, residual.element_size(), g_bias is not None, seed is not None, architecture(x.device)
    )
    stream_strides = (grad.stride(-2), residual.stride(-2))
    align = alignment(width, grad_stride, residual_stride, x_stride, *stream_strides)
    strides = (grad_stride, stream_strides[0], residual_stride, stream_strides[1], x_stride)
    strides += (h_res_stride, h_post_stride)
    vector = min(rows.block, 16 // residual.element_size())
    wanted = [n if g is not None else 0 for g in (g_h_res, g_residual, g_h_post)]
    flags = (bias is not None, seed is not None, *wanted, g_x is not None)
    reads = (grad, residual, x, h_res, h_post, bias, seed)
    if g_bias is None:
        _bwd.by_token(
            count,
            (*reads, g_h_res, g_residual, g_h_post, g_x),
            (*strides, *dropout_numbers(dropout_p)),
            (n, width, rows.block, rows.group, vector, align, *flags),
        )
        return [g for g in results if g is not None]
    chunks, parts = -(-count // BIAS_CHUNK), -(-width // (rows.block * rows.group))
    bias_sums = _fp32_empty(g_bias, chunks, width)
    res_parts, post_parts = g_h_res, g_h_post
    if parts > 1:
        res_parts = _fp32_empty(g_bias, count, parts, n * n) if g_h_res is not None else None
        post_parts = _fp32_empty(g_bias, count, parts, n) if g_h_post is not None else None
    _bias_bwd(
        (chunks, parts),
        (*reads, res_parts, g_residual, post_parts, g_x, bias_sums),
        (*strides, count, parts, *dropout_numbers(dropout_p)),
        (n, width, rows.block, rows.group, BIAS_CHUNK, vector, align, *flags),
    )
    _bias((-(-width // _BIAS_BLOCK),), (bias_sums, g_bias), (chunks,), (width,))
    for share, total, size in ((res_parts, g_h_res, n * n), (post_parts, g_h_post, n)):
        if parts > 1 and share is not None and total is not None:
            _parts((-(-count * size // _SUM_BLOCK),), (share, total), (count * size,), (size, parts))
    return [g for g in results if g is not None]
