"""The Triton kernels of the projection and of the learned head in the interpreter, against native in fp64.

Bounds are relative to the largest element of a result. fp32 results of fp32-exact products: 1e-6 (the interpreter adds in
fp32, in another order than native). The gradient of the weight from 16-bit x has two bf16 parts, so 2^-17 for each term,
8e-6 at the most. A result in a narrower dtype adds one rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fused_mhc.ops.contract import _triton_learned as learned
from fused_mhc.ops.contract import native as contract_native
from fused_mhc.ops.proj_rms_compute_h import _triton, config, native
from fused_mhc.testing.compare import assert_bit_equal

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Case(NamedTuple):
    """``pad``: elements between the rows of x."""

    tokens: int
    n: int
    width: int
    dtype: torch.dtype = BF16
    parameters: torch.dtype = FP32
    mode: str = "outside"
    pad: int = 0


CASES = [
    Case(0, 4, 16),
    Case(1, 4, 64),
    Case(33, 4, 96, mode="inside"),
    Case(33, 4, 65, FP32, pad=3),
    Case(5, 1, 37, parameters=BF16, mode="inside"),
    Case(7, 2, 330, FP16, pad=8),
    Case(3, 3, 17, FP32, FP16, "inside"),
    Case(9, 5, 21),
    Case(3, 8, 40, mode="inside"),
    Case(2, 16, 12, FP32),
]


def near(actual: Tensor, exact: Tensor, relative: float) -> None:
    """Every element within ``relative`` of the largest, and one rounding to its dtype."""
    assert actual.shape == exact.shape
    if exact.numel():
        rounding = 0.0 if actual.dtype is FP32 else torch.finfo(actual.dtype).eps / 2
        allowed = relative * exact.abs().max() + exact.abs() * rounding
        assert ((actual.double() - exact).abs() <= allowed).all(), (actual.double() - exact).abs().max()


def inputs(case: Case) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(case.tokens + 100 * case.n)
    k, size = case.n * case.width, case.n * case.n + 2 * case.n
    x = torch.randn(case.tokens, k + case.pad, generator=generator).to(case.dtype)[:, :k]
    parameters = [0.1 * torch.randn(size, k, generator=generator)]
    parameters += [torch.randn(1, generator=generator) for _ in range(3)] + [
        torch.randn(size, generator=generator)
    ]
    return (x, *(p.to(case.parameters) for p in parameters))


def double(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


def forward(
    case: Case, tensors: Sequence[Tensor], host: object = _triton, precision: str = "fp32"
) -> list[Tensor]:
    results = host.proj_rms_compute_h_fwd(*tensors, case.n, 1e-6, 1e-6, case.mode, precision)  # type: ignore[attr-defined]
    return list(results)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_projection(case: Case) -> None:
    tensors = inputs(case)
    results, exact = forward(case, tensors), forward(case, double(tensors), native)  # type: ignore[arg-type]
    for result, reference in zip(results, exact, strict=True):
        assert result.dtype is FP32
        near(result, reference, 1e-6)
    generator = torch.Generator().manual_seed(1)
    grads: list[Tensor | None] = [torch.randn(r.shape, generator=generator) for r in results[:4]]
    if case.n == 2:
        grads[0] = grads[3] = None
    rest = (case.n, 1e-6, case.mode, "fp32")
    needs = [True] * 6
    found = _triton.proj_rms_compute_h_bwd(*grads, *tensors, results[4], results[3], *rest, needs)
    wanted = native.proj_rms_compute_h_bwd(*double(grads), *double(tensors), exact[4], exact[3], *rest, needs)
    for result, reference, tensor, bound in zip(
        found, wanted, tensors, (8e-6, 8e-6, 4e-6, 4e-6, 4e-6, 1e-6), strict=True
    ):
        assert result.dtype is tensor.dtype
        near(result, reference, bound)


@pytest.mark.parametrize("needed", [(0,), (1,), (2, 4), (0, 5), (3,)], ids=str)
def test_frozen_inputs(needed: tuple[int, ...]) -> None:
    case = Case(5, 4, 24)
    tensors = inputs(case)
    *mixes, r, proj = forward(case, tensors)
    grads = [torch.ones_like(m) for m in (*mixes, r)]
    rest = (*grads, *tensors, proj, r, 4, 1e-6, "outside", "fp32")
    every = _triton.proj_rms_compute_h_bwd(*rest, [True] * 6)
    some = _triton.proj_rms_compute_h_bwd(*rest, [i in needed for i in range(6)])
    assert len(some) == len(needed)
    assert all(torch.equal(one, every[i]) for one, i in zip(some, needed, strict=True))


@pytest.mark.parametrize("mode", ["outside", "inside"])
def test_tokens_that_vanish(mode: str) -> None:
    """Zeros, and values whose squares vanish in fp32: finite results and gradients, no gradient through r = 0."""
    case = Case(3, 4, 16, mode=mode)
    x, *parameters = inputs(case)
    x[0], x[1] = 0.0, 1e-30
    *mixes, r, proj = forward(case, (x, *parameters))
    grads = [torch.ones_like(m) for m in (*mixes, r)]
    rest = (x, *parameters, proj, r, 4, 1e-6, mode, "fp32", [True] * 6)
    found = _triton.proj_rms_compute_h_bwd(*grads, *rest)
    assert all(t.isfinite().all() for t in (*mixes, r, proj, *found))
    near(found[0], native.proj_rms_compute_h_bwd(*grads, *rest)[0].double(), 1e-2)


def test_named_precision() -> None:
    """tf32 is no less exact than its name: 2^-11 for each operand."""
    case = Case(4, 4, 64, FP32)
    tensors = inputs(case)
    exact = forward(case, double(tensors), native)[4]  # type: ignore[arg-type]
    near(forward(case, tensors, precision="tf32")[4], exact, 2.0**-11)


def test_fp32_products() -> None:
    """F19, F20: a weight of 1 + 2^-12 is not rounded, whatever the dtype of x."""
    for dtype in (BF16, FP16, FP32):
        x = torch.ones(1, 16, dtype=dtype)
        weight = torch.full((3, 16), 1.0 + 2.0**-12)
        one = torch.ones(1)
        proj = _triton.proj_rms_compute_h_fwd(
            x, weight, one, one, one, torch.zeros(3), 1, 1e-6, 1e-6, "outside", "fp32"
        )[4]
        assert (proj == 16.0 + 2.0**-8).all()


def test_batch_and_split() -> None:
    """A token has the same bits alone and among others, whether its programs take slices of K or groups."""
    case = Case(130, 1, 4400)
    tensors = inputs(case)
    together = forward(case, tensors)
    assert config.slices_per_program(64, 2) > config.slices_per_program(2, 2) == 1
    alone = forward(case, (tensors[0][129:], *tensors[1:]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "slices_per_program", lambda *_: config.GROUP // config.SLICE)
        grouped = forward(case, (tensors[0][129:], *tensors[1:]))
    for a, b, c in zip(together, alone, grouped, strict=True):
        assert torch.equal(a[129:], b)
        assert torch.equal(b, c)


def test_configurations() -> None:
    for n in range(1, 17):
        shape = (n * n + 2 * n, 4096 * n)
        for arch in ("sm_80", "sm_90", "gfx942"):
            assert config.valid(config.heuristic(shape, arch), shape)
            assert config.heuristic(shape, arch) in config.candidates(shape, arch)
        assert config.columns(shape[0]) in (16, 32, 64, 128)
    assert config.chunks_per_program(64, 8) == 4
    assert config.chunks_per_program(64, 1) == 1


HEADS = [
    Case(0, 4, 16),
    Case(5, 4, 33, FP32, pad=4),
    Case(3, 1, 20, FP16, BF16),
    Case(6, 2, 600, pad=8),
    Case(2, 16, 8),
]


@pytest.mark.parametrize("case", HEADS, ids=str)
def test_learned_head(case: Case) -> None:
    flat, weight, scale, _, _, base = inputs(case)
    x = flat.unflatten(1, (case.n, case.width))
    tensors = (x, weight[: case.n], scale, base[: case.n])
    results = learned.learned_output_contract_fwd(*tensors, 1e-6, 1e-6)
    exact = contract_native.learned_output_contract_fwd(*double(tensors), 1e-6, 1e-6)  # type: ignore[arg-type]
    for result, reference in zip(results, exact, strict=True):
        near(result, reference, 1e-6)
    grad = torch.randn(results[0].shape, generator=torch.Generator().manual_seed(2)).to(case.dtype)
    for needs in (
        [True] * 4,
        [False, True, False, True],
        [True, False, False, False],
        [False, False, True, False],
    ):
        found = learned.learned_output_contract_bwd(grad, *tensors, *results[1:], 1e-6, needs)
        wanted = contract_native.learned_output_contract_bwd(
            *double((grad, *tensors)),
            *exact[1:],
            1e-6,
            needs,  # type: ignore[arg-type]
        )
        assert len(found) == sum(needs)
        for result, reference in zip(found, wanted, strict=True):
            near(result, reference, 8e-6)


def test_learned_head_of_streams_apart() -> None:
    """Elements between the streams, and between the columns, are never read; the bits are those of dense streams."""
    flat, weight, scale, _, _, base = inputs(Case(3, 4, 24))
    dense, parameters = flat.unflatten(1, (4, 24)), (weight[:4], scale, base[:4])
    grad = torch.randn(3, 24, generator=torch.Generator().manual_seed(3)).to(BF16)
    found = []
    for x in (
        dense,
        torch.full((3, 4, 32), torch.nan, dtype=BF16)[..., :24].copy_(dense),
        torch.full((3, 5, 24, 2), torch.nan, dtype=BF16)[:, :4, :, 1].copy_(dense),
    ):
        out, proj, u = learned.learned_output_contract_fwd(x, *parameters, 1e-6, 1e-6)
        grads = learned.learned_output_contract_bwd(grad, x, *parameters, proj, u, 1e-6, [True] * 4)
        found.append((out, proj, u, *grads))
    for apart in found[1:]:
        for actual, expected in zip(apart, found[0], strict=True):
            assert_bit_equal(actual, expected)
