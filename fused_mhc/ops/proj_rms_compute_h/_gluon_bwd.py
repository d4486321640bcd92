"""The backward's read of x for Hopper, in Gluon: bf16 x, at most 32 columns.

One warp moves tiles of x and of the gradient's parts through rings in shared memory by TMA. Two warpgroups multiply them,
both operands from shared memory, and write g_x over the tile of x that it came from, whence TMA stores it: a tile of x
is read once and nothing else is staged. g_W is added up in fp32 every FLUSH steps.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._triton_common import Launcher, alignment
from . import config as tiles
from ._gluon_tma import COLUMNS, load_tile, store_tile, thread_barrier, tiles_of

__all__ = ["project_bwd"]

#: Tokens of a step, and of a chunk.
TOKENS, CHUNK = gl.constexpr(64), gl.constexpr(tiles.CHUNK)
#: Columns of K of each warpgroup.
WIDTH = gl.constexpr(128)
#: Steps whose products share an accumulator.
FLUSH = gl.constexpr(4)
#: Tiles of x and of the gradient's parts in flight.
STAGES, G_STAGES = gl.constexpr(4), gl.constexpr(2)


@gluon.jit
def split_weight_tile(weight_ptr, w_high, w_low, column, width, size):
    """High and low bf16 part of ``weight [:, column:column+WIDTH]``, each row twice, in the order of the parts of g."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, 2 * COLUMNS, gl.SliceLayout(1, layout))
    col = row // 16 * 8 + row % 8
    k = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    at = weight_ptr + col[:, None] * width + k[None, :]
    weight = gl.load(at, mask=(col[:, None] < size) & (k[None, :] < width), other=0.0).to(gl.float32)
    high = weight.to(gl.bfloat16)
    w_high.store(high)
    w_low.store((weight - high.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def load_project_bwd_tile(
    x_desc,
    parts_desc,
    x_tiles,
    x_ready,
    x_free,
    g_tiles,
    g_ready,
    g_free,
    row,
    column,
    steps,
):
    for i in range(steps):
        s = i % G_STAGES
        mbarrier.wait(g_free.index(s), ((i // G_STAGES) & 1) ^ 1)
        mbarrier.expect(g_ready.index(s), parts_desc.block_type.nbytes)
        load_tile(parts_desc, [row + i * TOKENS, 0], g_ready.index(s), g_tiles.index(s))
        s = i % STAGES
        mbarrier.wait(x_free.index(s), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(x_ready.index(s), 2 * x_desc.block_type.nbytes)
        for half in gl.static_range(2):
            at = [row + i * TOKENS, column + half * WIDTH]
            load_tile(x_desc, at, x_ready.index(s), x_tiles.index(2 * s + half))


@gluon.jit
def multiply_project_bwd_tile(
    g_x_desc,
    x_tiles,
    x_ready,
    x_free,
    g_tiles,
    g_ready,
    g_free,
    w_high,
    w_low,
    coefficient_ptr,
    share_ptr,
    row,
    column,
    chunk,
    count,
    width,
    size,
    steps,
    HALF: gl.constexpr,
):
    """WIDTH columns of K: ``g_x = (high + low parts of g) @ (high + low parts of W) + coefficient*x``, and the share
    of g_W of each chunk. Rows of the g_W product are columns of g, eight high parts and then the eight low ones of the
    same columns, so both are in one thread."""
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    per_chunk: gl.constexpr = CHUNK // TOKENS
    rows = gl.arange(0, TOKENS, gl.SliceLayout(1, product))
    empty = gl.zeros([TOKENS, WIDTH], gl.float32, product)
    g_w = gl.zeros([2 * COLUMNS, WIDTH], gl.float32, product)
    total = gl.sum(g_w.reshape([COLUMNS // 8, 2, 8, WIDTH]), axis=1)
    coefficient = gl.load(coefficient_ptr + row + rows, mask=row + rows < count, other=0.0)
    for i in range(steps):
        s = i % STAGES
        g_s = i % G_STAGES
        first = row + i * TOKENS
        mbarrier.wait(g_ready.index(g_s), (i // G_STAGES) & 1)
        mbarrier.wait(x_ready.index(s), (i // STAGES) & 1)
        # Long before the fence below, which waits for it.
        following = first + TOKENS + rows
        next_coefficient = gl.load(coefficient_ptr + following, mask=following < count, other=0.0)
        g = g_tiles.index(g_s)
        x_tile = x_tiles.index(2 * s + HALF)
        g_x = warpgroup_mma(g, w_low, empty, use_acc=False, is_async=True)
        g_x = warpgroup_mma(g, w_high, g_x, is_async=True)
        g_w = warpgroup_mma(g.permute((1, 0)), x_tile, g_w, use_acc=i % FLUSH != 0, is_async=True)
        x = x_tile.load(product).to(gl.float32)
        g_x = warpgroup_mma_wait(1, deps=[g_x])
        g_x = gl.fma(coefficient[:, None] + gl.zeros_like(x), x, g_x)
        coefficient = next_coefficient
        g_w = warpgroup_mma_wait(0, deps=[g_w])
        # All four warps are past their products before any of them writes over x.
        thread_barrier()
        mbarrier.arrive(g_free.index(g_s), count=1)
        x_tile.store(g_x.to(gl.bfloat16))
        fence_async_shared()
        thread_barrier()
        store_tile(g_x_desc, [first, column + HALF * WIDTH], x_tile)
        # The store of the step before has read its tile: that one may be filled again.
        tma.store_wait(1)
        mbarrier.arrive(x_free.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        ends = (i % per_chunk == per_chunk - 1) | (i == steps - 1)
        if (i % FLUSH == FLUSH - 1) | ends:
            total += gl.sum(g_w.reshape([COLUMNS // 8, 2, 8, WIDTH]), axis=1)
        if ends:
            share = total.reshape([COLUMNS, WIDTH])
            layout: gl.constexpr = share.type.layout
            cols = gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
            k = column + HALF * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
            at = (chunk + i // per_chunk).to(gl.int64) * size * width + cols[:, None] * width + k[None, :]
            gl.store(share_ptr + at, share, mask=(cols[:, None] < size) & (k[None, :] < width))
            total = total * 0.0
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["count", "width", "size", "per_program"])
def project_bwd_kernel(
    weight_ptr,
    coefficient_ptr,
    share_ptr,
    x_desc,
    parts_desc,
    g_x_desc,
    count: gl.int32,
    width: gl.int32,
    size: gl.int32,
    per_program: gl.int32,
    ALIGN: gl.constexpr,
):
    width = width // ALIGN * ALIGN
    column = gl.program_id(0) * (2 * WIDTH)
    chunk = gl.program_id(1) * per_program
    row = chunk * CHUNK
    steps = gl.cdiv(gl.minimum(row + per_program * CHUNK, count) - row, TOKENS)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, TOKENS, WIDTH], x_desc.layout)
    g_tiles = gl.allocate_shared_memory(gl.bfloat16, [G_STAGES, TOKENS, 2 * COLUMNS], parts_desc.layout)
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * COLUMNS, WIDTH], gl.bfloat16)
    w_high = gl.allocate_shared_memory(gl.bfloat16, [2, 2 * COLUMNS, WIDTH], w_layout)
    w_low = gl.allocate_shared_memory(gl.bfloat16, [2, 2 * COLUMNS, WIDTH], w_layout)
    x_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    g_ready = gl.allocate_shared_memory(gl.int64, [G_STAGES, 1], mbarrier.MBarrierLayout())
    g_free = gl.allocate_shared_memory(gl.int64, [G_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(x_ready.index(i), count=1)
        mbarrier.init(x_free.index(i), count=2)
    for i in gl.static_range(G_STAGES):
        mbarrier.init(g_ready.index(i), count=1)
        mbarrier.init(g_free.index(i), count=2)
    for half in gl.static_range(2):
        at = column + half * WIDTH
        split_weight_tile(weight_ptr, w_high.index(half), w_low.index(half), at, width, size)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (
                multiply_project_bwd_tile,
                (
                    g_x_desc,
                    x_tiles,
                    x_ready,
                    x_free,
                    g_tiles,
                    g_ready,
                    g_free,
                    w_high.index(0),
                    w_low.index(0),
                    coefficient_ptr,
                    share_ptr,
                    row,
                    column,
                    chunk,
                    count,
                    width,
                    size,
                    steps,
                    0,
                ),
            ),
            (
                multiply_project_bwd_tile,
                (
                    g_x_desc,
                    x_tiles,
                    x_ready,
                    x_free,
                    g_tiles,
                    g_ready,
                    g_free,
                    w_high.index(1),
                    w_low.index(1),
                    coefficient_ptr,
                    share_ptr,
                    row,
                    column,
                    chunk,
                    count,
                    width,
                    size,
                    steps,
                    1,
                ),
            ),
            (
                load_project_bwd_tile,
                (x_desc, parts_desc, x_tiles, x_ready, x_free, g_tiles, g_ready, g_free, row, column, steps),
            ),
        ],
        [4, 1],
        [232, 24],
    )


_project_bwd = Launcher(project_bwd_kernel)


def project_bwd(
    x: Tensor,
    stride: int,
    weight: Tensor,
    parts: Tensor,
    coefficient: Tensor,
    g_x: Tensor,
    shares: Tensor,
) -> None:
    """Fill ``g_x [T, K]`` and ``shares [chunks, N, K]`` (see `_triton_bwd.project_bwd`).

    Args:
        x: T rows of K bf16 elements, ``stride`` apart (16-byte steps).
        parts: ``[T, 64]`` as `store_interleaved_parts` writes them.
        coefficient: ``[T]``.
    """
    chunks, size, width = shares.shape
    count = coefficient.shape[0]
    tokens, columns, half = TOKENS.value, 2 * COLUMNS.value, WIDTH.value
    width_tiles = -(-width // (2 * half))
    per_program = tiles.chunks_per_program(width_tiles, chunks)
    _project_bwd(
        (width_tiles, -(-chunks // per_program)),
        (
            weight,
            coefficient,
            shares,
            tiles_of(x, (count, width), stride, tokens, half),
            tiles_of(parts, (count, columns), columns, tokens, columns),
            tiles_of(g_x, (count, width), width, tokens, half),
            count,
            width,
            size,
            per_program,
        ),
        (alignment(width),),
        4,
    )
