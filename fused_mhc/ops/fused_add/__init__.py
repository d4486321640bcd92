"""Sum of three tensors with one rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import checks
from .._library import define, needed, refuse_second_order, with_backward

__all__ = ["fused_add_3"]

_fwd = define(
    "fused_add_3",
    "fwd",
    "(Tensor a, Tensor b, Tensor c, str backend) -> Tensor",
    lambda a, b, c, backend: torch.empty_like(a, memory_format=torch.contiguous_format),
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.dtypes = [t.dtype for t in inputs[:3]]


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = needed(ctx, 3, grad)
    if grad is None:
        return None, None, None, None
    once = refuse_second_order(grad, "fused_add_3")
    first, second, third = (once.to(d) if need else None for d, need in zip(ctx.dtypes, needs, strict=True))
    return first, second, third, None


with_backward("fused_add_3", _setup, _backward)


def fused_add_3(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``(a + b) + c`` in fp32 (fp64 if any input is fp64), rounded once to the dtype of ``a``.

    Args:
        a, b, c: one shape, any of fp16, bf16, fp32, fp64 each; any strides.

    Returns:
        The sum, in the shape and dtype of ``a``. Its gradient goes to each input in that input's dtype.

    Raises:
        InputError: an argument is not as above, or the devices differ.

    Source: Megatron-Core ``core.fusions.fused_mhc_kernels``. The backend is chosen as for ``backend="auto"``.
    """
    checks.check_tensor("a", a)
    checks.check_shape("b", b, a.shape, "that of a")
    checks.check_shape("c", c, a.shape, "that of a")
    checks.check_devices("a", a, b=b, c=c)
    out: Tensor = _fwd(a, b, c, "auto")
    return out
