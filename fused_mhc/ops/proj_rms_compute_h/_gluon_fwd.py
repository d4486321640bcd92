"""The projection's read of x for Hopper, in Gluon: bf16 x, at most 128 columns.

A program works through items, each a group of K (or a slice) of one tile of tokens. One warp moves tiles of x and of the
weight's parts through rings in shared memory by TMA and runs ahead from one item into the next, so that the rings are
full while sums are stored; two to four warpgroups, 64 tokens each, multiply the tiles and square x. Up to 32 columns two
programs share a multiprocessor: one hides what the other waits for. With more, many tokens share a tile of the weight,
whose way out of the L2 cache is then as busy as that of x, and all of shared memory is one program's.

Sums have the order of `project_tile`, except that the products of a slice share an accumulator and that the squares of a
slice are added in another order: both differ by less than 3e-7 of the largest value.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ...device import device_info
from .._triton_common import Launcher
from . import config as tiles
from ._gluon_tma import Capped, follow_launch, load_tile, thread_barrier, tiles_of

__all__ = ["project"]

#: Rows of x of a warpgroup.
ROWS = gl.constexpr(tiles.HOPPER_ROWS)
STEP = gl.constexpr(tiles.STEP)
#: Steps in a slice.
RATIO = gl.constexpr(tiles.SLICE // tiles.STEP)
#: Bytes for the tiles in flight (no bit depends on how many they are): a multiprocessor's 227 KB, less the barriers.
ROOM = 224 * 1024
#: By warpgroups that multiply and programs on a multiprocessor: registers of a thread at the start; of a multiplying one,
#: and of one of the loading warp and its three idle neighbours, after they are shared out.
REGISTERS = {(2, 2): (80, 104, 24), (2, 1): (168, 240, 24), (3, 1): (128, 160, 32), (4, 1): (96, 112, 32)}


@gluon.jit
def row_squares_tile(x):
    """Sums of squares ``[rows, 4]`` of ``x [rows, STEP]``, each of what one thread holds."""
    value = x.to(gl.float32)
    value = value * value
    return gl.sum(gl.sum(value.reshape([value.shape[0], STEP // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def item_steps(item, partials, per_program, steps):
    """An item's tile of tokens, its place among the partial sums, its first step of K and the end of its steps. The items
    of a tile are neighbours: programs that run together read whole rows of x, and the same weight."""
    tile = item // partials
    index = item - tile * partials
    begin = index * per_program
    return tile, index, begin, gl.minimum(begin + per_program, steps)


@gluon.jit
def load_project_tiles(rings, narrow_tiles, work, sources, narrow_desc):
    x_tiles, x_ready, x_free, wide_tiles, w_ready, w_free = rings
    first, items, programs, partials, per_program, steps = work
    x_desc, wide_desc = sources
    stages: gl.constexpr = x_ready.shape[0]
    warpgroups: gl.constexpr = x_tiles.shape[0] // stages
    w_parts: gl.constexpr = wide_tiles.shape[0] // stages
    wide: gl.constexpr = wide_tiles.shape[1]
    columns: gl.constexpr = wide if narrow_tiles is None else wide + narrow_tiles.shape[1]
    # Steps since the launch: the rings turn on from one item to the next.
    i = 0
    for item in range(first, items, programs):
        tile, _, begin, end = item_steps(item, partials, per_program, steps)
        row = tile * (warpgroups * ROWS)
        for step in range(begin, end):
            s = i % stages
            free = ((i // stages) & 1) ^ 1
            k = step * STEP
            mbarrier.wait(x_free.index(s), free)
            mbarrier.expect(x_ready.index(s), warpgroups * x_desc.block_type.nbytes)
            for g in gl.static_range(warpgroups):
                load_tile(x_desc, [row + g * ROWS, k], x_ready.index(s), x_tiles.index(s * warpgroups + g))
            mbarrier.wait(w_free.index(s), free)
            mbarrier.expect(w_ready.index(s), w_parts * columns * STEP * 2)
            for p in gl.static_range(w_parts):
                load_tile(wide_desc, [p * columns, k], w_ready.index(s), wide_tiles.index(s * w_parts + p))
                if narrow_tiles is not None:
                    load_tile(
                        narrow_desc,
                        [p * columns + wide, k],
                        w_ready.index(s),
                        narrow_tiles.index(s * w_parts + p),
                    )
            i += 1


@gluon.jit
def store_columns(partial_ptr, value, row, count, column, SIZE: gl.constexpr):
    """Write ``value``, whose first column is ``column``, to rows ``row`` and on of ``partial [count, SIZE]``. (With SIZE a
    constant no registers hold numbers of columns for the masks through all of the loop.)"""
    layout: gl.constexpr = value.type.layout
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    cols = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    at = rows.to(gl.int64)[:, None] * SIZE + cols[None, :]
    gl.store(partial_ptr + at, value, mask=(rows[:, None] < count) & (cols[None, :] < SIZE))


@gluon.jit
def multiply_project_tiles(rings, narrow_tiles, work, sums, SIZE: gl.constexpr, GROUP: gl.constexpr):
    """Rows ``ROWS*GROUP`` and on of a program's tiles; the left operand comes from registers, which hold it for the
    squares anyway. A product has a power of two of columns: N = 80 makes a wide one of 64 and a narrow one of 16."""
    x_tiles, x_ready, x_free, wide_tiles, w_ready, w_free = rings
    first, items, programs, partials, per_program, steps = work
    partial_ptr, square_ptr, count = sums
    stages: gl.constexpr = x_ready.shape[0]
    warpgroups: gl.constexpr = x_tiles.shape[0] // stages
    w_parts: gl.constexpr = wide_tiles.shape[0] // stages
    wide: gl.constexpr = wide_tiles.shape[1]
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, wide, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    large = gl.zeros([ROWS, wide], gl.float32, product)
    small = gl.zeros([ROWS, wide], gl.float32, product)
    if narrow_tiles is not None:
        narrow: gl.constexpr = narrow_tiles.shape[1]
        narrow_product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, narrow, 16])
        narrow_operand: gl.constexpr = gl.DotOperandLayout(0, narrow_product, 2)
        narrow_large = gl.zeros([ROWS, narrow], gl.float32, narrow_product)
        narrow_small = gl.zeros([ROWS, narrow], gl.float32, narrow_product)
    i = 0
    for item in range(first, items, programs):
        tile, index, begin, end = item_steps(item, partials, per_program, steps)
        total = gl.zeros([ROWS, wide], gl.float32, product)
        if narrow_tiles is not None:
            narrow_total = gl.zeros([ROWS, narrow], gl.float32, narrow_product)
        squares = row_squares_tile(gl.zeros([ROWS, STEP], gl.bfloat16, operand))
        square = gl.sum(squares, axis=1)
        for step in range(begin, end):
            s = i % stages
            ready = (i // stages) & 1
            mbarrier.wait(x_ready.index(s), ready)
            x = x_tiles.index(s * warpgroups + GROUP).load(operand)
            if narrow_tiles is not None:
                # The same registers: the rows of a product do not depend on its columns.
                narrow_x = gl.convert_layout(x, narrow_operand, assert_trivial=True)
            mbarrier.wait(w_ready.index(s), ready)
            chained = step % RATIO != 0
            for less in gl.static_range(w_parts - 1):
                use_acc = chained if less == 0 else True
                p = s * w_parts + w_parts - 1 - less
                w = wide_tiles.index(p).permute((1, 0))
                small = warpgroup_mma(x, w, small, use_acc=use_acc, is_async=True)
                if narrow_tiles is not None:
                    w = narrow_tiles.index(p).permute((1, 0))
                    narrow_small = warpgroup_mma(narrow_x, w, narrow_small, use_acc=use_acc, is_async=True)
            w = wide_tiles.index(s * w_parts).permute((1, 0))
            large = warpgroup_mma(x, w, large, use_acc=chained, is_async=True)
            if narrow_tiles is not None:
                w = narrow_tiles.index(s * w_parts).permute((1, 0))
                narrow_large = warpgroup_mma(narrow_x, w, narrow_large, use_acc=chained, is_async=True)
            # Not before the products took x: a tile that is still being read may be overwritten.
            thread_barrier()
            mbarrier.arrive(x_free.index(s), count=1)
            if narrow_tiles is None:
                large, small, x = warpgroup_mma_wait(0, deps=[large, small, x])
            else:
                large, small, narrow_large, narrow_small, x, narrow_x = warpgroup_mma_wait(
                    0, deps=[large, small, narrow_large, narrow_small, x, narrow_x]
                )
            thread_barrier()
            mbarrier.arrive(w_free.index(s), count=1)
            squares += row_squares_tile(x)
            if (step % RATIO == RATIO - 1) | (step == end - 1):
                total += large + small
                if narrow_tiles is not None:
                    narrow_total += narrow_large + narrow_small
                square += gl.sum(squares, axis=1)
                squares = squares * 0.0
            i += 1
        row = (tile * warpgroups + GROUP) * ROWS
        to = partial_ptr + index.to(gl.int64) * count * SIZE
        store_columns(to, total, row, count, 0, SIZE)
        if narrow_tiles is not None:
            store_columns(to, narrow_total, row, count, wide, SIZE)
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, product))
        square = gl.convert_layout(square, gl.SliceLayout(1, product))
        gl.store(square_ptr + index.to(gl.int64) * count + rows, square, mask=rows < count)


@gluon.jit(do_not_specialize=["count", "steps", "per_program", "partials", "items"])
def project_kernel(
    partial_ptr,
    square_ptr,
    x_desc,
    wide_desc,
    narrow_desc,
    count: gl.int32,
    steps: gl.int32,
    per_program: gl.int32,
    partials: gl.int32,
    items: gl.int32,
    SIZE: gl.constexpr,
    W_PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    MULTIPLYING: gl.constexpr,
    LOADING: gl.constexpr,
):
    follow_launch()
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * WARPGROUPS, ROWS, STEP], x_desc.layout)
    wide: gl.constexpr = wide_desc.block_shape[0]
    wide_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * W_PARTS, wide, STEP], wide_desc.layout)
    if narrow_desc is None:
        narrow_tiles: gl.constexpr = None
    else:
        narrow_tiles = gl.allocate_shared_memory(
            gl.bfloat16, [STAGES * W_PARTS, narrow_desc.block_shape[0], STEP], narrow_desc.layout
        )
    x_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(x_ready.index(i), count=1)
        mbarrier.init(x_free.index(i), count=WARPGROUPS)
        mbarrier.init(w_ready.index(i), count=1)
        mbarrier.init(w_free.index(i), count=WARPGROUPS)
    rings = (x_tiles, x_ready, x_free, wide_tiles, w_ready, w_free)
    work = (gl.program_id(0), items, gl.num_programs(0), partials, per_program, steps)
    sources, sums = (x_desc, wide_desc), (partial_ptr, square_ptr, count)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (multiply_project_tiles, (rings, narrow_tiles, work, sums, SIZE, 0)),
                (multiply_project_tiles, (rings, narrow_tiles, work, sums, SIZE, 1)),
                (load_project_tiles, (rings, narrow_tiles, work, sources, narrow_desc)),
            ],
            [4, 1],
            [MULTIPLYING, LOADING],
        )
    elif WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (multiply_project_tiles, (rings, narrow_tiles, work, sums, SIZE, 0)),
                (multiply_project_tiles, (rings, narrow_tiles, work, sums, SIZE, 1)),
                (multiply_project_tiles, (rings, narrow_tiles, work, sums, SIZE, 2)),
                (load_project_tiles, (rings, narrow_tiles, work, sources, narrow_desc)),
            ],
            [4, 4, 1],
            [MULTIPLYING, MULTIPLYING, LOADING],
        )
    else:
        gl.warp_specialize(
            [
                (multiply_project_tiles, (rings, narrow_tiles, work, sums, SIZE, 0)),
                (multiply_project_tiles, (rings, narrow_tiles, work, sums, SIZE, 1)),
                (multiply_project_tiles, (rings, narrow_tiles, work, sums, SIZE, 2)),
                (multiply_project_tiles, (rings, narrow_tiles, work, sums, SIZE, 3)),
                (load_project_tiles, (rings, narrow_tiles, work, sources, narrow_desc)),
            ],
            [4, 4, 4, 1],
            [MULTIPLYING, MULTIPLYING, MULTIPLYING, LOADING],
        )


_project = {key: Launcher(Capped(project_kernel, start)) for key, (start, *_) in REGISTERS.items()}


def project(
    x: Tensor,
    stride: int,
    parts: Tensor,
    partial: Tensor,
    square: Tensor,
    per_program: int,
    warpgroups: int,
) -> None:
    """Fill ``partial [P, T, N]`` and ``square [P, T]`` (see `_triton_fwd.project`).

    Args:
        x: T rows of K bf16 elements, ``stride`` apart (16-byte steps).
        parts: ``[W_PARTS, tiles.hopper_columns(N), K rounded up to STEP]`` bf16.
        per_program: steps of K in one item.
        warpgroups: at most so many multiply.
    """
    partials, count, size = partial.shape
    w_parts, columns, part_width = parts.shape
    step, rows = tiles.STEP, tiles.HOPPER_ROWS
    # The rows of one tile past the last token are multiplied too: few tokens leave them to no warpgroup.
    warpgroups = warpgroups if count > 2 * rows else 2
    items = partials * -(-count // (warpgroups * rows))
    wide = 1 << (columns.bit_length() - 1)
    part_shape = (w_parts * columns, part_width)
    places = device_info(x.device).sm_count
    beside = 2 if columns <= 32 and items > places else 1
    stages = ROOM // beside // (2 * step * (warpgroups * rows + w_parts * columns))
    _project[warpgroups, beside](
        (min(items, beside * places),),
        (
            partial,
            square,
            tiles_of(x, (count, x.shape[-1]), stride, rows, step),
            tiles_of(parts, part_shape, part_width, wide, step),
            None if columns == wide else tiles_of(parts, part_shape, part_width, columns - wide, step),
            count,
            part_width // step,
            per_program,
            partials,
            items,
        ),
        (size, w_parts, min(stages, 8), warpgroups, *REGISTERS[warpgroups, beside][1:]),
        4,
    )
