"""The single pass in Triton, backward.

1. The mixes: Sinkhorn, sigmoids and scale back to the raw projection, kept as bf16 parts, and to the factor of the new
   streams in their own gradient; T x N numbers.
2. One read of the new streams and of the gradient of the block input, by columns: shares of g_phi and g_norm_weight
   for every chunk of tokens, and each token's sum for the RMSNorm.
3. One read of all that touches the state, by tokens: the gradient of the new streams is made in registers, and with it
   everything that goes to the site before. The new streams are made again from their inputs.
4. The shares are added in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import device_info
from .._triton_common import INTERPRETING, Launcher, alignment, cast, flatten, store, widen
from ..proj_rms_compute_h._triton_bwd import add_shares, g_parts
from ..proj_rms_compute_h._triton_tiles import (
    PARTS,
    alpha_columns,
    load_columns,
    mapping_bwd_tile,
    store_interleaved_parts,
    store_parts,
)
from ..sinkhorn._triton import sinkhorn_bwd, sinkhorn_bwd_tile, sinkhorn_load_tile, sinkhorn_store_tile
from ..sinkhorn.config import heuristic as sinkhorn_heuristic
from . import config as tiles
from ._triton_fwd import State, aligned_rows, read_entry, read_state, split_phi
from ._triton_tiles import (
    add_products,
    load_mixes,
    load_parts,
    load_streams,
    mixed_tile,
    split,
    update_tile,
)

__all__ = ["mega_mhc_bwd", "mega_mhc_entry_bwd", "mega_mhc_exit_bwd"]


@triton.jit
def logits_tile(proj, u, alpha_ptr, bias_ptr, n: tl.constexpr):
    """Sinkhorn's logits from the raw projection: tuples of n*n vectors."""
    scale = widen(tl.load(alpha_ptr + 2))
    logits = ()
    for k in tl.static_range(n * n):
        logits = logits + (proj[k] * u * scale + widen(tl.load(bias_ptr + 2 * n + k)),)
    return logits


