"""How a kernel walks strided tokens: rows with one stride between them, and the alignment that they share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

__all__ = ["alignment", "flatten"]


def flatten(t: Tensor, trailing: int, dense: bool = False) -> tuple[Tensor, int]:
    """``t`` as rows of its last ``trailing`` dimensions, without a copy where one stride describes the rows.

    Args:
        t: any strides.
        trailing: dimensions that make up a row.
        dense: a row must be contiguous as a whole, not only along its last dimension.

    Returns:
        The tensor to read (``t`` itself, or a contiguous copy where the strides are not as asked) and the stride, in
        elements, from one row to the next.
    """
    shape = t.shape
    lead = len(shape) - trailing
    if t.is_contiguous():
        return t, math.prod(shape[lead:])
    strides = t.stride()
    if _steps_evenly(shape[lead:] if dense else shape[-1:], strides[lead:] if dense else strides[-1:], 1):
        step = next(
            (s for size, s in zip(reversed(shape[:lead]), reversed(strides[:lead]), strict=True) if size > 1),
            0,
        )
        if _steps_evenly(shape[:lead], strides[:lead], step):
            return t, step
    return t.contiguous(), math.prod(shape[lead:])


def _steps_evenly(shape: Sequence[int], strides: Sequence[int], step: int) -> bool:
    """Walking these dimensions in order moves by ``step`` elements each time."""
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1:
            if stride != step:
                return False
            step *= size
    return True


def alignment(*elements: int) -> int:
    """Largest power of two, at most 16, that divides every one of these strides and widths (in elements)."""
    return math.gcd(16, *elements)
