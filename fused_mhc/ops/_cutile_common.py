"""What the cuTile kernels share: reads and writes by offset, sums with one order, and the launch.

Kernel conventions of this package:

- A kernel sees a tensor as an address (`Launcher` hands over a view of one element) and reads it by offsets from
  there, as 64-bit numbers, except where products of tiles want whole tiles (`Whole`). So neither the number of tokens
  nor a stride is part of what gets compiled, and the same code, with the same order of sums, runs for every batch.
  Tails are masks.
- Arguments stand in this order: tensors, numbers (``ct.ScalarInt64`` or fp32), constants. An optional tensor that is
  absent is replaced by the first one and named by a constant; the kernel then never touches it.
- The alignment of strided rows comes in as one constant, and `row_offset` tells the compiler of it.
- Tiles have powers of two as sizes: the streams of a token are separate tiles wherever that is possible, so that any
  n is exact without padding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import cuda.tile as ct
import torch
from torch import Tensor

from .. import cutile
from ..device import device_info

__all__ = [
    "WARPS",
    "Launcher",
    "Whole",
    "architecture",
    "dot_sums",
    "intercept",
    "kernel",
    "lane_dots",
    "lane_zeros",
    "load_columns",
    "load_scalars",
    "load_streams",
    "power_of_two",
    "reciprocal",
    "row_offset",
    "sigmoid",
    "store_columns",
    "store_scalars",
    "widen",
    "widen_streams",
]

#: Programs in one launch that has a program for each token.
_GRID = 1 << 23
#: Warps of a program: what the compiler takes.
WARPS = 4


class kernel(ct.kernel):  # type: ignore[misc]  # noqa: N801  # stands where ``ct.kernel`` would
    """``ct.kernel`` whose compiler runs in the environment that was proven for it (`cutile.compiling`)."""

    def __new__(cls, function: Any = None, /, **hints: Any) -> Any:
        if function is None:
            return lambda decorated: cls(decorated, **hints)
        return super().__new__(cls, function, **hints)

    def _compile(self, *args: Any, **kwargs: Any) -> Any:
        with cutile.compiling():
            return super()._compile(*args, **kwargs)


def widen(value):
    """``value`` in fp32, exactly."""
    return ct.astype(value, ct.float32)


def reciprocal(x):
    """``1/x`` within 1 ulp for normal ``x`` below 2^126, in one instruction."""
    return ct.truediv(1.0, x, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


def sigmoid(x):
    """``1/(1+exp(-x))`` in fp32: no overflow on either side, relative accuracy in both tails."""
    return 1.0 / (1.0 + ct.exp(-x))


def row_offset(index, stride, ALIGN):
    """``index * stride`` as a multiple of ALIGN: what lets loads be wide."""
    return ct.assume_divisible_by(index * stride, ALIGN)


def load_scalars(memory, offset, COUNT, STEP=1):
    """COUNT numbers from ``offset`` on, every STEP-th, as a tuple of fp32 scalars."""
    values = ()
    for k in ct.static_iter(range(COUNT)):
        values = values + (widen(memory.load_offset(offset + k * STEP)),)
    return values


def load_columns(memory, offset, columns, C, FULL):
    """The elements ``columns`` of a row of C, in its own dtype; 0 past the end. FULL: none is past the end."""
    if FULL:
        value = memory.load_offset(offset + columns)
    else:
        value = memory.load_offset(offset + columns, mask=columns < C, padding_value=0)
    return value


def load_streams(memory, offset, stride, columns, n, C, FULL, ALIGN):
    """The same columns of the n streams of a token, each in the tensor's dtype."""
    streams = ()
    for i in ct.static_iter(range(n)):
        row = ct.assume_divisible_by(offset + i * stride, ALIGN)
        streams = streams + (load_columns(memory, row, columns, C, FULL),)
    return streams


def store_columns(memory, offset, columns, value, C, FULL):
    """Write fp32 ``value`` to the elements ``columns`` of a row of C, in its dtype; none past the end."""
    rounded = ct.astype(value, memory.dtype)
    if FULL:
        memory.store_offset(offset + columns, rounded)
    else:
        memory.store_offset(offset + columns, rounded, mask=columns < C)


def store_scalars(memory, offset, values, COUNT):
    """Write COUNT fp32 scalars from ``offset`` on, in the tensor's dtype."""
    for k in ct.static_iter(range(COUNT)):
        memory.store_offset(offset + k, ct.astype(values[k], memory.dtype))


def widen_streams(streams, first, COUNT):
    """COUNT tiles of a tuple from ``first`` on, in fp32."""
    wide = ()
    for i in ct.static_iter(range(COUNT)):
        wide = wide + (widen(streams[first + i]),)
    return wide


