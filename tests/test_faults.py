"""Faults that public mHC kernels had, each as a small input with the right value (rows F1.. of the list of faults).

A test bears the number of its row. Rows without a test here, and why:

- F11 (an argument that is accepted and ignored): no operation takes a callable depth residual; unknown keywords are
  Python's own TypeError.
- F30 (time of an odd T), F32 (miscompiled pipeline stages at T = 511..513), F42 (rare wrong values under load), F44, F50
  and F52 (capture into CUDA graphs), F51 (grid barrier while other work runs): need a GPU; tests/gpu.
- F39, F40 (workspaces and lanes of split sums): native splits no sum; tests of the kernels that do.
- F43 (tuning trials added into a live buffer): no operation takes a buffer to accumulate into, none is tuned by running.
- F46 (ranks that tune differently): nothing is chosen by measuring.
- F47, F48 (probe of a compiler, its architectures): no backend here calls an external compiler.
- F53 (buffers of a pipeline stage): tests of the distributed integration.
- F55 (warm-up that never ran): there is no warm-up.
- F62 (recomputation that enrols the wrong module): nothing is enrolled; a model calls ``torch.utils.checkpoint`` (F25).
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from fused_mhc import (
    BackendError,
    HyperConnection,
    InputError,
    SinglePassHyperConnection,
    backend_status,
    fused_add_3,
    fused_h_aggregate,
    fused_h_post_bda,
    fused_proj_rms_compute_h,
    fused_sinkhorn,
    input_expand,
    mega_mhc,
    mhc_pre,
    output_contract,
)
from fused_mhc import device as device_module
from fused_mhc.testing import transcription
from fused_mhc.testing.compare import assert_bit_equal, assert_near, evaluate, projection_error
from fused_mhc.testing.inputs import CATALOGUE, Mode, Shape, make_cotangents, make_tensors
from fused_mhc.testing.verify import VerifyCase, run_case

NAN, INF = float("nan"), float("inf")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype).to(device)


def tensors_of(name: str, shape: Shape, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    made = make_tensors(name, shape, dtype, device=device)
    return {k: t for k, t in made.items() if t is not None}


def assert_parity(name: str, shape: Shape, backend: str, device: str, *dtypes: torch.dtype) -> None:
    """Forward and backward against fp64."""
    for dtype in dtypes or (torch.bfloat16,):
        for row in run_case(VerifyCase(name, CATALOGUE[name].modes[0], backend, dtype, shape), device):
            assert row.ok, f"{row}"


# Mathematics


def test_F1(device: str) -> None:
    """``out[j] = sum_i H[i, j]*x[i]``: the matrix is applied transposed."""
    H = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], device=device)
    x = torch.eye(2, device=device).unsqueeze(0)
    out = fused_h_post_bda(H, x, torch.zeros(1, 2, device=device), torch.zeros(1, 2, device=device))
    assert torch.equal(out[0], H[0].T)
    mixed = mega_mhc(
        torch.zeros(1, 2, device=device),
        x,
        torch.ones(1, 2, device=device),
        torch.zeros(1, 2, device=device),
        H,
        torch.zeros(8, 4, device=device),
        torch.ones(3, device=device),
        torch.zeros(8, device=device),
        None,
    )
    assert torch.equal(mixed[0][0], H[0].T)


def normed_mean_square(n: int, width: int, device: str) -> float:
    tensors = tensors_of("mega_mhc", Shape((1,), n, width), torch.float32, device)
    block_input = mega_mhc(**{**tensors, "norm_weight": None})[4]
    return float(block_input.double().square().mean())


def test_F2(device: str) -> None:
    """The RMS takes in every lane: without a weight the mean square of the normed token is 1."""
    assert abs(normed_mean_square(4, 4096, device) - 1.0) < 1e-5


def test_F3(device: str) -> None:
    """The same for every n and for widths around those of warps and waves."""
    for n, width in itertools.product((1, 2, 3, 4, 5, 8), (31, 32, 33, 63, 64, 65, 127, 128, 129, 1000)):
        assert abs(normed_mean_square(n, width, device) - 1.0) < 1e-4, (n, width)


def finite_difference(function: Any, x: Tensor, cotangent: Tensor, step: float) -> Tensor:
    """Central differences of ``<cotangent, function(x)>``, element by element, on the fp64 transcription."""
    gradient = torch.zeros_like(x)
    flat, out = x.view(-1), gradient.view(-1)
    for i in range(flat.numel()):
        kept = float(flat[i])
        flat[i] = kept + step
        high = float((function(x) * cotangent).sum())
        flat[i] = kept - step
        low = float((function(x) * cotangent).sum())
        flat[i] = kept
        out[i] = (high - low) / (2 * step)
    return gradient


@pytest.mark.parametrize("mode", ["outside", "inside"])
def test_F4(mode: str, device: str) -> None:
    """The eps of the RMS is the same in the backward: eps = 1e-2 against streams of 0.1."""
    tensors = tensors_of("proj_rms_compute_h", Shape((2,), 2, 4), torch.float32, device)
    options = {"n": 2, "eps": 1e-2, "rms_eps_mode": mode}
    x = (0.1 * tensors["x"]).requires_grad_()
    h_res = fused_proj_rms_compute_h(**{**tensors, "x": x}, **options)[2]
    cotangent = randn(*h_res.shape, device=device)
    (gradient,) = torch.autograd.grad(h_res, x, cotangent)
    double = {k: t.cpu().double() for k, t in tensors.items()}

    def exact(values: Tensor) -> Tensor:
        return transcription.fused_proj_rms_compute_h(**{**double, "x": values}, **options)[2]

    expected = finite_difference(exact, x.detach().cpu().double(), cotangent.cpu().double(), 1e-5)
    assert_near(gradient, expected, 4 * projection_error(8))


def test_F5(device: str) -> None:
    """One default eps, 1e-6, whoever computes: it shows at streams of 1e-4."""
    tensors = tensors_of("proj_rms_compute_h", Shape((2,), 2, 8), torch.float32, device)
    tensors["x"] = torch.full((2, 16), 1e-4, device=device)
    found = fused_proj_rms_compute_h(**tensors, n=2)
    double = {k: t.cpu().double() for k, t in tensors.items()}
    exact = transcription.fused_proj_rms_compute_h(**double, n=2, eps=1e-6, compute_h_eps=1e-6)
    for actual, expected in zip(found, exact, strict=True):
        assert_near(actual, expected, projection_error(16))


def test_F6(device: str) -> None:
    """Where the eps goes is a named argument: 1/(1e-4 + 1e-6) is 0.99e4, rsqrt(1e-8 + 1e-6) is 995."""
    n, width = 2, 4
    size = n * n + 2 * n
    x = torch.full((1, n * width), 1e-4, device=device)
    weight = torch.zeros(size, n * width, device=device)
    weight[2 * n :, 0] = 1e4  # the first logit of h_res is then u itself
    one = torch.ones(1, device=device)
    for mode, u in (("outside", 1.0 / (1e-4 + 1e-6)), ("inside", (1e-8 + 1e-6) ** -0.5)):
        h_res = fused_proj_rms_compute_h(
            x, weight, one, one, one, torch.zeros(size, device=device), n, rms_eps_mode=mode
        )[2]
        assert float(h_res[0, 0]) == pytest.approx(u, rel=1e-4)


@pytest.mark.parametrize("variant", ["softmax", "paper"])
def test_F7(variant: str, device: str) -> None:
    """With an eps that is not tiny the gradient is still that of what the forward does."""
    logits = randn(1, 4, 4, device=device).requires_grad_()
    out = fused_sinkhorn(logits, 20, 1e-2, variant=variant)
    cotangent = randn(1, 4, 4, seed=1, device=device)
    (gradient,) = torch.autograd.grad(out, logits, cotangent)
    expected = finite_difference(
        lambda values: transcription.fused_sinkhorn(values, 20, 1e-2, variant=variant),
        logits.detach().cpu().double(),
        cotangent.cpu().double(),
        1e-5,
    )
    assert_near(gradient, expected, 1e-5)


@pytest.mark.parametrize("variant", ["softmax", "paper"])
def test_F8(variant: str, device: str) -> None:
    """Logits of 100: no overflow, and columns that sum to one (a column of small entries only as far as eps lets it)."""
    logits = torch.zeros(1, 4, 4, device=device)
    logits[..., 0] = 100.0
    out = fused_sinkhorn(logits, 20, variant=variant)
    exact = transcription.fused_sinkhorn(logits.cpu().double(), 20, variant=variant)
    assert bool(torch.isfinite(out).all())
    assert_near(out, exact, 1e-5)
    per_row = torch.zeros(1, 4, 4, device=device)
    per_row[0, range(4), [1, 2, 3, 0]] = 100.0
    out = fused_sinkhorn(per_row, 20, variant=variant)
    assert (out.sum(-1) - 1).abs().max() < 1e-4
    assert (out.sum(-2) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("variant", ["softmax", "paper"])
def test_F9(variant: str, device: str) -> None:
    """NaN exactly where the written formula gives NaN; other tokens keep their bits."""
    rows = {
        "NaN": [NAN, 0.0, 1.0],
        "+inf": [INF, 0.0, 1.0],
        "-inf": [-INF, 0.0, 1.0],
        "all -inf": [-INF] * 3,
        "-0 and subnormal": [-0.0, 0.0, 1e-45],
    }
    clean = randn(3, 3, 3, device=device)
    for name, row in rows.items():
        logits = clean.clone()
        logits[1, 0] = torch.tensor(row, device=device)
        out = fused_sinkhorn(logits, 20, variant=variant)
        exact = transcription.fused_sinkhorn(logits.cpu().double(), 20, variant=variant)
        assert torch.equal(out.cpu().isnan(), exact.isnan()), name
        untouched = fused_sinkhorn(clean, 20, variant=variant)
        assert_bit_equal(out[0], untouched[0], name)
        assert_bit_equal(out[2], untouched[2], name)


def test_F10(device: str) -> None:
    """Logits that saturate give a gradient of about zero in fp64 too; no more is asked than that."""
    logits = torch.full((1, 4, 4), -8.0 / 0.05, device=device)
    logits[0].fill_diagonal_(0.0)
    logits = logits.requires_grad_()
    out = fused_sinkhorn(logits, 20)
    cotangent = randn(1, 4, 4, device=device)
    (gradient,) = torch.autograd.grad(out, logits, cotangent)
    double = logits.detach().cpu().double().requires_grad_()
    exact = transcription.fused_sinkhorn(double, 20)
    (expected,) = torch.autograd.grad(exact, double, cotangent.cpu().double())
    assert_near(out, exact.detach(), 1e-5)
    assert expected.abs().max() < 1e-4
    assert (gradient.cpu().double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("variant", "scale"), [("softmax", 50.0), ("paper", 10.0)])
def test_F12(variant: str, scale: float, device: str) -> None:
    """A thousand sets of wild logits: no NaN in result or gradient (paper variant: a spread of at most 80)."""
    logits = scale * randn(1000, 4, 4, device=device)
    if variant == "paper":
        logits = logits.clamp(-40.0, 40.0)
    logits = logits.requires_grad_()
    out = fused_sinkhorn(logits, 20, variant=variant)
    (gradient,) = torch.autograd.grad(out, logits, randn(1000, 4, 4, seed=1, device=device))
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(gradient).all())


def test_F13(device: str) -> None:
    """Fused equals the fp64 iteration; columns, normalised last, sum to one within 1e-5."""
    logits = 3.0 * randn(200, 4, 4, device=device)
    out = fused_sinkhorn(logits, 20)
    assert_near(out, transcription.fused_sinkhorn(logits.cpu().double(), 20), 1e-5)
    assert (out.double().sum(-2) - 1).abs().max() < 1e-5


def test_F14(device: str) -> None:
    """A hundred backward passes over one input: all finite, all with the same bits."""
    logits = randn(64, 4, 4, device=device).requires_grad_()
    cotangent = randn(64, 4, 4, seed=1, device=device)
    first = None
    for _ in range(100):
        (gradient,) = torch.autograd.grad(fused_sinkhorn(logits, 20), logits, cotangent)
        if first is None:
            first = gradient
        assert_bit_equal(gradient, first)
    assert first is not None
    assert bool(torch.isfinite(first).all())


@pytest.mark.parametrize("variant", ["softmax", "paper"])
@pytest.mark.parametrize("num_iterations", [1, 2, 20])
def test_F15(num_iterations: int, variant: str, device: str, dtypes: list[torch.dtype]) -> None:
    """The gradient is that of the iterations that ran, however far from converged they stopped."""
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    logits = (8.0 * randn(20, 4, 4, dtype=dtype, device=device)).requires_grad_()
    cotangent = randn(20, 4, 4, seed=1, dtype=dtype, device=device)
    (gradient,) = torch.autograd.grad(
        fused_sinkhorn(logits, num_iterations, variant=variant), logits, cotangent
    )
    double = logits.detach().cpu().double().requires_grad_()
    exact = transcription.fused_sinkhorn(double, num_iterations, variant=variant)
    (expected,) = torch.autograd.grad(exact, double, cotangent.cpu().double())
    assert_near(gradient, expected, 1e-4)


# Precision


def test_F16(device: str) -> None:
    """Mixes from bf16 streams are fp32 and within 4e-6 of fp64, and so are the gradients of what makes them."""
    tensors = tensors_of("mhc_pre", Shape((16,), 4, 128), torch.bfloat16, device)
    _, h_post, h_res, _ = mhc_pre(**tensors)
    exact = transcription.mhc_pre(**{k: t.cpu().double() for k, t in tensors.items()})
    for actual, expected in ((h_post, exact[1]), (h_res, exact[2])):
        assert actual.dtype is torch.float32
        assert (actual.cpu().double() - expected).abs().max() <= 4e-6
    bias = tensors["bias"].requires_grad_()
    (gradient,) = torch.autograd.grad(mhc_pre(**tensors)[1].sum(), bias)
    assert gradient.dtype is torch.float32


def test_F17(device: str) -> None:
    """bf16 logits: the gradient is the fp64 one, rounded once to bf16 (one unit in the last place is allowed)."""
    logits = (
        (8.0 * torch.rand(200, 4, 4, generator=torch.Generator().manual_seed(0)) - 4.0).bfloat16().to(device)
    )
    cotangent = randn(200, 4, 4, dtype=torch.bfloat16, device=device)
    leaf = logits.requires_grad_()
    (gradient,) = torch.autograd.grad(fused_sinkhorn(leaf, 20), leaf, cotangent)
    double = logits.detach().cpu().double().requires_grad_()
    (exact,) = torch.autograd.grad(transcription.fused_sinkhorn(double, 20), double, cotangent.cpu().double())
    large = exact.abs() > 1e-3 * exact.abs().amax((-1, -2), keepdim=True)
    # A unit in the last place of bf16 is at most 2^-7 of the value.
    off = (gradient.cpu().double() - exact).abs() / exact.abs()
    assert float(off[large].max()) <= 2.0**-7


def test_F18(device: str) -> None:
    """No size class has worse sums than its neighbours."""
    errors = []
    for width in (1023, 1024, 1025, 4095, 4096, 4097):
        tensors = tensors_of("proj_rms_compute_h", Shape((8,), 1, width), torch.bfloat16, device)
        found = fused_proj_rms_compute_h(**tensors, n=1)[2]
        exact = transcription.fused_proj_rms_compute_h(
            **{k: t.cpu().double() for k, t in tensors.items()}, n=1
        )[2]
        errors.append(float((found.cpu().double() - exact).abs().max() / exact.abs().max()))
    assert max(errors) <= projection_error(4097)


def product_of_ones(x_dtype: torch.dtype, device: str) -> float:
    """``h_res`` of one token of ones against a weight of 1 + 2^-12, K = 16: the product alone."""
    one, n = torch.ones(1, device=device), 4
    size = n * n + 2 * n
    h_res = fused_proj_rms_compute_h(
        torch.ones(1, 16, dtype=x_dtype, device=device),
        torch.full((size, 16), 1.0 + 2.0**-12, device=device),
        one,
        one,
        one,
        torch.zeros(size, device=device),
        n,
        eps=1e-12,
    )[2]
    return float(h_res[0, 0])


def test_F19(device: str) -> None:
    """bf16 streams against an fp32 weight: the product keeps the weight's last bits."""
    assert product_of_ones(torch.bfloat16, device) == pytest.approx(16.0 + 2.0**-8, abs=4e-6)


