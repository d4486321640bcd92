"""Projection, RMS and mapping in Triton, backward.

Stage one takes the gradients of the mixes to that of the raw projection (kept as bf16 parts, T x N) and to the factor
of x in its own gradient. Stage two reads x once: a program owns some columns of K and a chunk of tokens, writes g_x
and sums its share of g_W. Stage three adds the shares in index order, and those of the alphas and the bias.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import device_info
from .._triton_common import Launcher, alignment, flatten, store, widen
from . import config as tiles
from ._triton_tiles import (
    PARTS,
    alpha_columns,
    load_columns,
    mapping_bwd_tile,
    project_bwd_tile,
    rms_coefficient_tile,
    store_parts,
)

__all__ = ["add_shares", "proj_rms_compute_h_bwd", "project_bwd"]


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
    INSIDE: tl.constexpr,
):
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
    store_parts(parts_ptr, g_proj, rows, row_mask, cols, COLUMNS, G_PARTS)
    tl.store(coefficient_ptr + rows, rms_coefficient_tile(g_r, g_u, u, r, width), mask=row_mask)
    share = share_ptr + tile * (2 * COLUMNS) + cols
    tl.store(share, tl.sum(alpha_terms, axis=0))
    tl.store(share + COLUMNS, tl.sum(g_h, axis=0))


@triton.jit(
    do_not_specialize=[
        "count",
        "stride_x",
        "inner",
        "width",
        "size",
        "stride_mix",
        "stride_layer",
        "stride_passed",
    ]
)
def project_bwd_kernel(
    x_ptr,
    weight_ptr,
    parts_ptr,
    coefficient_ptr,
    g_x_ptr,
    share_ptr,
    mix_ptr,
    g_layer_ptr,
    g_passed_ptr,
    count: tl.int64,
    stride_x: tl.int64,
    inner: tl.int64,
    width: tl.int64,
    size: tl.int64,
    stride_mix: tl.int64,
    stride_layer: tl.int64,
    stride_passed: tl.int64,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    G_PARTS: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    inner, stride_x = tl.multiple_of(inner, ALIGN), tl.multiple_of(stride_x, ALIGN)
    width = tl.multiple_of(width, ALIGN)
    stride_layer, stride_passed = tl.multiple_of(stride_layer, ALIGN), tl.multiple_of(stride_passed, ALIGN)
    chunk, stream = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    c = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    k = stream * inner + c
    cols = tl.arange(0, COLUMNS)
    w_mask = (cols[:, None] < size) & (c[None, :] < inner)
    w_at = cols[:, None] * width + k[None, :]
    weight = tl.load(weight_ptr + w_at, mask=w_mask, other=0.0)
    share = tl.zeros((COLUMNS, WIDTH), tl.float32)
    for first in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, count), TOKENS):
        rows = first + tl.arange(0, TOKENS)
        row_mask = rows < count
        mask = row_mask[:, None] & (c[None, :] < inner)
        x = tl.load(x_ptr + rows[:, None] * stride_x + k[None, :], mask=mask, other=0.0)
        coefficient = tl.load(coefficient_ptr + rows, mask=row_mask, other=0.0)
        g_x, g_w = project_bwd_tile(
            x,
            parts_ptr,
            weight,
            coefficient,
            rows,
            row_mask,
            cols,
            COLUMNS,
            G_PARTS,
            X_PARTS,
            W_PARTS,
            g_x_ptr is not None,
            share_ptr is not None,
        )
        if g_x_ptr is not None:
            if g_layer_ptr is not None:
                mix = widen(tl.load(mix_ptr + rows * stride_mix + stream, mask=row_mask, other=0.0))
                layer = tl.load(g_layer_ptr + rows[:, None] * stride_layer + c[None, :], mask=mask, other=0.0)
                g_x += mix[:, None] * widen(layer)
            if g_passed_ptr is not None:
                passed = tl.load(
                    g_passed_ptr + rows[:, None] * stride_passed + k[None, :], mask=mask, other=0.0
                )
                g_x += widen(passed)
            store(g_x_ptr + rows[:, None] * width + k[None, :], g_x, mask=mask)
        share += g_w
    if share_ptr is not None:
        tl.store(share_ptr + chunk * size * width + w_at, share, mask=w_mask)


@triton.jit(do_not_specialize=["shares", "elements"])
def add_shares_kernel(share_ptr, total_ptr, shares: tl.int64, elements: tl.int64, BLOCK: tl.constexpr):
    """``total = share[0] + share[1] + ...``, in that order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < elements
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(shares):
        total += tl.load(share_ptr + index * elements + at, mask=mask, other=0.0)
    store(total_ptr + at, total, mask=mask)


