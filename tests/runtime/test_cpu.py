"""The CPU executor: every order gives the same bits, and what is missing shows."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_mhc import profiler
from fused_mhc.errors import InputError, ScheduleError
from fused_mhc.ops.mega_mhc import native
from fused_mhc.runtime import CpuExecutor, Settings, last_launch
from fused_mhc.runtime.buffers import DTYPES
from fused_mhc.runtime.tiles import BODIES
from fused_mhc.scheduler import (
    EVENT_INVALID_ID,
    Program,
    RuntimeConfigC,
    TaskType,
    lower_mega_mhc,
    lower_tiled_mhc,
)
from fused_mhc.scheduler.runtime_config import task_array, trigger_array

N, C = 3, 70
LOWER = {"fixed": lower_mega_mhc, "tiled": lower_tiled_mhc}
KINDS = [(kind, direction) for kind in LOWER for direction in ("forward", "backward")]
each = pytest.mark.parametrize(("kind", "direction"), KINDS)
#: Hosts' argument order of the backward's inputs.
BACKWARD = (
    "g_new_residual",
    "g_next_pre_mix",
    "g_next_post_mix",
    "g_next_residual_mix",
    "g_block_input",
    "previous_output",
    "residual",
    "previous_pre_mix",
    "previous_post_mix",
    "previous_residual_mix",
    "phi",
    "alpha",
    "bias",
    "norm_weight",
    "new_residual",
    "logits",
    "u",
    "mixed_rstd",
    "next_pre_mix",
    "next_post_mix",
    "next_residual_mix",
)
FORWARD_RESULTS = (
    "new_residual",
    "next_pre_mix",
    "next_post_mix",
    "next_residual_mix",
    "block_input",
    "logits",
    "u",
    "mixed_rstd",
)


@lru_cache(maxsize=32)
def lowered(
    kind: str,
    direction: str,
    tokens: int,
    stream: str = "bfloat16",
    mixed: int | None = None,
    streams: int = N,
) -> Program:
    extra = {} if kind == "fixed" else {"parts": 3, "group_rows": 64}
    if kind == "tiled" and direction == "forward":
        extra["window_rows"] = 64
    return LOWER[kind](  # type: ignore[operator]
        direction,
        tokens,
        C,
        streams,
        num_cube_workers=1,
        num_vector_workers=2,
        mixed_workers=mixed,
        stream_dtype=stream,
        compute_dtype="float64" if stream == "float64" else "float32",
        **extra,
    )


@lru_cache(maxsize=16)
def forward_tensors(tokens: int, stream: str, streams: int = N) -> dict[str, Tensor]:
    """Inputs and native results of a forward call."""
    program = lowered("fixed", "forward", tokens, stream, None, streams)
    generator = torch.Generator().manual_seed(tokens)
    tensors = {
        buffer.name: torch.randn(buffer.shape, generator=generator, dtype=torch.float64).to(
            DTYPES[buffer.dtype]
        )
        for buffer in program.buffers
        if buffer.role == "input"
    }
    names = [buffer.name for buffer in program.buffers if buffer.role == "input"]
    results = native.mega_mhc_fwd(*(tensors[name] for name in names), 1e-6, 1e-6, 5)
    return tensors | dict(zip(FORWARD_RESULTS, results, strict=True))


@lru_cache(maxsize=16)
def backward_tensors(tokens: int, stream: str, streams: int = N) -> dict[str, Tensor]:
    """Inputs and native results of a backward call."""
    tensors = dict(forward_tensors(tokens, stream, streams))
    generator = torch.Generator().manual_seed(tokens + 1)
    for name in FORWARD_RESULTS[:5]:
        like = tensors[name]
        tensors[f"g_{name}"] = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(
            like.dtype
        )
    results = native.mega_mhc_bwd(*(tensors[name] for name in BACKWARD), 1e-6, 1e-6, 5, [True] * 9)
    return tensors | {f"g_{name}": value for name, value in zip(BACKWARD[5:14], results, strict=True)}


def tensors_of(
    program: Program, tokens: int, stream: str = "bfloat16"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs of a Program and what native makes of them, in the Program's shapes."""
    streams = program.geometry["num_streams"]
    made = forward_tensors if program.direction == "forward" else backward_tensors
    values = made(tokens, stream, streams)
    inputs, expected = {}, {}
    for buffer in program.buffers:
        if buffer.role == "input":
            inputs[buffer.name] = values[buffer.name].view(buffer.shape)
        elif buffer.role in ("output", "result"):
            expected[buffer.name] = values[buffer.name].view(buffer.shape)
    return inputs, expected


def run(program: Program, tokens: int, stream: str = "bfloat16", **options: object) -> dict[str, Tensor]:
    inputs, _ = tensors_of(program, tokens, stream)
    return CpuExecutor(program, **options).run(inputs, settings=Settings(num_iters=5))  # type: ignore[arg-type]


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


@each
@pytest.mark.parametrize("tokens", [1, 32, 33, 150])
@pytest.mark.parametrize("stream", ["bfloat16", "float16", "float32", "float64"])
def test_matches_native(kind: str, direction: str, tokens: int, stream: str) -> None:
    compare(kind, direction, tokens, stream, N)


