"""Records of what workers did, from either executor: when to take them, how to read and draw them."""

from __future__ import annotations

from fused_mhc.profiler.gantt import draw_gantt
from fused_mhc.profiler.records import (
    COMPUTE,
    KIND_NAMES,
    RECORD_DTYPE,
    RECORD_WORDS,
    TRIGGER,
    WAIT,
    Launch,
    make_launch,
    of_simulation,
    roles_of,
)
from fused_mhc.profiler.session import Action, current, profile, schedule
from fused_mhc.profiler.trace import Merge, chrome_trace, export_chrome_trace, merge_torch_trace

__all__ = [
    "COMPUTE",
    "KIND_NAMES",
    "RECORD_DTYPE",
    "RECORD_WORDS",
    "TRIGGER",
    "WAIT",
    "Action",
    "Launch",
    "Merge",
    "chrome_trace",
    "current",
    "draw_gantt",
    "export_chrome_trace",
    "make_launch",
    "merge_torch_trace",
    "of_simulation",
    "profile",
    "roles_of",
    "schedule",
]
