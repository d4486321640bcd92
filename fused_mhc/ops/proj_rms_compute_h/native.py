"""Projection, RMS and mapping in plain torch: the reference, and the native backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._library import compute_dtype
from .._native import chunks, exact_matmul, sigmoid, stream_sum, tokens, tree_sum

__all__ = [
    "Mapping",
    "group_sums",
    "mapping_bwd_tile",
    "mapping_tile",
    "proj_rms_compute_h_bwd",
    "proj_rms_compute_h_fwd",
    "project_tile",
    "rms_coefficient",
    "rms_scale",
    "spread_alphas",
]


class Mapping(NamedTuple):
    """What the mapping's backward yields for a tile: gradients of the raw projection and of the RMS scale ``u``,
    and each token's terms of the gradients of alpha (``[t, N]``) and bias (``[t, N]``)."""

    g_proj: Tensor
    g_u: Tensor
    alpha_terms: Tensor
    g_h: Tensor


def spread_alphas(alphas: Sequence[Tensor], n: int, dtype: torch.dtype) -> Tensor:
    """The three scales, one for each of the N columns."""
    return torch.cat([a.to(dtype).expand(size) for a, size in zip(alphas, (n, n, n * n), strict=True)])


def project_tile(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Raw product and mean square of a tile ``[t, K]`` in the compute dtype."""
    with exact_matmul():
        proj = x @ weight.T
    return proj, tree_sum(x * x).unsqueeze(-1) / x.shape[-1]


def rms_scale(mean_square: Tensor, eps: float, mode: str) -> tuple[Tensor, Tensor]:
    """``(u, r)``: the factor that normalises, and the RMS."""
    if mode == "outside":
        r = torch.sqrt(mean_square)
        return 1.0 / (r + eps), r
    u = torch.rsqrt(mean_square + eps)
    return u, 1.0 / u


def mapping_tile(h: Tensor, n: int, compute_h_eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``(h_pre, h_post, h_res logits)`` of a tile ``h [t, N]``."""
    return sigmoid(h[:, :n]) + compute_h_eps, 2.0 * sigmoid(h[:, n : 2 * n]), h[:, 2 * n :]


def mapping_bwd_tile(
    grads: Sequence[Tensor | None], proj: Tensor, u: Tensor, alpha: Tensor, bias: Tensor, n: int
) -> Mapping:
    """Backward of ``h = proj*alpha*u + bias`` and the sigmoids.

    ``s*t`` with ``t = sigmoid(-h)`` keeps the tails, where ``s*(1-s)`` would be 0.
    """
    h = proj * alpha * u + bias
    g_h = torch.zeros_like(h)
    for g, part, scale in zip(grads, (slice(0, n), slice(n, 2 * n)), (1.0, 2.0), strict=False):
        if g is not None:
            g_h[:, part] = scale * g * sigmoid(h[:, part]) * sigmoid(-h[:, part])
    if grads[2] is not None:
        g_h[:, 2 * n :] = grads[2]
    return Mapping(g_h * alpha * u, stream_sum(g_h * proj * alpha, 1).unsqueeze(-1), g_h * proj * u, g_h)


def rms_coefficient(g_r: Tensor | None, g_u: Tensor, u: Tensor, r: Tensor, width: int) -> Tensor:
    """Factor of ``x`` in its gradient: ``(g_r - u*u*g_u)/(K*r)``, and 0 where ``r`` is 0."""
    total = -u * u * g_u if g_r is None else g_r - u * u * g_u
    vanished = r == 0
    return torch.where(vanished, 0.0, total / (width * torch.where(vanished, 1.0, r)))


def group_sums(terms: Tensor, n: int) -> list[Tensor]:
    """Sums of ``[N]`` over the three groups of columns, each ``[1]``."""
    return [stream_sum(part, 0).view(1) for part in terms.split((n, n, n * n))]


def proj_rms_compute_h_fwd(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    n: int,
    eps: float,
    compute_h_eps: float,
    rms_eps_mode: str,
    precision: str,
) -> tuple[Tensor, ...]:
    # precision: fp32 products on this backend in every mode.
    dtype = compute_dtype(x, weight, alpha_pre, alpha_post, alpha_res, bias)
    flat, matrix = tokens(x, 1), weight.to(dtype)
    alpha, shift = spread_alphas((alpha_pre, alpha_post, alpha_res), n, dtype), bias.to(dtype)
    count, width = flat.shape
    outs = [
        torch.empty(count, size, dtype=dtype, device=x.device) for size in (n, n, n * n, 1, matrix.shape[0])
    ]
    for part in chunks(count, width):
        proj, mean_square = project_tile(flat[part].to(dtype), matrix)
        u, r = rms_scale(mean_square, eps, rms_eps_mode)
        mixes = mapping_tile(proj * alpha * u + shift, n, compute_h_eps)
        for out, value in zip(outs, (*mixes, r, proj), strict=True):
            out[part] = value
    return tuple(out.view(*x.shape[:-1], out.shape[1]) for out in outs)


def proj_rms_compute_h_bwd(
    g_pre: Tensor | None,
    g_post: Tensor | None,
    g_res: Tensor | None,
    g_r: Tensor | None,
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    proj: Tensor,
    r: Tensor,
    n: int,
    eps: float,
    rms_eps_mode: str,
    precision: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    dtype = compute_dtype(x, weight, alpha_pre, alpha_post, alpha_res, bias)
    flat, matrix = tokens(x, 1), weight.to(dtype)
    alphas = (alpha_pre, alpha_post, alpha_res)
    alpha, shift = spread_alphas(alphas, n, dtype), bias.to(dtype)
    raw, rms = tokens(proj, 1), tokens(r, 1)
    grads = [None if g is None else tokens(g, 1) for g in (g_pre, g_post, g_res, g_r)]
    count, width = flat.shape
    g_x = x.new_empty(flat.shape) if needs[0] else None
    g_weight = matrix.new_zeros(matrix.shape) if needs[1] else None
    g_alpha, g_bias = torch.zeros_like(alpha), torch.zeros_like(shift)
    for part in chunks(count, width):
        *g_mixes, g_rms = (None if g is None else g[part].to(dtype) for g in grads)
        u = 1.0 / (rms[part] + eps) if rms_eps_mode == "outside" else 1.0 / rms[part]
        mapping = mapping_bwd_tile(g_mixes, raw[part], u, alpha, shift, n)
        g_alpha += tree_sum(mapping.alpha_terms, 0)
        g_bias += tree_sum(mapping.g_h, 0)
        if g_x is None and g_weight is None:
            continue
        tile = flat[part].to(dtype)
        with exact_matmul():
            if g_x is not None:
                coefficient = rms_coefficient(g_rms, mapping.g_u, u, rms[part], width)
                g_x[part] = mapping.g_proj @ matrix + tile * coefficient
            if g_weight is not None:
                g_weight += mapping.g_proj.T @ tile
    values = [g_x, g_weight, *group_sums(g_alpha, n), g_bias]
    inputs = (x, weight, *alphas, bias)
    return [
        g.to(t.dtype).view(t.shape)
        for g, t, need in zip(values, inputs, needs, strict=True)
        if need and g is not None
    ]
