"""Executors of Programs: the CPU one, and the persistent megakernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .buffers import allocate, reduce_partials
from .cpu import CpuExecutor
from .launches import LaunchRecord, last_launch
from .tiles import Settings

if TYPE_CHECKING:
    from .gpu import GpuExecutor, check_launches

__all__ = [
    "CpuExecutor",
    "GpuExecutor",
    "LaunchRecord",
    "Settings",
    "allocate",
    "check_launches",
    "last_launch",
    "reduce_partials",
]


def __getattr__(name: str) -> Any:
    """The megakernel loads when it is asked for: it needs Triton."""
    if name in ("GpuExecutor", "check_launches"):
        from . import gpu

        return getattr(gpu, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