def test_F20(device: str) -> None:
    """fp32 streams: no tf32 unless it is named."""
    assert product_of_ones(torch.float32, device) == pytest.approx(16.0 + 2.0**-8, abs=4e-6)


def stored_sums(first: float, second: float, device: str) -> dict[str, float]:
    """``first + second`` as every operation that sums streams stores it in bf16."""
    a, b = (torch.full((1, 1), v, dtype=torch.bfloat16, device=device) for v in (first, second))
    streams = torch.stack((a, b), 1)
    ones = torch.ones(1, 2, device=device)
    mixing = torch.ones(1, 2, 2, device=device)
    leaf = torch.zeros(1, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(input_expand(leaf, 2), leaf, streams)
    x = streams.clone().requires_grad_()
    zeros = torch.zeros(1, 1, dtype=torch.bfloat16, device=device)
    post = fused_h_post_bda(mixing, x, torch.zeros_like(ones), zeros)
    (through,) = torch.autograd.grad(post, x, streams)
    return {
        "fused_add_3": float(fused_add_3(a, b, torch.zeros_like(a))),
        "aggregate": float(fused_h_aggregate(streams, ones)),
        "post": float(fused_h_post_bda(mixing, streams, torch.zeros_like(ones), zeros)[0, 0, 0]),
        "branch": float(fused_h_post_bda(0 * mixing, streams, ones, a, b.view(1))[0, 0, 0]),
        "contract": float(output_contract(2 * streams)),
        "gradient of expand": float(gradient),
        "gradient of post": float(through[0, 0, 0]),
    }


def test_F21(device: str) -> None:
    """Stored to nearest, not truncated: 1 + 3*2^-9 is 1.0078125 in bf16."""
    for name, value in stored_sums(1.0, 3 * 2.0**-9, device).items():
        assert value == 1.0078125, name


def test_F22(device: str) -> None:
    """Ties go to even: 1.01953125 is 1.015625 in bf16."""
    for name, value in stored_sums(1.0, 1.01953125 - 1.0, device).items():
        assert value == 1.015625, name


def test_F23(device: str) -> None:
    """A module called with bf16 streams keeps its fp32 parameters as they are, to the last bit."""
    two_pass = HyperConnection(4, 4, device=device, alpha_init=1.0)
    single = SinglePassHyperConnection(4, 4, device=device, alpha_init=1.0)
    streams = torch.ones(1, 4, 4, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        for weight, bias in ((two_pass.weight, two_pass.bias), (single.phi, single.bias)):
            weight.fill_(1.0 + 2.0**-12)
            bias.fill_(-16.0)
        _, state = two_pass.pre(streams)
        _, _, mixes = single.entry(streams[:, 0])
    expected = 2.0 * torch.sigmoid(torch.tensor(2.0**-8 - 16.0 * 5e-7, dtype=torch.float64))
    for post in (state.h_post, mixes.post):
        assert post.dtype is torch.float32
        assert float(post[0, 0]) == pytest.approx(float(expected), abs=4e-6)


def test_F24(device: str, dtypes: list[torch.dtype]) -> None:
    """Bias and dropout: result in the residual's dtype, each gradient in that of its input, for every pair."""
    shape = Shape((3,), 2, 4)
    made = tensors_of("h_post_bda", shape, torch.float32, device)
    for first, second in itertools.product(dtypes, dtypes):
        for dropout_p in (0.0, 0.5):
            leaves = {
                k: t.to(first if k in ("original_residual", "x") else second).requires_grad_()
                for k, t in made.items()
            }
            out = fused_h_post_bda(**leaves, dropout_p=dropout_p, seed=1)
            assert out.dtype is first
            gradients = torch.autograd.grad(out.sum(), list(leaves.values()))
            assert [g.dtype for g in gradients] == [t.dtype for t in leaves.values()]


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_F25(name: str, device: str) -> None:
    """Checkpoint on or off: results and gradients bit-equal."""
    op, shape = CATALOGUE[name], Shape((4,), 3, 8)
    options = op.options(op.modes[0], shape)
    tensors = make_tensors(name, shape, torch.bfloat16, device=device)
    results = evaluate(op.function, op.results, tensors, options).results
    cotangents = make_cotangents(results)
    plain = evaluate(op.function, op.results, tensors, options, cotangents)

    def checkpointed(**leaves: Tensor | None) -> Any:
        return checkpoint(op.function, use_reentrant=False, **leaves, **options)

    again = evaluate(checkpointed, op.results, tensors, {}, cotangents)
    for key, value in again.results.items():
        assert_bit_equal(value, plain.results[key], key)
    for key, gradient in again.gradients.items():
        expected = plain.gradients[key]
        assert gradient is not None
        assert expected is not None
        assert_bit_equal(gradient, expected, key)


def test_F26(device: str) -> None:
    """Divisions are rounded correctly: a matrix of equal logits shows 1/n, and then 1/(n * fp32(1/n))."""
    for n in (3, 5, 6, 7, 9, 10, 11, 13):
        out = fused_sinkhorn(torch.zeros(1, n, n, device=device), 1, variant="paper")
        quotient = (torch.tensor(1.0, dtype=torch.float64) / n).float()
        column = torch.zeros((), dtype=torch.float32)
        for _ in range(n):
            column = column + quotient
        expected = (quotient.double() / column.double()).float()
        assert torch.equal(out.cpu(), expected.expand(1, n, n)), n


def test_F27(device: str) -> None:
    """Many tokens: the largest error counts, not the mean."""
    shape = Shape((8192,), 4, 128)
    tensors = tensors_of("h_post_bda", shape, torch.bfloat16, device)
    found = fused_h_post_bda(**tensors)
    exact = transcription.fused_h_post_bda(**{k: t.cpu().double() for k, t in tensors.items()})
    off = (found.cpu().double() - exact).abs()
    assert bool((off <= 2.0**-8 * exact.abs() + 1e-5).all())


def test_F28(device: str) -> None:
    """fp32 sums over K = 28672: 1e-5 is enough, and two runs have the same bits."""
    op, shape = CATALOGUE["proj_rms_compute_h"], Shape((4,), 4, 7168)
    tensors = make_tensors(op.name, shape, torch.float32, device=device)
    runs = []
    for _ in range(2):
        results = evaluate(op.function, op.results, tensors, {"n": 4}).results
        runs.append(evaluate(op.function, op.results, tensors, {"n": 4}, make_cotangents(results)))
    for key, value in runs[0].results.items():
        assert_bit_equal(value, runs[1].results[key], key)
    for key, gradient in runs[0].gradients.items():
        other = runs[1].gradients[key]
        assert gradient is not None
        assert other is not None
        assert_bit_equal(gradient, other, key)
    exact = transcription.fused_proj_rms_compute_h(
        **{k: t.cpu().double() for k, t in tensors.items() if t is not None}, n=4
    )
    assert_near(runs[0].results["h_res"], exact[2], projection_error(shape.width))


# Shapes, strides, indices


@pytest.mark.parametrize("shape", [Shape((112,), 4, 512), Shape((21,), 2, 256)], ids=str)
@pytest.mark.parametrize("name", ["h_aggregate", "h_post_bda", "proj_rms_compute_h", "mega_mhc"])
def test_F29(name: str, shape: Shape, backend: str, device: str) -> None:
    """T below 128 and no power of two, forward and backward."""
    assert_parity(name, shape, backend, device)


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_F31(name: str, device: str) -> None:
    """No tokens: empty results, and zeros for the gradients of parameters."""
    op, shape = CATALOGUE[name], Shape((0,), 4, 8)
    tensors = tensors_of(name, shape, torch.bfloat16, device)
    leaves = {k: t.requires_grad_() for k, t in tensors.items()}
    out = op.function(**leaves, **op.options(op.modes[0], shape))
    outs = out if isinstance(out, tuple) else (out,)
    for t in outs:
        assert t.shape[0] == 0
    for key, gradient in zip(
        leaves,
        torch.autograd.grad(outs, list(leaves.values()), [torch.ones_like(t) for t in outs]),
        strict=True,
    ):
        assert gradient.shape == leaves[key].shape
        assert not gradient.any(), key


@pytest.mark.parametrize("name", ["h_aggregate", "h_post_bda", "proj_rms_compute_h", "mhc_pre", "mega_mhc"])
def test_F33(name: str, backend: str, device: str) -> None:
    """C = 7168 is no special case."""
    assert_parity(name, Shape((2,), 4, 7168), backend, device)


@pytest.mark.parametrize("name", ["h_aggregate", "proj_rms_compute_h"])
def test_F34(name: str, device: str) -> None:
    """Two tokens 2^31 elements apart: offsets have 64 bits. (4 GiB of address space; only the two tokens are touched.)"""
    op, shape, stride = CATALOGUE[name], Shape((2,), 2, 8), 2**31
    tensors = tensors_of(name, shape, torch.bfloat16, device)
    x = tensors["x"]
    buffer = torch.empty(stride + shape.width, dtype=torch.bfloat16, device=device)
    strides = (stride, 8, 1) if name == "h_aggregate" else (stride, 1)
    far = buffer.as_strided(x.shape, strides)
    far.copy_(x)
    options = op.options(op.modes[0], shape)
    cotangents = make_cotangents(evaluate(op.function, op.results, tensors, options).results)
    near_run, far_run = (
        evaluate(op.function, op.results, {**tensors, "x": given}, options, cotangents) for given in (x, far)
    )
    for key, value in far_run.results.items():
        assert_near(value, near_run.results[key], projection_error(shape.width), key)
    gradient, expected = far_run.gradients["x"], near_run.gradients["x"]
    assert gradient is not None
    assert expected is not None
    assert gradient.is_contiguous()
    assert_near(gradient, expected, projection_error(shape.width))


@pytest.mark.parametrize("tokens", [1, 3])
def test_F35(tokens: int, device: str) -> None:
    """Tokens cut from a larger buffer, eight rows apart, with NaN between and around them."""
    n, width = 4, 7168
    buffer = torch.full((8 * tokens + 1, n, width), NAN, dtype=torch.bfloat16, device=device)
    x = buffer[1::8][:tokens]
    x.copy_(randn(tokens, n, width, dtype=torch.bfloat16, device=device))
    assert x.stride() == (8 * n * width, width, 1)
    h_pre = torch.rand(tokens, n, generator=torch.Generator().manual_seed(0)).to(device)
    assert_bit_equal(fused_h_aggregate(x, h_pre), fused_h_aggregate(x.contiguous(), h_pre))
    mixing = torch.softmax(randn(tokens, n, n, device=device), -1)
    branch = randn(tokens, width, dtype=torch.bfloat16, device=device)
    assert_bit_equal(
        fused_h_post_bda(mixing, x, h_pre, branch), fused_h_post_bda(mixing, x.contiguous(), h_pre, branch)
    )


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_F36(name: str, device: str) -> None:
    """[B, T, n, C] and [B*T, n, C]: bit-equal."""
    op = CATALOGUE[name]
    flat = make_tensors(name, Shape((6,), 4, 8), torch.bfloat16, device=device)
    folded = {k: t if t is None or k in op.shared else t.view(2, 3, *t.shape[1:]) for k, t in flat.items()}
    options = op.options(op.modes[0], Shape((6,), 4, 8))
    expected = evaluate(op.function, op.results, flat, options).results
    for key, value in evaluate(op.function, op.results, folded, options).results.items():
        assert value.shape[:2] == (2, 3)
        assert_bit_equal(value.flatten(0, 1), expected[key], key)


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_F37(name: str, backend: str, device: str) -> None:
    """One token past a tile: the tail is written."""
    for tokens in (17, 33, 65, 129):
        assert_parity(name, Shape((tokens,), 4, 8), backend, device, torch.float32)


def test_F38(backend: str, device: str) -> None:
    """n = 5 is right, n = 17 a clear error."""
    for name in CATALOGUE:
        assert_parity(name, Shape((3,), 5, 8), backend, device)
    with pytest.raises(InputError, match="1 to 16 streams, got 17"):
        fused_h_aggregate(torch.zeros(1, 17, 4, device=device), torch.zeros(1, 17, device=device))


def test_F41(backend: str, device: str) -> None:
    """C = 1280, n = 2: neither has to be 4096 or 4."""
    for name in CATALOGUE:
        assert_parity(name, Shape((3,), 2, 1280), backend, device)


# Scheduling, tuning, graphs, dispatch


def test_F45(device: str) -> None:
    """64 different T: two compilations, one for the first and one for any other."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fused_h_aggregate, fullgraph=True, backend=counter)
    for tokens in range(2, 66):
        x = randn(tokens, 4, 8, device=device)
        compiled(x, torch.ones(tokens, 4, device=device))
    assert counter.frame_count <= 2


def test_F49(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of GPU in one host: each device has its own facts."""
    kinds = {
        0: SimpleNamespace(
            name="first", major=9, minor=0, multi_processor_count=132, L2_cache_size=1, total_memory=1
        ),
        1: SimpleNamespace(
            name="second", major=8, minor=9, multi_processor_count=142, L2_cache_size=2, total_memory=2
        ),
    }
    monkeypatch.setattr(torch.cuda, "get_device_properties", kinds.__getitem__)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    device_module._query.cache_clear()
    first, second = (device_module.device_info(f"cuda:{i}") for i in (0, 1))
    assert (first.arch, first.sm_count) == ("sm_90", 132)
    assert (second.arch, second.sm_count) == ("sm_89", 142)
    assert device_module.device_info("cuda") == second, "the current device, when none is named"
    device_module._query.cache_clear()


def test_F54(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry of every backend runs here, or says that it cannot."""
    monkeypatch.delenv("MHC_FORCE_BACKEND", raising=False)
    shape = Shape((2,), 2, 4)
    for asked in ("native", "triton", "cutile"):
        able = {
            row.op: row.chosen == asked for row in backend_status(asked, device) if row.direction == "fwd"
        }
        for name, op in CATALOGUE.items():
            if not op.has_backend:
                continue
            tensors = make_tensors(name, shape, torch.float32, device=device)
            arguments = {**tensors, **op.options(op.modes[0], shape), "backend": asked}
            if able[name]:
                op.function(**arguments)
            else:
                with pytest.raises(BackendError, match=asked):
                    op.function(**arguments)


@pytest.mark.parametrize("name", ["h_aggregate", "h_post_bda", "proj_rms_compute_h", "mega_mhc"])
def test_F56(name: str, native: bool, device: str) -> None:
    """Token 0 alone and among 4096: bit-equal; what is behind native's matrix product within its bound."""
    op, among = CATALOGUE[name], Shape((4096,), 4, 16)
    tensors = make_tensors(name, among, torch.bfloat16, device=device)
    one = {k: t if t is None or k in op.shared else t[:1] for k, t in tensors.items()}
    options = op.options(op.modes[0], among)
    together = evaluate(op.function, op.results, tensors, options).results
    for key, value in evaluate(op.function, op.results, one, options).results.items():
        if native and (key.startswith("next_") or key in ("h_pre", "h_post", "h_res")):
            assert_near(value, together[key][:1], 2 * projection_error(among.width), key)
        else:
            assert_bit_equal(value, together[key][:1], key)


def test_F57(device: str) -> None:
    """A whole boundary, two pass and single pass, compiles to one graph forward and backward, for two T."""
    torch._dynamo.reset()
    two_pass, single = HyperConnection(8, 4, device=device), SinglePassHyperConnection(8, 4, device=device)

    def boundary(x: Tensor, y: Tensor) -> Tensor:
        streams = two_pass(x, torch.tanh)
        block_input, residual, mixes = single.entry(y)
        block_input, residual, mixes = single(torch.tanh(block_input), residual, mixes)
        return streams.sum() + single.exit(block_input, residual, mixes).sum()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(boundary, fullgraph=True, backend=counter)
    parameters = [*two_pass.parameters(), *single.parameters()]
    for tokens in (5, 9, 12):
        x, y = randn(tokens, 4, 8, device=device), randn(tokens, 8, seed=1, device=device)
        expected = torch.autograd.grad(boundary(x, y), parameters)
        for actual, other in zip(torch.autograd.grad(compiled(x, y), parameters), expected, strict=True):
            assert_bit_equal(actual, other)
    assert counter.frame_count <= 2


# Autograd


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_F58(name: str, device: str) -> None:
    """Every subset of frozen inputs: None for them, a gradient for the others."""
    op, shape = CATALOGUE[name], Shape((2,), 2, 3)
    tensors = tensors_of(name, shape, torch.float32, device)
    options = op.options(op.modes[0], shape)
    for live in itertools.product((False, True), repeat=len(tensors)):
        if not any(live):
            continue
        leaves = {k: t.detach().requires_grad_(on) for (k, t), on in zip(tensors.items(), live, strict=True)}
        out = op.function(**leaves, **options)
        outs = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
        torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])
        assert [t.grad is not None for t in leaves.values()] == list(live)


@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name, op in CATALOGUE.items() for mode in op.modes], ids=str
)
def test_F59(name: str, mode: Mode, device: str) -> None:
    """One gradient per argument, on every entry point (autograd counts them)."""
    op, shape = CATALOGUE[name], Shape((2,), 3, 4)
    options = op.options(mode, shape)
    tensors = make_tensors(name, shape, torch.float32, mode=mode, device=device)
    results = evaluate(op.function, op.results, tensors, options).results
    gradients = evaluate(op.function, op.results, tensors, options, make_cotangents(results)).gradients
    for key, gradient in gradients.items():
        given = tensors[key]
        assert gradient is not None, key
        assert given is not None
        assert gradient.shape == given.shape


