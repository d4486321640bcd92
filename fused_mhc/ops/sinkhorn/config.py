"""Tiles of the Triton Sinkhorn kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass

__all__ = [
    "MAX_REGISTER_STREAMS",
    "MAX_REGISTER_STREAMS_BWD",
    "SinkhornConfig",
    "candidates",
    "heuristic",
    "valid",
]

#: Largest n whose matrix a thread holds in registers; above it a warp shares a few matrices.
MAX_REGISTER_STREAMS = 8
#: The same in the backward, which holds four matrices and the divisors.
MAX_REGISTER_STREAMS_BWD = 6
#: 32-bit registers of a thread that the backward fills with matrices and divisors.
_REGISTER_BUDGET = 226
#: Steps whose divisors a warp keeps at a time where it shares matrices.
_WIDE_SEGMENT = 40
#: Entries that such a warp holds.
_WIDE_ENTRIES = 256


@dataclass(frozen=True)
class SinkhornConfig:
    """``block`` tokens a program on ``num_warps`` warps; the backward keeps the divisors of ``segment`` steps (even)
    at a time. No choice changes a bit of the result."""

    block: int
    num_warps: int
    segment: int


@functools.lru_cache(maxsize=None)
def heuristic(n: int, wide: bool) -> SinkhornConfig:
    """One warp a program: a token is one thread's work (or, ``wide``, a warp's), and many small programs reach every
    SM early."""
    if wide:
        padded = 8 if n <= 8 else 16
        return SinkhornConfig(_WIDE_ENTRIES // padded**2, 1, _WIDE_SEGMENT)
    segment = (_REGISTER_BUDGET - 4 * n * n) // n
    return SinkhornConfig(32, 1, max(2, min(40, segment // 2 * 2)))


def candidates(n: int, wide: bool) -> list[SinkhornConfig]:
    """Configurations worth timing; all give the same bits."""
    best = heuristic(n, wide)
    if wide:
        return [best]
    return [SinkhornConfig(32 * warps, warps, best.segment) for warps in (1, 2, 4)]


def valid(config: SinkhornConfig, n: int, wide: bool) -> bool:
    """The configuration can run n streams."""
    return config in candidates(n, wide)
