"""Tiles of the Triton aggregate kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass

__all__ = ["AggregateConfig", "bwd_heuristic", "fwd_heuristic"]


@dataclass(frozen=True)
class AggregateConfig:
    """A program takes ``group`` times ``block`` columns of a token at once (the backward then goes on to the next
    such group, the forward leaves it to another program)."""

    block: int
    group: int
    num_warps: int


@functools.lru_cache(maxsize=None)
def fwd_heuristic(width: int, itemsize: int) -> AggregateConfig:
    return AggregateConfig(min(1024, 1 << max(width - 1, 0).bit_length()), 1, 4)


@functools.lru_cache(maxsize=None)
def bwd_heuristic(n: int, width: int, itemsize: int) -> AggregateConfig:
    return AggregateConfig(1024, 4, 4)
