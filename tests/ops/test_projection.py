"""The mapping's accuracy from bf16 streams, and tokens of zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_mhc import fused_proj_rms_compute_h, learned_output_contract, mega_mhc, mhc_pre
from fused_mhc.testing import transcription
from fused_mhc.testing.compare import projection_error
from fused_mhc.testing.inputs import Shape, make_tensors


def stated_inputs(
    width: int, n: int, device: str, x_dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """SPEC.md's: ``x ~ N(0, 1)``, ``weight ~ 0.01 N(0, 1)``; alphas of 1 and no bias show the bare product."""
    generator = torch.Generator().manual_seed(width)
    size = n * n + 2 * n
    given = {
        "x": torch.randn(24, width, generator=generator).to(x_dtype),
        "weight": 0.01 * torch.randn(size, width, generator=generator),
        "alpha_pre": torch.ones(1),
        "alpha_post": torch.ones(1),
        "alpha_res": torch.ones(1),
        "bias": torch.zeros(size),
    }
    return {k: t.to(device) for k, t in given.items()}


@pytest.mark.parametrize("width", [16, 512, 4096, 16384, 28672])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_product_and_mixes(width: int, x_dtype: torch.dtype, device: str) -> None:
    """The product, by way of the logits, within 4e-6 of the largest (8e-6 at K = 28672); the mixes within 4e-6."""
    tensors = stated_inputs(width, 4, device, x_dtype)
    found = fused_proj_rms_compute_h(**tensors, n=4)
    exact = transcription.fused_proj_rms_compute_h(**{k: t.cpu().double() for k, t in tensors.items()}, n=4)
    bound = projection_error(width)
    for name, actual, expected in zip(("h_pre", "h_post", "h_res", "r"), found, exact, strict=True):
        off = (actual.cpu().double() - expected).abs().max()
        largest = max(1.0, float(expected.abs().max()))
        assert off <= bound * largest, f"{name}: {float(off):.2e}"
        assert actual.dtype is torch.float32


