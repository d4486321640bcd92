"""Everything before a sublayer in one differentiable function: prediction, Sinkhorn and collapse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import checks
from ...dispatch import MHCBackend
from .._library import compute_dtype, define, needed, spread
from ..proj_rms_compute_h import PRECISIONS, RMS_EPS_MODES, check_mapping
from ..sinkhorn import VARIANTS

__all__ = ["mhc_pre"]

_PARAMETERS = "Tensor x, Tensor weight, Tensor alpha_pre, Tensor alpha_post, Tensor alpha_res, Tensor bias"


def _fake_fwd(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *lead, n, width = x.shape
    dtype = compute_dtype(x, *rest[:5])
    shapes = ((n,), (n, n), (n,), (n * n + 2 * n,), (1,))
    return x.new_empty(*lead, width), *(x.new_empty(*lead, *shape, dtype=dtype) for shape in shapes)


_fwd = define(
    "mhc_pre",
    "fwd",
    f"({_PARAMETERS}, int num_iterations, float rms_eps, float compute_h_eps, float sinkhorn_eps,"
    " str rms_eps_mode, str variant, str precision, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_fwd,
    lambda x, *_: x.shape[-2],
)
_bwd = define(
    "mhc_pre",
    "bwd",
    f"(Tensor? g_layer_input, Tensor? g_h_post, Tensor? g_h_res, Tensor? g_x, {_PARAMETERS}, Tensor h_pre,"
    " Tensor proj, Tensor r, int num_iterations, float rms_eps, float sinkhorn_eps, str rms_eps_mode,"
    " str variant, str precision, bool[] needs, str backend) -> Tensor[]",
    lambda *args: [t.new_empty(t.shape) for t, need in zip(args[4:10], args[-2], strict=True) if need],
    lambda *args: args[4].shape[-2],
)


class _MhcPre(torch.autograd.Function):
    """Hands ``x`` on, so that the residual path's gradient of ``x`` arrives here and is added in the one write.

    A custom op may not return its input; this stands over two that do not.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *tensors, iterations, rms_eps, _, sinkhorn_eps, mode, variant, precision, backend = args
        layer_input, h_post, h_res, *saved = _fwd(*args)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        ctx.arguments = (iterations, rms_eps, sinkhorn_eps, mode, variant, precision)
        ctx.backend = backend
        return layer_input, h_post, h_res, tensors[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = needed(ctx, 6, *grads)
        found = _bwd(*grads, *ctx.saved_tensors, *ctx.arguments, needs, ctx.backend) if any(needs) else []
        return spread(found, needs, 14)


def mhc_pre(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    num_iterations: int = 20,
    backend: MHCBackend = "auto",
    *,
    rms_eps: float = 1e-6,
    compute_h_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    rms_eps_mode: str = "inside",
    variant: str = "softmax",
    precision: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fused_proj_rms_compute_h`, `fused_sinkhorn` and `fused_h_aggregate` as one function that hands ``x`` on.

    Use the returned ``x`` as the ``original_residual`` of `fused_h_post_bda`: its gradient then arrives here and is
    added before the gradient of ``x`` is written, once.

    Args:
        x: streams ``[..., n, C]``, n in 1..16; fp16, bf16, fp32 or fp64, as every tensor here; any strides (leading
            dimensions that no single stride describes are copied once).
        weight: ``[N, K]``, ``N = n*n + 2*n``, ``K = n*C``.
        alpha_pre, alpha_post, alpha_res: ``[1]`` each.
        bias: ``[N]``.
        num_iterations: of Sinkhorn, at least 1. Default 20.
        backend: ``"auto"`` (default) or a backend's name.
        rms_eps, compute_h_eps, sinkhorn_eps: above 0. Default 1e-6 each.
        rms_eps_mode: ``"inside"`` (default) or ``"outside"``, see `fused_proj_rms_compute_h`.
        variant: ``"softmax"`` (default) or ``"paper"``, see `fused_sinkhorn`.
        precision: ``"fp32"`` (default) or ``"tf32"``, see `fused_proj_rms_compute_h`.

    Returns:
        ``(layer_input [..., C], h_post [..., n], h_res [..., n, n], x)``: the first in the dtype of ``x``, the mixes
        in fp32 (fp64 if any input is fp64), the last ``x`` itself.

    Raises:
        InputError: an argument is not as above, or the devices differ.
        BackendError: the named backend cannot run here.

    Source: mHC, arXiv 2512.24880, Eq. 5-9 and 14-19.
    """
    checks.check_rank("x", x, 2, "[..., n, C]")
    checks.check_width("x", x)
    n, width = x.shape[-2:]
    checks.check_streams("x", n)
    check_mapping(x, n * width, n, weight, alpha_pre, alpha_post, alpha_res, bias)
    checks.check_count("num_iterations", num_iterations)
    checks.check_positive("rms_eps", rms_eps)
    checks.check_positive("compute_h_eps", compute_h_eps)
    checks.check_positive("sinkhorn_eps", sinkhorn_eps)
    checks.check_choice("rms_eps_mode", rms_eps_mode, RMS_EPS_MODES)
    checks.check_choice("variant", variant, VARIANTS)
    checks.check_choice("precision", precision, PRECISIONS)
    checks.check_backend(backend)
    layer_input, h_post, h_res, passed = _MhcPre.apply(
        x,
        weight,
        alpha_pre,
        alpha_post,
        alpha_res,
        bias,
        num_iterations,
        rms_eps,
        compute_h_eps,
        sinkhorn_eps,
        rms_eps_mode,
        variant,
        precision,
        backend,
    )
    return layer_input, h_post, h_res, passed