@each
@pytest.mark.parametrize("streams", [2, 4, 5, 6, 7, 8])
def test_every_number_of_streams(kind: str, direction: str, streams: int) -> None:
    compare(kind, direction, 70, "bfloat16", streams)


@each
def test_one_stream(kind: str, direction: str) -> None:
    """The RMSNorm undoes the pre mix of one stream, so its gradient is a sum that nearly cancels: its bound goes by the
    terms, not by the sum."""
    values = backward_tensors(70, "bfloat16", 1)
    grad = values["g_block_input"].float() * values["norm_weight"] * values["mixed_rstd"]
    terms = float((grad.unsqueeze(1) * values["new_residual"]).abs().sum(-1).max())
    compare(kind, direction, 70, "bfloat16", 1, {"g_previous_pre_mix": terms})


def compare(
    kind: str,
    direction: str,
    tokens: int,
    stream: str,
    streams: int,
    scales: dict[str, float] | None = None,
) -> None:
    """Equal bits where sums have one order (a single tile of the fixed graphs); else a bound for the other orders of
    adding up to ``K`` or ``tokens`` terms, and of one rounding to the stream dtype."""
    program = lowered(kind, direction, tokens, stream, None, streams)
    made = run(program, tokens, stream)
    _, expected = tensors_of(program, tokens, stream)
    if kind == "fixed" and tokens <= 32:
        same(made, expected)
        return
    epsilon = torch.finfo(torch.float64 if stream == "float64" else torch.float32).eps
    for name, value in made.items():
        exact = expected[name].double()
        # Order of sums: 64 eps of the largest value covers trees and chains of up to 210 terms; Sinkhorn adds its own.
        bound = 64 * epsilon * (scales or {}).get(name, float(exact.abs().max()))
        if value.dtype.itemsize == 2:
            bound += torch.finfo(value.dtype).eps * float(exact.abs().max())
        assert float((value.double() - exact).abs().max()) <= bound, name


@each
@pytest.mark.parametrize("tokens", [40, 150])
def test_new_residual_and_block_input_have_native_bits(kind: str, direction: str, tokens: int) -> None:
    """All but the projection is per token, so tiles change no bit of it."""
    if direction == "backward":
        direction = "forward"
    made = run(lowered(kind, direction, tokens), tokens)
    _, expected = tensors_of(lowered(kind, direction, tokens), tokens)
    for name in ("new_residual", "block_input", "mixed_rstd", "u"):
        assert torch.equal(made[name], expected[name]), name


orders = st.one_of(
    st.tuples(st.just("in_order"), st.just(0), st.integers(1, 5)),
    st.tuples(st.just("random"), st.integers(0, 2**16), st.integers(1, 3)),
    st.tuples(st.just("adversarial"), st.just(0), st.integers(1, 3)),
)


@settings(max_examples=60)
@given(st.sampled_from(KINDS), orders, st.sampled_from([None, 2]))
def test_every_order_and_worker_count_gives_the_same_bits(
    kind: tuple[str, str], order: tuple[str, int, int], mixed: int | None
) -> None:
    name, seed, threads = order
    reference = reference_run(*kind)
    same(run(lowered(*kind, 150, mixed=mixed), 150, order=name, seed=seed, threads=threads), reference)


@lru_cache(maxsize=8)
def reference_run(kind: str, direction: str) -> dict[str, Tensor]:
    return run(lowered(kind, direction, 150), 150, threads=1)


def test_random_orders_are_seeded_and_legal() -> None:
    program = lowered("tiled", "backward", 150)
    inputs, _ = tensors_of(program, 150)

    def order_of(order: str, seed: int) -> list[int]:
        with profiler.profile() as session:
            CpuExecutor(program, order, seed).run(inputs)  # type: ignore[arg-type]
        (launch,) = session.launches
        work = launch.records[launch.records["kind"] == profiler.COMPUTE]
        return work["task"].tolist()

    one, again, other = order_of("random", 1), order_of("random", 1), order_of("random", 2)
    assert one == again != other
    late = order_of("adversarial", 0)
    assert late[0] == max(
        task
        for task in range(program.task_count)
        if program.tasks["dependent_event"][task] == EVENT_INVALID_ID
    )
    for sequence in (one, other, late):
        remaining = program.triggers.copy()
        for task in sequence:
            event = program.tasks["dependent_event"][task]
            assert event == EVENT_INVALID_ID or remaining[event] == 0
            remaining[program.tasks["trigger_event"][task]] -= 1


def test_a_missing_dependency_shows_as_nan() -> None:
    program = lowered("fixed", "forward", 150)

    def edit(config: RuntimeConfigC) -> None:
        tasks = task_array(config)
        tasks["dependent_event"][tasks["task_type"] == TaskType.TASK_MHC_MAPPING] = EVENT_INVALID_ID

    broken = edited(program, edit)
    with pytest.raises(ScheduleError, match="before any task writes them"):
        CpuExecutor(broken)
    made = run(broken, 150, order="adversarial", check=False)
    assert made["next_pre_mix"].isnan().any()


