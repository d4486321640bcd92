"""``fused-mhc plan`` and ``fused-mhc trace``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fused_mhc import profiler
from fused_mhc.cli.plan import plan_command, split_workers
from fused_mhc.cli.trace import trace_command
from fused_mhc.errors import BackendError, InputError
from fused_mhc.scheduler import Program, verify

app = typer.Typer()
app.command("plan")(plan_command)
app.command("trace")(trace_command)


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    """``trace --device cpu`` runs the CPU executor, whatever backend the suite tests."""
    monkeypatch.delenv("MHC_FORCE_BACKEND", raising=False)


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.mark.parametrize("graph", ["fixed", "tiled"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_plan_writes_numbers_and_pictures(graph: str, direction: str, tmp_path: Path) -> None:
    size = ("--tokens", "300", "--hidden", "128", "--workers", "6")
    text = invoke("plan", *size, "--graph", graph, "--direction", direction, "--out", str(tmp_path))
    assert "critical path: " in text
    assert "proposal: " in text
    assert "no race, no deadlock" in text
    program = Program.from_json((tmp_path / "program.json").read_text())
    verify(program)
    for stage in program.stages:
        assert stage.name in text
    assert (tmp_path / "dag.svg").read_text().startswith("<svg")
    assert (tmp_path / "gantt.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_plan_as_json() -> None:
    text = invoke(
        "plan", "--tokens", "8192", "--hidden", "5120", "--direction", "backward", "--json", "--no-propose"
    )
    numbers = json.loads(text)["plan"]
    assert (numbers["tasks"], numbers["events"], numbers["workers"]) == (984, 521, 132)
    assert numbers["geometry"]["token_tile"] == 32


def test_workers() -> None:
    assert split_workers(None, None, None) == {
        "num_cube_workers": 44,
        "num_vector_workers": 88,
        "mixed_workers": 132,
    }
    assert split_workers(1, None, None) == {
        "num_cube_workers": 1,
        "num_vector_workers": 1,
        "mixed_workers": 1,
    }
    assert split_workers(None, 20, 40) == {
        "num_cube_workers": 20,
        "num_vector_workers": 40,
        "mixed_workers": None,
    }
    for bad in ((None, 20, None), (8, 20, 40)):
        with pytest.raises(InputError, match="--workers: expected it alone"):
            split_workers(*bad)
    with pytest.raises(InputError, match="--workers must be positive, got 0"):
        split_workers(0, None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "0"), "token_count must be positive, got 0"),
        (("--direction", "up"), "direction: expected 'forward' or 'backward', got 'up'"),
        (("--graph", "round"), "graph: expected one of fixed, tiled, got 'round'"),
        (("--graph", "tiled", "--token-tile", "7"), "token_tile: expected one of"),
        (("--streams", "9"), "num_streams: expected at most 8"),
    ],
)
def test_plan_refuses(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        invoke("plan", *arguments)


def test_trace_runs_and_draws(tmp_path: Path) -> None:
    text = invoke("trace", "--tokens", "70", "--hidden", "32", "--streams", "2", "--out", str(tmp_path))
    assert "forward: 18 tasks on 2 cpu workers" in text
    assert "0 records dropped" in text
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "compute"}
    assert {"mhc_post", "mhc_projection", "mhc_grad_phi_rms"} <= names
    for direction in ("forward", "backward"):
        assert (tmp_path / f"{direction}.png").read_bytes().startswith(b"\x89PNG")
    assert profiler.current() is None


def test_trace_refuses(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    with pytest.raises(InputError, match="--device: expected cpu or cuda, got 'tpu'"):
        invoke("trace", "--device", "tpu", *out)
    with pytest.raises(InputError, match="--hidden must be positive, got 0"):
        invoke("trace", "--hidden", "0", *out)


def test_trace_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BackendError, match="expected a CUDA device, got none"):
        invoke("trace", "--device", "cuda", "--out", str(tmp_path))
