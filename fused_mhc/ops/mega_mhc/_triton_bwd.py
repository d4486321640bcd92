"""The single pass's backward in Triton: its two passes over the streams, for any device, width, dtype and strides.

The first, by columns, reads the new streams and the gradient of the block input: shares of g_phi and g_norm_weight for
every chunk of tokens, and each token's sum for the RMSNorm. The second, by tokens, reads all that touches the state:
the gradient of the new streams is made in registers, stream after stream, and with it everything that goes to the site
before. The new streams are made again from their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._strides import alignment
from .._triton_common import Launcher, cast, follow, last_first, store, widen
from ..h_aggregate._triton import aggregate_tile
from ..proj_rms_compute_h._triton_fwd import split_weight
from ..proj_rms_compute_h.config import PARTS, g_parts
from . import config as tiles
from ._triton_fwd import State, aligned_rows
from ._triton_tiles import (
    add_products,
    load_mixes,
    load_parts,
    load_streams,
    split,
)

__all__ = ["Through", "site_gradients"]


class Through(NamedTuple):
    """What the mixes leave for the gradient of the new streams: bf16 parts of that of the raw projection, ``[T, G_PARTS,
    COLUMNS]`` or interleaved ``[T, 64]``, factors ``[T]``, and the shares of g_alpha and g_bias ``[tiles, 2, COLUMNS]``.
    """

    parts: Tensor
    coefficient: Tensor
    shares: Tensor


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


@triton.jit(do_not_specialize=["count", "stride_new", "stream_stride", "stride_pre", "stride_block"])
def norm_bwd_kernel(
    new_ptr,
    pre_ptr,
    norm_weight_ptr,
    g_block_ptr,
    rstd_ptr,
    parts_ptr,
    mean_ptr,
    phi_share_ptr,
    weight_share_ptr,
    count: tl.int64,
    stride_new: tl.int64,
    stream_stride: tl.int64,
    stride_pre: tl.int64,
    stride_block: tl.int64,
    n: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    G_PARTS: tl.constexpr,
    X_PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some columns of all streams, one chunk of tokens. ``mean_ptr [blocks, T]``: sums over these columns of the
    gradient before the norm weight times ``mixed``."""
    follow()
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
        new_rows = rows[:, None] * (stride_new * ALIGN)
        streams = load_streams(new_ptr, stream_stride * ALIGN, new_rows + columns, mask, n)
        if g_block_ptr is not None:
            mixed = aggregate_tile(streams, load_mixes(pre_ptr, stride_pre, rows, row_mask, n), n)
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
    G_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """All columns of some tokens, stream after stream. ``phi_ptr``: bf16 parts of phi (None: nothing comes through the
    mixes)."""
    follow()
    N: tl.constexpr = n * n + 2 * n
    SQUARE: tl.constexpr = triton.next_power_of_2(n * n)
    NEEDS_TOTAL: tl.constexpr = (
        g_output_ptr is not None
        or g_residual_ptr is not None
        or g_post_ptr is not None
        or g_mixing_ptr is not None
    )
    rows = last_first() * TOKENS + tl.arange(0, TOKENS)
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
        output_at = rows[:, None] * (stride_output * ALIGN) + columns
        output = tl.load(output_ptr + output_at, mask=mask, other=0.0)
        if g_block_ptr is not None:
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
                    total += load_mix(pre_ptr + rows * stride_pre + j, row_mask) * g_mixed
                if g_new_ptr is not None:
                    new_at = rows[:, None] * (stride_new * ALIGN) + j * (stream_stride_new * ALIGN) + columns
                    total += widen(tl.load(g_new_ptr + new_at, mask=mask, other=0.0))
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


_norm_bwd = Launcher(norm_bwd_kernel)
_state_bwd = Launcher(state_bwd_kernel)


def site_gradients(
    state: State,
    new_residual: Tensor,
    g_new: Tensor | None,
    g_block: Tensor | None,
    norm_weight: Tensor | None,
    rstd: Tensor,
    through: Through | None,
    phi: Tensor,
    outs: Sequence[Tensor | None],
    need_phi: bool,
    need_norm_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Steps 2 and 3: fills ``outs`` (gradients of output, residual, pre, post and mixing), returns the shares
    ``[chunks, ...]`` of those of phi and norm_weight."""
    n = new_residual.shape[-2]
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
        phi_shares = torch.empty(chunks, *phi.shape, dtype=torch.float32, device=device)
    if need_norm_weight:
        weight_shares = torch.empty(chunks, width, dtype=torch.float32, device=device)
    if need_phi or need_norm_weight or (g_rows is not None and needs_state):
        new, stride_new = aligned_rows(new_residual, 2)
        _norm_bwd(
            (blocks, chunks),
            (
                new,
                state.pre,
                scale,
                g_rows,
                rstd,
                parts,
                mean,
                phi_shares,
                weight_shares,
                count,
                stride_new // align,
                new.stride(-2) // align,
                state.narrow[0],
                stride_block // align,
            ),
            (
                n,
                width,
                tiles.CHUNK,
                chosen.norm_tokens,
                chosen.norm_width,
                tiles.columns(n),
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
            w_parts = min(PARTS[phi.dtype], g_parts(dtype))
            phi_parts = torch.empty(w_parts, *phi.shape, dtype=torch.bfloat16, device=device)
            split_weight(phi, phi_parts)
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
                g_parts(dtype),
                1 if phi_parts is None else phi_parts.shape[0],
                align,
            ),
            chosen.state_warps,
            1,
        )
    return phi_shares, weight_shares
