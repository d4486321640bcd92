"""What the native backends share: token chunks, sums with a written-out order, and the fp32-exact product.

Native code works on chunks of tokens (a fixed number that depends on the width alone), so that no temporary is
larger than a chunk, and sums over tokens have one order: within a chunk, then chunks in index order.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["CHUNK_ELEMENTS", "chunks", "exact_matmul", "sigmoid", "stream_sum", "tokens", "tree_sum"]

#: Elements of x in one chunk of tokens: 64 tokens at K = 16384 (4 MiB in fp32).
CHUNK_ELEMENTS = 1 << 20


def tokens(t: Tensor, trailing: int) -> Tensor:
    """Flatten the leading dimensions, keeping the last ``trailing``: a view where the strides allow one, else a
    copy in the tensor's own dtype."""
    return (
        t.reshape(-1, *t.shape[t.dim() - trailing :]) if t.numel() else t.new_empty(_empty_shape(t, trailing))
    )


def _empty_shape(t: Tensor, trailing: int) -> tuple[int, ...]:
    lead = 1
    for size in t.shape[: t.dim() - trailing]:
        lead *= size
    return (lead, *t.shape[t.dim() - trailing :])


def chunks(count: int, width: int) -> Iterator[slice]:
    """Slices of at most ``CHUNK_ELEMENTS / width`` tokens (at least one) that cover ``count`` tokens in order."""
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def tree_sum(t: Tensor, dim: int = -1) -> Tensor:
    """Sum along ``dim`` by halving: element i takes element i + ceil(L/2), until one is left.

    Only elementwise additions, so the order (and every bit) is a function of the length alone; torch's own
    reductions change theirs with the number of rows. Error grows with log2 of the length.
    """
    length = t.shape[dim]
    if length == 0:
        return t.sum(dim)
    while length > 1:
        half = (length + 1) // 2
        low, high = t.narrow(dim, 0, half), t.narrow(dim, half, length - half)
        if high.shape[dim] == half:
            t = low + high
        else:
            t = low.clone()
            t.narrow(dim, 0, length - half).add_(high)
        length = half
    return t.squeeze(dim)


def stream_sum(t: Tensor, dim: int) -> Tensor:
    """Sum along a short axis (streams), first to last."""
    total, *rest = t.unbind(dim)
    for part in rest:
        total = total + part
    return total


def sigmoid(x: Tensor) -> Tensor:
    """``1/(1+exp(-x))``: written out because torch's own gives other bits for other batch sizes on a CPU."""
    return 1.0 / (1.0 + torch.exp(-x))


def _matmul_backends() -> list[Any]:
    return [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]


class _ExactMatmul:
    """Switches lowered precision off while any thread is inside, and back when the last one leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._restore: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._restore = _switch_off()
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    for restore in self._restore:
                        restore()


def _switch_off() -> list[Callable[[], None]]:
    """Make fp32 products exact; returns what puts the switches back."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch 2.8 has one switch for all
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        return [functools.partial(torch.set_float32_matmul_precision, before)]
    found: list[Callable[[], None]] = []
    for switch in _matmul_backends():
        found.append(functools.partial(setattr, switch, "fp32_precision", switch.fp32_precision))
        switch.fp32_precision = "ieee"
    return found


#: Context: products of fp32 operands are fp32 inside, whatever the process-wide precision switches say.
exact_matmul = _ExactMatmul()
