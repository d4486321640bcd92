"""What both executors write down: fixed-width records, and one launch of them with the names they need."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fused_mhc.errors import InputError
from fused_mhc.scheduler import EVENT_INVALID_ID, EventRange, Program, Stage
from fused_mhc.scheduler.simulate import Simulation

__all__ = [
    "COMPUTE",
    "KIND_NAMES",
    "RECORD_DTYPE",
    "RECORD_WORDS",
    "TRIGGER",
    "WAIT",
    "Launch",
    "make_launch",
    "of_simulation",
    "roles_of",
]

#: Kinds of a record: waiting for the event of a task, its work, releasing its event.
WAIT, COMPUTE, TRIGGER = 0, 1, 2
KIND_NAMES = ("wait", "compute", "trigger")

#: One record. A device writes it as ``RECORD_WORDS`` little-endian 64-bit words: start, end,
#: ``worker | core_type << 32``, ``task | stage << 32``, kind. Times are nanoseconds of one clock.
RECORD_DTYPE = np.dtype(
    [
        ("start", "<i8"),
        ("end", "<i8"),
        ("worker", "<i4"),
        ("core_type", "<i4"),
        ("task", "<i4"),
        ("stage", "<i4"),
        ("kind", "<i8"),
    ]
)
RECORD_WORDS = RECORD_DTYPE.itemsize // 8


@dataclass(frozen=True, eq=False)
class Launch:
    """The records of one launch.

    Attributes:
        kernel_name: name of the outer kernel (or range) in a trace of ``torch.profiler``.
        direction, executor, digest: which Program ran where.
        stages, events: names of the Program's stages and events.
        depends, triggers: the event that every task waits for and triggers.
        worker_roles: role of every worker.
        records: in the order of their starts.
        dropped: records for which there was no room.
        step: step of the profiler in which it ran.
    """

    kernel_name: str
    direction: str
    executor: str
    digest: str
    stages: tuple[Stage, ...] = field(repr=False)
    events: tuple[EventRange, ...] = field(repr=False)
    depends: np.ndarray = field(repr=False)
    triggers: np.ndarray = field(repr=False)
    worker_roles: tuple[str, ...] = field(repr=False)
    records: np.ndarray = field(repr=False)
    dropped: int = 0
    step: int = 0

    @property
    def span_ns(self) -> int:
        """From the first start to the last end."""
        return int(self.records["end"].max() - self.records["start"].min()) if len(self.records) else 0

    def event_name(self, event: int) -> str:
        """``rms_ready[3]``."""
        for part in self.events:
            if part.base <= event < part.base + part.count:
                return f"{part.name}[{event - part.base}]"
        return f"event {event}"

    def idle_share(self) -> dict[str, float]:
        """Role -> part of the span in which its workers did not compute."""
        span = max(self.span_ns, 1)
        mine = self.records[self.records["kind"] == COMPUTE]
        busy = np.bincount(mine["worker"], mine["end"] - mine["start"], minlength=len(self.worker_roles))
        roles = np.array(self.worker_roles)
        return {
            role: 1.0 - float(busy[roles == role].mean()) / span for role in dict.fromkeys(self.worker_roles)
        }


def roles_of(program: Program) -> tuple[str, ...]:
    """Role of every worker of a Program."""
    if program.mixed_workers:
        return ("mixed",) * program.mixed_workers
    return ("cube",) * program.num_cube_workers + ("vector",) * program.num_vector_workers


def make_launch(
    program: Program,
    records: np.ndarray,
    *,
    executor: str,
    kernel_name: str,
    dropped: int = 0,
    step: int = 0,
    worker_roles: tuple[str, ...] | None = None,
) -> Launch:
    """A launch of ``program`` from its records (an array of ``RECORD_DTYPE``, or of device words ``[m, 5]``).

    Raises:
        InputError: the array is neither, or a record names a worker, task or stage that does not exist.
    """
    if records.dtype != RECORD_DTYPE:
        if records.dtype != np.int64 or records.ndim != 2 or records.shape[1] != RECORD_WORDS:
            raise InputError(
                f"records: expected RECORD_DTYPE or int64 [m, {RECORD_WORDS}], got {records.dtype} {records.shape}"
            )
        records = np.ascontiguousarray(records).view(RECORD_DTYPE)[:, 0]
    roles = roles_of(program) if worker_roles is None else worker_roles
    limits = {"worker": len(roles), "task": program.task_count, "stage": len(program.stages), "kind": 3}
    for name, limit in limits.items():
        if len(records) and not 0 <= records[name].min() <= records[name].max() < limit:
            raise InputError(f"records: expected {name} in 0..{limit - 1}, got {int(records[name].max())}")
    order = np.lexsort((records["kind"], records["worker"], records["start"]))
    return Launch(
        kernel_name=kernel_name,
        direction=program.direction,
        executor=executor,
        digest=program.digest,
        stages=program.stages,
        events=program.events,
        depends=program.tasks["dependent_event"].copy(),
        triggers=program.tasks["trigger_event"].copy(),
        worker_roles=roles,
        records=records[order].copy(),
        dropped=dropped,
        step=step,
    )


def of_simulation(simulation: Simulation) -> Launch:
    """A simulated run as a launch, so that it can be drawn and exported like a measured one."""
    program = simulation.program
    count = program.task_count
    compute = np.zeros(count, RECORD_DTYPE)
    compute["start"], compute["end"] = np.rint(simulation.start * 1e3), np.rint(simulation.end * 1e3)
    compute["worker"], compute["task"] = simulation.worker, np.arange(count)
    compute["core_type"], compute["stage"] = program.tasks["task_aicore_type"], program.stage_of_task
    compute["kind"] = COMPUTE
    wait = compute.copy()
    wait["start"], wait["end"], wait["kind"] = np.rint(simulation.ready * 1e3), compute["start"], WAIT
    waited = (wait["end"] > wait["start"]) & (program.tasks["dependent_event"] != EVENT_INVALID_ID)
    return make_launch(
        program,
        np.concatenate([wait[waited], compute]),
        executor=f"model of {simulation.machine.name}, not measured",
        kernel_name=f"simulated_{program.graph}",
    )
