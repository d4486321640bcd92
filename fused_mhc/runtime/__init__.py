"""Executors of Programs: the CPU one, and the persistent megakernel."""

from __future__ import annotations

from .buffers import allocate, reduce_partials
from .cpu import CpuExecutor
from .launches import LaunchRecord, last_launch
from .tiles import Settings

__all__ = ["CpuExecutor", "LaunchRecord", "Settings", "allocate", "last_launch", "reduce_partials"]
