"""The learned collapse of the streams in Triton: predicted weights, then the weighted sum of the streams.

The prediction is the projection's (`proj_rms_compute_h`) with N = n; its second stage reads x once more for the sum.
Backward: one kernel takes the products of the gradient with every stream to the gradient of the prediction, then the
projection's backward writes the gradient of x, the direct term ``w[i]*grad`` included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._strides import alignment, flatten
from .._triton_common import Launcher, follow, sigmoid, store, widen
from ..proj_rms_compute_h._triton_bwd import add_all_shares, parts_for, project_bwd
from ..proj_rms_compute_h._triton_fwd import project
from ..proj_rms_compute_h._triton_tiles import (
    collect_tile,
    mapping_bwd_tile,
    rms_coefficient_tile,
    rms_tile,
    store_parts,
)
from ..proj_rms_compute_h.config import g_parts

__all__ = ["learned_output_contract_bwd", "learned_output_contract_fwd"]

#: Tokens of a program (and of a share of the gradients of scale and base), and columns of C in a step.
TOKENS, WIDTH = 4, 512
#: Columns of the projection, padded.
COLUMNS = 16


@triton.jit
def column(values, cols, index: tl.constexpr):
    """Column ``index`` of ``values [rows, cols]``."""
    return tl.sum(tl.where(cols[None, :] == index, values, 0.0), axis=1)


@triton.jit(do_not_specialize=["count", "stride_x", "inner", "partials", "eps", "norm_eps"])
def learned_contract_kernel(
    x_ptr,
    partial_ptr,
    square_ptr,
    scale_ptr,
    base_ptr,
    out_ptr,
    proj_ptr,
    u_ptr,
    count: tl.int64,
    stride_x: tl.int64,
    inner: tl.int64,
    partials: tl.int32,
    eps: tl.float32,
    norm_eps: tl.float32,
    N_STREAMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    follow()
    inner, stride_x = inner // ALIGN * ALIGN, stride_x // ALIGN * ALIGN
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row_mask = rows < count
    cols = tl.arange(0, COLUMNS)
    proj, square = collect_tile(partial_ptr, square_ptr, rows, cols, count, N_STREAMS, partials, PER_GROUP)
    u, _ = rms_tile(square, inner * N_STREAMS, norm_eps, True)
    base = widen(tl.load(base_ptr + cols, mask=cols < N_STREAMS, other=0.0))
    weights = sigmoid(proj * u[:, None] * widen(tl.load(scale_ptr)) + base[None, :]) + eps
    at = rows[:, None] * N_STREAMS + cols[None, :]
    tl.store(proj_ptr + at, proj, mask=row_mask[:, None] & (cols[None, :] < N_STREAMS))
    tl.store(u_ptr + rows, u, mask=row_mask)
    for first in range(0, inner, WIDTH):
        c = first + tl.arange(0, WIDTH)
        mask = row_mask[:, None] & (c[None, :] < inner)
        total = tl.zeros((TOKENS, WIDTH), tl.float32)
        for i in tl.static_range(N_STREAMS):
            x = tl.load(x_ptr + rows[:, None] * stride_x + i * inner + c[None, :], mask=mask, other=0.0)
            total = tl.fma(column(weights, cols, i)[:, None] + tl.zeros_like(total), widen(x), total)
        store(out_ptr + rows[:, None] * inner + c[None, :], total, mask=mask)


@triton.jit(do_not_specialize=["count", "stride_x", "stride_grad", "inner", "eps"])
def learned_contract_bwd_kernel(
    x_ptr,
    grad_ptr,
    proj_ptr,
    u_ptr,
    scale_ptr,
    base_ptr,
    weights_ptr,
    parts_ptr,
    coefficient_ptr,
    share_ptr,
    count: tl.int64,
    stride_x: tl.int64,
    stride_grad: tl.int64,
    inner: tl.int64,
    eps: tl.float32,
    N_STREAMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    G_PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    follow()
    inner, stride_x, stride_grad = (
        inner // ALIGN * ALIGN,
        stride_x // ALIGN * ALIGN,
        stride_grad // ALIGN * ALIGN,
    )
    tile = tl.program_id(0).to(tl.int64)
    rows = tile * TOKENS + tl.arange(0, TOKENS)
    row_mask = rows < count
    cols = tl.arange(0, COLUMNS)
    g_weights = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for first in range(0, inner, WIDTH):
        c = first + tl.arange(0, WIDTH)
        mask = row_mask[:, None] & (c[None, :] < inner)
        grad = widen(tl.load(grad_ptr + rows[:, None] * stride_grad + c[None, :], mask=mask, other=0.0))
        for i in tl.static_range(N_STREAMS):
            x = tl.load(x_ptr + rows[:, None] * stride_x + i * inner + c[None, :], mask=mask, other=0.0)
            dot = tl.sum(grad * widen(x), axis=1)
            g_weights += tl.where(cols[None, :] == i, dot[:, None], 0.0)
    at = rows[:, None] * N_STREAMS + cols[None, :]
    at_mask = row_mask[:, None] & (cols[None, :] < N_STREAMS)
    proj = tl.load(proj_ptr + at, mask=at_mask, other=0.0)
    u = tl.load(u_ptr + rows, mask=row_mask, other=1.0)
    scale = widen(tl.load(scale_ptr)) + tl.zeros((COLUMNS,), tl.float32)
    base = widen(tl.load(base_ptr + cols, mask=cols < N_STREAMS, other=0.0))
    weights = sigmoid(proj * scale[None, :] * u[:, None] + base[None, :]) + eps
    ones = tl.full((1, COLUMNS), 1.0, tl.float32)
    g_proj, g_u, g_base, g_scale = mapping_bwd_tile(g_weights, ones, proj, u, scale, base)
    r = tl.div_rn(tl.full(u.shape, 1.0, tl.float32), u)
    coefficient = rms_coefficient_tile(tl.zeros_like(u), g_u, u, r, inner * N_STREAMS)
    tl.store(weights_ptr + at, weights, mask=at_mask)
    tl.store(coefficient_ptr + rows, coefficient, mask=row_mask)
    store_parts(parts_ptr, g_proj, rows, row_mask, cols, COLUMNS, G_PARTS)
    share = share_ptr + tile * (2 * COLUMNS) + cols
    tl.store(share, tl.sum(g_scale, axis=0))
    tl.store(share + COLUMNS, tl.sum(g_base, axis=0))


_contract = Launcher(learned_contract_kernel)
_contract_bwd = Launcher(learned_contract_bwd_kernel)


def learned_output_contract_fwd(
    x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    *lead, n, inner = x.shape
    flat, stride = flatten(x, 2)
    count = x.numel() // (n * inner)
    out = torch.empty(*lead, inner, dtype=x.dtype, device=x.device)
    proj, u = (torch.empty(*lead, size, dtype=torch.float32, device=x.device) for size in (n, 1))
    if count == 0:
        return out, proj, u
    partial, square, per_group = project(flat.flatten(-2), weight, "fp32")
    _contract(
        (triton.cdiv(count, TOKENS),),
        (
            flat,
            partial,
            square,
            scale,
            base.contiguous(),
            out,
            proj,
            u,
            count,
            stride,
            inner,
            partial.shape[0],
            eps,
            norm_eps,
        ),
        (n, COLUMNS, TOKENS, WIDTH, per_group, alignment(stride, inner)),
        4,
    )
    return out, proj, u


def learned_output_contract_bwd(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    proj: Tensor,
    u: Tensor,
    eps: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    n, inner = x.shape[-2:]
    inputs = (x, weight, scale, base)
    count = x.numel() // (n * inner)
    if count == 0:
        return [torch.zeros_like(t) for t, need in zip(inputs, needs, strict=True) if need]
    flat, stride = flatten(x, 2)
    outer, stride_grad = flatten(grad, 1)
    streams = flat.flatten(-2)
    parts = parts_for(streams, n, gluon=False)
    programs = triton.cdiv(count, TOKENS)
    weights = torch.empty(*x.shape[:-1], dtype=torch.float32, device=x.device)
    small_shares = torch.empty(programs, 2, COLUMNS, dtype=torch.float32, device=x.device)
    _contract_bwd(
        (programs,),
        (
            flat,
            outer,
            proj,
            u,
            scale,
            base.contiguous(),
            weights,
            parts.parts,
            parts.coefficient,
            small_shares,
            count,
            stride,
            stride_grad,
            inner,
            eps,
        ),
        (n, COLUMNS, TOKENS, WIDTH, g_parts(x.dtype), alignment(stride, stride_grad, inner)),
        4,
    )
    g_x, shares = None, None
    if needs[0] or needs[1]:
        g_x, shares = project_bwd(streams, weight, parts, needs[0], needs[1], weights, outer)
    totals = [
        torch.empty(t.shape, dtype=t.dtype, device=x.device) if need else None
        for t, need in zip(inputs[1:], needs[1:], strict=True)
    ]
    if any(needs[1:]):
        small = (totals[1], None, None, totals[2])
        add_all_shares(shares, totals[0], small_shares if any(needs[2:]) else None, small, n, n)
    found = [g_x.view(x.shape) if g_x is not None else None, *totals]
    return [g for g in found if g is not None]
