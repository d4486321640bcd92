"""Residual update of the n streams: mixing, bias, dropout and the branch's output, in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import checks
from ...dispatch import MHCBackend
from ...errors import InputError
from .._library import define, needed, spread, with_backward

__all__ = ["fused_h_post_bda"]

_ARGUMENTS = "Tensor h_res, Tensor original_residual, Tensor h_post, Tensor x, Tensor? bias, float dropout_p, Tensor? seed"
_fwd = define(
    "h_post_bda",
    "fwd",
    f"({_ARGUMENTS}, str backend) -> Tensor",
    lambda h_res, residual, *_: residual.new_empty(residual.shape),
    lambda h_res, residual, *_: residual.shape[-2],
)
_bwd = define(
    "h_post_bda",
    "bwd",
    f"(Tensor grad, {_ARGUMENTS}, bool[] needs, str backend) -> Tensor[]",
    lambda grad, h_res, residual, h_post, x, bias, dropout_p, seed, needs, backend: [
        t.new_empty(t.shape)
        for t, need in zip((h_res, residual, h_post, x, bias), needs, strict=True)
        if need
    ],
    lambda grad, h_res, residual, *_: residual.shape[-2],
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.dropout_p, seed, ctx.backend = inputs
    ctx.save_for_backward(*tensors, seed)


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = needed(ctx, 5, grad)
    *tensors, seed = ctx.saved_tensors
    grads = _bwd(grad, *tensors, ctx.dropout_p, seed, needs, ctx.backend) if any(needs) else []
    return spread(grads, needs, 8)


with_backward("h_post_bda", _setup, _backward)


def _seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    if seed is None:
        return torch.empty((), dtype=torch.int64, device=device).random_()
    if isinstance(seed, Tensor):
        if seed.dtype is not torch.int64 or seed.dim() != 0:
            raise InputError(
                f"seed: expected a 0-d int64 tensor, got {seed.dtype} of shape {tuple(seed.shape)}"
            )
        if seed.device != device:
            raise InputError(f"seed: expected device {device} (that of original_residual), got {seed.device}")
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"seed: expected an int, a 0-d int64 tensor or None, got {seed!r}")
    if not -(2**63) <= seed < 2**63:
        raise InputError(f"seed: expected an int of 64 bits, got {seed}")
    return torch.full((), seed, dtype=torch.int64, device=device)


def fused_h_post_bda(
    h_res: Tensor,
    original_residual: Tensor,
    h_post: Tensor,
    x: Tensor,
    bias: Tensor | None = None,
    backend: MHCBackend = "auto",
    *,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Mix the streams and add the branch's output to each (bias, dropout, add).

    ``out[j] = sum_i h_res[i, j]*original_residual[i] + drop(h_post[j]*(x + bias))``: the matrix is indexed
    ``[old stream, new stream]``, so it is applied transposed.

    Dropout keeps an element with probability ``1 - p`` and scales it by ``1/(1-p)``. The mask is a function of the
    seed and the element's index in ``[T, n, C]`` alone (Philox 4x32-10, counter = index // 4, word = index % 4,
    kept where ``word * 2**-32 >= p`` in fp32); every backend draws the same one and none is stored.

    Backward: ``g_residual[i] = sum_j h_res[i, j]*g[j]``, ``g_h_res[i, j] = <residual[i], g[j]>``,
    ``g_h_post[j] = <drop'(g[j]), x + bias>``, ``g_x = sum_j h_post[j]*drop'(g[j])``, ``g_bias`` its sum over tokens.

    Args:
        h_res: ``[..., n, n]`` (old, new), n in 1..16; fp16, bf16, fp32 or fp64, as every tensor here.
        original_residual: streams ``[..., n, C]``; any strides (leading dimensions that no single stride describes
            are copied once).
        h_post: ``[..., n]``.
        x: output of the branch ``[..., C]``.
        bias: ``[C]`` or None (default).
        backend: ``"auto"`` (default) or a backend's name.
        dropout_p: probability of dropping, in [0, 1). Default 0.
        training: dropout acts only when True. Default True.
        seed: an int of 64 bits, a 0-d int64 tensor (for CUDA graphs and ``torch.compile``: change it in place), or
            None (default) to draw one from torch's generator of that device.

    Returns:
        ``[..., n, C]`` in the dtype of ``original_residual``; summed in fp32 (fp64 if any input is fp64), rounded
        once.

    Raises:
        InputError: an argument is not as above, or the devices differ.
        BackendError: the named backend cannot run here.

    Source: mHC, arXiv 2512.24880, Eq. 6; Megatron-Core ``core.fusions.fused_mhc_kernels``.
    """
    checks.check_rank("original_residual", original_residual, 2, "[..., n, C]")
    checks.check_width("original_residual", original_residual)
    lead, (n, width) = original_residual.shape[:-2], original_residual.shape[-2:]
    checks.check_streams("original_residual", n)
    checks.check_shape("h_res", h_res, (*lead, n, n), "[..., n, n]")
    checks.check_shape("h_post", h_post, (*lead, n), "[..., n]")
    checks.check_shape("x", x, (*lead, width), "[..., C]")
    if bias is not None:
        checks.check_shape("bias", bias, (width,), "[C]")
    checks.check_devices("original_residual", original_residual, h_res=h_res, h_post=h_post, x=x, bias=bias)
    checks.check_backend(backend)
    checks.check_probability("dropout_p", dropout_p)
    drop = training and dropout_p > 0
    drawn = _seed_tensor(seed, original_residual.device) if drop else None
    out: Tensor = _fwd(
        h_res, original_residual, h_post, x, bias, float(dropout_p) if drop else 0.0, drawn, backend
    )
    return out
