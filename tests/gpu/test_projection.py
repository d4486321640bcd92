"""The projection's kernels on the device: the Hopper kernels and the plain ones, against fp64 and one another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fused_mhc.device import device_info
from fused_mhc.ops.proj_rms_compute_h import _triton, _triton_bwd, _triton_fwd, native

DEVICE = torch.device("cuda", 0)
FP32_BOUND = 1e-6
#: Two bf16 parts of the gradient: 2^-17 for each term.
GRAD_BOUND = 8e-6

#: (tokens, n, C): a tail of tokens, of a chunk, of K; widths that the Hopper kernels take and one that they do not.
SHAPES = [
    (1, 4, 4096),
    (300, 4, 4096),
    (2049, 4, 1024),
    (1000, 2, 200),
    (65, 3, 40),
    (129, 1, 72),
    (70, 4, 65),
    (300, 5, 512),
    (200, 6, 384),
    (700, 8, 1024),
    (129, 9, 264),
]


@pytest.fixture(params=["best", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "plain":
        _triton_fwd.plan.cache_clear()
        for module in (_triton_fwd, _triton_bwd):
            monkeypatch.setattr(module, "runs_gluon", lambda *_, **__: False)
    yield request.param
    _triton_fwd.plan.cache_clear()


def inputs(tokens: int, n: int, width: int) -> list[Tensor]:
    torch.manual_seed(tokens)
    size, k = n * n + 2 * n, n * width
    alphas = [torch.randn(1, device=DEVICE) for _ in range(3)]
    weight = 0.01 * torch.randn(size, k, device=DEVICE)
    return [
        torch.randn(tokens, k, device=DEVICE).bfloat16(),
        weight,
        *alphas,
        torch.randn(size, device=DEVICE),
    ]


def forward(tensors: list[Tensor], n: int, host: object = _triton) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = host.proj_rms_compute_h_fwd(*tensors, n, 1e-6, 1e-6, "inside", "fp32")  # type: ignore[attr-defined]
    return results


def backward(
    grads: list[Tensor], tensors: list[Tensor], saved: tuple[Tensor, ...], n: int, host: object = _triton
) -> list[Tensor]:
    found: list[Tensor] = host.proj_rms_compute_h_bwd(  # type: ignore[attr-defined]
        *grads, *tensors, saved[4], saved[3], n, 1e-6, "inside", "fp32", [True] * 6
    )
    return found


def near(actual: Tensor, exact: Tensor, relative: float) -> None:
    rounding = torch.finfo(actual.dtype).eps / 2
    allowed = relative * exact.abs().max() + exact.abs() * rounding
    assert ((actual.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_fp64(path: str, shape: tuple[int, int, int]) -> None:
    tensors, n = inputs(*shape), shape[1]
    results, exact = forward(tensors, n), forward([t.double() for t in tensors], n, native)
    for result, reference in zip(results, exact, strict=True):
        near(result, reference, FP32_BOUND)
    grads = [torch.randn_like(r) for r in results[:4]]
    found = backward(grads, tensors, results, n)
    wanted = backward([g.double() for g in grads], [t.double() for t in tensors], exact, n, native)
    for result, reference in zip(found, wanted, strict=True):
        near(result, reference, GRAD_BOUND)


@pytest.mark.parametrize("shape", [(2049, 4, 7168), (8191, 4, 1024)], ids=str)
def test_equal_bits_under_load(path: str, shape: tuple[int, int, int]) -> None:
    tensors, n = inputs(*shape), shape[1]
    results = forward(tensors, n)
    grads = [torch.randn_like(r) for r in results[:4]]
    found = backward(grads, tensors, results, n)
    side, square = torch.cuda.Stream(DEVICE), torch.randn(4096, 4096, device=DEVICE)
    for _ in range(100):
        with torch.cuda.stream(side):
            square @ square
        again = (*forward(tensors, n), *backward(grads, tensors, results, n))
        assert all(torch.equal(a, b) for a, b in zip((*results, *found), again, strict=True))


def test_token_alone_and_among_others(path: str) -> None:
    tensors = inputs(8192, 4, 1024)
    together = forward(tensors, 4)
    for first, count in ((0, 1), (8191, 1), (5, 64), (3, 4096)):
        alone = forward([tensors[0][first : first + count], *tensors[1:]], 4)
        assert all(torch.equal(a[first : first + count], b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("pad", [8, 4, 1])
def test_rows_of_any_alignment(path: str, pad: int) -> None:
    tensors = inputs(130, 4, 512)
    strided = torch.empty(130, 2048 + pad, dtype=torch.bfloat16, device=DEVICE)[:, pad:]
    strided.copy_(tensors[0])
    for a, b in zip(forward(tensors, 4), forward([strided, *tensors[1:]], 4), strict=True):
        assert torch.equal(a, b) if path == "best" else torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_hopper_has_its_own_kernels() -> None:
    taken = _triton_fwd.runs_gluon(torch.bfloat16, 16384, 24, DEVICE)
    assert taken == (device_info(DEVICE).arch == "sm_90")
