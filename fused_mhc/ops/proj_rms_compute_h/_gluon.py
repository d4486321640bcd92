"""The projection's passes over x for Hopper, in Gluon: bf16 x, at most 32 columns.

One warp moves tiles by TMA through a ring in shared memory, two warpgroups multiply them. The forward's sums have the
order of `project_tile` but for the products of a slice, which stay in one accumulator (256 elements of K), and for the
squares within a slice: both within 3e-7 of the largest value. The backward writes g_x over the tile of x that it came
from, so a tile of x is read once and nothing else is staged; g_W is added up in fp32 every 256 tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .._triton_common import Launcher, alignment
from . import config as tiles

__all__ = ["project", "project_bwd"]

# These names changed after Triton 3.6.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

#: Columns of the projection in a product: N rounded up.
COLUMNS = 32
#: Rows of x in a program of the forward, 64 for each warpgroup.
TOKENS = 128
#: Registers of a thread at the start: two programs of 12 warps share a multiprocessor.
FORWARD_REGISTERS = 80
FORWARD_STAGES, FORWARD_WEIGHT_STAGES = 3, 3
#: Tokens of a step of the backward, columns of K for each warpgroup, steps between two sums in fp32.
GRAD_TOKENS, GRAD_WIDTH, GRAD_FLUSH = 64, 128, 4
GRAD_STAGES, GRAD_PART_STAGES = 4, 2


@gluon.jit
def row_squares_tile(x, STEP: gl.constexpr):
    """Sums of squares ``[rows, 4]`` of ``x [rows, STEP]``, each of what one thread holds."""
    value = x.to(gl.float32)
    value = value * value
    return gl.sum(gl.sum(value.reshape([value.shape[0], STEP // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def load_project_tile(
    x_desc,
    parts_desc,
    x_tiles,
    x_ready,
    x_free,
    w_tiles,
    w_ready,
    w_free,
    row,
    k,
    steps,
    W_PARTS: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    W_STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    for i in range(steps):
        s = i % STAGES
        mbarrier.wait(x_free.index(s), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(x_ready.index(s), x_desc.block_type.nbytes)
        load_tile(x_desc, [row, k + i * STEP], x_ready.index(s), x_tiles.index(s))
        s = i % W_STAGES
        mbarrier.wait(w_free.index(s), ((i // W_STAGES) & 1) ^ 1)
        mbarrier.expect(w_ready.index(s), W_PARTS * parts_desc.block_type.nbytes)
        for p in gl.static_range(W_PARTS):
            load_tile(
                parts_desc, [p * COLUMNS, k + i * STEP], w_ready.index(s), w_tiles.index(s * W_PARTS + p)
            )


@gluon.jit
def multiply_project_tile(
    x_tiles,
    x_ready,
    x_free,
    w_tiles,
    w_ready,
    w_free,
    partial_ptr,
    square_ptr,
    row,
    count,
    steps,
    size,
    GROUP: gl.constexpr,
    W_PARTS: gl.constexpr,
    STEP: gl.constexpr,
    RATIO: gl.constexpr,
    STAGES: gl.constexpr,
    W_STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Rows ``64*GROUP`` and on of a program's tile; the left operand comes from registers, which hold it for the
    squares anyway."""
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    stored: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    large = gl.zeros([64, COLUMNS], gl.float32, product)
    small = gl.zeros([64, COLUMNS], gl.float32, product)
    total = gl.zeros([64, COLUMNS], gl.float32, product)
    squares = row_squares_tile(gl.zeros([64, STEP], gl.bfloat16, operand), STEP)
    square = gl.sum(squares, axis=1)
    for i in range(steps):
        s = i % STAGES
        mbarrier.wait(x_ready.index(s), (i // STAGES) & 1)
        x = x_tiles.index(s).slice(64 * GROUP, 64, dim=0).load(operand)
        mbarrier.arrive(x_free.index(s), count=1)
        s = i % W_STAGES
        mbarrier.wait(w_ready.index(s), (i // W_STAGES) & 1)
        chained = i % RATIO != 0
        for less in gl.static_range(W_PARTS - 1):
            w = w_tiles.index(s * W_PARTS + W_PARTS - 1 - less).permute((1, 0))
            small = warpgroup_mma(x, w, small, use_acc=chained if less == 0 else True, is_async=True)
        w = w_tiles.index(s * W_PARTS).permute((1, 0))
        large = warpgroup_mma(x, w, large, use_acc=chained, is_async=True)
        squares += row_squares_tile(x, STEP)
        large, small, x = warpgroup_mma_wait(0, deps=[large, small, x])
        mbarrier.arrive(w_free.index(s), count=1)
        if (i % RATIO == RATIO - 1) | (i == steps - 1):
            total += large + small
            square += gl.sum(squares, axis=1)
            squares = squares * 0.0
    rows = row + 64 * GROUP + gl.arange(0, 64, gl.SliceLayout(1, stored))
    cols = gl.arange(0, COLUMNS, gl.SliceLayout(0, stored))
    at = rows.to(gl.int64)[:, None] * size + cols[None, :]
    mask = (rows[:, None] < count) & (cols[None, :] < size)
    gl.store(partial_ptr + at, gl.convert_layout(total, stored), mask=mask)
    gl.store(square_ptr + rows, gl.convert_layout(square, gl.SliceLayout(1, stored)), mask=rows < count)


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
    TOKENS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    G_STAGES: gl.constexpr,
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
    CHUNK: gl.constexpr,
    TOKENS: gl.constexpr,
    WIDTH: gl.constexpr,
    FLUSH: gl.constexpr,
    STAGES: gl.constexpr,
    G_STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,
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


@gluon.jit
def split_weight_tile(
    weight_ptr, w_high, w_low, column, width, size, WIDTH: gl.constexpr, COLUMNS: gl.constexpr
):
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


@gluon.jit(do_not_specialize=["count", "size", "steps", "per_program"])
def project_kernel(
    partial_ptr,
    square_ptr,
    x_desc,
    parts_desc,
    count: gl.int32,
    size: gl.int32,
    steps: gl.int32,
    per_program: gl.int32,
    TOKENS: gl.constexpr,
    W_PARTS: gl.constexpr,
    STEP: gl.constexpr,
    RATIO: gl.constexpr,
    STAGES: gl.constexpr,
    W_STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    index = gl.program_id(0)
    row = gl.program_id(1) * TOKENS
    begin = index * per_program
    own_steps = gl.minimum(begin + per_program, steps) - begin
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, STEP], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(gl.bfloat16, [W_STAGES * W_PARTS, COLUMNS, STEP], parts_desc.layout)
    x_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_ready = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    w_free = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(x_ready.index(i), count=1)
        mbarrier.init(x_free.index(i), count=2)
    for i in gl.static_range(W_STAGES):
        mbarrier.init(w_ready.index(i), count=1)
        mbarrier.init(w_free.index(i), count=2)
    partial_ptr += index.to(gl.int64) * count * size
    square_ptr += index.to(gl.int64) * count
    gl.warp_specialize(
        [
            (
                multiply_project_tile,
                (
                    x_tiles,
                    x_ready,
                    x_free,
                    w_tiles,
                    w_ready,
                    w_free,
                    partial_ptr,
                    square_ptr,
                    row,
                    count,
                    own_steps,
                    size,
                    0,
                    W_PARTS,
                    STEP,
                    RATIO,
                    STAGES,
                    W_STAGES,
                    COLUMNS,
                ),
            ),
            (
                multiply_project_tile,
                (
                    x_tiles,
                    x_ready,
                    x_free,
                    w_tiles,
                    w_ready,
                    w_free,
                    partial_ptr,
                    square_ptr,
                    row,
                    count,
                    own_steps,
                    size,
                    1,
                    W_PARTS,
                    STEP,
                    RATIO,
                    STAGES,
                    W_STAGES,
                    COLUMNS,
                ),
            ),
            (
                load_project_tile,
                (
                    x_desc,
                    parts_desc,
                    x_tiles,
                    x_ready,
                    x_free,
                    w_tiles,
                    w_ready,
                    w_free,
                    row,
                    begin * STEP,
                    own_steps,
                    W_PARTS,
                    STEP,
                    STAGES,
                    W_STAGES,
                    COLUMNS,
                ),
            ),
        ],
        [4, 1],
        [104, 24],
    )


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
    CHUNK: gl.constexpr,
    TOKENS: gl.constexpr,
    WIDTH: gl.constexpr,
    FLUSH: gl.constexpr,
    STAGES: gl.constexpr,
    G_STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,
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
        split_weight_tile(
            weight_ptr,
            w_high.index(half),
            w_low.index(half),
            column + half * WIDTH,
            width,
            size,
            WIDTH,
            COLUMNS,
        )
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
                    CHUNK,
                    TOKENS,
                    WIDTH,
                    FLUSH,
                    STAGES,
                    G_STAGES,
                    COLUMNS,
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
                    CHUNK,
                    TOKENS,
                    WIDTH,
                    FLUSH,
                    STAGES,
                    G_STAGES,
                    COLUMNS,
                ),
            ),
            (
                load_project_bwd_tile,
                (
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
                    TOKENS,
                    WIDTH,
                    STAGES,
                    G_STAGES,
                ),
            ),
        ],
        [4, 1],
        [232, 24],
    )


