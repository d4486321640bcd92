"""The shifted single pass in cuTile: forward.

One program owns a token for the residual update, the collapse and the RMSNorm: it reads the streams once, keeps the
collapsed row in registers (rows of more than `_KEPT` blocks are collapsed again from what it wrote), and writes. Then
come the projection of the new residual and the mixes, the kernels of the operations that they belong to.
"""

from __future__ import annotations

import cuda.tile as ct
import torch
from torch import Tensor

from .._cutile_common import (
    WARPS,
    Launcher,
    kernel,
    load_columns,
    load_scalars,
    load_streams,
    row_offset,
    store_columns,
    widen,
)
from .._rows import row_candidates
from .._strides import alignment, flatten
from ..h_aggregate._cutile import aggregate_tile
from ..h_post_bda._cutile import mix_tile
from ..proj_rms_compute_h._cutile_fwd import project
from ..proj_rms_compute_h._cutile_tiles import (
    alpha_columns,
    collect_tile,
    mapping_tile,
    rms_tile,
    store_mapping,
)
from ..proj_rms_compute_h.config import padded
from ..sinkhorn._cutile import sinkhorn_fwd

__all__ = ["mega_mhc_fwd"]

#: Blocks of a collapsed row that a program keeps: 64 registers of each thread at the most.
_KEPT = 8
#: Tokens in a program of the mixes.
_MIXES_TOKENS = 16


def _update_block(
    residual,
    output,
    new_residual,
    token,
    row,
    out_row,
    stream_stride,
    columns,
    pre,
    post,
    mixing,
    n,
    C,
    FULL,
    ALIGN,
):
    """Step 1 for some columns of a token, and the fp32 collapse of the streams as they are stored."""
    streams = load_streams(residual, row, stream_stride, columns, n, C, FULL, ALIGN)
    branch = widen(load_columns(output, out_row, columns, C, FULL))
    new = ()
    for j in ct.static_iter(range(n)):
        new = new + (ct.astype(mix_tile(streams, mixing, n, j, 0) + post[j] * branch, new_residual.dtype),)
        store_columns(new_residual, (token * n + j) * C, columns, new[j], C, FULL)
    return aggregate_tile(new, pre, n)


def _store_normed(block_input, norm_weight, token, columns, mixed, rstd, C, FULL, WEIGHT):
    value = mixed * rstd
    if WEIGHT:
        value = value * widen(load_columns(norm_weight, 0, columns, C, FULL))
    store_columns(block_input, token * C, columns, value, C, FULL)


@kernel
def site_kernel(
    residual_,
    output_,
    pre_,
    post_,
    mixing_,
    norm_weight_,
    new_residual_,
    block_input_,
    rstd_,
    first: ct.ScalarInt64,
    output_stride: ct.ScalarInt64,
    residual_stride: ct.ScalarInt64,
    stream_stride: ct.ScalarInt64,
    pre_stride: ct.ScalarInt64,
    post_stride: ct.ScalarInt64,
    mixing_stride: ct.ScalarInt64,
    norm_eps: float,
    n: ct.Constant[int],
    C: ct.Constant[int],
    BLOCK: ct.Constant[int],
    BLOCKS: ct.Constant[int],
    KEEP: ct.Constant[bool],
    ALIGN: ct.Constant[int],
    WEIGHT: ct.Constant[bool],
):
    """Steps 1 and 3 for one token. KEEP: the collapsed row stays in registers between them."""
    FULL = C % BLOCK == 0
    token = first + ct.bid(0)
    residual, output = residual_.get_raw_memory(), output_.get_raw_memory()
    new_residual, block_input = new_residual_.get_raw_memory(), block_input_.get_raw_memory()
    norm_weight = norm_weight_.get_raw_memory()
    row, out_row = row_offset(token, residual_stride, ALIGN), row_offset(token, output_stride, ALIGN)
    pre = load_scalars(pre_.get_raw_memory(), token * pre_stride, n)
    post = load_scalars(post_.get_raw_memory(), token * post_stride, n)
    mixing = load_scalars(mixing_.get_raw_memory(), token * mixing_stride, n * n)
    squares = ct.zeros((BLOCK,), ct.float32)
    if KEEP:
        kept = ()
        for k in ct.static_iter(range(BLOCKS)):
            columns = k * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
            mixed = _update_block(
                residual,
                output,
                new_residual,
                token,
                row,
                out_row,
                stream_stride,
                columns,
                pre,
                post,
                mixing,
                n,
                C,
                FULL,
                ALIGN,
            )
            squares = squares + mixed * mixed
            kept = kept + (mixed,)
        rstd = 1.0 / ct.sqrt(ct.sum(squares, 0) / C + norm_eps)
        for k in ct.static_iter(range(BLOCKS)):
            columns = k * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
            _store_normed(block_input, norm_weight, token, columns, kept[k], rstd, C, FULL, WEIGHT)
    else:
        for start in range(0, C, BLOCK):
            columns = start + ct.arange(BLOCK, dtype=ct.int32)
            mixed = _update_block(
                residual,
                output,
                new_residual,
                token,
                row,
                out_row,
                stream_stride,
                columns,
                pre,
                post,
                mixing,
                n,
                C,
                FULL,
                ALIGN,
            )
            squares = squares + mixed * mixed
        rstd = 1.0 / ct.sqrt(ct.sum(squares, 0) / C + norm_eps)
        for start in range(0, C, BLOCK):
            columns = start + ct.arange(BLOCK, dtype=ct.int32)
            written = load_streams(new_residual, token * n * C, C, columns, n, C, FULL, 1)
            mixed = aggregate_tile(written, pre, n)
            _store_normed(block_input, norm_weight, token, columns, mixed, rstd, C, FULL, WEIGHT)
    rstd_.get_raw_memory().store_offset(token, rstd)


