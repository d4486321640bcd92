"""The persistent megakernel with all its workers: bits, overlap, streams, graphs, the watchdog."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_mhc import profiler
from fused_mhc.device import device_info
from fused_mhc.errors import ScheduleError
from fused_mhc.ops.mega_mhc import mega_mhc
from fused_mhc.runtime import CpuExecutor, GpuExecutor, Settings, check_launches, last_launch
from fused_mhc.runtime.buffers import DTYPES
from fused_mhc.scheduler import Program, RuntimeConfigC, lower_mega_mhc, lower_tiled_mhc
from fused_mhc.scheduler.runtime_config import trigger_array

DEVICE = torch.device("cuda", 0)
SMS = device_info(DEVICE).sm_count
LOWER = {"fixed": lower_mega_mhc, "tiled": lower_tiled_mhc}
KINDS = [(kind, direction) for kind in LOWER for direction in ("forward", "backward")]
each = pytest.mark.parametrize(("kind", "direction"), KINDS)
SETTINGS = Settings(num_iters=20)


def lowered(kind: str, direction: str, tokens: int, width: int = 512, n: int = 4, **options: Any) -> Program:
    options = {"mixed_workers": SMS} | options
    return LOWER[kind](  # type: ignore[operator]
        direction,
        tokens,
        width,
        n,
        num_cube_workers=SMS // 3,
        num_vector_workers=SMS - SMS // 3,
        **options,
    )


def inputs_of(program: Program, device: torch.device = DEVICE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = {}
    for buffer in program.buffers:
        if buffer.role == "input":
            value = torch.randn(buffer.shape, generator=generator)
            if buffer.name in ("u", "mixed_rstd"):
                value = 0.5 + value.abs()
            scale = 0.05 if buffer.name == "phi" else 1.0
            inputs[buffer.name] = (scale * value).to(DTYPES[buffer.dtype]).to(device)
    return inputs


def run(program: Program, **options: Any) -> dict[str, Tensor]:
    made = GpuExecutor(program, DEVICE, **options).run(inputs_of(program), settings=SETTINGS)
    check_launches(DEVICE)
    return made


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def near(made: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    for name, value in made.items():
        exact = expected[name].double().cpu()
        allowed = bound * exact.abs().max() + exact.abs() * torch.finfo(value.dtype).eps
        assert ((value.double().cpu() - exact).abs() <= allowed).all(), name


@each
@pytest.mark.parametrize("stream", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("tokens", "n", "width"), [(1, 4, 512), (33, 3, 200), (700, 2, 1000), (300, 8, 96)])
def test_matches_the_cpu_executor(
    kind: str, direction: str, tokens: int, n: int, width: int, stream: str
) -> None:
    program = lowered(kind, direction, tokens, width, n, stream_dtype=stream)
    made = run(program)
    record = last_launch(direction)
    assert record is not None
    assert (record.executor, record.workers, record.interpreted) == ("gpu", SMS, False)
    expected = CpuExecutor(program, threads=1).run(inputs_of(program, torch.device("cpu")), settings=SETTINGS)
    if direction == "forward":
        assert torch.equal(made["new_residual"].cpu(), expected["new_residual"])
    near(made, expected, 8e-6 if stream == "float32" else 2e-5)


@each
def test_roles_and_mixed_workers_have_the_same_bits(kind: str, direction: str) -> None:
    mixed = run(lowered(kind, direction, 1500))
    same(run(lowered(kind, direction, 1500, mixed_workers=None)), mixed)
    same(run(lowered(kind, direction, 1500, mixed_workers=7)), mixed)


@each
def test_repeats_under_load(kind: str, direction: str) -> None:
    """Another stream takes multiprocessors and bandwidth away; the launch comes to its end with the same bits."""
    program = lowered(kind, direction, 2049)
    executor, inputs = GpuExecutor(program, DEVICE), inputs_of(program)
    first = executor.run(inputs, settings=SETTINGS)
    side, square = torch.cuda.Stream(DEVICE), torch.randn(2048, 2048, device=DEVICE)
    for _ in range(100):
        with torch.cuda.stream(side):
            square @ square
        same(executor.run(inputs, settings=SETTINGS), first)
    check_launches(DEVICE)


@each
def test_two_streams_at_once(kind: str, direction: str) -> None:
    program = lowered(kind, direction, 1000)
    executor, inputs = GpuExecutor(program, DEVICE), inputs_of(program)
    expected = executor.run(inputs, settings=SETTINGS)
    torch.cuda.synchronize(DEVICE)
    streams, made = [torch.cuda.Stream(DEVICE) for _ in range(2)], []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                made.append(executor.run(inputs, settings=SETTINGS))
    check_launches(DEVICE)
    for results in made:
        same(results, expected)


@pytest.mark.parametrize("tokens", [1, 8191, 65_537, 100_000])
@each
def test_any_number_of_tokens(kind: str, direction: str, tokens: int) -> None:
    """The last token's results are those of a call with it alone (forward)."""
    program = lowered(kind, direction, tokens, 64)
    inputs = inputs_of(program)
    made = GpuExecutor(program, DEVICE).run(inputs, settings=SETTINGS)
    check_launches(DEVICE)
    assert not any(value.isnan().any() for value in made.values())
    if direction == "forward":
        shapes = {buffer.name: buffer.shape for buffer in program.buffers}
        alone = {k: t[-1:] if shapes[k][0] == tokens else t for k, t in inputs.items()}
        one = GpuExecutor(lowered(kind, direction, 1, 64), DEVICE).run(alone, settings=SETTINGS)
        for name, value in one.items():
            assert torch.equal(value, made[name][-1:]), name


