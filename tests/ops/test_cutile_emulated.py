"""The cuTile kernels' formulas, masks and offsets on the CPU (`fused_mhc.testing.cutile_emulator`): every operation
that has them, against fp64. What the compiler makes of them is for `test_cutile_compiles` and the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fused_mhc import cutile, dispatch
from fused_mhc.testing.cutile_emulator import emulate
from fused_mhc.testing.inputs import CATALOGUE, Shape
from fused_mhc.testing.verify import SHAPES, VerifyCase, run_case

pytest.importorskip("cuda.tile")

OPS = ("sinkhorn", "h_aggregate", "h_post_bda", "proj_rms_compute_h")
CASES = [
    VerifyCase(op, mode, "cutile", dtype, shape)
    for op in OPS
    for mode in CATALOGUE[op].modes
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for shape in SHAPES
    if dtype is torch.bfloat16 or shape.tokens < 8
]


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """cuTile runs, on the CPU."""
    monkeypatch.setattr(cutile, "why_not", lambda device: None)
    dispatch._RESOLVED.clear()
    with emulate():
        yield
    dispatch._RESOLVED.clear()


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c).replace(" ", "-"))
def test_matches_fp64(case: VerifyCase) -> None:
    for row in run_case(case):
        assert row.ok, f"{row.direction} {row.result}: off by {row.error:.3e}, allowed {row.bound:.3e}"


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("op", OPS)
def test_every_number_of_streams(op: str, n: int) -> None:
    for mode in CATALOGUE[op].modes:
        for row in run_case(VerifyCase(op, mode, "cutile", torch.float32, Shape((3,), n, 40))):
            assert row.ok, f"{mode.label} {row.direction} {row.result}: {row.error:.3e}, {row.bound:.3e}"
