"""Event numbers and limits shared by every table.

An event is a counter. It fires when as many tasks have triggered it as its trigger count says; each task
waits for at most one event and triggers exactly one.
"""

from __future__ import annotations

__all__ = [
    "ATOMIC_ADD_VALUE_LEN",
    "EVENT_INVALID_ID",
    "MAX_EVENT_CAPACITY",
    "MIN_EVENT_CAPACITY",
]

#: Counters kept free after the last event of the backward graph, so that its reset never shares a line with
#: it.
ATOMIC_ADD_VALUE_LEN = 8
#: What the two fixed graphs may use; every device table holds at least this many events.
MIN_EVENT_CAPACITY = 1024
#: What the table holds, for graphs of our own.
MAX_EVENT_CAPACITY = 4096
#: "Waits for nothing".
EVENT_INVALID_ID = 0xFFFFFFFF
