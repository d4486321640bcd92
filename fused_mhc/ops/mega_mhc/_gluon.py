"""The single pass's backward for Hopper, in Gluon: two to four bf16 streams, C a multiple of 64.

Both passes take their tiles by TMA through a ring in shared memory. `norm_bwd_kernel` leaves the shares of g_phi to the
tensor cores, which read the new streams where they lie. In `state_bwd_kernel` one warp loads, one stores, eight
compute: a thread holds eight neighbouring columns of one token, so that the token's mixes and its sums stay in
registers from the first column to the last; gradients take the place of what they were made from and leave by TMA.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .._triton_common import Launcher, follow
from ..proj_rms_compute_h._gluon_tma import Capped, follow_launch, load_tile, store_tile, thread_barrier
from ..proj_rms_compute_h._triton_fwd import tma_rows
from ..proj_rms_compute_h._triton_tiles import part
from ..proj_rms_compute_h.config import PARTS
from . import config as tiles

__all__ = ["norm_bwd", "state_bwd"]

#: Columns of a tile, and columns of the projection, padded.
WIDTH, COLUMNS = 64, 32
#: Tokens of a step and tiles in flight of the pass for g_phi and the RMSNorm.
NORM_TOKENS, NORM_STAGES = 32, 4
#: Registers of its threads: two programs share a multiprocessor.
NORM_REGISTERS = 128
#: The same of the pass for the state, one step of tokens a program.
STATE_TOKENS, STATE_STAGES = 32, 3


@triton.jit(do_not_specialize=["size", "width"])
def group_phi_kernel(
    phi_ptr,
    parts_ptr,
    size: tl.int32,
    width: tl.int64,
    COLUMNS: tl.constexpr,
    W_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """bf16 parts of phi ``[W_PARTS, COLUMNS, K]``, zeros below its rows. Columns change places within groups of 64: a
    product of 64 columns on four warps, eight a warp and twice over, then leaves each warp 16 neighbours, and each
    thread four."""
    follow()
    row = tl.program_id(1)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = at % 64
    column = place // 8 % 4 * 16 + place % 8 // 2 * 4 + place // 32 * 2 + place % 2
    phi = tl.load(
        phi_ptr + row * width + at - place + column, mask=at < tl.where(row < size, width, 0), other=0.0
    )
    for index in tl.static_range(W_PARTS):
        tl.store(parts_ptr + (index * COLUMNS + row) * width + at, part(phi, index), mask=at < width)


@gluon.jit
def load_norm_tiles(
    new_desc,
    g_block_desc,
    parts_desc,
    tiles,
    ready,
    step,
    steps,
    row,
    column,
    n: gl.constexpr,
    C: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):
    s = step % STAGES
    inside = step < steps
    at = row + step * TOKENS
    mbarrier.expect(ready.index(s), (n + 2) * new_desc.block_type.nbytes, pred=inside)
    for j in gl.static_range(n):
        load_tile(new_desc, [at, j * C + column], ready.index(s), tiles.index(s * (n + 2) + j), pred=inside)
    load_tile(g_block_desc, [at, column], ready.index(s), tiles.index(s * (n + 2) + n), pred=inside)
    load_tile(parts_desc, [at, 0], ready.index(s), tiles.index(s * (n + 2) + n + 1), pred=inside)


@gluon.jit
def load_row_scalars(pre_ptr, rstd_ptr, rows, count, stride_pre, n: gl.constexpr):
    inside = rows < count
    values = (gl.load(rstd_ptr + rows, mask=inside, other=0.0),)
    for i in gl.static_range(n):
        values = values + (
            gl.load(pre_ptr + rows.to(gl.int64) * stride_pre + i, mask=inside, other=0.0).to(gl.float32),
        )
    return values


@gluon.jit
def mixed_tile(tiles, base, scalars, layout: gl.constexpr, n: gl.constexpr):
    """``sum_j pre[j]*new[j]``, first stream to last; ``scalars[1 + j]`` is ``pre[j]``."""
    total = scalars[1][:, None] * tiles.index(base).load(layout).to(gl.float32)
    for j in gl.static_range(1, n):
        total = total + scalars[1 + j][:, None] * tiles.index(base + j).load(layout).to(gl.float32)
    return total


@gluon.jit
def store_share(pointer, share, stride, N: gl.constexpr, WIDTH: gl.constexpr):
    total = gl.sum(share.reshape([4, 2, 8, WIDTH]), axis=1).reshape([32, WIDTH])
    layout: gl.constexpr = total.type.layout
    c = gl.arange(0, 32, gl.SliceLayout(1, layout))
    k = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    gl.store(pointer + c[:, None] * stride + k[None, :], total, mask=(c[:, None] < N) & (k[None, :] < WIDTH))


@gluon.jit(do_not_specialize=["count", "stride_pre"])
def norm_bwd_kernel(
    mean_ptr,
    phi_share_ptr,
    weight_share_ptr,
    pre_ptr,
    rstd_ptr,
    norm_weight_ptr,
    new_desc,
    g_block_desc,
    parts_desc,
    count: gl.int32,
    stride_pre: gl.int64,
    n: gl.constexpr,
    C: gl.constexpr,
    CHUNK: gl.constexpr,
    TOKENS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    follow_launch()
    N: gl.constexpr = n * n + 2 * n
    shared: gl.constexpr = new_desc.layout
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, WIDTH // 2, 16])
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]],
        [[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]],
        [[8, 0], [16, 0], [0, 32]],
        [],
        [32, 64],
    )
    block = gl.program_id(0)
    chunk = gl.program_id(1)
    column = block * WIDTH
    row = chunk * CHUNK
    steps = gl.cdiv(gl.minimum(row + CHUNK, count) - row, TOKENS)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * (n + 2), TOKENS, WIDTH], shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    thread_barrier()
    for stage in gl.static_range(STAGES - 1):
        load_norm_tiles(
            new_desc, g_block_desc, parts_desc, tiles, ready, stage, steps, row, column, n, C, TOKENS, STAGES
        )
    shares = ()
    for j in gl.static_range(n):
        shares = shares + (gl.zeros([64, WIDTH], gl.float32, acc_layout),)
    zero = gl.zeros([TOKENS, WIDTH], gl.float32, L)
    weight_share = zero
    cols = column + gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    if norm_weight_ptr is not None:
        norm_weight = gl.load(norm_weight_ptr + cols).to(gl.float32)
    own = row + gl.arange(0, TOKENS, gl.SliceLayout(1, L))
    scalars = load_row_scalars(pre_ptr, rstd_ptr, own, count, stride_pre, n)
    for i in range(steps):
        s = i % STAGES
        following = load_row_scalars(pre_ptr, rstd_ptr, own + (i + 1) * TOKENS, count, stride_pre, n)
        mbarrier.wait(ready.index(s), (i // STAGES) & 1)
        thread_barrier()
        load_norm_tiles(
            new_desc,
            g_block_desc,
            parts_desc,
            tiles,
            ready,
            i + STAGES - 1,
            steps,
            row,
            column,
            n,
            C,
            TOKENS,
            STAGES,
        )
        base = s * (n + 2)
        g = tiles.index(base + n + 1).permute((1, 0))
        added = ()
        for j in gl.static_range(n):
            added = added + (warpgroup_mma(g, tiles.index(base + j), shares[j], is_async=True),)
        mixed = mixed_tile(tiles, base, scalars, L, n)
        g_block = tiles.index(base + n).load(L).to(gl.float32)
        if weight_share_ptr is not None:
            weight_share = gl.fma(g_block, mixed * scalars[0][:, None], weight_share)
        if norm_weight_ptr is not None:
            g_block = g_block * norm_weight[None, :]
        at = own + i * TOKENS
        gl.store(mean_ptr + block.to(gl.int64) * count + at, gl.sum(g_block * mixed, axis=1), mask=at < count)
        scalars = following
        shares = warpgroup_mma_wait(0, deps=added)
    phi_share_ptr += chunk.to(gl.int64) * (N * n * C) + column
    for j in gl.static_range(n):
        store_share(phi_share_ptr + j * C, shares[j], n * C, N, WIDTH)
    if weight_share_ptr is not None:
        gl.store(weight_share_ptr + chunk * C + cols, gl.sum(weight_share, axis=0))


@gluon.jit
def pieces(tile):
    """The eight columns that a thread holds of each of its rows, in order."""
    rows: gl.constexpr = tile.shape[0]
    cols: gl.constexpr = tile.shape[1]
    x0, x1 = gl.split(tile.reshape([rows, cols // 8, 2, 2, 2]))
    x00, x01 = gl.split(x0)
    x10, x11 = gl.split(x1)
    a0, a4 = gl.split(x00)
    a2, a6 = gl.split(x01)
    a1, a5 = gl.split(x10)
    a3, a7 = gl.split(x11)
    return a0, a1, a2, a3, a4, a5, a6, a7


@gluon.jit
def add_dot(total, a, b):
    for k in gl.static_range(8):
        total = gl.fma(a[k], b[k], total)
    return total


@gluon.jit
def load_columns_of(pointer, rows, inside, stride, zero, COUNT: gl.constexpr):
    values = ()
    for k in gl.static_range(COUNT):
        v = gl.load(pointer + rows.to(gl.int64) * stride + k, mask=inside, other=0.0).to(gl.float32)
        values = values + (v[:, None] + zero,)
    return values


@gluon.jit
def store_dot(pointer, sums, row, count, STRIDE: gl.constexpr):
    total = gl.sum(sums, axis=1)
    layout: gl.constexpr = total.type.layout
    r = row + gl.arange(0, total.shape[0], layout)
    gl.store(pointer + r.to(gl.int64) * STRIDE, total.to(pointer.dtype.element_ty), mask=r < count)


@gluon.jit
def store_dots(pointer, sums, row, count, COUNT: gl.constexpr):
    for k in gl.static_range(COUNT):
        store_dot(pointer + k, sums[k], row, count, COUNT)


@gluon.jit
def round_bf16(x):
    """fp32 ``x`` rounded to bf16, in fp32 (two at a time)."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
        "=r,=r,r,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def weighted_sum(tiles, weights, n: gl.constexpr):
    """``sum_j weights[j]*tiles[j]``, first to last, each product rounded: the forward's ``mixed``, bit for bit."""
    total = weights[0] * tiles[0]
    for j in gl.static_range(1, n):
        total = total + weights[j] * tiles[j]
    return total


