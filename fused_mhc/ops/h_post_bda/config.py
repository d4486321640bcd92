"""Tiles of the Triton kernels for the residual update: `RowConfig` for what a program loads of a token."""

from __future__ import annotations

import functools

from .._rows import RowConfig, row_candidates, row_config

__all__ = ["BIAS_CHUNK", "bwd_candidates", "bwd_heuristic", "fwd_candidates", "fwd_heuristic", "valid"]

#: Tokens whose bias gradients one program adds up, in order.
BIAS_CHUNK = 16

_FWD_REGISTERS, _FWD_WARPS = 144, 8
_BWD_REGISTERS, _BWD_WARPS = 108, 8
#: One warp a program, so that no barrier stands between two of its tokens.
_BIAS_REGISTERS, _BIAS_WARPS = 144, 1


@functools.lru_cache(maxsize=None)
def fwd_heuristic(n: int, width: int, itemsize: int) -> RowConfig:
    """Forward; ``itemsize`` of the streams."""
    return row_config(width, itemsize, n + 1, _FWD_REGISTERS, _FWD_WARPS)


def fwd_candidates(n: int, width: int, itemsize: int) -> list[RowConfig]:
    """Configurations worth timing; all give the same bits."""
    return row_candidates(width, itemsize, n + 1, _FWD_REGISTERS, 2 * _FWD_WARPS)


@functools.lru_cache(maxsize=None)
def bwd_heuristic(n: int, width: int, itemsize: int, bias: bool) -> RowConfig:
    """Backward; with ``bias`` a program keeps to one group of columns."""
    if bias:
        return row_config(width, itemsize, 2 * n + 1, _BIAS_REGISTERS, _BIAS_WARPS)
    return row_config(width, itemsize, 2 * n + 1, _BWD_REGISTERS, _BWD_WARPS)


def bwd_candidates(n: int, width: int, itemsize: int) -> list[RowConfig]:
    """Configurations worth timing. Each has its own order of sums: a choice among them changes bits."""
    return row_candidates(width, itemsize, 2 * n + 1, _BWD_REGISTERS, 2 * _BWD_WARPS)


def valid(config: RowConfig, n: int, width: int, itemsize: int) -> bool:
    """The configuration can run this shape, in either direction."""
    return config in fwd_candidates(n, width, itemsize) + bwd_candidates(n, width, itemsize)
