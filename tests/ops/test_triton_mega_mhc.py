"""The Triton kernels of the single pass in the interpreter, against native on the same inputs.

The update, the collapse and everything up to the norm round at the same places in the same order: bits are equal. The
projection, the norms and the dot products add in another order and are held to fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_mhc.ops.h_aggregate import _triton as aggregate
from fused_mhc.ops.h_post_bda import _triton as post
from fused_mhc.ops.mega_mhc import _triton, config
from fused_mhc.ops.mega_mhc import native as native_backend
from fused_mhc.testing.compare import bit_equal

triton_backend: Any = _triton
native: Any = native_backend

EPS = (1e-6, 1e-6, 20)
STATE = ("previous_output", "residual", "pre", "post", "mixing")
SITE = ("phi", "alpha", "bias", "norm_weight")
#: (tokens, n, C, dtype): odd n and widths, a tail of every tile, no tokens. (With one stream the gradient of the pre-mix
#: cancels: test_parity has a bound for it.)
SHAPES = [
    (0, 4, 8, torch.float32),
    (2, 5, 24, torch.float32),
    (3, 2, 96, torch.float16),
    (35, 4, 130, torch.bfloat16),
    (2, 8, 33, torch.bfloat16),
]
#: For the forward: more than one block of columns, more tokens than one tile.
MORE_SHAPES = [*SHAPES, (2, 3, 1100, torch.float32), (66, 4, 64, torch.bfloat16)]
ShapeCase = tuple[int, int, int, torch.dtype]


def given(shape: ShapeCase, parameter_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    tokens, n, width, dtype = shape
    size = n * n + 2 * n
    return {
        "previous_output": torch.randn(tokens, width).to(dtype),
        "residual": torch.randn(tokens, n, width).to(dtype),
        "pre": torch.rand(tokens, n),
        "post": 2 * torch.rand(tokens, n),
        "mixing": torch.softmax(torch.randn(tokens, n, n), -1),
        "phi": (torch.randn(size, n * width) * (n * width) ** -0.5).to(parameter_dtype),
        "alpha": torch.tensor([0.5, 0.7, 0.9]),
        "bias": 0.5 * torch.randn(size),
        "norm_weight": (1 + 0.1 * torch.randn(width)).to(parameter_dtype),
    }


def near(actual: Tensor, exact: Tensor, relative: float = 4e-6) -> None:
    """Every element within ``relative`` of the largest, and a unit in the last place of its dtype."""
    assert actual.shape == exact.shape
    if exact.numel():
        allowed = relative * exact.abs().max() + exact.abs() * torch.finfo(actual.dtype).eps
        assert ((actual.double() - exact).abs() <= allowed).all()


def double(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


def saved(results: Sequence[Tensor]) -> list[Tensor]:
    """What the backward gets of the forward's results."""
    new_residual, pre, post_mix, res, _, proj, u, rstd = results
    return [new_residual, proj, u, rstd, pre, post_mix, res]


def backward(
    name: str, inputs: Sequence[Any], results: Sequence[Tensor], grads: Any, needs: list[bool]
) -> Any:
    """Triton's gradients, and those of native in fp64 that read the same rounded streams."""
    found = getattr(triton_backend, name)(*grads, *inputs, *saved(results), *EPS, needs)
    exact = getattr(native, name)(*double(grads), *double(inputs), *double(saved(results)), *EPS, needs)
    return found, exact


