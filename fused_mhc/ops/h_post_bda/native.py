"""Residual mixing with bias and dropout in plain torch: the reference, and the native backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._library import compute_dtype
from .._native import chunks, stream_sum, tokens, tree_sum
from .philox import keep_mask

__all__ = [
    "h_post_bda_bwd",
    "h_post_bda_fwd",
    "mix_tile",
    "residual_dot_tile",
    "unmix_tile",
]


def mix_tile(h_res: Tensor, residual: Tensor) -> Tensor:
    """``out[j] = sum_i h_res[i, j]*residual[i]``, first stream to last: ``[t, n, n]`` in the compute dtype,
    ``[t, n, C]`` -> ``[t, n, C]`` in the compute dtype."""
    total = h_res[:, 0, :, None] * residual[:, :1]
    for i in range(1, residual.shape[1]):
        total += h_res[:, i, :, None] * residual[:, i : i + 1]
    return total


def unmix_tile(h_res: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the residual: ``sum_j h_res[i, j]*grad[j]``, first stream to last."""
    total = h_res[:, :, 0, None] * grad[:, :1]
    for j in range(1, grad.shape[1]):
        total += h_res[:, :, j, None] * grad[:, j : j + 1]
    return total


def residual_dot_tile(residual: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the mixing matrix: ``<residual[i], grad[j]>``, ``[t, n, n]``; ``grad`` in the compute dtype."""
    return torch.stack([tree_sum(residual[:, i : i + 1] * grad) for i in range(residual.shape[1])], dim=1)


def _drop(t: Tensor, part: slice, dropout_p: float, seed: Tensor | None) -> Tensor:
    """Dropout of ``t [t, n, C]``, the tokens ``part`` of the whole."""
    if seed is None:
        return t
    size = t.shape[1] * t.shape[2]
    keep = keep_mask(seed, part.start * size, t.numel(), dropout_p).view(t.shape)
    return torch.where(keep, t * (1.0 / (1.0 - dropout_p)), 0.0)


def h_post_bda_fwd(
    h_res: Tensor,
    original_residual: Tensor,
    h_post: Tensor,
    x: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    n, width = original_residual.shape[-2:]
    dtype = compute_dtype(h_res, original_residual, h_post, x, bias)
    residual, branch = tokens(original_residual, 2), tokens(x, 1)
    mixing, post = tokens(h_res, 2).to(dtype), tokens(h_post, 1).to(dtype)
    out = original_residual.new_empty(residual.shape)
    for part in chunks(residual.shape[0], n * width):
        value = branch[part].to(dtype)
        if bias is not None:
            value = value + bias
        added = _drop(post[part].unsqueeze(-1) * value.unsqueeze(1), part, dropout_p, seed)
        out[part] = mix_tile(mixing[part], residual[part]) + added
    return out.view(original_residual.shape)


def h_post_bda_bwd(
    grad: Tensor,
    h_res: Tensor,
    original_residual: Tensor,
    h_post: Tensor,
    x: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    needs: Sequence[bool],
) -> list[Tensor]:
    n, width = original_residual.shape[-2:]
    dtype = compute_dtype(h_res, original_residual, h_post, x, bias)
    residual, branch, g_all = tokens(original_residual, 2), tokens(x, 1), tokens(grad, 2)
    mixing, post = tokens(h_res, 2).to(dtype), tokens(h_post, 1).to(dtype)
    need_res, need_residual, need_post, need_x, need_bias = needs
    g_res = h_res.new_empty(mixing.shape) if need_res else None
    g_residual = original_residual.new_empty(residual.shape) if need_residual else None
    g_post = h_post.new_empty(post.shape) if need_post else None
    g_x = x.new_empty(branch.shape) if need_x else None
    g_bias = torch.zeros(width, dtype=dtype, device=x.device) if need_bias else None
    for part in chunks(residual.shape[0], n * width):
        g = g_all[part].to(dtype)
        if g_res is not None:
            g_res[part] = residual_dot_tile(residual[part], g)
        if g_residual is not None:
            g_residual[part] = unmix_tile(mixing[part], g)
        if not (need_post or need_x or need_bias):
            continue
        dropped = _drop(g, part, dropout_p, seed)
        if g_post is not None:
            value = branch[part].to(dtype)
            if bias is not None:
                value = value + bias
            g_post[part] = tree_sum(dropped * value.unsqueeze(1))
        if need_x or need_bias:
            g_branch = stream_sum(post[part].unsqueeze(-1) * dropped, 1)
            if g_x is not None:
                g_x[part] = g_branch
            if g_bias is not None:
                g_bias += tree_sum(g_branch, 0)
    pairs = ((g_res, h_res), (g_residual, original_residual), (g_post, h_post), (g_x, x), (g_bias, bias))
    return [g.to(t.dtype).view(t.shape) for g, t in pairs if g is not None and t is not None]
