"""How a Triton program walks the columns of a token: blocks of columns, some of them loaded together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["RowConfig", "row_candidates", "row_config"]

#: Bytes of the widest load.
_LOAD_BYTES = 16


@dataclass(frozen=True)
class RowConfig:
    """``group`` blocks of ``block`` columns are loaded before any of them is stored, on ``num_warps`` warps; then the
    next such group follows."""

    block: int
    group: int
    num_warps: int


def _group(blocks: int, most: int, whole: bool) -> int:
    """At most ``most`` of ``blocks`` at a time; in equal shares where the row is made of ``whole`` blocks, since masks
    cost more than loads that wait."""
    if whole:
        return next(g for g in range(min(blocks, most), 0, -1) if blocks % g == 0)
    return -(-blocks // -(-blocks // most))


def _configs(width: int, itemsize: int, vectors: int, registers: int, most_warps: int) -> Iterator[RowConfig]:
    vector = _LOAD_BYTES // itemsize
    most = max(1, registers // (vectors * _LOAD_BYTES // 4))
    warps = most_warps
    while warps > 1 and 32 * warps * vector > width:
        warps //= 2
    while warps >= 1:
        block = 32 * warps * vector
        if block > width:  # one warp is more than enough
            block = max(vector, 1 << (width - 1).bit_length())
        yield RowConfig(block, _group(-(-width // block), most, width % block == 0), warps)
        warps //= 2


def row_candidates(
    width: int, itemsize: int, vectors: int, registers: int, most_warps: int
) -> list[RowConfig]:
    """Configurations for rows of ``width`` elements of ``itemsize`` bytes, of which a program loads ``vectors`` side
    by side: every lane loads 16 bytes of each at a time, and fills at most about ``registers`` registers so."""
    return list(_configs(width, itemsize, vectors, registers, most_warps))


def row_config(width: int, itemsize: int, vectors: int, registers: int, most_warps: int) -> RowConfig:
    """The candidate with most warps among those whose blocks fill the row; if none does, the one with most warps."""
    configs = row_candidates(width, itemsize, vectors, registers, most_warps)
    return next((c for c in configs if width % c.block == 0), configs[0])
