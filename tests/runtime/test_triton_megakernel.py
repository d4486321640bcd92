"""The megakernel in Triton's interpreter: one worker, every graph, against the CPU executor on the same Program.

The update, the collapse and the copies round at the same places in the same order: bits are equal. Everything that adds
up columns or tokens does so in another order, and products use bf16 parts: bounds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from fused_mhc import profiler
from fused_mhc.errors import BackendError, InputError, ScheduleError
from fused_mhc.ops.mega_mhc import mega_mhc, mega_mhc_entry
from fused_mhc.runtime import CpuExecutor, GpuExecutor, Settings, check_launches, last_launch
from fused_mhc.runtime.buffers import DTYPES
from fused_mhc.runtime.gpu_hosts import _executor
from fused_mhc.scheduler import Program, RuntimeConfigC, lower_mega_mhc, lower_tiled_mhc
from fused_mhc.scheduler.runtime_config import trigger_array

C = 70
SETTINGS = Settings(num_iters=2)
LOWER = {"fixed": lower_mega_mhc, "tiled": lower_tiled_mhc}
each = pytest.mark.parametrize(
    ("kind", "direction"), [(kind, direction) for kind in LOWER for direction in ("forward", "backward")]
)
#: Results whose every sum has the CPU executor's order.
BITS = ("new_residual",)
#: Orders of sums and three parts of a product: relative to the largest value.
FP32_BOUND = 4e-6
#: Two bf16 parts of the mapping's gradient (16-bit streams): 2^-17 of each term.
PARTS_BOUND = 2e-5


@lru_cache(maxsize=32)
def lowered(kind: str, direction: str, tokens: int, n: int, stream: str, weight: bool = True) -> Program:
    extra = {} if kind == "fixed" else {"parts": 3, "group_rows": 32}
    if kind == "tiled" and direction == "forward":
        extra["window_rows"] = 32
    return LOWER[kind](  # type: ignore[operator]
        direction,
        tokens,
        C,
        n,
        num_cube_workers=1,
        num_vector_workers=2,
        stream_dtype=stream,
        has_norm_weight=weight,
        **extra,
    )


def inputs_of(program: Program) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = {}
    for buffer in program.buffers:
        if buffer.role == "input":
            value = torch.randn(buffer.shape, generator=generator)
            if buffer.name in ("u", "mixed_rstd"):
                value = 0.5 + value.abs()
            scale = 0.1 if buffer.name == "phi" else 1.0
            inputs[buffer.name] = (scale * value).to(DTYPES[buffer.dtype])
    return inputs


def compare(made: dict[str, Tensor], expected: dict[str, Tensor], stream: torch.dtype) -> None:
    assert made.keys() == expected.keys()
    bound = FP32_BOUND if stream is torch.float32 else PARTS_BOUND
    for name, value in made.items():
        other = expected[name]
        assert value.dtype is other.dtype
        if name in BITS:
            assert torch.equal(value, other), name
            continue
        exact = other.double()
        allowed = bound * exact.abs().max() + exact.abs() * torch.finfo(value.dtype).eps
        assert ((value.double() - exact).abs() <= allowed).all(), name


@each
@pytest.mark.parametrize("stream", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "n"), [(1, 4), (33, 2), (33, 3), (70, 4)])
def test_matches_the_cpu_executor(kind: str, direction: str, tokens: int, n: int, stream: str) -> None:
    program = lowered(kind, direction, tokens, n, stream)
    inputs = inputs_of(program)
    made = GpuExecutor(program).run(inputs, settings=SETTINGS)
    record = last_launch(direction)
    assert record is not None
    assert (record.executor, record.interpreted, record.workers) == ("gpu", True, 1)
    assert (record.tasks, record.digest) == (program.task_count, program.digest)
    compare(made, CpuExecutor(program, threads=1).run(inputs, settings=SETTINGS), DTYPES[stream])


@pytest.mark.parametrize(
    ("kind", "direction", "tokens", "n", "options"),
    [
        ("fixed", "forward", 130, 2, {"token_tile": 96}),
        ("fixed", "backward", 130, 2, {"token_tile": 96}),
        ("tiled", "forward", 50, 1, {"token_tile": 16, "group_rows": 48}),
        ("tiled", "backward", 30, 1, {"token_tile": 8, "group_rows": 24}),
        ("tiled", "forward", 5, 8, {}),
        ("tiled", "backward", 5, 5, {}),
    ],
)
def test_other_tiles(kind: str, direction: str, tokens: int, n: int, options: dict[str, int]) -> None:
    """Tiles of several steps of rows, tiles smaller than a step, and the least and most streams."""
    program = LOWER[kind](  # type: ignore[operator]
        direction, tokens, 33, n, num_cube_workers=1, num_vector_workers=2, **options
    )
    inputs = inputs_of(program)
    made = GpuExecutor(program).run(inputs, settings=SETTINGS)
    expected = CpuExecutor(program, threads=1).run(inputs, settings=SETTINGS)
    if n == 1:  # the RMSNorm undoes the pre mix of one stream: its gradient is a sum that nearly cancels
        made.pop("g_previous_pre_mix", None)
        expected.pop("g_previous_pre_mix", None)
    compare(made, expected, torch.bfloat16)


@pytest.mark.parametrize("kind", LOWER)
@pytest.mark.parametrize(
    "absent", ["g_new_residual", "g_next_pre_mix", "g_next_post_mix", "g_next_residual_mix", "g_block_input"]
)
def test_absent_gradients(kind: str, absent: str) -> None:
    program = lowered(kind, "backward", 9, 2, "float32")
    inputs = {name: t for name, t in inputs_of(program).items() if name != absent}
    made = GpuExecutor(program).run(inputs, settings=SETTINGS)
    compare(made, CpuExecutor(program, threads=1).run(inputs, settings=SETTINGS), torch.float32)


@pytest.mark.parametrize("kind", LOWER)
@pytest.mark.parametrize(
    "wanted", ["g_residual", "g_previous_pre_mix", "g_previous_post_mix", "g_phi", "g_alpha", "g_norm_weight"]
)
def test_only_what_is_wanted_is_made(kind: str, wanted: str) -> None:
    program = lowered(kind, "backward", 9, 2, "float32")
    inputs, executor = inputs_of(program), GpuExecutor(program)
    every = executor.run(inputs, settings=SETTINGS)
    (made,) = executor.run(inputs, settings=SETTINGS, wanted=[wanted]).items()
    assert made[0] == wanted
    assert torch.equal(made[1], every[wanted])


@each
def test_no_norm_weight_and_strided_streams(kind: str, direction: str) -> None:
    program = lowered(kind, direction, 9, 3, "bfloat16", weight=False)
    inputs = inputs_of(program)
    wide = torch.full((9, 4, 2 * C), float("nan"), dtype=torch.bfloat16)[:, :3, 3 : 3 + C]
    wide.copy_(inputs["residual"])
    executor = GpuExecutor(program)
    plain = executor.run(inputs, settings=SETTINGS)
    for name, value in executor.run({**inputs, "residual": wide}, settings=SETTINGS).items():
        assert torch.equal(value, plain[name]), name
    compare(plain, CpuExecutor(program, threads=1).run(inputs, settings=SETTINGS), torch.bfloat16)


def test_tokens_alone_and_among_others() -> None:
    """The bits of a token depend neither on T nor on its neighbours. (Of the first token of a tile: numpy's product, by
    which the interpreter multiplies, has other bits for other rows.)"""
    many = lowered("tiled", "forward", 71, 3, "float32")
    inputs = inputs_of(many)
    together = GpuExecutor(many).run(inputs, settings=SETTINGS)
    one = {name: t[64:65] if len(t) == 71 else t for name, t in inputs.items()}
    alone = GpuExecutor(lowered("tiled", "forward", 1, 3, "float32")).run(one, settings=SETTINGS)
    for name, value in alone.items():
        assert torch.equal(value, together[name][64:65]), name


@each
def test_an_event_that_never_fires_is_named(kind: str, direction: str) -> None:
    program = lowered(kind, direction, 33, 2, "float32")
    part = program.events[0] if (kind, direction) != ("fixed", "backward") else program.events[1]
    config = RuntimeConfigC.from_buffer_copy(program.table)
    trigger_array(config)[part.base] += 1
    inputs = inputs_of(program)
    broken = GpuExecutor(replace(program, table=bytes(config)), budget=40, check=False)
    expected = program.triggers[part.base]
    message = (
        rf"worker 0: task .* waits for event {part.base} \({part.name}\[0\]\), "
        rf"which has {expected} of {expected + 1} triggers"
    )
    with pytest.raises(ScheduleError, match=message):
        broken.run(inputs, settings=SETTINGS)
    check_launches()
    GpuExecutor(program).run(inputs, settings=SETTINGS)


def test_an_epilogue_that_waits_in_vain_is_named() -> None:
    program = lowered("tiled", "backward", 9, 2, "float32")
    config = RuntimeConfigC.from_buffer_copy(program.table)
    trigger_array(config)[program.events[-1].base] += 1
    broken = GpuExecutor(replace(program, table=bytes(config)), budget=40, check=False)
    with pytest.raises(ScheduleError, match=r"the epilogue waits for event .* \(final\[0\]\)"):
        broken.run(inputs_of(program), settings=SETTINGS)


def test_records() -> None:
    """One wait (of what waits), compute and trigger a task, in order; too many are counted; results are the same."""
    program = lowered("tiled", "backward", 33, 2, "float32")
    inputs, executor = inputs_of(program), GpuExecutor(program)
    plain = executor.run(inputs, settings=SETTINGS)
    with profiler.profile() as session:
        made = executor.run(inputs, settings=SETTINGS)
    (launch,) = session.launches
    assert (launch.executor, launch.worker_roles, launch.dropped) == ("gpu", ("mixed",), 0)
    compute = launch.records[launch.records["kind"] == profiler.COMPUTE]
    assert sorted(compute["task"]) == list(range(program.task_count))
    assert (compute["stage"] == program.stage_of_task[compute["task"]]).all()
    assert (launch.records["end"] >= launch.records["start"]).all()
    assert (compute["start"][1:] >= compute["end"][:-1]).all()
    waits = launch.records[launch.records["kind"] == profiler.WAIT]
    assert len(waits) == int((program.tasks["dependent_event"].astype("i4") >= 0).sum())
    for name, value in made.items():
        assert torch.equal(value, plain[name]), name
    with profiler.profile(capacity=5) as session:
        executor.run(inputs, settings=SETTINGS)
    assert len(session.launches[0].records) == 5
    assert session.dropped == len(launch.records) - 5


def site(tokens: int, n: int, width: int) -> list[Tensor]:
    size = n * n + 2 * n
    values = [
        torch.randn(tokens, width).bfloat16(),
        torch.randn(tokens, n, width).bfloat16(),
        torch.rand(tokens, n),
        torch.rand(tokens, n),
        torch.softmax(torch.randn(tokens, n, n), -1),
        0.1 * torch.randn(size, n * width),
        torch.randn(3),
        torch.randn(size),
        torch.rand(width),
    ]
    return [value.requires_grad_() for value in values]


@pytest.mark.parametrize("entry", [False, True])
def test_the_operation(entry: bool) -> None:
    """``schedule="mega", backend="triton"`` beside the backend's own kernels; Programs of one shape are kept."""
    n, width = 2, 40
    _executor.cache_clear()
    values = site(33, n, width)
    if entry:
        del values[1:5]

    def call(schedule: str) -> list[Tensor]:
        options = {"num_iters": 2, "backend": "triton", "schedule": schedule}
        outs = mega_mhc_entry(values[0], n, *values[1:], **options) if entry else mega_mhc(*values, **options)  # type: ignore[arg-type]
        torch.manual_seed(1)
        grads = [torch.randn(out.shape).to(out.dtype) for out in outs]
        return [*outs, *torch.autograd.grad(outs, values, grads)]

    fused, mega = call("fused"), call("mega")
    for value, other in zip(mega, fused, strict=True):
        exact = other.detach().double()
        allowed = PARTS_BOUND * exact.abs().max() + exact.abs() * torch.finfo(value.dtype).eps
        assert ((value.detach().double() - exact).abs() <= allowed).all()
    for direction in ("forward", "backward"):
        record = last_launch(direction)
        assert record is not None
        assert (record.executor, record.interpreted) == ("gpu", True)
    assert _executor.cache_info().misses == 2
    for value, again in zip(mega, call("mega"), strict=True):
        assert torch.equal(value, again)
    assert (_executor.cache_info().misses, _executor.cache_info().hits) == (2, 2)


