"""Entry to and exit from the streams in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._strides import alignment, flatten
from .._triton_common import Launcher, elements, follow, load_columns, load_streams, store_columns, widen
from ._triton_learned import learned_output_contract_bwd, learned_output_contract_fwd

__all__ = [
    "input_expand_bwd",
    "input_expand_fwd",
    "learned_output_contract_bwd",
    "learned_output_contract_fwd",
    "output_contract_bwd",
    "output_contract_fwd",
    "stream_sum_tile",
]

_BLOCK, _WARPS = 1024, 4


@triton.jit
def stream_sum_tile(streams, n: tl.constexpr):
    """Sum of the n streams, first to last, in fp32."""
    total = widen(streams[0])
    for i in tl.static_range(1, n):
        total = total + widen(streams[i])
    return total


@triton.jit(do_not_specialize=["stride"])
def copies_kernel(
    t_ptr,
    out_ptr,
    stride: tl.int64,
    scale: tl.float32,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    follow()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    FULL: tl.constexpr = C % BLOCK == 0
    value = widen(load_columns(t_ptr + token * elements(stride, ALIGN), columns, C, FULL)) * scale
    for i in tl.static_range(n):
        store_columns(out_ptr + (token * n + i) * C, columns, value, C, FULL)


@triton.jit(do_not_specialize=["stride", "stream_stride"])
def totals_kernel(
    t_ptr,
    out_ptr,
    stride: tl.int64,
    stream_stride: tl.int64,
    divisor: tl.float32,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    follow()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    FULL: tl.constexpr = C % BLOCK == 0
    streams = load_streams(
        t_ptr + token * elements(stride, ALIGN), elements(stream_stride, ALIGN), columns, n, C, FULL
    )
    total = tl.div_rn(stream_sum_tile(streams, n), tl.full((BLOCK,), divisor, tl.float32))
    store_columns(out_ptr + token * C, columns, total, C, FULL)


_copies_launch = Launcher(copies_kernel)
_totals_launch = Launcher(totals_kernel)


def _copies(t: Tensor, n: int, scale: float) -> Tensor:
    """``[..., C] -> [..., n, C]``: ``scale * t`` in every stream, rounded once."""
    *lead, width = t.shape
    out = torch.empty((*lead, n, width), dtype=t.dtype, device=t.device)
    count = t.numel() // width
    if count:
        t, stride = flatten(t, 1)
        align = alignment(width, stride)
        grid = (count, triton.cdiv(width, _BLOCK))
        _copies_launch(grid, (t, out, stride // align, scale), (n, width, _BLOCK, align), _WARPS)
    return out


def _totals(t: Tensor, divisor: int) -> Tensor:
    """``[..., n, C] -> [..., C]``: sum over streams, first to last, divided and rounded once."""
    *lead, n, width = t.shape
    out = torch.empty((*lead, width), dtype=t.dtype, device=t.device)
    count = out.numel() // width
    if count:
        t, stride = flatten(t, 2)
        align = alignment(width, stride, t.stride(-2))
        grid = (count, triton.cdiv(width, _BLOCK))
        args = (t, out, stride // align, t.stride(-2) // align, float(divisor))
        _totals_launch(grid, args, (n, width, _BLOCK, align), _WARPS)
    return out


def input_expand_fwd(x: Tensor, n: int) -> Tensor:
    return _copies(x, n, 1.0)


def input_expand_bwd(grad: Tensor) -> Tensor:
    return _totals(grad, 1)


def output_contract_fwd(x: Tensor) -> Tensor:
    return _totals(x, x.shape[-2])


def output_contract_bwd(grad: Tensor, n: int) -> Tensor:
    return _copies(grad, n, 1.0 / n)
