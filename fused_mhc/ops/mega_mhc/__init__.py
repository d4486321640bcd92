"""The shifted single pass: residual update, prediction, collapse and RMSNorm at one boundary between sublayers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import checks
from ...dispatch import MHCBackend, check_schedule
from .._library import compute_dtype, define, needed, spread, with_backward

__all__ = ["mega_mhc", "mega_mhc_entry", "mega_mhc_exit"]

_STATE = (
    "Tensor previous_output, Tensor residual, Tensor previous_pre_mix, Tensor previous_post_mix,"
    " Tensor previous_residual_mix"
)
_SITE = "Tensor phi, Tensor alpha, Tensor bias, Tensor? norm_weight"
_SETTINGS = "float hc_eps, float norm_eps, int num_iters"
_GRADS = "Tensor? g_new_residual, Tensor? g_pre, Tensor? g_post, Tensor? g_res, Tensor? g_block_input"
_SAVED = "Tensor new_residual, Tensor proj, Tensor u, Tensor rstd, Tensor next_pre, Tensor next_post, Tensor next_res"
_RESULTS = ", ".join(["Tensor"] * 8)
_POLICY = "str backend, str schedule"


def _fake_results(like: Tensor, lead: tuple[int, ...], n: int, width: int, dtype: Any) -> tuple[Tensor, ...]:
    shapes = ((n,), (n,), (n, n), (n * n + 2 * n,), (1,), (1,))
    pre, post, res, proj, u, rstd = (like.new_empty(*lead, *shape, dtype=dtype) for shape in shapes)
    return (
        like.new_empty(*lead, n, width),
        pre,
        post,
        res,
        like.new_empty(*lead, width),
        proj,
        u,
        rstd,
    )


def _fake_fwd(*args: Any) -> tuple[Tensor, ...]:
    residual = args[1]
    *lead, n, width = residual.shape
    return _fake_results(residual, tuple(lead), n, width, compute_dtype(*args[:9]))


def _fake_entry(x: Tensor, n: int, *args: Any) -> tuple[Tensor, ...]:
    return _fake_results(x, tuple(x.shape[:-1]), n, x.shape[-1], compute_dtype(x, *args[:4]))


def _fake_exit(*args: Any) -> tuple[Tensor, Tensor]:
    residual = args[1]
    *lead, _, width = residual.shape
    rstd = residual.new_empty(*lead, 1, dtype=compute_dtype(*args[:6]))
    return residual.new_empty(*lead, width), rstd


def _fake_grads(inputs: tuple[Tensor, ...], needs: list[bool]) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, need in zip(inputs, needs, strict=True) if need]


_fwd = define(
    "mega_mhc",
    "fwd",
    f"({_STATE}, {_SITE}, {_SETTINGS}, {_POLICY}) -> ({_RESULTS})",
    _fake_fwd,
    lambda *args: args[1].shape[-2],
)
_bwd = define(
    "mega_mhc",
    "bwd",
    f"({_GRADS}, {_STATE}, {_SITE}, {_SAVED}, {_SETTINGS}, bool[] needs, {_POLICY}) -> Tensor[]",
    lambda *args: _fake_grads(args[5:14], args[-3]),
    lambda *args: args[6].shape[-2],
)
_entry_fwd = define(
    "mega_mhc_entry",
    "fwd",
    f"(Tensor x, int n, {_SITE}, {_SETTINGS}, {_POLICY}) -> ({_RESULTS})",
    _fake_entry,
    lambda *args: args[1],
)
_entry_bwd = define(
    "mega_mhc_entry",
    "bwd",
    f"({_GRADS}, Tensor x, {_SITE}, {_SAVED}, {_SETTINGS}, bool[] needs, {_POLICY}) -> Tensor[]",
    lambda *args: _fake_grads(args[5:10], args[-3]),
    lambda *args: args[10].shape[-2],
)
_exit_fwd = define(
    "mega_mhc_exit",
    "fwd",
    f"({_STATE}, Tensor? norm_weight, float norm_eps, str backend) -> (Tensor, Tensor)",
    _fake_exit,
    lambda *args: args[1].shape[-2],
)
_exit_bwd = define(
    "mega_mhc_exit",
    "bwd",
    f"(Tensor grad, {_STATE}, Tensor? norm_weight, Tensor rstd, bool[] needs, str backend) -> Tensor[]",
    lambda *args: _fake_grads(args[1:7], args[-2]),
    lambda *args: args[2].shape[-2],
)


def _save(ctx: Any, tensors: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    new_residual, pre, post, res, _, proj, u, rstd = output
    ctx.save_for_backward(*tensors, new_residual, proj, u, rstd, pre, post, res)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.settings, ctx.policy = inputs[9:12], inputs[12:]
    _save(ctx, inputs[:9], output)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    outer = grads[:5]  # the raw projection, u and the reciprocal rms are internal
    needs = needed(ctx, 9, *outer)
    found = _bwd(*outer, *ctx.saved_tensors, *ctx.settings, needs, *ctx.policy) if any(needs) else []
    return spread(found, needs, 14)


def _entry_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.settings, ctx.policy = inputs[6:9], inputs[9:]
    _save(ctx, (inputs[0], *inputs[2:6]), output)


def _entry_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    outer = grads[:5]
    wanted = needed(ctx, 6, *outer)
    needs = [wanted[0], *wanted[2:]]
    found = _entry_bwd(*outer, *ctx.saved_tensors, *ctx.settings, needs, *ctx.policy) if any(needs) else []
    g_x, *rest = spread(found, needs, 5)
    return g_x, None, *rest, *([None] * 5)


def _exit_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.backend = inputs[-1]
    ctx.save_for_backward(*inputs[:6], output[1])


def _exit_backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = needed(ctx, 6, grad)
    found = _exit_bwd(grad, *ctx.saved_tensors, needs, ctx.backend) if any(needs) else []
    return spread(found, needs, 8)


with_backward("mega_mhc", _setup, _backward)
with_backward("mega_mhc_entry", _entry_setup, _entry_backward)
with_backward("mega_mhc_exit", _exit_setup, _exit_backward)


def _check_state(
    previous_output: Tensor,
    residual: Tensor,
    previous_pre_mix: Tensor,
    previous_post_mix: Tensor,
    previous_residual_mix: Tensor,
) -> tuple[int, int]:
    """Checks of what one site hands to the next; returns ``(n, C)``."""
    checks.check_rank("residual", residual, 2, "[..., n, C]")
    checks.check_width("residual", residual)
    lead, (n, width) = residual.shape[:-2], residual.shape[-2:]
    checks.check_streams("residual", n)
    checks.check_shape("previous_output", previous_output, (*lead, width), "[..., C]")
    checks.check_shape("previous_pre_mix", previous_pre_mix, (*lead, n), "[..., n]")
    checks.check_shape("previous_post_mix", previous_post_mix, (*lead, n), "[..., n]")
    checks.check_shape("previous_residual_mix", previous_residual_mix, (*lead, n, n), "[..., n, n]")
    checks.check_devices(
        "residual",
        residual,
        previous_output=previous_output,
        previous_pre_mix=previous_pre_mix,
        previous_post_mix=previous_post_mix,
        previous_residual_mix=previous_residual_mix,
    )
    return n, width


def _check_norm_weight(name: str, streams: Tensor, norm_weight: Tensor | None, width: int) -> None:
    if norm_weight is not None:
        checks.check_shape("norm_weight", norm_weight, (width,), "[C]")
        checks.check_devices(name, streams, norm_weight=norm_weight)


def _check_site(
    name: str,
    streams: Tensor,
    n: int,
    width: int,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
) -> None:
    size = n * n + 2 * n
    checks.check_shape("phi", phi, (size, n * width), "[n*n + 2*n, K]")
    checks.check_shape("alpha", alpha, (3,), "[3]")
    checks.check_shape("bias", bias, (size,), "[n*n + 2*n]")
    checks.check_devices(name, streams, phi=phi, alpha=alpha, bias=bias)
    _check_norm_weight(name, streams, norm_weight, width)


def _check_settings(hc_eps: float, norm_eps: float, num_iters: int, backend: str, schedule: str) -> None:
    checks.check_positive("hc_eps", hc_eps)
    checks.check_positive("norm_eps", norm_eps)
    checks.check_count("num_iters", num_iters)
    checks.check_backend(backend)
    check_schedule(schedule)


def mega_mhc(
    previous_output: Tensor,
    residual: Tensor,
    previous_pre_mix: Tensor,
    previous_post_mix: Tensor,
    previous_residual_mix: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    *,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    num_iters: int = 20,
    backend: MHCBackend = "auto",
    schedule: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One boundary between sublayers in one pass over the streams (delayed pre-mix).

    1. ``new_residual[j] = sum_i previous_residual_mix[i, j]*residual[i] + previous_post_mix[j]*previous_output``,
       rounded to the residual's dtype; all that follows reads the rounded value.
    2. ``u = rsqrt(mean(new_residual**2) + norm_eps)`` over n and C; ``logits = (new_residual.flatten @ phi.T)*u``;
       ``pre = sigmoid(logits*alpha[0] + bias) + hc_eps``, ``post = 2*sigmoid(logits*alpha[1] + bias)``,
       ``res = sinkhorn(logits*alpha[2] + bias, num_iters, hc_eps)`` (softmax variant), each on its own slice.
    3. ``mixed = sum_i previous_pre_mix[i]*new_residual[i]``;
       ``block_input = mixed*rsqrt(mean(mixed**2) + norm_eps)*norm_weight``.

    The streams are collapsed with the pre-mix of the site before, so that one read of them is enough. Gradients of
    all nine tensors; formulas in docs/derivations.md. Inside a chain, start with `mega_mhc_entry` and end with
    `mega_mhc_exit`.

    Args:
        previous_output: output of the sublayer before ``[..., C]``; fp16, bf16, fp32 or fp64, as every tensor here.
        residual: streams ``[..., n, C]``, n in 1..16; any strides (leading dimensions that no single stride
            describes are copied once).
        previous_pre_mix, previous_post_mix: ``[..., n]``.
        previous_residual_mix: ``[..., n, n]`` (old, new).
        phi: ``[N, K]``, ``N = n*n + 2*n``, ``K = n*C``.
        alpha: ``[3]``, for pre, post and residual.
        bias: ``[N]``.
        norm_weight: ``[C]``, or None for an RMSNorm without weight.
        hc_eps: of the mixes and of Sinkhorn, above 0. Default 1e-6.
        norm_eps: of both RMS, above 0. Default 1e-6.
        num_iters: Sinkhorn iterations, at least 1. Default 20.
        backend: ``"auto"`` (default) or a backend's name.
        schedule: ``"fused"``: the backend's own kernels; ``"mega"``: a task-graph Program; ``"auto"`` (default).

    Returns:
        ``(new_residual [..., n, C], next_pre_mix [..., n], next_post_mix [..., n], next_residual_mix [..., n, n],
        block_input [..., C])``: streams and block input in the residual's dtype, mixes in fp32 (fp64 if any input
        is fp64).

    Raises:
        InputError: an argument is not as above, or the devices differ.
        BackendError: the named backend or schedule cannot run here.

    Source: mHC, arXiv 2512.24880; delayed pre-mix as in DeepSeek V4.1's single pass.
    """
    n, width = _check_state(
        previous_output, residual, previous_pre_mix, previous_post_mix, previous_residual_mix
    )
    _check_site("residual", residual, n, width, phi, alpha, bias, norm_weight)
    _check_settings(hc_eps, norm_eps, num_iters, backend, schedule)
    new_residual, pre, post, res, block_input, *_ = _fwd(
        previous_output,
        residual,
        previous_pre_mix,
        previous_post_mix,
        previous_residual_mix,
        phi,
        alpha,
        bias,
        norm_weight,
        hc_eps,
        norm_eps,
        num_iters,
        backend,
        schedule,
    )
    return new_residual, pre, post, res, block_input


