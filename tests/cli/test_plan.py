"""``fused-mhc plan`` and ``fused-mhc trace``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fused_mhc import profiler
from fused_mhc.cli import app
from fused_mhc.cli.plan import split_workers
from fused_mhc.errors import InputError
from fused_mhc.scheduler import Program, verify


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    """``trace --device cpu`` runs the CPU executor, whatever backend the suite tests."""
    monkeypatch.delenv("MHC_FORCE_BACKEND", raising=False)


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str) -> str:
    """The one line of an option that is not what was expected."""
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


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
        "plan",
        "--tokens",
        "8192",
        "--hidden",
        "5120",
        "--direction",
        "backward",
        "--json",
        "--no-propose",
        "--no-pictures",
    )
    document = json.loads(text)
    assert document["files"] == []
    numbers = document["plan"]
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
        (("--workers", "0"), "--workers must be positive, got 0"),
        (("--cube-workers", "3"), "--workers: expected it alone"),
        (("--token-tile", "100000"), "token_tile: expected at most the 5632 staging rows"),
        (("--out", "/dev/null/plan"), "--out: expected a folder that can be written"),
    ],
)
def test_plan_refuses(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in refused("plan", "--out", str(tmp_path), *arguments)
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "tpu"), "--device: expected auto, cpu, cuda or cuda:<index>, got 'tpu'"),
        (("--device", "cuda:x"), "--device: expected auto, cpu, cuda or cuda:<index>, got 'cuda:x'"),
        (("--device", "cuda:99"), "--device: expected a device that is here, got 'cuda:99'"),
        (("--hidden", "0"), "--hidden must be positive, got 0"),
        (("--tokens", "2", "--streams", "9"), "at most 8 streams, got 9"),
        (("--out", "/dev/null/trace"), "--out: expected a folder that can be written"),
    ],
)
def test_trace_refuses(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in refused("trace", "--out", str(tmp_path), *arguments)
    assert not list(tmp_path.iterdir())
