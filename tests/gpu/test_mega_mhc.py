"""The single pass on the device: the Hopper kernels' shapes against fp64, and their bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_mhc import mega_mhc
from fused_mhc.ops.mega_mhc import native as native_backend
from fused_mhc.testing.compare import bit_equal
from fused_mhc.testing.inputs import CATALOGUE, Shape
from fused_mhc.testing.verify import VerifyCase, run_case

native: Any = native_backend
DEVICE = "cuda"
EPS = (1e-6, 1e-6, 20)


def given(tokens: int, n: int, width: int, phi_dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(width + tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    size = n * n + 2 * n
    tensors = [
        normal(tokens, width).bfloat16(),
        normal(tokens, n, width).bfloat16(),
        torch.sigmoid(normal(tokens, n)),
        2 * torch.sigmoid(normal(tokens, n)),
        torch.softmax(normal(tokens, n, n), -1),
        (normal(size, n * width) * (n * width) ** -0.5).to(phi_dtype),
        torch.tensor([0.5, 0.7, 0.9]),
        0.5 * normal(size),
        1 + 0.1 * normal(width),
    ]
    return [t.to(DEVICE).requires_grad_() for t in tensors]


def both_ways(tensors: list[Tensor], cotangents: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    results = mega_mhc(*tensors, backend="triton")
    return [r.detach() for r in results], list(torch.autograd.grad(results, tensors, cotangents))


def cotangents_of(tensors: list[Tensor]) -> list[Tensor]:
    _, residual, pre, post, mixing, *_ = tensors
    return [torch.randn_like(t) for t in (residual, pre, post, mixing, tensors[0])]


@pytest.mark.parametrize("phi_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "n", "width"), [(1, 4, 64), (33, 4, 4096), (1025, 4, 1280), (70, 3, 192), (31, 2, 64)]
)
def test_against_fp64(tokens: int, n: int, width: int, phi_dtype: torch.dtype) -> None:
    """The Hopper kernels' tails: of 32 and 64 tokens, of a chunk of 1024; every n that they take."""
    tensors = given(tokens, n, width, phi_dtype)
    cotangents = cotangents_of(tensors)
    results, grads = both_ways(tensors, cotangents)
    exact = [t.detach().double() for t in tensors]
    new_residual = native.mega_mhc_fwd(*exact, *EPS)[0]
    # What follows reads the rounded streams: proj, u and rstd of those, from the update undone by an identity.
    eye = torch.eye(n, device=DEVICE, dtype=torch.float64).expand(tokens, n, n)
    zeros = torch.zeros_like(exact[3])
    rounded = native.mega_mhc_fwd(
        torch.zeros_like(exact[0]), results[0].double(), exact[2], zeros, eye, *exact[5:], *EPS
    )
    assert (results[0].double() - new_residual).abs().max() <= 2**-8 * new_residual.abs().max()
    for actual, expected in zip(results[1:], rounded[1:5], strict=True):
        allowed = 4e-6 * expected.abs().max() + expected.abs() * torch.finfo(actual.dtype).eps
        assert ((actual.double() - expected).abs() <= allowed).all()
    saved = [rounded[k] for k in (0, 5, 6, 7, 1, 2, 3)]
    reference = native.mega_mhc_bwd(*(c.double() for c in cotangents), *exact, *saved, *EPS, [True] * 9)
    for gradient, expected in zip(grads, reference, strict=True):
        allowed = 2e-5 * expected.abs().max() + expected.abs() * torch.finfo(gradient.dtype).eps
        assert ((gradient.double() - expected).abs() <= allowed).all()


def test_repeats_and_strides() -> None:
    """The same bits 100 times, and from rows that TMA cannot take as they lie."""
    tensors = given(200, 4, 1024)
    cotangents = cotangents_of(tensors)
    results, grads = both_ways(tensors, cotangents)
    for _ in range(100):
        again, other = both_ways(tensors, cotangents)
        assert all(bit_equal(a, b) for a, b in zip([*results, *grads], [*again, *other], strict=True))
    shifted = []
    for t in tensors[:2]:
        buffer = torch.empty(t.numel() + 3, dtype=t.dtype, device=DEVICE)
        view = buffer[3:].view(t.shape)
        view.copy_(t.detach())
        shifted.append(view.requires_grad_())
    odd, odd_grads = both_ways([*shifted, *tensors[2:]], cotangents)
    assert all(bit_equal(a, b) for a, b in zip([*results, *grads], [*odd, *odd_grads], strict=True))


def test_token_alone_and_among_others() -> None:
    """F56, on both sides of every switch between few tokens and many."""
    tensors = given(2100, 4, 1024)
    cotangents = cotangents_of(tensors)
    results, grads = both_ways(tensors, cotangents)
    for token in (0, 1063, 2099):
        row = slice(token, token + 1)
        one = [t.detach()[row].requires_grad_() for t in tensors[:5]] + tensors[5:]
        alone, own = both_ways(one, [c[row] for c in cotangents])
        assert all(bit_equal(a, b[row]) for a, b in zip(alone, results, strict=True))
        assert all(bit_equal(a, b[row]) for a, b in zip(own[:5], grads[:5], strict=True))


@pytest.mark.parametrize("op", ["mega_mhc_entry", "mega_mhc_exit"])
@pytest.mark.parametrize(("tokens", "n", "width"), [(19, 4, 4096), (1030, 4, 1280), (33, 8, 512), (9, 3, 97)])
def test_ends(op: str, tokens: int, n: int, width: int) -> None:
    """Their own backwards: rows that registers keep and rows that are read twice, tails of every chunk."""
    for mode in CATALOGUE[op].modes:
        for row in run_case(
            VerifyCase(op, mode, "triton", torch.bfloat16, Shape((tokens,), n, width)),
            torch.device("cuda", 0),
        ):
            assert row.ok, f"{row.direction} {row.result}: {row.error:.3e} > {row.bound:.3e}"
