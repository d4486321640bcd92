"""What SPEC.md states about Sinkhorn's sums, and about special values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fused_mhc import fused_sinkhorn
from fused_mhc.testing import transcription
from fused_mhc.testing.compare import assert_bit_equal, assert_near

VARIANTS = ("softmax", "paper")
NAN, INF = math.nan, math.inf


def logits(count: int, n: int, scale: float, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, n, n, generator=generator, dtype=torch.float64) * scale
    return drawn.to(dtype).to(device)


def column_sums(given: Tensor, num_iterations: int, eps: float, variant: str) -> Tensor:
    """What SPEC.md says the column sums are, from the fp64 sums before the last normalisation."""
    m = given.cpu().double()
    if variant == "softmax":
        m = torch.softmax(m, -1) + eps
    else:
        m = torch.exp(m - m.amax(-1, keepdim=True))
    for step in range(num_iterations):
        if variant == "paper":
            m = m / m.sum(-1, keepdim=True).clamp(min=eps)
        elif step > 0:
            m = m / (m.sum(-1, keepdim=True) + eps)
        s = m.sum(-2, keepdim=True)
        m = m / (s.clamp(min=eps) if variant == "paper" else s + eps)
    s = s.squeeze(-2)
    return s / (s.clamp(min=eps) if variant == "paper" else s + eps)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 16])
def test_column_sums(n: int, eps: float, variant: str, dtypes: list[torch.dtype], device: str) -> None:
    """Within 4 units in the last place of ``s/(s+eps)``, or of ``s/max(s, eps)``, with any number of iterations."""
    for dtype in [d for d in dtypes if d in (torch.float32, torch.float64)]:
        for num_iterations in (1, 2, 20):
            for scale in (0.5, 3.0, 8.0):
                given = logits(50, n, scale, dtype, device)
                found = fused_sinkhorn(given, num_iterations, eps, variant=variant).cpu().double().sum(-2)
                expected = column_sums(given, num_iterations, eps, variant)
                off = (found - expected).abs().max()
                assert off <= 4 * torch.finfo(dtype).eps, (num_iterations, scale)


@pytest.mark.parametrize("variant", VARIANTS)
def test_row_sums_are_those_of_the_fp64_iteration(variant: str, device: str) -> None:
    """Rows come as near to 1 as 20 iterations bring them, and no nearer is asked."""
    for scale, known in ((0.5, 2e-5), (3.0, 0.5)):
        given = logits(500, 4, scale, torch.float32, device)
        rows = fused_sinkhorn(given, 20, variant=variant).cpu().double().sum(-1)
        exact = transcription.fused_sinkhorn(given.cpu().double(), 20, variant=variant).sum(-1)
        assert (rows - exact).abs().max() <= 4e-6
        assert (rows - 1).abs().max() <= known


@pytest.mark.parametrize("variant", VARIANTS)
def test_entries_are_not_negative(variant: str, device: str) -> None:
    given = logits(200, 4, 20.0, torch.float32, device)
    out = fused_sinkhorn(given, 20, variant=variant)
    assert bool((out >= 0).all())
    assert bool((out <= 1 + 1e-6).all())


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_stream_is_one(variant: str, device: str) -> None:
    """n = 1: the matrix is s/(s+eps) next to 1, whatever the logit; its gradient vanishes."""
    given = torch.tensor([[[-5.0]], [[0.0]], [[7.0]]], device=device, requires_grad=True)
    out = fused_sinkhorn(given, 20, variant=variant)
    assert (out - 1).abs().max() <= 2e-6
    (gradient,) = torch.autograd.grad(out.sum(), given)
    assert gradient.abs().max() <= 1e-6


@pytest.mark.parametrize("scale", [1e-3, 50.0, 1000.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_large_and_small_logits(variant: str, scale: float, device: str) -> None:
    if variant == "paper" and scale > 50:
        scale = 20.0  # beyond a spread of about 80 a row of exponentials holds nothing but its maximum
    given = logits(300, 4, scale, torch.float32, device).requires_grad_()
    out = fused_sinkhorn(given, 20, variant=variant)
    (gradient,) = torch.autograd.grad(out, given, torch.ones_like(out))
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(gradient).all())


def test_the_variants_differ_and_are_what_they_say(device: str) -> None:
    given = logits(20, 4, 2.0, torch.float32, device)
    soft, paper = (fused_sinkhorn(given, 1, 1e-2, variant=v) for v in VARIANTS)
    assert (soft - paper).abs().max() > 1e-3
    for found, variant in ((soft, "softmax"), (paper, "paper")):
        exact = transcription.fused_sinkhorn(given.cpu().double(), 1, 1e-2, variant=variant)
        assert_near(found, exact, 4e-6, variant)


# What the formula gives where a logit is special, for the three rows [special row, plain row, plain row] of n = 3.
# Every number of the token is NaN where one is; a -inf among finite logits is a weight of zero.
SPECIAL_ROWS = {
    "NaN": [NAN, 0.0, 0.0],
    "+inf": [INF, 0.0, 0.0],
    "two +inf": [INF, INF, 0.0],
    "+inf and -inf": [INF, -INF, 0.0],
    "all -inf": [-INF, -INF, -INF],
}


@pytest.mark.parametrize("name", SPECIAL_ROWS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_special_rows_spoil_their_token_alone(variant: str, name: str, device: str) -> None:
    clean = logits(5, 3, 1.0, torch.float32, device)
    given = clean.clone()
    given[2, 0] = torch.tensor(SPECIAL_ROWS[name], device=device)
    given, clean = given.requires_grad_(), clean.requires_grad_()
    out, expected = (fused_sinkhorn(t, 20, variant=variant) for t in (given, clean))
    cotangent = logits(5, 3, 1.0, torch.float32, device, seed=1)
    (gradient,) = torch.autograd.grad(out, given, cotangent)
    (clean_gradient,) = torch.autograd.grad(expected, clean, cotangent)
    assert bool(out[2].isnan().all()), "column sums carry the NaN of one row into all"
    assert bool(gradient[2].isnan().all())
    for token in (0, 1, 3, 4):
        assert_bit_equal(out[token], expected[token])
        assert_bit_equal(gradient[token], clean_gradient[token])


@pytest.mark.parametrize("variant", VARIANTS)
def test_minus_infinity_is_a_weight_of_zero(variant: str, device: str) -> None:
    given = logits(4, 3, 1.0, torch.float32, device)
    given[1, 0, 2] = -INF
    out = fused_sinkhorn(given, 20, variant=variant)
    exact = transcription.fused_sinkhorn(given.cpu().double(), 20, variant=variant)
    assert bool(torch.isfinite(out).all())
    assert_near(out, exact, 1e-5)
    assert out[1, 0, 2] <= 2e-5  # eps of the softmax variant, scaled up by the iterations


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-45, 1e-40])
def test_zeros_and_subnormals(value: float, device: str) -> None:
    """All logits equal, whatever nothing they are: every entry is 1/n."""
    out = fused_sinkhorn(torch.full((2, 4, 4), value, device=device), 20)
    assert (out - 0.25).abs().max() <= 1e-6


def test_bf16_logits_are_read_exactly(device: str) -> None:
    """bf16 and fp32 logits of equal value give the same matrix, rounded once to bf16."""
    given = logits(40, 4, 2.0, torch.bfloat16, device)
    assert_bit_equal(fused_sinkhorn(given, 20), fused_sinkhorn(given.float(), 20).bfloat16())