def mega_mhc_entry(
    x: Tensor,
    n: int,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    *,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    num_iters: int = 20,
    backend: MHCBackend = "auto",
    schedule: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """First site of a chain of `mega_mhc`: ``x`` fills every stream, stream 0 is the block's input.

    The same as `mega_mhc` with ``residual = input_expand(x, n)``, an output and a post-mix of zeros, the identity as
    residual mix and a pre-mix that is one-hot on stream 0, without reading any of those.

    Args:
        x: ``[..., C]``; fp16, bf16, fp32 or fp64, as every tensor here; any strides.
        n: streams, 1..16.
        phi, alpha, bias, norm_weight, hc_eps, norm_eps, num_iters, backend, schedule: as in `mega_mhc`.

    Returns:
        The five results of `mega_mhc`.

    Raises:
        InputError: an argument is not as above, or the devices differ.
        BackendError: the named backend or schedule cannot run here.

    Source: delayed pre-mix as in DeepSeek V4.1's single pass.
    """
    checks.check_rank("x", x, 1, "[..., C]")
    checks.check_width("x", x)
    checks.check_streams("n", n)
    _check_site("x", x, n, x.shape[-1], phi, alpha, bias, norm_weight)
    _check_settings(hc_eps, norm_eps, num_iters, backend, schedule)
    new_residual, pre, post, res, block_input, *_ = _entry_fwd(
        x, n, phi, alpha, bias, norm_weight, hc_eps, norm_eps, num_iters, backend, schedule
    )
    return new_residual, pre, post, res, block_input


def mega_mhc_exit(
    previous_output: Tensor,
    residual: Tensor,
    previous_pre_mix: Tensor,
    previous_post_mix: Tensor,
    previous_residual_mix: Tensor,
    norm_weight: Tensor | None,
    *,
    norm_eps: float = 1e-6,
    backend: MHCBackend = "auto",
) -> Tensor:
    """End of a chain of `mega_mhc`: the last residual update, collapse and RMSNorm (steps 1 and 3, no prediction).

    Args:
        previous_output, residual, previous_pre_mix, previous_post_mix, previous_residual_mix, norm_weight, norm_eps,
            backend: as in `mega_mhc`.

    Returns:
        ``[..., C]`` in the residual's dtype.

    Raises:
        InputError: an argument is not as above, or the devices differ.
        BackendError: the named backend cannot run here.

    Source: delayed pre-mix as in DeepSeek V4.1's single pass.
    """
    _, width = _check_state(
        previous_output, residual, previous_pre_mix, previous_post_mix, previous_residual_mix
    )
    _check_norm_weight("residual", residual, norm_weight, width)
    checks.check_positive("norm_eps", norm_eps)
    checks.check_backend(backend)
    out, _ = _exit_fwd(
        previous_output,
        residual,
        previous_pre_mix,
        previous_post_mix,
        previous_residual_mix,
        norm_weight,
        norm_eps,
        backend,
    )
    return out
