"""Prediction, Sinkhorn and collapse in plain torch: the reference, and the native backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._library import compute_dtype
from .._native import chunks, exact_matmul, tokens, tree_sum
from ..h_aggregate.native import aggregate_dot_tile, aggregate_tile
from ..proj_rms_compute_h.native import (
    group_sums,
    mapping_bwd_tile,
    mapping_tile,
    project_tile,
    rms_coefficient,
    rms_scale,
    spread_alphas,
)
from ..sinkhorn.native import sinkhorn_bwd_tile, sinkhorn_tile

__all__ = ["mhc_pre_bwd", "mhc_pre_fwd", "res_bwd_tile", "res_tile"]


def res_tile(logits: Tensor, num_iterations: int, eps: float, variant: str) -> Tensor:
    """Sinkhorn of a tile of mapping columns: ``[t, n*n] -> [t, n, n]``."""
    square = _square(logits)
    return sinkhorn_tile(square, num_iterations, eps, variant).permute(2, 0, 1)


def res_bwd_tile(grad: Tensor, logits: Tensor, num_iterations: int, eps: float, variant: str) -> Tensor:
    """Gradient of the logits ``[t, n*n]`` from that of the mixing matrix ``[t, n, n]``."""
    g = grad.permute(1, 2, 0).contiguous()
    return sinkhorn_bwd_tile(g, _square(logits), num_iterations, eps, variant).permute(2, 0, 1).flatten(1)


def _square(logits: Tensor) -> Tensor:
    n = round(logits.shape[1] ** 0.5)
    return logits.reshape(-1, n, n).permute(1, 2, 0).contiguous()


def mhc_pre_fwd(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    num_iterations: int,
    rms_eps: float,
    compute_h_eps: float,
    sinkhorn_eps: float,
    rms_eps_mode: str,
    variant: str,
    precision: str,
) -> tuple[Tensor, ...]:
    n, width = x.shape[-2:]
    dtype = compute_dtype(x, weight, alpha_pre, alpha_post, alpha_res, bias)
    flat, matrix = tokens(x, 2), weight.to(dtype)
    alpha, shift = spread_alphas((alpha_pre, alpha_post, alpha_res), n, dtype), bias.to(dtype)
    count = flat.shape[0]
    layer_input = x.new_empty(count, width)
    shapes = ((n,), (n, n), (n,), (matrix.shape[0],), (1,))
    mixes = [torch.empty(count, *shape, dtype=dtype, device=x.device) for shape in shapes]
    for part in chunks(count, n * width):
        proj, mean_square = project_tile(flat[part].flatten(1).to(dtype), matrix)
        u, r = rms_scale(mean_square, rms_eps, rms_eps_mode)
        h_pre, h_post, logits = mapping_tile(proj * alpha * u + shift, n, compute_h_eps)
        h_res = res_tile(logits, num_iterations, sinkhorn_eps, variant)
        layer_input[part] = aggregate_tile(flat[part], h_pre)
        for out, value in zip(mixes, (h_post, h_res, h_pre, proj, r), strict=True):
            out[part] = value
    lead = x.shape[:-2]
    return tuple(t.view(*lead, *t.shape[1:]) for t in (layer_input, *mixes))


def mhc_pre_bwd(
    g_layer_input: Tensor | None,
    g_h_post: Tensor | None,
    g_h_res: Tensor | None,
    g_x_passed: Tensor | None,
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    h_pre: Tensor,
    proj: Tensor,
    r: Tensor,
    num_iterations: int,
    rms_eps: float,
    sinkhorn_eps: float,
    rms_eps_mode: str,
    variant: str,
    precision: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    n, width = x.shape[-2:]
    dtype = compute_dtype(x, weight, alpha_pre, alpha_post, alpha_res, bias)
    flat, matrix = tokens(x, 2), weight.to(dtype)
    alphas = (alpha_pre, alpha_post, alpha_res)
    alpha, shift = spread_alphas(alphas, n, dtype), bias.to(dtype)
    weights, raw, rms = tokens(h_pre, 1), tokens(proj, 1), tokens(r, 1)
    trailing = (1, 1, 2, 2)
    grads = [
        None if g is None else tokens(g, last)
        for g, last in zip((g_layer_input, g_h_post, g_h_res, g_x_passed), trailing, strict=True)
    ]
    count = flat.shape[0]
    g_x = x.new_empty(flat.shape) if needs[0] else None
    g_weight = matrix.new_zeros(matrix.shape) if needs[1] else None
    g_alpha, g_bias = torch.zeros_like(alpha), torch.zeros_like(shift)
    for part in chunks(count, n * width):
        g_in, g_post, g_res, g_passed = (None if g is None else g[part].to(dtype) for g in grads)
        u = 1.0 / (rms[part] + rms_eps) if rms_eps_mode == "outside" else 1.0 / rms[part]
        g_pre = None if g_in is None else aggregate_dot_tile(g_in, flat[part])
        g_logits = None
        if g_res is not None:
            logits = (raw[part] * alpha * u + shift)[:, 2 * n :]
            g_logits = res_bwd_tile(g_res, logits, num_iterations, sinkhorn_eps, variant)
        mapping = mapping_bwd_tile((g_pre, g_post, g_logits), raw[part], u, alpha, shift, n)
        g_alpha += tree_sum(mapping.alpha_terms, 0)
        g_bias += tree_sum(mapping.g_h, 0)
        if g_x is None and g_weight is None:
            continue
        tile = flat[part].flatten(1).to(dtype)
        with exact_matmul():
            if g_x is not None:
                coefficient = rms_coefficient(None, mapping.g_u, u, rms[part], n * width)
                total = (mapping.g_proj @ matrix + tile * coefficient).view(-1, n, width)
                if g_in is not None:
                    total += weights[part].unsqueeze(-1) * g_in.unsqueeze(1)
                if g_passed is not None:
                    total += g_passed
                g_x[part] = total
            if g_weight is not None:
                g_weight += mapping.g_proj.T @ tile
    values = (g_x, g_weight, *group_sums(g_alpha, n), g_bias)
    inputs = (x, weight, *alphas, bias)
    return [
        g.to(t.dtype).view(t.shape)
        for g, t, need in zip(values, inputs, needs, strict=True)
        if need and g is not None
    ]
