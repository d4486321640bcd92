"""Weighted sum of the streams in Triton: every stream is read once, in both directions.

One program owns a token, with all loads of a group of columns on their way before the first store. In the backward it
finishes its dot products itself: lanes sum what they load, in order, and the lanes' sums meet once at the end.
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
from .config import candidates, heuristic

__all__ = ["aggregate_bwd_row", "aggregate_row", "aggregate_tile", "h_aggregate_bwd", "h_aggregate_fwd"]


@triton.jit
def aggregate_tile(streams, weights, n: tl.constexpr):
    """``sum_i weights[i]*streams[i]``, first stream to last, in fp32."""
    total = weights[0] * widen(streams[0])
    for i in tl.static_range(1, n):
        total = total + weights[i] * widen(streams[i])
    return total


@triton.jit
def aggregate_row(
    x_row,
    x_stream_stride,
    out_row,
    weights,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """All columns of a token; the loads of a group of them come before its first store."""
    FULL: tl.constexpr = C % (BLOCK * GROUP) == 0
    for start in range(0, C, BLOCK * GROUP):
        streams = ()
        for k in tl.static_range(GROUP):
            columns = start + k * BLOCK + tl.arange(0, BLOCK)
            streams = streams + load_streams(x_row, x_stream_stride, columns, n, C, FULL)
        for k in tl.static_range(GROUP):
            columns = start + k * BLOCK + tl.arange(0, BLOCK)
            value = aggregate_tile(streams[k * n : k * n + n], weights, n)
            store_columns(out_row, columns, value, C, FULL)


@triton.jit(do_not_specialize=["x_stride", "x_stream_stride", "h_stride"])
def h_aggregate_fwd_kernel(
    x_ptr,
    h_ptr,
    out_ptr,
    x_stride: tl.int64,
    x_stream_stride: tl.int64,
    h_stride: tl.int64,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    lead()
    token = last_first()
    weights = load_scalars(h_ptr + token * h_stride, n)
    x_row = x_ptr + token * elements(x_stride, ALIGN)
    aggregate_row(x_row, elements(x_stream_stride, ALIGN), out_ptr + token * C, weights, n, C, BLOCK, GROUP)


@triton.jit
def aggregate_bwd_row(
    token,
    grad_ptr,
    x_ptr,
    h_ptr,
    g_x_ptr,
    g_h_ptr,
    grad_stride,
    x_stride,
    x_stream_stride,
    h_stride,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The gradients of a token: of its streams and of its weights, each where its pointer is not None."""
    WRITE: tl.constexpr = g_x_ptr is not None
    DOTS: tl.constexpr = n if g_h_ptr is not None else 0
    FULL: tl.constexpr = C % (BLOCK * GROUP) == 0
    grad_row = grad_ptr + token * elements(grad_stride, ALIGN)
    x_row = x_ptr + token * elements(x_stride, ALIGN)
    weights = ()
    if WRITE:
        weights = load_scalars(h_ptr + token * h_stride, n)
    sums = lane_zeros(DOTS, BLOCK // VECTOR)
    for start in range(0, C, BLOCK * GROUP):
        grads = ()
        streams = ()
        for k in tl.static_range(GROUP):
            columns = start + k * BLOCK + tl.arange(0, BLOCK)
            grads = grads + (load_columns(grad_row, columns, C, FULL),)
            streams = streams + load_streams(x_row, elements(x_stream_stride, ALIGN), columns, DOTS, C, FULL)
        for k in tl.static_range(GROUP):
            columns = start + k * BLOCK + tl.arange(0, BLOCK)
            if WRITE:
                for i in tl.static_range(n):
                    g_x_row = g_x_ptr + (token * n + i) * C
                    store_columns(g_x_row, columns, weights[i] * widen(grads[k]), C, FULL)
            sums = lane_dots(sums, streams[k * DOTS : k * DOTS + DOTS], (grads[k],), DOTS, 1, VECTOR)
    totals = block_sums(sums, DOTS)
    for i in tl.static_range(DOTS):
        store(g_h_ptr + token * n + i, totals[i])


@triton.jit(do_not_specialize=["grad_stride", "x_stride", "x_stream_stride", "h_stride"])
def h_aggregate_bwd_kernel(
    grad_ptr,
    x_ptr,
    h_ptr,
    g_x_ptr,
    g_h_ptr,
    grad_stride: tl.int64,
    x_stride: tl.int64,
    x_stream_stride: tl.int64,
    h_stride: tl.int64,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIGN: tl.constexpr,
):
    lead()
    aggregate_bwd_row(
        last_first(),
        grad_ptr,
        x_ptr,
        h_ptr,
        g_x_ptr,
        g_h_ptr,
        grad_stride,
        x_stride,
        x_stream_stride,
        h_stride,
        n,
        C,
        BLOCK,
        GROUP,
        VECTOR,
        ALIGN,
    )


_fwd = Launcher(h_aggregate_fwd_kernel, follows=False)
_bwd = Launcher(h_aggregate_bwd_kernel, follows=False)


def h_aggregate_fwd(x: Tensor, h_pre: Tensor) -> Tensor:
    *lead, n, width = x.shape
    out = torch.empty((*lead, width), dtype=x.dtype, device=x.device)
    count = h_pre.numel() // n
    if count == 0:
        return out
    x, x_stride = flatten(x, 2)
    h_pre, h_stride = flatten(h_pre, 1)
    x_stream_stride = x.stride(-2)
    # Forward alone: there the candidates differ in no bit.
    config = tuned("h_aggregate_fwd", out.device, heuristic, candidates, n, width, x.element_size())
    align = alignment(width, x_stride, x_stream_stride)
    _fwd(
        (count,),
        (x, h_pre, out, x_stride // align, x_stream_stride // align, h_stride),
        (n, width, config.block, config.group, align),
        config.num_warps,
    )
    return out


def h_aggregate_bwd(grad: Tensor, x: Tensor, h_pre: Tensor, needs: Sequence[bool]) -> list[Tensor]:
    n, width = x.shape[-2:]
    g_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    g_h = torch.empty(h_pre.shape, dtype=h_pre.dtype, device=x.device) if needs[1] else None
    count = h_pre.numel() // n
    if count:
        grad, grad_stride = flatten(grad, 1)
        x, x_stride = flatten(x, 2)
        h_pre, h_stride = flatten(h_pre, 1)
        x_stream_stride = x.stride(-2)
        config = heuristic(n, width, x.element_size())
        align = alignment(width, grad_stride, x_stride, x_stream_stride)
        strides = (grad_stride // align, x_stride // align, x_stream_stride // align, h_stride)
        _bwd(
            (count,),
            (grad, x, h_pre, g_x, g_h, *strides),
            (n, width, config.block, config.group, 16 // x.element_size(), align),
            config.num_warps,
        )
    return [g for g in (g_x, g_h) if g is not None]
