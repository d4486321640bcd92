"""Tile sizes of the projection's Triton kernels.

`LEAF`, `GROUP` and `CHUNK` fix the order of every sum and are part of the operation, not of its tuning: they depend
on the shape of the weight alone. A tuned configuration changes only what leaves every bit as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "CHUNK",
    "GROUP",
    "MAPPING_TOKENS",
    "ProjectionConfig",
    "candidates",
    "columns",
    "heuristic",
    "leaf",
    "valid",
]

#: Elements of K that one program of a large batch walks; its leaves are added in order, then the groups are.
GROUP = 4096
#: Tokens whose share of the weight's gradient is one partial sum.
CHUNK = 1024
#: Tokens of one program of the mapping kernels; the partial sums of the alphas and of the bias cover as many.
MAPPING_TOKENS = 32


@dataclass(frozen=True)
class ProjectionConfig:
    """One choice of tiles.

    Attributes:
        tokens: rows of x in a program of the forward.
        num_warps, num_stages: of the forward.
        grad_tokens, grad_width: tokens and columns of K in one step of the backward.
        grad_warps, grad_stages: of the backward.
    """

    tokens: int
    num_warps: int
    num_stages: int
    grad_tokens: int
    grad_width: int
    grad_warps: int
    grad_stages: int


def columns(size: int) -> int:
    """Columns of the projection in one program: N rounded up to a power of two, 16 to 128."""
    return min(128, max(16, 1 << (size - 1).bit_length()))


def leaf(size: int) -> int:
    """Elements of K that one accumulation on the tensor cores covers (they do not add exactly as fp32 does)."""
    return 8192 // max(32, columns(size))


def heuristic(shape: tuple[int, int], arch: str) -> ProjectionConfig:
    """The configuration for a weight of this ``shape`` (N, K) on ``arch``."""
    wide = columns(shape[0]) > 64
    return ProjectionConfig(
        tokens=64,
        num_warps=4,
        num_stages=2 if arch in ("sm_86", "sm_89", "sm_120") else 3,
        grad_tokens=64,
        grad_width=64 if wide else 128,
        grad_warps=8 if wide else 4,
        grad_stages=2,
    )


def candidates(shape: tuple[int, int], arch: str) -> list[ProjectionConfig]:
    """Configurations that give the same bits as the heuristic one: pipelining depth is all that may differ."""
    base = heuristic(shape, arch)
    found = [
        ProjectionConfig(**{**base.__dict__, "num_stages": forward, "grad_stages": backward})
        for forward in (2, 3, 4)
        for backward in (1, 2, 3)
    ]
    return [c for c in found if valid(c, shape)]


def valid(config: ProjectionConfig, shape: tuple[int, int]) -> bool:
    """Whether the staged tiles of a configuration fit in the shared memory of a current GPU (bf16 x)."""
    step = leaf(shape[0]) * (2 * config.tokens + 4 * columns(shape[0]))
    grad_step = config.grad_tokens * (2 * config.grad_width + 6 * columns(shape[0]))
    return max(config.num_stages * step, config.grad_stages * grad_step) <= 224 * 1024
