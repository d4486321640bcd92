"""`mhc_pre` in Triton, forward.

One launch reads the streams from memory once: its work items are the projection of a tile of tokens, cut along K, and
some tiles later the collapse of that tile's tokens, one program each, which finds the streams in the L2 cache. A
program takes the next item by a ticket, so whatever a collapse waits for was taken before it by a program that never
waits. A collapse makes its own pre-mix from the partial sums; a last small launch makes all mixes, Sinkhorn included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._triton_common import Launcher, alignment, elements, load_streams, store_columns, widen
from .._tuning import tuned
from ..h_aggregate._triton import aggregate_tile
from ..mega_mhc._triton_fwd import split_phi
from ..mega_mhc._triton_tiles import add_products, load_parts, split
from ..proj_rms_compute_h._triton_tiles import ORDER, PARTS, alpha_columns, mapping_tile, rms_tile
from ..sinkhorn._triton import sinkhorn_fwd, sinkhorn_load_tile, sinkhorn_store_tile, sinkhorn_tile
from ..sinkhorn.config import MAX_REGISTER_STREAMS
from . import config as tiles
from ._triton_bwd import mhc_pre_bwd

__all__ = ["mhc_pre_bwd", "mhc_pre_fwd"]


@triton.jit
def project_span_tile(
    x_ptr,
    weight_ptr,
    partial_ptr,
    square_ptr,
    rows,
    row_mask,
    begin,
    end,
    N: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    RATIO: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
):
    """Leaves ``begin`` to ``end`` (RATIO steps each), as far as K goes, of the projection of ``rows`` and of their sums
    of squares.

    ``weight_ptr``: the bf16 parts of the weight, ``[W_PARTS, N, K]``. Leaves are added in order."""
    cols = tl.arange(0, COLUMNS)
    proj = tl.zeros((rows.shape[0], COLUMNS), tl.float32)
    square = tl.zeros((rows.shape[0],), tl.float32)
    leaf = proj
    leaf_square = square
    x_rows = x_ptr + rows[:, None] * K
    w_cols = cols[None, :] * K
    for step in range(begin * RATIO, tl.minimum(end * RATIO, (K + STEP - 1) // STEP)):
        k = step * STEP + tl.arange(0, STEP)
        x_mask = row_mask[:, None]
        w_mask = cols[None, :] < N
        if K % (STEP * RATIO) != 0:
            x_mask = x_mask & (k[None, :] < K)
            w_mask = w_mask & (k[:, None] < K)
        x = tl.load(x_rows + k[None, :], mask=x_mask, other=0.0)
        w = load_parts(weight_ptr, N * K, w_cols + k[:, None], w_mask, W_PARTS)
        leaf += add_products(split(x, X_PARTS), w, tl.zeros_like(proj), X_PARTS, W_PARTS, 3)
        value = widen(x)
        leaf_square += tl.sum(value * value, axis=1)
        last = step % RATIO == RATIO - 1
        proj = tl.where(last, proj + leaf, proj)
        square = tl.where(last, square + leaf_square, square)
        leaf = tl.where(last, 0.0, leaf)
        leaf_square = tl.where(last, 0.0, leaf_square)
    proj += leaf
    square += leaf_square
    tl.store(
        partial_ptr + rows[:, None] * N + cols[None, :], proj, mask=row_mask[:, None] & (cols[None, :] < N)
    )
    tl.store(square_ptr + rows, square, mask=row_mask)


@triton.jit
def collect_span_tile(
    partial_ptr,
    square_ptr,
    rows,
    row_mask,
    cols,
    col_mask,
    count,
    N: tl.constexpr,
    PARTIALS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Projection ``[rows, cols]`` and sum of squares from the partial sums, first to last. UNROLL: all loads are under
    way at once, for a program that waits for them; the sums are the same."""
    at = partial_ptr + rows[:, None] * N + cols[None, :]
    mask = row_mask[:, None] & col_mask[None, :]
    proj = tl.load(at, mask=mask, other=0.0)
    square = tl.load(square_ptr + rows, mask=row_mask, other=0.0)
    if UNROLL:
        for index in tl.static_range(1, PARTIALS):
            proj += tl.load(at + index * count * N, mask=mask, other=0.0)
            square += tl.load(square_ptr + index * count + rows, mask=row_mask, other=0.0)
    else:
        for index in range(1, PARTIALS):
            proj += tl.load(at + index * count * N, mask=mask, other=0.0)
            square += tl.load(square_ptr + index * count + rows, mask=row_mask, other=0.0)
    return proj, square