@pytest.mark.parametrize("shape", MORE_SHAPES, ids=str)
def test_forward(shape: ShapeCase) -> None:
    tensors = given(shape)
    found = triton_backend.mega_mhc_fwd(*tensors.values(), *EPS)
    expected = native.mega_mhc_fwd(*tensors.values(), *EPS)
    assert bit_equal(found[0], expected[0])
    for actual, other in zip(found[1:], expected[1:], strict=True):
        near(actual, other.double())
    pieces = post.h_post_bda_fwd(
        tensors["mixing"], tensors["residual"], tensors["post"], tensors["previous_output"], None, 0.0, None
    )
    assert bit_equal(found[0], pieces)
    one_hot = torch.zeros_like(tensors["pre"])
    one_hot[:, 0] = 1.0
    no_norm = triton_backend.mega_mhc_exit_fwd(*[tensors[k] for k in STATE], None, 1e-6)
    mixed = aggregate.h_aggregate_fwd(pieces.float(), tensors["pre"])
    near(no_norm[0], (mixed * no_norm[1]).double(), 1e-7)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(shape: ShapeCase) -> None:
    tensors = given(shape)
    results = native.mega_mhc_fwd(*tensors.values(), *EPS)
    grads = [torch.randn_like(t) for t in results[:5]]
    found, exact = backward("mega_mhc_bwd", list(tensors.values()), results, grads, [True] * 9)
    for gradient, reference, t in zip(found, exact, tensors.values(), strict=True):
        assert gradient.dtype is t.dtype
        near(gradient, reference, 2e-5)


@pytest.mark.parametrize("alone", range(5))
def test_gradient_of_one_result(alone: int) -> None:
    """Gradients of unused results are None, and count as zeros."""
    tensors = given((5, 3, 72, torch.float32))
    results = native.mega_mhc_fwd(*tensors.values(), *EPS)
    grads = [torch.randn_like(t) if k == alone else None for k, t in enumerate(results[:5])]
    found, exact = backward("mega_mhc_bwd", list(tensors.values()), results, grads, [True] * 9)
    for gradient, reference in zip(found, exact, strict=True):
        near(gradient, reference, 2e-5)


@pytest.mark.parametrize("needed", range(9))
def test_one_needed_input(needed: int) -> None:
    """A frozen input's gradient is not made; the others have the bits they have together."""
    tensors = given((4, 4, 40, torch.bfloat16))
    results = native.mega_mhc_fwd(*tensors.values(), *EPS)
    grads = [torch.randn_like(t) for t in results[:5]]
    args = (*grads, *tensors.values(), *saved(results), *EPS)
    every = triton_backend.mega_mhc_bwd(*args, [True] * 9)
    (one,) = triton_backend.mega_mhc_bwd(*args, [k == needed for k in range(9)])
    assert bit_equal(one, every[needed])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_entry_and_exit(shape: ShapeCase) -> None:
    tensors = given(shape)
    n = shape[1]
    inputs = [tensors["previous_output"], *[tensors[k] for k in SITE]]
    found = triton_backend.mega_mhc_entry_fwd(inputs[0], n, *inputs[1:], *EPS)
    expected = native.mega_mhc_entry_fwd(inputs[0], n, *inputs[1:], *EPS)
    assert bit_equal(found[0], expected[0])
    for actual, other in zip(found[1:], expected[1:], strict=True):
        near(actual, other.double())
    grads = [torch.randn_like(t) for t in expected[:5]]
    for gradient, exact in zip(
        *backward("mega_mhc_entry_bwd", inputs, expected, grads, [True] * 5), strict=True
    ):
        near(gradient, exact, 2e-5)
    ends = [*[tensors[k] for k in STATE], tensors["norm_weight"]]
    out, rstd = triton_backend.mega_mhc_exit_fwd(*ends, 1e-6)
    native_out, native_rstd = native.mega_mhc_exit_fwd(*ends, 1e-6)
    near(out, native_out.double())
    near(rstd, native_rstd.double())
    found = triton_backend.mega_mhc_exit_bwd(grads[4], *ends, rstd, [True] * 6)
    for gradient, reference in zip(
        found, native.mega_mhc_exit_bwd(grads[4], *ends, native_rstd, [True] * 6), strict=True
    ):
        near(gradient, reference.double(), 2e-5)


