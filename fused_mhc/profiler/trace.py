"""Chrome traces (they open in Perfetto): of launches alone, or merged into one of ``torch.profiler``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fused_mhc.errors import InputError
from fused_mhc.profiler.records import COMPUTE, TRIGGER, WAIT, Launch
from fused_mhc.scheduler import EVENT_INVALID_ID

__all__ = ["Merge", "chrome_trace", "export_chrome_trace", "merge_torch_trace"]

#: Process ids of launches in a trace start here, above those of a torch trace.
_FIRST_PROCESS = 900_000_000
#: How much longer than its outer kernel a launch may be (clocks and record writes differ a little).
_SPAN_SLACK = 1.05


def chrome_trace(launches: Sequence[Launch], *, flows: bool = True) -> dict[str, Any]:
    """The launches as a Chrome trace document, one process a launch, one thread a worker.

    A task's work is a slice named after its stage; waits and triggers are slices named after their events.
    With ``flows`` an arrow leads from the task that fires an event to each task that waits for it.
    """
    events: list[dict[str, Any]] = []
    for number, launch in enumerate(launches):
        events += _launch_events(launch, _FIRST_PROCESS + number, 0.0, flows)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def export_chrome_trace(path: str | Path, launches: Sequence[Launch], *, flows: bool = True) -> None:
    """Write :func:`chrome_trace` to a file."""
    Path(path).write_text(json.dumps(chrome_trace(launches, flows=flows)), encoding="utf-8")


@dataclass(frozen=True)
class Merge:
    """A merged trace and what did not fit: launches without a kernel, kernels without a launch, launches
    longer than their kernel (left out of the trace)."""

    trace: dict[str, Any]
    placed: int
    misfits: tuple[str, ...]


def merge_torch_trace(
    trace: dict[str, Any] | str | Path, launches: Sequence[Launch], *, flows: bool = True
) -> Merge:
    """Put launches inside the kernels of a ``torch.profiler`` trace.

    The k-th launch of a name goes to the k-th slice of the trace whose name contains that name (a kernel if
    there is one of that name, else any other range), its first record at the start of that slice.

    Args:
        trace: the document, or the file that ``export_chrome_trace`` of torch wrote.

    Raises:
        InputError: ``trace`` is not a Chrome trace.
    """
    document = trace if isinstance(trace, dict) else _read(Path(trace))
    if not isinstance(document.get("traceEvents"), list):
        raise InputError("trace: expected a Chrome trace with a list traceEvents, got something else")
    slices = [e for e in document["traceEvents"] if e.get("ph") == "X" and "name" in e and "ts" in e]
    merged = list(document["traceEvents"])
    misfits: list[str] = []
    placed = 0
    for name in dict.fromkeys(launch.kernel_name for launch in launches):
        mine = [launch for launch in launches if launch.kernel_name == name]
        hosts = [e for e in slices if name in e["name"]]
        kernels = [e for e in hosts if e.get("cat") == "kernel"]
        hosts = sorted(kernels or hosts, key=lambda e: float(e["ts"]))
        for index, (launch, host) in enumerate(zip(mine, hosts, strict=False)):
            length, span = float(host.get("dur", 0.0)), launch.span_ns / 1e3
            if span > length * _SPAN_SLACK:
                misfits.append(
                    f"{name} #{index}: records span {span:.1f} us, the kernel lasts {length:.1f} us"
                )
                continue
            merged += _launch_events(launch, _FIRST_PROCESS + placed, float(host["ts"]), flows)
            placed += 1
        misfits += [
            f"{name} #{index}: no kernel of that name is left" for index in range(len(hosts), len(mine))
        ]
        misfits += [
            f"{name} #{index}: the kernel has no recorded launch" for index in range(len(mine), len(hosts))
        ]
    return Merge({**document, "traceEvents": merged}, placed, tuple(misfits))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"trace: expected a JSON file, got {path}: {error}") from error
    if not isinstance(document, dict):
        raise InputError(f"trace: expected a Chrome trace object, got {type(document).__name__}")
    return document


def _launch_events(launch: Launch, process: int, origin_us: float, flows: bool) -> Iterable[dict[str, Any]]:
    """The events of one launch, its first record at ``origin_us``."""
    title = f"{launch.kernel_name} {launch.direction} ({launch.executor}, program {launch.digest[:12]})"
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": title}}
    for worker, role in enumerate(launch.worker_roles):
        label = f"{role} worker {worker}"
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": worker, "args": {"name": label}}
    if launch.dropped:
        note = f"{launch.dropped} records dropped"
        yield {"ph": "i", "s": "p", "name": note, "pid": process, "tid": 0, "ts": origin_us}
    if not len(launch.records):
        return
    base = int(launch.records["start"].min())

    def at(nanoseconds: int) -> float:
        return origin_us + (nanoseconds - base) / 1e3

    for record in launch.records:
        start, end, worker, core, task, stage, kind = record.tolist()
        index = task - launch.stages[stage].first_task
        if kind == COMPUTE:
            name, category = launch.stages[stage].name, "compute"
        elif kind == WAIT:
            name, category = f"wait {launch.event_name(int(launch.depends[task]))}", "wait"
        else:
            name, category = f"trigger {launch.event_name(int(launch.triggers[task]))}", "trigger"
        yield {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": process,
            "tid": worker,
            "ts": at(start),
            "dur": (end - start) / 1e3,
            "args": {"task": task, "stage": launch.stages[stage].name, "index": index, "core_type": core},
        }
    if flows:
        yield from _flows(launch, process, at)


def _flows(launch: Launch, process: int, at: Any) -> Iterable[dict[str, Any]]:
    """An arrow from the work that fired an event (its last producer) to the work of each task that waited
    for it."""
    work = launch.records[launch.records["kind"] == COMPUTE]
    released = launch.records[launch.records["kind"] == TRIGGER]
    ends = dict(zip(work["task"].tolist(), work["end"].tolist(), strict=True))
    ends |= dict(zip(released["task"].tolist(), released["end"].tolist(), strict=True))
    place = {int(record["task"]): record for record in work}
    fired: dict[int, int] = {}
    for task, end in ends.items():
        event = int(launch.triggers[task])
        if task in place and (event not in fired or (end, task) > (ends[fired[event]], fired[event])):
            fired[event] = task
    number = process
    for task in np.flatnonzero(launch.depends != EVENT_INVALID_ID).tolist():
        source = fired.get(int(launch.depends[task]))
        if source is None or task not in place:
            continue
        number += 1
        name = launch.event_name(int(launch.depends[task]))
        common = {"cat": "event", "name": name, "id": f"{process}-{number}", "pid": process}
        head, tail = place[source], place[task]
        # The arrow binds to the slice that encloses its time, so it leaves inside the work, at its last
        # moment.
        yield {**common, "ph": "s", "tid": int(head["worker"]), "ts": at(int(head["end"]))}
        yield {**common, "ph": "f", "bp": "e", "tid": int(tail["worker"]), "ts": at(int(tail["start"]))}
