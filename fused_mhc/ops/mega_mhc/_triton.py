"""The single pass in Triton: the kernels of T x N elements of its backward, and the hosts.

Backward: the mixes first (Sinkhorn, sigmoids and scale back to the raw projection, kept as bf16 parts, and to the factor
of the new streams in their own gradient), then two passes over the streams (`_triton_bwd`, on Hopper `_gluon`), then the
shares of the parameters' gradients are added in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import device_info
from .._strides import flatten
from .._triton_common import INTERPRETING, Launcher, follow, store, widen
from ..proj_rms_compute_h._triton_bwd import add_mapping_shares_tile, add_shares_tile, store_alpha_gradients
from ..proj_rms_compute_h._triton_tiles import (
    alpha_columns,
    load_columns,
    mapping_bwd_tile,
    store_interleaved_parts,
    store_parts,
)
from ..proj_rms_compute_h.config import g_parts
from ..sinkhorn._triton import sinkhorn_bwd, sinkhorn_bwd_tile, sinkhorn_load_tile, sinkhorn_store_tile
from ..sinkhorn.config import heuristic as sinkhorn_heuristic
from . import config as tiles
from ._triton_bwd import Through, site_gradients
from ._triton_ends import entry_gradients, exit_gradients
from ._triton_fwd import (
    State,
    mega_mhc_entry_fwd,
    mega_mhc_exit_fwd,
    mega_mhc_fwd,
    read_entry,
    read_state,
)

__all__ = [
    "mega_mhc_bwd",
    "mega_mhc_entry_bwd",
    "mega_mhc_entry_fwd",
    "mega_mhc_exit_bwd",
    "mega_mhc_exit_fwd",
    "mega_mhc_fwd",
]


@triton.jit
def logits_tile(proj, u, alpha_ptr, bias_ptr, n: tl.constexpr):
    """Sinkhorn's logits from the raw projection: tuples of n*n vectors."""
    scale = widen(tl.load(alpha_ptr + 2))
    logits = ()
    for k in tl.static_range(n * n):
        logits = logits + (proj[k] * u * scale + widen(tl.load(bias_ptr + 2 * n + k)),)
    return logits


