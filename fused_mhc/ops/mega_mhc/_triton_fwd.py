"""The single pass in Triton, forward.

One launch does everything that touches the streams. Its work items come in this order: the tokens of one tile of the
projection, one program each (update, input mix, RMSNorm: a token's ``mixed`` stays in registers until its rms is
known), then the projection of an earlier tile, cut along K, which reads the new streams back from the L2 cache. A
program takes the next item by a ticket, so whatever an item waits for was taken before it by a program that runs and
never waits. A last launch adds the parts of the projection and makes the mixes, Sinkhorn included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._triton_common import Launcher, alignment, flatten, widen
from ..proj_rms_compute_h._triton_tiles import PARTS, alpha_columns, mapping_tile, part, rms_tile
from ..sinkhorn._triton import sinkhorn_load_tile, sinkhorn_store_tile, sinkhorn_tile
from . import config as tiles
from ._triton_tiles import project_site_tile, site_row_tile

__all__ = [
    "State",
    "mega_mhc_entry_fwd",
    "mega_mhc_exit_fwd",
    "mega_mhc_fwd",
    "read_entry",
    "read_state",
    "split_phi",
]


@triton.jit(do_not_specialize=["elements", "counters"])
def split_kernel(
    phi_ptr,
    parts_ptr,
    counter_ptr,
    elements: tl.int64,
    counters: tl.int32,
    W_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The bf16 parts of phi, one matrix after the other; and zeros in the counters of the launch that follows."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    phi = tl.load(phi_ptr + at, mask=at < elements, other=0.0)
    for index in tl.static_range(W_PARTS):
        tl.store(parts_ptr + index * elements + at, part(phi, index), mask=at < elements)
    if counter_ptr is not None:
        tl.store(counter_ptr + at, tl.zeros((BLOCK,), tl.int32), mask=at < counters)


@triton.jit(
    do_not_specialize=[
        "count",
        "stride_output",
        "stride_residual",
        "stream_stride",
        "stride_pre",
        "stride_post",
        "stride_mixing",
        "norm_eps",
        "ahead",
        "partials",
        "per_partial",
    ]
)
def site_kernel(
    residual_ptr,
    output_ptr,
    pre_ptr,
    post_ptr,
    mixing_ptr,
    norm_weight_ptr,
    new_ptr,
    block_ptr,
    rstd_ptr,
    phi_ptr,
    partial_ptr,
    square_ptr,
    counter_ptr,
    count: tl.int64,
    stride_output: tl.int64,
    stride_residual: tl.int64,
    stream_stride: tl.int64,
    stride_pre: tl.int64,
    stride_post: tl.int64,
    stride_mixing: tl.int64,
    norm_eps: tl.float32,
    ahead: tl.int32,
    partials: tl.int32,
    per_partial: tl.int32,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
    ENTRY: tl.constexpr,
    ALIGN: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    RATIO: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
):
    """``counter_ptr``: the ticket, then for every tile how many of its tokens are done. ``ahead``: tokens that are
    taken before the first projection."""
    N: tl.constexpr = n * n + 2 * n
    if phi_ptr is None:
        token = tl.program_id(0).to(tl.int64)
        update = token < count
    else:
        ticket = tl.atomic_add(counter_ptr, 1, sem="relaxed").to(tl.int64)
        later = ticket - ahead
        tile = later // (TOKENS + partials)
        place = later - tile * (TOKENS + partials)
        share = place - TOKENS
        project = (later >= 0) & (share >= 0)
        token = tl.where(later >= 0, ahead + tile * TOKENS + place, ticket)
        update = (token < count) & (project == 0)
        if project:
            rows = tile * TOKENS + tl.arange(0, TOKENS)
            wanted = tl.minimum(count - tile * TOKENS, TOKENS).to(tl.int32)
            while tl.atomic_add(counter_ptr + 1 + tile, 0, sem="acquire") < wanted:
                pass
            project_site_tile(
                new_ptr,
                phi_ptr,
                partial_ptr + share * count * N,
                square_ptr + share * count,
                rows,
                rows < count,
                share * per_partial,
                share * per_partial + per_partial,
                N,
                n * C,
                COLUMNS,
                STEP,
                RATIO,
                X_PARTS,
                W_PARTS,
            )
    if update:
        site_row_tile(
            token,
            output_ptr,
            residual_ptr,
            pre_ptr,
            post_ptr,
            mixing_ptr,
            norm_weight_ptr,
            new_ptr,
            block_ptr,
            rstd_ptr,
            stride_output * ALIGN,
            stride_residual * ALIGN,
            stream_stride * ALIGN,
            stride_pre,
            stride_post,
            stride_mixing,
            norm_eps,
            n,
            C,
            BLOCK,
            KEEP,
            ENTRY,
        )
        if phi_ptr is not None:
            tl.debug_barrier()
            tl.atomic_add(counter_ptr + 1 + token // TOKENS, 1, sem="release")


@triton.jit(do_not_specialize=["count", "partials", "per_group", "norm_eps", "hc_eps"])
def mixes_kernel(
    partial_ptr,
    square_ptr,
    alpha_ptr,
    bias_ptr,
    pre_ptr,
    post_ptr,
    res_ptr,
    proj_ptr,
    u_ptr,
    count: tl.int64,
    partials: tl.int32,
    per_group: tl.int32,
    norm_eps: tl.float32,
    hc_eps: tl.float32,
    n: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    N: tl.constexpr = n * n + 2 * n
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row_mask = rows < count
    cols = tl.arange(0, COLUMNS)
    mask = row_mask[:, None] & (cols[None, :] < N)
    at = rows[:, None] * N + cols[None, :]
    proj = tl.zeros((TOKENS, COLUMNS), tl.float32)
    square = tl.zeros((TOKENS,), tl.float32)
    for first in range(0, partials, per_group):
        group = tl.zeros_like(proj)
        group_square = tl.zeros_like(square)
        for index in range(first, tl.minimum(first + per_group, partials)):
            group += tl.load(partial_ptr + index * count * N + at, mask=mask, other=0.0)
            group_square += tl.load(square_ptr + index * count + rows, mask=row_mask, other=0.0)
        proj += group
        square += group_square
    u, _ = rms_tile(square, tl.full((), n * C, tl.int64), norm_eps, True)
    alpha = alpha_columns(alpha_ptr, alpha_ptr + 1, alpha_ptr + 2, cols, n)
    bias = widen(tl.load(bias_ptr + cols, mask=cols < N, other=0.0))
    mixes = mapping_tile(proj * u[:, None] * alpha[None, :] + bias[None, :], cols, hc_eps, n)
    tl.store(proj_ptr + at, proj, mask=mask)
    tl.store(u_ptr + rows, u, mask=row_mask)
    row, col, inside = rows[:, None], cols[None, :], row_mask[:, None]
    tl.store(pre_ptr + row * n + col, mixes, mask=inside & (col < n))
    tl.store(post_ptr + row * n + col - n, mixes, mask=inside & (col >= n) & (col < 2 * n))
    # Sinkhorn holds a token in one thread: its logits change hands through memory.
    tl.store(res_ptr + row * (n * n) + col - 2 * n, mixes, mask=inside & (col >= 2 * n) & (col < N))
    tl.debug_barrier()
    logits = sinkhorn_load_tile(res_ptr, n * n, rows, row_mask, n, 1)
    sinkhorn_store_tile(res_ptr, sinkhorn_tile(logits, hc_eps, n, ITERATIONS, False), rows, row_mask, n)


_split = Launcher(split_kernel)
_site = Launcher(site_kernel)
_mixes = Launcher(mixes_kernel)


def split_phi(phi: Tensor, parts: int, counters: Tensor | None = None) -> Tensor:
    """The first ``parts`` bf16 parts of phi, ``[parts, N, K]``; sets ``counters`` to zero on the way."""
    found = torch.empty(parts, *phi.shape, dtype=torch.bfloat16, device=phi.device)
    elements = phi.numel()
    zeros = 0 if counters is None else counters.numel()
    _split(
        (triton.cdiv(max(elements, zeros), 1024),),
        (phi.contiguous(), found, counters, elements, zeros),
        (parts, 1024),
        4,
    )
    return found


class State(NamedTuple):
    """What a site gets from the one before, as rows of tokens, with the strides in elements. At the entry ``residual``
    is x, read as n equal streams, and there is nothing else."""

    residual: Tensor
    output: Tensor | None
    pre: Tensor | None
    post: Tensor | None
    mixing: Tensor | None
    #: Strides of the tokens of output and residual, and of the streams.
    wide: tuple[int, int, int]
    #: Strides of the tokens of pre, post and mixing.
    narrow: tuple[int, int, int] = (0, 0, 0)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The five tensors."""
        return self[:5]


