"""fused-mhc verify: its table, its JSON and its exit code. What it compares is tested in tests/ops."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import fused_mhc.testing.verify
from fused_mhc.cli import app
from fused_mhc.testing.verify import VerifyRow

runner = CliRunner()


def test_one_operation_passes() -> None:
    result = runner.invoke(app, ["verify", "--op", "fused_add_3", "--backend", "native", "--device", "cpu"])
    assert result.exit_code == 0
    assert "fused_add_3" in result.stdout
    assert result.stdout.rstrip().endswith("0 failed")


def test_json_rows() -> None:
    result = runner.invoke(
        app, ["verify", "--op", "input_expand", "--backend", "native", "--device", "cpu", "--json"]
    )
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert {(row["op"], row["backend"]) for row in rows} == {("input_expand", "native")}
    assert all(row["ok"] and row["error"] <= row["bound"] for row in rows)


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_failure_leaves_with_one(option: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    good = VerifyRow("sinkhorn", "native", "fwd", "float32", "T=(1) n=2 C=1", "out", 0.0, 1e-6, True)
    bad = VerifyRow("sinkhorn", "native", "bwd", "float32", "T=(1) n=2 C=1", "input_logits", 0.5, 1e-6, False)
    monkeypatch.setattr(fused_mhc.testing.verify, "run_verify", lambda *_, **__: [good, bad])
    result = runner.invoke(app, ["verify", "--device", "cpu", *option])
    assert result.exit_code == 1
    assert "input_logits" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--op", "fft"], "--op"),
        (["--backend", "auto"], "--backend"),
        (["--device", "toaster"], "--device"),
        (["--device", "cpu:1"], "--device"),
        (["--device", "cuda:4096"], "--device"),
    ],
)
def test_bad_options(arguments: list[str], named: str) -> None:
    result = runner.invoke(app, ["verify", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {named}: expected")
    assert repr(arguments[1]) in result.stderr


def test_a_named_backend_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_DISABLE_TRITON", "1")
    result = runner.invoke(app, ["verify", "--backend", "triton", "--device", "cpu"])
    assert result.exit_code == 2
    assert "MHC_DISABLE_TRITON" in result.stderr
