"""``backend="triton", schedule="mega"``: the hosts that run a Program through the persistent megakernel.

A boundary runs through the tiled graphs; the backward of the first site of a chain, which they do not have, through the
fixed one. Neither choice looks at the number of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fused_mhc.device import device_info
from fused_mhc.ops._triton_common import INTERPRETING
from fused_mhc.scheduler import lower_mega_mhc, lower_tiled_mhc

from .gpu import GpuExecutor
from .hosts import HOSTS, Runner, Shape

__all__ = ["program_host"]


@functools.lru_cache(maxsize=32)
def _executor(direction: str, shape: Shape) -> GpuExecutor:
    """Proven Programs of the shapes seen last, with one mixed worker for each multiprocessor."""
    workers = max(1, device_info(shape.device).sm_count)
    lower = lower_mega_mhc if shape.entry and direction == "backward" else lower_tiled_mhc
    program = lower(
        direction,
        shape.token_count,
        shape.width,
        shape.n,
        num_cube_workers=max(1, workers // 3),
        num_vector_workers=max(1, workers - workers // 3),
        mixed_workers=workers,
        stream_dtype=shape.stream,
        compute_dtype=shape.compute,
        dtypes=dict(shape.dtypes),
        has_norm_weight=shape.has_norm_weight,
    )
    return GpuExecutor(program, shape.device)


_GPU = Runner("triton", "cpu" if INTERPRETING.value else "cuda", _executor)


def program_host(op: str, direction: str) -> Callable[..., Any]:
    """The host function that runs ``op`` in ``direction`` as one launch of the megakernel."""
    return functools.partial(HOSTS[op, direction], _GPU)