def test_F60(device: str) -> None:
    """Checkpoint with arguments that are no tensors: they get None."""
    tensors = tensors_of("proj_rms_compute_h", Shape((3,), 2, 4), torch.float32, device)
    leaves = [t.requires_grad_() for t in tensors.values()]
    for reentrant in (False, True):
        out = checkpoint(fused_proj_rms_compute_h, *leaves, 2, 1e-6, 1e-6, "auto", use_reentrant=reentrant)
        torch.autograd.backward(out, [torch.ones_like(t) for t in out])
        for t in leaves:
            assert t.grad is not None
            t.grad = None


def test_F61(device: str) -> None:
    """No buffer is shared between operations: gradients of one path and then of the rest add up to the whole, in either
    order."""
    tensors = tensors_of("mhc_pre", Shape((4,), 4, 8), torch.float32, device)
    x = tensors["x"].requires_grad_()
    branch = randn(4, 8, seed=3, device=device)

    def run() -> tuple[Tensor, Tensor]:
        layer_input, h_post, h_res, passed = mhc_pre(**tensors)
        return layer_input.square().sum(), fused_h_post_bda(h_res, passed, h_post, branch).square().sum()

    first, rest = run()
    (whole,) = torch.autograd.grad(first + rest, x)
    for order in ((0, 1), (1, 0)):
        paths = run()
        total = torch.zeros_like(x)
        for index in order:
            (part,) = torch.autograd.grad(paths[index], x, retain_graph=True)
            total += part
        torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)


