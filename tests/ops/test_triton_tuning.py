"""Tuned configurations: stored for a device, chosen among equal bits, never in the way."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fused_mhc import fused_add_3
from fused_mhc.cli import app
from fused_mhc.ops import _tuning
from fused_mhc.ops.fused_add.config import AddConfig, candidates, heuristic
from fused_mhc.testing.bench import Case
from fused_mhc.testing.inputs import Shape
from fused_mhc.testing.tune import run_tune
from fused_mhc.testing.verify import forced

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSED_MHC_CACHE_DIR", str(tmp_path))
    _tuning.forget()
    yield tmp_path
    _tuning.forget()


def _asked() -> AddConfig:
    return _tuning.tuned("fused_add_3", CPU, heuristic, candidates)


def test_heuristic_without_a_file() -> None:
    assert _asked() == heuristic()


def test_stored_choice_is_used() -> None:
    choice = candidates()[-1]
    path = _tuning.store_choices(CPU, {("fused_add_3", ()): choice})
    assert path == _tuning.tuning_file("cpu")
    assert _asked() == choice
    _tuning.store_choices(CPU, {("other", (4, 2)): choice})
    assert set(json.loads(path.read_text())["choices"]) == {"fused_add_3", "other 4 2"}


@pytest.mark.parametrize("content", ["{", '{"choices": {}}', "[]"])
def test_a_broken_file_is_said_and_passed_over(
    content: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _tuning.tuning_file("cpu").write_text(content)
    with caplog.at_level(logging.WARNING, "fused_mhc"):
        assert _asked() == heuristic()
    assert "cannot be read" in caplog.text


def test_a_choice_that_is_no_candidate_is_passed_over(cache: Path) -> None:
    _tuning.tuning_file("cpu").write_text(json.dumps({"format": 1, "choices": {"fused_add_3": [7, 1]}}))
    assert _asked() == heuristic()


def test_another_format_is_passed_over(cache: Path) -> None:
    best = candidates()[-1]
    content = {"format": 0, "choices": {"fused_add_3": [best.block, best.num_warps]}}
    _tuning.tuning_file("cpu").write_text(json.dumps(content))
    assert _asked() == heuristic()


def test_every_candidate_gives_the_same_bits_and_one_is_kept(cache: Path) -> None:
    case = Case("fused_add_3", Shape((5,), 2, 16))
    with forced("triton"):
        rows, path = run_tune([case], CPU, repeats=1)
        assert path.parent == cache
        assert [row.config for row in rows] == [str((c.block, c.num_warps)) for c in candidates()]
        assert sum(row.kept for row in rows) == 1
        kept = next(row for row in rows if row.kept)
        assert str((_asked().block, _asked().num_warps)) == kept.config
        fused_add_3(*(torch.ones(3) for _ in range(3)))


def test_different_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {("k", CPU): _tuning.Asked("k", (), 1, (1, 2))}
    from fused_mhc.testing import tune

    def call() -> torch.Tensor:
        return torch.tensor(float(_tuning.tuned("k", CPU, lambda: 1, lambda: [1, 2])))

    with pytest.raises(AssertionError, match="gives other bits"):
        tune._tune_call(call, asked, CPU, 1, None)


def test_command(cache: Path) -> None:
    with forced("triton"):
        ran = CliRunner().invoke(
            app,
            [
                "tune",
                "--op",
                "fused_add_3",
                "--shape",
                "3,2,8",
                "--device",
                "cpu",
                "--repeats",
                "1",
                "--json",
            ],
        )
    assert ran.exit_code == 0, ran.output
    report = json.loads(ran.stdout)
    assert Path(report["file"]).is_file()
    assert report["rows"]
