"""Manifold-constrained hyper-connections (mHC): fused, deterministic, on every device torch knows.

The names below load on first use; importing `fused_mhc` or `fused_mhc.scheduler` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dispatch import (
        MHC_BACKEND_DETERMINISM,
        MHCBackend,
        backend_status,
        is_cutile_available,
        is_triton_available,
        log_fused_mhc_backend_once,
    )
    from .errors import BackendError, InputError, ScheduleError
    from .nn import HyperConnection, Mixes, SinglePassHyperConnection
    from .ops.contract import input_expand, learned_output_contract, output_contract
    from .ops.fused_add import fused_add_3
    from .ops.h_aggregate import fused_h_aggregate
    from .ops.h_post_bda import fused_h_post_bda
    from .ops.mega_mhc import mega_mhc, mega_mhc_entry, mega_mhc_exit
    from .ops.mhc_pre import mhc_pre
    from .ops.proj_rms_compute_h import fused_proj_rms_compute_h
    from .ops.sinkhorn import fused_sinkhorn

__version__ = "0.1.0"

_HOMES = {
    "errors": ("BackendError", "InputError", "ScheduleError"),
    "dispatch": (
        "MHC_BACKEND_DETERMINISM",
        "MHCBackend",
        "backend_status",
        "is_cutile_available",
        "is_triton_available",
        "log_fused_mhc_backend_once",
    ),
    "nn": ("HyperConnection", "Mixes", "SinglePassHyperConnection"),
    "ops.contract": ("input_expand", "learned_output_contract", "output_contract"),
    "ops.fused_add": ("fused_add_3",),
    "ops.h_aggregate": ("fused_h_aggregate",),
    "ops.h_post_bda": ("fused_h_post_bda",),
    "ops.mega_mhc": ("mega_mhc", "mega_mhc_entry", "mega_mhc_exit"),
    "ops.mhc_pre": ("mhc_pre",),
    "ops.proj_rms_compute_h": ("fused_proj_rms_compute_h",),
    "ops.sinkhorn": ("fused_sinkhorn",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_SUBMODULES = ("nn", "runtime", "scheduler", "profiler", "integrations", "testing")

__all__ = [
    "MHC_BACKEND_DETERMINISM",
    "BackendError",
    "HyperConnection",
    "InputError",
    "MHCBackend",
    "Mixes",
    "ScheduleError",
    "SinglePassHyperConnection",
    "__version__",
    "backend_status",
    "fused_add_3",
    "fused_h_aggregate",
    "fused_h_post_bda",
    "fused_proj_rms_compute_h",
    "fused_sinkhorn",
    "input_expand",
    "is_cutile_available",
    "is_triton_available",
    "learned_output_contract",
    "log_fused_mhc_backend_once",
    "mega_mhc",
    "mega_mhc_entry",
    "mega_mhc_exit",
    "mhc_pre",
    "output_contract",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is not None:
        value = getattr(importlib.import_module(f".{home}", __name__), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