def test_F63(device: str) -> None:
    """The streams that a site hands out have the output of the sublayer before it in them: they are what the unfused
    update gives."""
    tensors = tensors_of("mega_mhc", Shape((5,), 4, 16), torch.bfloat16, device)
    new_residual = mega_mhc(**tensors)[0]
    unfused = fused_h_post_bda(
        tensors["previous_residual_mix"],
        tensors["residual"],
        tensors["previous_post_mix"],
        tensors["previous_output"],
    )
    assert_near(new_residual, unfused.double(), 2.0**-8)
    assert not torch.equal(new_residual, tensors["residual"])


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_F64(name: str, device: str) -> None:
    """A gradient of a gradient raises."""
    op, shape = CATALOGUE[name], Shape((2,), 2, 4)
    leaves = {k: t.requires_grad_() for k, t in tensors_of(name, shape, torch.float32, device).items()}
    out = op.function(**leaves, **op.options(op.modes[0], shape))
    outs = out if isinstance(out, tuple) else (out,)
    cotangents = [torch.ones_like(t).requires_grad_() for t in outs]
    gradients = torch.autograd.grad(outs, list(leaves.values()), cotangents, create_graph=True)
    with pytest.raises(RuntimeError, match="second-order"):
        torch.autograd.grad([g.sum() for g in gradients], cotangents)
