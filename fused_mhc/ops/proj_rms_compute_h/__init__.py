"""Prediction of the mixes: projection of all streams, RMS normalisation, sigmoids."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import checks
from ...dispatch import MHCBackend
from ...errors import InputError
from .._library import compute_dtype, define, needed, spread, with_backward

__all__ = ["PRECISIONS", "RMS_EPS_MODES", "check_mapping", "fused_proj_rms_compute_h"]

RMS_EPS_MODES = ("outside", "inside")
PRECISIONS = ("fp32", "tf32")

_PARAMETERS = "Tensor x, Tensor weight, Tensor alpha_pre, Tensor alpha_post, Tensor alpha_res, Tensor bias"


def _fake_fwd(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    n = rest[4]
    dtype = compute_dtype(x, weight, *rest[:4])
    return tuple(x.new_empty(*x.shape[:-1], size, dtype=dtype) for size in (n, n, n * n, 1, n * n + 2 * n))


_fwd = define(
    "proj_rms_compute_h",
    "fwd",
    f"({_PARAMETERS}, int n, float eps, float compute_h_eps, str rms_eps_mode, str precision, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_fwd,
    lambda *args: args[6],
)
_bwd = define(
    "proj_rms_compute_h",
    "bwd",
    f"(Tensor? g_pre, Tensor? g_post, Tensor? g_res, Tensor? g_r, {_PARAMETERS}, Tensor proj, Tensor r, int n,"
    " float eps, str rms_eps_mode, str precision, bool[] needs, str backend) -> Tensor[]",
    lambda *args: [t.new_empty(t.shape) for t, need in zip(args[4:10], args[-2], strict=True) if need],
    lambda *args: args[12],
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.n, ctx.eps, _, ctx.mode, ctx.precision, ctx.backend = inputs
    *_, r, proj = output
    ctx.save_for_backward(*tensors, proj, r)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    outer = grads[:4]  # the raw projection is internal
    needs = needed(ctx, 6, *outer)
    found = []
    if any(needs):
        found = _bwd(*outer, *ctx.saved_tensors, ctx.n, ctx.eps, ctx.mode, ctx.precision, needs, ctx.backend)
    return spread(found, needs, 12)


with_backward("proj_rms_compute_h", _setup, _backward)


def check_mapping(
    x: Tensor,
    width: int,
    n: int,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
) -> None:
    """Checks of the mapping's parameters against ``width`` (= K) and ``n``; ``x`` has been checked.

    Raises:
        InputError: a shape, dtype or device is not as the operation's contract says.
    """
    size = n * n + 2 * n
    checks.check_shape("weight", weight, (size, width), "[n*n + 2*n, K]")
    checks.check_shape("alpha_pre", alpha_pre, (1,), "[1]")
    checks.check_shape("alpha_post", alpha_post, (1,), "[1]")
    checks.check_shape("alpha_res", alpha_res, (1,), "[1]")
    checks.check_shape("bias", bias, (size,), "[n*n + 2*n]")
    checks.check_devices(
        "x",
        x,
        weight=weight,
        alpha_pre=alpha_pre,
        alpha_post=alpha_post,
        alpha_res=alpha_res,
        bias=bias,
    )


def fused_proj_rms_compute_h(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    n: int,
    eps: float = 1e-6,
    compute_h_eps: float = 1e-6,
    backend: MHCBackend = "auto",
    *,
    rms_eps_mode: str = "outside",
    precision: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Predict the mixes of a token from all its streams.

    ``h = (x @ weight.T)*alpha*u + bias`` with one alpha for each group of columns;
    ``h_pre = sigmoid(h[:n]) + compute_h_eps``, ``h_post = 2*sigmoid(h[n:2n])``, ``h_res = h[2n:]`` (logits, for
    `fused_sinkhorn`). ``r = ||x||/sqrt(K)``.

    - ``rms_eps_mode="outside"`` (Megatron-Core): ``u = 1/(r + eps)``.
    - ``rms_eps_mode="inside"`` (DeepSeek V4): ``u = rsqrt(mean(x**2) + eps)``, and ``r = 1/u``.

    A token of zeros gives finite results and gradients. Backward: see docs/derivations.md.

    Args:
        x: ``[..., K]``, K = n*C; fp16, bf16, fp32 or fp64, as every tensor here; any strides (leading dimensions
            that no single stride describes are copied once).
        weight: ``[N, K]``, ``N = n*n + 2*n``.
        alpha_pre, alpha_post, alpha_res: ``[1]`` each.
        bias: ``[N]``.
        n: streams, 1..16; divides K.
        eps: of the RMS, above 0. Default 1e-6.
        compute_h_eps: added to ``h_pre``, above 0. Default 1e-6.
        backend: ``"auto"`` (default) or a backend's name.
        rms_eps_mode: ``"outside"`` (default) or ``"inside"``.
        precision: ``"fp32"`` (default): the product is as exact as an fp32 one; ``"tf32"``: the tensor cores' own
            fp32 mode where the backend has one (native and fp64: no difference).

    Returns:
        ``(h_pre [..., n], h_post [..., n], h_res [..., n*n], r [..., 1])`` in fp32 (fp64 if any input is fp64).

    Raises:
        InputError: an argument is not as above, or the devices differ.
        BackendError: the named backend cannot run here.

    Source: mHC, arXiv 2512.24880, Eq. 14-19; Megatron-Core ``core.fusions.fused_mhc_kernels``.
    """
    checks.check_rank("x", x, 1, "[..., K]")
    checks.check_width("x", x)
    checks.check_streams("n", n)
    width = x.shape[-1]
    if width % n != 0:
        raise InputError(f"x: expected a last dimension K divisible by n = {n}, got {width}")
    check_mapping(x, width, n, weight, alpha_pre, alpha_post, alpha_res, bias)
    checks.check_positive("eps", eps)
    checks.check_positive("compute_h_eps", compute_h_eps)
    checks.check_choice("rms_eps_mode", rms_eps_mode, RMS_EPS_MODES)
    checks.check_choice("precision", precision, PRECISIONS)
    checks.check_backend(backend)
    h_pre, h_post, h_res, r, _ = _fwd(
        x,
        weight,
        alpha_pre,
        alpha_post,
        alpha_res,
        bias,
        n,
        eps,
        compute_h_eps,
        rms_eps_mode,
        precision,
        backend,
    )
    return h_pre, h_post, h_res, r