@triton.jit(do_not_specialize=["count", "stride_pre", "stride_post", "stride_res", "hc_eps"])
def mixes_bwd_kernel(
    proj_ptr,
    u_ptr,
    g_pre_ptr,
    g_post_ptr,
    g_res_ptr,
    alpha_ptr,
    bias_ptr,
    logits_ptr,
    parts_ptr,
    coefficient_ptr,
    share_ptr,
    count: tl.int64,
    stride_pre: tl.int64,
    stride_post: tl.int64,
    stride_res: tl.int64,
    hc_eps: tl.float32,
    n: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SEGMENT: tl.constexpr,
    G_PARTS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """``logits_ptr``: the gradient of Sinkhorn's logits, ``[T, n*n]``; made here where ``g_res_ptr`` is given."""
    N: tl.constexpr = n * n + 2 * n
    tile = tl.program_id(0).to(tl.int64)
    rows = tile * TOKENS + tl.arange(0, TOKENS)
    row_mask = rows < count
    cols = tl.arange(0, COLUMNS)
    u = tl.load(u_ptr + rows, mask=row_mask, other=0.0)
    if g_res_ptr is not None:
        raw = sinkhorn_load_tile(proj_ptr + 2 * n, N, rows, row_mask, n, 1)
        g_res = sinkhorn_load_tile(g_res_ptr, stride_res, rows, row_mask, n, 1)
        logits = logits_tile(raw, u, alpha_ptr, bias_ptr, n)
        g_logits = sinkhorn_bwd_tile(g_res, logits, hc_eps, n, ITERATIONS, False, SEGMENT)
        # Sinkhorn holds a token in one thread: its gradient changes hands through memory.
        sinkhorn_store_tile(logits_ptr, g_logits, rows, row_mask, n)
        tl.debug_barrier()
    alpha = alpha_columns(alpha_ptr, alpha_ptr + 1, alpha_ptr + 2, cols, n)
    bias = widen(tl.load(bias_ptr + cols, mask=cols < N, other=0.0))
    scaled = load_columns(proj_ptr, rows, row_mask, cols, N, N) * u[:, None]
    g_mix = load_columns(g_pre_ptr, rows, row_mask, cols, stride_pre, n)
    g_mix += load_columns(g_post_ptr, rows, row_mask, cols - n, stride_post, n)
    if logits_ptr is not None:
        g_mix += load_columns(logits_ptr, rows, row_mask, cols - 2 * n, n * n, n * n)
    factor = tl.where(cols < n, 1.0, tl.where(cols < 2 * n, 2.0, 0.0))
    one = tl.zeros_like(u) + 1.0
    g_scaled, g_u, g_h, alpha_terms = mapping_bwd_tile(g_mix, factor[None, :], scaled, one, alpha, bias)
    if INTERLEAVED:
        store_interleaved_parts(parts_ptr, g_scaled * u[:, None], rows, row_mask, cols)
    else:
        store_parts(parts_ptr, g_scaled * u[:, None], rows, row_mask, cols, COLUMNS, G_PARTS)
    tl.store(coefficient_ptr + rows, -(u * u / (n * C)) * g_u, mask=row_mask)
    share = share_ptr + tile * (2 * COLUMNS) + cols
    tl.store(share, tl.sum(alpha_terms, axis=0))
    tl.store(share + COLUMNS, tl.sum(g_h, axis=0))


@triton.jit
def new_streams_tile(
    output_ptr,
    residual_ptr,
    post_ptr,
    mixing_ptr,
    rows,
    row_mask,
    mask,
    columns,
    stride_output,
    stride_residual,
    stream_stride,
    stride_post,
    stride_mixing,
    n: tl.constexpr,
    REMAKE: tl.constexpr,
):
    """The new streams, made again by step 1 (REMAKE) or read from ``residual_ptr``."""
    streams = load_streams(residual_ptr, stream_stride, rows[:, None] * stride_residual + columns, mask, n)
    if REMAKE:
        mixing = load_mixes(mixing_ptr, stride_mixing, rows, row_mask, n * n)
        post = load_mixes(post_ptr, stride_post, rows, row_mask, n)
        output = tl.load(output_ptr + rows[:, None] * stride_output + columns, mask=mask, other=0.0)
        return update_tile(streams, output, mixing, post, n, residual_ptr.dtype.element_ty)
    else:
        return streams


@triton.jit
def store_sums(pointer, sums, rows, row_mask, cols, COUNT: tl.constexpr):
    """Write the first COUNT sums of every token."""
    at = pointer + rows[:, None] * COUNT + cols[None, :]
    store(at, sums, row_mask[:, None] & (cols[None, :] < COUNT))


@triton.jit
def load_mix(pointer, row_mask):
    """One number of every token, as a column in fp32."""
    return widen(tl.load(pointer, mask=row_mask, other=0.0))[:, None]


@triton.jit
def new_stream_tile(streams, output, mixing_ptr, post_ptr, j, row_mask, n: tl.constexpr):
    """Stream j after step 1: `update_tile`'s, bit for bit."""
    total = load_mix(mixing_ptr + j, row_mask) * widen(streams[0])
    for i in tl.static_range(1, n):
        total = total + load_mix(mixing_ptr + i * n + j, row_mask) * widen(streams[i])
    return cast(total + load_mix(post_ptr + j, row_mask) * widen(output), streams[0].dtype)


@triton.jit
def transposed(tiles, COUNT: tl.constexpr):
    """Each tile transposed."""
    turned = ()
    for k in tl.static_range(COUNT):
        turned = turned + (tl.trans(tiles[k]),)
    return turned


@triton.jit
def collapse_tile(streams, pre_ptr, stride_pre, rows, row_mask, n: tl.constexpr, ENTRY: tl.constexpr):
    """``mixed``, by the pre-mix or (ENTRY) stream 0."""
    if ENTRY:
        return widen(streams[0])
    else:
        return mixed_tile(streams, load_mixes(pre_ptr, stride_pre, rows, row_mask, n), n)


@triton.jit(
    do_not_specialize=[
        "count",
        "stride_output",
        "stride_residual",
        "stream_stride",
        "stride_pre",
        "stride_post",
        "stride_mixing",
        "stride_block",
    ]
)
def norm_bwd_kernel(
    residual_ptr,
    output_ptr,
    pre_ptr,
    post_ptr,
    mixing_ptr,
    norm_weight_ptr,
    g_block_ptr,
    rstd_ptr,
    parts_ptr,
    mean_ptr,
    phi_share_ptr,
    weight_share_ptr,
    count: tl.int64,
    stride_output: tl.int64,
    stride_residual: tl.int64,
    stream_stride: tl.int64,
    stride_pre: tl.int64,
    stride_post: tl.int64,
    stride_mixing: tl.int64,
    stride_block: tl.int64,
    n: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    REMAKE: tl.constexpr,
    ENTRY: tl.constexpr,
    G_PARTS: tl.constexpr,
    X_PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some columns of all streams, one chunk of tokens. ``mean_ptr [blocks, T]``: sums over these columns of the
    gradient before the norm weight times ``mixed``."""
    N: tl.constexpr = n * n + 2 * n
    block, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c = block * WIDTH + tl.arange(0, WIDTH)
    columns = c[None, :]
    cols = tl.arange(0, COLUMNS)
    if norm_weight_ptr is not None:
        norm_weight = widen(tl.load(norm_weight_ptr + c, mask=c < C, other=0.0))
    shares = ()
    if phi_share_ptr is not None:
        for _ in tl.static_range(n):
            shares = shares + (tl.zeros((COLUMNS, WIDTH), tl.float32),)
    weight_share = tl.zeros((TOKENS, WIDTH), tl.float32)
    last = tl.minimum(chunk * CHUNK + CHUNK, count)
    for first in tl.range(chunk * CHUNK, last, TOKENS, num_stages=STAGES):
        rows = first + tl.arange(0, TOKENS)
        row_mask = rows < last
        mask = row_mask[:, None]
        if C % WIDTH != 0:
            mask = mask & (columns < C)
        streams = new_streams_tile(
            output_ptr,
            residual_ptr,
            post_ptr,
            mixing_ptr,
            rows,
            row_mask,
            mask,
            columns,
            stride_output * ALIGN,
            stride_residual * ALIGN,
            stream_stride * ALIGN,
            stride_post,
            stride_mixing,
            n,
            REMAKE,
        )
        if g_block_ptr is not None:
            mixed = collapse_tile(streams, pre_ptr, stride_pre, rows, row_mask, n, ENTRY)
            g_at = g_block_ptr + rows[:, None] * (stride_block * ALIGN) + columns
            g_block = widen(tl.load(g_at, mask=mask, other=0.0))
            if weight_share_ptr is not None:
                rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
                weight_share = tl.fma(g_block, mixed * rstd[:, None], weight_share)
            if norm_weight_ptr is not None:
                g_block = g_block * norm_weight[None, :]
            tl.store(mean_ptr + block * count + rows, tl.sum(g_block * mixed, axis=1), mask=row_mask)
        if phi_share_ptr is not None:
            parts_at = rows[:, None] * (G_PARTS * COLUMNS) + cols[None, :]
            g = transposed(load_parts(parts_ptr, COLUMNS, parts_at, row_mask[:, None], G_PARTS), G_PARTS)
            added = ()
            for j in tl.static_range(n):
                share = add_products(g, split(streams[j], X_PARTS), shares[j], G_PARTS, X_PARTS, 3)
                added = added + (share,)
            shares = added
    if weight_share_ptr is not None:
        tl.store(weight_share_ptr + chunk * C + c, tl.sum(weight_share, axis=0), mask=c < C)
    if phi_share_ptr is not None:
        share_mask = (cols[:, None] < N) & (columns < C)
        for j in tl.static_range(n):
            at = (chunk * N + cols[:, None]) * (n * C) + j * C + columns
            tl.store(phi_share_ptr + at, shares[j], mask=share_mask)


@triton.jit(
    do_not_specialize=[
        "count",
        "stride_output",
        "stride_residual",
        "stream_stride",
        "stride_pre",
        "stride_post",
        "stride_mixing",
        "stride_new",
        "stream_stride_new",
        "stride_block",
        "blocks",
    ]
)
def state_bwd_kernel(
    residual_ptr,
    output_ptr,
    pre_ptr,
    post_ptr,
    mixing_ptr,
    norm_weight_ptr,
    g_new_ptr,
    g_block_ptr,
    rstd_ptr,
    mean_ptr,
    parts_ptr,
    phi_ptr,
    coefficient_ptr,
    g_output_ptr,
    g_residual_ptr,
    g_pre_ptr,
    g_post_ptr,
    g_mixing_ptr,
    count: tl.int64,
    stride_output: tl.int64,
    stride_residual: tl.int64,
    stream_stride: tl.int64,
    stride_pre: tl.int64,
    stride_post: tl.int64,
    stride_mixing: tl.int64,
    stride_new: tl.int64,
    stream_stride_new: tl.int64,
    stride_block: tl.int64,
    blocks: tl.int32,
    n: tl.constexpr,
    C: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENTRY: tl.constexpr,
    G_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """All columns of some tokens, stream after stream. ``phi_ptr``: bf16 parts of phi (None: nothing comes through the
    mixes). At the entry ``g_residual_ptr`` is that of x."""
    N: tl.constexpr = n * n + 2 * n
    SQUARE: tl.constexpr = triton.next_power_of_2(n * n)
    NEEDS_TOTAL: tl.constexpr = (
        g_output_ptr is not None
        or g_residual_ptr is not None
        or g_post_ptr is not None
        or g_mixing_ptr is not None
    )
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row_mask = rows < count
    cols = tl.arange(0, COLUMNS)
    stream = tl.arange(0, SQUARE)
    residual_rows = rows[:, None] * (stride_residual * ALIGN)
    if g_block_ptr is not None:
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        mean = tl.zeros((TOKENS,), tl.float32)
        for block in range(blocks):
            mean += tl.load(mean_ptr + block * count + rows, mask=row_mask, other=0.0)
        rstd = rstd[:, None]
        mean = mean[:, None] * rstd / C
    if phi_ptr is not None:
        parts_at = rows[:, None] * (G_PARTS * COLUMNS) + cols[None, :]
        g_parts = load_parts(parts_ptr, COLUMNS, parts_at, row_mask[:, None], G_PARTS)
        coefficient = tl.load(coefficient_ptr + rows, mask=row_mask, other=0.0)[:, None]
    pre_sums = tl.zeros((TOKENS, SQUARE), tl.float32)
    post_sums = tl.zeros((TOKENS, SQUARE), tl.float32)
    mixing_sums = tl.zeros((TOKENS, SQUARE), tl.float32)
    for first in range(0, C, WIDTH):
        c = first + tl.arange(0, WIDTH)
        columns = c[None, :]
        mask = row_mask[:, None] & (columns < C)
        streams = load_streams(residual_ptr, stream_stride * ALIGN, residual_rows + columns, mask, n)
        output = streams[0]
        if not ENTRY:
            output_at = rows[:, None] * (stride_output * ALIGN) + columns
            output = tl.load(output_ptr + output_at, mask=mask, other=0.0)
        if g_block_ptr is not None:
            mixed = widen(streams[0])
            if not ENTRY:
                mixed = tl.zeros((TOKENS, WIDTH), tl.float32)
                for j in range(n):
                    new = new_stream_tile(
                        streams,
                        output,
                        mixing_ptr + rows * stride_mixing,
                        post_ptr + rows * stride_post,
                        j,
                        row_mask,
                        n,
                    )
                    mixed += load_mix(pre_ptr + rows * stride_pre + j, row_mask) * widen(new)
            block_at = rows[:, None] * (stride_block * ALIGN) + columns
            g_mixed = widen(tl.load(g_block_ptr + block_at, mask=mask, other=0.0))
            if norm_weight_ptr is not None:
                g_mixed = g_mixed * widen(tl.load(norm_weight_ptr + c, mask=c < C, other=0.0))[None, :]
            g_mixed = rstd * (g_mixed - mixed * rstd * mean)
        g_output = tl.zeros((TOKENS, WIDTH), tl.float32)
        grads = ()
        for i in tl.static_range(n):
            grads = grads + (g_output,)
        for j in range(n):
            new = streams[0]
            if not ENTRY:
                new = new_stream_tile(
                    streams,
                    output,
                    mixing_ptr + rows * stride_mixing,
                    post_ptr + rows * stride_post,
                    j,
                    row_mask,
                    n,
                )
            if g_pre_ptr is not None and g_block_ptr is not None:
                dot = tl.sum(g_mixed * widen(new), axis=1)[:, None]
                pre_sums += tl.where(stream[None, :] == j, dot, 0.0)
            if NEEDS_TOTAL:
                total = tl.zeros((TOKENS, WIDTH), tl.float32)
                if phi_ptr is not None:
                    w_at = cols[:, None] * (n * C) + j * C + columns
                    w_mask = (cols[:, None] < N) & (columns < C)
                    w = load_parts(phi_ptr, N * n * C, w_at, w_mask, W_PARTS)
                    total = add_products(g_parts, w, total, G_PARTS, W_PARTS, G_PARTS)
                    total += coefficient * widen(new)
                if g_block_ptr is not None:
                    if ENTRY:
                        total += tl.where(j == 0, g_mixed, 0.0)
                    else:
                        total += load_mix(pre_ptr + rows * stride_pre + j, row_mask) * g_mixed
                if g_new_ptr is not None:
                    new_at = rows[:, None] * (stride_new * ALIGN) + j * (stream_stride_new * ALIGN) + columns
                    total += widen(tl.load(g_new_ptr + new_at, mask=mask, other=0.0))
                if ENTRY:
                    g_output += total
                else:
                    g_output += load_mix(post_ptr + rows * stride_post + j, row_mask) * total
                    if g_post_ptr is not None:
                        dot = tl.sum(total * widen(output), axis=1)[:, None]
                        post_sums += tl.where(stream[None, :] == j, dot, 0.0)
                    added = ()
                    for i in tl.static_range(n):
                        mixing = load_mix(mixing_ptr + rows * stride_mixing + i * n + j, row_mask)
                        added = added + (grads[i] + mixing * total,)
                        if g_mixing_ptr is not None:
                            dot = tl.sum(widen(streams[i]) * total, axis=1)[:, None]
                            mixing_sums += tl.where(stream[None, :] == i * n + j, dot, 0.0)
                    grads = added
        if ENTRY:
            store(g_residual_ptr + rows[:, None] * C + columns, g_output, mask)
        else:
            if g_residual_ptr is not None:
                for i in tl.static_range(n):
                    store(g_residual_ptr + (rows[:, None] * n + i) * C + columns, grads[i], mask)
            if g_output_ptr is not None:
                store(g_output_ptr + rows[:, None] * C + columns, g_output, mask)
    if g_pre_ptr is not None:
        store_sums(g_pre_ptr, pre_sums, rows, row_mask, stream, n)
    if g_post_ptr is not None:
        store_sums(g_post_ptr, post_sums, rows, row_mask, stream, n)
    if g_mixing_ptr is not None:
        store_sums(g_mixing_ptr, mixing_sums, rows, row_mask, stream, n * n)


@triton.jit(do_not_specialize=["shares"])
def add_mixes_shares_kernel(
    share_ptr,
    g_alpha_ptr,
    g_bias_ptr,
    shares: tl.int64,
    n: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of alpha and bias from the shares ``[shares, 2, COLUMNS]``; None where not needed."""
    N: tl.constexpr = n * n + 2 * n
    cols = tl.arange(0, COLUMNS)
    alpha = tl.zeros((ROWS, COLUMNS), tl.float32)
    bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, shares, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = share_ptr + rows[:, None] * (2 * COLUMNS) + cols[None, :]
        alpha += tl.load(at, mask=rows[:, None] < shares, other=0.0)
        bias += tl.load(at + COLUMNS, mask=rows[:, None] < shares, other=0.0)
    if g_alpha_ptr is not None:
        terms = tl.sum(alpha, axis=0)
        store(g_alpha_ptr, tl.sum(tl.where(cols < n, terms, 0.0)))
        store(g_alpha_ptr + 1, tl.sum(tl.where((cols >= n) & (cols < 2 * n), terms, 0.0)))
        store(g_alpha_ptr + 2, tl.sum(tl.where(cols >= 2 * n, terms, 0.0)))
    if g_bias_ptr is not None:
        store(g_bias_ptr + cols, tl.sum(bias, axis=0), mask=cols < N)


_mixes_bwd = Launcher(mixes_bwd_kernel)
_norm_bwd = Launcher(norm_bwd_kernel)
_state_bwd = Launcher(state_bwd_kernel)
_add_mixes_shares = Launcher(add_mixes_shares_kernel)


def _zeros(inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
    return [
        torch.zeros(t.shape, dtype=t.dtype, device=t.device)
        for t, need in zip(inputs, needs, strict=True)
        if t is not None and need
    ]


class _Through(NamedTuple):
    """What the mixes leave for the gradient of the new streams: bf16 parts of that of the raw projection, ``[T, G_PARTS,
    COLUMNS]`` or interleaved ``[T, 64]``, factors ``[T]``, and the shares of g_alpha and g_bias ``[tiles, 2, COLUMNS]``.
    """

    parts: Tensor
    coefficient: Tensor
    shares: Tensor


def _mixes_gradients(
    grads: Sequence[Tensor | None],
    alpha: Tensor,
    bias: Tensor,
    proj: Tensor,
    u: Tensor,
    n: int,
    width: int,
    dtype: torch.dtype,
    hc_eps: float,
    num_iters: int,
    interleaved: bool = False,
) -> _Through | None:
    """Step 1; None when no mix has a gradient."""
    if all(g is None for g in grads):
        return None
    count, device = u.numel(), u.device
    columns = 32 if interleaved else tiles.columns(n)
    mapping_tiles = triton.cdiv(count, tiles.MAPPING_TOKENS)
    g_pre, g_post, g_res = grads
    logits = None
    if g_res is not None and n > tiles.MAX_FUSED_SINKHORN:
        raw = proj.view(count, -1)[:, 2 * n :] * u.view(count, 1)
        logits = torch.addcmul(bias[2 * n :].float(), raw, alpha[2].float()).view(count, n, n)
        logits = sinkhorn_bwd(g_res.reshape(count, n, n), logits, num_iters, hc_eps, "softmax")
        g_res = None
    elif g_res is not None:
        logits = torch.empty(count, n * n, dtype=torch.float32, device=device)
    rows = [
        (None, 0) if g is None else flatten(g, trailing, dense=True)
        for g, trailing in ((g_pre, 1), (g_post, 1), (g_res, 2))
    ]
    shape = (count, 64) if interleaved else (count, g_parts(dtype), columns)
    parts = torch.empty(shape, dtype=torch.bfloat16, device=device)
    coefficient = torch.empty(count, dtype=torch.float32, device=device)
    shares = torch.empty(mapping_tiles, 2, columns, dtype=torch.float32, device=device)
    _mixes_bwd(
        (mapping_tiles,),
        (
            proj,
            u,
            *(g for g, _ in rows),
            alpha.contiguous(),
            bias.contiguous(),
            logits,
            parts,
            coefficient,
            shares,
            count,
            *(stride for _, stride in rows),
            hc_eps,
        ),
        (
            n,
            width,
            columns,
            tiles.MAPPING_TOKENS,
            num_iters,
            sinkhorn_heuristic(min(n, tiles.MAX_FUSED_SINKHORN), False).segment,
            g_parts(dtype),
            interleaved,
        ),
        1,
    )
    return _Through(parts, coefficient, shares)


def _site_gradients(
    state: State,
    streams: State,
    n: int,
    g_new: Tensor | None,
    g_block: Tensor | None,
    norm_weight: Tensor | None,
    rstd: Tensor,
    through: _Through | None,
    phi: Tensor | None,
    outs: Sequence[Tensor | None],
    need_phi: bool,
    need_norm_weight: bool,
) -> list[Tensor | None]:
    """Steps 2 and 3: fills ``outs`` (gradients of output, residual or x, pre, post and mixing), returns those of phi
    and norm_weight.

    ``streams``: where step 2 reads the new streams: as they are (no output), or as the state that makes them again.
    """
    count, device = rstd.numel(), rstd.device
    width, dtype = state.residual.shape[-1], state.residual.dtype
    chosen = tiles.heuristic(n, width)
    needs_state = any(t is not None for t in outs)
    g_rows, stride_block = (None, 0) if g_block is None else aligned_rows(g_block, 1)
    scale = None if norm_weight is None else aligned_rows(norm_weight, 1)[0]
    align = alignment(width)
    parts, coefficient = (None, None) if through is None else (through.parts, through.coefficient)
    blocks, chunks = triton.cdiv(width, chosen.norm_width), triton.cdiv(count, tiles.CHUNK)
    need_phi = need_phi and through is not None
    need_norm_weight = need_norm_weight and g_rows is not None
    mean = phi_shares = weight_shares = None
    if g_rows is not None:
        mean = torch.empty(blocks, count, dtype=torch.float32, device=device)
    if need_phi:
        assert phi is not None
        phi_shares = torch.empty(chunks, *phi.shape, dtype=torch.float32, device=device)
    if need_norm_weight:
        weight_shares = torch.empty(chunks, width, dtype=torch.float32, device=device)
    if need_phi or need_norm_weight or (g_rows is not None and needs_state):
        _norm_bwd(
            (blocks, chunks),
            (
                streams.residual,
                streams.output,
                state.pre,
                streams.post,
                streams.mixing,
                scale,
                g_rows,
                rstd,
                parts,
                mean,
                phi_shares,
                weight_shares,
                count,
                *(stride // align for stride in streams.wide),
                state.narrow[0],
                *streams.narrow[1:],
                stride_block // align,
            ),
            (
                n,
                width,
                tiles.CHUNK,
                chosen.norm_tokens,
                chosen.norm_width,
                tiles.columns(n),
                streams.output is not None,
                state.output is None,
                g_parts(dtype),
                PARTS[dtype],
                align,
                chosen.stages,
            ),
            chosen.norm_warps,
            chosen.stages,
        )
    if needs_state:
        stride_new = stream_stride_new = 0
        g_new_rows = None
        if g_new is not None:
            g_new_rows, stride_new = aligned_rows(g_new, 2)
            stream_stride_new = g_new_rows.stride(-2)
        phi_parts = None
        if through is not None:
            assert phi is not None
            phi_parts = split_phi(phi, min(PARTS[phi.dtype], g_parts(dtype)))
        wide = (*state.wide, stride_new, stream_stride_new, stride_block)
        strides = [stride // align for stride in wide]
        _state_bwd(
            (triton.cdiv(count, chosen.state_tokens),),
            (
                *state.tensors,
                scale,
                g_new_rows,
                g_rows,
                rstd,
                mean,
                parts,
                phi_parts,
                coefficient,
                *outs,
                count,
                *strides[:3],
                *state.narrow,
                *strides[3:],
                blocks,
            ),
            (
                n,
                width,
                chosen.state_tokens,
                chosen.state_width,
                tiles.columns(n),
                state.output is None,
                g_parts(dtype),
                1 if phi_parts is None else phi_parts.shape[0],
                align,
            ),
            chosen.state_warps,
            1,
        )
    return [
        None if shares is None or like is None else add_shares(shares, like)
        for shares, like in ((phi_shares, phi), (weight_shares, norm_weight))
    ]


def _runs_gluon(
    tensors: Sequence[Tensor | None],
    mix_grads: Sequence[Tensor | None],
    n: int,
    width: int,
    needs: Sequence[bool],
) -> bool:
    """Whether the Hopper kernels make these gradients: ``tensors`` are the streams, the output and the gradients of the
    new streams and of the block input, all of which they take in bf16. Never a question of T or of strides: the bits of
    a token depend on the answer."""
    if INTERPRETING.value or n > 4 or width % 64 or not needs[5] or not any(needs[:5]):
        return False
    if any(t is None or t.dtype is not torch.bfloat16 for t in tensors) or all(g is None for g in mix_grads):
        return False
    return device_info(tensors[0].device).arch == "sm_90"  # type: ignore[union-attr]


def _site_gradients_gluon(
    output: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    state: State,
    new_residual: Tensor,
    g_new: Tensor,
    g_block: Tensor,
    rstd: Tensor,
    through: _Through,
    phi: Tensor,
    outs: Sequence[Tensor | None],
    need_norm_weight: bool,
) -> list[Tensor | None]:
    """`_site_gradients` by the Hopper kernels."""
    from . import _gluon

    width, device, count = phi.shape[1] // new_residual.shape[-2], phi.device, rstd.numel()
    chunks = triton.cdiv(count, tiles.CHUNK)
    scale = None if norm_weight is None else norm_weight.contiguous()
    mean = torch.empty(width // 64, count, dtype=torch.float32, device=device)
    phi_shares = torch.empty(chunks, *phi.shape, dtype=torch.float32, device=device)
    weight_shares = None
    if need_norm_weight:
        weight_shares = torch.empty(chunks, width, dtype=torch.float32, device=device)
    pre, post, mixing = (t for t in (state.pre, state.post, state.mixing) if t is not None)
    _gluon.norm_bwd(
        new_residual,
        g_block,
        through.parts,
        pre,
        state.narrow[0],
        rstd,
        scale,
        mean,
        phi_shares,
        weight_shares,
    )
    _gluon.state_bwd(
        output,
        residual,
        (pre, post, mixing),
        state.narrow,
        phi,
        scale,
        g_new,
        g_block,
        rstd,
        mean,
        through.parts,
        through.coefficient,
        outs,
    )
    g_norm_weight = None
    if weight_shares is not None and norm_weight is not None:
        g_norm_weight = add_shares(weight_shares, norm_weight)
    return [add_shares(phi_shares, phi), g_norm_weight]


def _empty(inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    return [
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if t is not None and need else None
        for t, need in zip(inputs, needs, strict=True)
    ]


def _needed(
    found: Sequence[Tensor | None], inputs: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor]:
    """The needed gradients in order; zeros for one that nothing reaches."""
    return [
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) if g is None else g
        for g, t, need in zip(found, inputs, needs, strict=True)
        if t is not None and need
    ]


def _small_gradients(
    through: _Through | None, alpha: Tensor, bias: Tensor, n: int, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of alpha and bias."""
    if through is None or not any(needs):
        return [None, None]
    found = _empty((alpha, bias), needs)
    shares, _, columns = through.shares.shape
    _add_mixes_shares((1,), (through.shares, *found, shares), (n, columns, 16), 4)
    return found


def mega_mhc_bwd(
    g_new_residual: Tensor | None,
    g_pre: Tensor | None,
    g_post: Tensor | None,
    g_res: Tensor | None,
    g_block_input: Tensor | None,
    previous_output: Tensor,
    residual: Tensor,
    previous_pre_mix: Tensor,
    previous_post_mix: Tensor,
    previous_residual_mix: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    new_residual: Tensor,
    proj: Tensor,
    u: Tensor,
    rstd: Tensor,
    next_pre: Tensor,
    next_post: Tensor,
    next_res: Tensor,
    hc_eps: float,
    norm_eps: float,
    num_iters: int,
    needs: Sequence[bool],
) -> list[Tensor]:
    # The next mixes are saved for backends that start from them; here the raw projection gives them again.
    state_inputs = (
        previous_output,
        residual,
        previous_pre_mix,
        previous_post_mix,
        previous_residual_mix,
    )
    inputs = (*state_inputs, phi, alpha, bias, norm_weight)
    if u.numel() == 0:
        return _zeros(inputs, needs)
    n, width = residual.shape[-2:]
    state = read_state(*state_inputs)
    wide = (residual, previous_output, g_new_residual, g_block_input)
    mix_grads = (g_pre, g_post, g_res)
    gluon = _runs_gluon(wide, mix_grads, n, width, needs)
    through = _mixes_gradients(
        mix_grads, alpha, bias, proj, u, n, width, residual.dtype, hc_eps, num_iters, gluon
    )
    outs = _empty(state_inputs, needs[:5])
    if gluon:
        assert g_new_residual is not None
        assert g_block_input is not None
        assert through is not None
        g_phi, g_norm_weight = _site_gradients_gluon(
            previous_output,
            residual,
            norm_weight,
            state,
            new_residual,
            g_new_residual,
            g_block_input,
            rstd,
            through,
            phi,
            outs,
            needs[8],
        )
    else:
        new, stride_new = aligned_rows(new_residual, 2)
        g_phi, g_norm_weight = _site_gradients(
            state,
            State(new, None, None, None, None, (0, stride_new, new.stride(-2))),
            n,
            g_new_residual,
            g_block_input,
            norm_weight,
            rstd,
            through,
            phi,
            outs,
            needs[5],
            needs[8],
        )
    small = _small_gradients(through, alpha, bias, n, needs[6:8])
    return _needed((*outs, g_phi, *small, g_norm_weight), inputs, needs)


def mega_mhc_entry_bwd(
    g_new_residual: Tensor | None,
    g_pre: Tensor | None,
    g_post: Tensor | None,
    g_res: Tensor | None,
    g_block_input: Tensor | None,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    new_residual: Tensor,
    proj: Tensor,
    u: Tensor,
    rstd: Tensor,
    next_pre: Tensor,
    next_post: Tensor,
    next_res: Tensor,
    hc_eps: float,
    norm_eps: float,
    num_iters: int,
    needs: Sequence[bool],
) -> list[Tensor]:
    inputs = (x, phi, alpha, bias, norm_weight)
    if u.numel() == 0:
        return _zeros(inputs, needs)
    n, width = new_residual.shape[-2:]
    state = read_entry(x)
    through = _mixes_gradients(
        (g_pre, g_post, g_res), alpha, bias, proj, u, n, width, x.dtype, hc_eps, num_iters
    )
    (g_x,) = _empty((x,), needs[:1])
    g_phi, g_norm_weight = _site_gradients(
        state,
        state,
        n,
        g_new_residual,
        g_block_input,
        norm_weight,
        rstd,
        through,
        phi,
        (None, g_x, None, None, None),
        needs[1],
        needs[4],
    )
    small = _small_gradients(through, alpha, bias, n, needs[2:4])
    return _needed((g_x, g_phi, *small, g_norm_weight), inputs, needs)


def mega_mhc_exit_bwd(
    grad: Tensor,
    previous_output: Tensor,
    residual: Tensor,
    previous_pre_mix: Tensor,
    previous_post_mix: Tensor,
    previous_residual_mix: Tensor,
    norm_weight: Tensor | None,
    rstd: Tensor,
    needs: Sequence[bool],
) -> list[Tensor]:
    state_inputs = (
        previous_output,
        residual,
        previous_pre_mix,
        previous_post_mix,
        previous_residual_mix,
    )
    inputs = (*state_inputs, norm_weight)
    if rstd.numel() == 0:
        return _zeros(inputs, needs)
    state = read_state(*state_inputs)
    outs = _empty(state_inputs, needs[:5])
    _, g_norm_weight = _site_gradients(
        state,
        state,
        residual.shape[-2],
        None,
        grad,
        norm_weight,
        rstd,
        None,
        None,
        outs,
        False,
        needs[5],
    )
    return _needed((*outs, g_norm_weight), inputs, needs)