@triton.jit(do_not_specialize=["count", "width", "stride_pre", "stride_post", "stride_res", "hc_eps"])
def mixes_bwd_kernel(
    proj_ptr,
    u_ptr,
    g_pre_ptr,
    g_post_ptr,
    g_res_ptr,
    alpha_ptr,
    bias_ptr,
    logits_ptr,
    parts_ptr,
    coefficient_ptr,
    share_ptr,
    count: tl.int64,
    width: tl.int64,
    stride_pre: tl.int64,
    stride_post: tl.int64,
    stride_res: tl.int64,
    hc_eps: tl.float32,
    n: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SEGMENT: tl.constexpr,
    G_PARTS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """``logits_ptr``: the gradient of Sinkhorn's logits, ``[T, n*n]``; made here where ``g_res_ptr`` is given."""
    follow()
    N: tl.constexpr = n * n + 2 * n
    tile = tl.program_id(0).to(tl.int64)
    rows = tile * TOKENS + tl.arange(0, TOKENS)
    row_mask = rows < count
    cols = tl.arange(0, COLUMNS)
    u = tl.load(u_ptr + rows, mask=row_mask, other=0.0)
    if g_res_ptr is not None:
        raw = sinkhorn_load_tile(proj_ptr + 2 * n, N, rows, row_mask, n, 1)
        g_res = sinkhorn_load_tile(g_res_ptr, stride_res, rows, row_mask, n, 1)
        logits = logits_tile(raw, u, alpha_ptr, bias_ptr, n)
        g_logits = sinkhorn_bwd_tile(g_res, logits, hc_eps, n, ITERATIONS, False, SEGMENT)
        # Sinkhorn holds a token in one thread: its gradient changes hands through memory.
        sinkhorn_store_tile(logits_ptr, g_logits, rows, row_mask, n)
        tl.debug_barrier()
    alpha = alpha_columns(alpha_ptr, alpha_ptr + 1, alpha_ptr + 2, cols, n)
    bias = widen(tl.load(bias_ptr + cols, mask=cols < N, other=0.0))
    scaled = load_columns(proj_ptr, rows, row_mask, cols, N, N) * u[:, None]
    g_mix = load_columns(g_pre_ptr, rows, row_mask, cols, stride_pre, n)
    g_mix += load_columns(g_post_ptr, rows, row_mask, cols - n, stride_post, n)
    if logits_ptr is not None:
        g_mix += load_columns(logits_ptr, rows, row_mask, cols - 2 * n, n * n, n * n)
    factor = tl.where(cols < n, 1.0, tl.where(cols < 2 * n, 2.0, 0.0))
    one = tl.zeros_like(u) + 1.0
    g_scaled, g_u, g_h, alpha_terms = mapping_bwd_tile(g_mix, factor[None, :], scaled, one, alpha, bias)
    if INTERLEAVED:
        store_interleaved_parts(parts_ptr, g_scaled * u[:, None], rows, row_mask, cols)
    else:
        store_parts(parts_ptr, g_scaled * u[:, None], rows, row_mask, cols, COLUMNS, G_PARTS)
    tl.store(coefficient_ptr + rows, -(u * u / width) * g_u, mask=row_mask)
    share = share_ptr + tile * (2 * COLUMNS) + cols
    tl.store(share, tl.sum(alpha_terms, axis=0))
    tl.store(share + COLUMNS, tl.sum(g_h, axis=0))


@triton.jit(
    do_not_specialize=[
        "shares",
        "phi_elements",
        "weight_elements",
        "mixes_shares",
        "phi_blocks",
        "weight_blocks",
    ]
)
def parameter_gradients_kernel(
    phi_share_ptr,
    g_phi_ptr,
    weight_share_ptr,
    g_weight_ptr,
    mixes_share_ptr,
    g_alpha_ptr,
    g_bias_ptr,
    shares: tl.int64,
    phi_elements: tl.int64,
    weight_elements: tl.int64,
    mixes_shares: tl.int64,
    phi_blocks: tl.int32,
    weight_blocks: tl.int32,
    n: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums of the shares of phi's and of norm_weight's gradient, BLOCK elements a program, and, in one more program, of
    the shares ``[mixes_shares, 2, COLUMNS]`` of alpha's and of the bias's. A gradient that is not wanted is None."""
    follow()
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if program < phi_blocks:
        if g_phi_ptr is not None:
            add_shares_tile(phi_share_ptr, g_phi_ptr, at, shares, phi_elements, UNROLL)
    elif program < phi_blocks + weight_blocks:
        if g_weight_ptr is not None:
            at -= phi_blocks.to(tl.int64) * BLOCK
            add_shares_tile(weight_share_ptr, g_weight_ptr, at, shares, weight_elements, UNROLL)
    elif mixes_share_ptr is not None:
        cols = tl.arange(0, COLUMNS)
        terms, bias = add_mapping_shares_tile(mixes_share_ptr, cols, mixes_shares, COLUMNS, ROWS)
        if g_alpha_ptr is not None:
            store_alpha_gradients(g_alpha_ptr, g_alpha_ptr + 1, g_alpha_ptr + 2, terms, cols, n)
        if g_bias_ptr is not None:
            store(g_bias_ptr + cols, bias, mask=cols < n * n + 2 * n)


#: Elements of a parameter's gradient that a program adds up.
_SHARE_BLOCK = 1024

_mixes_bwd = Launcher(mixes_bwd_kernel)
_parameter_gradients = Launcher(parameter_gradients_kernel)


def _mixes_gradients(
    grads: Sequence[Tensor | None],
    alpha: Tensor,
    bias: Tensor,
    proj: Tensor,
    u: Tensor,
    n: int,
    width: int,
    dtype: torch.dtype,
    hc_eps: float,
    num_iters: int,
    interleaved: bool = False,
) -> Through | None:
    """Step 1; None when no mix has a gradient."""
    if all(g is None for g in grads):
        return None
    count, device = u.numel(), u.device
    columns = 32 if interleaved else tiles.columns(n)
    mapping_tiles = triton.cdiv(count, tiles.MAPPING_TOKENS)
    g_pre, g_post, g_res = grads
    logits = None
    if g_res is not None and n > tiles.MAX_FUSED_SINKHORN:
        raw = proj.view(count, -1)[:, 2 * n :] * u.view(count, 1)
        logits = torch.addcmul(bias[2 * n :].float(), raw, alpha[2].float()).view(count, n, n)
        logits = sinkhorn_bwd(g_res.reshape(count, n, n), logits, num_iters, hc_eps, "softmax")
        g_res = None
    elif g_res is not None:
        logits = torch.empty(count, n * n, dtype=torch.float32, device=device)
    rows = [
        (None, 0) if g is None else flatten(g, trailing, dense=True)
        for g, trailing in ((g_pre, 1), (g_post, 1), (g_res, 2))
    ]
    shape = (count, 64) if interleaved else (count, g_parts(dtype), columns)
    parts = torch.empty(shape, dtype=torch.bfloat16, device=device)
    coefficient = torch.empty(count, dtype=torch.float32, device=device)
    shares = torch.empty(mapping_tiles, 2, columns, dtype=torch.float32, device=device)
    _mixes_bwd(
        (mapping_tiles,),
        (
            proj,
            u,
            *(g for g, _ in rows),
            alpha.contiguous(),
            bias.contiguous(),
            logits,
            parts,
            coefficient,
            shares,
            count,
            n * width,
            *(stride for _, stride in rows),
            hc_eps,
        ),
        (
            n,
            columns,
            tiles.MAPPING_TOKENS,
            num_iters,
            sinkhorn_heuristic(min(n, tiles.MAX_FUSED_SINKHORN), False).segment,
            g_parts(dtype),
            interleaved,
        ),
        tiles.MAPPING_WARPS,
    )
    return Through(parts, coefficient, shares)


def _gradients_of_parameters(
    shares: tuple[Tensor | None, Tensor | None],
    through: Through | None,
    parameters: Sequence[Tensor | None],
    n: int,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of phi, alpha, bias and norm_weight, where they are needed and something reaches them, from the shares
    of phi's and norm_weight's and those that ``through`` holds of the other two."""
    phi_shares, weight_shares = shares
    small = through is not None
    wanted = [phi_shares is not None, small, small, weight_shares is not None]
    found = _empty(parameters, [w and need for w, need in zip(wanted, needs, strict=True)])
    g_phi, g_alpha, g_bias, g_weight = found
    blocks = [0 if g is None else triton.cdiv(g.numel(), _SHARE_BLOCK) for g in (g_phi, g_weight)]
    mixes = None
    if through is not None and (g_alpha is not None or g_bias is not None):
        mixes = through.shares
    if not any(blocks) and mixes is None:
        return found
    first = next(s for s in (*shares, mixes) if s is not None)  # phi's, or one to tell the device by
    chunks = next((s.shape[0] for s in shares if s is not None), 0)
    _parameter_gradients(
        (sum(blocks) + (mixes is not None),),
        (
            first,
            g_phi,
            weight_shares,
            g_weight,
            mixes,
            g_alpha,
            g_bias,
            chunks,
            0 if g_phi is None else g_phi.numel(),
            0 if g_weight is None else g_weight.numel(),
            0 if mixes is None else mixes.shape[0],
            *blocks,
        ),
        (n, tiles.columns(n) if mixes is None else mixes.shape[2], _SHARE_BLOCK, 8, 16),
        4,
    )
    return found


def _zeros(inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
    return [
        torch.zeros(t.shape, dtype=t.dtype, device=t.device)
        for t, need in zip(inputs, needs, strict=True)
        if t is not None and need
    ]


def _empty(inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    return [
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if t is not None and need else None
        for t, need in zip(inputs, needs, strict=True)
    ]


def _needed(
    found: Sequence[Tensor | None], inputs: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor]:
    """The needed gradients in order; zeros for one that nothing reaches."""
    return [
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) if g is None else g
        for g, t, need in zip(found, inputs, needs, strict=True)
        if t is not None and need
    ]


def _runs_gluon(
    tensors: Sequence[Tensor | None],
    mix_grads: Sequence[Tensor | None],
    n: int,
    width: int,
    needs: Sequence[bool],
) -> bool:
    """Whether the Hopper kernels make these gradients: ``tensors`` are the streams, the output and the gradients of the
    new streams and of the block input, all of which they take in bf16. Never a question of T or of strides: the bits of
    a token depend on the answer."""
    if INTERPRETING.value or not 2 <= n <= 4 or width % 64 or not needs[5] or not any(needs[:5]):
        return False
    if any(t is None or t.dtype is not torch.bfloat16 for t in tensors) or all(g is None for g in mix_grads):
        return False
    return device_info(tensors[0].device).arch == "sm_90"  # type: ignore[union-attr]


def _site_gradients_gluon(
    output: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    state: State,
    new_residual: Tensor,
    g_new: Tensor,
    g_block: Tensor,
    rstd: Tensor,
    through: Through,
    phi: Tensor,
    outs: Sequence[Tensor | None],
    need_norm_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """`site_gradients` by the Hopper kernels."""
    from . import _gluon

    width, device, count = phi.shape[1] // new_residual.shape[-2], phi.device, rstd.numel()
    chunks = triton.cdiv(count, tiles.CHUNK)
    scale = None if norm_weight is None else norm_weight.contiguous()
    mean = torch.empty(width // 64, count, dtype=torch.float32, device=device)
    phi_shares = torch.empty(chunks, *phi.shape, dtype=torch.float32, device=device)
    weight_shares = None
    if need_norm_weight:
        weight_shares = torch.empty(chunks, width, dtype=torch.float32, device=device)
    pre, post, mixing = (t for t in (state.pre, state.post, state.mixing) if t is not None)
    _gluon.norm_bwd(
        new_residual,
        g_block,
        through.parts,
        pre,
        state.narrow[0],
        rstd,
        scale,
        mean,
        phi_shares,
        weight_shares,
    )
    _gluon.state_bwd(
        output,
        residual,
        (pre, post, mixing),
        state.narrow,
        phi,
        scale,
        g_new,
        g_block,
        rstd,
        mean,
        through.parts,
        through.coefficient,
        outs,
    )
    return phi_shares, weight_shares


def mega_mhc_bwd(
    g_new_residual: Tensor | None,
    g_pre: Tensor | None,
    g_post: Tensor | None,
    g_res: Tensor | None,
    g_block_input: Tensor | None,
    previous_output: Tensor,
    residual: Tensor,
    previous_pre_mix: Tensor,
    previous_post_mix: Tensor,
    previous_residual_mix: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    new_residual: Tensor,
    proj: Tensor,
    u: Tensor,
    rstd: Tensor,
    next_pre: Tensor,
    next_post: Tensor,
    next_res: Tensor,
    hc_eps: float,
    norm_eps: float,
    num_iters: int,
    needs: Sequence[bool],
) -> list[Tensor]:
    # The next mixes are saved for backends that start from them; here the raw projection gives them again.
    state_inputs = (
        previous_output,
        residual,
        previous_pre_mix,
        previous_post_mix,
        previous_residual_mix,
    )
    inputs = (*state_inputs, phi, alpha, bias, norm_weight)
    if u.numel() == 0:
        return _zeros(inputs, needs)
    n, width = residual.shape[-2:]
    state = read_state(*state_inputs)
    wide = (residual, previous_output, g_new_residual, g_block_input)
    mix_grads = (g_pre, g_post, g_res)
    gluon = _runs_gluon(wide, mix_grads, n, width, needs)
    through = _mixes_gradients(
        mix_grads, alpha, bias, proj, u, n, width, residual.dtype, hc_eps, num_iters, gluon
    )
    outs = _empty(state_inputs, needs[:5])
    if gluon:
        assert g_new_residual is not None
        assert g_block_input is not None
        assert through is not None
        shares = _site_gradients_gluon(
            previous_output,
            residual,
            norm_weight,
            state,
            new_residual,
            g_new_residual,
            g_block_input,
            rstd,
            through,
            phi,
            outs,
            needs[8],
        )
    else:
        shares = site_gradients(
            state,
            new_residual,
            g_new_residual,
            g_block_input,
            norm_weight,
            rstd,
            through,
            phi,
            outs,
            needs[5],
            needs[8],
        )
    found = _gradients_of_parameters(shares, through, (phi, alpha, bias, norm_weight), n, needs[5:])
    return _needed((*outs, *found), inputs, needs)


def mega_mhc_entry_bwd(
    g_new_residual: Tensor | None,
    g_pre: Tensor | None,
    g_post: Tensor | None,
    g_res: Tensor | None,
    g_block_input: Tensor | None,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    new_residual: Tensor,
    proj: Tensor,
    u: Tensor,
    rstd: Tensor,
    next_pre: Tensor,
    next_post: Tensor,
    next_res: Tensor,
    hc_eps: float,
    norm_eps: float,
    num_iters: int,
    needs: Sequence[bool],
) -> list[Tensor]:
    inputs = (x, phi, alpha, bias, norm_weight)
    if u.numel() == 0:
        return _zeros(inputs, needs)
    n, width = new_residual.shape[-2:]
    state = read_entry(x)
    through = _mixes_gradients(
        (g_pre, g_post, g_res), alpha, bias, proj, u, n, width, x.dtype, hc_eps, num_iters
    )
    (g_x,) = _empty((x,), needs[:1])
    shares = entry_gradients(
        state,
        n,
        g_new_residual,
        g_block_input,
        norm_weight,
        rstd,
        through,
        phi,
        g_x,
        needs[1],
        needs[4],
    )
    parameters = (phi[:, :width], alpha, bias, norm_weight)
    g_phi, *found = _gradients_of_parameters(shares, through, parameters, n, needs[1:])
    if g_phi is not None:  # of one stream
        g_phi = g_phi.repeat(1, n)
    return _needed((g_x, g_phi, *found), inputs, needs)


def mega_mhc_exit_bwd(
    grad: Tensor,
    previous_output: Tensor,
    residual: Tensor,
    previous_pre_mix: Tensor,
    previous_post_mix: Tensor,
    previous_residual_mix: Tensor,
    norm_weight: Tensor | None,
    rstd: Tensor,
    needs: Sequence[bool],
) -> list[Tensor]:
    state_inputs = (
        previous_output,
        residual,
        previous_pre_mix,
        previous_post_mix,
        previous_residual_mix,
    )
    inputs = (*state_inputs, norm_weight)
    if rstd.numel() == 0:
        return _zeros(inputs, needs)
    outs = _empty(inputs, needs)
    exit_gradients(read_state(*state_inputs), grad, norm_weight, rstd, outs[:5], outs[5])
    return [t for t in outs if t is not None]