def lane_zeros(COUNT, LANES):
    """COUNT vectors of fp32 zeros."""
    zeros = ()
    for _ in ct.static_iter(range(COUNT)):
        zeros = zeros + (ct.zeros((LANES,), ct.float32),)
    return zeros


def lane_dots(sums, left, right, LEFT, RIGHT, BLOCK, VECTOR):
    """Add the products of all pairs of left and right fp32 vectors to the lanes' sums (pair (i, j) at ``i*RIGHT + j``).
    A lane adds the VECTOR neighbours that it has loaded, so no lane waits for another."""
    added = ()
    for i in ct.static_iter(range(LEFT)):
        for j in ct.static_iter(range(RIGHT)):
            product = ct.reshape(left[i] * right[j], (BLOCK // VECTOR, VECTOR))
            added = added + (sums[i * RIGHT + j] + ct.sum(product, 1),)
    return added


def _add_2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


def _add_4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


def dot_sums(vectors, COUNT):
    """The sum of each of COUNT vectors over the whole program, up to four behind one barrier."""
    sums = ()
    for k in ct.static_iter(range(0, COUNT - 3, 4)):
        four = (vectors[k], vectors[k + 1], vectors[k + 2], vectors[k + 3])
        sums = sums + ct.reduce(four, 0, _add_4, (0.0, 0.0, 0.0, 0.0))
    for k in ct.static_iter(range(COUNT - COUNT % 4, COUNT - 1, 2)):
        sums = sums + ct.reduce((vectors[k], vectors[k + 1]), 0, _add_2, (0.0, 0.0))
    if COUNT % 2 == 1:
        sums = sums + (ct.sum(vectors[COUNT - 1], 0),)
    return sums


def power_of_two(value: int) -> int:
    """``value`` rounded up to a power of two."""
    return 1 << (value - 1).bit_length()


class Whole(NamedTuple):
    """A tensor that a kernel sees with its shape and strides, to read it by tiles.

    Then the compiler may use the GPU's own copies of tiles, and it specialises: on dimensions of size 1, on sizes and
    strides that are multiples of 16. A kernel slices such a view to the number of rows that it is told (`Array.slice`),
    so that this changes no bit of its result.
    """

    tensor: Tensor


Execute = Callable[
    ["kernel", tuple[int, ...], Sequence["Tensor | Whole"], Sequence[Any], Sequence[Any]], None
]


def _launch(
    function: kernel,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor | Whole],
    numbers: Sequence[Any],
    constants: Sequence[Any],
) -> None:
    first = tensors[0]
    device = (first.tensor if isinstance(first, Whole) else first).device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(function, grid, tensors, numbers, constants)
        return
    # An address with a shape and strides of its own would be compiled for them.
    addresses = tuple(t.tensor if isinstance(t, Whole) else t.as_strided((1,), (1,)) for t in tensors)
    stream = torch.cuda.current_stream(device).cuda_stream
    ct.launch(stream, grid, function, (*addresses, *numbers, *constants))


_execute: Execute = _launch
_arch: str | None = None


@contextlib.contextmanager
def intercept(execute: Execute, arch: str = "sm_90") -> Iterator[None]:
    """Hand every launch to ``execute`` instead of the device, with the tiles of ``arch``: ``fused-mhc compile-cutile``
    collects what the hosts launch, and tests run it on the CPU."""
    global _execute, _arch  # one place that launches
    before = _execute, _arch
    _execute, _arch = execute, arch
    try:
        yield
    finally:
        _execute, _arch = before


def architecture(device: torch.device) -> str:
    """What the kernels of ``device`` are compiled for."""
    return _arch or device_info(device).arch


class Launcher:
    """Launches one kernel."""

    def __init__(self, function: kernel) -> None:
        self.function = function

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor | Whole | None],
        numbers: Sequence[int | float],
        constants: Sequence[int | bool],
    ) -> None:
        """Run the kernel on the device of the first tensor.

        Args:
            grid: up to three extents.
            tensors: in signature order; None where an optional one is absent (never the first).
            numbers: the run-time numbers that follow them.
            constants: the constants at the end.
        """
        first = tensors[0]
        assert first is not None  # see `tensors`
        absent = first.tensor if isinstance(first, Whole) else first
        _execute(self.function, grid, [absent if t is None else t for t in tensors], numbers, constants)

    def by_token(
        self,
        count: int,
        tensors: Sequence[Tensor | Whole | None],
        numbers: Sequence[int | float],
        constants: Sequence[int | bool],
    ) -> None:
        """Run one program for each of ``count`` tokens; the kernel's first number is the token of its first program.
        (A grid has fewer than 2^24 programs along an axis.)"""
        for first in range(0, count, _GRID):
            self((min(_GRID, count - first),), tensors, (first, *numbers), constants)
