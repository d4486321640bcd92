"""The shifted single pass in plain torch: the reference, and the native backend.

The ``*_tile`` functions work on a tile of tokens in the compute dtype; the hosts below walk the tokens with them,
and so does the CPU executor of the task graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._library import compute_dtype
from .._native import chunks, exact_matmul, stream_sum, tokens, tree_sum
from ..h_aggregate.native import aggregate_dot_tile, aggregate_tile
from ..h_post_bda.native import mix_tile, residual_dot_tile, unmix_tile
from ..mhc_pre.native import res_bwd_tile, res_tile
from ..proj_rms_compute_h.native import (
    group_sums,
    mapping_bwd_tile,
    mapping_tile,
    project_tile,
    rms_scale,
    spread_alphas,
)

__all__ = [
    "MixGradients",
    "mega_mhc_bwd",
    "mega_mhc_entry_bwd",
    "mega_mhc_entry_fwd",
    "mega_mhc_exit_bwd",
    "mega_mhc_exit_fwd",
    "mega_mhc_fwd",
    "mixes_bwd_tile",
    "mixes_tile",
    "norm_bwd_tile",
    "norm_tile",
    "total_grad_tile",
    "update_tile",
]


class MixGradients(NamedTuple):
    """What the three mix gradients of a tile become: ``g_logits*u`` ``[t, N]``, the factor of ``new_residual`` in its
    own gradient ``[t, 1]``, and each token's terms of the gradients of alpha and bias ``[t, N]``."""

    scaled: Tensor
    coefficient: Tensor
    alpha_terms: Tensor
    bias_terms: Tensor


def update_tile(h_res: Tensor, residual: Tensor, h_post: Tensor, output: Tensor) -> Tensor:
    """Step 1, not yet rounded: ``sum_i h_res[i, j]*residual[i] + h_post[j]*output``."""
    return mix_tile(h_res, residual) + h_post.unsqueeze(-1) * output.unsqueeze(1)


