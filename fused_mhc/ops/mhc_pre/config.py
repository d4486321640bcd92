"""Tiles of the Triton kernels of `mhc_pre`.

`STEP`, `LEAF`, `span` and `MAPPING_TOKENS` fix the order of sums: they depend on n and C alone, never on the number
of tokens. `LAG` and the tokens of a tile change only when things happen.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import triton

__all__ = [
    "LEAF",
    "MAPPING_TOKENS",
    "STEP",
    "PreConfig",
    "candidates",
    "columns",
    "heuristic",
    "span",
    "valid",
]

#: Elements of K in one accumulation on the tensor cores (they do not add exactly as fp32 does).
STEP = 64
#: Elements of K whose accumulations are added in order.
LEAF = 256
#: Tokens of one program of the mapping kernels; the partial sums of the alphas and of the bias cover as many.
MAPPING_TOKENS = 32
#: Most partial sums of a token's projection: one load each in the program that collapses it.
_MOST_PARTIALS = 64


@dataclass(frozen=True)
class PreConfig:
    """Choices that change no bit.

    Attributes:
        tokens: of one tile of the projection.
        lag: tiles whose projection is under way before the tokens of the first are collapsed: enough for its partial
            sums to be ready, few enough for its streams to be in the L2 cache still.
        block: columns that the program of a token collapses at once.
        num_warps: of a program.
        num_stages: loads in flight in the projection.
    """

    tokens: int
    lag: int
    block: int
    num_warps: int
    num_stages: int


def columns(n: int) -> int:
    """Columns of the projection, ``n*n + 2*n`` rounded up to a power of two that a tensor core takes."""
    return max(16, triton.next_power_of_2(n * n + 2 * n))


def span(width: int) -> int:
    """Elements of K that one program of the projection covers, a multiple of LEAF: few, so that the streams of all
    tiles under way fit in the L2 cache."""
    return LEAF * max(2, triton.cdiv(width, LEAF * _MOST_PARTIALS))


@functools.lru_cache(maxsize=None)
def heuristic(n: int, width: int) -> PreConfig:
    """The tiles for n streams of ``width`` elements."""
    tokens = 128 if columns(n) <= 32 else 64
    block = min(1024, max(128, triton.next_power_of_2(width)))
    return PreConfig(tokens=tokens, lag=6, block=block, num_warps=8, num_stages=3)


def candidates(n: int, width: int) -> list[PreConfig]:
    """Configurations worth timing; all give the same bits."""
    best = heuristic(n, width)
    return [replace(best, lag=lag, num_stages=stages) for lag in (3, 6, 9, 12) for stages in (2, 3, 4)]


def valid(config: PreConfig, n: int, width: int) -> bool:
    """The configuration can run this shape."""
    return config in candidates(n, width)
