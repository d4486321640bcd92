"""What native alone promises: chunks that change no per-token bit, and no fp32 copy of the streams."""

from __future__ import annotations

import pytest
import torch

from fused_mhc import fused_h_aggregate, fused_proj_rms_compute_h
from fused_mhc.ops import _native
from fused_mhc.testing.compare import Evaluation, assert_bit_equal, difference, evaluate, factor, oracle
from fused_mhc.testing.inputs import CATALOGUE, Mode, Operation, Shape, make_cotangents, make_tensors
from fused_mhc.testing.verify import stored_residual


def call(op: Operation, mode: Mode, shape: Shape) -> Evaluation:
    options = op.options(mode, shape)
    tensors = make_tensors(op.name, shape, torch.float32, mode=mode)
    results = evaluate(op.function, op.results, tensors, options).results
    return evaluate(op.function, op.results, tensors, options, make_cotangents(results))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, id=f"{name}[{mode.label}]")
        for name, op in CATALOGUE.items()
        for mode in op.modes
    ],
)
def test_chunks_of_tokens(name: str, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks with a short last one: every token is written, and all of it is right."""
    op, shape = CATALOGUE[name], Shape((11,), 3, 8)
    whole = call(op, mode, shape)
    monkeypatch.setattr(_native, "CHUNK_ELEMENTS", 4 * shape.width)
    parts = call(op, mode, shape)
    tensors, options = make_tensors(name, shape, torch.float32, mode=mode), op.options(mode, shape)
    rounded = stored_residual(op, tensors, shape, parts.results)
    expected = oracle(op, shape, tensors, options, make_cotangents(parts.results), rounded)
    for key, value in parts.results.items():
        if not op.normalises:
            assert_bit_equal(value, whole.results[key], key)
        bound = factor(op, key, shape, options, False)
        assert difference(value, expected.exact.results[key], expected.scales.results[key], bound).ok, key
    for key, gradient in parts.gradients.items():
        exact, scale = expected.exact.gradients[key], expected.scales.gradients[key]
        assert gradient is not None
        assert exact is not None
        assert scale is not None
        assert difference(gradient, exact, scale, factor(op, key, shape, options, True)).ok, key


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 8, 1000, 4097])
def test_tree_sum(length: int) -> None:
    """Right for every length, and its bits do not depend on what else is summed beside it."""
    t = torch.randn(6, length, generator=torch.Generator().manual_seed(length))
    total = _native.tree_sum(t)
    torch.testing.assert_close(total.double(), t.double().sum(-1), rtol=1e-5, atol=1e-4)
    for row in range(6):
        assert_bit_equal(_native.tree_sum(t[row : row + 1]), total[row : row + 1])
    assert_bit_equal(_native.tree_sum(t.T.contiguous(), 0), total)


def peak_above(live_before: int, profile: torch.profiler.profile) -> int:
    """Highest number of bytes that the profiled calls held beyond what was live before them."""
    live = peak = live_before
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak - live_before


def test_projection_makes_no_copy_of_the_streams() -> None:
    """Forward and backward at T = 4096, K = 16384 in bf16: beside inputs, outputs and gradients less than a quarter of
    the bytes of x."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 16384, generator=generator, dtype=torch.float32).bfloat16().requires_grad_()
    weight = (0.01 * torch.randn(24, 16384, generator=generator)).requires_grad_()
    small = [torch.ones(1, requires_grad=True) for _ in range(3)]
    bias = torch.zeros(24, requires_grad=True)
    leaves = (x, weight, *small, bias)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        out = fused_proj_rms_compute_h(*leaves, n=4)
        cotangents = [torch.ones_like(t) for t in out]
        gradients = torch.autograd.grad(out, leaves, cotangents)
    kept = sum(t.numel() * t.element_size() for t in (*out, *cotangents, *gradients))
    raw_product = 4096 * 24 * 4  # saved for the backward: an output of the forward op
    extra = peak_above(0, profile) - kept - raw_product
    allowed = 0.25 * x.numel() * x.element_size()
    assert 0 < extra < allowed, f"{extra / 2**20:.1f} MiB, allowed {allowed / 2**20:.1f}"


def test_aggregate_makes_no_copy_of_the_streams() -> None:
    x = torch.randn(4096, 4, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    h_pre = torch.rand(4096, 4)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        out = fused_h_aggregate(x, h_pre)
    extra = peak_above(0, profile) - out.numel() * out.element_size()
    assert 0 < extra < x.numel() * x.element_size()
