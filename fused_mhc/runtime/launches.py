"""What the last Program run in this process was."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

from fused_mhc.scheduler import Program

__all__ = ["LaunchRecord", "last_launch", "note_launch"]


@dataclass(frozen=True)
class LaunchRecord:
    """One run of a Program.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        executor: ``"cpu"`` or ``"gpu"``.
        tasks: tasks in its table.
        workers: workers that ran them.
        digest: of the Program.
        interpreted: whether the Triton interpreter ran it.
    """

    direction: str
    executor: Literal["cpu", "gpu"]
    tasks: int
    workers: int
    digest: str
    interpreted: bool


_LAST: dict[str | None, LaunchRecord] = {}
_LOCK = threading.Lock()


def note_launch(
    program: Program, executor: Literal["cpu", "gpu"], workers: int, *, interpreted: bool = False
) -> None:
    """Remember a run; executors call it when one has ended well."""
    record = LaunchRecord(
        program.direction, executor, program.task_count, workers, program.digest, interpreted
    )
    with _LOCK:
        _LAST[None] = _LAST[program.direction] = record


def last_launch(direction: str | None = None) -> LaunchRecord | None:
    """The record of the last Program run in this process, of either direction or of the given one; None if
    there was none."""
    with _LOCK:
        return _LAST.get(direction)