@triton.jit(do_not_specialize=["shares"])
def add_mapping_shares_kernel(
    share_ptr,
    g_alpha_pre_ptr,
    g_alpha_post_ptr,
    g_alpha_res_ptr,
    g_bias_ptr,
    shares: tl.int64,
    N_STREAMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of the alphas and the bias from the shares ``[shares, 2, COLUMNS]``; None where not needed."""
    size: tl.constexpr = N_STREAMS * N_STREAMS + 2 * N_STREAMS
    cols = tl.arange(0, COLUMNS)
    alpha = tl.zeros((ROWS, COLUMNS), tl.float32)
    bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, shares, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = share_ptr + rows[:, None] * (2 * COLUMNS) + cols[None, :]
        alpha += tl.load(at, mask=rows[:, None] < shares, other=0.0)
        bias += tl.load(at + COLUMNS, mask=rows[:, None] < shares, other=0.0)
    alpha_terms, bias_terms = tl.sum(alpha, axis=0), tl.sum(bias, axis=0)
    if g_alpha_pre_ptr is not None:
        store(g_alpha_pre_ptr, tl.sum(tl.where(cols < N_STREAMS, alpha_terms, 0.0)))
    if g_alpha_post_ptr is not None:
        post = (cols >= N_STREAMS) & (cols < 2 * N_STREAMS)
        store(g_alpha_post_ptr, tl.sum(tl.where(post, alpha_terms, 0.0)))
    if g_alpha_res_ptr is not None:
        store(g_alpha_res_ptr, tl.sum(tl.where(cols >= 2 * N_STREAMS, alpha_terms, 0.0)))
    if g_bias_ptr is not None:
        store(g_bias_ptr + cols, bias_terms, mask=cols < size)


_mapping_bwd = Launcher(mapping_bwd_kernel)
_project_bwd = Launcher(project_bwd_kernel)
_add_shares = Launcher(add_shares_kernel)
_add_mapping_shares = Launcher(add_mapping_shares_kernel)


def g_parts(dtype: torch.dtype) -> int:
    """bf16 parts of the mapping's gradient: three for fp32 x; for 16-bit x two, which are off by 2^-17."""
    return 3 if dtype is torch.float32 else 2


def add_shares(shares: Tensor, like: Tensor) -> Tensor:
    """Sum of ``shares [S, *like.shape]`` over S in index order, in the dtype of ``like``."""
    total = torch.empty_like(like, memory_format=torch.contiguous_format)
    elements = total.numel()
    _add_shares((triton.cdiv(elements, 1024),), (shares, total, shares.shape[0], elements), (1024,), 4)
    return total


def project_bwd(
    x: Tensor,
    weight: Tensor,
    parts: Tensor,
    coefficient: Tensor,
    needs_x: bool,
    needs_w: bool,
    mix: Tensor | None = None,
    g_layer: Tensor | None = None,
    g_passed: Tensor | None = None,
) -> list[Tensor]:
    """Stage two and the sum of its shares: ``[g_x, g_weight]``, those that are needed.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``.
        parts: ``[T, G_PARTS, COLUMNS]`` bf16, the gradient of the raw projection.
        coefficient: ``[T]`` fp32, the factor of x in its own gradient.
        needs_x, needs_w: which gradients to make.
        mix, g_layer: ``[..., n]`` and ``[..., C]``, both or neither: ``mix[i]*g_layer`` is added to stream i of g_x.
        g_passed: ``[..., K]``, added to g_x.
    """
    flat, stride = flatten(x, 1)
    matrix = weight.contiguous()
    size, width = matrix.shape
    count = x.numel() // width
    inner = width if g_layer is None else g_layer.shape[-1]
    chosen = tiles.heuristic((size, width), device_info(x.device).arch)
    chunks = triton.cdiv(count, tiles.CHUNK)
    g_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else None
    shares = torch.empty(chunks, size, width, dtype=torch.float32, device=x.device) if needs_w else None
    added: list[Tensor | None] = []
    strides: list[int] = []
    for t in (mix, g_layer, g_passed):
        source, step = (None, 0) if t is None else flatten(t, 1)
        added.append(source)
        strides.append(step)
    _project_bwd(
        (triton.cdiv(inner, chosen.grad_width), chunks, width // inner),
        (flat, matrix, parts, coefficient, g_x, shares, *added, count, stride, inner, width, size, *strides),
        (
            parts.shape[2],
            tiles.CHUNK,
            chosen.grad_tokens,
            chosen.grad_width,
            parts.shape[1],
            PARTS[x.dtype],
            PARTS[weight.dtype],
            alignment(stride, inner, *strides[1:]),
        ),
        chosen.grad_warps,
        chosen.grad_stages,
    )
    found = [] if g_x is None else [g_x]
    return found if shares is None else [*found, add_shares(shares, weight)]


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
    columns = max(16, triton.next_power_of_2(size))
    mapping_tiles = triton.cdiv(count, tiles.MAPPING_TOKENS)
    parts = torch.empty(count, g_parts(x.dtype), columns, dtype=torch.bfloat16, device=x.device)
    coefficient = torch.empty(count, dtype=torch.float32, device=x.device)
    shares = torch.empty(mapping_tiles, 2, columns, dtype=torch.float32, device=x.device)
    grads: list[Tensor | None] = []
    strides: list[int] = []
    for g in (g_pre, g_post, g_res, g_r):
        source, step = (None, 0) if g is None else flatten(g, 1)
        grads.append(source)
        strides.append(step)
    shift = bias.contiguous()
    _mapping_bwd(
        (mapping_tiles,),
        (
            proj,
            r,
            *grads,
            alpha_pre,
            alpha_post,
            alpha_res,
            shift,
            parts,
            coefficient,
            shares,
            count,
            width,
            *strides,
            eps,
        ),
        (n, columns, tiles.MAPPING_TOKENS, parts.shape[1], rms_eps_mode == "inside"),
        4,
    )
    found = []
    if needs[0] or needs[1]:
        found = project_bwd(x, weight, parts, coefficient, needs[0], needs[1])
    small = [
        torch.empty(t.shape, dtype=t.dtype, device=x.device) if need else None
        for t, need in zip(inputs[2:], needs[2:], strict=True)
    ]
    if any(needs[2:]):
        _add_mapping_shares((1,), (shares, *small, mapping_tiles), (n, columns, 16), 4)
    return [*found, *(g for g in small if g is not None)]
