"""Tile of the Triton sum of three tensors."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AddConfig", "candidates", "heuristic", "valid"]


@dataclass(frozen=True)
class AddConfig:
    """``block`` elements a program on ``num_warps`` warps. No choice changes a bit."""

    block: int
    num_warps: int


def heuristic() -> AddConfig:
    return AddConfig(block=2048, num_warps=4)


def candidates() -> list[AddConfig]:
    """Configurations worth timing."""
    return [AddConfig(block, warps) for block in (1024, 2048, 4096) for warps in (4, 8)]


def valid(config: AddConfig) -> bool:
    """The configuration can run."""
    return config in candidates()