class _Capped:
    """A kernel whose launches start with at most this many registers a thread."""

    def __init__(self, kernel: Any, registers: int) -> None:
        self.kernel, self.registers = kernel, registers

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self.kernel[grid], maxnreg=self.registers)


_project = Launcher(_Capped(project_kernel, FORWARD_REGISTERS))
_project_bwd = Launcher(project_bwd_kernel)


@functools.lru_cache(maxsize=None)
def _layout(rows: int, columns: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


def _tiles_of(t: Tensor, shape: tuple[int, int], stride: int, rows: int, columns: int) -> TensorDescriptor:
    """How TMA reads or writes tiles ``[rows, columns]`` of bf16 rows."""
    return TensorDescriptor(t, list(shape), [stride, 1], [rows, columns], _layout(rows, columns))


def project(
    grid: tuple[int, int],
    x: Tensor,
    stride: int,
    parts: Tensor,
    partial: Tensor,
    square: Tensor,
    per_program: int,
) -> None:
    """Fill ``partial [P, T, N]`` and ``square [P, T]`` (see `_triton_fwd.project`); ``grid`` is P by tiles of tokens.

    Args:
        x: T rows of K bf16 elements, ``stride`` apart (16-byte steps).
        parts: ``[W_PARTS, 32, K rounded up to STEP]`` bf16.
        per_program: steps of K in one program.
    """
    count, size = partial.shape[1:]
    w_parts, rows, part_width = parts.shape
    _project(
        grid,
        (
            partial,
            square,
            _tiles_of(x, (count, x.shape[-1]), stride, TOKENS, tiles.STEP),
            _tiles_of(parts, (w_parts * rows, part_width), part_width, COLUMNS, tiles.STEP),
            count,
            size,
            part_width // tiles.STEP,
            per_program,
        ),
        (
            TOKENS,
            w_parts,
            tiles.STEP,
            tiles.SLICE // tiles.STEP,
            FORWARD_STAGES,
            FORWARD_WEIGHT_STAGES,
            COLUMNS,
        ),
        4,
    )


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
    width_tiles = triton.cdiv(width, 2 * GRAD_WIDTH)
    per_program = tiles.chunks_per_program(width_tiles, chunks)
    _project_bwd(
        (width_tiles, triton.cdiv(chunks, per_program)),
        (
            weight,
            coefficient,
            shares,
            _tiles_of(x, (count, width), stride, GRAD_TOKENS, GRAD_WIDTH),
            _tiles_of(parts, (count, 2 * COLUMNS), 2 * COLUMNS, GRAD_TOKENS, 2 * COLUMNS),
            _tiles_of(g_x, (count, width), width, GRAD_TOKENS, GRAD_WIDTH),
            count,
            width,
            size,
            per_program,
        ),
        (
            tiles.CHUNK,
            GRAD_TOKENS,
            GRAD_WIDTH,
            GRAD_FLUSH,
            GRAD_STAGES,
            GRAD_PART_STAGES,
            COLUMNS,
            alignment(width),
        ),
        4,
    )
