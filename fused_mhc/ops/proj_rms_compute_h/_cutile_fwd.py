"""The projection and the sum of squares of x in one read of it, in cuTile.

The weight is first split into bf16 parts, once. Then K is cut into slices and groups of slices: a large batch gives a
program a whole group, a small one a single slice, and `collect_tile` adds what they left in one fixed order, so the
bits of a token depend neither on T nor on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

import cuda.tile as ct
import torch
from torch import Tensor

from .._cutile_common import Launcher, Whole, architecture, kernel, widen
from .._strides import flatten
from . import config as tiles
from ._cutile_tiles import part
from .config import ORDER, PARTS, padded

__all__ = ["project", "row_spans", "rows_of", "warp_groups"]

#: Elements of K that a program of the weight's splitting takes.
_SPLIT = 1024
#: Offsets inside one launch's view of the tokens stay below this: the copies that a Hopper or Blackwell GPU makes by
#: itself take 32-bit shapes and strides.
_LIMIT = 2**31 - 1


@kernel
def split_weight_kernel(
    weight_,
    parts_,
    width: ct.ScalarInt64,
    size: ct.ScalarInt64,
    part_width: ct.ScalarInt64,
    W_PARTS: ct.Constant[int],
):
    """``parts [W_PARTS, size, part_width]`` of ``weight [size, width]``, zeros where there is no weight."""
    row = ct.astype(ct.bid(1), ct.int64)
    k = ct.astype(ct.bid(0), ct.int64) * _SPLIT + ct.arange(_SPLIT, dtype=ct.int64)
    weight = weight_.get_raw_memory().load_offset(row * width + k, mask=k < width, padding_value=0)
    for index in ct.static_iter(range(W_PARTS)):
        at = (index * size + row) * part_width + k
        parts_.get_raw_memory().store_offset(at, part(weight, index), mask=k < part_width)


def _dot_step(acc, x, parts, k, X_PARTS, W_PARTS, ORDER, COLUMNS, STEP):
    """``acc + x @ weight.T`` for one step of K. Products of parts i and j are taken where ``i + j < ORDER``, the small
    ones first: what is far below the sum adds up before it meets it."""
    for less in ct.static_iter(range(W_PARTS)):
        w = ct.load(
            parts, (W_PARTS - 1 - less, 0, k), (1, COLUMNS, STEP), padding_mode=ct.PaddingMode.ZERO, latency=8
        )
        turned = ct.transpose(ct.reshape(w, (COLUMNS, STEP)))
        for i in ct.static_iter(range(X_PARTS)):
            if X_PARTS - 1 - i + W_PARTS - 1 - less < ORDER:
                acc = ct.mma(part(x, X_PARTS - 1 - i) if X_PARTS > 1 else x, turned, acc)
    return acc


@kernel(num_worker_warps=8)
def project_kernel(
    x_,
    parts_,
    partial_,
    square_,
    rows: ct.ScalarInt64,
    first_row: ct.ScalarInt64,
    T: ct.ScalarInt64,
    size: ct.ScalarInt64,
    steps: ct.ScalarInt64,
    per_program: ct.ScalarInt64,
    TOKENS: ct.Constant[int],
    COLUMNS: ct.Constant[int],
    STEP: ct.Constant[int],
    RATIO: ct.Constant[int],
    X_PARTS: ct.Constant[int],
    W_PARTS: ct.Constant[int],
    ORDER: ct.Constant[int],
    TAIL: ct.Constant[bool],
):
    """Slices of RATIO steps of the projection of TOKENS tokens, and of their sums of squares: ``per_program`` slices,
    added in order. ``x_`` is a view of ``rows`` tokens from ``first_row`` on. TAIL: the last slice is not whole (the
    code for it is there only then: beside it the compiler gives up the pipeline of products)."""
    index, tile = ct.bid(0), ct.bid(1)
    # The view's own shape may be known when this is compiled; what is compiled must not depend on it.
    x = x_.slice(0, 0, rows)
    begin = index * ct.astype(per_program, ct.int32)
    full = ct.astype(steps // RATIO, ct.int32)
    end = ct.minimum(begin + ct.astype(per_program, ct.int32), full)
    proj = ct.zeros((TOKENS, COLUMNS), ct.float32)
    square = ct.zeros((TOKENS,), ct.float32)
    for piece in range(begin, end):
        dots = ct.zeros((TOKENS, COLUMNS), ct.float32)
        squares = ct.zeros((TOKENS, STEP), ct.float32)
        for r in ct.static_iter(range(RATIO)):
            k = piece * RATIO + r
            tile_x = ct.load(x, (tile, k), (TOKENS, STEP), padding_mode=ct.PaddingMode.ZERO, latency=8)
            dots = _dot_step(dots, tile_x, parts_, k, X_PARTS, W_PARTS, ORDER, COLUMNS, STEP)
            value = widen(tile_x)
            squares = squares + value * value
        proj = proj + dots
        square = square + ct.sum(squares, 1)
    if TAIL:
        # The steps of K that do not fill a slice, in the program that comes to them.
        there = begin + ct.astype(per_program, ct.int32) > full
        last = ct.where(there, ct.astype(steps, ct.int32), full * RATIO)
        dots = ct.zeros((TOKENS, COLUMNS), ct.float32)
        squares = ct.zeros((TOKENS, STEP), ct.float32)
        for k in range(full * RATIO, last):
            tile_x = ct.load(x, (tile, k), (TOKENS, STEP), padding_mode=ct.PaddingMode.ZERO)
            dots = _dot_step(dots, tile_x, parts_, k, X_PARTS, W_PARTS, ORDER, COLUMNS, STEP)
            value = widen(tile_x)
            squares = squares + value * value
        proj = proj + dots
        square = square + ct.sum(squares, 1)

    local = ct.astype(tile, ct.int64) * TOKENS + ct.arange(TOKENS, dtype=ct.int64)
    row = ct.astype(index, ct.int64) * T + first_row + local
    cols = ct.arange(COLUMNS, dtype=ct.int64)
    inside = local < rows
    partial_.get_raw_memory().store_offset(
        row[:, None] * size + cols[None, :], proj, mask=inside[:, None] & (cols < size)[None, :]
    )
    square_.get_raw_memory().store_offset(row, square, mask=inside)


_split_weight = Launcher(split_weight_kernel)
_project = Launcher(project_kernel)


def warp_groups(arch: str) -> bool:
    """The tensor cores take their operands from memory (Hopper, and Blackwell for servers), which leaves registers."""
    return arch in ("sm_90", "sm_100", "sm_103")


def _tokens(columns: int, x_parts: int, arch: str) -> int:
    """Tokens in a program: many, for every one of them reads the weight; fewer where registers fill up."""
    if not warp_groups(arch):
        return 64
    return 256 if columns <= 32 and x_parts == 1 else 128


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """x as ``[T, K]`` with one stride, and the most rows that a view of one launch may have (a multiple of the chunks
    of tokens). Rows so far apart that not even a chunk fits are copied."""
    width = x.shape[-1]
    count = x.numel() // width
    flat, stride = flatten(x, 1)
    if count > 1 and (stride < width or stride * tiles.CHUNK > _LIMIT):
        flat, stride = x.contiguous(), width
        if flat is x:
            flat = x.clone(memory_format=torch.contiguous_format)
    rows = flat.as_strided((count, width), (max(stride, width), 1))
    # A grid has fewer than 2^16 tiles along its second axis.
    most = min(_LIMIT // max(stride, width), 128 * 65535) // tiles.CHUNK * tiles.CHUNK
    return rows, max(tiles.CHUNK, most)


def row_spans(count: int, most: int) -> Iterator[tuple[int, int]]:
    """``(first, last)`` of every launch."""
    for first in range(0, count, most):
        yield first, min(first + most, count)


def project(x: Tensor, weight: Tensor, precision: str) -> tuple[Tensor, Tensor, int]:
    """Partial sums of ``x @ weight.T`` and of the squares of x, of at least one token.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``.
        precision: ``"fp32"`` or ``"tf32"``.

    Returns:
        fp32 ``[P, T, N]`` and ``[P, T]``, and how many of the P make a group (`collect_tile` adds them).
    """
    size, width = weight.shape
    count = x.numel() // width
    device = x.device
    order = ORDER[precision]
    w_parts, x_parts = min(PARTS[weight.dtype], order), PARTS[x.dtype]
    steps = -(-width // tiles.STEP)
    part_width = steps * tiles.STEP
    parts = torch.empty((w_parts, size, part_width), dtype=torch.bfloat16, device=device)
    _split_weight(
        (-(-part_width // _SPLIT), size),
        (weight.contiguous(), parts),
        (width, size, part_width),
        (w_parts,),
    )
    columns = padded(size)
    tokens = _tokens(columns, x_parts, architecture(device))
    ratio = tiles.SLICE // tiles.STEP
    slices = tiles.slices_per_program(-(-count // tokens), -(-width // tiles.GROUP))
    partials = -(-steps // (slices * ratio))
    partial = torch.empty((partials, count, size), dtype=torch.float32, device=device)
    square = torch.empty((partials, count), dtype=torch.float32, device=device)
    rows, most = rows_of(x)
    for first, last in row_spans(count, most):
        _project(
            (partials, -(-(last - first) // tokens)),
            (Whole(rows[first:last]), Whole(parts), partial, square),
            (last - first, first, count, size, steps, slices),
            (tokens, columns, tiles.STEP, ratio, x_parts, w_parts, order, steps % ratio != 0),
        )
    return partial, square, tiles.GROUP // tiles.SLICE // slices
