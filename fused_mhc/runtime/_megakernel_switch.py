"""From opcodes to task bodies: one switch for the forward graphs, one for the backward ones.

A kernel is compiled for one graph and holds the bodies of that graph alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_mhc.scheduler import TaskType

from ._megakernel_bwd import (
    clear_task,
    mapping_grad_task,
    phi_rms_task,
    prev_a_task,
    prev_x_task,
    rms_norm_grad_task,
)
from ._megakernel_fwd import (
    input_mix_task,
    mapping_task,
    norm_cast_task,
    post_mix_norm_task,
    post_task,
    projection_task,
    rms_norm_task,
)
from ._megakernel_tiled_bwd import mix_grad_task, norm_grad_task, phi_grad_task, post_grad_task

__all__ = ["backward_task", "forward_task"]

_POST = tl.constexpr(int(TaskType.TASK_MHC_POST))
_NORM_CAST = tl.constexpr(int(TaskType.TASK_MHC_NORM_CAST))
_PROJECTION = tl.constexpr(int(TaskType.TASK_MHC_PROJECTION))
_INPUT_MIX = tl.constexpr(int(TaskType.TASK_MHC_INPUT_MIX))
_RMS_NORM = tl.constexpr(int(TaskType.TASK_RMS_NORM))
_MAPPING = tl.constexpr(int(TaskType.TASK_MHC_MAPPING))
_RMS_NORM_GRAD = tl.constexpr(int(TaskType.TASK_RMS_NORM_GRAD))
_CLEAR = tl.constexpr(int(TaskType.TASK_MHC_GRAD_PREV_A))
_PREV_A_AND_MAPPING = tl.constexpr(int(TaskType.TASK_MHC_GRAD_PREV_A_AND_MAPPING))
_PHI_RMS = tl.constexpr(int(TaskType.TASK_MHC_GRAD_PHI_RMS))
_PREV_X_AND_POST = tl.constexpr(int(TaskType.TASK_MHC_GRAD_PREV_X_AND_POST))
_TILE_POST_MIX_NORM = tl.constexpr(int(TaskType.TASK_TILE_POST_MIX_NORM))
_TILE_PROJECTION = tl.constexpr(int(TaskType.TASK_TILE_PROJECTION))
_TILE_MAPPING = tl.constexpr(int(TaskType.TASK_TILE_MAPPING))
_TILE_NORM_GRAD = tl.constexpr(int(TaskType.TASK_TILE_NORM_GRAD))
_TILE_MAPPING_GRAD = tl.constexpr(int(TaskType.TASK_TILE_MAPPING_GRAD))
_TILE_POST_GRAD = tl.constexpr(int(TaskType.TASK_TILE_POST_GRAD))
_TILE_MIX_GRAD = tl.constexpr(int(TaskType.TASK_TILE_MIX_GRAD))
_TILE_PHI_GRAD = tl.constexpr(int(TaskType.TASK_TILE_PHI_GRAD))


@triton.jit
def forward_task(
    op,
    tile,
    part_index,
    start,
    stop,
    size,
    b,
    phi_ptr,
    count,
    stride,
    stream_stride,
    slots,
    norm_eps,
    hc_eps,
    TILED: tl.constexpr,
    n: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CUBE_ROWS: tl.constexpr,
    MAPPING_ROWS: tl.constexpr,
    STEP: tl.constexpr,
    RATIO: tl.constexpr,
    PARTS: tl.constexpr,
    PART_WIDTH: tl.constexpr,
    ITERATIONS: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    ORDER: tl.constexpr,
    ALIGN: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """Run one task of a forward graph."""
    K: tl.constexpr = n * C
    N: tl.constexpr = n * n + 2 * n
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    if TILED:
        if op == _TILE_POST_MIX_NORM:
            post_mix_norm_task(b, start, stop, stride, stream_stride, norm_eps, n, C, ROWS, WIDTH, ENTRY)
        elif op == _TILE_PROJECTION:
            begin = part_index * (PART_WIDTH // STEP)
            end = tl.minimum(begin + PART_WIDTH // STEP, STEPS)
            out_ptr = b.logits_partial + part_index * count * N
            projection_task(
                b.new_residual,
                out_ptr,
                phi_ptr,
                start,
                stop,
                begin,
                end,
                K,
                n,
                COLUMNS,
                CUBE_ROWS,
                STEP,
                RATIO,
                X_PARTS,
                W_PARTS,
                ORDER,
                ALIGN,
            )
        elif op == _TILE_MAPPING:
            mapping_task(
                b, start, stop, count, norm_eps, hc_eps, n, C, COLUMNS, MAPPING_ROWS, PARTS, ITERATIONS
            )
    else:
        slot_start = tile % slots * size
        if op == _POST:
            post_task(b, start, stop, stride, stream_stride, n, C, ROWS, WIDTH, ENTRY)
        elif op == _NORM_CAST:
            norm_cast_task(b, start, stop, slot_start, n, C, ROWS, WIDTH)
        elif op == _PROJECTION:
            projection_task(
                b.staged + (slot_start - start) * K,
                b.logits,
                phi_ptr,
                start,
                stop,
                0,
                STEPS,
                K,
                n,
                COLUMNS,
                CUBE_ROWS,
                STEP,
                RATIO,
                X_PARTS,
                W_PARTS,
                ORDER,
                ALIGN,
            )
        elif op == _INPUT_MIX:
            input_mix_task(b, start, stop, n, C, ROWS, WIDTH, ENTRY)
        elif op == _RMS_NORM:
            rms_norm_task(b, start, stop, norm_eps, C, ROWS, WIDTH)
        elif op == _MAPPING:
            mapping_task(b, start, stop, count, norm_eps, hc_eps, n, C, COLUMNS, MAPPING_ROWS, 0, ITERATIONS)


@triton.jit
def backward_task(
    op,
    tile,
    part_index,
    start,
    stop,
    task_index,
    split_num,
    b,
    phi_ptr,
    count,
    stride,
    stream_stride,
    tiles,
    chunks,
    hc_eps,
    TILED: tl.constexpr,
    n: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CUBE_ROWS: tl.constexpr,
    CUBE_WIDTH: tl.constexpr,
    MAPPING_ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
    PART_WIDTH: tl.constexpr,
    PHI_WIDTH: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SEGMENT: tl.constexpr,
    G_PARTS: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    STATE: tl.constexpr,
    ENTRY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run one task of a backward graph. STATE: somebody wants a gradient of the state before."""
    if TILED:
        begin = part_index * PART_WIDTH
        end = tl.minimum(begin + PART_WIDTH, C)
        if op == _TILE_MAPPING_GRAD:
            mapping_grad_task(b, tile, start, stop, hc_eps, n, C, COLUMNS, MAPPING_ROWS, ITERATIONS, SEGMENT)
        elif op == _TILE_NORM_GRAD:
            norm_grad_task(
                b, tile, part_index, start, stop, begin, end, count, stride, stream_stride, n, C, ROWS, WIDTH
            )
        elif op == _TILE_POST_GRAD:
            if STATE:
                post_grad_task(
                    b,
                    phi_ptr,
                    part_index,
                    start,
                    stop,
                    begin,
                    end,
                    count,
                    stride,
                    stream_stride,
                    n,
                    C,
                    COLUMNS,
                    ROWS,
                    WIDTH,
                    STEP,
                    PARTS,
                    G_PARTS,
                    W_PARTS,
                )
        elif op == _TILE_PHI_GRAD:
            first = part_index * PHI_WIDTH
            last = tl.minimum(first + PHI_WIDTH, C)
            phi_grad_task(
                b,
                tile,
                start,
                stop,
                first,
                last,
                stride,
                stream_stride,
                n,
                C,
                COLUMNS,
                CUBE_ROWS,
                CUBE_WIDTH,
                G_PARTS,
                X_PARTS,
            )
        elif op == _TILE_MIX_GRAD:
            mix_grad_task(b, start, stop, count, n, C, MAPPING_ROWS, PARTS)
    else:
        if op == _CLEAR:
            clear_task(b, task_index, split_num, tiles, chunks, n, C, BLOCK)
        elif op == _RMS_NORM_GRAD:
            rms_norm_grad_task(b, tile, start, stop, n, C, ROWS, WIDTH, ENTRY)
        elif op == _PREV_A_AND_MAPPING:
            prev_a_task(b, start, stop, n, C, ROWS, WIDTH)
            mapping_grad_task(b, tile, start, stop, hc_eps, n, C, COLUMNS, MAPPING_ROWS, ITERATIONS, SEGMENT)
        elif op == _PHI_RMS:
            phi_rms_task(
                b,
                phi_ptr,
                tile,
                start,
                stop,
                n,
                C,
                COLUMNS,
                CUBE_ROWS,
                CUBE_WIDTH,
                STEP,
                G_PARTS,
                X_PARTS,
                W_PARTS,
            )
        elif op == _PREV_X_AND_POST:
            if STATE:
                prev_x_task(b, start, stop, stride, stream_stride, n, C, ROWS, WIDTH, ENTRY)
