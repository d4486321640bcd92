"""Records, schedule and traces."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fused_mhc import profiler
from fused_mhc.errors import BackendError, InputError, ScheduleError
from fused_mhc.profiler import Action, Launch, profile, schedule
from fused_mhc.runtime import CpuExecutor
from fused_mhc.scheduler import EVENT_INVALID_ID, Program, lower_mega_mhc, lower_tiled_mhc
from fused_mhc.scheduler.simulate import simulate

PROGRAM = lower_mega_mhc("forward", 100, 16, 2, num_cube_workers=1, num_vector_workers=2)


def run(program: Program = PROGRAM, **options: object) -> None:
    inputs = {
        buffer.name: torch.zeros(buffer.shape, dtype=getattr(torch, buffer.dtype))
        for buffer in program.buffers
        if buffer.role == "input"
    }
    CpuExecutor(program, **options).run(inputs)  # type: ignore[arg-type]


def recorded(program: Program = PROGRAM, **options: object) -> Launch:
    with profile() as session:
        run(program, **options)
    (launch,) = session.launches
    return launch


def test_schedule_cycles_like_torch() -> None:
    ours, theirs = (
        schedule(wait=1, warmup=2, active=2, repeat=2),
        torch.profiler.schedule(wait=1, warmup=2, active=2, repeat=2),
    )
    for step in range(14):
        assert ours(step).name == theirs(step).name
    endless = schedule(wait=0, warmup=0, active=1)
    assert {endless(step) for step in range(5)} == {Action.RECORD_AND_SAVE}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wait": -1}, "wait: expected 0 or more"),
        ({"warmup": -1}, "warmup"),
        ({"repeat": -2}, "repeat"),
        ({"active": 0}, "active: expected 1 or more, got 0"),
    ],
)
def test_schedule_refuses(change: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        schedule(**{"wait": 0, "warmup": 0, "active": 1, **change})
    with pytest.raises(InputError, match="step: expected 0 or more, got -1"):
        schedule(wait=0, warmup=0, active=1)(-1)


def test_steps_decide_what_is_kept() -> None:
    handed: list[list[int]] = []

    def ready(session: profile) -> None:
        handed.append([launch.step for launch in session.launches])

    with profile(schedule=schedule(wait=1, warmup=1, active=2, repeat=2), on_trace_ready=ready) as session:
        for _ in range(10):
            run()
            session.step()
    assert handed == [[2, 3], [6, 7]]
    assert session.launches == []


def test_the_end_of_the_block_hands_over_the_rest() -> None:
    handed: list[int] = []
    with profile(on_trace_ready=lambda session: handed.append(len(session.launches))):
        run()
        run()
    assert handed == [2]


def test_nested_use_is_refused_and_leaves_the_outer_one_open() -> None:
    with profile() as outer:
        with (
            pytest.raises(ScheduleError, match="expected no open profile block, got one inside another"),
            profile(),
        ):
            raise AssertionError
        assert profiler.current() is outer
    assert profiler.current() is None
    with profile():
        pass


def test_off_means_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an open block, and in steps that only wait, no clock is read and no record is made."""

    def never() -> int:
        raise AssertionError("a clock was read")

    monkeypatch.setattr("time.perf_counter_ns", never)
    run()
    with profile(schedule=schedule(wait=5, warmup=0, active=1)) as session:
        run()
    assert session.launches == []


