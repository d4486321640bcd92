"""Sinkhorn: logits to (nearly) doubly stochastic mixing matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import checks
from ...dispatch import MHCBackend
from ...errors import InputError
from .._library import define, needed, spread, with_backward

__all__ = ["VARIANTS", "fused_sinkhorn"]

VARIANTS = ("softmax", "paper")


def _streams(*args: Any) -> int:
    size: int = next(a for a in args if a is not None).shape[-1]
    return size


_fwd = define(
    "sinkhorn",
    "fwd",
    "(Tensor input_logits, int num_iterations, float eps, str variant, str backend) -> Tensor",
    lambda logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
    _streams,
)
_bwd = define(
    "sinkhorn",
    "bwd",
    "(Tensor grad, Tensor input_logits, int num_iterations, float eps, str variant, str backend) -> Tensor",
    lambda grad, logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
    _streams,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, *ctx.arguments = inputs
    ctx.save_for_backward(logits)


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = needed(ctx, 1, grad)
    grads = [_bwd(grad, *ctx.saved_tensors, *ctx.arguments)] if needs[0] else []
    return spread(grads, needs, 5)


with_backward("sinkhorn", _setup, _backward)


def fused_sinkhorn(
    input_logits: Tensor,
    num_iterations: int,
    eps: float = 1e-6,
    backend: MHCBackend = "auto",
    *,
    variant: str = "softmax",
) -> Tensor:
    """Normalise rows and columns in turn until the matrices are (nearly) doubly stochastic.

    ``row`` sums over the last axis, ``col`` over the one before it.

    - ``"softmax"`` (Megatron-Core, DeepSeek V4): ``M = softmax(L, -1) + eps; M = M/(col(M)+eps)``; then
      ``num_iterations - 1`` times ``M = M/(row(M)+eps); M = M/(col(M)+eps)``.
    - ``"paper"`` (mHC paper, Eq. 9): ``M = exp(L - rowmax(L))``; then ``num_iterations`` times
      ``M = M/max(row(M), eps); M = M/max(col(M), eps)``.

    The backward differentiates exactly the iterations that ran; their trajectory is made again, never stored.
    Columns come last: their sums are ``s/(s+eps)`` (softmax) or ``s/max(s, eps)`` (paper), with ``s`` the sum before
    the last normalisation. Row sums are as near to 1 as the iterations bring them.

    NaN and infinities stay in their token: a NaN, a ``+inf`` or a row of ``-inf`` makes that token's matrix NaN in
    the rows and columns that the formula reaches; single ``-inf`` logits are zero weights.

    Args:
        input_logits: ``[..., n, n]``, n in 1..16; fp16, bf16, fp32 or fp64; any strides.
        num_iterations: at least 1.
        eps: above 0. Default 1e-6.
        backend: ``"auto"`` (default) or a backend's name.
        variant: ``"softmax"`` (default) or ``"paper"``.

    Returns:
        ``[..., n, n]`` in the logits' dtype; computed in fp32 (fp64 for fp64 logits).

    Raises:
        InputError: an argument is not as above.
        BackendError: the named backend cannot run here.

    Source: mHC, arXiv 2512.24880, Eq. 8 and 9; Megatron-Core ``core.fusions.fused_mhc_kernels``.
    """
    checks.check_rank("input_logits", input_logits, 2, "[..., n, n]")
    if input_logits.shape[-1] != input_logits.shape[-2]:
        raise InputError(
            f"input_logits: expected shape [..., n, n] (square), got {tuple(input_logits.shape)}"
        )
    checks.check_streams("input_logits", input_logits.shape[-1])
    checks.check_count("num_iterations", num_iterations)
    checks.check_positive("eps", eps)
    checks.check_choice("variant", variant, VARIANTS)
    checks.check_backend(backend)
    out: Tensor = _fwd(input_logits, num_iterations, eps, variant, backend)
    return out
