"""Entry to the n streams, and the two ways out of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import checks
from ...dispatch import MHCBackend
from .._library import compute_dtype, define, needed, spread, with_backward

__all__ = ["input_expand", "learned_output_contract", "output_contract"]

_expand_fwd = define(
    "input_expand",
    "fwd",
    "(Tensor x, int n, str backend) -> Tensor",
    lambda x, n, backend: x.new_empty(*x.shape[:-1], n, x.shape[-1]),
    lambda x, n: n,
)
_expand_bwd = define(
    "input_expand",
    "bwd",
    "(Tensor grad, str backend) -> Tensor",
    lambda grad, backend: grad.new_empty(*grad.shape[:-2], grad.shape[-1]),
    lambda grad: grad.shape[-2],
)
_contract_fwd = define(
    "output_contract",
    "fwd",
    "(Tensor x, str backend) -> Tensor",
    lambda x, backend: x.new_empty(*x.shape[:-2], x.shape[-1]),
    lambda x: x.shape[-2],
)
_contract_bwd = define(
    "output_contract",
    "bwd",
    "(Tensor grad, int n, str backend) -> Tensor",
    lambda grad, n, backend: grad.new_empty(*grad.shape[:-1], n, grad.shape[-1]),
    lambda grad, n: n,
)


def _learned_fake(x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, *_: Any) -> tuple[Tensor, ...]:
    (*lead, n, width), dtype = x.shape, compute_dtype(x, weight, scale, base)
    return x.new_empty(*lead, width), x.new_empty(*lead, n, dtype=dtype), x.new_empty(*lead, 1, dtype=dtype)


_learned_fwd = define(
    "learned_output_contract",
    "fwd",
    "(Tensor x, Tensor weight, Tensor scale, Tensor base, float eps, float norm_eps, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    _learned_fake,
    lambda x, *_: x.shape[-2],
)
_learned_bwd = define(
    "learned_output_contract",
    "bwd",
    "(Tensor grad, Tensor x, Tensor weight, Tensor scale, Tensor base, Tensor proj, Tensor u, float eps,"
    " bool[] needs, str backend) -> Tensor[]",
    lambda *args: [t.new_empty(t.shape) for t, need in zip(args[1:5], args[-2], strict=True) if need],
    lambda grad, x, *_: x.shape[-2],
)


def _expand_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.backend = inputs[-1]


def _expand_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = needed(ctx, 1, grad)
    return spread([_expand_bwd(grad, ctx.backend)] if needs[0] else [], needs, 3)


def _contract_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ctx.backend = inputs
    ctx.n = x.shape[-2]


def _contract_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = needed(ctx, 1, grad)
    return spread([_contract_bwd(grad, ctx.n, ctx.backend)] if needs[0] else [], needs, 2)


def _learned_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.eps, _, ctx.backend = inputs
    ctx.save_for_backward(*tensors, *output[1:])


def _learned_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = needed(ctx, 4, grads[0])
    found = []
    if any(needs):
        found = _learned_bwd(grads[0], *ctx.saved_tensors, ctx.eps, needs, ctx.backend)
    return spread(found, needs, 7)


with_backward("input_expand", _expand_setup, _expand_backward)
with_backward("output_contract", _contract_setup, _contract_backward)
with_backward("learned_output_contract", _learned_setup, _learned_backward)


def input_expand(x: Tensor, n: int) -> Tensor:
    """Copy the embedding into every stream: ``out[i] = x``. Backward: the sum over streams, rounded once.

    Args:
        x: ``[..., C]``; fp16, bf16, fp32 or fp64; any strides.
        n: streams, 1..16.

    Returns:
        ``[..., n, C]`` in the dtype of ``x``, contiguous.

    Raises:
        InputError: an argument is not as above.

    Source: mHC, arXiv 2512.24880. The backend is chosen as for ``backend="auto"``.
    """
    checks.check_rank("x", x, 1, "[..., C]")
    checks.check_width("x", x)
    checks.check_streams("n", n)
    out: Tensor = _expand_fwd(x, n, "auto")
    return out


def output_contract(x: Tensor) -> Tensor:
    """Mean over the streams: ``out = sum_i x[i] / n``, summed in fp32 (fp64 for fp64), rounded once.

    Args:
        x: ``[..., n, C]``, n in 1..16; fp16, bf16, fp32 or fp64; any strides.

    Returns:
        ``[..., C]`` in the dtype of ``x``.

    Raises:
        InputError: an argument is not as above.

    Source: mHC, arXiv 2512.24880. The backend is chosen as for ``backend="auto"``.
    """
    checks.check_rank("x", x, 2, "[..., n, C]")
    checks.check_width("x", x)
    checks.check_streams("x", x.shape[-2])
    out: Tensor = _contract_fwd(x, "auto")
    return out


def learned_output_contract(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    backend: MHCBackend = "auto",
) -> Tensor:
    """Weighted sum of the streams with predicted weights (the head of DeepSeek V4).

    ``w = sigmoid((x.flatten @ weight.T)*rsqrt(mean(x**2) + norm_eps)*scale + base) + eps``;
    ``out = sum_i w[i]*x[i]``.

    Args:
        x: ``[..., n, C]``, n in 1..16; fp16, bf16, fp32 or fp64, as every tensor here; any strides.
        weight: ``[n, K]``, K = n*C.
        scale: ``[1]``.
        base: ``[n]``.
        eps: added to the weights, above 0. Default 1e-6.
        norm_eps: of the RMS, above 0. Default 1e-6.
        backend: ``"auto"`` (default) or a backend's name.

    Returns:
        ``[..., C]`` in the dtype of ``x``; computed in fp32 (fp64 if any input is fp64), rounded once.

    Raises:
        InputError: an argument is not as above, or the devices differ.
        BackendError: the named backend cannot run here.

    Source: DeepSeek V4 model code (the operation's formula).
    """
    checks.check_rank("x", x, 2, "[..., n, C]")
    checks.check_width("x", x)
    n, width = x.shape[-2:]
    checks.check_streams("x", n)
    checks.check_shape("weight", weight, (n, n * width), "[n, K]")
    checks.check_shape("scale", scale, (1,), "[1]")
    checks.check_shape("base", base, (n,), "[n]")
    checks.check_devices("x", x, weight=weight, scale=scale, base=base)
    checks.check_positive("eps", eps)
    checks.check_positive("norm_eps", norm_eps)
    checks.check_backend(backend)
    out, _, _ = _learned_fwd(x, weight, scale, base, eps, norm_eps, backend)
    return out
