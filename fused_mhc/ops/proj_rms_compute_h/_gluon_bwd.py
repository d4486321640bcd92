"""The backward's read of x for Hopper, in Gluon: bf16 x, at most 32 columns.

One warp moves tiles of x and of the gradient's parts through rings in shared memory by TMA. Two warpgroups multiply them,
both operands from shared memory, and write g_x over the tile of x that it came from, whence TMA stores it: a tile of x
is read once and nothing else is staged. g_W is added up in fp32 every FLUSH steps.

`mhc_pre` adds to g_x. The gradient that is passed on takes the room of one tile of x, and a tile of its own. The one of
the layer input is the same for all streams: most of it is in the L2 cache, whence it goes straight to registers, and the
warp that moves tiles asks for the rest to be brought there. The columns of the product change places within groups of
32, so that a thread has eight neighbours, 16 bytes, instead of four twos.
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

from .._strides import alignment
from .._triton_common import Launcher
from . import config as tiles
from ._gluon_tma import COLUMNS, follow_launch, load_tile, store_tile, thread_barrier, tiles_of

__all__ = ["project_bwd"]

#: Tokens of a step, and of a chunk.
TOKENS, CHUNK = gl.constexpr(64), gl.constexpr(tiles.CHUNK)
#: Columns of K of each warpgroup.
WIDTH = gl.constexpr(tiles.HOPPER_WIDTH)
#: Steps whose products share an accumulator.
FLUSH = gl.constexpr(4)
#: Tiles of x and of the gradient's parts in flight.
STAGES, G_STAGES = gl.constexpr(4), gl.constexpr(2)
#: The same where something is added to g_x: one of x less, for that of the gradient that is passed on.
ADDING_STAGES, ADDING_G_STAGES = gl.constexpr(3), gl.constexpr(3)
#: Bring $3 bytes at $1 into the L2 cache where $2 is not 0. ($0: an inline instruction has a result.)
_TO_L2 = gl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, 0; }"
)

#: Of the accumulator ``[TOKENS, WIDTH]`` after `swap_columns`: a thread's eight neighbours are its first eight registers.
_SWAPPED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)


@gluon.jit
def swap_columns(tile):
    """Columns in the order ``(J, j, q, e)`` from the order ``(J, q, j, e)``, of 4 q, 4 j and 2 e: its own inverse.

    Thread q of four has the columns ``8*j + 2*q + e`` of a product, and, by their names after this, eight neighbours.
    In registers nothing moves.
    """
    groups = tile.reshape([tile.shape[0], tile.shape[1] // 32, 4, 4, 2])
    return groups.permute((0, 1, 3, 2, 4)).reshape([tile.shape[0], tile.shape[1]])


@gluon.jit
def split_weight_tile(weight_ptr, w_high, w_low, column, width, size, SWAP: gl.constexpr):
    """High and low bf16 part of ``weight [:, column:column+WIDTH]``, each row twice, in the order of the parts of g.
    SWAP: so that columns of the product stand as `swap_columns` takes them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, 2 * COLUMNS, gl.SliceLayout(1, layout))
    col = row // 16 * 8 + row % 8
    k = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    at = weight_ptr + col[:, None] * width + k[None, :]
    weight = gl.load(at, mask=(col[:, None] < size) & (k[None, :] < width), other=0.0).to(gl.float32)
    if SWAP:
        weight = swap_columns(weight)
    high = weight.to(gl.bfloat16)
    w_high.store(high)
    w_low.store((weight - high.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def to_l2(pointer, row, count, stride, column, width, inner, n):
    """Ask for every n-th row of the tiles of the streams' common gradient; the other streams' programs ask for the
    others. (The rows of one instruction leave one after another.)"""
    i = gl.arange(0, 2 * TOKENS, gl.BlockedLayout([1], [32], [1], [0]))
    k = column + i % 2 * WIDTH
    stream = k // inner
    rows = row + i // 2
    inside = (rows < count) & (k < width) & (i // 2 % n == stream)
    at = pointer + rows.to(gl.int64) * stride + (k - stream * inner)
    nbytes = WIDTH * pointer.dtype.element_ty.primitive_bitwidth // 8
    gl.inline_asm_elementwise(
        _TO_L2, "=r,l,r,r", [at, inside.to(gl.int32), nbytes], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_rows(pointer, rows, count, stride, columns):
    at = pointer + rows.to(gl.int64)[:, None] * stride + columns[None, :]
    return gl.load(at, mask=(rows < count)[:, None], other=0.0)


@gluon.jit
def load_passed_tile(g_passed_desc, tiles, ready, free, row, column, step):
    mbarrier.wait(free, (step & 1) ^ 1)
    mbarrier.expect(ready, 2 * g_passed_desc.block_type.nbytes)
    for half in gl.static_range(2):
        load_tile(g_passed_desc, [row + step * TOKENS, column + half * WIDTH], ready, tiles.index(half))


@gluon.jit
def load_project_bwd_tile(
    x_desc,
    parts_desc,
    g_passed_desc,
    x_tiles,
    x_ready,
    x_free,
    g_tiles,
    g_ready,
    g_free,
    passed_tiles,
    passed_ready,
    passed_free,
    g_layer_ptr,
    row,
    column,
    count,
    width,
    inner,
    stride_layer,
    steps,
):
    stages: gl.constexpr = x_tiles.shape[0] // 2
    g_stages: gl.constexpr = g_tiles.shape[0]
    for i in range(steps):
        s = i % g_stages
        mbarrier.wait(g_free.index(s), ((i // g_stages) & 1) ^ 1)
        mbarrier.expect(g_ready.index(s), parts_desc.block_type.nbytes)
        load_tile(parts_desc, [row + i * TOKENS, 0], g_ready.index(s), g_tiles.index(s))
        s = i % stages
        mbarrier.wait(x_free.index(s), ((i // stages) & 1) ^ 1)
        mbarrier.expect(x_ready.index(s), 2 * x_desc.block_type.nbytes)
        for half in gl.static_range(2):
            at = [row + i * TOKENS, column + half * WIDTH]
            load_tile(x_desc, at, x_ready.index(s), x_tiles.index(2 * s + half))
        if g_layer_ptr is not None:
            to_l2(g_layer_ptr, row + i * TOKENS, count, stride_layer, column, width, inner, width // inner)
        if g_passed_desc is not None:
            # A step behind x, which has more tiles: the load of its next need not wait for this one to be read.
            if i > 0:
                load_passed_tile(g_passed_desc, passed_tiles, passed_ready, passed_free, row, column, i - 1)
    if g_passed_desc is not None:
        load_passed_tile(g_passed_desc, passed_tiles, passed_ready, passed_free, row, column, steps - 1)


@gluon.jit
def multiply_project_bwd_tile(
    g_x_desc,
    x_tiles,
    x_ready,
    x_free,
    g_tiles,
    g_ready,
    g_free,
    passed_tiles,
    passed_ready,
    passed_free,
    w_high,
    w_low,
    coefficient_ptr,
    share_ptr,
    mix_ptr,
    g_layer_ptr,
    row,
    column,
    chunk,
    count,
    width,
    size,
    inner,
    stride_mix,
    stride_layer,
    steps,
    HALF: gl.constexpr,
):
    """WIDTH columns of K: ``g_x = (high + low parts of g) @ (high + low parts of W) + coefficient*x``, then ``+
    mix*g_layer`` and ``+ g_passed`` where there are any, and the share of g_W of each chunk. Rows of the g_W product
    are columns of g, eight high parts and then the eight low ones of the same columns, so both are in one thread."""
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    per_chunk: gl.constexpr = CHUNK // TOKENS
    stages: gl.constexpr = x_tiles.shape[0] // 2
    g_stages: gl.constexpr = g_tiles.shape[0]
    adds: gl.constexpr = g_layer_ptr is not None or passed_tiles is not None
    empty = gl.zeros([TOKENS, WIDTH], gl.float32, product)
    g_w = gl.zeros([2 * COLUMNS, WIDTH], gl.float32, product)
    total = gl.sum(g_w.reshape([COLUMNS // 8, 2, 8, WIDTH]), axis=1)
    owner: gl.constexpr = _SWAPPED if adds else product
    rows = gl.arange(0, TOKENS, gl.SliceLayout(1, owner))
    coefficient = gl.load(coefficient_ptr + row + rows, mask=row + rows < count, other=0.0)
    if g_layer_ptr is not None:
        # WIDTH columns are of one stream, or all past K.
        stream = (column + HALF * WIDTH) // inner
        end = gl.where(column + HALF * WIDTH < width, count, 0)
        here = column + HALF * WIDTH - stream * inner + gl.arange(0, WIDTH, gl.SliceLayout(0, owner))
        mix_ptr += stream
        mix = gl.load(mix_ptr + (row + rows).to(gl.int64) * stride_mix, mask=row + rows < end, other=0.0)
    for i in range(steps):
        s = i % stages
        g_s = i % g_stages
        first = row + i * TOKENS
        mbarrier.wait(g_ready.index(g_s), (i // g_stages) & 1)
        mbarrier.wait(x_ready.index(s), (i // stages) & 1)
        # Long before the fence below, which waits for it.
        following = first + TOKENS + rows
        next_coefficient = gl.load(coefficient_ptr + following, mask=following < count, other=0.0)
        if g_layer_ptr is not None:
            next_mix = gl.load(mix_ptr + following.to(gl.int64) * stride_mix, mask=following < end, other=0.0)
        g = g_tiles.index(g_s)
        x_tile = x_tiles.index(2 * s + HALF)
        g_x = warpgroup_mma(g, w_low, empty, use_acc=False, is_async=True)
        g_x = warpgroup_mma(g, w_high, g_x, is_async=True)
        g_w = warpgroup_mma(g.permute((1, 0)), x_tile, g_w, use_acc=i % FLUSH != 0, is_async=True)
        if adds:
            # As below, but a whole step sooner, since there is a tile less.
            tma.store_wait(0)
            mbarrier.arrive(x_free.index((i + stages - 1) % stages), count=1, pred=i > 0)
        if g_layer_ptr is not None:
            g_layer = load_rows(g_layer_ptr, first + rows, end, stride_layer, here)
        if not adds:
            x = x_tile.load(owner).to(gl.float32)
        g_x = warpgroup_mma_wait(1, deps=[g_x])
        if adds:
            g_x = gl.convert_layout(swap_columns(g_x), owner, assert_trivial=True)
            # Not before the wait: registers for it and for the layer's gradient would not be left.
            x = x_tile.load(owner).to(gl.float32)
        g_x = gl.fma(coefficient[:, None] + gl.zeros_like(x), x, g_x)
        coefficient = next_coefficient
        if g_layer_ptr is not None:
            g_x += mix.to(gl.float32)[:, None] * g_layer.to(gl.float32)
            mix = next_mix
        if passed_tiles is not None:
            mbarrier.wait(passed_ready, i & 1)
            g_x += passed_tiles.index(HALF).load(owner).to(gl.float32)
        g_w = warpgroup_mma_wait(0, deps=[g_w])
        # All four warps are past their products before any of them writes over x, and past their loads of what was
        # passed on before that tile is filled again.
        thread_barrier()
        mbarrier.arrive(g_free.index(g_s), count=1)
        if passed_tiles is not None:
            mbarrier.arrive(passed_free, count=1)
        x_tile.store(g_x.to(gl.bfloat16))
        fence_async_shared()
        thread_barrier()
        store_tile(g_x_desc, [first, column + HALF * WIDTH], x_tile)
        if not adds:
            # The store of the step before has read its tile: that one may be filled again.
            tma.store_wait(1)
            mbarrier.arrive(x_free.index((i + stages - 1) % stages), count=1, pred=i > 0)
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


@gluon.jit(
    do_not_specialize=[
        "count",
        "width",
        "size",
        "per_program",
        "inner",
        "stride_mix",
        "stride_layer",
    ]
)
def project_bwd_kernel(
    weight_ptr,
    coefficient_ptr,
    share_ptr,
    mix_ptr,
    g_layer_ptr,
    x_desc,
    parts_desc,
    g_x_desc,
    g_passed_desc,
    count: gl.int32,
    width: gl.int32,
    size: gl.int32,
    per_program: gl.int32,
    inner: gl.int32,
    stride_mix: gl.int64,
    stride_layer: gl.int64,
    ALIGN: gl.constexpr,
    LAYER_ALIGN: gl.constexpr,
):
    follow_launch()
    width = width // ALIGN * ALIGN
    inner = inner // WIDTH * WIDTH
    stride_layer = stride_layer // LAYER_ALIGN * LAYER_ALIGN
    adds: gl.constexpr = g_layer_ptr is not None or g_passed_desc is not None
    stages: gl.constexpr = ADDING_STAGES if adds else STAGES
    g_stages: gl.constexpr = ADDING_G_STAGES if adds else G_STAGES
    column = gl.program_id(0) * (2 * WIDTH)
    chunk = gl.program_id(1) * per_program
    row = chunk * CHUNK
    steps = gl.cdiv(gl.minimum(row + per_program * CHUNK, count) - row, TOKENS)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * stages, TOKENS, WIDTH], x_desc.layout)
    g_tiles = gl.allocate_shared_memory(gl.bfloat16, [g_stages, TOKENS, 2 * COLUMNS], parts_desc.layout)
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * COLUMNS, WIDTH], gl.bfloat16)
    w_high = gl.allocate_shared_memory(gl.bfloat16, [2, 2 * COLUMNS, WIDTH], w_layout)
    w_low = gl.allocate_shared_memory(gl.bfloat16, [2, 2 * COLUMNS, WIDTH], w_layout)
    x_ready = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    g_ready = gl.allocate_shared_memory(gl.int64, [g_stages, 1], mbarrier.MBarrierLayout())
    g_free = gl.allocate_shared_memory(gl.int64, [g_stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(x_ready.index(i), count=1)
        mbarrier.init(x_free.index(i), count=2)
    for i in gl.static_range(g_stages):
        mbarrier.init(g_ready.index(i), count=1)
        mbarrier.init(g_free.index(i), count=2)
    passed_tiles, passed_ready, passed_free = None, None, None
    if g_passed_desc is not None:
        passed_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, WIDTH], g_passed_desc.layout)
        passed_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        passed_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(passed_ready, count=1)
        mbarrier.init(passed_free, count=2)
    for half in gl.static_range(2):
        at = column + half * WIDTH
        split_weight_tile(weight_ptr, w_high.index(half), w_low.index(half), at, width, size, adds)
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
                    passed_tiles,
                    passed_ready,
                    passed_free,
                    w_high.index(0),
                    w_low.index(0),
                    coefficient_ptr,
                    share_ptr,
                    mix_ptr,
                    g_layer_ptr,
                    row,
                    column,
                    chunk,
                    count,
                    width,
                    size,
                    inner,
                    stride_mix,
                    stride_layer,
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
                    passed_tiles,
                    passed_ready,
                    passed_free,
                    w_high.index(1),
                    w_low.index(1),
                    coefficient_ptr,
                    share_ptr,
                    mix_ptr,
                    g_layer_ptr,
                    row,
                    column,
                    chunk,
                    count,
                    width,
                    size,
                    inner,
                    stride_mix,
                    stride_layer,
                    steps,
                    1,
                ),
            ),
            (
                load_project_bwd_tile,
                (
                    x_desc,
                    parts_desc,
                    g_passed_desc,
                    x_tiles,
                    x_ready,
                    x_free,
                    g_tiles,
                    g_ready,
                    g_free,
                    passed_tiles,
                    passed_ready,
                    passed_free,
                    g_layer_ptr,
                    row,
                    column,
                    count,
                    width,
                    inner,
                    stride_layer,
                    steps,
                ),
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
    mix: tuple[Tensor | None, int] = (None, 0),
    g_layer: tuple[Tensor | None, int] = (None, 0),
    g_passed: Tensor | None = None,
    passed_stride: int = 0,
    inner: int = tiles.HOPPER_WIDTH,
) -> None:
    """Fill ``g_x [T, K]`` and ``shares [chunks, N, K]`` (see `_triton_bwd.project_bwd`).

    Args:
        x: T rows of K bf16 elements, ``stride`` apart (16-byte steps), as ``g_passed``, where there is one.
        parts: ``[T, 64]`` as `store_interleaved_parts` writes them.
        coefficient: ``[T]``.
        mix, g_layer: rows of n and of C elements, where there are any, and what they are apart (the second in 16-byte
            steps); C = ``inner`` is a multiple of WIDTH.
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
            mix[0],
            g_layer[0],
            tiles_of(x, (count, width), stride, tokens, half),
            tiles_of(parts, (count, columns), columns, tokens, columns),
            tiles_of(g_x, (count, width), width, tokens, half),
            None if g_passed is None else tiles_of(g_passed, (count, width), passed_stride, tokens, half),
            count,
            width,
            size,
            per_program,
            inner,
            mix[1],
            g_layer[1],
        ),
        (alignment(width), alignment(g_layer[1])),
        4,
    )
