"""`mhc_pre` on the device, the backward above all: what flows into the streams' gradient is added before its one write.

The Hopper kernel takes bf16 streams whose C is a multiple of 128 and at most four of them; every other case is the plain
kernel's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fused_mhc import fused_h_post_bda, mhc_pre
from fused_mhc.device import device_info
from fused_mhc.ops.mhc_pre import native
from fused_mhc.ops.proj_rms_compute_h import _triton_bwd, _triton_fwd
from fused_mhc.testing.compare import bit_equal

DEVICE = torch.device("cuda", 0)
EPS = (1e-6, 1e-6, 1e-6, "inside", "softmax", "fp32")
#: A gradient runs through Sinkhorn's 20 iterations and through the saved projection, its own errors four times.
GRAD_BOUND = 2e-5

#: (tokens, n, C). Tails of a step of 64 tokens, of a chunk of 1024 and of a program's chunks; one token; the widths of
#: models; K that is no multiple of a program's 256 columns; C that the plain kernel takes.
SHAPES = [
    (1, 4, 4096),
    (63, 4, 2560),
    (64, 3, 4096),
    (65, 2, 7168),
    (1025, 4, 4096),
    (2049, 4, 2560),
    (2049, 3, 128),
    (300, 3, 384),
    (1025, 4, 7168),
    (1025, 1, 256),
    (65, 4, 64),
    (1025, 2, 64),
    (64, 4, 200),
    (63, 3, 65),
    (65, 5, 256),
]
#: Results whose gradients arrive: of ``layer_input, h_post, h_res, x``.
USED = [(0, 1, 2, 3), (0, 1, 2), (1, 2, 3), (0,), (3,), (1, 2)]


@pytest.fixture(params=["best", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "plain":
        _triton_fwd.plan.cache_clear()
        for module in (_triton_fwd, _triton_bwd):
            monkeypatch.setattr(module, "runs_gluon", lambda *_: False)
    yield request.param
    _triton_fwd.plan.cache_clear()


def inputs(tokens: int, n: int, width: int) -> list[Tensor]:
    torch.manual_seed(tokens + width)
    size, k = n * n + 2 * n, n * width
    return [
        torch.randn(tokens, n, width, device=DEVICE).bfloat16(),
        torch.randn(size, k, device=DEVICE) * k**-0.5,
        *(0.5 + torch.rand(1, device=DEVICE) for _ in range(3)),
        0.5 * torch.randn(size, device=DEVICE),
    ]


def results_of(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return mhc_pre(*tensors, backend="triton")  # type: ignore[arg-type]


def gradients(
    tensors: list[Tensor], used: tuple[int, ...], cotangents: list[Tensor], frozen: tuple[int, ...] = ()
) -> list[Tensor]:
    leaves = [t.detach().requires_grad_(k not in frozen) for k, t in enumerate(tensors)]
    results = results_of(leaves)
    wanted = [t for t in leaves if t.requires_grad]
    return list(torch.autograd.grad([results[k] for k in used], wanted, [cotangents[k] for k in used]))


def cotangents_of(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.randn_like(r) for r in results_of(tensors)]


def near(actual: Tensor, exact: Tensor, tokens: int, roundings: int = 1) -> None:
    """A single number is a sum over tokens that may cancel: the terms, of the order of 1, set the scale then."""
    scale = exact.abs().max().clamp(min=tokens**0.5 if exact.numel() == 1 else 0.0)
    allowed = GRAD_BOUND * scale + exact.abs() * (roundings * torch.finfo(actual.dtype).eps / 2)
    excess = ((actual.double() - exact).abs() - allowed).max()
    assert excess <= 0, f"{tuple(actual.shape)}: {excess:.3e} more than allowed"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("used", USED, ids=str)
def test_against_fp64(path: str, shape: tuple[int, int, int], used: tuple[int, ...]) -> None:
    tensors = inputs(*shape)
    cotangents = cotangents_of(tensors)
    found = gradients(tensors, used, cotangents)
    exact = [t.double() for t in tensors]
    _, _, _, h_pre, proj, r = native.mhc_pre_fwd(*exact, 20, *EPS)
    arrive = [c.double() if k in used else None for k, c in enumerate(cotangents)]
    wanted = native.mhc_pre_bwd(
        *arrive, *exact, h_pre, proj, r, 20, EPS[0], EPS[2], *EPS[3:], needs=[True] * 6
    )
    for gradient, reference in zip(found, wanted, strict=True):
        near(gradient, reference, shape[0])


def test_which_kernel_is_taken() -> None:
    """Streams that share a tile of columns, and an odd dtype of what is passed on, are left to the plain kernel."""
    hopper = device_info(DEVICE).arch == "sm_90"
    x = torch.empty(4, 4 * 4096, dtype=torch.bfloat16, device=DEVICE)
    for width, dtype, fits in (
        (4096, torch.bfloat16, True),
        (192, torch.bfloat16, False),
        (4096, torch.float32, False),
    ):
        streams = x[:, : 4 * width]
        layer, passed = streams[:, :width], streams.to(dtype)
        taken = _triton_bwd.parts_for(streams, 24, True, layer, passed).interleaved
        assert taken == (hopper and fits)
        assert _triton_bwd.parts_for(streams, 24, True, None, streams).interleaved == hopper
        assert not _triton_bwd.parts_for(streams, 24, False, layer, streams).interleaved


@pytest.mark.parametrize("used", [(0, 1, 2, 3), (0, 1, 2), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("shape", [(2049, 4, 7168), (8191, 4, 1024), (2049, 3, 128)], ids=str)
def test_equal_bits_under_load(path: str, shape: tuple[int, int, int], used: tuple[int, ...]) -> None:
    tensors = inputs(*shape)
    cotangents = cotangents_of(tensors)
    first = gradients(tensors, used, cotangents)
    side, square = torch.cuda.Stream(DEVICE), torch.randn(4096, 4096, device=DEVICE)
    flush = torch.empty(1 << 27, dtype=torch.int8, device=DEVICE)
    for repeat in range(50):
        if repeat % 2:
            flush.zero_()
        with torch.cuda.stream(side):
            square @ square
        again = gradients(tensors, used, cotangents)
        assert all(bit_equal(a, b) for a, b in zip(first, again, strict=True)), f"repeat {repeat}"


@pytest.mark.parametrize("shape", [(4097, 4, 1024), (2049, 3, 384)], ids=str)
def test_token_alone_and_among_others(path: str, shape: tuple[int, int, int]) -> None:
    """A token's gradient depends neither on T nor on the other tokens."""
    tensors, last = inputs(*shape), shape[0] - 1
    cotangents = cotangents_of(tensors)
    together = gradients(tensors, (0, 1, 2, 3), cotangents)[0]
    for first, count in ((0, 1), (last, 1), (5, 64), (3, 1025)):
        part = slice(first, first + count)
        alone = gradients([tensors[0][part], *tensors[1:]], (0, 1, 2, 3), [c[part] for c in cotangents])[0]
        assert bit_equal(together[part], alone)


