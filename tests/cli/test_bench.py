"""fused-mhc bench at a small size on the CPU: its JSON, its table, its picture, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fused_mhc.cli import app
from fused_mhc.testing import bench

runner = CliRunner()
SMALL = [
    "bench",
    "--op",
    "h_aggregate",
    "--shape",
    "5,3,8",
    "--repeats",
    "2",
    "--device",
    "cpu",
    "--backend",
    "native",
]


@pytest.fixture
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the two gigabytes that measuring it moves."""
    monkeypatch.setattr(bench, "copy_bandwidth", lambda *_, **__: 10.0)


@pytest.mark.usefixtures("known_bandwidth")
def test_json_has_both_directions() -> None:
    result = runner.invoke(app, [*SMALL, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [(r["op"], r["direction"], r["T"], r["n"], r["C"]) for r in report["rows"]] == [
        ("h_aggregate", "fwd", 5, 3, 8),
        ("h_aggregate", "bwd", 5, 3, 8),
    ]
    assert report["copy_gbps"] == 10.0
    assert all(row["us"] > 0 for row in report["rows"])


@pytest.mark.usefixtures("known_bandwidth")
def test_table_and_picture(tmp_path: Path) -> None:
    picture = tmp_path / "bars.png"
    result = runner.invoke(app, [*SMALL, "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert "h_aggregate" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--op", "fft"], "--op"),
        (["--backend", "auto"], "--backend"),
        (["--peer", "nobody"], "--peer"),
        (["--shape", "8,4"], "--shape"),
        (["--shape", "8,17,4"], "--shape"),
        (["--dtype", "int8"], "--dtype"),
        (["--repeats", "0"], "--repeats"),
        (["--device", "toaster"], "--device"),
        (["--plot", "/no/such/folder/x.png"], "--plot"),
    ],
)
def test_bad_options(arguments: list[str], named: str) -> None:
    result = runner.invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {named}: expected")
    assert arguments[1] in result.stderr
