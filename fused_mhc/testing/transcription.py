"""Every formula of the library written down once more in plain, differentiable torch: the oracle of the tests.

Each function has the signature of the public one without the backend policy, works in the dtype of its arguments
(fp64 gives the oracle), and is differentiated by autograd alone. Nothing here is shared with the backends: no
helper, no hand-written gradient, no random number generator.

Parameters that all tokens share (``weight``, ``phi``, ``alpha_*``, ``alpha``, ``bias``, ``norm_weight``, ``base``,
``scale``) may also carry leading dimensions of their own, so that a test can read the gradient of each token's term
before the sum. With ``frozen_rms=True`` every reciprocal rms counts as a constant in the gradients: these are the
terms that the normalisation's own gradient cancels, and what rounding errors are relative to.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "dropout_mask",
    "fused_add_3",
    "fused_h_aggregate",
    "fused_h_post_bda",
    "fused_proj_rms_compute_h",
    "fused_sinkhorn",
    "input_expand",
    "learned_output_contract",
    "mega_mhc",
    "mega_mhc_entry",
    "mega_mhc_exit",
    "mhc_pre",
    "output_contract",
    "philox_4x32_10",
]


def fused_sinkhorn(
    input_logits: Tensor, num_iterations: int, eps: float = 1e-6, *, variant: str = "softmax"
) -> Tensor:
    """Alternate normalisation of rows (last axis) and columns; columns come last."""
    if variant == "softmax":
        m = torch.softmax(input_logits, -1) + eps
        m = m / (m.sum(-2, keepdim=True) + eps)
        for _ in range(num_iterations - 1):
            m = m / (m.sum(-1, keepdim=True) + eps)
            m = m / (m.sum(-2, keepdim=True) + eps)
        return m
    highest = input_logits.gather(-1, input_logits.argmax(-1, keepdim=True))
    m = torch.exp(input_logits - highest)
    for _ in range(num_iterations):
        m = m / m.sum(-1, keepdim=True).clamp(min=eps)
        m = m / m.sum(-2, keepdim=True).clamp(min=eps)
    return m


def fused_h_aggregate(x: Tensor, h_pre: Tensor) -> Tensor:
    """``sum_i h_pre[i]*x[i]``."""
    return (h_pre.unsqueeze(-1) * x).sum(-2)


def philox_4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32 with ten rounds on Python integers (Salmon et al., SC'11)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def dropout_mask(count: int, dropout_p: float, seed: int) -> Tensor:
    """Which of ``count`` elements (flat index) are kept; bool, on the CPU."""
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    words: list[int] = []
    for group in range((count + 3) // 4):
        words.extend(philox_4x32_10((group & 0xFFFFFFFF, group >> 32, 0, 0), key))
    uniform = torch.tensor(words[:count], dtype=torch.int64).to(torch.float32) * 2.0**-32
    return uniform >= torch.tensor(dropout_p, dtype=torch.float32)


def fused_h_post_bda(
    h_res: Tensor,
    original_residual: Tensor,
    h_post: Tensor,
    x: Tensor,
    bias: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: int | None = None,
) -> Tensor:
    """``out[j] = sum_i h_res[i,j]*residual[i] + drop(h_post[j]*(x + bias))``."""
    mixed = torch.einsum("...ij,...ic->...jc", h_res, original_residual)
    branch = h_post.unsqueeze(-1) * (x if bias is None else x + bias).unsqueeze(-2)
    if training and dropout_p > 0.0:
        assert seed is not None, "the transcription draws no seeds"
        kept = dropout_mask(branch.numel(), dropout_p, seed).view(branch.shape).to(branch.device)
        branch = torch.where(kept, branch / (1.0 - dropout_p), 0.0)
    return mixed + branch


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``; ``weight [..., N, K]`` may differ by token."""
    if weight.dim() == 2:
        return x @ weight.T
    return (weight @ x.unsqueeze(-1)).squeeze(-1)


def _reciprocal_rms(x: Tensor, eps: float, frozen_rms: bool) -> Tensor:
    """``rsqrt(mean(x^2) + eps)`` over the last axis."""
    u = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return u.detach() if frozen_rms else u


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
    *,
    rms_eps_mode: str = "outside",
    precision: str = "fp32",
    frozen_rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised projection of the streams to the three mappings, and ``r``; ``precision`` means nothing here."""
    if rms_eps_mode == "outside":
        # The norm's gradient at a token of zeros is zero (the subgradient that torch takes too).
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True) / math.sqrt(x.shape[-1])
        u = 1.0 / (r + eps)
    else:
        u = _reciprocal_rms(x, eps, False)
        r = 1.0 / u
    projected = _product(x, weight) * (u.detach() if frozen_rms else u)
    pre = torch.sigmoid(projected[..., :n] * alpha_pre + bias[..., :n]) + compute_h_eps
    post = 2.0 * torch.sigmoid(projected[..., n : 2 * n] * alpha_post + bias[..., n : 2 * n])
    res = projected[..., 2 * n :] * alpha_res + bias[..., 2 * n :]
    return pre, post, res, r


def fused_add_3(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a + b + c``."""
    return a + b + c