@pytest.mark.parametrize("order", ["in_order", "random"])
def test_records_of_the_cpu_executor(order: str) -> None:
    launch = recorded(order=order, threads=2)
    work = launch.records[launch.records["kind"] == profiler.COMPUTE]
    assert sorted(work["task"].tolist()) == list(range(PROGRAM.task_count))
    assert (launch.records["end"] >= launch.records["start"]).all()
    tasks = PROGRAM.tasks[work["task"]]
    assert (work["core_type"] == tasks["task_aicore_type"]).all()
    assert (work["stage"] == PROGRAM.stage_of_task[work["task"]]).all()
    waits = launch.records[launch.records["kind"] == profiler.WAIT]
    assert set(waits["task"].tolist()) == set(
        np.flatnonzero(PROGRAM.tasks["dependent_event"] != EVENT_INVALID_ID).tolist()
    )
    assert (launch.records["kind"] == profiler.TRIGGER).sum() == PROGRAM.task_count
    assert (launch.executor, launch.direction, launch.dropped) == ("cpu", "forward", 0)
    # A task starts after the last of the tasks that trigger its event has ended.
    ends = dict(zip(work["task"].tolist(), work["end"].tolist(), strict=True))
    for record in work:
        event = int(PROGRAM.tasks["dependent_event"][record["task"]])
        if event != EVENT_INVALID_ID:
            producers = np.flatnonzero(PROGRAM.tasks["trigger_event"] == event).tolist()
            assert max(ends[task] for task in producers) <= record["start"]
    for worker in range(2):
        mine = work[work["worker"] == worker]
        assert (mine["start"][1:] >= mine["end"][:-1]).all()


def test_dropped_records_are_counted() -> None:
    with profile(capacity=3) as session:
        run(threads=1)
    (launch,) = session.launches
    waits = int((PROGRAM.tasks["dependent_event"] != EVENT_INVALID_ID).sum())
    assert len(launch.records) == 3
    assert launch.dropped == session.dropped == 2 * PROGRAM.task_count + waits - 3
    names = [event["name"] for event in profiler.chrome_trace([launch])["traceEvents"]]
    assert f"{launch.dropped} records dropped" in names
    with pytest.raises(InputError, match="capacity: expected 1 or more, got 0"):
        profile(capacity=0)


def test_device_words_are_the_same_records() -> None:
    launch = recorded()
    words = launch.records.copy().view(np.int64).reshape(-1, profiler.RECORD_WORDS)
    record = launch.records[0]
    assert words[0, 2] == int(record["worker"]) | int(record["core_type"]) << 32
    assert words[0, 3] == int(record["task"]) | int(record["stage"]) << 32
    again = profiler.make_launch(
        PROGRAM, words, executor="gpu", kernel_name="kernel", worker_roles=launch.worker_roles
    )
    assert (again.records == launch.records).all()
    with pytest.raises(InputError, match=r"records: expected RECORD_DTYPE or int64 \[m, 5\]"):
        profiler.make_launch(PROGRAM, words[:, :4], executor="gpu", kernel_name="kernel")
    wrong = launch.records.copy()
    wrong["task"][0] = PROGRAM.task_count
    with pytest.raises(InputError, match="records: expected task in 0"):
        profiler.make_launch(PROGRAM, wrong, executor="gpu", kernel_name="kernel")


