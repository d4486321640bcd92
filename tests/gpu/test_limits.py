"""Sizes at the edge: many tokens, more than 2^31 elements, strides past 2^31, none at all, guards around a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fused_mhc import (
    fused_h_aggregate,
    fused_h_post_bda,
    fused_proj_rms_compute_h,
    fused_sinkhorn,
    mhc_pre,
)
from fused_mhc.dispatch import OPERATIONS, backend_status
from fused_mhc.testing.bits import differing_repeats
from fused_mhc.testing.inputs import CATALOGUE, Shape, make_tensors
from fused_mhc.testing.verify import VerifyCase, forced, run_case

DEVICE = torch.device("cuda", 0)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def triton() -> Any:
    with forced("triton"):
        yield


def test_triton_runs_everything() -> None:
    chosen = {(row.op, row.direction): row.chosen for row in backend_status("triton", DEVICE)}
    assert set(chosen.values()) == {"triton"}, chosen


@pytest.mark.parametrize("op", list(OPERATIONS))
@pytest.mark.parametrize("width", [2048, 3072, 7168])
def test_widths_and_token_counts_around_a_tile(op: str, width: int) -> None:
    """F29, F32, F33, F37, F41."""
    for tokens in (21, 513):
        case = VerifyCase(op, CATALOGUE[op].modes[0], "triton", BF16, Shape((tokens,), 4, width))
        for row in run_case(case, DEVICE):
            assert row.ok, f"{row.shape} {row.direction} {row.result}: {row.error:.3e} > {row.bound:.3e}"


def test_a_million_tokens() -> None:
    """T = 2^20: the first and the last tokens get what they get alone, and sums over tokens are finite."""
    tokens, n, width = 1 << 20, 4, 16
    x = torch.randn(tokens, n, width, device=DEVICE, dtype=BF16, requires_grad=True)
    logits = torch.randn(tokens, n, n, device=DEVICE)
    h_res = fused_sinkhorn(logits, 20)
    ends = torch.tensor([0, 1, tokens - 2, tokens - 1], device=DEVICE)
    assert torch.equal(h_res[ends], fused_sinkhorn(logits[ends], 20))
    p = make_tensors("mhc_pre", Shape((1,), n, width), BF16, device=DEVICE)
    parameters = [t.requires_grad_() for k, t in p.items() if k != "x" and t is not None]
    layer_input, h_post, mixing, passed = mhc_pre(x, *parameters)
    out = fused_h_post_bda(mixing, passed, h_post, layer_input)
    few = x.detach()[ends]
    again, post, res, few = mhc_pre(few, *(t.detach() for t in parameters))
    assert torch.equal(out[ends], fused_h_post_bda(res, few, post, again))
    grads = torch.autograd.grad(out.float().square().mean(), [x, *parameters])
    assert all(torch.isfinite(g).all() for g in grads)


def test_more_elements_than_an_int32_counts() -> None:
    """F34: 2^31 + 2^26 elements of x; the last tokens are right."""
    n, width = 4, 8192
    tokens = (1 << 31) // (n * width) + 2048
    x = torch.empty(tokens, n, width, device=DEVICE, dtype=BF16).normal_()
    h = torch.rand(tokens, n, device=DEVICE)
    tail = slice(tokens - 3, tokens)
    out = fused_h_aggregate(x, h)
    assert torch.equal(out[tail], fused_h_aggregate(x[tail].clone(), h[tail].clone()))
    shape = Shape((1,), n, width)
    p = make_tensors("proj_rms_compute_h", shape, BF16, device=DEVICE)
    parameters = [t for k, t in p.items() if k != "x" and t is not None]
    found = fused_proj_rms_compute_h(x.flatten(1), *parameters, n)
    alone = fused_proj_rms_compute_h(x[tail].flatten(1).clone(), *parameters, n)
    assert all(torch.equal(a[tail], b) for a, b in zip(found, alone, strict=True))
    mixing = torch.softmax(torch.randn(tokens, n, n, device=DEVICE), -1)
    post = torch.rand(tokens, n, device=DEVICE)
    del found
    new = fused_h_post_bda(mixing, x, post, out)
    alone = fused_h_post_bda(mixing[tail].clone(), x[tail].clone(), post[tail].clone(), out[tail].clone())
    assert torch.equal(new[tail], alone)


def test_token_stride_past_an_int32() -> None:
    """F34: two tokens 2^31 elements apart."""
    n, width = 4, 64
    storage = torch.empty((1 << 31) + n * width, device=DEVICE, dtype=BF16)
    x = storage.as_strided((2, n, width), (1 << 31, width, 1))
    x.normal_()
    h = torch.rand(2, n, device=DEVICE)
    assert torch.equal(fused_h_aggregate(x, h), fused_h_aggregate(x.contiguous(), h))
    p = make_tensors("mhc_pre", Shape((1,), n, width), BF16, device=DEVICE)
    parameters = [t for k, t in p.items() if k != "x" and t is not None]
    for a, b in zip(mhc_pre(x, *parameters), mhc_pre(x.contiguous(), *parameters), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", list(OPERATIONS))
def test_no_tokens(op: str) -> None:
    """F31."""
    case = VerifyCase(op, CATALOGUE[op].modes[0], "triton", BF16, Shape((0,), 4, 64))
    assert all(row.ok for row in run_case(case, DEVICE))


@pytest.mark.parametrize("tokens", [1, 17, 33])
def test_nan_around_a_token_is_not_read(tokens: int) -> None:
    """F35, F39: the streams lie between rows of NaN."""
    n, width = 4, 7168
    storage = torch.full((tokens + 2, n, width), float("nan"), device=DEVICE, dtype=BF16)
    x = storage[1:-1]
    x.normal_()
    p = make_tensors("mhc_pre", Shape((1,), n, width), BF16, device=DEVICE)
    parameters = [t.requires_grad_() for k, t in p.items() if k != "x" and t is not None]
    leaf = x.detach().requires_grad_()
    layer_input, h_post, h_res, passed = mhc_pre(leaf, *parameters)
    out = fused_h_post_bda(h_res, passed, h_post, layer_input)
    grads = torch.autograd.grad(out.float().sum(), [leaf, *parameters])
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in grads)
    assert torch.isnan(storage[0]).all()
    assert torch.isnan(storage[-1]).all()


@pytest.mark.parametrize("streams", [2, 3, 5, 6, 7, 8])
def test_streams(streams: int) -> None:
    """F38 and every n at a hidden size of use."""
    for op in OPERATIONS:
        assert differing_repeats(op, Shape((65,), streams, 640), DEVICE, 2) == 0
        for row in run_case(
            VerifyCase(op, CATALOGUE[op].modes[0], "triton", BF16, Shape((65,), streams, 640)), DEVICE
        ):
            assert row.ok, f"{op} {row.direction} {row.result}: {row.error:.3e} > {row.bound:.3e}"
