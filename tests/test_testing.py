"""The yardsticks themselves: comparisons that must fail do fail."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fused_mhc import BackendError, InputError
from fused_mhc.testing.bits import run_bits
from fused_mhc.testing.byte_counts import fewest_bytes, stream_units
from fused_mhc.testing.compare import assert_bit_equal, assert_near, bit_equal, difference, rounding
from fused_mhc.testing.inputs import CATALOGUE, Operation, Shape, make_tensors
from fused_mhc.testing.timing import copy_bandwidth, measure
from fused_mhc.testing.verify import SHAPES, VerifyCase, plan_verify, run_case, run_verify


def test_bit_equal() -> None:
    nan = torch.tensor([math.nan, 1.0])
    assert bit_equal(nan, nan.clone())
    assert not bit_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not bit_equal(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))
    assert not bit_equal(torch.zeros(2), torch.zeros(1, 2))
    with pytest.raises(AssertionError, match="1 of 2 elements differ"):
        assert_bit_equal(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    with pytest.raises(AssertionError, match="is not"):
        assert_bit_equal(torch.zeros(2), torch.zeros(3))


def test_rounding_is_half_a_unit() -> None:
    values = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    assert rounding(values, torch.bfloat16).tolist() == [2.0**-8, 2.0**-9, 2.0**-134]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1.001])
def test_what_is_wrong_is_found(wrong: float) -> None:
    exact = torch.ones(5, dtype=torch.float64)
    actual = exact.float()
    assert difference(actual, exact, exact, 0.0).ok
    actual[3] = wrong
    found = difference(actual, exact, exact, 1e-6)
    assert not found.ok
    assert found.ratio > 1
    with pytest.raises(AssertionError, match="allowed"):
        assert_near(actual, exact, 1e-6)


def test_a_wrong_operation_fails_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transposed update, and a gradient that is one part in a thousand off."""

    class Slightly(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, t: Tensor) -> Tensor:
            return t.clone()

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> Tensor:
            return grads[0] * 1.001

    op = CATALOGUE["h_post_bda"]
    right = op.function
    case = VerifyCase(op.name, op.modes[0], "native", torch.float32, Shape((3,), 4, 8))

    def transposed(h_res: Tensor, **rest: Tensor) -> Tensor:
        return right(h_res=h_res.transpose(-1, -2), **rest)

    def biased(x: Tensor, **rest: Tensor) -> Tensor:
        return right(x=Slightly.apply(x), **rest)

    for wrong, verdict in ((right, [True, True]), (transposed, [False, False]), (biased, [True, False])):
        monkeypatch.setattr(Operation, "function", property(lambda self, f=wrong: f))
        assert [row.ok for row in run_case(case)] == verdict


def test_run_verify() -> None:
    lines: list[str] = []
    rows = run_verify(["native"], ["output_contract"], progress=lines.append)
    assert len(rows) == 2 * len(lines) == 2 * 4 * len(SHAPES)
    assert all(row.ok for row in rows)
    assert {row.direction for row in rows} == {"fwd", "bwd"}
    assert {row.dtype for row in rows} == {"float16", "bfloat16", "float32", "float64"}
    assert set(rows[0].to_dict()) >= {"op", "backend", "direction", "dtype", "shape", "error", "bound", "ok"}
    with pytest.raises(InputError, match="ops: expected one of"):
        run_verify(ops=["softmax"])
    with pytest.raises(InputError, match="expected one of"):
        run_verify(backends=["cuda"])


def test_a_named_backend_that_runs_nothing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(BackendError, match=r"'triton' cannot run what was asked for on cpu: .*GPU"):
        run_verify(["triton"])
    assert {case.backend for case in plan_verify()} == {"native"}


def test_seeds() -> None:
    for name in CATALOGUE:
        first, second, other = (
            make_tensors(name, Shape((3,), 2, 4), torch.float32, seed=seed) for seed in (1, 1, 2)
        )
        for key, t in first.items():
            twin, stranger = second[key], other[key]
            assert t is not None
            assert twin is not None
            assert stranger is not None
            assert_bit_equal(t, twin)
            assert not torch.equal(t, stranger)


def test_byte_counts() -> None:
    """The table of fewest bytes at n = 4, in units of T*C elements, and the formulas of the single pass."""
    table = {
        "h_aggregate": (5, 9),
        "h_post_bda": (9, 14),
        "proj_rms_compute_h": (4, 8),
        "fused_add_3": (16, 0),
        "mega_mhc": (10, 15),
    }
    for op, units in table.items():
        assert (stream_units(op, "fwd", 4), stream_units(op, "bwd", 4)) == units
    for n in range(1, 17):
        assert stream_units("mega_mhc", "fwd", n) == 2 * n + 2
        assert stream_units("mega_mhc", "bwd", n) == 3 * n + 3
    assert fewest_bytes("h_aggregate", "fwd", 8192, 4, 4096) == 5 * 2 * 8192 * 4096
    assert fewest_bytes("sinkhorn", "bwd", 10, 4, 1, 4) == 3 * 16 * 10 * 4
    for bad in (("softmax", "fwd", 4), ("sinkhorn", "sideways", 4), ("sinkhorn", "fwd", 17)):
        with pytest.raises(InputError):
            stream_units(*bad)


def test_timing() -> None:
    calls = []
    timing = measure(lambda: calls.append(1), "cpu", warmup=2, repeats=7)
    assert len(calls) == 9
    assert timing.repeats == 7
    assert 0 <= timing.low <= timing.median <= timing.high
    assert copy_bandwidth("cpu", 1 << 16) > 0
    with pytest.raises(InputError, match="repeats"):
        measure(lambda: None, "cpu", repeats=0)


def test_bits_of_an_operation_without_a_backward() -> None:
    rows = run_bits(
        "native",
        "cpu",
        ops=("sinkhorn", "h_aggregate"),
        forward_only=("h_aggregate",),
        shape=Shape((5,), 2, 16),
        repeats=3,
        counts=(2,),
    )
    assert [(row.op, row.check, row.trials, row.different) for row in rows] == [
        ("sinkhorn", "repeats", 3, 0),
        ("sinkhorn", "batches", 1, 0),
        ("h_aggregate", "forward repeats", 3, 0),
        ("h_aggregate", "batches", 1, 0),
    ]
