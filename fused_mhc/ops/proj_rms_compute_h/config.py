"""Tile sizes of the projection's kernels, and the parts that its products are made of.

`STEP`, `SLICE`, `GROUP`, `hopper_group`, `CHUNK`, `grad_tokens` and the tile of the mapping kernels fix the order of sums
and are part of the operation. What a tuned configuration may change leaves every bit as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

__all__ = [
    "CHUNK",
    "GROUP",
    "HOPPER_ROWS",
    "HOPPER_WARPGROUPS",
    "HOPPER_WIDTH",
    "ORDER",
    "PARTS",
    "SHARE_TOKENS",
    "SLICE",
    "STEP",
    "ProjectionConfig",
    "candidates",
    "chunks_per_program",
    "columns",
    "g_parts",
    "heuristic",
    "hopper_columns",
    "hopper_group",
    "mapping_tokens",
    "padded",
    "slices_per_program",
    "valid",
]

#: bf16 parts that hold every bit of a value of this dtype.
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
#: Products of parts i and j are taken where ``i + j`` is below this.
ORDER = {"fp32": 3, "tf32": 2}
#: Elements of K in one step: one tile of x and one of the weight in shared memory.
STEP = 64
#: Elements of K whose sum is the smallest that a program may leave behind.
SLICE = 256
#: Elements of K whose slices are added first, in order; the groups follow, in order. (`hopper_group`: those of the
#: Hopper forward.)
GROUP = 4096
#: Tokens whose share of the weight's gradient is one partial sum.
CHUNK = 1024
#: Warpgroups of the Hopper forward that share a tile of the weight, by its columns, one or two powers of two: two where
#: two programs share a multiprocessor, else as many as have registers for three sums of every column.
HOPPER_WARPGROUPS = {16: 2, 32: 2, 40: 4, 48: 3, 64: 3, 80: 3, 96: 2, 128: 2}
#: Rows of x of each of them.
HOPPER_ROWS = 64
#: Columns of K in one product of the Hopper backward.
HOPPER_WIDTH = 128
#: Tokens whose share of the gradients of alphas and bias is one partial sum.
SHARE_TOKENS = 32


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
    return min(128, padded(size))


def padded(size: int) -> int:
    """Columns of the projection rounded up to a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def g_parts(dtype: torch.dtype) -> int:
    """bf16 parts of the mapping's gradient: three for fp32 x; for 16-bit x two, which are off by 2^-17."""
    return 3 if dtype is torch.float32 else 2


def mapping_tokens(count: int) -> int:
    """Tokens of one program of a forward's mapping kernel, of ``count`` in all: the fewer, the less each waits for
    partial sums. No bit depends on it."""
    return 8 if count > 1024 else 1


def slices_per_program(token_tiles: int, groups: int, group: int = GROUP // SLICE) -> int:
    """Slices of K in one partial sum: a whole group, or one where few tokens leave most of the chip idle."""
    return group if token_tiles * groups >= 128 else 1


def hopper_columns(size: int) -> int:
    """Columns of the projection in the Hopper forward: N rounded up."""
    return next(columns for columns in HOPPER_WARPGROUPS if columns >= size)


def hopper_group(size: int, width: int) -> int:
    """Slices in one group of the Hopper forward: a matter of N and K alone, as every bit depends on it. K is cut into
    equal shares, so many that the items of 4096, 8192, 16384... tokens fill 132 multiprocessors in whole rounds (six where
    tiles have 192 tokens, else eight), and so few that their partial sums are some 3% of x. A share of more than 24 slices
    is cut again: the kernels that add up single slices have the loads of a group in flight together."""
    slices = -(-width // SLICE)
    shares = 6 if HOPPER_WARPGROUPS[hopper_columns(size)] == 3 else 8
    return -(-slices // (shares * -(-slices // (24 * shares))))


def chunks_per_program(width_tiles: int, chunks: int) -> int:
    """Chunks of tokens in one program of the backward: as many as leave 128 programs, at most 4."""
    return next((p for p in (4, 2) if width_tiles * -(-chunks // p) >= 128), 1)


def heuristic(shape: tuple[int, int], arch: str) -> ProjectionConfig:
    """The configuration for a weight of this ``shape`` (N, K) on ``arch``."""
    block = columns(shape[0])
    small_memory = arch in ("sm_75", "sm_86", "sm_89", "sm_120", "sm_121")
    grad_tokens, grad_width = (64, 128) if shape[0] <= 64 else (64, 64) if shape[0] <= 128 else (16, 32)
    return ProjectionConfig(
        tokens=128 if block <= 64 else 64,
        num_warps=8,
        num_stages=2 if small_memory or block > 64 else 4 if block <= 32 else 3,
        grad_tokens=grad_tokens,
        grad_width=grad_width,
        grad_warps=8,
        grad_stages=1 if small_memory or shape[0] > 128 else 2,
    )


def candidates(shape: tuple[int, int], arch: str) -> list[ProjectionConfig]:
    """Configurations that give the same bits as the heuristic one: the pipelining depth is all that may differ."""
    base = heuristic(shape, arch)
    found = [replace(base, num_stages=f, grad_stages=b) for f in (2, 3, 4) for b in (1, 2, 3)]
    return [config for config in found if valid(config, shape)]


def valid(config: ProjectionConfig, shape: tuple[int, int]) -> bool:
    """Whether the staged tiles of a configuration fit in the shared memory of a data-centre GPU (bf16 x)."""
    step = 2 * STEP * (config.tokens + 3 * columns(shape[0]))
    grad_step = 2 * config.grad_tokens * (config.grad_width + 3 * padded(shape[0]))
    grad = config.grad_stages * grad_step + 6 * padded(shape[0]) * config.grad_width
    return max(config.num_stages * step, grad) <= 224 * 1024
