"""Collapse of the streams in plain torch: the reference, and the native backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._library import compute_dtype
from .._native import chunks, tokens, tree_sum

__all__ = ["aggregate_dot_tile", "aggregate_tile", "h_aggregate_bwd", "h_aggregate_fwd"]


def aggregate_tile(x: Tensor, h_pre: Tensor) -> Tensor:
    """``sum_i h_pre[i]*x[i]``, first stream to last; ``x [t, n, C]`` in any dtype, ``h_pre [t, n]`` in the compute
    dtype, which the result has."""
    total = h_pre[:, :1] * x[:, 0]
    for i in range(1, x.shape[1]):
        total += h_pre[:, i : i + 1] * x[:, i]
    return total


def aggregate_dot_tile(grad: Tensor, x: Tensor) -> Tensor:
    """``<grad, x[i]>`` for every stream; ``grad [t, C]`` in the compute dtype, ``x [t, n, C]``; result ``[t, n]``."""
    return torch.stack([tree_sum(grad * x[:, i]) for i in range(x.shape[1])], dim=1)


def h_aggregate_fwd(x: Tensor, h_pre: Tensor) -> Tensor:
    n, width = x.shape[-2:]
    flat, weights = tokens(x, 2), tokens(h_pre, 1).to(compute_dtype(x, h_pre))
    out = x.new_empty(flat.shape[0], width)
    for part in chunks(flat.shape[0], n * width):
        out[part] = aggregate_tile(flat[part], weights[part])
    return out.view(*x.shape[:-2], width)


def h_aggregate_bwd(grad: Tensor, x: Tensor, h_pre: Tensor, needs: Sequence[bool]) -> list[Tensor]:
    n, width = x.shape[-2:]
    dtype = compute_dtype(x, h_pre)
    flat, weights, g_all = tokens(x, 2), tokens(h_pre, 1).to(dtype), tokens(grad, 1)
    g_x = x.new_empty(flat.shape) if needs[0] else None
    g_h = h_pre.new_empty(weights.shape) if needs[1] else None
    for part in chunks(flat.shape[0], n * width):
        g = g_all[part].to(dtype)
        if g_x is not None:
            g_x[part] = weights[part].unsqueeze(-1) * g.unsqueeze(1)
        if g_h is not None:
            g_h[part] = aggregate_dot_tile(g, flat[part])
    return [g.view(t.shape) for g, t in ((g_x, x), (g_h, h_pre)) if g is not None]
