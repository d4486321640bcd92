"""When to record: a schedule like torch.profiler's, and the session that executors ask."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from types import TracebackType

from fused_mhc.errors import InputError, ScheduleError
from fused_mhc.profiler.records import Launch

__all__ = ["Action", "Schedule", "current", "profile", "schedule"]


class Action(Enum):
    """What happens in a step."""

    NONE = "none"
    WARMUP = "warmup"
    RECORD = "record"
    RECORD_AND_SAVE = "record_and_save"


Schedule = Callable[[int], Action]


def schedule(*, wait: int, warmup: int, active: int, repeat: int = 0) -> Schedule:
    """Step number -> action, as ``torch.profiler.schedule``: cycles of ``wait`` steps without recording,
    ``warmup`` steps that record and throw away, ``active`` steps that record; ``repeat`` cycles, or without
    end for 0.

    Raises:
        InputError: a count is negative, or ``active`` is not positive.
    """
    for name, value in (("wait", wait), ("warmup", warmup), ("repeat", repeat)):
        if value < 0:
            raise InputError(f"{name}: expected 0 or more, got {value}")
    if active <= 0:
        raise InputError(f"active: expected 1 or more, got {active}")
    cycle = wait + warmup + active

    def action(step: int) -> Action:
        if step < 0:
            raise InputError(f"step: expected 0 or more, got {step}")
        if repeat and step >= repeat * cycle:
            return Action.NONE
        place = step % cycle
        if place < wait:
            return Action.NONE
        if place < wait + warmup:
            return Action.WARMUP
        return Action.RECORD_AND_SAVE if place == cycle - 1 else Action.RECORD

    return action


class profile:  # noqa: N801 - a context manager named as torch.profiler's
    """Record the Programs that run inside the ``with`` block.

    Args:
        schedule: see :func:`schedule`; None records every step.
        capacity: records kept for each worker of a launch; further ones are counted as dropped.
        on_trace_ready: called with the profile at the end of each cycle (and of the block, if records are
            left); afterwards ``launches`` starts anew.

    ``step()`` ends a step. ``launches`` holds what was recorded. Blocks do not nest: entering a second one
    raises :class:`~fused_mhc.errors.ScheduleError`.
    """

    def __init__(
        self,
        *,
        schedule: Schedule | None = None,
        capacity: int = 4096,
        on_trace_ready: Callable[[profile], None] | None = None,
    ) -> None:
        if capacity <= 0:
            raise InputError(f"capacity: expected 1 or more, got {capacity}")
        self._schedule = schedule
        self._on_trace_ready = on_trace_ready
        self._lock = threading.Lock()
        self.capacity = capacity
        self.step_number = 0
        self.launches: list[Launch] = []

    @property
    def action(self) -> Action:
        """What happens in the present step."""
        return Action.RECORD if self._schedule is None else self._schedule(self.step_number)

    @property
    def dropped(self) -> int:
        """Records lost in ``launches`` for want of room."""
        return sum(launch.dropped for launch in self.launches)

    def add(self, launch: Launch) -> None:
        """Keep a launch (thrown away in a warm-up step); executors call it."""
        with self._lock:
            if self.action is not Action.WARMUP:
                self.launches.append(launch)

    def step(self) -> None:
        """End the present step."""
        if self.action is Action.RECORD_AND_SAVE:
            self._hand_over()
        self.step_number += 1

    def _hand_over(self) -> None:
        if self._on_trace_ready is not None:
            self._on_trace_ready(self)
            self.launches = []

    def __enter__(self) -> profile:
        global _session  # noqa: PLW0603 - one session a process, as the record buffers of a device are
        with _session_lock:
            if _session is not None:
                raise ScheduleError("profile: expected no open profile block, got one inside another")
            _session = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _session  # noqa: PLW0603
        with _session_lock:
            _session = None
        if kind is None and self.launches:
            self._hand_over()


_session: profile | None = None
_session_lock = threading.Lock()


def current() -> profile | None:
    """The open profile if the present step records, else None: all that an executor asks when profiling is
    off."""
    session = _session
    return None if session is None or session.action is Action.NONE else session
