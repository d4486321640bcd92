"""`mhc_pre` in Triton, backward.

1. One read of the streams and of the layer input's gradient: ``g_h_pre[i] = <g_layer_input, x[i]>`` (the aggregate's
   own backward), and Sinkhorn's backward beside it: a long chain of small steps that needs no memory to speak of.
2. The mixes: sigmoids and scale back to the raw projection, kept as bf16 parts, and to the factor of x in its own
   gradient; T x N numbers.
3. One read of the streams and of every gradient that flows into them, one write of theirs; shares of g_W for every
   chunk of tokens, added in order at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._strides import alignment, flatten
from .._triton_common import Launcher, follow, last_first, lead, widen
from ..h_aggregate._triton import aggregate_bwd_row, h_aggregate_bwd
from ..h_aggregate.config import heuristic
from ..proj_rms_compute_h._triton_bwd import add_all_shares, parts_for, project_bwd
from ..proj_rms_compute_h._triton_tiles import (
    alpha_columns,
    load_columns,
    mapping_bwd_tile,
    rms_coefficient_tile,
    store_interleaved_parts,
    store_parts,
)
from ..proj_rms_compute_h.config import g_parts
from ..sinkhorn._triton import sinkhorn_bwd, sinkhorn_bwd_tile, sinkhorn_load_tile, sinkhorn_store_tile
from ..sinkhorn.config import MAX_REGISTER_STREAMS_BWD
from . import config as tiles

__all__ = ["mhc_pre_bwd"]


@triton.jit
def logits_tile(raw, u, alpha_res_ptr, bias_ptr, n: tl.constexpr):
    """Sinkhorn's logits from the raw projection: tuples of n*n vectors."""
    alpha = widen(tl.load(alpha_res_ptr))
    logits = ()
    for k in tl.static_range(n * n):
        logits = logits + (raw[k] * alpha * u + widen(tl.load(bias_ptr + 2 * n + k)),)
    return logits


