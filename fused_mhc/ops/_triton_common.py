"""What the Triton kernels share: exact conversions, dots and stores that the interpreter gets right too, the
flattening of strided token tensors, and a launch with little host cost.

Kernel conventions of this package:

- Token counts and strides are annotated ``tl.int64`` and named in ``do_not_specialize``, so neither their size nor
  their divisibility makes another compile. Alignment of strided rows comes in as one constexpr (`alignment`) and
  goes into the offsets by ``tl.multiple_of``.
- Constexprs stand last in a kernel's signature.
- FP contraction is off at every launch: a kernel writes ``tl.fma`` where it wants one, so the rounding is that of
  the source on every Triton version.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import env

__all__ = [
    "INTERPRETING",
    "Launcher",
    "alignment",
    "cast",
    "dot_bf16",
    "flatten",
    "sigmoid",
    "store",
    "widen",
]

#: True when kernels run in Triton's interpreter; Triton too decides that once, when a kernel is defined.
INTERPRETING = tl.constexpr(env.interpreting())
#: A string default of a device function must be a constexpr (Triton 3.6).
NO_POLICY = tl.constexpr("")


@triton.jit
def widen(value):
    """``value`` in fp32, exactly. (The interpreter's own bf16 conversion is wrong for NaN and subnormals.)"""
    if INTERPRETING:
        if value.dtype == tl.bfloat16:
            bits = value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
            return bits.to(tl.float32, bitcast=True)
        else:
            return value.to(tl.float32)
    else:
        return value.to(tl.float32)


@triton.jit
def cast(value, dtype: tl.constexpr):
    """fp32 ``value`` in ``dtype``, rounded to nearest even. (The interpreter truncates to bf16.)"""
    if INTERPRETING:
        if dtype == tl.bfloat16:
            bits = value.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            quiet_nan = (bits >> 16) | 0x40
            kept = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet_nan, rounded)
            return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            return value.to(dtype)
    else:
        return value.to(dtype)


@triton.jit
def store(pointer, value, mask=None, eviction_policy: tl.constexpr = NO_POLICY):
    """Store fp32 ``value`` in the pointer's dtype, rounded to nearest even."""
    tl.store(pointer, cast(value, pointer.dtype.element_ty), mask=mask, eviction_policy=eviction_policy)


@triton.jit
def dot_bf16(a, b, acc):
    """``acc + a @ b`` for bf16 operands: products exact, sums in fp32. (The interpreter multiplies bit patterns.)"""
    if INTERPRETING:
        return tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def sigmoid(x):
    """``1/(1+exp(-x))`` in fp32: no overflow on either side, relative accuracy in both tails."""
    return 1.0 / (1.0 + tl.exp(-x))


def flatten(t: Tensor, trailing: int) -> tuple[Tensor, int]:
    """``t`` as rows of its last ``trailing`` dimensions, without a copy where one stride describes the rows.

    Returns:
        The tensor to read (``t`` itself, or a contiguous copy when no single stride steps through the leading
        dimensions or the last dimension is not dense) and the stride, in elements, from one row to the next.
    """
    shape = t.shape
    lead = len(shape) - trailing
    if t.is_contiguous():
        return t, math.prod(shape[lead:])
    strides = t.stride()
    if strides[-1] == 1 or shape[-1] == 1:
        step = extent = None
        for size, stride in zip(reversed(shape[:lead]), reversed(strides[:lead]), strict=True):
            if size == 1:
                continue
            if step is None:
                step = stride
            elif stride != extent:
                break
            extent = stride * size
        else:
            return t, step or 0
    return t.contiguous(), math.prod(shape[lead:])


def alignment(*elements: int) -> int:
    """Largest power of two, at most 16, that divides every one of these strides and widths (in elements)."""
    return math.gcd(16, *elements)


class Launcher:
    """Launches one kernel, remembering what it compiled to, so that a repeated launch skips Triton's own argument
    analysis (half of the host cost of a small operation)."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int = 2,
    ) -> None:
        """Run the kernel on the device of the first tensor.

        Args:
            grid: up to three extents.
            args: run-time arguments in signature order: tensors, None, numbers.
            constants: the constexprs that follow them, in order.
            num_warps, num_stages: Triton's.
        """
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
        if INTERPRETING.value:
            self.kernel[grid](*args, *constants, **options)
            return
        device = args[0].device
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(grid, args, constants, num_warps, num_stages)
            return
        pointers = 0
        key: list[Any] = [device.index, num_warps, num_stages, constants]
        for a in args:
            if isinstance(a, Tensor):
                pointers |= a.data_ptr()
                key.append(a.dtype)
            else:
                key.append(a is None)
        if pointers & 15:  # rare: Triton's own analysis finds which loads may still be wide
            self.kernel[grid](*args, *constants, **options)
            return
        compiled = self._compiled.get(tuple(key))
        if compiled is None:
            self._compiled[tuple(key)] = self.kernel[grid](*args, *constants, **options)
            return
        compiled[(*grid, 1, 1)[:3]](*args, *constants)
