"""The small kernel that `fused_mhc.cutile` compiles to see whether cuTile works; loaded when it asks."""

from __future__ import annotations

import cuda.tile as ct
from cuda.tile import compilation

__all__ = ["probe_kernel", "probe_signature"]


@ct.kernel
def probe_kernel(x):
    """Adds one to an element of each program."""
    memory = x.get_raw_memory()
    memory.store_offset(ct.bid(0), memory.load_offset(ct.bid(0)) + 1.0)


def probe_signature() -> compilation.KernelSignature:
    """One fp32 array."""
    array = compilation.ArrayConstraint(
        ct.float32,
        1,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=(1,),
    )
    convention = compilation.CallingConvention.cutile_python_v2()
    return compilation.KernelSignature([array], convention, "probe_kernel")
