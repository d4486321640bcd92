"""Projection, RMS and mapping in cuTile: the kernels of T x N elements, and the operation's hosts.

Forward: `project` reads x, then one kernel adds its partial sums and applies the mapping. Backward: one kernel takes
the gradients of the mixes to that of the raw projection (kept as bf16 parts) and to the factor of x in its own
gradient, then `project_bwd` reads x.
"""

from __future__ import annotations

from collections.abc import Sequence

import cuda.tile as ct
import torch
from torch import Tensor

from .._cutile_common import Launcher, kernel, widen
from .._strides import flatten
from . import config as tiles
from ._cutile_bwd import add_all_shares, parts_for, project_bwd
from ._cutile_fwd import project
from ._cutile_tiles import (
    alpha_columns,
    collect_tile,
    load_mix_columns,
    mapping_bwd_tile,
    mapping_tile,
    rms_coefficient_tile,
    rms_tile,
    store_mapping,
    store_parts,
)
from .config import g_parts, padded

__all__ = ["proj_rms_compute_h_bwd", "proj_rms_compute_h_fwd"]

#: Tokens in one program of the forward's mapping kernel.
MAPPING_TOKENS = 16


@kernel
def mapping_kernel(
    partial_,
    square_,
    alpha_pre_,
    alpha_post_,
    alpha_res_,
    bias_,
    h_pre_,
    h_post_,
    h_res_,
    r_,
    proj_,
    T: ct.ScalarInt64,
    partials: ct.ScalarInt64,
    width: float,
    eps: float,
    compute_h_eps: float,
    n: ct.Constant[int],
    COLUMNS: ct.Constant[int],
    TOKENS: ct.Constant[int],
    PER_GROUP: ct.Constant[int],
    INSIDE: ct.Constant[bool],
):
    SIZE = n * n + 2 * n
    rows = ct.astype(ct.bid(0), ct.int64) * TOKENS + ct.arange(TOKENS, dtype=ct.int64)
    cols = ct.arange(COLUMNS, dtype=ct.int64)
    proj, square = collect_tile(
        partial_.get_raw_memory(),
        square_.get_raw_memory(),
        rows,
        cols,
        T,
        SIZE,
        partials,
        COLUMNS,
        TOKENS,
        PER_GROUP,
    )
    u, r = rms_tile(square, width, eps, INSIDE)
    alpha = alpha_columns(
        widen(alpha_pre_.get_raw_memory().load_offset(0)),
        widen(alpha_post_.get_raw_memory().load_offset(0)),
        widen(alpha_res_.get_raw_memory().load_offset(0)),
        cols,
        n,
    )
    bias = widen(bias_.get_raw_memory().load_offset(cols, mask=cols < SIZE, padding_value=0))
    mixes = mapping_tile(proj * alpha[None, :] * u[:, None] + bias[None, :], cols, compute_h_eps, n)

    inside = rows < T
    store_mapping(
        proj_.get_raw_memory(),
        h_pre_.get_raw_memory(),
        h_post_.get_raw_memory(),
        h_res_.get_raw_memory(),
        proj,
        mixes,
        rows,
        inside,
        cols,
        n,
    )
    r_.get_raw_memory().store_offset(rows, r, mask=inside)


