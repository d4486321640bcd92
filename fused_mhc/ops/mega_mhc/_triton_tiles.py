"""Tile bodies of the single pass. Mixes come as tuples: scalars for one token, columns ``[t, 1]`` for a tile."""

from __future__ import annotations

import triton
import triton.language as tl

from .._triton_common import cast, dot_bf16, load_scalars, store, widen
from ..h_aggregate._triton import aggregate_tile
from ..proj_rms_compute_h._triton_tiles import part

__all__ = [
    "add_products",
    "load_masked",
    "load_mixes",
    "load_parts",
    "load_streams",
    "site_row_tile",
    "split",
    "update_tile",
]


@triton.jit
def load_mixes(pointer, stride, rows, row_mask, COUNT: tl.constexpr):
    """COUNT numbers of every token of a tile, each as a column ``[t, 1]`` in fp32."""
    values = ()
    for k in tl.static_range(COUNT):
        value = widen(tl.load(pointer + rows * stride + k, mask=row_mask, other=0.0))
        values = values + (value[:, None],)
    return values


@triton.jit
def load_masked(pointer, mask):
    """Load where ``mask`` (None: everywhere), 0 elsewhere."""
    if mask is None:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def load_streams(pointer, stream_stride, offsets, mask, n: tl.constexpr):
    """The same elements of the n streams, in the tensor's dtype."""
    streams = ()
    for i in tl.static_range(n):
        streams = streams + (load_masked(pointer + i * stream_stride + offsets, mask),)
    return streams


@triton.jit
def update_tile(streams, output, mixing, post, n: tl.constexpr, dtype: tl.constexpr):
    """Step 1: ``sum_i mixing[i, j]*streams[i] + post[j]*output``, first stream to last, rounded to ``dtype``."""
    new = ()
    for j in tl.static_range(n):
        total = mixing[j] * widen(streams[0])
        for i in tl.static_range(1, n):
            total = total + mixing[i * n + j] * widen(streams[i])
        new = new + (cast(total + post[j] * widen(output), dtype),)
    return new


