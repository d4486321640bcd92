"""``schedule="mega"`` on CPU tensors: the same function through a Program."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from torch import Tensor

from fused_mhc.errors import BackendError, InputError
from fused_mhc.ops.mega_mhc import mega_mhc, mega_mhc_entry, mega_mhc_exit
from fused_mhc.runtime import GpuExecutor, check_launches, last_launch
from fused_mhc.runtime.hosts import program_host
from fused_mhc.scheduler import lower_tiled_mhc

N, C = 3, 24


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    """These hold the CPU executor, whatever backend the suite tests."""
    monkeypatch.delenv("MHC_FORCE_BACKEND", raising=False)


def inputs(
    lead: tuple[int, ...], *, entry: bool, dtype: torch.dtype = torch.bfloat16, weight: bool = True
) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(kind).requires_grad_()

    size = N * N + 2 * N
    site = [draw(size, N * C), draw(3), draw(size), draw(C) if weight else None]
    if entry:
        return [draw(*lead, C, kind=dtype), *site]
    state = [
        draw(*lead, C, kind=dtype),
        draw(*lead, N, C, kind=dtype),
        draw(*lead, N),
        draw(*lead, N),
        draw(*lead, N, N),
    ]
    return [*state, *site]


def call(values: list[Tensor | None], schedule: str) -> tuple[Tensor, ...]:
    if len(values) == 5:
        return mega_mhc_entry(values[0], N, *values[1:], schedule=schedule, backend="native")  # type: ignore[arg-type]
    return mega_mhc(*values, schedule=schedule, backend="native")  # type: ignore[arg-type]


def gradients(
    outs: tuple[Tensor, ...], wanted: list[Tensor], used: tuple[int, ...]
) -> tuple[Tensor | None, ...]:
    generator = torch.Generator().manual_seed(8)
    grads = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outs]
    return torch.autograd.grad([outs[i] for i in used], wanted, [grads[i] for i in used], allow_unused=True)


@pytest.mark.parametrize("entry", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("lead", [(), (1,), (4, 6)])
def test_equals_fused(entry: bool, kind: torch.dtype, weight: bool, lead: tuple[int, ...]) -> None:
    """One tile: every sum has the order that native's has, so every bit is equal."""
    values = inputs(lead, entry=entry, dtype=kind, weight=weight)
    fused, mega = call(values, "fused"), call(values, "mega")
    for one, two in zip(fused, mega, strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    leaves = [value for value in values if value is not None]
    for one, two in zip(
        gradients(fused, leaves, (0, 1, 2, 3, 4)), gradients(mega, leaves, (0, 1, 2, 3, 4)), strict=True
    ):
        assert one is not None
        assert two is not None
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    record = last_launch("backward")
    assert record is not None
    assert record.executor == "cpu"


@pytest.mark.parametrize("entry", [False, True])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (3,), (4,), (0, 4)])
def test_unused_results(entry: bool, used: tuple[int, ...]) -> None:
    values = inputs((5,), entry=entry, dtype=torch.float32)
    leaves = [value for value in values if value is not None]
    fused = gradients(call(values, "fused"), leaves, used)
    mega = gradients(call(values, "mega"), leaves, used)
    for one, two in zip(fused, mega, strict=True):
        assert (one is None) == (two is None)
        assert one is None or torch.equal(one, two)


@pytest.mark.parametrize("entry", [False, True])
def test_frozen_inputs(entry: bool) -> None:
    values = inputs((5,), entry=entry, dtype=torch.float32)
    leaves = [value for value in values if value is not None]
    for keep in itertools.islice(itertools.product([False, True], repeat=len(leaves)), 1, None, 7):
        frozen = [leaf.detach().requires_grad_(kept) for leaf, kept in zip(leaves, keep, strict=True)]
        wanted = [leaf for leaf, kept in zip(frozen, keep, strict=True) if kept]
        if not wanted:
            continue
        fused = gradients(call([*frozen], "fused"), wanted, (0, 1, 2, 3, 4))
        mega = gradients(call([*frozen], "mega"), wanted, (0, 1, 2, 3, 4))
        for one, two in zip(fused, mega, strict=True):
            assert one is not None
            assert two is not None
            assert torch.equal(one, two)


@pytest.mark.parametrize("entry", [False, True])
def test_no_tokens_run_no_program(entry: bool) -> None:
    call(inputs((3,), entry=entry), "mega")
    before = last_launch()
    values = inputs((0,), entry=entry)
    outs = call(values, "mega")
    assert [out.shape[0] for out in outs] == [0] * 5
    grads = gradients(outs, [value for value in values if value is not None], (0, 1, 2, 3, 4))
    assert all(grad is not None and not grad.any() for grad in grads)
    assert last_launch() is before


def test_strided_inputs() -> None:
    values = inputs((6,), entry=False, dtype=torch.float32)
    strided = [None if v is None else v.detach().repeat_interleave(2, -1)[..., ::2] for v in values]
    strided[5] = values[5]  # the product may take another path for other strides of phi
    for one, two in zip(call(values, "mega"), call(strided, "mega"), strict=True):
        assert torch.equal(one, two)


def test_infinite_values_stay_in_their_stream_at_the_first_site() -> None:
    """The first site copies; it multiplies nothing by zero."""
    values = inputs((3,), entry=True, dtype=torch.float32)
    assert values[0] is not None
    values[0] = values[0].detach()
    values[0][1, 0] = float("inf")
    fused, mega = call(values, "fused"), call(values, "mega")
    assert torch.equal(fused[0], mega[0])
    assert torch.equal(fused[4].isnan(), mega[4].isnan())


def test_repeats_are_equal() -> None:
    values = inputs((150,), entry=False)
    first = call(values, "mega")
    for _ in range(3):
        for one, two in zip(first, call(values, "mega"), strict=True):
            assert torch.equal(one, two)


def test_refuses() -> None:
    values = inputs((2,), entry=False)
    n = 9
    size = n * n + 2 * n
    wide = [
        torch.zeros(2, C),
        torch.zeros(2, n, C),
        torch.zeros(2, n),
        torch.zeros(2, n),
        torch.zeros(2, n, n),
        torch.zeros(size, n * C),
        torch.zeros(3),
        torch.zeros(size),
        None,
    ]
    with pytest.raises(BackendError, match="at most 8 streams, got 9"):
        mega_mhc(*wide, schedule="mega")  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="with backend 'cutile': it runs no Programs"):
        program_host("mega_mhc", "fwd", "cutile")
    with pytest.raises(BackendError, match="backend 'cutile' cannot run mega_mhc fwd"):
        mega_mhc(*values, schedule="mega", backend="cutile")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"schedule: expected .*, got 'giga'"):
        mega_mhc(*values, schedule="giga")  # type: ignore[arg-type]
    assert "schedule" not in inspect.signature(mega_mhc_exit).parameters
    meta = [None if v is None else v.detach().to("meta") for v in values]
    with pytest.raises(BackendError, match="runs on CPU tensors, got meta"):
        program_host("mega_mhc", "fwd", "native")(*meta, 1e-6, 1e-6, 20)


def test_the_megakernel_runs_on_cuda_devices() -> None:
    """(And in the interpreter, which has tests of its own.)"""
    program = lower_tiled_mhc("forward", 3, 8, num_cube_workers=1, num_vector_workers=1)
    with pytest.raises(BackendError, match=r"device: expected a CUDA device for the megakernel, .* got cpu"):
        GpuExecutor(program, "cpu")
    with pytest.raises(BackendError, match=r"device: expected a CUDA device for the megakernel, .* got cpu"):
        check_launches("cpu")
