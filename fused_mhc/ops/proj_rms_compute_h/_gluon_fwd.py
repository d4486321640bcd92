"""The projection's read of x for Hopper, in Gluon: bf16 x, at most 32 columns.

One warp moves tiles of x and of the weight's parts through rings in shared memory by TMA, two warpgroups multiply them
and square x. Sums have the order of `project_tile`, except that the products of a slice share an accumulator and that the
squares of a slice are added in another order: both differ by less than 3e-7 of the largest value.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ...device import device_info
from .._triton_common import Launcher
from . import config as tiles
from ._gluon_tma import COLUMNS, follow_launch, load_tile, thread_barrier, tiles_of

__all__ = ["TOKENS", "project"]

#: Rows of x in a program, 64 for each warpgroup.
TOKENS = gl.constexpr(128)
STEP = gl.constexpr(tiles.STEP)
#: Steps in a slice.
RATIO = gl.constexpr(tiles.SLICE // tiles.STEP)
#: Tiles of x and of the weight in a ring (no bit depends on it): where two programs share a multiprocessor, and where
#: each has its own and has to keep as much in flight alone.
SHARED_STAGES, OWN_STAGES = 3, 6
#: Registers of a thread at the start, before the warpgroups share them out: two programs on a multiprocessor.
REGISTERS = 80


@gluon.jit
def row_squares_tile(x):
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
    STAGES: gl.constexpr,
):
    for i in range(steps):
        s = i % STAGES
        mbarrier.wait(x_free.index(s), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(x_ready.index(s), x_desc.block_type.nbytes)
        load_tile(x_desc, [row, k + i * STEP], x_ready.index(s), x_tiles.index(s))
        mbarrier.wait(w_free.index(s), ((i // STAGES) & 1) ^ 1)
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
    STAGES: gl.constexpr,
):
    """Rows ``64*GROUP`` and on of a program's tile; the left operand comes from registers, which hold it for the
    squares anyway."""
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    large = gl.zeros([64, COLUMNS], gl.float32, product)
    small = gl.zeros([64, COLUMNS], gl.float32, product)
    total = gl.zeros([64, COLUMNS], gl.float32, product)
    squares = row_squares_tile(gl.zeros([64, STEP], gl.bfloat16, operand))
    square = gl.sum(squares, axis=1)
    for i in range(steps):
        s = i % STAGES
        mbarrier.wait(x_ready.index(s), (i // STAGES) & 1)
        x = x_tiles.index(s).slice(64 * GROUP, 64, dim=0).load(operand)
        mbarrier.wait(w_ready.index(s), (i // STAGES) & 1)
        chained = i % RATIO != 0
        for less in gl.static_range(W_PARTS - 1):
            w = w_tiles.index(s * W_PARTS + W_PARTS - 1 - less).permute((1, 0))
            small = warpgroup_mma(x, w, small, use_acc=chained if less == 0 else True, is_async=True)
        w = w_tiles.index(s * W_PARTS).permute((1, 0))
        large = warpgroup_mma(x, w, large, use_acc=chained, is_async=True)
        # Not before the products took x: a tile that is still being read may be overwritten.
        thread_barrier()
        mbarrier.arrive(x_free.index(s), count=1)
        squares += row_squares_tile(x)
        large, small, x = warpgroup_mma_wait(0, deps=[large, small, x])
        thread_barrier()
        mbarrier.arrive(w_free.index(s), count=1)
        if (i % RATIO == RATIO - 1) | (i == steps - 1):
            total += large + small
            square += gl.sum(squares, axis=1)
            squares = squares * 0.0
    rows = row + 64 * GROUP + gl.arange(0, 64, gl.SliceLayout(1, product))
    cols = gl.arange(0, COLUMNS, gl.SliceLayout(0, product))
    at = rows.to(gl.int64)[:, None] * size + cols[None, :]
    mask = (rows[:, None] < count) & (cols[None, :] < size)
    gl.store(partial_ptr + at, total, mask=mask)
    gl.store(square_ptr + rows, gl.convert_layout(square, gl.SliceLayout(1, product)), mask=rows < count)


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
    W_PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    follow_launch()
    index = gl.program_id(0)
    row = gl.program_id(1) * TOKENS
    begin = index * per_program
    own_steps = gl.minimum(begin + per_program, steps) - begin
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, STEP], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * W_PARTS, COLUMNS, STEP], parts_desc.layout)
    x_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(x_ready.index(i), count=1)
        mbarrier.init(x_free.index(i), count=2)
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
                    STAGES,
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
                    STAGES,
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
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [104, 24],
    )


class _Capped:
    """A kernel whose launches start with at most this many registers a thread."""

    def __init__(self, kernel: Any, registers: int) -> None:
        self.kernel, self.registers = kernel, registers

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self.kernel[grid], maxnreg=self.registers)


_project = Launcher(_Capped(project_kernel, REGISTERS))


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
    step = tiles.STEP
    alone = grid[0] * grid[1] <= device_info(x.device).sm_count
    _project(
        grid,
        (
            partial,
            square,
            tiles_of(x, (count, x.shape[-1]), stride, TOKENS.value, step),
            tiles_of(parts, (w_parts * rows, part_width), part_width, COLUMNS.value, step),
            count,
            size,
            part_width // step,
            per_program,
        ),
        (w_parts, OWN_STAGES if alone else SHARED_STAGES),
        4,
    )