def read_state(
    previous_output: Tensor,
    residual: Tensor,
    previous_pre_mix: Tensor,
    previous_post_mix: Tensor,
    previous_residual_mix: Tensor,
) -> State:
    """The state of `mega_mhc` and `mega_mhc_exit`."""
    output, stride_output = flatten(previous_output, 1)
    streams, stride_residual = flatten(residual, 2)
    pre, stride_pre = flatten(previous_pre_mix, 1)
    post, stride_post = flatten(previous_post_mix, 1)
    mixing, stride_mixing = flatten(previous_residual_mix, 2, dense=True)
    wide = (stride_output, stride_residual, streams.stride(-2))
    return State(streams, output, pre, post, mixing, wide, (stride_pre, stride_post, stride_mixing))


def read_entry(x: Tensor) -> State:
    """The state of `mega_mhc_entry`."""
    flat, stride = flatten(x, 1)
    return State(flat, None, None, None, None, (0, stride, 0))


def _run_site(
    state: State,
    n: int,
    norm_weight: Tensor | None,
    norm_eps: float,
    outs: tuple[Tensor | None, Tensor, Tensor],
    projection: tuple[Tensor | None, ...] = (None, None, None, None),
    per_partial: int = 1,
) -> None:
    """One launch of `site_kernel`; ``outs``: new residual, block input, reciprocal rms; ``projection``: parts of phi,
    partial products and squares, counters."""
    rstd, parts, partial = outs[2], projection[0], projection[1]
    count, width = rstd.numel(), state.residual.shape[-1]
    chosen = tiles.heuristic(n, width)
    align = alignment(*state.wide, width)
    items, ahead, partials = count, 0, 0
    if partial is not None:
        partials = partial.shape[0]
        token_tiles = triton.cdiv(count, tiles.PROJECT_TOKENS)
        ahead = tiles.PROJECT_TOKENS * min(token_tiles, tiles.AHEAD)
        items = ahead + token_tiles * (tiles.PROJECT_TOKENS + partials)
    _site(
        (items,),
        (
            *state.tensors,
            None if norm_weight is None else norm_weight.contiguous(),
            *outs,
            *projection,
            count,
            *(stride // align for stride in state.wide),
            *state.narrow,
            norm_eps,
            ahead,
            partials,
            per_partial,
        ),
        (
            n,
            width,
            chosen.block,
            chosen.keep,
            state.output is None,
            align,
            tiles.PROJECT_TOKENS,
            tiles.columns(n),
            tiles.STEP,
            tiles.LEAF // tiles.STEP,
            PARTS[state.residual.dtype],
            1 if parts is None else parts.shape[0],
        ),
        4,
        3,
    )


def _site_fwd(
    state: State,
    lead: tuple[int, ...],
    n: int,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    hc_eps: float,
    norm_eps: float,
    num_iters: int,
) -> tuple[Tensor, ...]:
    like, size = state.residual, phi.shape[0]
    width = like.shape[-1]
    new_residual = torch.empty(*lead, n, width, dtype=like.dtype, device=like.device)
    block_input = torch.empty(*lead, width, dtype=like.dtype, device=like.device)
    shapes = ((n,), (n,), (n, n), (size,), (1,), (1,))
    pre, post, res, proj, u, rstd = (
        torch.empty(*lead, *shape, dtype=torch.float32, device=like.device) for shape in shapes
    )
    results = (new_residual, pre, post, res, block_input, proj, u, rstd)
    count = rstd.numel()
    if count == 0:
        return results
    token_tiles = triton.cdiv(count, tiles.PROJECT_TOKENS)
    # Few tokens: one leaf a program, so that the whole chip shares the reading of phi.
    per_partial = tiles.GROUP // tiles.LEAF if token_tiles >= tiles.MANY_TILES else 1
    partials = triton.cdiv(phi.shape[1], tiles.LEAF * per_partial)
    counters = torch.empty(1 + token_tiles, dtype=torch.int32, device=like.device)
    parts = split_phi(phi, PARTS[phi.dtype], counters)
    partial = torch.empty(partials, count, size, dtype=torch.float32, device=like.device)
    square = torch.empty(partials, count, dtype=torch.float32, device=like.device)
    _run_site(
        state,
        n,
        norm_weight,
        norm_eps,
        (new_residual, block_input, rstd),
        (parts, partial, square, counters),
        per_partial,
    )
    _mixes(
        (triton.cdiv(count, tiles.MAPPING_TOKENS),),
        (
            partial,
            square,
            alpha.contiguous(),
            bias.contiguous(),
            pre,
            post,
            res,
            proj,
            u,
            count,
            partials,
            tiles.GROUP // tiles.LEAF // per_partial,
            norm_eps,
            hc_eps,
        ),
        (n, width, tiles.columns(n), tiles.MAPPING_TOKENS, num_iters),
        1,
    )
    return results


def mega_mhc_fwd(
    previous_output: Tensor,
    residual: Tensor,
    previous_pre_mix: Tensor,
    previous_post_mix: Tensor,
    previous_residual_mix: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    hc_eps: float,
    norm_eps: float,
    num_iters: int,
) -> tuple[Tensor, ...]:
    state = read_state(previous_output, residual, previous_pre_mix, previous_post_mix, previous_residual_mix)
    lead, n = tuple(residual.shape[:-2]), residual.shape[-2]
    return _site_fwd(state, lead, n, phi, alpha, bias, norm_weight, hc_eps, norm_eps, num_iters)


def mega_mhc_entry_fwd(
    x: Tensor,
    n: int,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    hc_eps: float,
    norm_eps: float,
    num_iters: int,
) -> tuple[Tensor, ...]:
    lead = tuple(x.shape[:-1])
    return _site_fwd(read_entry(x), lead, n, phi, alpha, bias, norm_weight, hc_eps, norm_eps, num_iters)


def mega_mhc_exit_fwd(
    previous_output: Tensor,
    residual: Tensor,
    previous_pre_mix: Tensor,
    previous_post_mix: Tensor,
    previous_residual_mix: Tensor,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    *lead, n, width = residual.shape
    out = torch.empty(*lead, width, dtype=residual.dtype, device=residual.device)
    rstd = torch.empty(*lead, 1, dtype=torch.float32, device=residual.device)
    if rstd.numel():
        state = read_state(
            previous_output, residual, previous_pre_mix, previous_post_mix, previous_residual_mix
        )
        _run_site(state, n, norm_weight, norm_eps, (None, out, rstd))
    return out, rstd
