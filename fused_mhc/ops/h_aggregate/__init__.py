"""Collapse of the n streams into the input of a sublayer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import checks
from ...dispatch import MHCBackend
from .._library import define, needed, spread, with_backward

__all__ = ["fused_h_aggregate"]

_fwd = define(
    "h_aggregate",
    "fwd",
    "(Tensor x, Tensor h_pre, str backend) -> Tensor",
    lambda x, h_pre, backend: x.new_empty(*x.shape[:-2], x.shape[-1]),
    lambda x, h_pre: x.shape[-2],
)
_bwd = define(
    "h_aggregate",
    "bwd",
    "(Tensor grad, Tensor x, Tensor h_pre, bool[] needs, str backend) -> Tensor[]",
    lambda grad, x, h_pre, needs, backend: [
        t.new_empty(t.shape) for t, need in zip((x, h_pre), needs, strict=True) if need
    ],
    lambda grad, x, h_pre, needs: x.shape[-2],
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, h_pre, ctx.backend = inputs
    ctx.save_for_backward(x, h_pre)


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = needed(ctx, 2, grad)
    grads = _bwd(grad, *ctx.saved_tensors, needs, ctx.backend) if any(needs) else []
    return spread(grads, needs, 3)


with_backward("h_aggregate", _setup, _backward)


def fused_h_aggregate(x: Tensor, h_pre: Tensor, backend: MHCBackend = "auto") -> Tensor:
    """Weighted sum of the streams: ``out = sum_i h_pre[i] * x[i]``.

    Backward: ``g_x[i] = h_pre[i] * g``, ``g_h_pre[i] = <g, x[i]>``.

    Args:
        x: streams ``[..., n, C]``, n in 1..16; fp16, bf16, fp32 or fp64; any strides (leading dimensions that no
            single stride describes are copied once).
        h_pre: weights ``[..., n]``; any of these dtypes.
        backend: ``"auto"`` (default) or a backend's name.

    Returns:
        ``[..., C]`` in the dtype of ``x``; summed in fp32 (fp64 if any input is fp64), rounded once.

    Raises:
        InputError: an argument is not as above, or the devices differ.
        BackendError: the named backend cannot run here.

    Source: mHC, arXiv 2512.24880, Eq. 5; Megatron-Core ``core.fusions.fused_mhc_kernels``.
    """
    checks.check_rank("x", x, 2, "[..., n, C]")
    checks.check_width("x", x)
    checks.check_streams("x", x.shape[-2])
    checks.check_shape("h_pre", h_pre, x.shape[:-1], "[..., n]")
    checks.check_devices("x", x, h_pre=h_pre)
    checks.check_backend(backend)
    out: Tensor = _fwd(x, h_pre, backend)
    return out