@pytest.mark.parametrize("shape", [(1025, 4, 4096), (65, 4, 64)], ids=str)
def test_what_post_adds_inside_and_by_autograd(path: str, shape: tuple[int, int, int]) -> None:
    """Two writes of the gradient of x round twice more than one; nothing else differs."""
    tensors = inputs(*shape)
    branch = torch.randn(shape[0], shape[2], device=DEVICE).bfloat16()
    out = torch.randn(shape, device=DEVICE).bfloat16()

    def of_x(inside: bool) -> Tensor:
        x = tensors[0].detach().requires_grad_()
        layer_input, h_post, h_res, passed = results_of([x, *tensors[1:]])
        new = fused_h_post_bda(h_res, passed if inside else x, h_post, branch, backend="triton")
        (found,) = torch.autograd.grad([layer_input, new], [x], [branch, out])
        return found

    one, two = of_x(True).double(), of_x(False).double()
    # Rounded apart, each of the two terms may be as large as the largest element, and their sum is rounded again.
    assert ((one - two).abs() <= 2.0**-8 * one.abs().max() + 2.0**-8 * one.abs()).all()
    assert (one - two).norm() <= 2.0**-8 * one.norm()


@pytest.mark.parametrize("frozen", [(1,), (0,), (2, 3, 4, 5)], ids=str)
def test_frozen_inputs(path: str, frozen: tuple[int, ...]) -> None:
    """What is not asked for is left out. Without the weight's gradient that of x is the plain kernel's."""
    tensors = inputs(1025, 4, 1024)
    cotangents = cotangents_of(tensors)
    full = gradients(tensors, (0, 1, 2, 3), cotangents)
    kept = [g for k, g in enumerate(full) if k not in frozen]
    for some, all_ in zip(gradients(tensors, (0, 1, 2, 3), cotangents, frozen), kept, strict=True):
        near(some, all_.double(), 1025, roundings=2)


@pytest.mark.parametrize("pad", [8, 4, 1])
def test_rows_of_any_alignment(path: str, pad: int) -> None:
    """What TMA cannot read as it lies is copied first: the same bits."""
    tensors = inputs(130, 4, 512)
    cotangents = cotangents_of(tensors)
    expected = gradients(tensors, (0, 1, 2, 3), cotangents)

    def apart(t: Tensor) -> Tensor:
        rows = t.flatten(1)
        wide = torch.empty(rows.shape[0], rows.shape[1] + pad, dtype=t.dtype, device=DEVICE)[:, pad:]
        return wide.copy_(rows).view(t.shape)

    found = gradients(tensors, (0, 1, 2, 3), [apart(c) for c in cotangents])
    assert all(bit_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_gradient_hook_and_second_backward() -> None:
    """A hook on what was handed on changes what arrives; a graph that is kept gives the same bits again."""
    tensors = inputs(300, 4, 1024)
    x = tensors[0].detach().requires_grad_()
    layer_input, _, _, passed = results_of([x, *tensors[1:]])
    out = torch.randn_like(layer_input), torch.randn_like(passed)
    first = torch.autograd.grad([layer_input, passed], [x], out, retain_graph=True)[0]
    assert bit_equal(first, torch.autograd.grad([layer_input, passed], [x], out, retain_graph=True)[0])
    without = torch.autograd.grad([layer_input], [x], out[:1], retain_graph=True)[0]
    passed.register_hook(lambda g: 0 * g)
    hooked = torch.autograd.grad([layer_input, passed], [x], out)[0]
    near(hooked, without.double(), 300)