@pytest.mark.parametrize("mode", ["outside", "inside"])
def test_precision_tf32_is_a_named_option(mode: str, device: str) -> None:
    tensors = stated_inputs(512, 4, device, torch.float32)
    found = fused_proj_rms_compute_h(**tensors, n=4, rms_eps_mode=mode, precision="tf32")
    exact = transcription.fused_proj_rms_compute_h(
        **{k: t.cpu().double() for k, t in tensors.items()}, n=4, rms_eps_mode=mode
    )
    for actual, expected in zip(found, exact, strict=True):
        largest = float(expected.abs().max())
        assert (actual.cpu().double() - expected).abs().max() <= projection_error(512, "tf32") * largest


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", ["outside", "inside"])
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-7])
def test_vanishing_tokens(value: float, mode: str, x_dtype: torch.dtype, device: str) -> None:
    """A token of zeros, or of values whose squares vanish in fp32: finite results, finite gradients, of everything;
    other tokens are not touched."""
    shape = Shape((3,), 4, 16)
    tensors = {
        k: t
        for k, t in make_tensors("proj_rms_compute_h", shape, torch.float32, device=device).items()
        if t is not None
    }
    clean = tensors["x"].to(x_dtype)
    # Gradients there are of the size of 1/eps: fp16 cannot hold those of the default.
    eps = 1e-3 if x_dtype is torch.float16 else 1e-6
    x = clean.clone()
    x[1] = value

    def run(x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        leaves = [t.detach().requires_grad_() for t in (x, *(t for k, t in tensors.items() if k != "x"))]
        out = fused_proj_rms_compute_h(*leaves, n=4, eps=eps, rms_eps_mode=mode)
        return out, torch.autograd.grad(out, leaves, [torch.ones_like(t) for t in out])

    (out, gradients), (clean_out, clean_gradients) = run(x), run(clean)
    for t in (*out, *gradients):
        assert bool(torch.isfinite(t).all())
    bias = tensors["bias"].float()
    torch.testing.assert_close(out[0][1], torch.sigmoid(bias[:4]) + 1e-6, rtol=0, atol=0.3)
    for token in (0, 2):
        for actual, expected in zip(out, clean_out, strict=True):
            torch.testing.assert_close(actual[token], expected[token], rtol=0, atol=2e-5)
        torch.testing.assert_close(gradients[0][token], clean_gradients[0][token], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["learned_output_contract", "mhc_pre", "mega_mhc"])
def test_zero_streams_in_the_larger_operations(name: str, device: str) -> None:
    shape = Shape((3,), 4, 16)
    function = {"learned_output_contract": learned_output_contract, "mhc_pre": mhc_pre, "mega_mhc": mega_mhc}[
        name
    ]
    tensors = {
        k: t.requires_grad_()
        for k, t in make_tensors(name, shape, torch.float32, device=device).items()
        if t is not None
    }
    for key in ("x", "residual", "previous_output"):
        if key in tensors:
            with torch.no_grad():
                tensors[key][1] = 0.0
    out = function(**tensors)
    outs = out if isinstance(out, tuple) else (out,)
    gradients = torch.autograd.grad(outs, list(tensors.values()), [torch.ones_like(t) for t in outs])
    for t in (*outs, *gradients):
        assert bool(torch.isfinite(t).all())


def test_the_tails_of_the_sigmoid_keep_a_gradient(device: str) -> None:
    """At a bias of 30 the pre-mix is 1 in fp32, yet its derivative is about 1e-13 and not 0."""
    tensors = stated_inputs(16, 2, device, torch.float32)
    tensors["bias"] = torch.full((8,), 30.0, device=device, requires_grad=True)
    pre, post, *_ = fused_proj_rms_compute_h(**tensors, n=2)
    (gradient,) = torch.autograd.grad(
        (pre, post), tensors["bias"], (torch.ones_like(pre), torch.ones_like(post))
    )
    double = {k: t.detach().cpu().double() for k, t in tensors.items()}
    bias = double["bias"].requires_grad_()
    exact_pre, exact_post, *_ = transcription.fused_proj_rms_compute_h(**double, n=2)
    # Written with sigmoid(-h), which fp64 has no trouble with: s*(1-s) there is exact to 1e-3 at 30.
    (exact,) = torch.autograd.grad(
        (exact_pre, exact_post), bias, (torch.ones_like(exact_pre), torch.ones_like(exact_post))
    )
    assert bool((gradient[:4] > 0).all())
    torch.testing.assert_close(gradient[:4].cpu().double(), exact[:4], rtol=1e-2, atol=0)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["learned_output_contract", "mhc_pre", "mega_mhc"])
def test_special_values_stay_in_their_token(name: str, special: float, device: str) -> None:
    """One special element makes its own token NaN where the formulas reach; per-token results and gradients of the
    other tokens do not move."""
    shape = Shape((5,), 4, 16)
    function = {"learned_output_contract": learned_output_contract, "mhc_pre": mhc_pre, "mega_mhc": mega_mhc}[
        name
    ]
    made = {k: t for k, t in make_tensors(name, shape, torch.float32, device=device).items() if t is not None}
    streams = "residual" if name == "mega_mhc" else "x"
    spoilt = {**made, streams: made[streams].clone()}
    spoilt[streams][2, 1, 3] = special

    def run(tensors: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        leaves = {k: t.detach().requires_grad_() for k, t in tensors.items()}
        out = function(**leaves)
        outs = out if isinstance(out, tuple) else (out,)
        (gradient,) = torch.autograd.grad(outs, leaves[streams], [torch.ones_like(t) for t in outs])
        return tuple(t.detach() for t in outs), gradient

    (outs, gradient), (clean_outs, clean_gradient) = run(spoilt), run(made)
    others = torch.tensor([0, 1, 3, 4], device=device)
    for actual, expected in zip(outs, clean_outs, strict=True):
        torch.testing.assert_close(actual[others], expected[others], rtol=0, atol=2e-5)
    torch.testing.assert_close(gradient[others], clean_gradient[others], rtol=0, atol=2e-4)
    assert bool(outs[0][2].isnan().any() | outs[0][2].isinf().any())
    assert bool(gradient[2].isnan().any())
