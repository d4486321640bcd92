"""The backward of the single pass's entry and exit in Triton, for any device, width, dtype and strides.

At both ends the gradients of the new streams have more in common than at a boundary between two sites.

Exit: that of new stream j is ``pre[j]*g_mixed``, so g_residual and g_output are multiples of ``g_mixed``, and every dot
product of theirs is one of ``g_mixed``. That one is ``rstd*(g - scale*mixed)``, where ``g`` is the gradient times the norm
weight and the scale takes a sum over the row: dot products with ``g`` and with ``mixed`` are taken side by side while the
row is read, and the scale joins them later. So a program reads a token once and keeps two of its vectors, not n + 2.

Entry: all new streams are x, so only sums over the streams matter, of phi and of the gradients: the projection's
backward has K = C. A first pass takes each token's sum for the RMSNorm, a second one makes all gradients by columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._strides import alignment
from .._triton_common import (
    Launcher,
    block_sums,
    elements,
    follow,
    lane_dots,
    lane_zeros,
    last_first,
    lead,
    load_columns,
    load_scalars,
    load_streams,
    store,
    store_columns,
    widen,
)
from ..h_aggregate._triton import aggregate_tile
from ..proj_rms_compute_h.config import PARTS, g_parts
from . import config as tiles
from ._triton_bwd import Through
from ._triton_fwd import State, aligned_rows
from ._triton_tiles import add_products, load_parts, split, update_tile

__all__ = ["entry_gradients", "exit_gradients"]


@triton.jit
def exit_load(
    residual_row,
    stream_stride,
    output_row,
    grad_row,
    start,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """GROUP blocks of a token from column ``start`` on, of each the streams, the output and the gradient."""
    FULL: tl.constexpr = C % (BLOCK * GROUP) == 0
    loaded = ()
    for k in tl.static_range(GROUP):
        columns = start + k * BLOCK + tl.arange(0, BLOCK)
        loaded = loaded + load_streams(residual_row, stream_stride, columns, n, C, FULL)
        loaded = loaded + (load_columns(output_row, columns, C, FULL),)
        loaded = loaded + (load_columns(grad_row, columns, C, FULL),)
    return loaded


@triton.jit
def weighted(grad, norm_weight_ptr, columns, C: tl.constexpr, FULL: tl.constexpr):
    """The gradient before the norm weight."""
    if norm_weight_ptr is None:
        return widen(grad)
    else:
        return widen(grad) * widen(load_columns(norm_weight_ptr, columns, C, FULL))


@triton.jit
def exit_mixed(loaded, mixing, post, pre, n: tl.constexpr):
    """The new streams and ``mixed`` from what `exit_load` gave for a block."""
    new = update_tile(loaded[:n], loaded[n], mixing, post, n, loaded[0].dtype)
    return new, aggregate_tile(new, pre, n)


@triton.jit
def exit_dots(
    loaded,
    sums,
    norm_weight_ptr,
    mixing,
    post,
    pre,
    start,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    VECTOR: tl.constexpr,
    RES: tl.constexpr,
    POST: tl.constexpr,
    PRE: tl.constexpr,
):
    """Adds the columns of `exit_load` to the lanes' sums: of ``mixed`` times the gradient, then of RES streams, POST
    outputs and PRE new streams times that and times ``mixed``. Returns them, and each block's ``mixed`` and gradient."""
    FULL: tl.constexpr = C % (BLOCK * GROUP) == 0
    VECTORS: tl.constexpr = n + 2
    kept = ()
    for k in tl.static_range(GROUP):
        columns = start + k * BLOCK + tl.arange(0, BLOCK)
        own = loaded[k * VECTORS : k * VECTORS + VECTORS]
        new, mixed = exit_mixed(own, mixing, post, pre, n)
        pair = (weighted(own[n + 1], norm_weight_ptr, columns, C, FULL), mixed)
        total = lane_dots(sums[:1], pair[:1], pair[1:], 1, 1, VECTOR)
        lefts = own[:RES] + own[n : n + POST] + new[:PRE]
        sums = total + lane_dots(sums[1:], lefts, pair, RES + POST + PRE, 2, VECTOR)
        kept = kept + (mixed, own[n + 1])
    return sums, kept


