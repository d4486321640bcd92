"""The gradients of x and of the weight from that of the projection, in one read of x, in Triton.

A program owns some columns of K and a chunk of tokens: it writes g_x and sums its share of g_W. A second kernel adds the
shares in index order, and with them those of the alphas and the bias.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._strides import alignment, flatten
from .._triton_common import Launcher, follow, store, widen
from . import config as tiles
from ._triton_fwd import config_for, hopper, runs_gluon, tma_rows
from ._triton_tiles import project_bwd_tile
from .config import PARTS, g_parts, padded

__all__ = [
    "GradParts",
    "add_all_shares",
    "add_mapping_shares_tile",
    "add_shares_tile",
    "parts_for",
    "project_bwd",
    "store_alpha_gradients",
]


@triton.jit(
    do_not_specialize=[
        "count",
        "stride_x",
        "inner",
        "width",
        "size",
        "stride_mix",
        "stride_layer",
        "stride_passed",
    ]
)
def project_bwd_kernel(
    x_ptr,
    weight_ptr,
    parts_ptr,
    coefficient_ptr,
    g_x_ptr,
    share_ptr,
    mix_ptr,
    g_layer_ptr,
    g_passed_ptr,
    count: tl.int64,
    stride_x: tl.int64,
    inner: tl.int64,
    width: tl.int64,
    size: tl.int64,
    stride_mix: tl.int64,
    stride_layer: tl.int64,
    stride_passed: tl.int64,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    G_PARTS: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    follow()
    inner, stride_x, width = inner // ALIGN * ALIGN, stride_x // ALIGN * ALIGN, width // ALIGN * ALIGN
    stride_layer, stride_passed = stride_layer // ALIGN * ALIGN, stride_passed // ALIGN * ALIGN
    chunk, stream = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    c = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    k = stream * inner + c
    cols = tl.arange(0, COLUMNS)
    w_mask = (cols[:, None] < size) & (c[None, :] < inner)
    w_at = cols[:, None] * width + k[None, :]
    weight = tl.load(weight_ptr + w_at, mask=w_mask, other=0.0)
    share = tl.zeros((COLUMNS, WIDTH), tl.float32)
    for first in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, count), TOKENS):
        rows = first + tl.arange(0, TOKENS)
        row_mask = rows < count
        mask = row_mask[:, None] & (c[None, :] < inner)
        x = tl.load(x_ptr + rows[:, None] * stride_x + k[None, :], mask=mask, other=0.0)
        coefficient = tl.load(coefficient_ptr + rows, mask=row_mask, other=0.0)
        g_x, g_w = project_bwd_tile(
            x,
            parts_ptr,
            weight,
            coefficient,
            rows,
            row_mask,
            cols,
            COLUMNS,
            G_PARTS,
            X_PARTS,
            W_PARTS,
            g_x_ptr is not None,
            share_ptr is not None,
        )
        if g_x_ptr is not None:
            if g_layer_ptr is not None:
                mix = widen(tl.load(mix_ptr + rows * stride_mix + stream, mask=row_mask, other=0.0))
                layer = tl.load(g_layer_ptr + rows[:, None] * stride_layer + c[None, :], mask=mask, other=0.0)
                g_x += mix[:, None] * widen(layer)
            if g_passed_ptr is not None:
                passed = tl.load(
                    g_passed_ptr + rows[:, None] * stride_passed + k[None, :], mask=mask, other=0.0
                )
                g_x += widen(passed)
            store(g_x_ptr + rows[:, None] * width + k[None, :], g_x, mask=mask)
        share += g_w
    if share_ptr is not None:
        tl.store(share_ptr + chunk * size * width + w_at, share, mask=w_mask)


@triton.jit
def add_shares_tile(share_ptr, total_ptr, at, shares, elements, UNROLL: tl.constexpr):
    """Elements ``at`` of ``total = share[0] + share[1] + ...``, in that order."""
    total = tl.zeros((at.shape[0],), tl.float32)
    for first in range(0, shares, UNROLL):
        for index in tl.static_range(UNROLL):
            is_there = at < tl.where(first + index < shares, elements, 0)
            total += tl.load(share_ptr + (first + index) * elements + at, mask=is_there, other=0.0)
    store(total_ptr + at, total, mask=at < elements)


@triton.jit
def add_mapping_shares_tile(share_ptr, cols, shares, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Sums of ``[shares, 2, COLUMNS]``: the alphas' terms by column, and the bias."""
    alpha = tl.zeros((ROWS, COLUMNS), tl.float32)
    bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, shares, ROWS):
        rows = first + tl.arange(0, ROWS)
        is_row = rows[:, None] < shares
        at = share_ptr + rows[:, None] * (2 * COLUMNS) + cols[None, :]
        alpha += tl.load(at, mask=is_row, other=0.0)
        bias += tl.load(at + COLUMNS, mask=is_row, other=0.0)
    return tl.sum(alpha, axis=0), tl.sum(bias, axis=0)