def mixes_tile(
    proj: Tensor, u: Tensor, alpha: Tensor, bias: Tensor, n: int, hc_eps: float, num_iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Step 2 from the raw projection: the next ``(pre, post, residual)`` mixes."""
    pre, post, logits = mapping_tile(proj * u * alpha + bias, n, hc_eps)
    return pre, post, res_tile(logits, num_iters, hc_eps, "softmax")


def norm_tile(mixed: Tensor, norm_weight: Tensor | None, norm_eps: float) -> tuple[Tensor, Tensor]:
    """Step 3: RMSNorm of ``mixed [t, C]``; ``(block_input, reciprocal rms [t, 1])``."""
    rstd = torch.rsqrt(tree_sum(mixed * mixed).unsqueeze(-1) / mixed.shape[1] + norm_eps)
    normed = mixed * rstd
    return (normed if norm_weight is None else normed * norm_weight), rstd


def norm_bwd_tile(
    grad: Tensor, mixed: Tensor, rstd: Tensor, norm_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``(g_mixed, mixed*rstd)``, both ``[t, C]``; ``grad`` times the second are the terms of g_norm_weight."""
    normed = mixed * rstd
    g_normed = grad if norm_weight is None else grad * norm_weight
    mean = tree_sum(g_normed * normed).unsqueeze(-1) / mixed.shape[1]
    return rstd * (g_normed - normed * mean), normed


def mixes_bwd_tile(
    grads: Sequence[Tensor | None],
    proj: Tensor,
    u: Tensor,
    alpha: Tensor,
    bias: Tensor,
    n: int,
    width: int,
    hc_eps: float,
    num_iters: int,
) -> MixGradients:
    """Backward of step 2 down to the raw projection; ``width`` is K."""
    g_pre, g_post, g_res = grads
    logits = proj * u
    if g_res is not None:
        g_res = res_bwd_tile(g_res, (logits * alpha + bias)[:, 2 * n :], num_iters, hc_eps, "softmax")
    mapping = mapping_bwd_tile((g_pre, g_post, g_res), logits, torch.ones_like(u), alpha, bias, n)
    coefficient = -(u * u / width) * mapping.g_u
    return MixGradients(mapping.g_proj * u, coefficient, mapping.alpha_terms, mapping.g_h)


def total_grad_tile(
    grad: Tensor | None,
    pre: Tensor,
    g_mixed: Tensor | None,
    through_mixes: Tensor,
    coefficient: Tensor,
    new_residual: Tensor,
) -> Tensor:
    """``G_total``: every path into ``new_residual [t, n, C]``; ``through_mixes`` is ``(g_logits*u) @ phi``."""
    total = through_mixes.view(new_residual.shape) + coefficient.unsqueeze(-1) * new_residual
    if g_mixed is not None:
        total += pre.unsqueeze(-1) * g_mixed.unsqueeze(1)
    if grad is not None:
        total += grad
    return total


def _optional(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if t is None else t.to(dtype)


def _part(t: Tensor | None, part: slice, dtype: torch.dtype) -> Tensor | None:
    return None if t is None else t[part].to(dtype)


def _flat(t: Tensor | None, trailing: int) -> Tensor | None:
    return None if t is None else tokens(t, trailing)


def _cast(
    values: Sequence[Tensor | None], inputs: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor]:
    """The needed gradients, each in the shape and dtype of its input."""
    return [
        g.to(t.dtype).view(t.shape)
        for g, t, need in zip(values, inputs, needs, strict=True)
        if need and g is not None and t is not None
    ]


class _State:
    """What a site gets from the one before, by token; the mixes in the compute dtype."""

    def __init__(
        self,
        previous_output: Tensor,
        residual: Tensor,
        previous_pre_mix: Tensor,
        previous_post_mix: Tensor,
        previous_residual_mix: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.output, self.streams = tokens(previous_output, 1), tokens(residual, 2)
        self.pre, self.post = (tokens(t, 1).to(dtype) for t in (previous_pre_mix, previous_post_mix))
        self.mixing = tokens(previous_residual_mix, 2).to(dtype)

    def chunks(self) -> Iterator[slice]:
        count, n, width = self.streams.shape
        return chunks(count, n * width)

    def updated(self, part: slice) -> Tensor:
        """Step 1 for a tile, rounded to the streams' dtype."""
        new = update_tile(self.mixing[part], self.streams[part], self.post[part], self.output[part])
        return new.to(self.streams.dtype)

    def room(self, inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
        """An empty gradient for each of the five tensors that needs one, in its dtype."""
        shapes = (t.shape for t in (self.output, self.streams, self.pre, self.post, self.mixing))
        return [
            t.new_empty(shape) if t is not None and need else None
            for t, shape, need in zip(inputs, shapes, needs, strict=False)
        ]

    def fill(
        self,
        outs: Sequence[Tensor | None],
        part: slice,
        new: Tensor,
        g_mixed: Tensor | None,
        total: Tensor | None,
    ) -> None:
        """The gradients of a tile from those of ``mixed`` and of the new streams ``new``."""
        g_output, g_residual, g_pre, g_post, g_mixing = outs
        if g_pre is not None:
            g_pre[part] = 0.0 if g_mixed is None else aggregate_dot_tile(g_mixed, new)
        if total is None:
            return
        if g_output is not None:
            g_output[part] = stream_sum(self.post[part].unsqueeze(-1) * total, 1)
        if g_residual is not None:
            g_residual[part] = unmix_tile(self.mixing[part], total)
        if g_post is not None:
            g_post[part] = tree_sum(total * self.output[part].unsqueeze(1))
        if g_mixing is not None:
            g_mixing[part] = residual_dot_tile(self.streams[part], total)


def _wants_total(needs: Sequence[bool]) -> bool:
    """Whether a gradient is wanted that starts from `total_grad_tile`: all of the state's but the pre-mix's."""
    need_output, need_residual, _, need_post, need_mixing = needs[:5]
    return need_output or need_residual or need_post or need_mixing


class _Boundary:
    """Results of one site for all tokens, filled tile by tile: what `mega_mhc_fwd` and `mega_mhc_entry_fwd` share."""

    def __init__(
        self,
        streams: Tensor,
        phi: Tensor,
        alpha: Tensor,
        bias: Tensor,
        norm_weight: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        count, n, width = streams.shape
        self.n, self.dtype = n, dtype
        self.phi, self.bias = phi.to(dtype), bias.to(dtype)
        self.alpha = spread_alphas(alpha.split(1), n, dtype)
        self.norm_weight = _optional(norm_weight, dtype)
        self.new_residual = streams
        self.block_input = streams.new_empty(count, width)
        shapes = ((n,), (n,), (n, n), (phi.shape[0],), (1,), (1,))
        self.pre, self.post, self.res, self.proj, self.u, self.rstd = (
            torch.empty(count, *shape, dtype=dtype, device=streams.device) for shape in shapes
        )

    def fill(self, part: slice, mixed: Tensor, hc_eps: float, norm_eps: float, num_iters: int) -> None:
        self.proj[part], mean_square = project_tile(
            self.new_residual[part].flatten(1).to(self.dtype), self.phi
        )
        self.u[part], _ = rms_scale(mean_square, norm_eps, "inside")
        self.pre[part], self.post[part], self.res[part] = mixes_tile(
            self.proj[part], self.u[part], self.alpha, self.bias, self.n, hc_eps, num_iters
        )
        self.block_input[part], self.rstd[part] = norm_tile(mixed, self.norm_weight, norm_eps)

    def results(self, lead: Sequence[int]) -> tuple[Tensor, ...]:
        outs = (self.new_residual, self.pre, self.post, self.res, self.block_input)
        return tuple(t.view(*lead, *t.shape[1:]) for t in (*outs, self.proj, self.u, self.rstd))


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
    dtype = compute_dtype(
        previous_output,
        residual,
        previous_pre_mix,
        previous_post_mix,
        previous_residual_mix,
        phi,
        alpha,
        bias,
        norm_weight,
    )
    mixes = (previous_pre_mix, previous_post_mix, previous_residual_mix)
    state = _State(previous_output, residual, *mixes, dtype)
    site = _Boundary(residual.new_empty(state.streams.shape), phi, alpha, bias, norm_weight, dtype)
    for part in state.chunks():
        new = site.new_residual[part] = state.updated(part)
        site.fill(part, aggregate_tile(new, state.pre[part]), hc_eps, norm_eps, num_iters)
    return site.results(residual.shape[:-2])


def mega_mhc_entry_fwd(
    x: Tensor,
    n: int,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    hc_eps: float,
    norm_eps: float,
    num_iters: int,
) -> tuple[Tensor, ...]:
    dtype = compute_dtype(x, phi, alpha, bias, norm_weight)
    flat = tokens(x, 1)
    count, width = flat.shape
    site = _Boundary(x.new_empty(count, n, width), phi, alpha, bias, norm_weight, dtype)
    for part in chunks(count, n * width):
        site.new_residual[part] = flat[part].unsqueeze(1)
        site.fill(part, flat[part].to(dtype), hc_eps, norm_eps, num_iters)
    return site.results(x.shape[:-1])


class _BoundaryGradients:
    """Backward of one site, tile by tile: what `mega_mhc_bwd` and `mega_mhc_entry_bwd` share."""

    def __init__(
        self,
        grads: Sequence[Tensor | None],
        phi: Tensor,
        alpha: Tensor,
        bias: Tensor,
        norm_weight: Tensor | None,
        new_residual: Tensor,
        saved: Sequence[Tensor],
        hc_eps: float,
        num_iters: int,
        dtype: torch.dtype,
        needs: Sequence[bool],
    ) -> None:
        """``needs``: whether g_phi, g_alpha, g_bias and g_norm_weight are wanted."""
        self.dtype, self.hc_eps, self.num_iters = dtype, hc_eps, num_iters
        self.need_phi, *_, self.need_norm_weight = needs
        self.new_residual = tokens(new_residual, 2)
        self.n, width = self.new_residual.shape[1:]
        trailing = (2, 1, 1, 2, 1)
        self.grads = [_flat(g, last) for g, last in zip(grads, trailing, strict=True)]
        self.proj, self.u, self.rstd = (tokens(t, 1) for t in saved)
        self.phi, self.bias = phi.to(dtype), bias.to(dtype)
        self.alpha = spread_alphas(alpha.split(1), self.n, dtype)
        self.norm_weight = _optional(norm_weight, dtype)
        self.g_phi, self.g_bias = self.phi.new_zeros(self.phi.shape), torch.zeros_like(self.bias)
        self.g_alpha_terms = torch.zeros_like(self.alpha)
        self.g_norm_weight = torch.zeros(width, dtype=dtype, device=phi.device)

    @property
    def g_alpha(self) -> Tensor:
        return torch.cat(group_sums(self.g_alpha_terms, self.n))

    def tile(
        self, part: slice, mixed: Tensor, pre: Tensor, need_total: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """``(g_mixed, G_total)`` of a tile; adds its terms to the parameters' sums."""
        g_new, g_pre, g_post, g_res, g_block = (_part(g, part, self.dtype) for g in self.grads)
        g_mixed = None
        if g_block is not None:
            g_mixed, normed = norm_bwd_tile(g_block, mixed, self.rstd[part], self.norm_weight)
            if self.need_norm_weight:
                self.g_norm_weight += tree_sum(g_block * normed, 0)
        new = self.new_residual[part].to(self.dtype)
        mixes = mixes_bwd_tile(
            (g_pre, g_post, g_res),
            self.proj[part],
            self.u[part],
            self.alpha,
            self.bias,
            self.n,
            new[0].numel(),
            self.hc_eps,
            self.num_iters,
        )
        self.g_alpha_terms += tree_sum(mixes.alpha_terms, 0)
        self.g_bias += tree_sum(mixes.bias_terms, 0)
        with exact_matmul():
            if self.need_phi:
                self.g_phi += mixes.scaled.T @ new.flatten(1)
            if not need_total:
                return g_mixed, None
            through = mixes.scaled @ self.phi
        return g_mixed, total_grad_tile(g_new, pre, g_mixed, through, mixes.coefficient, new)


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
    inputs = (
        previous_output,
        residual,
        previous_pre_mix,
        previous_post_mix,
        previous_residual_mix,
        phi,
        alpha,
        bias,
        norm_weight,
    )
    dtype = compute_dtype(*inputs)
    state = _State(*inputs[:5], dtype)
    outs = state.room(inputs, needs[:5])
    site = _BoundaryGradients(
        (g_new_residual, g_pre, g_post, g_res, g_block_input),
        phi,
        alpha,
        bias,
        norm_weight,
        new_residual,
        (proj, u, rstd),
        hc_eps,
        num_iters,
        dtype,
        needs[5:],
    )
    for part in state.chunks():
        new, pre = site.new_residual[part], state.pre[part]
        g_mixed, total = site.tile(part, aggregate_tile(new, pre), pre, _wants_total(needs))
        state.fill(outs, part, new, g_mixed, total)
    sums = (site.g_phi, site.g_alpha, site.g_bias, site.g_norm_weight)
    return _cast((*outs, *sums), inputs, needs)


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
    dtype = compute_dtype(*inputs)
    flat = tokens(x, 1)
    n = new_residual.shape[-2]
    g_x = x.new_empty(flat.shape) if needs[0] else None
    one_hot = torch.zeros(1, n, dtype=dtype, device=x.device)
    one_hot[0, 0] = 1.0
    site = _BoundaryGradients(
        (g_new_residual, g_pre, g_post, g_res, g_block_input),
        phi,
        alpha,
        bias,
        norm_weight,
        new_residual,
        (proj, u, rstd),
        hc_eps,
        num_iters,
        dtype,
        needs[1:],
    )
    for part in chunks(flat.shape[0], n * flat.shape[1]):
        _, total = site.tile(part, flat[part].to(dtype), one_hot, needs[0])
        if g_x is not None and total is not None:
            g_x[part] = stream_sum(total, 1)
    return _cast((g_x, site.g_phi, site.g_alpha, site.g_bias, site.g_norm_weight), inputs, needs)


def mega_mhc_exit_fwd(
    previous_output: Tensor,
    residual: Tensor,
    previous_pre_mix: Tensor,
    previous_post_mix: Tensor,
    previous_residual_mix: Tensor,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    mixes = (previous_pre_mix, previous_post_mix, previous_residual_mix)
    dtype = compute_dtype(previous_output, residual, *mixes, norm_weight)
    state, scale = _State(previous_output, residual, *mixes, dtype), _optional(norm_weight, dtype)
    count, _, width = state.streams.shape
    out = residual.new_empty(count, width)
    rstd = torch.empty(count, 1, dtype=dtype, device=residual.device)
    for part in state.chunks():
        mixed = aggregate_tile(state.updated(part), state.pre[part])
        out[part], rstd[part] = norm_tile(mixed, scale, norm_eps)
    lead = residual.shape[:-2]
    return out.view(*lead, width), rstd.view(*lead, 1)


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
    mixes = (previous_pre_mix, previous_post_mix, previous_residual_mix)
    inputs = (previous_output, residual, *mixes, norm_weight)
    dtype = compute_dtype(*inputs)
    state, scale = _State(previous_output, residual, *mixes, dtype), _optional(norm_weight, dtype)
    g_all, factor = tokens(grad, 1), tokens(rstd, 1)
    outs = state.room(inputs, needs[:5])
    g_norm_weight = torch.zeros(g_all.shape[1], dtype=dtype, device=residual.device)
    for part in state.chunks():
        new, pre = state.updated(part), state.pre[part]
        g = g_all[part].to(dtype)
        g_mixed, normed = norm_bwd_tile(g, aggregate_tile(new, pre), factor[part], scale)
        if needs[5]:
            g_norm_weight += tree_sum(g * normed, 0)
        total = pre.unsqueeze(-1) * g_mixed.unsqueeze(1) if _wants_total(needs) else None
        state.fill(outs, part, new, g_mixed, total)
    return _cast((*outs, g_norm_weight), inputs, needs)
