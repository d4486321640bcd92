"""The learned collapse of the streams in Triton: predicted weights, then the weighted sum of the streams.

The prediction is the projection's (`proj_rms_compute_h`) with N = n; its second stage reads x once more for the sum.

Backward:

1. One read of the streams and of the gradient: ``<grad, x[i]>`` (the aggregate's own backward).
2. The gradient of the prediction from them, T x n numbers, and the weights again.
3. The projection's backward, which writes the gradient of x, the direct term ``w[i]*grad`` included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._strides import alignment, flatten
from .._triton_common import Launcher, elements, follow, last_first, lead, sigmoid, widen
from .._tuning import tuned
from ..h_aggregate._triton import aggregate_row, h_aggregate_bwd
from ..h_aggregate.config import candidates, heuristic
from ..proj_rms_compute_h._triton_bwd import add_all_shares, parts_for, project_bwd
from ..proj_rms_compute_h._triton_fwd import project
from ..proj_rms_compute_h._triton_tiles import (
    collect_tile,
    load_columns,
    mapping_bwd_tile,
    rms_coefficient_tile,
    rms_tile,
    store_interleaved_parts,
    store_parts,
)
from ..proj_rms_compute_h.config import SHARE_TOKENS, g_parts, padded

__all__ = ["learned_output_contract_bwd", "learned_output_contract_fwd"]


@triton.jit
def weights_tile(proj, u, scale_ptr, base_ptr, cols, eps, n: tl.constexpr):
    """``sigmoid(proj*u*scale + base) + eps``."""
    base = widen(tl.load(base_ptr + cols, mask=cols < n, other=0.0))
    return sigmoid(proj * u[:, None] * widen(tl.load(scale_ptr)) + base[None, :]) + eps


@triton.jit(do_not_specialize=["count", "stride", "stream_stride", "width", "partials", "eps", "norm_eps"])
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
    stride: tl.int64,
    stream_stride: tl.int64,
    width: tl.int64,
    partials: tl.int32,
    eps: tl.float32,
    norm_eps: tl.float32,
    n: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    lead()
    token = last_first()
    rows = token + tl.arange(0, 1)
    cols = tl.arange(0, COLUMNS)
    proj, square = collect_tile(partial_ptr, square_ptr, rows, cols, count, n, partials, PER_GROUP)
    u, _ = rms_tile(square, width, norm_eps, True)
    tl.store(proj_ptr + rows[:, None] * n + cols[None, :], proj, mask=cols[None, :] < n)
    tl.store(u_ptr + rows, u)
    own = weights_tile(proj, u, scale_ptr, base_ptr, cols, eps, n)
    weights = ()
    for i in tl.static_range(n):
        weights = weights + (tl.sum(tl.where(cols[None, :] == i, own, 0.0)),)
    x_row = x_ptr + token * elements(stride, ALIGN)
    aggregate_row(x_row, elements(stream_stride, ALIGN), out_ptr + token * C, weights, n, C, BLOCK, GROUP)


@triton.jit(do_not_specialize=["count", "width", "eps"])
def weights_bwd_kernel(
    g_weights_ptr,
    proj_ptr,
    u_ptr,
    scale_ptr,
    base_ptr,
    weights_ptr,
    parts_ptr,
    coefficient_ptr,
    share_ptr,
    count: tl.int64,
    width: tl.int64,
    eps: tl.float32,
    n: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    G_PARTS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    follow()
    tile = tl.program_id(0).to(tl.int64)
    rows = tile * TOKENS + tl.arange(0, TOKENS)
    row_mask = rows < count
    cols = tl.arange(0, COLUMNS)
    g_weights = load_columns(g_weights_ptr, rows, row_mask, cols, n, n)
    proj = load_columns(proj_ptr, rows, row_mask, cols, n, n)
    u = tl.load(u_ptr + rows, mask=row_mask, other=1.0)
    weights = weights_tile(proj, u, scale_ptr, base_ptr, cols, eps, n)
    at = rows[:, None] * n + cols[None, :]
    tl.store(weights_ptr + at, weights, mask=row_mask[:, None] & (cols[None, :] < n))
    scale = widen(tl.load(scale_ptr)) + tl.zeros((COLUMNS,), tl.float32)
    base = widen(tl.load(base_ptr + cols, mask=cols < n, other=0.0))
    ones = tl.full((1, COLUMNS), 1.0, tl.float32)
    g_proj, g_u, g_base, g_scale = mapping_bwd_tile(g_weights, ones, proj, u, scale, base)
    r = tl.div_rn(tl.full(u.shape, 1.0, tl.float32), u)
    tl.store(coefficient_ptr + rows, rms_coefficient_tile(0.0, g_u, u, r, width), mask=row_mask)
    if INTERLEAVED:
        store_interleaved_parts(parts_ptr, g_proj, rows, row_mask, cols)
    else:
        store_parts(parts_ptr, g_proj, rows, row_mask, cols, COLUMNS, G_PARTS)
    share = share_ptr + tile * (2 * COLUMNS) + cols
    tl.store(share, tl.sum(g_scale, axis=0))
    tl.store(share + COLUMNS, tl.sum(g_base, axis=0))


_contract = Launcher(learned_contract_kernel, follows=False)
_weights_bwd = Launcher(weights_bwd_kernel)


def learned_output_contract_fwd(
    x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    *lead, n, width = x.shape
    count = x.numel() // (n * width)
    out = torch.empty(*lead, width, dtype=x.dtype, device=x.device)
    proj, u = (torch.empty(*lead, size, dtype=torch.float32, device=x.device) for size in (n, 1))
    if count == 0:
        return out, proj, u
    streams, stride = flatten(x, 2)
    partial, square, per_group = project(streams.flatten(-2), weight, "fp32")
    rows = tuned("h_aggregate_fwd", x.device, heuristic, candidates, n, width, x.element_size())
    align = alignment(width, stride, streams.stride(-2))
    _contract(
        (count,),
        (
            streams,
            partial,
            square,
            scale,
            base.contiguous(),
            out,
            proj,
            u,
            count,
            stride // align,
            streams.stride(-2) // align,
            n * width,
            partial.shape[0],
            eps,
            norm_eps,
        ),
        (n, width, padded(n), per_group, rows.block, rows.group, align),
        rows.num_warps,
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
    n, width = x.shape[-2:]
    inputs = (x, weight, scale, base)
    count = u.numel()
    if count == 0:
        return [torch.zeros_like(t) for t, need in zip(inputs, needs, strict=True) if need]
    # Without the gradient of x the aggregate's backward reads no weights: proj gives their shape.
    (g_weights,) = h_aggregate_bwd(grad, x, proj, (False, True))
    streams = x.flatten(-2)
    parts = parts_for(streams, n, needs[0] and needs[1], grad)
    programs = triton.cdiv(count, SHARE_TOKENS)
    weights = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    small_shares = torch.empty(programs, 2, parts.columns, dtype=torch.float32, device=x.device)
    _weights_bwd(
        (programs,),
        (
            g_weights,
            proj,
            u,
            scale,
            base.contiguous(),
            weights,
            parts.parts,
            parts.coefficient,
            small_shares,
            count,
            n * width,
            eps,
        ),
        (n, parts.columns, SHARE_TOKENS, g_parts(x.dtype), parts.interleaved),
        4,
    )
    g_x, shares = None, None
    if needs[0] or needs[1]:
        g_x, shares = project_bwd(streams, weight, parts, needs[0], needs[1], weights, grad)
    totals = [
        torch.empty(t.shape, dtype=t.dtype, device=x.device) if need else None
        for t, need in zip(inputs[1:], needs[1:], strict=True)
    ]
    if any(needs[1:]):
        small = (totals[1], None, None, totals[2])
        add_all_shares(shares, totals[0], small_shares if any(needs[2:]) else None, small, n, n)
    found = [g_x.view(x.shape) if g_x is not None else None, *totals]
    return [g for g in found if g is not None]
