"""Projection, RMS and mapping in Triton: the kernels of T x N elements, and the operation's hosts.

Forward: `project` reads x, then one kernel adds its partial sums and applies the mapping. Backward: one kernel takes
the gradients of the mixes to that of the raw projection (kept as bf16 parts) and to the factor of x in its own
gradient, then `project_bwd` reads x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._strides import flatten
from .._triton_common import Launcher, follow, widen
from . import config as tiles
from ._triton_bwd import add_all_shares, parts_for, project_bwd
from ._triton_fwd import project
from ._triton_tiles import (
    alpha_columns,
    collect_tile,
    load_columns,
    mapping_bwd_tile,
    mapping_tile,
    rms_coefficient_tile,
    rms_tile,
    store_interleaved_parts,
    store_parts,
)
from .config import g_parts, mapping_tokens, padded

__all__ = ["proj_rms_compute_h_bwd", "proj_rms_compute_h_fwd"]


@triton.jit(do_not_specialize=["count", "width", "partials", "eps", "compute_h_eps"])
def mapping_kernel(
    partial_ptr,
    square_ptr,
    alpha_pre_ptr,
    alpha_post_ptr,
    alpha_res_ptr,
    bias_ptr,
    h_pre_ptr,
    h_post_ptr,
    h_res_ptr,
    r_ptr,
    proj_ptr,
    count: tl.int64,
    width: tl.int64,
    partials: tl.int32,
    eps: tl.float32,
    compute_h_eps: tl.float32,
    N_STREAMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    INSIDE: tl.constexpr,
):
    follow()
    size: tl.constexpr = N_STREAMS * N_STREAMS + 2 * N_STREAMS
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row_mask = rows < count
    cols = tl.arange(0, COLUMNS)
    proj, square = collect_tile(partial_ptr, square_ptr, rows, cols, count, size, partials, PER_GROUP)
    u, r = rms_tile(square, width, eps, INSIDE)
    alpha = alpha_columns(alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, cols, N_STREAMS)
    bias = tl.load(bias_ptr + cols, mask=cols < size, other=0.0).to(tl.float32)
    mixes = mapping_tile(proj * alpha[None, :] * u[:, None] + bias[None, :], cols, compute_h_eps, N_STREAMS)

    row, col, inside = rows[:, None], cols[None, :], row_mask[:, None]
    tl.store(proj_ptr + row * size + col, proj, mask=inside & (col < size))
    tl.store(r_ptr + rows, r, mask=row_mask)
    tl.store(h_pre_ptr + row * N_STREAMS + col, mixes, mask=inside & (col < N_STREAMS))
    post = col - N_STREAMS
    tl.store(h_post_ptr + row * N_STREAMS + post, mixes, mask=inside & (post >= 0) & (post < N_STREAMS))
    res = post - N_STREAMS
    is_res = inside & (res >= 0) & (col < size)
    tl.store(h_res_ptr + row * (N_STREAMS * N_STREAMS) + res, mixes, mask=is_res)


@triton.jit(
    do_not_specialize=["count", "width", "stride_pre", "stride_post", "stride_res", "stride_r", "eps"]
)
def mapping_bwd_kernel(
    proj_ptr,
    r_ptr,
    g_pre_ptr,
    g_post_ptr,
    g_res_ptr,
    g_r_ptr,
    alpha_pre_ptr,
    alpha_post_ptr,
    alpha_res_ptr,
    bias_ptr,
    parts_ptr,
    coefficient_ptr,
    share_ptr,
    count: tl.int64,
    width: tl.int64,
    stride_pre: tl.int64,
    stride_post: tl.int64,
    stride_res: tl.int64,
    stride_r: tl.int64,
    eps: tl.float32,
    N_STREAMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    G_PARTS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INSIDE: tl.constexpr,
):
    follow()
    size: tl.constexpr = N_STREAMS * N_STREAMS + 2 * N_STREAMS
    tile = tl.program_id(0).to(tl.int64)
    rows = tile * TOKENS + tl.arange(0, TOKENS)
    row_mask = rows < count
    cols = tl.arange(0, COLUMNS)
    r = tl.load(r_ptr + rows, mask=row_mask, other=1.0)
    u = tl.div_rn(tl.full(r.shape, 1.0, tl.float32), r if INSIDE else r + eps)
    alpha = alpha_columns(alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, cols, N_STREAMS)
    bias = tl.load(bias_ptr + cols, mask=cols < size, other=0.0).to(tl.float32)
    proj = load_columns(proj_ptr, rows, row_mask, cols, size, size)
    g_mix = load_columns(g_pre_ptr, rows, row_mask, cols, stride_pre, N_STREAMS)
    g_mix += load_columns(g_post_ptr, rows, row_mask, cols - N_STREAMS, stride_post, N_STREAMS)
    g_mix += load_columns(g_res_ptr, rows, row_mask, cols - 2 * N_STREAMS, stride_res, N_STREAMS * N_STREAMS)
    scale = tl.where(cols < N_STREAMS, 1.0, tl.where(cols < 2 * N_STREAMS, 2.0, 0.0))
    g_proj, g_u, g_h, alpha_terms = mapping_bwd_tile(g_mix, scale[None, :], proj, u, alpha, bias)
    if g_r_ptr is None:
        g_r = tl.zeros_like(r)
    else:
        g_r = widen(tl.load(g_r_ptr + rows * stride_r, mask=row_mask, other=0.0))
    if INTERLEAVED:
        store_interleaved_parts(parts_ptr, g_proj, rows, row_mask, cols)
    else:
        store_parts(parts_ptr, g_proj, rows, row_mask, cols, COLUMNS, G_PARTS)
    tl.store(coefficient_ptr + rows, rms_coefficient_tile(g_r, g_u, u, r, width), mask=row_mask)
    share = share_ptr + tile * (2 * COLUMNS) + cols
    tl.store(share, tl.sum(alpha_terms, axis=0))
    tl.store(share + COLUMNS, tl.sum(g_h, axis=0))


_mapping = Launcher(mapping_kernel)
_mapping_bwd = Launcher(mapping_bwd_kernel)


def proj_rms_compute_h_fwd(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    n: int,
    eps: float,
    compute_h_eps: float,
    rms_eps_mode: str,
    precision: str,
) -> tuple[Tensor, ...]:
    lead, width, size = x.shape[:-1], x.shape[-1], weight.shape[0]
    device = x.device
    outs = [
        torch.empty((*lead, columns), dtype=torch.float32, device=device)
        for columns in (n, n, n * n, 1, size)
    ]
    count = x.numel() // width
    if count == 0:
        return tuple(outs)
    partial, square, per_group = project(x, weight, precision)
    tokens = mapping_tokens(count)
    _mapping(
        (-(-count // tokens),),
        (
            partial,
            square,
            alpha_pre,
            alpha_post,
            alpha_res,
            bias.contiguous(),
            *outs,
            count,
            width,
            partial.shape[0],
            eps,
            compute_h_eps,
        ),
        (n, padded(size), tokens, per_group, rms_eps_mode == "inside"),
        2,
    )
    return tuple(outs)


def proj_rms_compute_h_bwd(
    g_pre: Tensor | None,
    g_post: Tensor | None,
    g_res: Tensor | None,
    g_r: Tensor | None,
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    proj: Tensor,
    r: Tensor,
    n: int,
    eps: float,
    rms_eps_mode: str,
    precision: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    # precision: the backward is as exact in both modes.
    inputs = (x, weight, alpha_pre, alpha_post, alpha_res, bias)
    size, width = weight.shape
    count = x.numel() // width
    if count == 0:
        return [
            torch.zeros(t.shape, dtype=t.dtype, device=x.device)
            for t, need in zip(inputs, needs, strict=True)
            if need
        ]
    grad = parts_for(x, size, gluon=needs[0] and needs[1])
    mapping_tiles = -(-count // tiles.SHARE_TOKENS)
    mapping_shares = torch.empty((mapping_tiles, 2, grad.columns), dtype=torch.float32, device=x.device)
    grads: list[Tensor | None] = []
    strides: list[int] = []
    for g in (g_pre, g_post, g_res, g_r):
        source, step = (None, 0) if g is None else flatten(g, 1)
        grads.append(source)
        strides.append(step)
    _mapping_bwd(
        (mapping_tiles,),
        (
            proj,
            r,
            *grads,
            alpha_pre,
            alpha_post,
            alpha_res,
            bias.contiguous(),
            grad.parts,
            grad.coefficient,
            mapping_shares,
            count,
            width,
            *strides,
            eps,
        ),
        (n, grad.columns, tiles.SHARE_TOKENS, g_parts(x.dtype), grad.interleaved, rms_eps_mode == "inside"),
        4,
    )
    g_x, shares = None, None
    if needs[0] or needs[1]:
        g_x, shares = project_bwd(x, weight, grad, needs[0], needs[1])
    totals = [
        torch.empty(t.shape, dtype=t.dtype, device=x.device) if need else None
        for t, need in zip(inputs[1:], needs[1:], strict=True)
    ]
    if any(needs[1:]):
        small = (totals[1], totals[2], totals[3], totals[4])
        add_all_shares(shares, totals[0], mapping_shares if any(needs[2:]) else None, small, n, size)
    return [g for g in (g_x, *totals) if g is not None]