@kernel
def mixes_kernel(
    partial_,
    square_,
    alpha_,
    bias_,
    pre_,
    post_,
    res_,
    proj_,
    u_,
    T: ct.ScalarInt64,
    partials: ct.ScalarInt64,
    width: float,
    norm_eps: float,
    hc_eps: float,
    n: ct.Constant[int],
    COLUMNS: ct.Constant[int],
    TOKENS: ct.Constant[int],
    PER_GROUP: ct.Constant[int],
):
    """Step 2 up to the logits of the residual mix, which go to ``res``."""
    SIZE = n * n + 2 * n
    rows = ct.astype(ct.bid(0), ct.int64) * TOKENS + ct.arange(TOKENS, dtype=ct.int64)
    cols = ct.arange(COLUMNS, dtype=ct.int64)
    proj, square = collect_tile(
        partial_.get_raw_memory(),
        square_.get_raw_memory(),
        rows,
        cols,
        T,
        SIZE,
        partials,
        COLUMNS,
        TOKENS,
        PER_GROUP,
    )
    u, _ = rms_tile(square, width, norm_eps, True)
    scales = alpha_.get_raw_memory()
    alpha = alpha_columns(
        widen(scales.load_offset(0)), widen(scales.load_offset(1)), widen(scales.load_offset(2)), cols, n
    )
    bias = widen(bias_.get_raw_memory().load_offset(cols, mask=cols < SIZE, padding_value=0))
    mixes = mapping_tile(proj * u[:, None] * alpha[None, :] + bias[None, :], cols, hc_eps, n)

    inside = rows < T
    store_mapping(
        proj_.get_raw_memory(),
        pre_.get_raw_memory(),
        post_.get_raw_memory(),
        res_.get_raw_memory(),
        proj,
        mixes,
        rows,
        inside,
        cols,
        n,
    )
    u_.get_raw_memory().store_offset(rows, u, mask=inside)


_site = Launcher(site_kernel)
_mixes = Launcher(mixes_kernel)


def mega_mhc_fwd(
    previous_output: Tensor,
    residual: Tensor,
    previous_pre_mix: Tensor,
    previous_post_mix: Tensor,
    previous_residual_mix: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    hc_eps: float,
    norm_eps: float,
    num_iters: int,
) -> tuple[Tensor, ...]:
    *lead, n, width = residual.shape
    size, device = phi.shape[0], residual.device
    new_residual = torch.empty(residual.shape, dtype=residual.dtype, device=device)
    block_input = torch.empty((*lead, width), dtype=residual.dtype, device=device)
    shapes = ((n,), (n,), (n, n), (size,), (1,), (1,))
    pre, post, res, proj, u, rstd = (
        torch.empty((*lead, *shape), dtype=torch.float32, device=device) for shape in shapes
    )
    count = rstd.numel()
    if count == 0:
        return new_residual, pre, post, res, block_input, proj, u, rstd
    output, output_stride = flatten(previous_output, 1)
    streams, residual_stride = flatten(residual, 2)
    mix_pre, pre_stride = flatten(previous_pre_mix, 1)
    mix_post, post_stride = flatten(previous_post_mix, 1)
    mixing, mixing_stride = flatten(previous_residual_mix, 2, dense=True)
    block = row_candidates(width, residual.element_size(), n + 1, 1, WARPS)[0].block
    blocks = -(-width // block)
    stream_stride = streams.stride(-2)
    _site.by_token(
        count,
        (
            streams,
            output,
            mix_pre,
            mix_post,
            mixing,
            None if norm_weight is None else norm_weight.contiguous(),
            new_residual,
            block_input,
            rstd,
        ),
        (
            output_stride,
            residual_stride,
            stream_stride,
            pre_stride,
            post_stride,
            mixing_stride,
            norm_eps,
        ),
        (
            n,
            width,
            block,
            blocks,
            blocks <= _KEPT,
            alignment(width, output_stride, residual_stride, stream_stride),
            norm_weight is not None,
        ),
    )
    partial, square, per_group = project(new_residual.view(count, n * width), phi, "fp32")
    logits = torch.empty_like(res)
    _mixes(
        (-(-count // _MIXES_TOKENS),),
        (partial, square, alpha.contiguous(), bias.contiguous(), pre, post, logits, proj, u),
        (count, partial.shape[0], float(n * width), norm_eps, hc_eps),
        (n, padded(size), _MIXES_TOKENS, per_group),
    )
    return (
        new_residual,
        pre,
        post,
        sinkhorn_fwd(logits, num_iters, hc_eps, "softmax"),
        block_input,
        proj,
        u,
        rstd,
    )
