"""Same bits: repeats under load, a token alone and among others, and how often kernels compile.

`run_bits` is what stands behind `MHC_BACKEND_DETERMINISM`: its report is kept beside the benchmarks' results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..device import device_info
from ..dispatch import OPERATIONS
from .inputs import CATALOGUE, Shape, make_cotangents, make_tensors
from .verify import forced

__all__ = ["BitsRow", "batch_differences", "differing_repeats", "run_bits"]

Outcome = list[Tensor]

#: Where a backend is certified: no tile divides these tokens.
_CERTIFIED = Shape((257,), 4, 1024)


@dataclass(frozen=True)
class BitsRow:
    """How many of ``trials`` repeats (or batches) gave other bits than the first run (or the token alone)."""

    op: str
    check: str
    backend: str
    shape: str
    trials: int
    different: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _outcome(
    op: str, tensors: dict[str, Tensor | None], shape: Shape, cotangents: Sequence[Tensor] | None
) -> Outcome:
    """Results and, with cotangents, the gradients of every input."""
    operation = CATALOGUE[op]
    options = operation.options(operation.modes[0], shape)
    leaves = {
        k: None if t is None else t.detach().requires_grad_(cotangents is not None)
        for k, t in tensors.items()
    }
    results = operation.function(**leaves, **options)
    outs = list(results) if isinstance(results, tuple) else [results]
    if cotangents is None:
        return outs
    inputs = [t for t in leaves.values() if t is not None]
    grads = torch.autograd.grad(outs, inputs, list(cotangents), allow_unused=True)
    return [*(o.detach() for o in outs), *(g for g in grads if g is not None)]


def _equal(first: Outcome, second: Outcome) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _cotangents(op: str, tensors: dict[str, Tensor | None], shape: Shape) -> list[Tensor]:
    names = CATALOGUE[op].results
    drawn = make_cotangents(dict(zip(names, _outcome(op, tensors, shape, None), strict=True)))
    return list(drawn.values())


class _Load:
    """A second stream kept busy, and an L2 flush, on a CUDA device; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.flush = torch.empty(
                2 * device_info(device).l2_bytes or 1 << 28, dtype=torch.int8, device=device
            )
            self.work = torch.randn(2048, 2048, device=device)

    def step(self) -> None:
        if self.device.type == "cuda":
            self.flush.zero_()
            with torch.cuda.stream(self.stream):
                torch.mm(self.work, self.work)


def differing_repeats(
    op: str, shape: Shape, device: torch.device, repeats: int, backward: bool = True
) -> int:
    """How many of ``repeats`` forwards and, unless ``backward`` is False, backwards differ in a bit from the first; bf16
    streams."""
    tensors = make_tensors(op, shape, torch.bfloat16, device=device)
    cotangents = _cotangents(op, tensors, shape) if backward else None
    first = _outcome(op, tensors, shape, cotangents)
    load = _Load(device)
    different = 0
    for _ in range(repeats):
        load.step()
        different += not _equal(_outcome(op, tensors, shape, cotangents), first)
    return different


def batch_differences(op: str, shape: Shape, device: torch.device, counts: Sequence[int]) -> int:
    """In how many of the batches of ``counts`` tokens the first token's results differ from those of it alone."""
    most = Shape((max(counts),), shape.n, shape.hidden_size)
    tensors = make_tensors(op, most, torch.bfloat16, device=device)
    shared = CATALOGUE[op].shared

    def first(count: int) -> Outcome:
        part = {k: t if t is None or k in shared else t[:count] for k, t in tensors.items()}
        return [o[:1] for o in _outcome(op, part, Shape((count,), shape.n, shape.hidden_size), None)]

    alone = first(1)
    return sum(not _equal(first(count), alone) for count in counts)


def run_bits(
    backend: str,
    device: torch.device | str,
    *,
    ops: Sequence[str] = tuple(OPERATIONS),
    forward_only: Collection[str] = (),
    shape: Shape = _CERTIFIED,
    repeats: int = 1000,
    counts: Sequence[int] = (2, 64, 4096),
    progress: Callable[[str], None] | None = None,
) -> list[BitsRow]:
    """Repeats (forward and backward; of those in ``forward_only`` the forward) and batches (forward) of every operation
    on one backend."""
    where = torch.device(device)
    rows = []
    with forced(backend):
        for op in ops:
            if progress is not None:
                progress(op)
            width = f"n={shape.n} C={shape.hidden_size}"
            backward = op not in forward_only
            different = differing_repeats(op, shape, where, repeats, backward)
            check = "repeats" if backward else "forward repeats"
            rows.append(BitsRow(op, check, backend, str(shape), repeats, different))
            different = batch_differences(op, shape, where, counts)
            label = f"T=1 in {', '.join(map(str, counts))} {width}"
            rows.append(BitsRow(op, "batches", backend, label, len(counts), different))
    return rows
