"""Entry to and exit from the streams in plain torch: the reference, and the native backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._library import compute_dtype
from .._native import chunks, exact_matmul, sigmoid, stream_sum, tokens, tree_sum
from ..h_aggregate.native import aggregate_dot_tile, aggregate_tile
from ..proj_rms_compute_h.native import project_tile, rms_coefficient, rms_scale

__all__ = [
    "input_expand_bwd",
    "input_expand_fwd",
    "learned_output_contract_bwd",
    "learned_output_contract_fwd",
    "output_contract_bwd",
    "output_contract_fwd",
]


def _copies(t: Tensor, n: int, scale: float) -> Tensor:
    """``[..., C] -> [..., n, C]``: ``scale * t`` in every stream, rounded once."""
    flat = tokens(t, 1)
    out = t.new_empty(flat.shape[0], n, flat.shape[1])
    for part in chunks(flat.shape[0], n * flat.shape[1]):
        out[part] = (
            flat[part].unsqueeze(1) if scale == 1 else (flat[part].to(compute_dtype(t)) * scale).unsqueeze(1)
        )
    return out.view(*t.shape[:-1], n, t.shape[-1])


def _totals(t: Tensor, divisor: int) -> Tensor:
    """``[..., n, C] -> [..., C]``: sum over streams, first to last, divided and rounded once."""
    flat = tokens(t, 2)
    count, n, width = flat.shape
    out = t.new_empty(count, width)
    # A divisor on the device is divided by; a Python number would there be multiplied by as a rounded inverse.
    by = torch.full((1,), divisor, dtype=compute_dtype(t), device=t.device)
    for part in chunks(count, n * width):
        out[part] = stream_sum(flat[part].to(compute_dtype(t)), 1) / by
    return out.view(*t.shape[:-2], width)


def input_expand_fwd(x: Tensor, n: int) -> Tensor:
    return _copies(x, n, 1.0)


def input_expand_bwd(grad: Tensor) -> Tensor:
    return _totals(grad, 1)


def output_contract_fwd(x: Tensor) -> Tensor:
    return _totals(x, x.shape[-2])


def output_contract_bwd(grad: Tensor, n: int) -> Tensor:
    return _copies(grad, n, 1.0 / n)


def learned_output_contract_fwd(
    x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    n, width = x.shape[-2:]
    dtype = compute_dtype(x, weight, scale, base)
    flat, matrix, factor, shift = tokens(x, 2), weight.to(dtype), scale.to(dtype), base.to(dtype)
    count = flat.shape[0]
    out = x.new_empty(count, width)
    proj, u = (torch.empty(count, size, dtype=dtype, device=x.device) for size in (n, 1))
    for part in chunks(count, n * width):
        proj[part], mean_square = project_tile(flat[part].flatten(1).to(dtype), matrix)
        u[part], _ = rms_scale(mean_square, norm_eps, "inside")
        weights = sigmoid(proj[part] * u[part] * factor + shift) + eps
        out[part] = aggregate_tile(flat[part], weights)
    lead = x.shape[:-2]
    return out.view(*lead, width), proj.view(*lead, n), u.view(*lead, 1)


def learned_output_contract_bwd(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    proj: Tensor,
    u: Tensor,
    eps: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    n, width = x.shape[-2:]
    dtype = compute_dtype(x, weight, scale, base)
    flat, matrix, factor, shift = tokens(x, 2), weight.to(dtype), scale.to(dtype), base.to(dtype)
    g_all, raw, rms = tokens(grad, 1), tokens(proj, 1), tokens(u, 1)
    g_x = x.new_empty(flat.shape) if needs[0] else None
    g_weight = matrix.new_zeros(matrix.shape) if needs[1] else None
    g_scale, g_base = torch.zeros(n, dtype=dtype, device=x.device), torch.zeros_like(shift)
    for part in chunks(flat.shape[0], n * width):
        g, p, v = g_all[part].to(dtype), raw[part], rms[part]
        h = p * v * factor + shift
        g_h = aggregate_dot_tile(g, flat[part]) * sigmoid(h) * sigmoid(-h)
        g_proj = g_h * v * factor
        g_scale += tree_sum(g_h * p * v, 0)
        g_base += tree_sum(g_h, 0)
        tile = flat[part].flatten(1).to(dtype)
        with exact_matmul():
            if g_x is not None:
                g_u = stream_sum(g_h * p * factor, 1).unsqueeze(-1)
                through_rms = tile * rms_coefficient(None, g_u, v, 1.0 / v, n * width)
                through_mixes = (g_proj @ matrix + through_rms).view(-1, n, width)
                g_x[part] = (sigmoid(h) + eps).unsqueeze(-1) * g.unsqueeze(1) + through_mixes
            if g_weight is not None:
                g_weight += g_proj.T @ tile
    values = (g_x, g_weight, stream_sum(g_scale, 0), g_base)
    return [
        g.to(t.dtype).view(t.shape)
        for g, t, need in zip(values, (x, weight, scale, base), needs, strict=True)
        if need and g is not None
    ]
