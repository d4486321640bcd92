"""Tiles of the Triton kernels for the residual update."""

from __future__ import annotations

import functools
from dataclasses import dataclass

__all__ = ["BIAS_CHUNK", "PostConfig", "bwd_heuristic", "fwd_heuristic"]

#: Tokens whose bias gradients one program adds up, in order.
BIAS_CHUNK = 16
#: Blocks of columns whose bias gradients a program can hold in registers.
_HELD_BLOCKS = 8


@dataclass(frozen=True)
class PostConfig:
    """A program takes ``block`` columns of a token at a time on ``num_warps`` warps (the backward then goes on to the
    next columns, the forward leaves them to another program)."""

    block: int
    num_warps: int

    def holds(self, width: int) -> bool:
        """A program of the backward can hold a bias gradient of this width."""
        return width <= _HELD_BLOCKS * self.block


@functools.lru_cache(maxsize=None)
def fwd_heuristic(n: int, width: int, itemsize: int) -> PostConfig:
    return PostConfig(min(1024, 1 << max(width - 1, 0).bit_length()), 4)


@functools.lru_cache(maxsize=None)
def bwd_heuristic(n: int, width: int, itemsize: int) -> PostConfig:
    return PostConfig(2048, 8)