def edited(program: Program, edit: object) -> Program:
    config = RuntimeConfigC.from_buffer_copy(program.table)
    edit(config)  # type: ignore[operator]
    return replace(program, table=bytes(config))


@pytest.mark.parametrize(
    ("order", "threads"), [("in_order", 1), ("in_order", 3), ("random", 2), ("adversarial", 1)]
)
def test_an_event_that_never_fires_is_named(order: str, threads: int) -> None:
    program = lowered("fixed", "backward", 150)
    event = program.events[1].base

    def edit(config: RuntimeConfigC) -> None:
        trigger_array(config)[event] += 1

    inputs, _ = tensors_of(program, 150)
    executor = CpuExecutor(edited(program, edit), order, threads=threads, check=False)  # type: ignore[arg-type]
    with pytest.raises(
        ScheduleError, match=rf"waits for event {event} \(rms_ready\[0\]\), which has 1 of 2 triggers"
    ):
        executor.run(inputs)
    CpuExecutor(program).run(inputs)


def test_a_stuck_task_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    program, release = lowered("fixed", "forward", 40), threading.Event()
    monkeypatch.setitem(BODIES, TaskType.TASK_MHC_PROJECTION, lambda state, task: release.wait(20))
    inputs, _ = tensors_of(program, 40)
    executor = CpuExecutor(program, timeout=0.2)
    try:
        with pytest.raises(
            ScheduleError,
            match=r"no progress for 0.2 s: worker 0 computes task 4 \(mhc_projection\[0\], cube\)",
        ):
            executor.run(inputs)
    finally:
        release.set()


def test_an_error_in_a_task_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(state: object, task: object) -> None:
        raise ZeroDivisionError("in a tile")

    monkeypatch.setitem(BODIES, TaskType.TASK_RMS_NORM, fail)
    program = lowered("fixed", "forward", 40)
    inputs, _ = tensors_of(program, 40)
    with pytest.raises(ZeroDivisionError, match="in a tile"):
        CpuExecutor(program, threads=3).run(inputs)


@each
def test_only_what_is_wanted_is_made(kind: str, direction: str) -> None:
    program = lowered(kind, direction, 40)
    inputs, _ = tensors_of(program, 40)
    full = CpuExecutor(program).run(inputs)
    for name in full:
        (only,) = (
            CpuExecutor(program).run(inputs, wanted=[name]).items()
            if direction == "backward"
            else [(name, full[name])]
        )
        assert only[0] == name
        assert torch.equal(only[1], full[name])


@pytest.mark.parametrize("kind", LOWER)
@pytest.mark.parametrize(
    "absent", ["g_new_residual", "g_next_pre_mix", "g_next_post_mix", "g_next_residual_mix", "g_block_input"]
)
def test_an_absent_gradient_is_a_zero_one(kind: str, absent: str) -> None:
    program = lowered(kind, "backward", 40, "float32")
    inputs, _ = tensors_of(program, 40, "float32")
    zero = CpuExecutor(program).run({**inputs, absent: torch.zeros_like(inputs[absent])})
    without = CpuExecutor(program).run({**inputs, absent: None})
    for name, value in without.items():
        assert torch.allclose(value, zero[name], rtol=1e-6, atol=1e-6), name
        assert not value.isnan().any()


def test_bad_arguments() -> None:
    program = lowered("fixed", "forward", 40)
    inputs, _ = tensors_of(program, 40)
    with pytest.raises(InputError, match="order: expected one of in_order, random, adversarial, got 'any'"):
        CpuExecutor(program, "any")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="threads: expected 1 or more, got 0"):
        CpuExecutor(program, threads=0)
    with pytest.raises(InputError, match="timeout: expected more than 0 seconds, got 0"):
        CpuExecutor(program, timeout=0)
    executor = CpuExecutor(program)
    with pytest.raises(InputError, match=r"residual: expected bfloat16 \(40, 3, 70\), got torch.float32"):
        executor.run({**inputs, "residual": inputs["residual"].float()})
    with pytest.raises(InputError, match=r"alpha: expected float32 \(3,\), got torch.float32 \(4,\)"):
        executor.run({**inputs, "alpha": torch.zeros(4)})
    with pytest.raises(InputError, match="nothing: expected a buffer of the mega_mhc Program"):
        executor.run({**inputs, "nothing": None})


def test_last_launch() -> None:
    forward, backward = lowered("tiled", "forward", 40), lowered("fixed", "backward", 40)
    run(backward, 40, threads=2)
    run(forward, 40, threads=3)
    record = last_launch()
    assert record == last_launch("forward")
    assert record is not None
    assert (record.executor, record.tasks, record.workers, record.interpreted) == (
        "cpu",
        forward.task_count,
        3,
        False,
    )
    assert record.digest == forward.digest
    other = last_launch("backward")
    assert other is not None
    assert (other.direction, other.digest, other.workers) == ("backward", backward.digest, 2)
