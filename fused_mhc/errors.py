"""The three exceptions of this library. Every message names the argument, what was expected and what came."""

from __future__ import annotations

__all__ = ["BackendError", "InputError", "ScheduleError"]


class InputError(ValueError):
    """An argument, an environment variable or a command-line option is not what the contract allows.

    Raised before anything is computed or allocated.
    """


class BackendError(RuntimeError):
    """A backend asked for by name cannot run here. A named backend never falls back to another one."""


class ScheduleError(RuntimeError):
    """A task graph is wrong (found before launch) or did not finish (found by the watchdog)."""
