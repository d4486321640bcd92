"""Tiles of the Triton kernels of `mhc_pre`; the projection's and the aggregate's are their own."""

from __future__ import annotations

__all__ = ["MAPPING_TOKENS"]

#: Tokens of one program of the mapping kernels; the partial sums of the alphas and of the bias cover as many.
MAPPING_TOKENS = 32