@triton.jit
def mixes_tile(
    proj,
    square,
    alpha_pre_ptr,
    alpha_post_ptr,
    alpha_res_ptr,
    bias_ptr,
    cols,
    eps,
    compute_h_eps,
    n: tl.constexpr,
    K: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Every column's mix (Sinkhorn's as logits), and the RMS."""
    N: tl.constexpr = n * n + 2 * n
    u, r = rms_tile(square, tl.full((), K, tl.int64), eps, INSIDE)
    alpha = alpha_columns(alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, cols, n)
    bias = widen(tl.load(bias_ptr + cols, mask=cols < N, other=0.0))
    return mapping_tile(proj * alpha[None, :] * u[:, None] + bias[None, :], cols, compute_h_eps, n), r


@triton.jit(
    do_not_specialize=[
        "count",
        "stride",
        "stream_stride",
        "lag",
        "token_tiles",
        "per_span",
        "eps",
        "compute_h_eps",
    ]
)
def pre_kernel(
    x_ptr,
    weight_ptr,
    alpha_pre_ptr,
    alpha_post_ptr,
    alpha_res_ptr,
    bias_ptr,
    layer_ptr,
    partial_ptr,
    square_ptr,
    counter_ptr,
    count: tl.int64,
    stride: tl.int64,
    stream_stride: tl.int64,
    lag: tl.int32,
    token_tiles: tl.int32,
    per_span: tl.int32,
    eps: tl.float32,
    compute_h_eps: tl.float32,
    n: tl.constexpr,
    C: tl.constexpr,
    PARTIALS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    INSIDE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """``counter_ptr``: the ticket, then for every tile how many of its projections are done.

    Tickets come in rounds: PARTIALS projections of tile ``round``, then TOKENS collapses of tile ``round - lag``.
    """
    N: tl.constexpr = n * n + 2 * n
    FULL: tl.constexpr = C % BLOCK == 0
    ticket = tl.atomic_add(counter_ptr, 1, sem="relaxed").to(tl.int64)
    turn = ticket // (PARTIALS + TOKENS)
    place = ticket - turn * (PARTIALS + TOKENS)
    if place < PARTIALS:
        if turn < token_tiles:
            rows = turn * TOKENS + tl.arange(0, TOKENS)
            project_span_tile(
                x_ptr,
                weight_ptr,
                partial_ptr + place * count * N,
                square_ptr + place * count,
                rows,
                rows < count,
                place * per_span,
                place * per_span + per_span,
                N,
                n * C,
                COLUMNS,
                STEP,
                RATIO,
                X_PARTS,
                W_PARTS,
            )
            tl.debug_barrier()
            tl.atomic_add(counter_ptr + 1 + turn, 1, sem="release")
    else:
        tile = turn - lag
        token = tile * TOKENS + place - PARTIALS
        if (tile >= 0) & (token < count):
            while tl.atomic_add(counter_ptr + 1 + tile, 0, sem="acquire") < PARTIALS:
                pass
            cols = tl.arange(0, COLUMNS)
            rows = token + tl.arange(0, 1)
            proj, square = collect_span_tile(
                partial_ptr, square_ptr, rows, rows < count, cols, cols < n, count, N, PARTIALS, True
            )
            mixes, _ = mixes_tile(
                proj,
                square,
                alpha_pre_ptr,
                alpha_post_ptr,
                alpha_res_ptr,
                bias_ptr,
                cols,
                eps,
                compute_h_eps,
                n,
                n * C,
                INSIDE,
            )
            weights = ()
            for i in tl.static_range(n):
                weights = weights + (tl.sum(tl.sum(tl.where(cols[None, :] == i, mixes, 0.0), 1), 0),)
            row = x_ptr + token * elements(stride, ALIGN)
            for start in range(0, C, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                streams = load_streams(row, elements(stream_stride, ALIGN), columns, n, C, FULL)
                store_columns(layer_ptr + token * C, columns, aggregate_tile(streams, weights, n), C, FULL)


@triton.jit(do_not_specialize=["count", "eps", "compute_h_eps", "sinkhorn_eps"])
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
    eps: tl.float32,
    compute_h_eps: tl.float32,
    sinkhorn_eps: tl.float32,
    n: tl.constexpr,
    C: tl.constexpr,
    PARTIALS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
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
    proj, square = collect_span_tile(
        partial_ptr, square_ptr, rows, row_mask, cols, cols < N, count, N, PARTIALS, False
    )
    mixes, r = mixes_tile(
        proj,
        square,
        alpha_pre_ptr,
        alpha_post_ptr,
        alpha_res_ptr,
        bias_ptr,
        cols,
        eps,
        compute_h_eps,
        n,
        n * C,
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


_pre = Launcher(pre_kernel)
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
    layer_input = torch.empty(*lead, width, dtype=x.dtype, device=x.device)
    shapes = ((n,), (n, n), (n,), (size,), (1,))
    mixes = [torch.empty(*lead, *shape, dtype=torch.float32, device=x.device) for shape in shapes]
    results = (layer_input, *mixes)
    count = mixes[-1].numel()
    if count == 0:
        return results
    streams = x.contiguous()
    chosen = tuned("mhc_pre_fwd", x.device, tiles.heuristic, tiles.candidates, n, width)
    columns, per_span = tiles.columns(n), tiles.span(n * width)
    partials, token_tiles = triton.cdiv(n * width, per_span), triton.cdiv(count, chosen.tokens)
    counters = torch.empty(1 + token_tiles, dtype=torch.int32, device=x.device)
    w_parts = min(PARTS[weight.dtype], ORDER[precision])
    parts = split_phi(weight, w_parts, counters)
    partial = torch.empty(partials, count, size, dtype=torch.float32, device=x.device)
    square = torch.empty(partials, count, dtype=torch.float32, device=x.device)
    mapping = (alpha_pre, alpha_post, alpha_res, bias.contiguous())
    lag = min(chosen.lag, token_tiles)
    inside, paper = rms_eps_mode == "inside", variant == "paper"
    align = alignment(width)
    _pre(
        ((token_tiles + lag) * (partials + chosen.tokens),),
        (
            streams,
            parts,
            *mapping,
            layer_input,
            partial,
            square,
            counters,
            count,
            n * width // align,
            width // align,
            lag,
            token_tiles,
            per_span // tiles.LEAF,
            rms_eps,
            compute_h_eps,
        ),
        (
            n,
            width,
            partials,
            chosen.tokens,
            columns,
            tiles.STEP,
            tiles.LEAF // tiles.STEP,
            chosen.block,
            PARTS[x.dtype],
            w_parts,
            inside,
            align,
        ),
        chosen.num_warps,
        chosen.num_stages,
    )
    narrow = n <= MAX_REGISTER_STREAMS
    _mixes(
        (triton.cdiv(count, tiles.MAPPING_TOKENS),),
        (partial, square, *mapping, *mixes, count, rms_eps, compute_h_eps, sinkhorn_eps),
        (
            n,
            width,
            partials,
            columns,
            tiles.MAPPING_TOKENS,
            num_iterations,
            paper,
            inside,
            narrow,
        ),
        1,
    )
    if not narrow:
        mixes[1] = sinkhorn_fwd(mixes[1], num_iterations, sinkhorn_eps, variant)
    return (layer_input, *mixes)
