"""Weighted sum of the streams in cuTile: every stream is read once, in both directions.

One program owns a token, with all loads of a group of columns on their way before the first store. In the backward it
finishes its dot products itself: lanes sum what they load, in order, and the lanes' sums meet once at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import cuda.tile as ct
import torch
from torch import Tensor

from .._cutile_common import (
    WARPS,
    Launcher,
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
from .._rows import row_candidates
from .._strides import alignment, flatten

__all__ = ["aggregate_tile", "h_aggregate_bwd", "h_aggregate_fwd"]

#: Registers that a thread fills with loads.
_FWD_REGISTERS, _BWD_REGISTERS = 96, 80


def aggregate_tile(streams, weights, n, first=0):
    """``sum_i weights[i]*streams[first + i]``, first stream to last, in fp32."""
    total = weights[0] * widen(streams[first])
    for i in ct.static_iter(range(1, n)):
        total = total + weights[i] * widen(streams[first + i])
    return total


@kernel
def h_aggregate_fwd_kernel(
    x_,
    h_,
    out_,
    first: ct.ScalarInt64,
    x_stride: ct.ScalarInt64,
    x_stream_stride: ct.ScalarInt64,
    h_stride: ct.ScalarInt64,
    n: ct.Constant[int],
    C: ct.Constant[int],
    BLOCK: ct.Constant[int],
    GROUP: ct.Constant[int],
    ALIGN: ct.Constant[int],
):
    FULL = C % (BLOCK * GROUP) == 0
    token = first + ct.bid(0)
    x, out = x_.get_raw_memory(), out_.get_raw_memory()
    row = row_offset(token, x_stride, ALIGN)
    weights = load_scalars(h_.get_raw_memory(), token * h_stride, n)
    for start in range(0, C, BLOCK * GROUP):
        streams = ()
        for k in ct.static_iter(range(GROUP)):
            columns = start + k * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
            streams = streams + load_streams(x, row, x_stream_stride, columns, n, C, FULL, ALIGN)
        for k in ct.static_iter(range(GROUP)):
            columns = start + k * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
            store_columns(out, token * C, columns, aggregate_tile(streams, weights, n, k * n), C, FULL)


@kernel
def h_aggregate_bwd_kernel(
    grad_,
    x_,
    h_,
    g_x_,
    g_h_,
    first: ct.ScalarInt64,
    grad_stride: ct.ScalarInt64,
    x_stride: ct.ScalarInt64,
    x_stream_stride: ct.ScalarInt64,
    h_stride: ct.ScalarInt64,
    n: ct.Constant[int],
    C: ct.Constant[int],
    BLOCK: ct.Constant[int],
    GROUP: ct.Constant[int],
    VECTOR: ct.Constant[int],
    ALIGN: ct.Constant[int],
    WRITE: ct.Constant[bool],
    DOTS: ct.Constant[int],
):
    """WRITE: the gradient of x is wanted. DOTS: n where that of the weights is, else 0."""
    FULL = C % (BLOCK * GROUP) == 0
    token = first + ct.bid(0)
    grad, x, g_x, g_h = (
        grad_.get_raw_memory(),
        x_.get_raw_memory(),
        g_x_.get_raw_memory(),
        g_h_.get_raw_memory(),
    )
    grad_row, row = row_offset(token, grad_stride, ALIGN), row_offset(token, x_stride, ALIGN)
    weights = load_scalars(h_.get_raw_memory(), token * h_stride, n if WRITE else 0)
    sums = lane_zeros(DOTS, BLOCK // VECTOR)
    for start in range(0, C, BLOCK * GROUP):
        grads = ()
        streams = ()
        for k in ct.static_iter(range(GROUP)):
            columns = start + k * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
            grads = grads + (load_columns(grad, grad_row, columns, C, FULL),)
            streams = streams + load_streams(x, row, x_stream_stride, columns, DOTS, C, FULL, ALIGN)
        for k in ct.static_iter(range(GROUP)):
            columns = start + k * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
            value = widen(grads[k])
            if WRITE:
                for i in ct.static_iter(range(n)):
                    store_columns(g_x, (token * n + i) * C, columns, weights[i] * value, C, FULL)
            sums = lane_dots(sums, widen_streams(streams, k * DOTS, DOTS), (value,), DOTS, 1, BLOCK, VECTOR)
    store_scalars(g_h, token * n, dot_sums(sums, DOTS), DOTS)


_fwd = Launcher(h_aggregate_fwd_kernel)
_bwd = Launcher(h_aggregate_bwd_kernel)


def h_aggregate_fwd(x: Tensor, h_pre: Tensor) -> Tensor:
    *lead, n, width = x.shape
    out = torch.empty((*lead, width), dtype=x.dtype, device=x.device)
    count = h_pre.numel() // n
    if count == 0:
        return out
    x, x_stride = flatten(x, 2)
    h_pre, h_stride = flatten(h_pre, 1)
    x_stream_stride = x.stride(-2)
    rows = row_candidates(width, x.element_size(), n, _FWD_REGISTERS, WARPS)[0]
    align = alignment(width, x_stride, x_stream_stride)
    _fwd.by_token(
        count,
        (x, h_pre, out),
        (x_stride, x_stream_stride, h_stride),
        (n, width, rows.block, rows.group, align),
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
        rows = row_candidates(width, x.element_size(), n + 1, _BWD_REGISTERS, WARPS)[0]
        align = alignment(width, grad_stride, x_stride, x_stream_stride)
        vector = min(rows.block, 16 // x.element_size())
        _bwd.by_token(
            count,
            (grad, x, h_pre, g_x, g_h),
            (grad_stride, x_stride, x_stream_stride, h_stride),
            (n, width, rows.block, rows.group, vector, align, g_x is not None, n if g_h is not None else 0),
        )
    return [g for g in (g_x, g_h) if g is not None]
