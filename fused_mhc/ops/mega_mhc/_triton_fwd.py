"""The single pass in Triton, forward.

One program owns a token: it reads the streams and the output once, writes the new streams and keeps the token's
``mixed`` in registers until its RMS is known, so that the block input is written once too. The projection reads the
new streams (`project`), and a last launch adds its parts and makes the mixes, Sinkhorn included. No sum depends on the
number of tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._strides import alignment, flatten
from .._triton_common import Launcher, follow, lead, widen
from ..proj_rms_compute_h._triton_fwd import SPLIT_BLOCK, empty_parts, project, split_weight_tile
from ..proj_rms_compute_h._triton_tiles import alpha_columns, collect_tile, mapping_tile, rms_tile
from ..proj_rms_compute_h.config import mapping_tokens
from ..sinkhorn._triton import sinkhorn_load_tile, sinkhorn_store_tile, sinkhorn_tile
from . import config as tiles
from ._triton_tiles import site_row_tile

__all__ = [
    "State",
    "aligned_rows",
    "mega_mhc_entry_fwd",
    "mega_mhc_exit_fwd",
    "mega_mhc_fwd",
    "read_entry",
    "read_state",
]


@triton.jit(
    do_not_specialize=[
        "stride_output",
        "stride_residual",
        "stream_stride",
        "stride_pre",
        "stride_post",
        "stride_mixing",
        "norm_eps",
        "splits",
        "size",
        "part_rows",
        "part_width",
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
    parts_ptr,
    stride_output: tl.int64,
    stride_residual: tl.int64,
    stream_stride: tl.int64,
    stride_pre: tl.int64,
    stride_post: tl.int64,
    stride_mixing: tl.int64,
    norm_eps: tl.float32,
    splits: tl.int32,
    size: tl.int32,
    part_rows: tl.int32,
    part_width: tl.int64,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    KEEP: tl.constexpr,
    ENTRY: tl.constexpr,
    ALIGN: tl.constexpr,
    W_PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """A program a token makes all of its columns; ``splits`` more fill the parts of phi that the projection reads next,
    SPLIT columns each (they come last: with few tokens they would stand in the way). At the exit ``new_ptr`` is None and
    nothing is split."""
    lead()
    program = tl.program_id(0)
    tokens = tl.num_programs(0) - splits
    if program < tokens:
        site_row_tile(
            (tokens - 1 - program).to(tl.int64),  # the order of `last_first`
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
            GROUP,
            KEEP,
            ENTRY,
        )
    elif W_PARTS > 0:
        program -= tokens
        row = program % part_rows
        k = (program // part_rows).to(tl.int64) * SPLIT + tl.arange(0, SPLIT)
        split_weight_tile(
            phi_ptr, parts_ptr, row.to(tl.int64), part_rows, k, n * C, size, part_width, W_PARTS
        )


@triton.jit(do_not_specialize=["count", "width", "partials", "norm_eps", "hc_eps"])
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
    width: tl.int64,
    partials: tl.int32,
    norm_eps: tl.float32,
    hc_eps: tl.float32,
    n: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    PER_GROUP: tl.constexpr,
):
    follow()
    N: tl.constexpr = n * n + 2 * n
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row_mask = rows < count
    cols = tl.arange(0, COLUMNS)
    mask = row_mask[:, None] & (cols[None, :] < N)
    at = rows[:, None] * N + cols[None, :]
    proj, square = collect_tile(partial_ptr, square_ptr, rows, cols, count, N, partials, PER_GROUP)
    u, _ = rms_tile(square, width, norm_eps, True)
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


_site = Launcher(site_kernel, follows=False)
_mixes = Launcher(mixes_kernel)


def aligned_rows(t: Tensor, trailing: int) -> tuple[Tensor, int]:
    """Like `flatten`, and copied where base or strides are less aligned than the rows of a fresh tensor: how a kernel
    lays out a tile, and with it the order of a sum, depends on the width alone."""
    flat, stride = flatten(t, trailing)
    step = alignment(t.shape[-1])
    if flat.data_ptr() % 16 or any(s % step for s in (stride, *flat.stride()[-trailing:-1])):
        return flat.clone(memory_format=torch.contiguous_format), math.prod(t.shape[t.dim() - trailing :])
    return flat, stride


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
    output, stride_output = aligned_rows(previous_output, 1)
    streams, stride_residual = aligned_rows(residual, 2)
    pre, stride_pre = flatten(previous_pre_mix, 1)
    post, stride_post = flatten(previous_post_mix, 1)
    mixing, stride_mixing = flatten(previous_residual_mix, 2, dense=True)
    wide = (stride_output, stride_residual, streams.stride(-2))
    return State(streams, output, pre, post, mixing, wide, (stride_pre, stride_post, stride_mixing))


def read_entry(x: Tensor) -> State:
    """The state of `mega_mhc_entry`."""
    flat, stride = aligned_rows(x, 1)
    return State(flat, None, None, None, None, (0, stride, 0))


def _run_site(
    state: State,
    n: int,
    norm_weight: Tensor | None,
    norm_eps: float,
    outs: tuple[Tensor | None, Tensor, Tensor],
    phi: Tensor | None = None,
    parts: Tensor | None = None,
) -> None:
    """Steps 1 and 3; ``outs``: new residual (None: not wanted), block input, reciprocal rms. ``parts``: of phi, filled
    beside (they have nothing to wait for, and a launch of their own costs as much as they do)."""
    width = state.residual.shape[-1]
    chosen = tiles.heuristic(n, width)
    align = alignment(width)
    size, part_rows, part_width, w_parts, splits = 0, 1, 0, 0, 0
    if phi is not None and parts is not None:
        size, phi = phi.shape[0], phi.contiguous()
        w_parts, part_rows, part_width = parts.shape
        splits = part_rows * triton.cdiv(part_width, SPLIT_BLOCK)
    _site(
        (splits + outs[2].numel(),),
        (
            *state.tensors,
            None if norm_weight is None else aligned_rows(norm_weight, 1)[0],
            *outs,
            phi,
            parts,
            *(stride // align for stride in state.wide),
            *state.narrow,
            norm_eps,
            splits,
            size,
            part_rows,
            part_width,
        ),
        (
            n,
            width,
            chosen.block,
            # Without new streams to store the loads need not come first, and fewer registers run more programs.
            chosen.group if outs[0] is not None else min(2, chosen.group),
            chosen.keep,
            state.output is None,
            align,
            w_parts,
            SPLIT_BLOCK,
        ),
        chosen.num_warps,
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
    like, (size, width) = state.residual, phi.shape
    new_residual = torch.empty(*lead, n, width // n, dtype=like.dtype, device=like.device)
    block_input = torch.empty(*lead, width // n, dtype=like.dtype, device=like.device)
    shapes = ((n,), (n,), (n, n), (size,), (1,), (1,))
    pre, post, res, proj, u, rstd = (
        torch.empty(*lead, *shape, dtype=torch.float32, device=like.device) for shape in shapes
    )
    count = rstd.numel()
    if count:
        parts = empty_parts(like.dtype, phi, "fp32")
        _run_site(state, n, norm_weight, norm_eps, (new_residual, block_input, rstd), phi, parts)
        partial, square, per_group = project(new_residual.view(count, width), phi, "fp32", parts)
        tokens = mapping_tokens(count)
        _mixes(
            (triton.cdiv(count, tokens),),
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
                width,
                partial.shape[0],
                norm_eps,
                hc_eps,
            ),
            (n, tiles.columns(n), tokens, num_iters, per_group),
            1,
        )
    return new_residual, pre, post, res, block_input, proj, u, rstd


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