@triton.jit
def norm_scale(square, eps, C: tl.constexpr):
    """Reciprocal rms from a sum of C squares."""
    mean = tl.div_rn(square, tl.zeros_like(square) + C)
    return tl.div_rn(tl.zeros_like(mean) + 1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def products_of_degree(
    a, b, acc, DEGREE: tl.constexpr, A_PARTS: tl.constexpr, B_PARTS: tl.constexpr, ORDER: tl.constexpr
):
    """``acc`` and the products of ``a[i]`` and ``b[j]`` with ``i + j == DEGREE``, none when that is not below ORDER."""
    for i in tl.static_range(A_PARTS):
        if DEGREE < ORDER and i <= DEGREE and DEGREE - i < B_PARTS:
            acc = dot_bf16(a[i], b[DEGREE - i], acc)
    return acc


@triton.jit
def add_products(a, b, acc, A_PARTS: tl.constexpr, B_PARTS: tl.constexpr, ORDER: tl.constexpr):
    """``acc + a @ b`` from tuples of bf16 parts, small products first: what is far below the sum adds up before it."""
    for less in tl.static_range(A_PARTS + B_PARTS - 1):
        acc = products_of_degree(a, b, acc, A_PARTS + B_PARTS - 2 - less, A_PARTS, B_PARTS, ORDER)
    return acc


@triton.jit
def split(value, PARTS: tl.constexpr):
    """The bf16 parts of a tile."""
    parts = ()
    for index in tl.static_range(PARTS):
        parts = parts + (part(value, index),)
    return parts


@triton.jit
def load_parts(pointer, size, offsets, mask, PARTS: tl.constexpr):
    """A tile from each of PARTS matrices of ``size`` elements that follow one another."""
    parts = ()
    for index in tl.static_range(PARTS):
        parts = parts + (tl.load(pointer + index * size + offsets, mask=mask, other=0.0),)
    return parts


@triton.jit
def load_site_columns(
    output_row,
    residual_row,
    stream_stride,
    columns,
    n: tl.constexpr,
    C: tl.constexpr,
    FULL: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """Some columns of a token's streams and of the output."""
    mask = None if FULL else columns < C
    streams = load_streams(residual_row, stream_stride, columns, mask, n)
    if ENTRY:
        return streams
    else:
        return streams + (load_masked(output_row + columns, mask),)


@triton.jit
def site_columns_tile(
    loaded,
    new_row,
    mixing,
    post,
    pre,
    columns,
    n: tl.constexpr,
    C: tl.constexpr,
    FULL: tl.constexpr,
    dtype: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """Steps 1 and (before its norm) 3 on columns of `load_site_columns`: writes the new streams, returns ``mixed``."""
    mask = None if FULL else columns < C
    if ENTRY:
        new = loaded
        mixed = widen(loaded[0])
    else:
        new = update_tile(loaded[:n], loaded[n], mixing, post, n, dtype)
        mixed = aggregate_tile(new, pre, n)
    if new_row is not None:
        for j in tl.static_range(n):
            tl.store(new_row + j * C + columns, new[j], mask=mask)
    return mixed


@triton.jit
def site_row_tile(
    token,
    output_ptr,
    residual_ptr,
    pre_ptr,
    post_ptr,
    mixing_ptr,
    norm_weight_ptr,
    new_ptr,
    block_ptr,
    rstd_ptr,
    stride_output,
    stride_residual,
    stream_stride,
    stride_pre,
    stride_post,
    stride_mixing,
    norm_eps,
    n: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    KEEP: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """Steps 1 and 3 for one token, GROUP blocks of columns loaded before the first of them is stored. KEEP: ``mixed``
    stays in registers until its RMS is known, else it is made again.

    ENTRY: ``residual_ptr`` is x, with a stream stride of 0, and there is nothing before it."""
    FULL: tl.constexpr = C % BLOCK == 0
    CHUNKS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    mixing = ()
    post = ()
    pre = ()
    output_row = None
    new_row = None
    if not ENTRY:
        mixing = load_scalars(mixing_ptr + token * stride_mixing, n * n)
        post = load_scalars(post_ptr + token * stride_post, n)
        pre = load_scalars(pre_ptr + token * stride_pre, n)
        output_row = output_ptr + token * stride_output
    if new_ptr is not None:
        new_row = new_ptr + token * (n * C)
    residual_row = residual_ptr + token * stride_residual
    columns = tl.arange(0, BLOCK)
    square = tl.zeros((BLOCK,), tl.float32)
    kept = ()
    VECTORS: tl.constexpr = n if ENTRY else n + 1
    for first in tl.static_range(0, CHUNKS, GROUP):
        loaded = ()
        for k in tl.static_range(GROUP):
            if first + k < CHUNKS:
                at = (first + k) * BLOCK + columns
                loaded = loaded + load_site_columns(
                    output_row, residual_row, stream_stride, at, n, C, FULL, ENTRY
                )
        for k in tl.static_range(GROUP):
            if first + k < CHUNKS:
                at = (first + k) * BLOCK + columns
                own = loaded[k * VECTORS : k * VECTORS + VECTORS]
                mixed = site_columns_tile(own, new_row, mixing, post, pre, at, n, C, FULL, dtype, ENTRY)
                square = tl.fma(mixed, mixed, square)
                if KEEP:
                    kept = kept + (mixed,)
    rstd = norm_scale(tl.sum(square, 0), norm_eps, C)
    tl.store(rstd_ptr + token, rstd)
    for chunk in tl.static_range(CHUNKS):
        if KEEP:
            mixed = kept[chunk]
        else:
            at = chunk * BLOCK + columns
            loaded = load_site_columns(output_row, residual_row, stream_stride, at, n, C, FULL, ENTRY)
            mixed = site_columns_tile(loaded, None, mixing, post, pre, at, n, C, FULL, dtype, ENTRY)
        at = chunk * BLOCK + columns
        mask = None if FULL else at < C
        normed = mixed * rstd
        if norm_weight_ptr is not None:
            normed = normed * widen(load_masked(norm_weight_ptr + at, mask))
        store(block_ptr + token * C + at, normed, mask)
