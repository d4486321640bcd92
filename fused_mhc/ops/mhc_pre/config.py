"""Tiles of the Triton kernels of `mhc_pre`; the projection's and the aggregate's are their own."""

from __future__ import annotations

__all__ = ["MAPPING_TOKENS", "sinkhorn_segment"]

#: Tokens of one program of the mapping kernels; the partial sums of the alphas and of the bias cover as many.
MAPPING_TOKENS = 32

#: Registers that Sinkhorn's backward may fill beside the aggregate's, which needs room for several programs.
_REGISTER_BUDGET = 116


def sinkhorn_segment(n: int) -> int:
    """Steps whose divisors Sinkhorn's backward keeps at a time (even; no bit depends on it): fewer than by itself, since
    it has time where it runs."""
    return max(2, min(40, (_REGISTER_BUDGET - 4 * n * n) // n // 2 * 2))
