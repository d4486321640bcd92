"""`mhc_pre` in Triton against fp64 and against the separate operations, interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_mhc import (
    fused_h_aggregate,
    fused_proj_rms_compute_h,
    fused_sinkhorn,
    learned_output_contract,
    mhc_pre,
)
from fused_mhc.ops.proj_rms_compute_h import _triton_bwd
from fused_mhc.testing.bits import batch_differences, differing_repeats
from fused_mhc.testing.compare import assert_bit_equal
from fused_mhc.testing.inputs import CATALOGUE, Mode, Shape, make_tensors
from fused_mhc.testing.verify import VerifyCase, forced, run_case

CPU = torch.device("cpu")
OPERATION = CATALOGUE["mhc_pre"]


@pytest.mark.parametrize("mode", OPERATION.modes, ids=lambda m: m.label)
@pytest.mark.parametrize(
    ("shape", "stream_dtype"),
    [
        (Shape((33,), 4, 24), torch.bfloat16),
        (Shape((5,), 3, 37), torch.float32),
        (Shape((2, 3), 2, 70), torch.float16),
        (Shape((3,), 5, 8), torch.float32),
        (Shape((2,), 7, 9), torch.bfloat16),
        (Shape((2,), 9, 5), torch.float32),
        (Shape((1,), 1, 1), torch.float32),
        (Shape((0,), 4, 8), torch.bfloat16),
    ],
    ids=str,
)
def test_matches_fp64(mode: Mode, shape: Shape, stream_dtype: torch.dtype) -> None:
    for row in run_case(VerifyCase("mhc_pre", mode, "triton", stream_dtype, shape)):
        assert row.ok, f"{row.direction} {row.result}: {row.error:.3e}, allowed {row.bound:.3e}"


def test_bits() -> None:
    """Repeats are equal, and a token alone gets what it gets among others, past the edge of a tile too."""
    with forced("triton"):
        assert differing_repeats("mhc_pre", Shape((5,), 3, 16), CPU, 2) == 0
        assert batch_differences("mhc_pre", Shape((1,), 4, 8), CPU, (2, 130)) == 0


def test_equals_the_separate_operations() -> None:
    """Layer input and mixes are those of the separate operations, bit for bit, with K in more partial sums than one."""
    t = make_tensors("mhc_pre", Shape((9,), 2, 1100), torch.bfloat16)
    arguments = [value for value in t.values() if value is not None]
    x, *parameters = arguments
    op = torch.ops.fused_mhc.mhc_pre_fwd.default
    settings = (4, 1e-6, 1e-6, 1e-6, "inside", "softmax", "fp32", "triton")
    layer_input, h_post, h_res, h_pre, *_ = op(*arguments, *settings)
    with forced("triton"):
        pre, post, logits, _ = fused_proj_rms_compute_h(x.flatten(1), *parameters, 2, rms_eps_mode="inside")
        assert_bit_equal(h_pre, pre)
        assert_bit_equal(h_post, post)
        assert_bit_equal(h_res, fused_sinkhorn(logits.unflatten(-1, (2, 2)), 4))
        assert_bit_equal(layer_input, fused_h_aggregate(x, h_pre))


def test_strided_streams_and_frozen_inputs() -> None:
    n, width = 3, 12
    t = make_tensors("mhc_pre", Shape((10,), n, width), torch.float32)
    x = t.pop("x")
    assert x is not None
    parameters: list[Tensor] = [p for p in t.values() if p is not None]
    with forced("triton"):
        every_second = mhc_pre(x[::2], *parameters, 3)
        for a, b in zip(every_second, mhc_pre(x[::2].contiguous(), *parameters, 3), strict=True):
            assert_bit_equal(a, b)
        leaf = x[:4].clone().requires_grad_()
        weight = parameters[0].clone().requires_grad_()
        full = mhc_pre(leaf, weight, *parameters[1:], 3)
        both = torch.autograd.grad(full[0].sum() + full[2].sum(), [leaf, weight])
        frozen = mhc_pre(leaf.detach(), weight, *parameters[1:], 3)
        (alone,) = torch.autograd.grad(frozen[0].sum() + frozen[2].sum(), [weight])
        assert_bit_equal(alone, both[1])


def _hopper_arithmetic(
    x: Tensor,
    stride: int,
    weight: Tensor,
    parts: Tensor,
    coefficient: Tensor,
    g_x: Tensor,
    shares: Tensor,
    mix: tuple[Tensor, int] | tuple[None, int],
    g_layer: tuple[Tensor, int] | tuple[None, int],
    g_passed: Tensor | None,
    passed_stride: int,
    inner: int,
) -> None:
    """What the Hopper kernel computes, from the arguments that it gets."""
    count, width, size = coefficient.shape[0], weight.shape[1], weight.shape[0]
    streams = width // inner

    def rows(t: Tensor, step: int, columns: int) -> Tensor:
        return t.as_strided((count, columns), (step, 1)).float()

    g = parts.float().view(count, 4, 2, 8).sum(2).flatten(1)[:, :size]
    flat = rows(x, stride, width)
    total = torch.addcmul(g @ weight, coefficient[:, None], flat)
    if mix[0] is not None and g_layer[0] is not None:
        layer = rows(*g_layer, inner)
        total += (rows(*mix, streams)[:, :, None] * layer[:, None]).flatten(1)
    if g_passed is not None:
        total += rows(g_passed, passed_stride, width)
    g_x.copy_(total.view(g_x.shape))
    for index, share in enumerate(shares):
        chunk = slice(1024 * index, 1024 * (index + 1))
        share.copy_(g[chunk].T @ flat[chunk])


class _Hopper:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, direction: str) -> _Hopper:
        assert direction == "bwd"
        return self

    def project_bwd(self, *args: Any) -> None:
        self.calls += 1
        _hopper_arithmetic(*args)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("used", ["both", "layer_input", "x", "mixes"])
@pytest.mark.parametrize("width", [128, 64])
def test_what_the_hopper_kernel_gets(monkeypatch: pytest.MonkeyPatch, n: int, used: str, width: int) -> None:
    """The arguments of the Hopper backward are right, and it is asked only for streams whose tiles are their own."""
    hopper = _Hopper()
    monkeypatch.setattr(_triton_bwd, "runs_gluon", lambda *_: True)
    monkeypatch.setattr(_triton_bwd, "hopper", hopper)
    t = make_tensors("mhc_pre", Shape((7,), n, width), torch.bfloat16)
    x = t.pop("x")
    assert x is not None
    parameters = [p for p in t.values() if p is not None]
    apart = torch.zeros(7, n + 1, width, dtype=torch.bfloat16)[:, :n].copy_(x)
    leaves = [p.detach().requires_grad_() for p in (apart, *parameters)]
    exact = [p.detach().double().requires_grad_() for p in leaves]
    kept = {"both": (0, 1, 2, 3), "layer_input": (0,), "x": (2, 3), "mixes": (1, 2)}[used]
    cotangents: list[Tensor] = []
    with forced("triton"):
        results = mhc_pre(*leaves, 3)
        generator = torch.Generator().manual_seed(n)
        for k in kept:
            drawn = torch.randn(results[k].shape, generator=generator).to(results[k].dtype)
            # Rows that TMA cannot take as they lie.
            wide = torch.zeros(*drawn.shape[:-1], drawn.shape[-1] + 1, dtype=drawn.dtype)
            cotangents.append(wide[..., 1:].copy_(drawn))
        grads = torch.autograd.grad([results[k] for k in kept], leaves, cotangents)
    with forced("native"):
        wanted = mhc_pre(*exact, 3)
        reference = torch.autograd.grad([wanted[k] for k in kept], exact, [c.double() for c in cotangents])
    assert hopper.calls == (width == 128 or used in ("x", "mixes"))
    for gradient, expected in zip(grads, reference, strict=True):
        allowed = 2e-5 * expected.abs().max() + expected.abs() * torch.finfo(gradient.dtype).eps
        assert ((gradient.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize(("width", "taken"), [(128, True), (64, False)])
def test_what_the_hopper_kernel_gets_of_the_learned_head(
    monkeypatch: pytest.MonkeyPatch, width: int, taken: bool
) -> None:
    hopper = _Hopper()
    monkeypatch.setattr(_triton_bwd, "runs_gluon", lambda *_: True)
    monkeypatch.setattr(_triton_bwd, "hopper", hopper)
    drawn = make_tensors("learned_output_contract", Shape((7,), 4, width), torch.bfloat16).values()
    leaves = [t.detach().requires_grad_() for t in drawn if t is not None]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    cotangent = torch.randn(7, width, generator=torch.Generator().manual_seed(4)).bfloat16()
    with forced("triton"):
        grads = torch.autograd.grad(learned_output_contract(*leaves), leaves, cotangent)
    with forced("native"):
        reference = torch.autograd.grad(learned_output_contract(*exact), exact, cotangent.double())
    assert hopper.calls == taken
    for gradient, expected in zip(grads, reference, strict=True):
        allowed = 2e-5 * expected.abs().max() + expected.abs() * torch.finfo(gradient.dtype).eps
        assert ((gradient.double() - expected).abs() <= allowed).all()
