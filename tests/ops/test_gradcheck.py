"""Native's backward against finite differences in fp64: every operation and mode, every n, T and C."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fused_mhc.testing.inputs import CATALOGUE, Mode, Operation, Shape, make_tensors

STREAMS = (1, 2, 3, 4, 5, 8)
SIZES = tuple(itertools.product((0, 1, 7), (1, 5, 64)))  # tokens, hidden size
#: Above this many inputs gradcheck compares one random projection of the Jacobian instead of every entry.
FULL_BELOW = 2000

ITERATIONS = {"mhc_pre": ("num_iterations",), "mega_mhc": ("num_iters",), "mega_mhc_entry": ("num_iters",)}

CALLS = [
    pytest.param(name, mode, id=f"{name}[{mode.label}]" if mode.label else name)
    for name, op in CATALOGUE.items()
    for mode in op.modes
]


def _check(op: Operation, mode: Mode, shape: Shape, fewer: dict[str, int]) -> None:
    made = make_tensors(op.name, shape, torch.float64, mode=mode)
    options = op.options(mode, shape) | fewer
    given = {key: t.requires_grad_() for key, t in made.items() if t is not None}
    absent = dict.fromkeys(mode.absent)

    def call(*values: Tensor) -> object:
        return op.function(**dict(zip(given, values, strict=True)), **absent, **options)

    count = sum(t.numel() for t in given.values())
    assert torch.autograd.gradcheck(call, tuple(given.values()), fast_mode=count > FULL_BELOW), str(shape)


@pytest.mark.parametrize("n", STREAMS)
@pytest.mark.parametrize(("name", "mode"), CALLS)
def test_gradcheck(name: str, mode: Mode, n: int) -> None:
    # Sinkhorn sees no hidden size; where it is one part of a larger operation a few of its iterations do.
    sizes = SIZES[::3] if name == "sinkhorn" else SIZES
    fewer = {key: min(mode.options.get(key, 20), 4) for key in ITERATIONS.get(name, ())}
    for tokens, width in sizes:
        _check(CATALOGUE[name], mode, Shape((tokens,), n, width), fewer)