@gluon.jit
def weighted_fma(tiles, weights, n: gl.constexpr):
    """``sum_j weights[j]*tiles[j]``, first to last."""
    total = weights[0] * tiles[0]
    for j in gl.static_range(1, n):
        total = gl.fma(weights[j], tiles[j], total)
    return total


@gluon.jit
def update_tile(streams, output, mixing, post, n: gl.constexpr):
    """The new streams, rounded, in fp32: the forward's, bit for bit."""
    new = ()
    for j in gl.static_range(n):
        value = mixing[j] * streams[0]
        for i in gl.static_range(1, n):
            value = value + mixing[i * n + j] * streams[i]
        new = new + (round_bf16(value + post[j] * output),)
    return new


@gluon.jit
def load_state_tiles(
    residual_desc,
    output_desc,
    g_new_desc,
    g_block_desc,
    phi_desc,
    tiles,
    ready,
    free,
    row,
    n: gl.constexpr,
    C: gl.constexpr,
    WIDTH: gl.constexpr,
    W_PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    PER: gl.constexpr,
):
    for i in range(C // WIDTH):
        s = i % STAGES
        column = i * WIDTH
        base = s * PER
        bar = ready.index(s)
        mbarrier.wait(free.index(s), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, PER * residual_desc.block_type.nbytes)
        for j in gl.static_range(n):
            load_tile(residual_desc, [row, j * C + column], bar, tiles.index(base + j))
        load_tile(output_desc, [row, column], bar, tiles.index(base + n))
        load_tile(g_block_desc, [row, column], bar, tiles.index(base + n + 1))
        for j in gl.static_range(n):
            load_tile(g_new_desc, [row, j * C + column], bar, tiles.index(base + n + 2 + j))
        for p in gl.static_range(W_PARTS):
            for j in gl.static_range(n):
                load_tile(phi_desc, [p * 32, j * C + column], bar, tiles.index(base + 2 * n + 2 + p * n + j))


@gluon.jit
def store_state_tiles(
    g_residual_desc,
    g_output_desc,
    tiles,
    done,
    free,
    row,
    n: gl.constexpr,
    C: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    PER: gl.constexpr,
):
    for i in range(C // WIDTH):
        s = i % STAGES
        mbarrier.wait(done.index(s), (i // STAGES) & 1)
        if g_residual_desc is not None:
            for j in gl.static_range(n):
                store_tile(g_residual_desc, [row, j * C + i * WIDTH], tiles.index(s * PER + j))
        if g_output_desc is not None:
            store_tile(g_output_desc, [row, i * WIDTH], tiles.index(s * PER + n))
        tma.store_wait(0)
        mbarrier.arrive(free.index(s), count=1)


@gluon.jit
def compute_state_tiles(
    rstd_ptr,
    mean_ptr,
    coefficient_ptr,
    parts_ptr,
    pre_ptr,
    post_ptr,
    mixing_ptr,
    norm_weight_ptr,
    g_pre_ptr,
    g_post_ptr,
    g_mixing_ptr,
    tiles,
    ready,
    done,
    row,
    count,
    stride_pre,
    stride_post,
    stride_mixing,
    blocks,
    n: gl.constexpr,
    C: gl.constexpr,
    TOKENS: gl.constexpr,
    WIDTH: gl.constexpr,
    W_PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    PER: gl.constexpr,
    G_RESIDUAL: gl.constexpr,
    G_OUTPUT: gl.constexpr,
):
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 4], [16, 8])
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]],
        [[1, 0], [2, 0], [4, 0], [8, 0], [0, 8]],
        [[0, 16], [0, 32], [16, 0]],
        [],
        [32, 64],
    )
    rows = row + gl.arange(0, TOKENS, gl.SliceLayout(1, L))
    inside = rows < count
    zero = gl.zeros([TOKENS, WIDTH], gl.float32, L)
    pre = load_columns_of(pre_ptr, rows, inside, stride_pre, zero, n)
    post = load_columns_of(post_ptr, rows, inside, stride_post, zero, n)
    mixing = load_columns_of(mixing_ptr, rows, inside, stride_mixing, zero, n * n)
    coefficient = gl.load(coefficient_ptr + rows, mask=inside, other=0.0)[:, None] + zero
    rstd = gl.load(rstd_ptr + rows, mask=inside, other=0.0)
    mean = gl.zeros([TOKENS], gl.float32, gl.SliceLayout(1, L))
    mean_at = mean_ptr + rows
    for _ in range(blocks):
        mean += gl.load(mean_at, mask=inside, other=0.0)
        mean_at += count
    drop = -(rstd * rstd * rstd * mean / C)[:, None] + zero
    rstd = rstd[:, None] + zero
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    LA: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0])
    ra = row + gl.arange(0, TOKENS, gl.SliceLayout(1, LA))
    ca = gl.arange(0, 32, gl.SliceLayout(0, LA))
    at = parts_ptr + ra.to(gl.int64)[:, None] * 64 + (ca // 8 * 16 + ca % 8)[None, :]
    high = gl.convert_layout(gl.load(at, mask=ra[:, None] < count, other=0.0), a_layout)
    low = gl.convert_layout(gl.load(at + 8, mask=ra[:, None] < count, other=0.0), a_layout)
    empty = pieces(zero)[0]
    pre_sums = ()
    post_sums = ()
    mixing_sums = ()
    for j in gl.static_range(n):
        pre_sums = pre_sums + (empty,)
        post_sums = post_sums + (empty,)
    for j in gl.static_range(n * n):
        mixing_sums = mixing_sums + (empty,)
    cols = gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    for i in range(C // WIDTH):
        s = i % STAGES
        base = s * PER
        if norm_weight_ptr is not None:
            norm_weight = gl.load(norm_weight_ptr + i * WIDTH + cols).to(gl.float32)
        mbarrier.wait(ready.index(s), (i // STAGES) & 1)
        streams = ()
        for j in gl.static_range(n):
            streams = streams + (tiles.index(base + j).load(L).to(gl.float32),)
        output = tiles.index(base + n).load(L).to(gl.float32)
        new = update_tile(streams, output, mixing, post, n)
        mixed = weighted_sum(new, pre, n)
        g_mixed = tiles.index(base + n + 1).load(L).to(gl.float32)
        if norm_weight_ptr is not None:
            g_mixed = g_mixed * norm_weight[None, :]
        g_mixed = gl.fma(drop, mixed, rstd * g_mixed)
        g_pieces = pieces(g_mixed)
        out_pieces = pieces(output)
        totals = ()
        added_pre = ()
        added_post = ()
        for j in gl.static_range(n):
            w_high = tiles.index(base + 2 * n + 2 + j).load(b_layout)
            through = gl.zeros([TOKENS, WIDTH], gl.float32, mma)
            if W_PARTS > 1:
                through = mma_v2(high, tiles.index(base + 3 * n + 2 + j).load(b_layout), through)
            through = mma_v2(low, w_high, through)
            through = mma_v2(high, w_high, through)
            # The columns of phi are stored so that a warp's columns follow one another.
            through = through.reshape([TOKENS, 2, 4, 4, 2]).permute((0, 2, 3, 1, 4)).reshape([TOKENS, WIDTH])
            total = gl.fma(coefficient, new[j], gl.convert_layout(through, L))
            total = gl.fma(pre[j], g_mixed, total)
            total = total + tiles.index(base + n + 2 + j).load(L).to(gl.float32)
            totals = totals + (total,)
            if g_pre_ptr is not None:
                added_pre = added_pre + (add_dot(pre_sums[j], g_pieces, pieces(new[j])),)
            if g_post_ptr is not None:
                added_post = added_post + (add_dot(post_sums[j], out_pieces, pieces(total)),)
        if g_pre_ptr is not None:
            pre_sums = added_pre
        if g_post_ptr is not None:
            post_sums = added_post
        if G_OUTPUT:
            tiles.index(base + n).store(weighted_fma(totals, post, n).to(gl.bfloat16))
        added = ()
        for k in gl.static_range(n):
            if g_mixing_ptr is not None:
                stream_pieces = pieces(streams[k])
                for j in gl.static_range(n):
                    added = added + (add_dot(mixing_sums[k * n + j], stream_pieces, pieces(totals[j])),)
            if G_RESIDUAL:
                grad = weighted_fma(totals, mixing[k * n : k * n + n], n)
                tiles.index(base + k).store(grad.to(gl.bfloat16))
        if g_mixing_ptr is not None:
            mixing_sums = added
        fence_async_shared()
        mbarrier.arrive(done.index(s), count=1)
    if g_pre_ptr is not None:
        store_dots(g_pre_ptr, pre_sums, row, count, n)
    if g_post_ptr is not None:
        store_dots(g_post_ptr, post_sums, row, count, n)
    if g_mixing_ptr is not None:
        store_dots(g_mixing_ptr, mixing_sums, row, count, n * n)


@gluon.jit(do_not_specialize=["count", "stride_pre", "stride_post", "stride_mixing", "blocks"])
def state_bwd_kernel(
    rstd_ptr,
    mean_ptr,
    coefficient_ptr,
    parts_ptr,
    pre_ptr,
    post_ptr,
    mixing_ptr,
    norm_weight_ptr,
    g_pre_ptr,
    g_post_ptr,
    g_mixing_ptr,
    residual_desc,
    output_desc,
    g_new_desc,
    g_block_desc,
    phi_desc,
    g_residual_desc,
    g_output_desc,
    count: gl.int32,
    stride_pre: gl.int64,
    stride_post: gl.int64,
    stride_mixing: gl.int64,
    blocks: gl.int32,
    n: gl.constexpr,
    C: gl.constexpr,
    TOKENS: gl.constexpr,
    WIDTH: gl.constexpr,
    W_PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    follow_launch()
    PER: gl.constexpr = 2 * n + 2 + W_PARTS * n
    # Last tokens first, like `last_first`: the pass before this one went from the first to the last.
    row = (gl.num_programs(0) - 1 - gl.program_id(0)) * TOKENS
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * PER, TOKENS, WIDTH], residual_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(done.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (
                compute_state_tiles,
                (
                    rstd_ptr,
                    mean_ptr,
                    coefficient_ptr,
                    parts_ptr,
                    pre_ptr,
                    post_ptr,
                    mixing_ptr,
                    norm_weight_ptr,
                    g_pre_ptr,
                    g_post_ptr,
                    g_mixing_ptr,
                    tiles,
                    ready,
                    done,
                    row,
                    count,
                    stride_pre,
                    stride_post,
                    stride_mixing,
                    blocks,
                    n,
                    C,
                    TOKENS,
                    WIDTH,
                    W_PARTS,
                    STAGES,
                    PER,
                    g_residual_desc is not None,
                    g_output_desc is not None,
                ),
            ),
            (
                load_state_tiles,
                (
                    residual_desc,
                    output_desc,
                    g_new_desc,
                    g_block_desc,
                    phi_desc,
                    tiles,
                    ready,
                    free,
                    row,
                    n,
                    C,
                    WIDTH,
                    W_PARTS,
                    STAGES,
                    PER,
                ),
            ),
            (
                store_state_tiles,
                (g_residual_desc, g_output_desc, tiles, done, free, row, n, C, WIDTH, STAGES, PER),
            ),
        ],
        [1, 1],
        [24, 24],
    )


_group_phi = Launcher(group_phi_kernel)
_norm_bwd = Launcher(Capped(norm_bwd_kernel, NORM_REGISTERS))
_state_bwd = Launcher(state_bwd_kernel)


@functools.lru_cache(maxsize=None)
def _layout(rows: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, WIDTH], gl.bfloat16)


def _tiles_of(t: Tensor, trailing: int, rows: int) -> TensorDescriptor:
    """How TMA moves tiles ``[rows, WIDTH]`` of the rows of ``t``."""
    flat, stride = tma_rows(t, trailing)
    width = math.prod(t.shape[t.dim() - trailing :])
    return TensorDescriptor(flat, [t.numel() // width, width], [stride, 1], [rows, WIDTH], _layout(rows))


def norm_bwd(
    new_residual: Tensor,
    g_block: Tensor,
    parts: Tensor,
    pre: Tensor,
    stride_pre: int,
    rstd: Tensor,
    norm_weight: Tensor | None,
    mean: Tensor,
    phi_shares: Tensor,
    weight_shares: Tensor | None,
) -> None:
    """Fill ``mean [C/64, T]``, ``phi_shares [chunks, N, K]`` and ``weight_shares [chunks, C]``.

    Args:
        new_residual: ``[..., n, C]``.
        g_block: ``[..., C]``.
        parts: ``[T, 64]`` bf16, as `store_interleaved_parts` writes them.
        pre: rows of n, ``stride_pre`` apart.
        rstd: ``[T]``.
        norm_weight: ``[C]`` or None.
    """
    n, width = new_residual.shape[-2:]
    chunks, blocks = phi_shares.shape[0], mean.shape[0]
    _norm_bwd(
        (blocks, chunks),
        (
            mean,
            phi_shares,
            weight_shares,
            pre,
            rstd,
            norm_weight,
            _tiles_of(new_residual, 2, NORM_TOKENS),
            _tiles_of(g_block, 1, NORM_TOKENS),
            _tiles_of(parts, 1, NORM_TOKENS),
            mean.shape[1],
            stride_pre,
        ),
        (n, width, tiles.CHUNK, NORM_TOKENS, WIDTH, NORM_STAGES),
        8,
    )


def state_bwd(
    output: Tensor,
    residual: Tensor,
    mixes: Sequence[Tensor],
    strides: Sequence[int],
    phi: Tensor,
    norm_weight: Tensor | None,
    g_new: Tensor,
    g_block: Tensor,
    rstd: Tensor,
    mean: Tensor,
    parts: Tensor,
    coefficient: Tensor,
    outs: Sequence[Tensor | None],
) -> None:
    """Fill ``outs``: gradients of output, residual, pre, post and mixing.

    Args:
        output, residual, g_new, g_block: ``[..., C]``, ``[..., n, C]`` and likewise.
        mixes: pre, post and mixing: rows of n, n and n*n, ``strides`` apart.
        phi: ``[N, K]``.
        mean: ``[C/64, T]`` of `norm_bwd`; parts, coefficient, rstd: as there.
    """
    n, width = residual.shape[-2:]
    size, k = phi.shape
    w_parts = min(2, PARTS[phi.dtype])
    grouped = torch.empty(w_parts * COLUMNS, k, dtype=torch.bfloat16, device=phi.device)
    _group_phi(
        (triton.cdiv(k, 1024), COLUMNS), (phi.contiguous(), grouped, size, k), (COLUMNS, w_parts, 1024), 4
    )
    g_output, g_residual, g_pre, g_post, g_mixing = outs
    _state_bwd(
        (triton.cdiv(rstd.numel(), STATE_TOKENS),),
        (
            rstd,
            mean,
            coefficient,
            parts,
            *mixes,
            norm_weight,
            g_pre,
            g_post,
            g_mixing,
            _tiles_of(residual, 2, STATE_TOKENS),
            _tiles_of(output, 1, STATE_TOKENS),
            _tiles_of(g_new, 2, STATE_TOKENS),
            _tiles_of(g_block, 1, STATE_TOKENS),
            _tiles_of(grouped, 1, STATE_TOKENS),
            None if g_residual is None else _tiles_of(g_residual, 2, STATE_TOKENS),
            None if g_output is None else _tiles_of(g_output, 1, STATE_TOKENS),
            rstd.numel(),
            *strides,
            mean.shape[0],
        ),
        (n, width, STATE_TOKENS, WIDTH, w_parts, STATE_STAGES),
        8,
    )
