"""The cuTile kernels' formulas, masks and offsets on the CPU (`fused_mhc.testing.cutile_emulator`): every operation
that has them, against fp64. What the compiler makes of them is for `test_cutile_compiles` and the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fused_mhc import cutile, dispatch
from fused_mhc.testing.compare import difference, evaluate, factor, oracle
from fused_mhc.testing.cutile_emulator import emulate
from fused_mhc.testing.inputs import CATALOGUE, Mode, Shape, make_cotangents, make_tensors
from fused_mhc.testing.verify import SHAPES, VerifyCase, forced, run_case

pytest.importorskip("cuda.tile")

from fused_mhc.ops import _cutile_common
from fused_mhc.ops.proj_rms_compute_h import _cutile_fwd

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


@pytest.mark.parametrize("op", ["h_aggregate", "h_post_bda"])
def test_more_tokens_than_a_grid_has_programs(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cutile_common, "_GRID", 4)
    for row in run_case(VerifyCase(op, CATALOGUE[op].modes[0], "cutile", torch.float32, Shape((9,), 2, 8))):
        assert row.ok, f"{row.direction} {row.result}: {row.error:.3e}, allowed {row.bound:.3e}"


def test_projection_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one view of all tokens would need more than 31 bits: launches over multiples of a chunk, same bits."""
    op, shape = CATALOGUE["proj_rms_compute_h"], Shape((2100,), 1, 8)
    options, tensors = (
        op.options(op.modes[0], shape),
        make_tensors("proj_rms_compute_h", shape, torch.bfloat16),
    )

    def run() -> list[torch.Tensor]:
        with forced("cutile"):
            results = evaluate(op.function, op.results, tensors, options).results
            done = evaluate(op.function, op.results, tensors, options, make_cotangents(results))
        return [*done.results.values(), *(g for g in done.gradients.values() if g is not None)]

    whole = run()
    monkeypatch.setattr(_cutile_fwd, "_LIMIT", 1024 * 8 + 7)
    for cut, once in zip(run(), whole, strict=True):
        assert torch.equal(cut, once)


def test_rows_too_far_apart_are_copied() -> None:
    """Row F34: not even a chunk of these rows fits in 31 bits."""
    buffer = torch.arange(float(2**21 + 8))
    rows, most = _cutile_fwd.rows_of(buffer.as_strided((2, 8), (2**21, 1)))
    assert rows.stride() == (8, 1)
    assert torch.equal(rows[1], buffer[2**21 :])
    assert most % 1024 == 0


def gradients(op: str, shape: Shape, mode: Mode, wanted: set[str]) -> dict[str, torch.Tensor]:
    """Those of the wanted arguments, the others frozen."""
    operation = CATALOGUE[op]
    leaves = {
        k: t if t is None else t.detach().requires_grad_(k in wanted)
        for k, t in make_tensors(op, shape, torch.bfloat16, mode=mode).items()
    }
    with forced("cutile"):
        out = operation.function(**leaves, **operation.options(mode, shape))
        results = out if isinstance(out, tuple) else (out,)
        cotangents = make_cotangents(dict(zip(operation.results, results, strict=True)))
        inputs = [leaves[k] for k in leaves if k in wanted]
        found = torch.autograd.grad(results, inputs, list(cotangents.values()))
    return dict(zip([k for k in leaves if k in wanted], found, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_each_gradient_alone(op: str) -> None:
    """Row F58: an input that needs no gradient costs none and changes no other's bits."""
    shape = Shape((5,), 3, 8)
    for mode in CATALOGUE[op].modes:
        tensors = make_tensors(op, shape, torch.bfloat16, mode=mode)
        names = {k for k, t in tensors.items() if t is not None}
        together = gradients(op, shape, mode, names)
        for name in names:
            alone = gradients(op, shape, mode, {name})
            assert list(alone) == [name]
            # A gradient of the bias goes by columns: another order of the dot products.
            if op != "h_post_bda" or "bias" not in names:
                assert torch.equal(alone[name], together[name]), (mode.label, name)
