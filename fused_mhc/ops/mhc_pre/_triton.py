"""`mhc_pre` in Triton, forward: the projection's own read of the streams, then one launch for all mixes (Sinkhorn
included) and, beside them, the collapse with the aggregate's own read of the streams.

That read does not come from the L2 cache, whatever is done: a single launch in which each tile's collapse follows its
projection after a few tiles was slower (docs, performance).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._strides import alignment, flatten
from .._triton_common import Launcher, elements, last_first, lead, widen
from .._tuning import tuned
from ..h_aggregate._triton import aggregate_row
from ..h_aggregate.config import candidates, heuristic
from ..proj_rms_compute_h._triton_fwd import project
from ..proj_rms_compute_h._triton_tiles import alpha_columns, collect_tile, mapping_tile, rms_tile
from ..proj_rms_compute_h.config import padded
from ..sinkhorn._triton import sinkhorn_fwd, sinkhorn_load_tile, sinkhorn_store_tile, sinkhorn_tile
from ..sinkhorn.config import MAX_REGISTER_STREAMS
from . import config as tiles
from ._triton_bwd import mhc_pre_bwd

__all__ = ["mhc_pre_bwd", "mhc_pre_fwd"]


@triton.jit
def mixes_tile(
    partial_ptr,
    square_ptr,
    alpha_pre_ptr,
    alpha_post_ptr,
    alpha_res_ptr,
    bias_ptr,
    rows,
    cols,
    count,
    width,
    partials,
    eps,
    compute_h_eps,
    n: tl.constexpr,
    PER_GROUP: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """``(mixes, raw projection, RMS)`` of ``rows``, all columns (Sinkhorn's as logits)."""
    N: tl.constexpr = n * n + 2 * n
    proj, square = collect_tile(partial_ptr, square_ptr, rows, cols, count, N, partials, PER_GROUP)
    u, r = rms_tile(square, width, eps, INSIDE)
    alpha = alpha_columns(alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, cols, n)
    bias = widen(tl.load(bias_ptr + cols, mask=cols < N, other=0.0))
    mixes = mapping_tile(proj * alpha[None, :] * u[:, None] + bias[None, :], cols, compute_h_eps, n)
    return mixes, proj, r


@triton.jit(
    do_not_specialize=[
        "count",
        "width",
        "partials",
        "stride",
        "stream_stride",
        "tiles",
        "eps",
        "compute_h_eps",
        "sinkhorn_eps",
    ]
)
def collapse_kernel(
    partial_ptr,
    square_ptr,
    alpha_pre_ptr,
    alpha_post_ptr,
    alpha_res_ptr,
    bias_ptr,
    h_post_ptr,
    h_res_ptr,
    h_pre_ptr,
    proj_ptr,
    r_ptr,
    x_ptr,
    layer_ptr,
    count: tl.int64,
    width: tl.int64,
    partials: tl.int32,
    stride: tl.int64,
    stream_stride: tl.int64,
    tiles: tl.int32,
    eps: tl.float32,
    compute_h_eps: tl.float32,
    sinkhorn_eps: tl.float32,
    n: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ITERATIONS: tl.constexpr,
    PAPER: tl.constexpr,
    INSIDE: tl.constexpr,
    SINKHORN: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The first ``tiles`` programs write all mixes of TOKENS tokens each, a long chain of small steps; the others, one a
    token, make its pre-mix again from the partial sums and collapse its streams meanwhile. SINKHORN: normalise here;
    else the logits stay."""
    lead()
    N: tl.constexpr = n * n + 2 * n
    cols = tl.arange(0, COLUMNS)
    program = tl.program_id(0)
    if program < tiles:
        rows = program.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        row_mask = rows < count
        mixes, proj, r = mixes_tile(
            partial_ptr,
            square_ptr,
            alpha_pre_ptr,
            alpha_post_ptr,
            alpha_res_ptr,
            bias_ptr,
            rows,
            cols,
            count,
            width,
            partials,
            eps,
            compute_h_eps,
            n,
            PER_GROUP,
            INSIDE,
        )
        row, col, inside = rows[:, None], cols[None, :], row_mask[:, None]
        tl.store(proj_ptr + row * N + col, proj, mask=inside & (col < N))
        tl.store(r_ptr + rows, r, mask=row_mask)
        tl.store(h_pre_ptr + row * n + col, mixes, mask=inside & (col < n))
        tl.store(h_post_ptr + row * n + col - n, mixes, mask=inside & (col >= n) & (col < 2 * n))
        tl.store(h_res_ptr + row * (n * n) + col - 2 * n, mixes, mask=inside & (col >= 2 * n) & (col < N))
        if SINKHORN:
            # A thread holds a token's whole matrix there: the logits change hands through memory.
            tl.debug_barrier()
            logits = sinkhorn_load_tile(h_res_ptr, n * n, rows, row_mask, n, 1)
            m = sinkhorn_tile(logits, sinkhorn_eps, n, ITERATIONS, PAPER)
            sinkhorn_store_tile(h_res_ptr, m, rows, row_mask, n)
    else:
        token = last_first()
        own, _, _ = mixes_tile(
            partial_ptr,
            square_ptr,
            alpha_pre_ptr,
            alpha_post_ptr,
            alpha_res_ptr,
            bias_ptr,
            token + tl.arange(0, 1),
            cols,
            count,
            width,
            partials,
            eps,
            compute_h_eps,
            n,
            PER_GROUP,
            INSIDE,
        )
        weights = ()
        for i in tl.static_range(n):
            weights = weights + (tl.sum(tl.sum(tl.where(cols[None, :] == i, own, 0.0), 1), 0),)
        x_row = x_ptr + token * elements(stride, ALIGN)
        aggregate_row(
            x_row, elements(stream_stride, ALIGN), layer_ptr + token * C, weights, n, C, BLOCK, GROUP
        )


_collapse = Launcher(collapse_kernel, follows=False)


def mhc_pre_fwd(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    num_iterations: int,
    rms_eps: float,
    compute_h_eps: float,
    sinkhorn_eps: float,
    rms_eps_mode: str,
    variant: str,
    precision: str,
) -> tuple[Tensor, ...]:
    *lead, n, width = x.shape
    size = weight.shape[0]
    layer_input = torch.empty(*lead, width, dtype=x.dtype, device=x.device)
    shapes = ((n,), (n, n), (n,), (size,), (1,))
    mixes = [torch.empty(*lead, *shape, dtype=torch.float32, device=x.device) for shape in shapes]
    count = mixes[-1].numel()
    if count == 0:
        return (layer_input, *mixes)
    streams, stride = flatten(x, 2)
    partial, square, per_group = project(x.flatten(-2), weight, precision)
    rows = tuned("h_aggregate_fwd", x.device, heuristic, candidates, n, width, x.element_size())
    align = alignment(width, stride, streams.stride(-2))
    mapping_tiles, narrow = triton.cdiv(count, tiles.MAPPING_TOKENS), n <= MAX_REGISTER_STREAMS
    _collapse(
        (mapping_tiles + count,),
        (
            partial,
            square,
            alpha_pre,
            alpha_post,
            alpha_res,
            bias.contiguous(),
            *mixes,
            streams,
            layer_input,
            count,
            n * width,
            partial.shape[0],
            stride // align,
            streams.stride(-2) // align,
            mapping_tiles,
            rms_eps,
            compute_h_eps,
            sinkhorn_eps,
        ),
        (
            n,
            width,
            padded(size),
            tiles.MAPPING_TOKENS,
            per_group,
            num_iterations,
            variant == "paper",
            rms_eps_mode == "inside",
            narrow,
            rows.block,
            rows.group,
            align,
        ),
        rows.num_warps,
    )
    if not narrow:
        mixes[1] = sinkhorn_fwd(mixes[1], num_iterations, sinkhorn_eps, variant)
    return (layer_input, *mixes)
