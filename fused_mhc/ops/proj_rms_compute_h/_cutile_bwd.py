"""The gradients of x and of the weight from that of the projection, in one read of x, in cuTile.

A program owns some columns of K and a chunk of tokens: it writes g_x and sums its share of g_W. Two small kernels add
the shares in index order, and those of the alphas and the bias.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.tile as ct
import torch
from torch import Tensor

from .._cutile_common import Launcher, Whole, architecture, kernel, widen
from . import config as tiles
from ._cutile_fwd import row_spans, rows_of, warp_groups
from ._cutile_tiles import part
from .config import PARTS, g_parts, padded

__all__ = ["GradParts", "add_all_shares", "parts_for", "project_bwd"]

#: Elements of the weight's gradient that a program adds up, and shares whose loads are in flight together.
_SHARE_BLOCK, _SHARE_UNROLL = 1024, 8
#: Shares of the small gradients that are added side by side.
_SHARE_ROWS = 32


def project_bwd_kernel(
    x_,
    weight_,
    parts_,
    g_x_,
    coefficient_,
    share_,
    rows: ct.ScalarInt64,
    first_row: ct.ScalarInt64,
    size: ct.ScalarInt64,
    width: ct.ScalarInt64,
    COLUMNS: ct.Constant[int],
    CHUNK: ct.Constant[int],
    TOKENS: ct.Constant[int],
    WIDTH: ct.Constant[int],
    G_PARTS: ct.Constant[int],
    X_PARTS: ct.Constant[int],
    W_PARTS: ct.Constant[int],
    NEEDS_X: ct.Constant[bool],
    NEEDS_W: ct.Constant[bool],
):
    """The views ``x_``, ``parts_`` and ``g_x_`` hold ``rows`` tokens from ``first_row`` on, a multiple of CHUNK."""
    block, chunk = ct.bid(0), ct.bid(1)
    # The views' own shapes may be known when this is compiled; what is compiled must not depend on them.
    x, parts, g_x = x_.slice(0, 0, rows), parts_.slice(0, 0, rows), g_x_.slice(0, 0, rows)
    coefficients = coefficient_.get_raw_memory()
    weight = ct.load(weight_, (0, block), (COLUMNS, WIDTH), padding_mode=ct.PaddingMode.ZERO)
    weight_parts = ()
    for j in ct.static_iter(range(W_PARTS)):
        weight_parts = weight_parts + (part(weight, j),)
    share = ct.zeros((WIDTH, COLUMNS), ct.float32)
    begin = chunk * (CHUNK // TOKENS)
    tiles_there = ct.astype((rows + (TOKENS - 1)) // TOKENS, ct.int32)
    for tile in range(begin, ct.minimum(begin + CHUNK // TOKENS, tiles_there)):
        tile_x = ct.load(x, (tile, block), (TOKENS, WIDTH), padding_mode=ct.PaddingMode.ZERO)
        acc = ct.zeros((TOKENS, WIDTH), ct.float32)
        # Small products first: what is far below the sum adds up before it meets it.
        for less in ct.static_iter(range(G_PARTS)):
            g = ct.load(
                parts, (tile, G_PARTS - 1 - less, 0), (TOKENS, 1, COLUMNS), padding_mode=ct.PaddingMode.ZERO
            )
            g = ct.reshape(g, (TOKENS, COLUMNS))
            if NEEDS_X:
                for j in ct.static_iter(range(less + 1)):
                    if less - j < W_PARTS:
                        acc = ct.mma(g, weight_parts[less - j], acc)
            if NEEDS_W:
                for j in ct.static_iter(range(X_PARTS)):
                    narrow = part(tile_x, X_PARTS - 1 - j) if X_PARTS > 1 else tile_x
                    share = ct.mma(ct.transpose(narrow), g, share)
        if NEEDS_X:
            local = ct.astype(tile, ct.int64) * TOKENS + ct.arange(TOKENS, dtype=ct.int64)
            factor = coefficients.load_offset(first_row + local, mask=local < rows, padding_value=0)
            acc = acc + factor[:, None] * widen(tile_x)
            ct.store(g_x, (tile, block), ct.astype(acc, g_x_.dtype))
    if NEEDS_W:
        cols = ct.arange(COLUMNS, dtype=ct.int64)
        k = ct.astype(block, ct.int64) * WIDTH + ct.arange(WIDTH, dtype=ct.int64)
        at = ((first_row // CHUNK + chunk) * size + cols)[None, :] * width + k[:, None]
        mask = (k < width)[:, None] & (cols < size)[None, :]
        share_.get_raw_memory().store_offset(at, share, mask=mask)


#: Two programs share a multiprocessor: for bf16 x and up to 64 columns, which fill half of its registers.
small_project_bwd = kernel(project_bwd_kernel, num_worker_warps=8, occupancy=2)
#: One program has a multiprocessor.
large_project_bwd = kernel(project_bwd_kernel, num_worker_warps=8)


@kernel
def add_shares_kernel(
    share_,
    total_,
    shares: ct.ScalarInt64,
    elements: ct.ScalarInt64,
):
    """``total = share[0] + share[1] + ...``, in that order."""
    share, total_memory = share_.get_raw_memory(), total_.get_raw_memory()
    at = ct.astype(ct.bid(0), ct.int64) * _SHARE_BLOCK + ct.arange(_SHARE_BLOCK, dtype=ct.int64)
    total = ct.zeros((_SHARE_BLOCK,), ct.float32)
    for first in range(0, shares, _SHARE_UNROLL):
        for k in ct.static_iter(range(_SHARE_UNROLL)):
            there = (at < elements) & (first + k < shares)
            total = total + share.load_offset((first + k) * elements + at, mask=there, padding_value=0)
    total_memory.store_offset(at, ct.astype(total, total_memory.dtype), mask=at < elements)


@kernel
def add_mapping_shares_kernel(
    share_,
    g_alpha_pre_,
    g_alpha_post_,
    g_alpha_res_,
    g_bias_,
    shares: ct.ScalarInt64,
    n: ct.Constant[int],
    SIZE: ct.Constant[int],
    COLUMNS: ct.Constant[int],
    PRE: ct.Constant[bool],
    POST: ct.Constant[bool],
    RES: ct.Constant[bool],
    BIAS: ct.Constant[bool],
):
    """The gradients of the alphas and the bias from the shares ``[shares, 2, COLUMNS]``; PRE, POST, RES, BIAS say
    which are wanted."""
    share = share_.get_raw_memory()
    cols = ct.arange(COLUMNS, dtype=ct.int64)
    alpha = ct.zeros((_SHARE_ROWS, COLUMNS), ct.float32)
    bias = ct.zeros((_SHARE_ROWS, COLUMNS), ct.float32)
    for first in range(0, shares, _SHARE_ROWS):
        row = first + ct.arange(_SHARE_ROWS, dtype=ct.int64)
        mask = (row < shares)[:, None] & (cols >= 0)[None, :]
        at = row[:, None] * (2 * COLUMNS) + cols[None, :]
        alpha = alpha + share.load_offset(at, mask=mask, padding_value=0)
        bias = bias + share.load_offset(at + COLUMNS, mask=mask, padding_value=0)
    alpha_terms, bias_terms = ct.sum(alpha, 0), ct.sum(bias, 0)
    if PRE:
        pre = ct.sum(ct.where(cols < n, alpha_terms, 0.0), 0)
        g_alpha_pre_.get_raw_memory().store_offset(0, ct.astype(pre, g_alpha_pre_.dtype))
    if POST:
        post = ct.sum(ct.where((cols >= n) & (cols < 2 * n), alpha_terms, 0.0), 0)
        g_alpha_post_.get_raw_memory().store_offset(0, ct.astype(post, g_alpha_post_.dtype))
    if RES:
        res = ct.sum(ct.where(cols >= 2 * n, alpha_terms, 0.0), 0)
        g_alpha_res_.get_raw_memory().store_offset(0, ct.astype(res, g_alpha_res_.dtype))
    if BIAS:
        g_bias_.get_raw_memory().store_offset(cols, ct.astype(bias_terms, g_bias_.dtype), mask=cols < SIZE)


_small_bwd = Launcher(small_project_bwd)
_large_bwd = Launcher(large_project_bwd)
_add_shares = Launcher(add_shares_kernel)
_add_mapping_shares = Launcher(add_mapping_shares_kernel)


class GradParts(NamedTuple):
    """The gradient of the raw projection in bf16 parts ``[T, G_PARTS, COLUMNS]`` (`store_parts`), and the factor
    ``[T]`` of x in its own gradient."""

    parts: Tensor
    coefficient: Tensor

    @property
    def columns(self) -> int:
        """Columns of the projection, padded."""
        return self.parts.shape[2]


def parts_for(x: Tensor, size: int) -> GradParts:
    """Room for what stage two reads."""
    count = x.numel() // x.shape[-1]
    shape = (count, g_parts(x.dtype), padded(size))
    return GradParts(
        torch.empty(shape, dtype=torch.bfloat16, device=x.device),
        torch.empty(count, dtype=torch.float32, device=x.device),
    )


def add_all_shares(
    shares: Tensor | None,
    total: Tensor | None,
    mapping_shares: Tensor,
    small: tuple[Tensor | None, ...],
    n: int,
    size: int,
) -> None:
    """Fill ``total`` with the sum of ``shares [S, *total.shape]`` over S, in index order, and ``small``, the gradients
    of the three alphas (of n, n and the other columns) and the ``size`` biases, from ``mapping_shares``
    ``[S, 2, COLUMNS]``."""
    if total is not None and shares is not None:
        elements = total.numel()
        _add_shares((-(-elements // _SHARE_BLOCK),), (shares, total), (shares.shape[0], elements), ())
    if any(t is not None for t in small):
        _add_mapping_shares(
            (1,),
            (mapping_shares, *small),
            (mapping_shares.shape[0],),
            (n, size, mapping_shares.shape[2], *(t is not None for t in small)),
        )


def project_bwd(
    x: Tensor, weight: Tensor, grad: GradParts, needs_x: bool, needs_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """``g_x`` in the dtype of x and the shares ``[chunks, N, K]`` of g_W in fp32, those that are needed.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``.
        grad: of the raw projection.
        needs_x, needs_w: which gradients to make.
    """
    size, width = weight.shape
    count = x.numel() // width
    chunks = -(-count // tiles.CHUNK)
    g_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else None
    shares = torch.empty((chunks, size, width), dtype=torch.float32, device=x.device) if needs_w else None
    rows, most = rows_of(x)
    out = rows if g_x is None else g_x.view(count, width)
    small = grad.columns <= 64 and x.dtype is torch.bfloat16
    tokens, block = (64, 128) if grad.columns <= 32 else (128, 64) if small else (64, 64)
    if not warp_groups(architecture(x.device)):
        tokens, block = 32, 64
    matrix = weight.contiguous()
    for first, last in row_spans(
        count, min(most, max(tiles.CHUNK, 2**31 // width // tiles.CHUNK * tiles.CHUNK))
    ):
        (_small_bwd if small else _large_bwd)(
            (-(-width // block), -(-(last - first) // tiles.CHUNK)),
            (
                Whole(rows[first:last]),
                Whole(matrix),
                Whole(grad.parts[first:last]),
                Whole(out[first:last]),
                grad.coefficient,
                shares,
            ),
            (last - first, first, size, width),
            (
                grad.columns,
                tiles.CHUNK,
                tokens,
                block,
                grad.parts.shape[1],
                PARTS[x.dtype],
                PARTS[weight.dtype],
                needs_x,
                needs_w,
            ),
        )
    return g_x, shares
