"""Entry to and exit from the streams in Triton: one program owns a token, with all loads of a group of columns on their
way before the first store."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._rows import RowConfig, row_config
from .._strides import alignment, flatten
from .._triton_common import Launcher, elements, lead, load_columns, load_streams, store_columns, widen
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

#: Registers that a program's loads fill at a time, and its warps.
_REGISTERS, _MOST_WARPS = 144, 4


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
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    lead()
    FULL: tl.constexpr = C % (BLOCK * GROUP) == 0
    token = tl.program_id(0).to(tl.int64)
    row = t_ptr + token * elements(stride, ALIGN)
    for start in range(0, C, BLOCK * GROUP):
        values = ()
        for k in tl.static_range(GROUP):
            columns = start + k * BLOCK + tl.arange(0, BLOCK)
            values = values + (load_columns(row, columns, C, FULL),)
        for k in tl.static_range(GROUP):
            columns = start + k * BLOCK + tl.arange(0, BLOCK)
            for i in tl.static_range(n):
                store_columns(out_ptr + (token * n + i) * C, columns, widen(values[k]) * scale, C, FULL)


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
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    lead()
    FULL: tl.constexpr = C % (BLOCK * GROUP) == 0
    token = tl.program_id(0).to(tl.int64)
    row = t_ptr + token * elements(stride, ALIGN)
    for start in range(0, C, BLOCK * GROUP):
        streams = ()
        for k in tl.static_range(GROUP):
            columns = start + k * BLOCK + tl.arange(0, BLOCK)
            streams = streams + load_streams(row, elements(stream_stride, ALIGN), columns, n, C, FULL)
        for k in tl.static_range(GROUP):
            columns = start + k * BLOCK + tl.arange(0, BLOCK)
            total = stream_sum_tile(streams[k * n : k * n + n], n)
            mean = tl.div_rn(total, tl.full((BLOCK,), divisor, tl.float32))
            store_columns(out_ptr + token * C, columns, mean, C, FULL)


_copies_launch = Launcher(copies_kernel, follows=False)
_totals_launch = Launcher(totals_kernel, follows=False)


@functools.lru_cache(maxsize=None)
def _rows(width: int, itemsize: int, vectors: int) -> RowConfig:
    """How a program walks a token of which it loads ``vectors`` rows side by side."""
    return row_config(width, itemsize, vectors, _REGISTERS, _MOST_WARPS)


def _copies(t: Tensor, n: int, scale: float) -> Tensor:
    """``[..., C] -> [..., n, C]``: ``scale * t`` in every stream, rounded once."""
    *lead, width = t.shape
    out = torch.empty((*lead, n, width), dtype=t.dtype, device=t.device)
    count = t.numel() // width
    if count:
        t, stride = flatten(t, 1)
        align = alignment(width, stride)
        rows = _rows(width, t.element_size(), 1)
        constants = (n, width, rows.block, rows.group, align)
        _copies_launch((count,), (t, out, stride // align, scale), constants, rows.num_warps)
    return out


def _totals(t: Tensor, divisor: int) -> Tensor:
    """``[..., n, C] -> [..., C]``: sum over streams, first to last, divided and rounded once."""
    *lead, n, width = t.shape
    out = torch.empty((*lead, width), dtype=t.dtype, device=t.device)
    count = out.numel() // width
    if count:
        t, stride = flatten(t, 2)
        align = alignment(width, stride, t.stride(-2))
        rows = _rows(width, t.element_size(), n)
        args = (t, out, stride // align, t.stride(-2) // align, float(divisor))
        _totals_launch((count,), args, (n, width, rows.block, rows.group, align), rows.num_warps)
    return out


def input_expand_fwd(x: Tensor, n: int) -> Tensor:
    return _copies(x, n, 1.0)


def input_expand_bwd(grad: Tensor) -> Tensor:
    return _totals(grad, 1)


def output_contract_fwd(x: Tensor) -> Tensor:
    return _totals(x, x.shape[-2])


def output_contract_bwd(grad: Tensor, n: int) -> Tensor:
    return _copies(grad, n, 1.0 / n)
