"""`mhc_pre` in Triton against fp64 and against the separate operations, interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_mhc import fused_h_aggregate, mhc_pre
from fused_mhc.ops.mhc_pre import config
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


def test_more_partial_sums_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """K is cut where the hidden size asks for it, and the last piece may be short."""
    shape = Shape((3,), 2, 700)
    assert -(-shape.width // config.span(shape.width)) > 1
    assert shape.width % config.span(shape.width)
    for row in run_case(VerifyCase("mhc_pre", OPERATION.modes[0], "triton", torch.float32, shape)):
        assert row.ok, f"{row.direction} {row.result}: {row.error:.3e}, allowed {row.bound:.3e}"


def test_bits() -> None:
    """Repeats are equal, and a token alone gets what it gets among others, past the edge of a tile too."""
    with forced("triton"):
        assert differing_repeats("mhc_pre", Shape((5,), 3, 16), CPU, 2) == 0
        assert batch_differences("mhc_pre", Shape((1,), 4, 8), CPU, (2, 130)) == 0


def test_the_collapse_uses_the_mixes_that_the_last_launch_writes() -> None:
    """The layer input equals the aggregate with the pre-mix that the backward gets, bit for bit."""
    t = make_tensors("mhc_pre", Shape((9,), 4, 40), torch.bfloat16)
    arguments = [value for value in t.values() if value is not None]
    op = torch.ops.fused_mhc.mhc_pre_fwd.default
    settings = (4, 1e-6, 1e-6, 1e-6, "inside", "softmax", "fp32", "triton")
    layer_input, _, _, h_pre, *_ = op(*arguments, *settings)
    with forced("triton"):
        assert_bit_equal(layer_input, fused_h_aggregate(arguments[0], h_pre))


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