@each
def test_captured(kind: str, direction: str) -> None:
    """A graph replays what was captured after the first call, also when its executor is gone."""
    program = lowered(kind, direction, 300)
    executor, inputs = GpuExecutor(program, DEVICE), inputs_of(program)
    executor.run(inputs, settings=SETTINGS)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(DEVICE)
    with torch.cuda.graph(graph):
        captured = executor.run(inputs, settings=SETTINGS)
    del executor
    for _ in range(3):
        for tensor in inputs.values():
            if tensor.dim() == 3:
                tensor.mul_(0.5)
        graph.replay()
        same(captured, GpuExecutor(program, DEVICE).run(inputs, settings=SETTINGS))
    check_launches(DEVICE)


@each
@pytest.mark.parametrize("mixed", [None, SMS])
def test_an_event_that_never_fires_is_named(kind: str, direction: str, mixed: int | None) -> None:
    program = lowered(kind, direction, 500, mixed_workers=mixed)
    config = RuntimeConfigC.from_buffer_copy(program.table)
    event = program.events[-1].base
    trigger_array(config)[program.events[0].base] += 1
    trigger_array(config)[event] += 1
    broken = GpuExecutor(replace(program, table=bytes(config)), DEVICE, budget=20_000, check=False)
    inputs = inputs_of(program)
    broken.run(inputs, settings=SETTINGS)
    with pytest.raises(
        ScheduleError, match=r"worker \d+: .* waits for event .*, which has \d+ of \d+ triggers"
    ):
        check_launches(DEVICE)
    check_launches(DEVICE)
    run(program)


def test_more_workers_than_fit() -> None:
    program = lowered("tiled", "forward", 500, mixed_workers=64 * SMS)
    with pytest.raises(ScheduleError, match=r"program: expected at most \d+ workers"):
        run(program)


@each
def test_records(kind: str, direction: str) -> None:
    program = lowered(kind, direction, 1000)
    executor, inputs = GpuExecutor(program, DEVICE), inputs_of(program)
    plain = executor.run(inputs, settings=SETTINGS)
    with profiler.profile() as session:
        same(executor.run(inputs, settings=SETTINGS), plain)
    (launch,) = session.launches
    compute = launch.records[launch.records["kind"] == profiler.COMPUTE]
    assert sorted(compute["task"]) == list(range(program.task_count))
    assert (launch.records["end"] >= launch.records["start"]).all()
    # A task starts after all producers of its event have ended: one clock for all multiprocessors, which ticks
    # every so often.
    ended = dict(zip(compute["task"].tolist(), compute["end"].tolist(), strict=True))
    depends, triggers = launch.depends.tolist(), launch.triggers.tolist()
    fired: dict[int, int] = {}
    for task, end in ended.items():
        fired[triggers[task]] = max(fired.get(triggers[task], 0), end)
    for task, start in zip(compute["task"].tolist(), compute["start"].tolist(), strict=True):
        assert start + 2000 >= fired.get(depends[task], 0)


def test_the_operation() -> None:
    n, width, tokens = 4, 512, 2000
    size = n * n + 2 * n
    torch.manual_seed(0)
    values = [
        torch.randn(tokens, width).bfloat16(),
        torch.randn(tokens, n, width).bfloat16(),
        torch.rand(tokens, n),
        torch.rand(tokens, n),
        torch.softmax(torch.randn(tokens, n, n), -1),
        0.05 * torch.randn(size, n * width),
        torch.randn(3),
        torch.randn(size),
        torch.rand(width),
    ]
    leaves = [value.to(DEVICE).requires_grad_() for value in values]

    def call(schedule: str) -> dict[str, Tensor]:
        outs = mega_mhc(*leaves, backend="triton", schedule=schedule)  # type: ignore[arg-type]
        grads = torch.autograd.grad(outs, leaves, [torch.ones_like(out) for out in outs])
        return {str(k): value.detach() for k, value in enumerate((*outs, *grads))}

    near(call("mega"), call("fused"), 4e-5)
    check_launches(DEVICE)


SMALL = """
import torch
from test_megakernel import DEVICE, KINDS, lowered, run

for kind, direction in KINDS:
    run(lowered(kind, direction, 70, 64, 2, mixed_workers=3))
torch.cuda.synchronize()
"""


@pytest.mark.timeout(580)
def test_memcheck_is_clean(tmp_path: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    script = tmp_path / "small.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{SMALL}")
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=570, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
