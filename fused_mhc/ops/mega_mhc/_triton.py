"""The single pass in Triton: see `_triton_fwd` and `_triton_bwd`."""

from __future__ import annotations

from ._triton_bwd import mega_mhc_bwd, mega_mhc_entry_bwd, mega_mhc_exit_bwd
from ._triton_fwd import mega_mhc_entry_fwd, mega_mhc_exit_fwd, mega_mhc_fwd

__all__ = [
    "mega_mhc_bwd",
    "mega_mhc_entry_bwd",
    "mega_mhc_entry_fwd",
    "mega_mhc_exit_bwd",
    "mega_mhc_exit_fwd",
    "mega_mhc_fwd",
]
