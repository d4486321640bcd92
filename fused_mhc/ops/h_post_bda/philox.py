"""Philox 4x32-10 in plain torch: the dropout generator's reference, and the numbers that its kernels take.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11).
"""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

__all__ = ["dropout_numbers", "keep_mask", "philox_4x32"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _product(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low half of a 32 x 32 bit product. int64 wraps, and the mask takes the sign off."""
    product = word * multiplier
    return (product >> 32) & _MASK, product & _MASK


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Ten rounds. Every word is an int64 tensor holding an unsigned 32-bit value."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def keep_mask(seed: Tensor, first: int, count: int, p: float) -> Tensor:
    """Which of the elements ``first .. first+count-1`` are kept with probability ``1 - p``.

    Counter = element // 4 (low and high half in words 0 and 1), key = low and high half of the seed, word =
    element % 4; kept where ``word * 2**-32 >= p`` in fp32.
    """
    start, stop = first // 4, (first + count + 3) // 4
    index = torch.arange(start, stop, dtype=torch.int64, device=seed.device)
    zero = torch.zeros_like(index)
    key = (seed & _MASK, (seed >> 32) & _MASK)
    words = philox_4x32((index & _MASK, index >> 32, zero, zero), key)
    flat = torch.stack(words, dim=1).reshape(-1)[first - 4 * start :][:count]
    uniform = flat.to(torch.float32) * 2.0**-32
    return uniform >= torch.tensor(p, dtype=torch.float32, device=seed.device)


@functools.lru_cache(maxsize=None)
def dropout_numbers(dropout_p: float) -> tuple[int, float]:
    """The smallest 32-bit word whose ``word * 2^-32``, both rounded to fp32, is at least ``dropout_p``, and the scale
    of what is kept. (Rounding is monotone, so comparing words is comparing those fp32 values.)"""
    p = _fp32(dropout_p)
    low, high = 0, 2**32 - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fp32(middle) * 2.0**-32 >= p else (middle + 1, high)
    return low, 1.0 / (1.0 - dropout_p)


def _fp32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
