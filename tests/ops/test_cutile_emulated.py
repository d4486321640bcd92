"""The cuTile kernels' formulas, masks and offsets on the CPU (`fused_mhc.testing.cutile_emulator`): every operation
that has them, against fp64. What the compiler makes of them is for `test_cutile_compiles` and the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fused_mhc import cutile, dispatch
from fused_mhc.testing.compare import difference, evaluate, factor, oracle
from fused_mhc.testing.cutile_emulator import emulate
from fused_mhc.testing.inputs import CATALOGUE, Shape, make_tensors
from fused_mhc.testing.verify import SHAPES, VerifyCase, forced, run_case

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


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.bfloat16, Shape((5,), 4, 64)),
        (torch.float16, Shape((2, 3), 3, 37)),
        (torch.float32, Shape((3,), 2, 4097)),  # more blocks than a program keeps
        (torch.bfloat16, Shape((1,), 8, 33)),
        (torch.bfloat16, Shape((0,), 4, 8)),
    ],
    ids=str,
)
def test_single_pass_forward(dtype: torch.dtype, shape: Shape) -> None:
    op = CATALOGUE["mega_mhc"]
    for mode in op.modes:
        options = op.options(mode, shape)
        tensors = make_tensors(op.name, shape, dtype, mode=mode)
        with forced("cutile"):
            results = evaluate(op.function, op.results, tensors, options).results
        expected = oracle(op, shape, tensors, options, None, results["new_residual"])
        for name, value in results.items():
            exact, scale = expected.exact.results[name], expected.scales.results[name]
            found = difference(value, exact, scale, factor(op, name, shape, options, False))
            assert found.ok, f"{mode.label} {name}: {found.error:.3e}, allowed {found.bound:.3e}"
