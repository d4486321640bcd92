"""The projection and the sum of squares of x in one read of it, in Triton.

The weight is first split into bf16 parts, once. Then K is cut into slices and groups of slices: a large batch gives a
program a whole group, a small one a single slice, and `collect_tile` adds what they left in one fixed order, so the
bits of a token depend neither on T nor on its neighbours.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import device_info
from .._strides import alignment, flatten
from .._triton_common import INTERPRETING, Launcher, follow
from .._tuning import tuned
from . import config as tiles
from ._triton_tiles import part, project_tile
from .config import ORDER, PARTS

__all__ = [
    "SPLIT_BLOCK",
    "empty_parts",
    "hopper",
    "project",
    "runs_gluon",
    "split_weight",
    "split_weight_tile",
    "tma_rows",
]

#: Columns of K that a program splits.
SPLIT_BLOCK = 1024


@triton.jit
def split_weight_tile(
    weight_ptr,
    parts_ptr,
    row,
    rows,
    k,
    width,
    size,
    part_width,
    W_PARTS: tl.constexpr,
):
    """Columns ``k`` of row ``row`` of ``parts [W_PARTS, rows, part_width]`` of ``weight [size, width]``, zeros where there
    is no weight."""
    end = tl.where(row < size, width, 0)
    weight = tl.load(weight_ptr + row * width + k, mask=k < end, other=0.0)
    for index in tl.static_range(W_PARTS):
        at = (index * rows + row) * part_width + k
        tl.store(parts_ptr + at, part(weight, index), mask=k < part_width)


@triton.jit(do_not_specialize=["width", "size", "part_width"])
def split_weight_kernel(
    weight_ptr,
    parts_ptr,
    width: tl.int64,
    size: tl.int32,
    part_width: tl.int64,
    W_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The whole of the parts."""
    follow()
    row = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    split_weight_tile(weight_ptr, parts_ptr, row, tl.num_programs(1), k, width, size, part_width, W_PARTS)


@triton.jit(
    do_not_specialize=[
        "count",
        "stride_x",
        "width",
        "size",
        "part_stride",
        "part_width",
        "steps",
        "per_program",
    ]
)
def project_kernel(
    x_ptr,
    parts_ptr,
    partial_ptr,
    square_ptr,
    count: tl.int64,
    stride_x: tl.int64,
    width: tl.int64,
    size: tl.int64,
    part_stride: tl.int64,
    part_width: tl.int64,
    steps: tl.int32,
    per_program: tl.int32,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    RATIO: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    ORDER: tl.constexpr,
    ALIGN: tl.constexpr,
):
    follow()
    index, tile, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    rows = tile * TOKENS + tl.arange(0, TOKENS)
    row_mask = rows < count
    cols = block * COLUMNS + tl.arange(0, COLUMNS)
    begin = index * per_program
    proj, square = project_tile(
        x_ptr,
        parts_ptr,
        rows,
        row_mask,
        cols,
        stride_x,
        width,
        part_stride,
        part_width,
        begin,
        tl.minimum(begin + per_program, steps),
        STEP,
        RATIO,
        X_PARTS,
        W_PARTS,
        ORDER,
        ALIGN,
    )
    at = (index * count + rows[:, None]) * size + cols[None, :]
    tl.store(partial_ptr + at, proj, mask=row_mask[:, None] & (cols[None, :] < size))
    if block == 0:
        tl.store(square_ptr + index * count + rows, square, mask=row_mask)


_split_weight = Launcher(split_weight_kernel)
_project = Launcher(project_kernel)


@functools.lru_cache(maxsize=None)
def runs_gluon(dtype: torch.dtype, width: int, size: int, device: torch.device, columns: int = 32) -> bool:
    """Whether the Hopper kernels that take up to ``columns`` columns (default: the backward's) take x of this ``dtype`` and
    K = ``width``, with N = ``size``. Never a question of T or of strides: a token's bits depend on the answer."""
    fits = dtype is torch.bfloat16 and size <= columns and width % 8 == 0
    return fits and not INTERPRETING.value and device_info(device).arch == "sm_90"


def tma_rows(t: Tensor, trailing: int = 1) -> tuple[Tensor, int]:
    """``t`` as rows of its last ``trailing`` dimensions, each dense, for TMA: they start at multiples of 16 bytes, and are
    copied where they do not. Also the stride of the rows."""
    flat, stride = flatten(t, trailing, dense=True)
    width = math.prod(t.shape[t.dim() - trailing :])
    if flat.data_ptr() % 16 or stride % 8 or stride < width:
        return flat.clone(memory_format=torch.contiguous_format), width
    return flat, stride


class Plan(NamedTuple):
    """What a call needs to know that its count of tokens and its strides have no part in."""

    gluon: bool
    tokens: int
    columns: int
    blocks: int
    steps: int
    group: int
    x_parts: int
    w_parts: int
    order: int
    num_warps: int
    num_stages: int