@pytest.mark.parametrize("lower", [lower_mega_mhc, lower_tiled_mhc])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_chrome_trace(lower: Callable[..., Program], direction: str, tmp_path: Path) -> None:
    program = lower(direction, 100, 96, 2, num_cube_workers=1, num_vector_workers=2)
    launch = profiler.of_simulation(simulate(program))
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(path, [launch])
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    work = [event for event in slices if event["cat"] == "compute"]
    assert len(work) == program.task_count
    assert {event["name"] for event in work} == {stage.name for stage in program.stages}
    assert min(event["ts"] for event in slices) == 0
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert threads == ["cube worker 0", "vector worker 1", "vector worker 2"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(ends) == int((program.tasks["dependent_event"] != EVENT_INVALID_ID).sum())
    for identity, tail in ends.items():
        head = starts[identity]
        assert head["name"] == tail["name"]
        assert head["ts"] <= tail["ts"]
        assert tail["bp"] == "e"
        for end in (head, tail):  # each end lies on a slice of its thread
            assert any(
                slice_["tid"] == end["tid"]
                and slice_["ts"] <= end["ts"] <= slice_["ts"] + slice_["dur"] + 1e-6
                for slice_ in work
            )
    quiet = profiler.chrome_trace([launch], flows=False)["traceEvents"]
    assert not [event for event in quiet if event["ph"] in "sf"]


def torch_trace(*kernels: tuple[str, float, float], cat: str = "kernel") -> dict[str, object]:
    return {
        "traceEvents": [
            {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7}
            for name, ts, dur in kernels
        ]
    }


def test_merge_places_launches_in_their_kernels() -> None:
    launch = recorded()
    span = launch.span_ns / 1e3
    name = launch.kernel_name
    trace = torch_trace(
        (f"{name}_0d1d", 5000.0, span + 1), ("other", 0.0, 1e9), (f"{name}_0d1d", 1000.0, span + 1)
    )
    merge = profiler.merge_torch_trace(trace, [launch, launch])
    assert (merge.placed, merge.misfits) == (2, ())
    ours = [
        event for event in merge.trace["traceEvents"] if event["pid"] >= 900_000_000 and event["ph"] == "X"
    ]
    assert sorted({min(e["ts"] for e in ours if e["pid"] == pid) for pid in {e["pid"] for e in ours}}) == [
        1000.0,
        5000.0,
    ]
    assert len(trace["traceEvents"]) == 3  # type: ignore[arg-type]


def test_merge_reports_misfits(tmp_path: Path) -> None:
    launch = recorded()
    name, span = launch.kernel_name, launch.span_ns / 1e3
    short = profiler.merge_torch_trace(torch_trace((name, 0.0, span / 2)), [launch])
    assert short.placed == 0
    assert short.misfits == (f"{name} #0: records span {span:.1f} us, the kernel lasts {span / 2:.1f} us",)
    none = profiler.merge_torch_trace(torch_trace(("other", 0.0, 1.0)), [launch])
    assert none.misfits == (f"{name} #0: no kernel of that name is left",)
    more = profiler.merge_torch_trace(torch_trace((name, 0.0, span), (name, 1e6, span)), [launch])
    assert (more.placed, more.misfits) == (1, (f"{name} #1: the kernel has no recorded launch",))
    # Where kernels of that name exist, a range of the host that merely mentions it does not count.
    both = torch_trace((name, 50.0, span))
    both["traceEvents"] += torch_trace((f"call {name}", 0.0, 9 * span), cat="cpu_op")["traceEvents"]  # type: ignore[operator]
    assert profiler.merge_torch_trace(both, [launch]).misfits == ()
    for text, message in (
        ("{", "expected a JSON file"),
        ("[]", "expected a Chrome trace object, got list"),
        ("{}", "list traceEvents"),
    ):
        path = tmp_path / "trace.json"
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            profiler.merge_torch_trace(path, [launch])
    with pytest.raises(InputError, match="expected a JSON file"):
        profiler.merge_torch_trace(tmp_path / "none.json", [launch])


def test_merge_with_a_trace_of_torch(tmp_path: Path) -> None:
    outer = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile() as session, outer, torch.profiler.record_function("fused_mhc::mega_mhc"):
        run()
    outer.export_chrome_trace(str(tmp_path / "torch.json"))
    merge = profiler.merge_torch_trace(tmp_path / "torch.json", session.launches)
    assert (merge.placed, merge.misfits) == (1, ())


def test_gantt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = profiler.of_simulation(simulate(PROGRAM))
    for suffix, head in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = tmp_path / f"gantt{suffix}"
        profiler.draw_gantt(launch, path)
        assert path.read_bytes().startswith(head)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendError, match="pip install"):
        profiler.draw_gantt(launch, tmp_path / "none.png")


def test_idle_share_equals_the_simulators() -> None:
    simulation = simulate(PROGRAM)
    launch = profiler.of_simulation(simulation)
    for role, share in launch.idle_share().items():
        assert share == pytest.approx(simulation.idle_share[role], abs=1e-3)