@triton.jit(
    do_not_specialize=[
        "count",
        "tiles",
        "grad_stride",
        "x_stride",
        "x_stream_stride",
        "stride_res",
        "rms_eps",
        "sinkhorn_eps",
    ]
)
def dots_kernel(
    x_ptr,
    grad_ptr,
    g_pre_ptr,
    proj_ptr,
    r_ptr,
    g_res_ptr,
    alpha_res_ptr,
    bias_ptr,
    logits_ptr,
    count: tl.int64,
    tiles: tl.int32,
    grad_stride: tl.int64,
    x_stride: tl.int64,
    x_stream_stride: tl.int64,
    stride_res: tl.int64,
    rms_eps: tl.float32,
    sinkhorn_eps: tl.float32,
    n: tl.constexpr,
    C: tl.constexpr,
    TOKENS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SEGMENT: tl.constexpr,
    PAPER: tl.constexpr,
    INSIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The first ``tiles`` programs write the gradient of the logits of TOKENS tokens each (``g_res_ptr``: that of the
    matrices); the others, one a token, that of its pre-mix."""
    lead()
    N: tl.constexpr = n * n + 2 * n
    program = tl.program_id(0)
    if program < tiles:
        if g_res_ptr is not None:
            rows = program.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
            row_mask = rows < count
            r = tl.load(r_ptr + rows, mask=row_mask, other=1.0)
            u = tl.div_rn(tl.full(r.shape, 1.0, tl.float32), r if INSIDE else r + rms_eps)
            raw = sinkhorn_load_tile(proj_ptr + 2 * n, N, rows, row_mask, n, 1)
            g_res = sinkhorn_load_tile(g_res_ptr, stride_res, rows, row_mask, n, 1)
            logits = logits_tile(raw, u, alpha_res_ptr, bias_ptr, n)
            g_logits = sinkhorn_bwd_tile(g_res, logits, sinkhorn_eps, n, ITERATIONS, PAPER, SEGMENT)
            sinkhorn_store_tile(logits_ptr, g_logits, rows, row_mask, n)
    elif grad_ptr is not None:
        aggregate_bwd_row(
            last_first(),
            grad_ptr,
            x_ptr,
            None,
            None,
            g_pre_ptr,
            grad_stride,
            x_stride,
            x_stream_stride,
            0,
            n,
            C,
            BLOCK,
            GROUP,
            VECTOR,
            ALIGN,
        )


@triton.jit(do_not_specialize=["count", "width", "stride_pre", "stride_post", "stride_res", "rms_eps"])
def mixes_bwd_kernel(
    proj_ptr,
    r_ptr,
    g_pre_ptr,
    g_post_ptr,
    g_res_ptr,
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
    rms_eps: tl.float32,
    n: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    G_PARTS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """``g_res_ptr``: gradient of Sinkhorn's logits."""
    follow()
    N: tl.constexpr = n * n + 2 * n
    tile = tl.program_id(0).to(tl.int64)
    rows = tile * TOKENS + tl.arange(0, TOKENS)
    row_mask = rows < count
    cols = tl.arange(0, COLUMNS)
    r = tl.load(r_ptr + rows, mask=row_mask, other=1.0)
    u = tl.div_rn(tl.full(r.shape, 1.0, tl.float32), r if INSIDE else r + rms_eps)
    g_mix = load_columns(g_pre_ptr, rows, row_mask, cols, stride_pre, n)
    g_mix += load_columns(g_post_ptr, rows, row_mask, cols - n, stride_post, n)
    g_mix += load_columns(g_res_ptr, rows, row_mask, cols - 2 * n, stride_res, n * n)
    alpha = alpha_columns(alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, cols, n)
    bias = widen(tl.load(bias_ptr + cols, mask=cols < N, other=0.0))
    proj = load_columns(proj_ptr, rows, row_mask, cols, N, N)
    factor = tl.where(cols < n, 1.0, tl.where(cols < 2 * n, 2.0, 0.0))
    g_proj, g_u, g_h, alpha_terms = mapping_bwd_tile(g_mix, factor[None, :], proj, u, alpha, bias)
    if INTERLEAVED:
        store_interleaved_parts(parts_ptr, g_proj, rows, row_mask, cols)
    else:
        store_parts(parts_ptr, g_proj, rows, row_mask, cols, COLUMNS, G_PARTS)
    tl.store(coefficient_ptr + rows, rms_coefficient_tile(0.0, g_u, u, r, width), mask=row_mask)
    share = share_ptr + tile * (2 * COLUMNS) + cols
    tl.store(share, tl.sum(alpha_terms, axis=0))
    tl.store(share + COLUMNS, tl.sum(g_h, axis=0))


_dots = Launcher(dots_kernel, follows=False)
_mixes_bwd = Launcher(mixes_bwd_kernel)


def _logits_gradient(
    g_h_res: Tensor | None,
    n: int,
    alpha_res: Tensor,
    bias: Tensor,
    proj: Tensor,
    r: Tensor,
    num_iterations: int,
    rms_eps: float,
    sinkhorn_eps: float,
    rms_eps_mode: str,
    variant: str,
) -> Tensor | None:
    """Gradient of Sinkhorn's logits by its own kernels, for more streams than a thread holds."""
    if g_h_res is None:
        return None
    u = 1.0 / (r + rms_eps if rms_eps_mode == "outside" else r)
    logits = proj[..., 2 * n :] * alpha_res.float() * u + bias[2 * n :].float()
    return sinkhorn_bwd(g_h_res, logits.unflatten(-1, (n, n)), num_iterations, sinkhorn_eps, variant)


def _dots_and_logits(
    g_layer_input: Tensor | None,
    g_h_res: Tensor | None,
    x: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    proj: Tensor,
    r: Tensor,
    num_iterations: int,
    rms_eps: float,
    sinkhorn_eps: float,
    rms_eps_mode: str,
    variant: str,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the pre-mix and of Sinkhorn's logits, each of what there is, in one launch."""
    *lead, n, width = x.shape
    count, device = r.numel(), x.device
    rows = heuristic(n, width, x.element_size())
    tokens = 32 * rows.num_warps  # a token is one thread's work
    g_pre, logits, mapping_tiles, programs = None, None, 0, 0
    grad, grad_stride, g_res, stride_res = None, 0, None, 0
    streams, x_stride = flatten(x, 2)
    if g_layer_input is not None:
        g_pre = torch.empty(*lead, n, dtype=torch.float32, device=device)
        grad, grad_stride = flatten(g_layer_input, 1)
        programs = count
    if g_h_res is not None:
        logits = torch.empty(*lead, n, n, dtype=torch.float32, device=device)
        g_res, stride_res = flatten(g_h_res, 2, dense=True)
        mapping_tiles = triton.cdiv(count, tokens)
    if not mapping_tiles + programs:
        return None, None
    align = alignment(width, grad_stride, x_stride, streams.stride(-2))
    _dots(
        (mapping_tiles + programs,),
        (
            streams,
            grad,
            g_pre,
            proj,
            r,
            g_res,
            alpha_res,
            bias.contiguous(),
            logits,
            count,
            mapping_tiles,
            grad_stride // align,
            x_stride // align,
            streams.stride(-2) // align,
            stride_res,
            rms_eps,
            sinkhorn_eps,
        ),
        (
            n,
            width,
            tokens,
            num_iterations,
            tiles.sinkhorn_segment(n),
            variant == "paper",
            rms_eps_mode == "inside",
            rows.block,
            rows.group,
            16 // x.element_size(),
            align,
        ),
        rows.num_warps,
    )
    return g_pre, logits


def mhc_pre_bwd(
    g_layer_input: Tensor | None,
    g_h_post: Tensor | None,
    g_h_res: Tensor | None,
    g_x_passed: Tensor | None,
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    h_pre: Tensor,
    proj: Tensor,
    r: Tensor,
    num_iterations: int,
    rms_eps: float,
    sinkhorn_eps: float,
    rms_eps_mode: str,
    variant: str,
    precision: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    # precision: the backward is as exact in both modes.
    inputs = (x, weight, alpha_pre, alpha_post, alpha_res, bias)
    *_, n, width = x.shape
    size, count = weight.shape[0], r.numel()
    if count == 0:
        return [
            torch.zeros(t.shape, dtype=t.dtype, device=x.device)
            for t, need in zip(inputs, needs, strict=True)
            if need
        ]
    mapping = (alpha_res, bias, proj, r, num_iterations, rms_eps, sinkhorn_eps, rms_eps_mode, variant)
    if n <= MAX_REGISTER_STREAMS_BWD:
        g_pre, g_res = _dots_and_logits(g_layer_input, g_h_res, x, *mapping)
    else:
        g_pre, g_res = None, _logits_gradient(g_h_res, n, *mapping)
        if g_layer_input is not None:
            (g_pre,) = h_aggregate_bwd(g_layer_input, x, h_pre, (False, True))
    flat_x = x.flatten(-2)
    grad = parts_for(flat_x, size, needs[0] and needs[1], g_layer_input, g_x_passed)
    mapping_tiles = triton.cdiv(count, tiles.MAPPING_TOKENS)
    mapping_shares = torch.empty((mapping_tiles, 2, grad.columns), dtype=torch.float32, device=x.device)
    rows = [
        (None, 0) if g is None else flatten(g, trailing, dense=True)
        for g, trailing in ((g_pre, 1), (g_h_post, 1), (g_res, 2))
    ]
    _mixes_bwd(
        (mapping_tiles,),
        (
            proj,
            r,
            *(g for g, _ in rows),
            alpha_pre,
            alpha_post,
            alpha_res,
            bias.contiguous(),
            grad.parts,
            grad.coefficient,
            mapping_shares,
            count,
            n * width,
            *(stride for _, stride in rows),
            rms_eps,
        ),
        (
            n,
            grad.columns,
            tiles.MAPPING_TOKENS,
            g_parts(x.dtype),
            grad.interleaved,
            rms_eps_mode == "inside",
        ),
        4,
    )
    g_x, shares = None, None
    if needs[0] or needs[1]:
        passed = None if g_x_passed is None else g_x_passed.flatten(-2)
        g_x, shares = project_bwd(
            flat_x,
            weight,
            grad,
            needs[0],
            needs[1],
            None if g_layer_input is None else h_pre,
            g_layer_input,
            passed,
        )
    totals = [
        torch.empty(t.shape, dtype=t.dtype, device=x.device) if need else None
        for t, need in zip(inputs[1:], needs[1:], strict=True)
    ]
    if any(needs[1:]):
        small = (totals[1], totals[2], totals[3], totals[4])
        add_all_shares(shares, totals[0], mapping_shares if any(needs[2:]) else None, small, n, size)
    found = [None if g_x is None else g_x.view(x.shape), *totals]
    return [g for g in found if g is not None]