def input_expand(x: Tensor, n: int) -> Tensor:
    """``n`` copies."""
    return torch.stack([x] * n, -2)


def output_contract(x: Tensor) -> Tensor:
    """Mean over the streams."""
    return x.mean(-2)


def learned_output_contract(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    *,
    frozen_rms: bool = False,
) -> Tensor:
    """``sum_i w[i]*x[i]`` with ``w = sigmoid((x @ weight.T)*rsqrt(mean x^2 + norm_eps)*scale + base) + eps``."""
    flat = x.flatten(-2)
    u = _reciprocal_rms(flat, norm_eps, frozen_rms)
    w = torch.sigmoid(_product(flat, weight) * u * scale + base) + eps
    return (w.unsqueeze(-1) * x).sum(-2)


def mhc_pre(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    num_iterations: int = 20,
    *,
    rms_eps: float = 1e-6,
    compute_h_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    rms_eps_mode: str = "inside",
    variant: str = "softmax",
    precision: str = "fp32",
    frozen_rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mappings, Sinkhorn and collapse in one: ``(layer_input, h_post, h_res, x)``."""
    n = x.shape[-2]
    pre, post, res, _ = fused_proj_rms_compute_h(
        x.flatten(-2),
        weight,
        alpha_pre,
        alpha_post,
        alpha_res,
        bias,
        n,
        rms_eps,
        compute_h_eps,
        rms_eps_mode=rms_eps_mode,
        frozen_rms=frozen_rms,
    )
    h_res = fused_sinkhorn(res.unflatten(-1, (n, n)), num_iterations, sinkhorn_eps, variant=variant)
    return fused_h_aggregate(x, pre), post, h_res, x


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, frozen_rms: bool) -> Tensor:
    normed = x * _reciprocal_rms(x, eps, frozen_rms)
    return normed if weight is None else normed * weight


def _as_rounded(exact: Tensor, rounded: Tensor | None) -> Tensor:
    """The value of ``rounded`` with the gradient of ``exact``."""
    return exact if rounded is None else exact + (rounded - exact).detach()


def _site(
    streams: Tensor,
    previous_pre_mix: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    hc_eps: float,
    norm_eps: float,
    num_iters: int,
    frozen_rms: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Steps 2 and 3 of the single pass: next mixes and block input from the new residual streams."""
    n = streams.shape[-2]
    flat = streams.flatten(-2)
    logits = _product(flat, phi) * _reciprocal_rms(flat, norm_eps, frozen_rms)
    pre = torch.sigmoid(logits[..., :n] * alpha[..., 0:1] + bias[..., :n]) + hc_eps
    post = 2.0 * torch.sigmoid(logits[..., n : 2 * n] * alpha[..., 1:2] + bias[..., n : 2 * n])
    res = logits[..., 2 * n :] * alpha[..., 2:3] + bias[..., 2 * n :]
    res = fused_sinkhorn(res.unflatten(-1, (n, n)), num_iters, hc_eps)
    block_input = _rms_norm(fused_h_aggregate(streams, previous_pre_mix), norm_weight, norm_eps, frozen_rms)
    return pre, post, res, block_input


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
    rounded: Tensor | None = None,
    frozen_rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One boundary of the shifted single pass.

    ``rounded`` is the new residual as a backend stored it: the formulas read the rounded value from there on, and a
    tie of the rounding is no error. The first result stays the exact one.
    """
    exact = fused_h_post_bda(previous_residual_mix, residual, previous_post_mix, previous_output)
    site = _site(
        _as_rounded(exact, rounded),
        previous_pre_mix,
        phi,
        alpha,
        bias,
        norm_weight,
        hc_eps,
        norm_eps,
        num_iters,
        frozen_rms,
    )
    return exact, *site


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
    rounded: Tensor | None = None,
    frozen_rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The first boundary: `mega_mhc` on copies of ``x``, nothing before it, pre-mix one-hot on stream 0."""
    lead = x.shape[:-1]
    return mega_mhc(
        torch.zeros_like(x),
        input_expand(x, n),
        x.new_tensor([1.0] + [0.0] * (n - 1)).expand(*lead, n),
        x.new_zeros(*lead, n),
        torch.eye(n, dtype=x.dtype, device=x.device).expand(*lead, n, n),
        phi,
        alpha,
        bias,
        norm_weight,
        hc_eps=hc_eps,
        norm_eps=norm_eps,
        num_iters=num_iters,
        rounded=rounded,
        frozen_rms=frozen_rms,
    )


def mega_mhc_exit(
    previous_output: Tensor,
    residual: Tensor,
    previous_pre_mix: Tensor,
    previous_post_mix: Tensor,
    previous_residual_mix: Tensor,
    norm_weight: Tensor | None,
    *,
    norm_eps: float = 1e-6,
    rounded: Tensor | None = None,
    frozen_rms: bool = False,
) -> Tensor:
    """The last boundary: steps 1 and 3, no prediction."""
    exact = fused_h_post_bda(previous_residual_mix, residual, previous_post_mix, previous_output)
    mixed = fused_h_aggregate(_as_rounded(exact, rounded), previous_pre_mix)
    return _rms_norm(mixed, norm_weight, norm_eps, frozen_rms)
