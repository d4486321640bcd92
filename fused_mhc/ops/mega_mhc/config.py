"""Tiles of the Triton kernels of the single pass.

`CHUNK`, `MAPPING_TOKENS` and the tiles of `SiteConfig` fix the order of sums: they depend on n and C alone, never on
the number of tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton

from .._rows import RowConfig, row_config
from ..proj_rms_compute_h.config import padded

__all__ = [
    "CHUNK",
    "EXIT_CHUNK",
    "MAPPING_TOKENS",
    "MAPPING_WARPS",
    "MAX_FUSED_SINKHORN",
    "EntryConfig",
    "ExitConfig",
    "SiteConfig",
    "columns",
    "entry_heuristic",
    "entry_mean_heuristic",
    "exit_heuristic",
    "heuristic",
    "lane_elements",
]

#: Tokens whose share of the gradients of phi and norm_weight is one partial sum.
CHUNK = 1024
#: Tokens of one program of the exit's backward when norm_weight has a gradient, and of one partial sum of that: as many
#: as make the partial sums' traffic small, as few as leave no multiprocessor without programs at the end.
EXIT_CHUNK = 8
#: Tokens of one program of the backward's mapping; the partial sums of g_alpha and g_bias cover as many.
MAPPING_TOKENS = 32
#: Its warps. One would do for Sinkhorn, whose threads hold a token each, but not for the loads around it.
MAPPING_WARPS = 4

#: Largest n whose Sinkhorn backward runs inside the mapping's kernel; beyond, registers spill and it has its own launch.
MAX_FUSED_SINKHORN = 4


@dataclass(frozen=True)
class SiteConfig:
    """Tiles for one n and C.

    Attributes:
        block, num_warps: columns of a token that a program of the forward updates at once, and its warps.
        group: blocks of columns whose loads come before the first one's stores.
        keep: keep ``mixed`` in registers until its RMS is known (else it is made again).
        norm_width, norm_tokens, norm_warps: columns and tokens of a step of the pass for g_phi and the RMSNorm.
        state_width, state_tokens, state_warps: columns and tokens of a step of the pass for the state's gradients.
        stages: steps in flight in the pass for g_phi and the RMSNorm.
    """

    block: int
    num_warps: int
    group: int
    keep: bool
    norm_width: int
    norm_tokens: int
    norm_warps: int
    state_width: int
    state_tokens: int
    state_warps: int
    stages: int


@dataclass(frozen=True)
class ExitConfig:
    """How a program of the exit's backward walks a token, and whether the token's ``mixed`` and gradient, and the column
    sums, stay in registers (else it is read again)."""

    rows: RowConfig
    keep: bool


@dataclass(frozen=True)
class EntryConfig:
    """Columns and tokens of a step of the entry's backward, steps in flight, and warps."""

    width: int
    tokens: int
    stages: int
    num_warps: int


def columns(n: int) -> int:
    """Columns of the projection, ``n*n + 2*n`` rounded up to a power of two that a tensor core takes."""
    return padded(n * n + 2 * n)


@functools.lru_cache(maxsize=None)
def heuristic(n: int, width: int) -> SiteConfig:
    """The tiles for n streams of ``width`` elements."""
    block = min(1024, max(128, triton.next_power_of_2(width)))
    blocks = triton.cdiv(width, block)
    # A step's streams, gradients and shares of g_phi have to fit in registers.
    return SiteConfig(
        block=block,
        num_warps=max(1, min(4, block // 256)),
        # Every load before the first store, while registers last.
        group=1 if n > 4 else blocks if blocks <= 4 else 2,
        keep=width <= 8192,
        norm_width=64 if n <= 4 else 32 if n <= 6 else 16,
        norm_tokens=32,
        norm_warps=4 if n <= 4 else 8,
        state_width=64 if n <= 4 else 32,
        state_tokens=16,
        state_warps=4,
        stages=2,
    )


def lane_elements(itemsize: int) -> int:
    """Neighbours that a lane loads at once."""
    return 16 // itemsize


@functools.lru_cache(maxsize=None)
def exit_heuristic(n: int, width: int, itemsize: int) -> ExitConfig:
    """For n streams of ``width`` elements of ``itemsize`` bytes."""
    # Wider rows would leave room for few programs, or spill; the second read of a token comes from the L2 cache.
    return ExitConfig(row_config(width, itemsize, n + 2, 48, 4), width * itemsize <= 2048)


@functools.lru_cache(maxsize=None)
def entry_mean_heuristic(width: int, itemsize: int) -> RowConfig:
    """For the entry's pass over x and the gradient of the block input."""
    return row_config(width, itemsize, 2, 32, 4)


def entry_heuristic(n: int) -> EntryConfig:
    """For n streams."""
    return EntryConfig(width=64, tokens=32, stages=2, num_warps=4 if n <= 4 else 8)
