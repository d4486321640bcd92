"""Tiles of the Triton kernels for the residual update: `RowConfig` for what a program loads of a token."""

from __future__ import annotations

import functools

from .._rows import RowConfig, row_candidates, row_config

__all__ = [
    "BIAS_CHUNK",
    "BIAS_STAGES",
    "bwd_candidates",
    "bwd_heuristic",
    "fwd_candidates",
    "fwd_heuristic",
    "valid",
]

#: Tokens whose bias gradients one program adds up, in order.
BIAS_CHUNK = 16
#: Tokens of such a chunk whose loads are in flight or in use at a time.
BIAS_STAGES = 3


def _fwd_limits(n: int) -> tuple[int, int]:
    """Registers to fill with loads, and warps: the n*n weights take registers too."""
    return (144, 8) if n <= 5 else (48, 8) if n == 6 else (48, 4)


def _bwd_limits(n: int, bias: bool) -> tuple[int, int]:
    """The same. The n*n + n dot products take registers; the fewer warps, the fewer wait for one another."""
    if n <= 4 or (bias and n <= 6):
        return 72, 4
    return (108, 2) if n <= 6 else (72, 1)


@functools.lru_cache(maxsize=None)
def fwd_heuristic(n: int, width: int, itemsize: int, bias: bool) -> RowConfig:
    """Forward; ``itemsize`` of the streams."""
    return row_config(width, itemsize, n + 1 + bias, *_fwd_limits(n))


def fwd_candidates(n: int, width: int, itemsize: int, bias: bool) -> list[RowConfig]:
    """Configurations worth timing; all give the same bits."""
    return row_candidates(width, itemsize, n + 1 + bias, *_fwd_limits(n))


@functools.lru_cache(maxsize=None)
def bwd_heuristic(n: int, width: int, itemsize: int, bias: bool) -> RowConfig:
    """Backward; with ``bias`` a program keeps to one group of columns."""
    return row_config(width, itemsize, 2 * n + 1, *_bwd_limits(n, bias))


def bwd_candidates(n: int, width: int, itemsize: int, bias: bool) -> list[RowConfig]:
    """Configurations worth timing. Each has its own order of sums: a choice among them changes bits."""
    return row_candidates(width, itemsize, 2 * n + 1, *_bwd_limits(n, bias))


def valid(config: RowConfig, n: int, width: int, itemsize: int) -> bool:
    """The configuration can run this shape, in either direction."""
    found = (fwd_candidates, bwd_candidates)
    return any(config in each(n, width, itemsize, bias) for each in found for bias in (False, True))