@triton.jit
def exit_store(
    kept,
    shares,
    share_row,
    g_output_row,
    g_residual_row,
    norm_weight_ptr,
    rstd,
    scale,
    stream_factors,
    output_factor,
    start,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Writes the gradients of the streams and of the output, and ``shares`` with this token's terms, for the columns whose
    ``mixed`` and gradient were kept."""
    FULL: tl.constexpr = C % (BLOCK * GROUP) == 0
    for k in tl.static_range(GROUP):
        columns = start + k * BLOCK + tl.arange(0, BLOCK)
        mixed = kept[2 * k]
        if share_row is not None:
            share = tl.fma(widen(kept[2 * k + 1]), mixed * rstd, shares[k])
            store_columns(share_row, columns, share, C, FULL)
        if g_residual_row is not None or g_output_row is not None:
            g = weighted(kept[2 * k + 1], norm_weight_ptr, columns, C, FULL)
            g_mixed = rstd * (g - mixed * scale)
            if g_residual_row is not None:
                for i in tl.static_range(n):
                    store_columns(g_residual_row + i * C, columns, stream_factors[i] * g_mixed, C, FULL)
            if g_output_row is not None:
                store_columns(g_output_row, columns, output_factor * g_mixed, C, FULL)


@triton.jit
def load_share(share_row, start, is_later, C: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """GROUP blocks of the chunk's sums up to now; zeros for its first token."""
    shares = ()
    if share_row is not None:
        for k in tl.static_range(GROUP):
            columns = start + k * BLOCK + tl.arange(0, BLOCK)
            end = tl.where(is_later, C, 0)
            shares = shares + (tl.load(share_row + columns, mask=columns < end, other=0.0),)
    return shares


@triton.jit
def exit_row(
    token,
    residual_row,
    stream_stride,
    output_row,
    grad_row,
    pre_row,
    post_row,
    mixing_row,
    norm_weight_ptr,
    rstd_ptr,
    g_output_ptr,
    g_residual_ptr,
    g_pre_ptr,
    g_post_ptr,
    g_mixing_ptr,
    share_row,
    is_later,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    VECTOR: tl.constexpr,
    KEEP: tl.constexpr,
):
    """All gradients of a token; its terms of norm_weight's join ``share_row``."""
    SPAN: tl.constexpr = BLOCK * GROUP
    RES: tl.constexpr = n if g_mixing_ptr is not None else 0
    POST: tl.constexpr = 1 if g_post_ptr is not None else 0
    PRE: tl.constexpr = n if g_pre_ptr is not None else 0
    DOTS: tl.constexpr = RES + POST + PRE
    mixing = load_scalars(mixing_row, n * n)
    post = load_scalars(post_row, n)
    pre = load_scalars(pre_row, n)
    rstd = tl.load(rstd_ptr + token)
    output_factor = post[0] * pre[0]
    for j in tl.static_range(1, n):
        output_factor = output_factor + post[j] * pre[j]
    stream_factors = ()
    for i in tl.static_range(n):
        factor = mixing[i * n] * pre[0]
        for j in tl.static_range(1, n):
            factor = factor + mixing[i * n + j] * pre[j]
        stream_factors = stream_factors + (factor,)
    sums = lane_zeros(1 + 2 * DOTS, BLOCK // VECTOR)
    kept = ()
    shares = ()
    if KEEP:
        for start in tl.static_range(0, C, SPAN):
            loaded = exit_load(residual_row, stream_stride, output_row, grad_row, start, n, C, BLOCK, GROUP)
            sums, own = exit_dots(
                loaded,
                sums,
                norm_weight_ptr,
                mixing,
                post,
                pre,
                start,
                n,
                C,
                BLOCK,
                GROUP,
                VECTOR,
                RES,
                POST,
                PRE,
            )
            kept = kept + own
        for start in tl.static_range(0, C, SPAN):
            shares = shares + load_share(share_row, start, is_later, C, BLOCK, GROUP)
    else:
        for start in range(0, C, SPAN):
            loaded = exit_load(residual_row, stream_stride, output_row, grad_row, start, n, C, BLOCK, GROUP)
            sums, _ = exit_dots(
                loaded,
                sums,
                norm_weight_ptr,
                mixing,
                post,
                pre,
                start,
                n,
                C,
                BLOCK,
                GROUP,
                VECTOR,
                RES,
                POST,
                PRE,
            )
    scale = rstd * (block_sums(sums[:1], 1)[0] * rstd / C)
    if share_row is not None or g_output_ptr is not None or g_residual_ptr is not None:
        g_output_row = None if g_output_ptr is None else g_output_ptr + token * C
        g_residual_row = None if g_residual_ptr is None else g_residual_ptr + token * (n * C)
        if KEEP:
            for start in tl.static_range(0, C, SPAN):
                exit_store(
                    kept[2 * (start // BLOCK) : 2 * (start // BLOCK) + 2 * GROUP],
                    shares[start // BLOCK : start // BLOCK + GROUP],
                    share_row,
                    g_output_row,
                    g_residual_row,
                    norm_weight_ptr,
                    rstd,
                    scale,
                    stream_factors,
                    output_factor,
                    start,
                    n,
                    C,
                    BLOCK,
                    GROUP,
                )
        else:
            for start in range(0, C, SPAN):
                loaded = exit_load(
                    residual_row, stream_stride, output_row, grad_row, start, n, C, BLOCK, GROUP
                )
                own_shares = load_share(share_row, start, is_later, C, BLOCK, GROUP)
                again = ()
                for k in tl.static_range(GROUP):
                    own = loaded[k * (n + 2) : (k + 1) * (n + 2)]
                    _, mixed = exit_mixed(own, mixing, post, pre, n)
                    again = again + (mixed, own[n + 1])
                exit_store(
                    again,
                    own_shares,
                    share_row,
                    g_output_row,
                    g_residual_row,
                    norm_weight_ptr,
                    rstd,
                    scale,
                    stream_factors,
                    output_factor,
                    start,
                    n,
                    C,
                    BLOCK,
                    GROUP,
                )
    lanes = ()
    for k in tl.static_range(DOTS):
        lanes = lanes + (rstd * (sums[1 + 2 * k] - scale * sums[2 + 2 * k]),)
    dots = block_sums(lanes, DOTS)
    for i in tl.static_range(RES):
        for j in tl.static_range(n):
            store(g_mixing_ptr + token * (n * n) + i * n + j, pre[j] * dots[i])
    for j in tl.static_range(POST * n):
        store(g_post_ptr + token * n + j, pre[j] * dots[RES])
    for j in tl.static_range(PRE):
        store(g_pre_ptr + token * n + j, dots[RES + POST + j])


@triton.jit(
    do_not_specialize=[
        "count",
        "stride_output",
        "stride_residual",
        "stream_stride",
        "stride_pre",
        "stride_post",
        "stride_mixing",
        "stride_grad",
    ]
)
def exit_bwd_kernel(
    residual_ptr,
    output_ptr,
    pre_ptr,
    post_ptr,
    mixing_ptr,
    norm_weight_ptr,
    grad_ptr,
    rstd_ptr,
    g_output_ptr,
    g_residual_ptr,
    g_pre_ptr,
    g_post_ptr,
    g_mixing_ptr,
    share_ptr,
    count: tl.int64,
    stride_output: tl.int64,
    stride_residual: tl.int64,
    stream_stride: tl.int64,
    stride_pre: tl.int64,
    stride_post: tl.int64,
    stride_mixing: tl.int64,
    stride_grad: tl.int64,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    VECTOR: tl.constexpr,
    KEEP: tl.constexpr,
    TOKENS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """TOKENS tokens, one after the other. ``share_ptr [chunks, C]``: what they add to norm_weight's gradient (None: not
    wanted). It grows in the cache: registers for it would leave room for half as many programs. KEEP: a token's ``mixed``
    and gradient stay in registers, else the token is read again."""
    lead()
    chunk = last_first()
    first = chunk * TOKENS
    for token in range(first, tl.minimum(first + TOKENS, count)):
        exit_row(
            token,
            residual_ptr + token * elements(stride_residual, ALIGN),
            elements(stream_stride, ALIGN),
            output_ptr + token * elements(stride_output, ALIGN),
            grad_ptr + token * elements(stride_grad, ALIGN),
            pre_ptr + token * stride_pre,
            post_ptr + token * stride_post,
            mixing_ptr + token * stride_mixing,
            norm_weight_ptr,
            rstd_ptr,
            g_output_ptr,
            g_residual_ptr,
            g_pre_ptr,
            g_post_ptr,
            g_mixing_ptr,
            None if share_ptr is None else share_ptr + chunk * C,
            token > first,
            n,
            C,
            BLOCK,
            GROUP,
            VECTOR,
            KEEP,
        )
        if share_ptr is not None:
            tl.debug_barrier()  # a lane may read what another one has written


@triton.jit(do_not_specialize=["shares"])
def add_rows_kernel(
    share_ptr, total_ptr, shares: tl.int64, C: tl.constexpr, BLOCK: tl.constexpr, RUNS: tl.constexpr
):
    """BLOCK columns of the sum of ``[shares, C]``: RUNS runs of 16 neighbours in order, side by side, then their sums,
    and so on."""
    follow()
    RUN: tl.constexpr = 16
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, shares, RUN * RUNS):
        rows = start + tl.arange(0, RUNS).to(tl.int64) * RUN
        loaded = ()
        for k in tl.static_range(RUN):
            mask = (rows + k < shares)[:, None] & (columns < C)[None, :]
            at = share_ptr + (rows + k)[:, None] * C + columns[None, :]
            loaded = loaded + (tl.load(at, mask=mask, other=0.0),)
        runs = tl.zeros((RUNS, BLOCK), tl.float32)
        for k in tl.static_range(RUN):
            runs = runs + loaded[k]
        total = total + tl.sum(runs, 0)
    store_columns(total_ptr, columns, total, C, False)


@triton.jit(do_not_specialize=["stride_x", "stride_grad"])
def entry_mean_kernel(
    x_ptr,
    grad_ptr,
    norm_weight_ptr,
    mean_ptr,
    stride_x: tl.int64,
    stride_grad: tl.int64,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """``mean_ptr [T]``: a token's sum of the gradient before the norm weight times x."""
    lead()
    FULL: tl.constexpr = C % (BLOCK * GROUP) == 0
    token = last_first()
    x_row = x_ptr + token * elements(stride_x, ALIGN)
    grad_row = grad_ptr + token * elements(stride_grad, ALIGN)
    sums = lane_zeros(1, BLOCK // VECTOR)
    for start in range(0, C, BLOCK * GROUP):
        xs = ()
        grads = ()
        for k in tl.static_range(GROUP):
            columns = start + k * BLOCK + tl.arange(0, BLOCK)
            xs = xs + (load_columns(x_row, columns, C, FULL),)
            grads = grads + (load_columns(grad_row, columns, C, FULL),)
        for k in tl.static_range(GROUP):
            columns = start + k * BLOCK + tl.arange(0, BLOCK)
            g = weighted(grads[k], norm_weight_ptr, columns, C, FULL)
            sums = lane_dots(sums, (g,), xs[k : k + 1], 1, 1, VECTOR)
    tl.store(mean_ptr + token, block_sums(sums, 1)[0])


@triton.jit(do_not_specialize=["count", "stride_x", "stride_new", "stream_stride_new", "stride_block"])
def entry_bwd_kernel(
    x_ptr,
    norm_weight_ptr,
    g_new_ptr,
    g_block_ptr,
    rstd_ptr,
    mean_ptr,
    parts_ptr,
    coefficient_ptr,
    phi_ptr,
    g_x_ptr,
    phi_share_ptr,
    weight_share_ptr,
    count: tl.int64,
    stride_x: tl.int64,
    stride_new: tl.int64,
    stream_stride_new: tl.int64,
    stride_block: tl.int64,
    n: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    G_PARTS: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some columns, one chunk of tokens. ``phi_share_ptr [chunks, N, C]``: one stream's, which is every stream's."""
    follow()
    N: tl.constexpr = n * n + 2 * n
    chunk = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    columns = c[None, :]
    cols = tl.arange(0, COLUMNS)
    phi_mask = (cols[:, None] < N) & (columns < C)
    if norm_weight_ptr is not None:
        norm_weight = widen(tl.load(norm_weight_ptr + c, mask=c < C, other=0.0))
    phi_parts = ()
    if parts_ptr is not None and g_x_ptr is not None:
        phi = tl.zeros((COLUMNS, WIDTH), tl.float32)
        for j in tl.static_range(n):
            at = phi_ptr + cols[:, None] * (n * C) + j * C + columns
            phi += widen(tl.load(at, mask=phi_mask, other=0.0))
        phi_parts = split(phi, W_PARTS)
    phi_share = tl.zeros((COLUMNS, WIDTH), tl.float32)
    weight_share = tl.zeros((TOKENS, WIDTH), tl.float32)
    last = tl.minimum(chunk * CHUNK + CHUNK, count)
    for first in tl.range(chunk * CHUNK, last, TOKENS, num_stages=STAGES):
        rows = first + tl.arange(0, TOKENS)
        row_mask = rows < last
        mask = row_mask[:, None]
        if C % WIDTH != 0:
            mask = mask & (columns < C)
        x = tl.load(x_ptr + rows[:, None] * elements(stride_x, ALIGN) + columns, mask=mask, other=0.0)
        total = tl.zeros((TOKENS, WIDTH), tl.float32)
        if parts_ptr is not None:
            parts_at = rows[:, None] * (G_PARTS * COLUMNS) + cols[None, :]
            g = load_parts(parts_ptr, COLUMNS, parts_at, row_mask[:, None], G_PARTS)
            if g_x_ptr is not None:
                total = add_products(g, phi_parts, total, G_PARTS, W_PARTS, G_PARTS)
                coefficient = tl.load(coefficient_ptr + rows, mask=row_mask, other=0.0)
                total += (n * coefficient)[:, None] * widen(x)
            if phi_share_ptr is not None:
                turned = ()
                for k in tl.static_range(G_PARTS):
                    turned = turned + (tl.trans(g[k]),)
                phi_share = add_products(turned, split(x, X_PARTS), phi_share, G_PARTS, X_PARTS, 3)
        if g_block_ptr is not None:
            g_at = g_block_ptr + rows[:, None] * elements(stride_block, ALIGN) + columns
            g_block = widen(tl.load(g_at, mask=mask, other=0.0))
            rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
            if weight_share_ptr is not None:
                weight_share = tl.fma(g_block, widen(x) * rstd[:, None], weight_share)
            if g_x_ptr is not None:
                if norm_weight_ptr is not None:
                    g_block = g_block * norm_weight[None, :]
                mean = tl.load(mean_ptr + rows, mask=row_mask, other=0.0)
                scale = rstd * (mean * rstd / C)
                total += rstd[:, None] * (g_block - widen(x) * scale[:, None])
        if g_x_ptr is not None:
            if g_new_ptr is not None:
                new_at = g_new_ptr + rows[:, None] * elements(stride_new, ALIGN) + columns
                for j in tl.static_range(n):
                    g_new = tl.load(new_at + j * elements(stream_stride_new, ALIGN), mask=mask, other=0.0)
                    total += widen(g_new)
            store(g_x_ptr + rows[:, None] * C + columns, total, mask)
    if weight_share_ptr is not None:
        tl.store(weight_share_ptr + chunk * C + c, tl.sum(weight_share, axis=0), mask=c < C)
    if phi_share_ptr is not None:
        tl.store(phi_share_ptr + (chunk * N + cols[:, None]) * C + columns, phi_share, mask=phi_mask)


_exit_bwd = Launcher(exit_bwd_kernel, follows=False)
_add_rows = Launcher(add_rows_kernel)
_entry_mean = Launcher(entry_mean_kernel, follows=False)
_entry_bwd = Launcher(entry_bwd_kernel)

#: Columns that a program of `add_rows_kernel` adds up, and runs side by side.
_ROW_BLOCK, _ROW_RUNS = 32, 16


def exit_gradients(
    state: State,
    grad: Tensor,
    norm_weight: Tensor | None,
    rstd: Tensor,
    outs: Sequence[Tensor | None],
    g_norm_weight: Tensor | None,
) -> None:
    """Fills ``outs``, the gradients of output, residual, pre, post and mixing, and that of norm_weight."""
    n, width = state.residual.shape[-2:]
    count, itemsize = rstd.numel(), state.residual.element_size()
    if g_norm_weight is None and all(t is None for t in outs):
        return
    chosen = tiles.exit_heuristic(n, width, itemsize)
    rows, stride_grad = aligned_rows(grad, 1)
    align = alignment(width)
    tokens, shares = 1, None
    if g_norm_weight is not None:
        tokens = tiles.EXIT_CHUNK
        shares = torch.empty(triton.cdiv(count, tokens), width, dtype=torch.float32, device=rstd.device)
    _exit_bwd(
        (triton.cdiv(count, tokens),),
        (
            *state.tensors,
            None if norm_weight is None else aligned_rows(norm_weight, 1)[0],
            rows,
            rstd,
            *outs,
            shares,
            count,
            *(stride // align for stride in state.wide),
            *state.narrow,
            stride_grad // align,
        ),
        (
            n,
            width,
            chosen.rows.block,
            chosen.rows.group,
            tiles.lane_elements(itemsize),
            chosen.keep,
            tokens,
            align,
        ),
        chosen.rows.num_warps,
    )
    if shares is not None:
        _add_rows(
            (triton.cdiv(width, _ROW_BLOCK),),
            (shares, g_norm_weight, shares.shape[0]),
            (width, _ROW_BLOCK, _ROW_RUNS),
            8,
        )


def entry_gradients(
    state: State,
    n: int,
    g_new: Tensor | None,
    g_block: Tensor | None,
    norm_weight: Tensor | None,
    rstd: Tensor,
    through: Through | None,
    phi: Tensor,
    g_x: Tensor | None,
    need_phi: bool,
    need_norm_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Fills ``g_x``; returns the shares ``[chunks, ...]`` of the gradients of one stream of phi, ``[N, C]``, and of
    norm_weight."""
    x, stride_x = state.residual, state.wide[1]
    count, width, device = rstd.numel(), x.shape[-1], rstd.device
    itemsize, align = x.element_size(), alignment(width)
    scale = None if norm_weight is None else aligned_rows(norm_weight, 1)[0]
    chunks = triton.cdiv(count, tiles.CHUNK)
    phi_shares = weight_shares = mean = g_rows = g_new_rows = None
    stride_block = stride_new = stream_stride_new = 0
    if g_block is not None:
        g_rows, stride_block = aligned_rows(g_block, 1)
    if g_new is not None and g_x is not None:
        g_new_rows, stride_new = aligned_rows(g_new, 2)
        stream_stride_new = g_new_rows.stride(-2)
    if need_phi and through is not None:
        phi_shares = torch.empty(chunks, phi.shape[0], width, dtype=torch.float32, device=device)
    if need_norm_weight and g_rows is not None:
        weight_shares = torch.empty(chunks, width, dtype=torch.float32, device=device)
    if g_x is None and phi_shares is None and weight_shares is None:
        return None, None
    if g_rows is not None and g_x is not None:
        mean = torch.empty(count, dtype=torch.float32, device=device)
        rows = tiles.entry_mean_heuristic(width, itemsize)
        _entry_mean(
            (count,),
            (x, g_rows, scale, mean, stride_x // align, stride_block // align),
            (width, rows.block, rows.group, tiles.lane_elements(itemsize), align),
            rows.num_warps,
        )
    chosen = tiles.entry_heuristic(n)
    parts, coefficient = (None, None) if through is None else (through.parts, through.coefficient)
    strides = (stride_x, stride_new, stream_stride_new, stride_block)
    _entry_bwd(
        (triton.cdiv(width, chosen.width), chunks),
        (
            x,
            scale,
            g_new_rows,
            g_rows,
            rstd,
            mean,
            parts,
            coefficient,
            phi.contiguous(),
            g_x,
            phi_shares,
            weight_shares,
            count,
            *(stride // align for stride in strides),
        ),
        (
            n,
            width,
            tiles.CHUNK,
            chosen.tokens,
            chosen.width,
            tiles.columns(n),
            g_parts(x.dtype),
            PARTS[x.dtype],
            g_parts(x.dtype),
            align,
            chosen.stages,
        ),
        chosen.num_warps,
        chosen.stages,
    )
    return phi_shares, weight_shares
