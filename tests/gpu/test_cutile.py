"""The cuTile kernels on the device, against fp64 with the project's bounds: tails, every n, odd widths, strides, many
chunks, offsets past 2^31, and the same bits again. Where cuTile does not run, the reason is what `backend_status` gives.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fused_mhc import cutile, fused_h_aggregate, fused_h_post_bda, fused_proj_rms_compute_h, fused_sinkhorn
from fused_mhc.dispatch import backend_status
from fused_mhc.testing.bits import batch_differences, differing_repeats
from fused_mhc.testing.compare import difference, evaluate, factor, oracle
from fused_mhc.testing.inputs import CATALOGUE, Shape, make_tensors
from fused_mhc.testing.verify import SHAPES, VerifyCase, forced, run_case

DEVICE = torch.device("cuda", 0)
REASON = cutile.why_not(DEVICE) if torch.cuda.is_available() else "no GPU"
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"cuTile does not run here: {REASON}")

OPS = ("sinkhorn", "h_aggregate", "h_post_bda", "proj_rms_compute_h")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def held(case: VerifyCase) -> None:
    for row in run_case(case, DEVICE):
        assert row.ok, f"{row.shape} {row.direction} {row.result}: {row.error:.3e} > {row.bound:.3e}"


@pytest.fixture(autouse=True)
def on_cutile() -> Iterator[None]:
    with forced("cutile"):
        yield


def test_it_runs_these_operations() -> None:
    chosen = {(row.op, row.direction): row.chosen for row in backend_status("cutile", DEVICE)}
    for op in OPS:
        assert chosen[op, "fwd"] == chosen[op, "bwd"] == "cutile", op
    assert chosen["mega_mhc", "fwd"] == "cutile"


@pytest.mark.parametrize(
    "shape",
    [
        Shape((t,), 4, width)
        for t, width in ((1, 4096), (33, 4096), (513, 1280), (33, 97), (65, 2048), (3, 7168))
    ],
    ids=str,
)
@pytest.mark.parametrize("op", OPS)
def test_matches_fp64(op: str, shape: Shape) -> None:
    for mode in CATALOGUE[op].modes:
        held(VerifyCase(op, mode, "cutile", BF16, shape))


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("shape", [Shape((33,), 4, 1024), Shape((17,), 3, 37)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_other_dtypes(op: str, shape: Shape, dtype: torch.dtype) -> None:
    held(VerifyCase(op, CATALOGUE[op].modes[0], "cutile", dtype, shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_odd_shapes(op: str, shape: Shape) -> None:
    """No tokens, one token, several leading dimensions, sizes that no tile divides."""
    held(VerifyCase(op, CATALOGUE[op].modes[0], "cutile", BF16, shape))


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("op", OPS)
def test_every_number_of_streams(op: str, n: int) -> None:
    held(VerifyCase(op, CATALOGUE[op].modes[0], "cutile", BF16, Shape((33,), n, 264)))


@pytest.mark.parametrize("op", ["h_post_bda", "proj_rms_compute_h"])
def test_sums_over_many_chunks_of_tokens(op: str) -> None:
    held(VerifyCase(op, CATALOGUE[op].modes[0], "cutile", BF16, Shape((2100,), 2, 264)))


@pytest.mark.parametrize("shape", [Shape((257,), 4, 1024), Shape((77,), 3, 333)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_repeats(op: str, shape: Shape) -> None:
    assert differing_repeats(op, shape, DEVICE, 30) == 0


@pytest.mark.parametrize("shape", [Shape((1,), 4, 1280), Shape((1,), 5, 96)], ids=str)
@pytest.mark.parametrize("op", [*OPS, "mega_mhc"])
def test_token_alone_and_among_others(op: str, shape: Shape) -> None:
    assert batch_differences(op, shape, DEVICE, (2, 16, 17, 512, 4096, 8192)) == 0


def guarded(t: Tensor) -> Tensor:
    """The same values in every second row of a buffer of NaN."""
    buffer = torch.full((2 * t.shape[0] + 1, *t.shape[1:]), torch.nan, dtype=t.dtype, device=t.device)
    view = buffer[1::2]
    view.copy_(t)
    return view


def test_strided_tokens_between_nan() -> None:
    tokens, n, width = 37, 4, 1280
    p = make_tensors("h_post_bda", Shape((tokens,), n, width), BF16, device=DEVICE)
    h_res, residual, h_post, x, bias = (p[k] for k in ("h_res", "original_residual", "h_post", "x", "bias"))
    assert h_res is not None
    assert residual is not None
    assert h_post is not None
    assert x is not None
    apart = [guarded(t) for t in (h_res, residual, h_post, x)]
    assert torch.equal(fused_h_post_bda(*apart, bias), fused_h_post_bda(h_res, residual, h_post, x, bias))
    assert torch.equal(fused_h_aggregate(apart[1], apart[2]), fused_h_aggregate(residual, h_post))
    assert torch.equal(fused_sinkhorn(apart[0], 20), fused_sinkhorn(h_res, 20))
    q = make_tensors("proj_rms_compute_h", Shape((tokens,), n, width), BF16, device=DEVICE)
    flat, *parameters = (t for t in q.values() if t is not None)
    for a, b in zip(
        fused_proj_rms_compute_h(guarded(flat), *parameters, n),
        fused_proj_rms_compute_h(flat, *parameters, n),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_token_stride_past_31_bits() -> None:
    """F34: two tokens 2^31 elements apart."""
    n, width = 4, 64
    buffer = torch.empty(2**31 + n * width, dtype=BF16, device=DEVICE)
    x = buffer.as_strided((2, n, width), (2**31, width, 1))
    x.normal_()
    h = torch.rand(2, n, device=DEVICE)
    assert torch.equal(fused_h_aggregate(x, h), fused_h_aggregate(x.clone(), h))
    p = make_tensors("proj_rms_compute_h", Shape((2,), n, width), BF16, device=DEVICE)
    parameters = [t for k, t in p.items() if k != "x" and t is not None]
    flat = buffer.as_strided((2, n * width), (2**31, 1))
    for a, b in zip(
        fused_proj_rms_compute_h(flat, *parameters, n),
        fused_proj_rms_compute_h(flat.clone(), *parameters, n),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (BF16, Shape((33,), 4, 4096)),
        (BF16, Shape((1,), 4, 5120)),
        (BF16, Shape((513,), 4, 1280)),
        (BF16, Shape((65,), 3, 97)),
        (FP32, Shape((17,), 4, 256)),
        *((FP16, Shape((9,), n, 264)) for n in range(1, 9)),
    ],
    ids=str,
)
def test_single_pass_forward(dtype: torch.dtype, shape: Shape) -> None:
    op = CATALOGUE["mega_mhc"]
    for mode in op.modes:
        options = op.options(mode, shape)
        tensors = make_tensors(op.name, shape, dtype, mode=mode, device=DEVICE)
        results = evaluate(op.function, op.results, tensors, options).results
        expected = oracle(op, shape, tensors, options, None, results["new_residual"])
        for name, value in results.items():
            allowed = factor(op, name, shape, options, False)
            found = difference(value, expected.exact.results[name], expected.scales.results[name], allowed)
            assert found.ok, f"{mode.label} {name}: {found.error:.3e} > {found.bound:.3e}"
