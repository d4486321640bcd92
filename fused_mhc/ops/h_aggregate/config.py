"""Tiles of the Triton aggregate kernels: `RowConfig` for the streams and the gradient of a token."""

from __future__ import annotations

import functools

from .._rows import RowConfig, row_candidates, row_config

__all__ = ["candidates", "heuristic", "valid"]

_REGISTERS, _MOST_WARPS = 144, 4


@functools.lru_cache(maxsize=None)
def heuristic(n: int, width: int, itemsize: int) -> RowConfig:
    """Both directions; ``itemsize`` of the streams."""
    return row_config(width, itemsize, n + 1, _REGISTERS, _MOST_WARPS)


def candidates(n: int, width: int, itemsize: int) -> list[RowConfig]:
    """Configurations worth timing. Each has its own order of sums in the backward: a choice among them changes bits."""
    return row_candidates(width, itemsize, n + 1, _REGISTERS, _MOST_WARPS)


def valid(config: RowConfig, n: int, width: int, itemsize: int) -> bool:
    """The configuration can run this shape."""
    return config in candidates(n, width, itemsize)