@triton.jit
def store_alpha_gradients(g_pre_ptr, g_post_ptr, g_res_ptr, terms, cols, n: tl.constexpr):
    """The alphas' gradients from their terms by column; None where one is not wanted."""
    if g_pre_ptr is not None:
        store(g_pre_ptr, tl.sum(tl.where(cols < n, terms, 0.0)))
    if g_post_ptr is not None:
        store(g_post_ptr, tl.sum(tl.where((cols >= n) & (cols < 2 * n), terms, 0.0)))
    if g_res_ptr is not None:
        store(g_res_ptr, tl.sum(tl.where(cols >= 2 * n, terms, 0.0)))


@triton.jit(do_not_specialize=["shares", "elements", "mapping_shares"])
def add_shares_kernel(
    share_ptr,
    total_ptr,
    mapping_share_ptr,
    g_alpha_pre_ptr,
    g_alpha_post_ptr,
    g_alpha_res_ptr,
    g_bias_ptr,
    shares: tl.int64,
    elements: tl.int64,
    mapping_shares: tl.int64,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    N_STREAMS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The sum of the shares; the last program adds the shares ``[mapping_shares, 2, COLUMNS]`` of the alphas and the bias,
    where there are any."""
    follow()
    if total_ptr is not None:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        add_shares_tile(share_ptr, total_ptr, at, shares, elements, UNROLL)
    if mapping_share_ptr is not None:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            cols = tl.arange(0, COLUMNS)
            alpha_terms, bias_terms = add_mapping_shares_tile(
                mapping_share_ptr, cols, mapping_shares, COLUMNS, ROWS
            )
            store_alpha_gradients(
                g_alpha_pre_ptr, g_alpha_post_ptr, g_alpha_res_ptr, alpha_terms, cols, N_STREAMS
            )
            if g_bias_ptr is not None:
                store(g_bias_ptr + cols, bias_terms, mask=cols < SIZE)


_project_bwd = Launcher(project_bwd_kernel)
_add_shares = Launcher(add_shares_kernel)


class GradParts(NamedTuple):
    """The gradient of the raw projection in bf16 parts, and the factor ``[T]`` of x in its own gradient.

    ``parts`` is ``[T, G_PARTS, COLUMNS]`` (`store_parts`), or ``[T, 64]`` where ``interleaved``
    (`store_interleaved_parts`).
    """

    parts: Tensor
    coefficient: Tensor
    interleaved: bool

    @property
    def columns(self) -> int:
        """Columns of the projection, padded."""
        return self.parts.shape[1] // 2 if self.interleaved else self.parts.shape[2]


def parts_for(
    x: Tensor, size: int, gluon: bool, g_layer: Tensor | None = None, g_passed: Tensor | None = None
) -> GradParts:
    """Room for what `project_bwd` reads.

    Args:
        x: ``[..., K]``.
        size: N.
        gluon: both gradients are wanted.
        g_layer, g_passed: what is added to g_x. The Hopper kernel multiplies HOPPER_WIDTH columns at once, which must
            not be of two streams then, and has room for the second in the dtype of x.
    """
    count = x.numel() // x.shape[-1]
    fits = (g_layer is None or g_layer.shape[-1] % tiles.HOPPER_WIDTH == 0) and (
        g_passed is None or g_passed.dtype is x.dtype
    )
    interleaved = gluon and fits and runs_gluon(x.dtype, x.shape[-1], size, x.device)
    shape = (count, 64) if interleaved else (count, g_parts(x.dtype), padded(size))
    return GradParts(
        torch.empty(shape, dtype=torch.bfloat16, device=x.device),
        torch.empty(count, dtype=torch.float32, device=x.device),
        interleaved,
    )


def add_all_shares(
    shares: Tensor | None,
    total: Tensor | None,
    mapping_shares: Tensor | None = None,
    small: tuple[Tensor | None, ...] = (None, None, None, None),
    n: int = 1,
    size: int = 1,
) -> None:
    """Fill ``total`` with the sum of ``shares [S, *total.shape]`` over S, in index order, and ``small``, the gradients
    of the three alphas (of n, n and the other columns) and the ``size`` biases, from ``mapping_shares [S, 2, COLUMNS]``.
    """
    elements = 0 if total is None else total.numel()
    first = shares if shares is not None else mapping_shares
    assert first is not None
    _add_shares(
        (max(1, -(-elements // 1024)),),
        (
            first,
            total,
            mapping_shares,
            *small,
            0 if shares is None else shares.shape[0],
            elements,
            0 if mapping_shares is None else mapping_shares.shape[0],
        ),
        (1024, 8, n, size, 16 if mapping_shares is None else mapping_shares.shape[2], 32),
        4,
    )


def project_bwd(
    x: Tensor,
    weight: Tensor,
    grad: GradParts,
    needs_x: bool,
    needs_w: bool,
    mix: Tensor | None = None,
    g_layer: Tensor | None = None,
    g_passed: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """``g_x`` in the dtype of x and the shares ``[chunks, N, K]`` of g_W in fp32, those that are needed.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``.
        grad: of the raw projection.
        needs_x, needs_w: which gradients to make.
        mix, g_layer: ``[..., n]`` and ``[..., C]``, both or neither: ``mix[i]*g_layer`` is added to stream i of g_x.
        g_passed: ``[..., K]``, added to g_x.
    """
    size, width = weight.shape
    count = x.numel() // width
    chunks = -(-count // tiles.CHUNK)
    matrix = weight.contiguous()
    g_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else None
    shares = torch.empty((chunks, size, width), dtype=torch.float32, device=x.device) if needs_w else None
    if grad.interleaved and g_x is not None and shares is not None:
        hopper("bwd").project_bwd(
            *tma_rows(x),
            matrix,
            grad.parts,
            grad.coefficient,
            g_x,
            shares,
            (None, 0) if mix is None else flatten(mix, 1),
            (None, 0) if g_layer is None else tma_rows(g_layer),
            *((None, 0) if g_passed is None else tma_rows(g_passed)),
            tiles.HOPPER_WIDTH if g_layer is None else g_layer.shape[-1],
        )
        return g_x, shares
    flat, stride = flatten(x, 1)
    inner = width if g_layer is None else g_layer.shape[-1]
    chosen = config_for("project_bwd", size, width, x.device)
    added: list[Tensor | None] = []
    strides: list[int] = []
    for t in (mix, g_layer, g_passed):
        source, step = (None, 0) if t is None else flatten(t, 1)
        added.append(source)
        strides.append(step)
    _project_bwd(
        (-(-inner // chosen.grad_width), chunks, width // inner),
        (
            flat,
            matrix,
            grad.parts,
            grad.coefficient,
            g_x,
            shares,
            *added,
            count,
            stride,
            inner,
            width,
            size,
            *strides,
        ),
        (
            grad.columns,
            tiles.CHUNK,
            chosen.grad_tokens,
            chosen.grad_width,
            grad.parts.shape[1],
            PARTS[x.dtype],
            PARTS[weight.dtype],
            alignment(stride, inner, *strides[1:]),
        ),
        chosen.grad_warps,
        chosen.grad_stages,
    )
    return g_x, shares