def config_for(kernel: str, size: int, width: int, device: torch.device) -> tiles.ProjectionConfig:
    """The tiles for a weight ``[size, width]``."""
    arch = device_info(device).arch
    return tuned(kernel, device, tiles.heuristic, tiles.candidates, (size, width), arch)


@functools.lru_cache(maxsize=None)
def plan(
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    size: int,
    width: int,
    precision: str,
    device: torch.device,
    chosen: tiles.ProjectionConfig,
) -> Plan:
    gluon = runs_gluon(x_dtype, width, size, device, max(tiles.HOPPER_WARPGROUPS))
    columns = tiles.hopper_columns(size) if gluon else tiles.columns(size)
    order = ORDER[precision]
    return Plan(
        gluon=gluon,
        tokens=tiles.HOPPER_ROWS * tiles.HOPPER_WARPGROUPS[columns] if gluon else chosen.tokens,
        columns=columns,
        blocks=-(-size // columns),
        steps=-(-width // tiles.STEP),
        group=tiles.hopper_group(size, width) if gluon else tiles.GROUP // tiles.SLICE,
        x_parts=PARTS[x_dtype],
        w_parts=min(PARTS[w_dtype], order),
        order=order,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )


@functools.lru_cache(maxsize=None)
def hopper(direction: str) -> Any:
    """The module of Gluon kernels, loaded where they run."""
    return importlib.import_module(f"{__package__}._gluon_{direction}")


def plan_for(dtype: torch.dtype, weight: Tensor, precision: str) -> Plan:
    """The plan for x of ``dtype``."""
    size, width = weight.shape
    chosen = config_for("project_fwd", size, width, weight.device)
    return plan(dtype, weight.dtype, size, width, precision, weight.device, chosen)


def empty_parts(dtype: torch.dtype, weight: Tensor, precision: str) -> Tensor:
    """Memory for the parts of ``weight`` that `project` reads, for x of ``dtype``."""
    use = plan_for(dtype, weight, precision)
    shape = (use.w_parts, use.blocks * use.columns, use.steps * tiles.STEP)
    return torch.empty(shape, dtype=torch.bfloat16, device=weight.device)


def split_weight(weight: Tensor, parts: Tensor) -> None:
    """Fill ``parts [W_PARTS, rows, columns]``, at least as large as ``weight [N, K]``, with its bf16 parts and zeros."""
    (size, width), (count, rows, part_width) = weight.shape, parts.shape
    _split_weight(
        (-(-part_width // SPLIT_BLOCK), rows),
        (weight.contiguous(), parts, width, size, part_width),
        (count, SPLIT_BLOCK),
        4,
    )


def project(
    x: Tensor, weight: Tensor, precision: str, parts: Tensor | None = None
) -> tuple[Tensor, Tensor, int]:
    """Partial sums of ``x @ weight.T`` and of the squares of x, of at least one token.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``.
        precision: ``"fp32"`` or ``"tf32"``.
        parts: of the weight, where a launch before this one has filled them. Default: filled here.

    Returns:
        fp32 ``[P, T, N]`` and ``[P, T]``, and how many of the P make a group (`collect_tile` adds them).
    """
    size, width = weight.shape
    count = x.numel() // width
    device = x.device
    use = plan_for(x.dtype, weight, precision)
    if parts is None:
        parts = empty_parts(x.dtype, weight, precision)
        split_weight(weight, parts)
    _, rows, part_width = parts.shape
    token_tiles = -(-count // use.tokens)
    slices = tiles.slices_per_program(token_tiles, -(-width // (use.group * tiles.SLICE)), use.group)
    per_program = slices * (tiles.SLICE // tiles.STEP)
    partials = -(-use.steps // per_program)
    partial = torch.empty((partials, count, size), dtype=torch.float32, device=device)
    square = torch.empty((partials, count), dtype=torch.float32, device=device)
    if use.gluon:
        warpgroups = use.tokens // tiles.HOPPER_ROWS
        hopper("fwd").project(*tma_rows(x), parts, partial, square, per_program, warpgroups)
    else:
        flat, stride = flatten(x, 1)
        _project(
            (partials, token_tiles, use.blocks),
            (
                flat,
                parts,
                partial,
                square,
                count,
                stride,
                width,
                size,
                rows * part_width,
                part_width,
                use.steps,
                per_program,
            ),
            (
                use.tokens,
                use.columns,
                tiles.STEP,
                tiles.SLICE // tiles.STEP,
                use.x_parts,
                use.w_parts,
                use.order,
                alignment(stride, width),
            ),
            use.num_warps,
            use.num_stages,
        )
    return partial, square, use.group // slices
