"""Sinkhorn in plain torch: the reference, and the native backend.

Inside, a chunk of tokens lies as ``[row, column, token]`` so that every step is an elementwise operation on long
contiguous rows and no sum is left to a reduction whose order torch may choose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._library import compute_dtype
from .._native import chunks, stream_sum, tokens

__all__ = ["sinkhorn_bwd", "sinkhorn_bwd_tile", "sinkhorn_fwd", "sinkhorn_tile"]

ROW, COLUMN = 1, 0  # the axis a sum runs over: a row's entries differ in the column index


def _divisor(total: Tensor, eps: float, variant: str) -> Tensor:
    return total + eps if variant == "softmax" else total.clamp(min=eps)


def _start(logits: Tensor, variant: str) -> Tensor:
    """``exp(L - rowmax)``, divided by its row sum in the softmax variant."""
    m = torch.exp(logits - logits.amax(ROW, keepdim=True))
    return m / stream_sum(m, ROW).unsqueeze(ROW) if variant == "softmax" else m


def _axes(num_iterations: int, variant: str) -> list[int]:
    """The axis of every normalisation, in order."""
    axes = [ROW, COLUMN] * num_iterations
    return axes[1:] if variant == "softmax" else axes


def sinkhorn_tile(logits: Tensor, num_iterations: int, eps: float, variant: str) -> Tensor:
    """Forward on ``[n, n, tokens]`` in the compute dtype."""
    m = _start(logits, variant)
    if variant == "softmax":
        m = m + eps
    for axis in _axes(num_iterations, variant):
        m = m / _divisor(stream_sum(m, axis), eps, variant).unsqueeze(axis)
    return m


def sinkhorn_bwd_tile(grad: Tensor, logits: Tensor, num_iterations: int, eps: float, variant: str) -> Tensor:
    """Gradient of the logits on ``[n, n, tokens]``: the iterations are run again and undone one by one."""
    start = _start(logits, variant)
    m = start + eps if variant == "softmax" else start
    steps = []
    for axis in _axes(num_iterations, variant):
        total = stream_sum(m, axis)
        divisor = _divisor(total, eps, variant)
        m = m / divisor.unsqueeze(axis)
        steps.append((axis, m, total, divisor))
    g = grad
    for axis, y, total, divisor in reversed(steps):
        inner = stream_sum(g * y, axis)
        if variant == "paper":
            inner = torch.where(total > eps, inner, 0.0)  # the clamp holds the divisor constant
        g = (g - inner.unsqueeze(axis)) / divisor.unsqueeze(axis)
    if variant == "softmax":
        return start * (g - stream_sum(g * start, ROW).unsqueeze(ROW))
    g = start * g
    index = logits.argmax(ROW, keepdim=True)  # the first maximum of each row
    return g.scatter_add(ROW, index, -stream_sum(g, ROW).unsqueeze(ROW))


def sinkhorn_fwd(input_logits: Tensor, num_iterations: int, eps: float, variant: str) -> Tensor:
    n = input_logits.shape[-1]
    flat = tokens(input_logits, 2)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    for part in chunks(flat.shape[0], n * n):
        logits = flat[part].to(compute_dtype(flat)).permute(1, 2, 0).contiguous()
        out[part] = sinkhorn_tile(logits, num_iterations, eps, variant).permute(2, 0, 1)
    return out.view(input_logits.shape)


def sinkhorn_bwd(grad: Tensor, input_logits: Tensor, num_iterations: int, eps: float, variant: str) -> Tensor:
    n = input_logits.shape[-1]
    flat, flat_grad = tokens(input_logits, 2), tokens(grad, 2)
    dtype = compute_dtype(flat)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    # The trajectory holds two tensors a step: the chunk is cut so that all of it stays small.
    for part in chunks(flat.shape[0], n * n * 2 * num_iterations):
        logits, g = (t[part].to(dtype).permute(1, 2, 0).contiguous() for t in (flat, flat_grad))
        out[part] = sinkhorn_bwd_tile(g, logits, num_iterations, eps, variant).permute(2, 0, 1)
    return out.view(input_logits.shape)
