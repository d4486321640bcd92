"""Projection, RMS and mapping in Triton, forward.

Stage one multiplies x by the weight and sums its squares in one read of x: K is cut into groups of leaves, one leaf is
one accumulation on the tensor cores, leaves are added in fp32 in index order within their group, and groups likewise.
A large batch gives a program a whole group, a small one a single leaf; stage two adds what they left in the same
order and applies the mapping, so the bits of a token depend neither on T nor on its neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import device_info
from .._triton_common import Launcher, alignment, flatten
from . import config as tiles
from ._triton_bwd import proj_rms_compute_h_bwd
from ._triton_tiles import ORDER, PARTS, alpha_columns, collect_tile, mapping_tile, project_tile, rms_tile

__all__ = ["project", "proj_rms_compute_h_bwd", "proj_rms_compute_h_fwd"]


@triton.jit(do_not_specialize=["count", "stride_x", "width", "size", "leaves", "per_program"])
def project_kernel(
    x_ptr,
    weight_ptr,
    partial_ptr,
    square_ptr,
    count: tl.int64,
    stride_x: tl.int64,
    width: tl.int64,
    size: tl.int64,
    leaves: tl.int32,
    per_program: tl.int32,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEAF: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    ORDER: tl.constexpr,
    ALIGN: tl.constexpr,
):
    tile, index, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    rows = tile * TOKENS + tl.arange(0, TOKENS)
    row_mask = rows < count
    cols = block * COLUMNS + tl.arange(0, COLUMNS)
    begin = index * per_program
    proj, square = project_tile(
        x_ptr,
        weight_ptr,
        rows,
        row_mask,
        cols,
        stride_x,
        width,
        size,
        begin,
        tl.minimum(begin + per_program, leaves),
        LEAF,
        X_PARTS,
        W_PARTS,
        ORDER,
        ALIGN,
    )
    at = (index * count + rows[:, None]) * size + cols[None, :]
    tl.store(partial_ptr + at, proj, mask=row_mask[:, None] & (cols[None, :] < size))
    if block == 0:
        tl.store(square_ptr + index * count + rows, square, mask=row_mask)


@triton.jit(do_not_specialize=["count", "width", "partials", "per_group", "eps", "compute_h_eps"])
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
    per_group: tl.int32,
    eps: tl.float32,
    compute_h_eps: tl.float32,
    N_STREAMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    INSIDE: tl.constexpr,
):
    size: tl.constexpr = N_STREAMS * N_STREAMS + 2 * N_STREAMS
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row_mask = rows < count
    cols = tl.arange(0, COLUMNS)
    proj, square = collect_tile(
        partial_ptr, square_ptr, rows, row_mask, cols, count, size, partials, per_group
    )
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


_project = Launcher(project_kernel)
_mapping = Launcher(mapping_kernel)


def project(x: Tensor, weight: Tensor, precision: str) -> tuple[Tensor, Tensor, int]:
    """Stage one for rows ``x [T, K]`` of one stride and a contiguous ``weight [N, K]``.

    Returns:
        Partial sums ``[P, T, N]`` of the product and ``[P, T]`` of the squares, both fp32, and how many of the P make
        a group (`collect_tile` adds them).
    """
    flat, stride = flatten(x, 1)
    size, width = weight.shape
    count = x.numel() // width
    step = tiles.leaf(size)
    chosen = tiles.heuristic((size, width), device_info(x.device).arch)
    leaves, group = triton.cdiv(width, step), tiles.GROUP // step
    token_tiles = triton.cdiv(count, chosen.tokens)
    # Few tokens: one leaf a program, so that the whole chip shares the reading of the weight.
    per_program = group if token_tiles >= 64 else 1
    partials = triton.cdiv(leaves, per_program)
    partial = torch.empty(partials, count, size, dtype=torch.float32, device=x.device)
    square = torch.empty(partials, count, dtype=torch.float32, device=x.device)
    _project(
        (token_tiles, partials, triton.cdiv(size, tiles.columns(size))),
        (flat, weight, partial, square, count, stride, width, size, leaves, per_program),
        (
            chosen.tokens,
            tiles.columns(size),
            step,
            PARTS[x.dtype],
            PARTS[weight.dtype],
            ORDER[precision],
            alignment(stride, width),
        ),
        chosen.num_warps,
        chosen.num_stages,
    )
    return partial, square, group // per_program


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
    outs = [
        torch.empty(*lead, columns, dtype=torch.float32, device=x.device)
        for columns in (n, n, n * n, 1, size)
    ]
    count = x.numel() // width
    if count == 0:
        return tuple(outs)
    partial, square, per_group = project(x, weight.contiguous(), precision)
    _mapping(
        (triton.cdiv(count, tiles.MAPPING_TOKENS),),
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
            per_group,
            eps,
            compute_h_eps,
        ),
        (n, triton.next_power_of_2(size), tiles.MAPPING_TOKENS, rms_eps_mode == "inside"),
        4,
    )
    return tuple(outs)