def test_no_tokens_run_no_program() -> None:
    before = last_launch()
    outs = mega_mhc(*site(0, 2, 8), backend="triton", schedule="mega")  # type: ignore[arg-type]
    assert [len(out) for out in outs] == [0] * 5
    assert last_launch() is before


def test_refuses() -> None:
    program = lowered("tiled", "backward", 9, 2, "float32")
    inputs, executor = inputs_of(program), GpuExecutor(program)
    with pytest.raises(InputError, match="phi: expected a tensor, got None"):
        executor.run({**inputs, "phi": None})
    with pytest.raises(InputError, match="previous_output: expected a tensor, got None"):
        executor.run({**inputs, "previous_output": None})
    with pytest.raises(InputError, match="residual: expected a tensor on cpu, got meta"):
        executor.run({**inputs, "residual": inputs["residual"].to("meta")})
    with pytest.raises(InputError, match=r"budget: expected 1 .* got 0"):
        GpuExecutor(program, budget=0)
    with pytest.raises(InputError, match=r"program: expected one of the graphs mega_mhc, .* got 'other'"):
        GpuExecutor(replace(program, graph="other"))
    double = lower_mega_mhc(
        "forward", 3, 8, num_cube_workers=1, num_vector_workers=1, compute_dtype="float64"
    )
    with pytest.raises(InputError, match="expected a float of at most 32 bits on a GPU, got float64"):
        GpuExecutor(double)
    with pytest.raises(BackendError, match="9"):
        mega_mhc(*site(2, 9, 8), backend="triton", schedule="mega")  # type: ignore[arg-type]