@pytest.mark.parametrize("wide", [False, True])
def test_strides_and_leading_dimensions(wide: bool) -> None:
    """Rows of larger buffers, transposed mixes and several leading dimensions have the bits of contiguous ones."""
    tensors = given((6, 4, 72, torch.bfloat16), torch.bfloat16)
    strided = {k: t for k, t in tensors.items() if k in SITE}
    for name in STATE:
        t = tensors[name].unflatten(0, (2, 3))
        buffer = torch.full((*t.shape[:-1], t.shape[-1] * 2), float("nan"), dtype=t.dtype)
        strided[name] = buffer[..., ::2] if wide else buffer[..., : t.shape[-1]]
        strided[name].copy_(t)
    found = triton_backend.mega_mhc_fwd(*[strided[k] for k in (*STATE, *SITE)], *EPS)
    for actual, expected in zip(found, triton_backend.mega_mhc_fwd(*tensors.values(), *EPS), strict=True):
        assert bit_equal(actual.flatten(0, 1), expected)
    grads = [torch.randn_like(t) for t in found[:5]]
    args = [*[strided[k] for k in (*STATE, *SITE)], *saved(found), *EPS, [True] * 9]
    flat = [*tensors.values(), *(t.flatten(0, 1) for t in saved(found)), *EPS, [True] * 9]
    expected_grads = triton_backend.mega_mhc_bwd(*(g.flatten(0, 1) for g in grads), *flat)
    for actual, expected in zip(triton_backend.mega_mhc_bwd(*grads, *args), expected_grads, strict=True):
        assert bit_equal(actual.reshape(expected.shape), expected)


def test_tokens_alone_and_among_others() -> None:
    """F56: the bits of a token depend neither on T nor on its neighbours, on either side of every switch."""
    tensors = given((67, 4, 66, torch.bfloat16))
    found = triton_backend.mega_mhc_fwd(*tensors.values(), *EPS)
    grads = [torch.randn_like(t) for t in found[:5]]
    gradients = triton_backend.mega_mhc_bwd(*grads, *tensors.values(), *saved(found), *EPS, [True] * 9)
    token = slice(64, 65)
    one = [tensors[k][token] if k in STATE else tensors[k] for k in (*STATE, *SITE)]
    alone = triton_backend.mega_mhc_fwd(*one, *EPS)
    for actual, expected in zip(alone, found, strict=True):
        assert bit_equal(actual, expected[token])
    args = ([g[token] for g in grads], one, saved(alone))
    by_itself = triton_backend.mega_mhc_bwd(*args[0], *args[1], *args[2], *EPS, [True] * 9)
    for actual, expected in zip(by_itself[:5], gradients[:5], strict=True):
        assert bit_equal(actual, expected[token])


def test_mixed_that_no_register_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Very wide tokens make ``mixed`` twice; the bits are the same."""
    tensors = given((2, 2, 300, torch.float32))
    kept = triton_backend.mega_mhc_fwd(*tensors.values(), *EPS)
    chosen = config.heuristic(2, 300)
    monkeypatch.setattr(
        config, "heuristic", lambda n, width: type(chosen)(**{**chosen.__dict__, "keep": False})
    )
    for actual, expected in zip(triton_backend.mega_mhc_fwd(*tensors.values(), *EPS), kept, strict=True):
        assert bit_equal(actual, expected)


def test_exit_rows_that_no_register_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit's backward reads a very wide token twice; the bits are the same, those of the column sums too."""
    tensors = given((2 * config.EXIT_CHUNK + 3, 2, 300, torch.float32))
    state = [tensors[name] for name in STATE]
    weight = tensors["norm_weight"]
    out, rstd = triton_backend.mega_mhc_exit_fwd(*state, weight, 1e-6)
    grad = torch.randn_like(out)
    kept = triton_backend.mega_mhc_exit_bwd(grad, *state, weight, rstd, [True] * 6)
    chosen = config.exit_heuristic(2, 300, 4)
    assert chosen.keep
    monkeypatch.setattr(config, "exit_heuristic", lambda *_: config.ExitConfig(chosen.rows, False))
    again = triton_backend.mega_mhc_exit_bwd(grad, *state, weight, rstd, [True] * 6)
    assert len(again) == len(kept)
    for actual, expected in zip(again, kept, strict=True):
        assert bit_equal(actual, expected)
