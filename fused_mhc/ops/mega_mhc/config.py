"""Tiles of the Triton kernels of the single pass.

`STEP`, `LEAF`, `GROUP`, `CHUNK`, `MAPPING_TOKENS` and the blocks of `SiteConfig` fix the order of sums: they depend
on n and C alone, never on the number of tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton

__all__ = [
    "AHEAD",
    "CHUNK",
    "GROUP",
    "LEAF",
    "MANY_TILES",
    "MAPPING_TOKENS",
    "PROJECT_TOKENS",
    "STEP",
    "SiteConfig",
    "columns",
    "heuristic",
]

#: Elements of K in one accumulation on the tensor cores (they do not add exactly as fp32 does).
STEP = 64
#: Elements of K whose accumulations are added in order; a small batch gives each program one leaf.
LEAF = 256
#: Elements of K whose leaves are added in order; a large batch gives each program one group.
GROUP = 4096
#: Tokens of one tile of the projection.
PROJECT_TOKENS = 64
#: Tiles from which a program of the projection takes a whole group instead of a leaf (the bits are the same).
MANY_TILES = 32
#: Tiles whose tokens are updated before the first projection starts: more than are in flight at once.
AHEAD = 12
#: Tokens whose share of the gradients of phi and norm_weight is one partial sum.
CHUNK = 1024
#: Tokens of one program of the mapping kernels; the partial sums of g_alpha and g_bias cover as many.
MAPPING_TOKENS = 32


@dataclass(frozen=True)
class SiteConfig:
    """Tiles for one n and C.

    Attributes:
        block: columns of a token that a program updates at once.
        keep: keep ``mixed`` in registers until its RMS is known (else it is made again).
        norm_width, norm_tokens, norm_warps: columns and tokens of a step of the pass for g_phi and the RMSNorm.
        state_width, state_tokens, state_warps: columns and tokens of a step of the pass for the state's gradients.
        stages: loads in flight in the backward's loops.
    """

    block: int
    keep: bool
    norm_width: int
    norm_tokens: int
    norm_warps: int
    state_width: int
    state_tokens: int
    state_warps: int
    stages: int


def columns(n: int) -> int:
    """Columns of the projection, ``n*n + 2*n`` rounded up to a power of two that a tensor core takes."""
    return max(16, triton.next_power_of_2(n * n + 2 * n))


@functools.lru_cache(maxsize=None)
def heuristic(n: int, width: int) -> SiteConfig:
    """The tiles for n streams of ``width`` elements."""
    block = min(1024, max(128, triton.next_power_of_2(width)))
    # A step's streams, gradients and shares of g_phi have to fit in registers.
    norm_width = 64 if n <= 4 else 32 if n <= 6 else 16
    state_width = 64 if n <= 4 else 32
    return SiteConfig(
        block=block,
        keep=width <= 8192,
        norm_width=norm_width,
        norm_tokens=64,
        norm_warps=4 if n <= 4 else 8,
        state_width=state_width,
        state_tokens=32,
        state_warps=8,
        stages=2,
    )
