"""How long a call takes on a device: medians of single calls, with the L2 cache flushed before each one on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..checks import check_count
from ..device import device_info

__all__ = ["Timing", "copy_bandwidth", "measure"]

#: Flush buffer where the driver does not tell the size of the L2 cache.
_FLUSH_BYTES = 256 << 20
#: Clock that a pause is counted in (a faster one only shortens the pause), and its limit in seconds.
_CYCLES_A_SECOND = 2_000_000_000
_LONGEST_PAUSE = 0.5


@dataclass(frozen=True)
class Timing:
    """Times of single calls in microseconds.

    Attributes:
        median, low, high: the middle one, the 20th and the 80th percentile.
        repeats: how many calls were timed.
    """

    median: float
    low: float
    high: float
    repeats: int


def _summary(times: list[float]) -> Timing:
    ordered = sorted(times)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)], len(ordered)
    )


def measure(
    call: Callable[[], Any],
    device: torch.device | str,
    *,
    warmup: int = 5,
    repeats: int = 30,
    cold: bool = True,
) -> Timing:
    """Time ``call`` on ``device``.

    On a GPU each call stands between two events and a pause holds the device until the host has queued them all, so
    that only device time counts; on a CPU the clock is the wall's.

    Args:
        call: takes nothing; its result is dropped.
        device: where its work runs.
        warmup: untimed calls first. Default 5.
        repeats: timed calls. Default 30.
        cold: write a buffer twice as large as the L2 cache before each call (GPU only). Default True.

    Raises:
        InputError: ``warmup`` is negative or ``repeats`` is below 1.
    """
    check_count("warmup", warmup, 0)
    check_count("repeats", repeats)
    device = torch.device(device)
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e6)
        return _summary(times)
    with torch.cuda.device(device):
        size = 2 * device_info(device).l2_bytes or _FLUSH_BYTES
        flush = torch.empty(size if cold else 0, dtype=torch.int8, device=device)
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        queueing = (time.perf_counter() - began) * repeats
        torch.cuda.synchronize(device)
        torch.cuda._sleep(int(min(queueing * 1.5, _LONGEST_PAUSE) * _CYCLES_A_SECOND))
        for start, end in zip(starts, ends, strict=True):
            flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
    return _summary([start.elapsed_time(end) * 1e3 for start, end in zip(starts, ends, strict=True)])


def copy_bandwidth(device: torch.device | str, size: int = 2 << 30) -> float:
    """GB/s (bytes read plus bytes written) of a plain copy of ``size`` bytes on ``device``: the limit of every
    operation here.

    Raises:
        InputError: ``size`` is below 1.
    """
    check_count("size", size)
    source = torch.randint(
        0, 256, (size,), dtype=torch.uint8, device=device
    )  # zeros may copy faster than data
    target = torch.empty_like(source)
    timing = measure(lambda: target.copy_(source), device)
    return 2 * size / timing.median / 1e3
