"""fused-mhc doctor, and how errors of any command leave."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fused_mhc import __version__, env
from fused_mhc.cli import app
from fused_mhc.dispatch import OPERATIONS

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.strip() == f"fused-mhc {__version__}"


def test_json_names_everything() -> None:
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["packages"]["torch"]
    assert facts["devices"]["cpu"]["arch"] == "cpu"
    assert list(facts["environment"]) == list(env.VARIABLES)
    assert {row["op"] for row in facts["operations"]} == set(OPERATIONS)


def test_tables_name_every_operation_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0
    for name in (*OPERATIONS, *env.VARIABLES):
        assert name in result.stdout


def test_shows_the_value_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_FORCE_BACKEND", "PyTorch")
    facts = json.loads(runner.invoke(app, ["doctor", "--json"]).stdout)
    assert facts["environment"]["MHC_FORCE_BACKEND"]["value"] == "PyTorch"
    forward = [row for row in facts["operations"] if row["direction"] == "fwd"]
    assert {row["chosen"] for row in forward} == {"native"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("MHC_FORCE_BACKEND", "fastest"), ("MHC_DISABLE_TRITON", "maybe"), ("MHC_DISABLE_CUTILE", "2")],
)
def test_bad_environment_variable(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {name}: expected")
    assert repr(value) in result.stderr


def test_unknown_command_and_option() -> None:
    assert runner.invoke(app, ["nurse"]).exit_code == 2
    assert runner.invoke(app, ["doctor", "--loud"]).exit_code == 2
