"""Same bits on the device: repeats under load, batches, compiles."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from fused_mhc import dispatch
from fused_mhc.dispatch import OPERATIONS
from fused_mhc.testing.bits import batch_differences, differing_repeats
from fused_mhc.testing.inputs import CATALOGUE, Shape, make_tensors
from fused_mhc.testing.verify import forced

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def triton() -> Any:
    with forced("triton"):
        yield


@pytest.mark.parametrize("op", list(OPERATIONS))
@pytest.mark.parametrize("shape", [Shape((130,), 4, 1280), Shape((77,), 3, 333)], ids=str)
def test_repeats(op: str, shape: Shape) -> None:
    """F42. (The 1,000 repeats that certify the backend: ``python -m benchmarks.bits``.)"""
    assert differing_repeats(op, shape, DEVICE, 50) == 0


@pytest.mark.parametrize("op", list(OPERATIONS))
@pytest.mark.parametrize("shape", [Shape((1,), 4, 1280), Shape((1,), 5, 96)], ids=str)
def test_token_alone_and_among_others(op: str, shape: Shape) -> None:
    """F56."""
    assert batch_differences(op, shape, DEVICE, (2, 17, 64, 512, 4096)) == 0


def _compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that Triton compiles from now on."""
    compiler = importlib.import_module("triton.runtime.jit")
    names: list[str] = []
    compile_one = compiler.JITFunction._do_compile

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.fn.__name__)
        return compile_one(self, *args, **kwargs)

    monkeypatch.setattr(compiler.JITFunction, "_do_compile", counted)
    return names


@pytest.mark.parametrize("op", list(OPERATIONS))
def test_many_token_counts_compile_little(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F45: 64 values of T compile each kernel at most twice."""
    names = _compiles(monkeypatch)
    operation = CATALOGUE[op]
    width = 208  # a size that no other test compiles for
    for tokens in [*range(1, 49), *range(100, 116)]:
        shape = Shape((tokens,), 4, width)
        tensors = {
            k: None if t is None else t.requires_grad_()
            for k, t in make_tensors(op, shape, torch.bfloat16, device=DEVICE).items()
        }
        results = operation.function(**tensors, **operation.options(operation.modes[0], shape))
        outs = list(results) if isinstance(results, tuple) else [results]
        torch.autograd.backward([o for o in outs if o.requires_grad], [torch.ones_like(o) for o in outs])
    assert all(names.count(name) <= 2 for name in set(names)), {n: names.count(n) for n in names}


def test_native_is_never_called_behind_the_name_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation runs with every function of every ``native.py`` replaced by one that raises."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("native was called")

    for folder in set(OPERATIONS.values()):
        module = importlib.import_module(f"fused_mhc.ops.{folder}.native")
        for name in module.__all__:
            monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(dispatch, "_RESOLVED", {})
    dispatch._host.cache_clear()
    try:
        for op in OPERATIONS:
            assert differing_repeats(op, Shape((9,), 4, 64), DEVICE, 1) == 0
    finally:
        dispatch._host.cache_clear()
