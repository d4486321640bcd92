"""`mhc_pre` in Triton, forward: the projection's own read of the streams, one small kernel for all mixes (Sinkhorn
included), the aggregate's own read of the streams.

The aggregate's read does not come from the L2 cache, whatever is done: a single launch in which each tile's collapse
follows its projection after a few tiles was slower than two launches (docs, performance).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._triton_common import Launcher, widen
from ..h_aggregate._triton import h_aggregate_fwd
from ..proj_rms_compute_h._triton_bwd import padded
from ..proj_rms_compute_h._triton_fwd import project
from ..proj_rms_compute_h._triton_tiles import alpha_columns, collect_tile, mapping_tile, rms_tile
from ..sinkhorn._triton import sinkhorn_fwd, sinkhorn_load_tile, sinkhorn_store_tile, sinkhorn_tile
from ..sinkhorn.config import MAX_REGISTER_STREAMS
from . import config as tiles
from ._triton_bwd import mhc_pre_bwd

__all__ = ["mhc_pre_bwd", "mhc_pre_fwd"]


@triton.jit(do_not_specialize=["count", "width", "partials", "eps", "compute_h_eps", "sinkhorn_eps"])
def mixes_kernel(
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
    count: tl.int64,
    width: tl.int64,
    partials: tl.int32,
    eps: tl.float32,
    compute_h_eps: tl.float32,
    sinkhorn_eps: tl.float32,
    n: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ITERATIONS: tl.constexpr,
    PAPER: tl.constexpr,
    INSIDE: tl.constexpr,
    SINKHORN: tl.constexpr,
):
    """SINKHORN: normalise here; else the logits stay."""
    N: tl.constexpr = n * n + 2 * n
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row_mask = rows < count
    cols = tl.arange(0, COLUMNS)
    proj, square = collect_tile(partial_ptr, square_ptr, rows, cols, count, N, partials, PER_GROUP)
    u, r = rms_tile(square, width, eps, INSIDE)
    alpha = alpha_columns(alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, cols, n)
    bias = widen(tl.load(bias_ptr + cols, mask=cols < N, other=0.0))
    mixes = mapping_tile(proj * alpha[None, :] * u[:, None] + bias[None, :], cols, compute_h_eps, n)
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


_mixes = Launcher(mixes_kernel)


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
    shapes = ((n,), (n, n), (n,), (size,), (1,))
    mixes = [torch.empty(*lead, *shape, dtype=torch.float32, device=x.device) for shape in shapes]
    h_pre, count = mixes[2], mixes[-1].numel()
    if count:
        partial, square, per_group = project(x.flatten(-2), weight, precision)
        narrow = n <= MAX_REGISTER_STREAMS
        _mixes(
            (triton.cdiv(count, tiles.MAPPING_TOKENS),),
            (
                partial,
                square,
                alpha_pre,
                alpha_post,
                alpha_res,
                bias.contiguous(),
                *mixes,
                count,
                n * width,
                partial.shape[0],
                rms_eps,
                compute_h_eps,
                sinkhorn_eps,
            ),
            (
                n,
                padded(size),
                tiles.MAPPING_TOKENS,
                per_group,
                num_iterations,
                variant == "paper",
                rms_eps_mode == "inside",
                narrow,
            ),
            1,
        )
        if not narrow:
            mixes[1] = sinkhorn_fwd(mixes[1], num_iterations, sinkhorn_eps, variant)
    return (h_aggregate_fwd(x, h_pre), *mixes)