@kernel
def mapping_bwd_kernel(
    proj_,
    r_,
    g_pre_,
    g_post_,
    g_res_,
    g_r_,
    alpha_pre_,
    alpha_post_,
    alpha_res_,
    bias_,
    parts_,
    coefficient_,
    share_,
    T: ct.ScalarInt64,
    stride_pre: ct.ScalarInt64,
    stride_post: ct.ScalarInt64,
    stride_res: ct.ScalarInt64,
    stride_r: ct.ScalarInt64,
    width: float,
    eps: float,
    n: ct.Constant[int],
    COLUMNS: ct.Constant[int],
    TOKENS: ct.Constant[int],
    G_PARTS: ct.Constant[int],
    INSIDE: ct.Constant[bool],
    PRE: ct.Constant[bool],
    POST: ct.Constant[bool],
    RES: ct.Constant[bool],
    R: ct.Constant[bool],
):
    """PRE, POST, RES and R say which gradients there are."""
    SIZE = n * n + 2 * n
    tile = ct.astype(ct.bid(0), ct.int64)
    rows = tile * TOKENS + ct.arange(TOKENS, dtype=ct.int64)
    cols = ct.arange(COLUMNS, dtype=ct.int64)
    inside = rows < T
    r = r_.get_raw_memory().load_offset(rows, mask=inside, padding_value=1.0)
    u = 1.0 / r if INSIDE else 1.0 / (r + eps)
    alpha = alpha_columns(
        widen(alpha_pre_.get_raw_memory().load_offset(0)),
        widen(alpha_post_.get_raw_memory().load_offset(0)),
        widen(alpha_res_.get_raw_memory().load_offset(0)),
        cols,
        n,
    )
    bias = widen(bias_.get_raw_memory().load_offset(cols, mask=cols < SIZE, padding_value=0))
    proj = load_mix_columns(proj_.get_raw_memory(), rows, inside, cols, SIZE, 0, SIZE, True, TOKENS, COLUMNS)
    g_mix = load_mix_columns(
        g_pre_.get_raw_memory(), rows, inside, cols, stride_pre, 0, n, PRE, TOKENS, COLUMNS
    )
    g_mix = g_mix + load_mix_columns(
        g_post_.get_raw_memory(), rows, inside, cols, stride_post, n, n, POST, TOKENS, COLUMNS
    )
    g_mix = g_mix + load_mix_columns(
        g_res_.get_raw_memory(), rows, inside, cols, stride_res, 2 * n, n * n, RES, TOKENS, COLUMNS
    )
    g_proj, g_u, g_h, alpha_terms = mapping_bwd_tile(g_mix, cols, proj, u, alpha, bias, n)
    if R:
        g_r = widen(g_r_.get_raw_memory().load_offset(rows * stride_r, mask=inside, padding_value=0))
    else:
        g_r = ct.zeros((TOKENS,), ct.float32)
    store_parts(parts_.get_raw_memory(), g_proj, rows, inside, cols, COLUMNS, G_PARTS)
    coefficient_.get_raw_memory().store_offset(rows, rms_coefficient_tile(g_r, g_u, u, r, width), mask=inside)
    share = share_.get_raw_memory()
    share.store_offset(tile * (2 * COLUMNS) + cols, ct.sum(alpha_terms, 0))
    share.store_offset(tile * (2 * COLUMNS) + COLUMNS + cols, ct.sum(g_h, 0))


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
    _mapping(
        (-(-count // MAPPING_TOKENS),),
        (partial, square, alpha_pre, alpha_post, alpha_res, bias.contiguous(), *outs),
        (count, partial.shape[0], float(width), eps, compute_h_eps),
        (n, padded(size), MAPPING_TOKENS, per_group, rms_eps_mode == "inside"),
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
    grad = parts_for(x, size)
    mapping_tiles = -(-count // tiles.SHARE_TOKENS)
    mapping_shares = torch.empty((mapping_tiles, 2, grad.columns), dtype=torch.float32, device=x.device)
    given = (g_pre, g_post, g_res, g_r)
    grads = [(None, 0) if g is None else flatten(g, 1) for g in given]
    _mapping_bwd(
        (mapping_tiles,),
        (
            proj,
            r,
            *(source for source, _ in grads),
            alpha_pre,
            alpha_post,
            alpha_res,
            bias.contiguous(),
            grad.parts,
            grad.coefficient,
            mapping_shares,
        ),
        (count, *(step for _, step in grads), float(width), eps),
        (
            n,
            grad.columns,
            tiles.SHARE_TOKENS,
            g_parts(x.dtype),
            rms_eps_mode == "inside",
            *(g is not None for g in given),
        ),
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
        add_all_shares(shares, totals[0], mapping_shares, small, n, size)
    return [g for g in (g_x, *totals) if g is not None]
