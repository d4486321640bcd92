"""fused-mhc compile-cutile: what it lists, and how it fails."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from fused_mhc import cutile
from fused_mhc.cli import app
from fused_mhc.cli import cutile as compile_cutile
from fused_mhc.dispatch import OPERATIONS

pytest.importorskip("cuda.tile")

runner = CliRunner()
FOLDERS = {"sinkhorn", "h_aggregate", "h_post_bda", "proj_rms_compute_h", "mega_mhc"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """No compiler: every cubin has 7 bytes. The kernels that were asked for, by name and architecture."""
    from fused_mhc.ops import _cutile_compile

    asked: list[tuple[str, str]] = []

    def cubin(launch: Any, arch: str) -> bytes:
        asked.append((launch.kernel, arch))
        return b"1234567"

    monkeypatch.setattr(_cutile_compile, "cubin", cubin)
    monkeypatch.setattr(
        cutile, "why_not_arch", lambda arch: None if arch != "sm_95" else "Cannot find option"
    )
    return asked


def test_json_lists_every_kernel_for_every_architecture(quick: list[tuple[str, str]]) -> None:
    archs = ["sm_90", "sm_100"]
    result = runner.invoke(
        app, ["compile-cutile", *(a for x in archs for a in ("--arch", x)), "--jobs", "1", "--json"]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert all(list(row) == ["op", "kernel", "arch", "bytes"] for row in rows)
    assert [(row["kernel"], row["arch"]) for row in rows] == quick
    assert {row["bytes"] for row in rows} == {7}
    by_arch = [{(r["op"], r["kernel"]) for r in rows if r["arch"] == arch} for arch in archs]
    assert len(by_arch[0]) + len(by_arch[1]) == len(rows), "each kernel once"
    for kernels in by_arch:
        assert FOLDERS <= {op for op, _ in kernels} <= set(OPERATIONS.values())


def test_every_kernel_is_listed(quick: list[tuple[str, str]]) -> None:
    """Each function that is a kernel of a `_cutile*` module is launched for one n or another."""
    from fused_mhc.ops._cutile_common import kernel
    from fused_mhc.testing.cutile_emulator import kernel_modules

    for n in ("3", "8"):
        arguments = ["compile-cutile", "--arch", "sm_90", "--streams", n, "--jobs", "1"]
        assert runner.invoke(app, arguments).exit_code == 0
    listed = {name.partition("[")[0] for name, _ in quick}
    defined = {
        value._pyfunc.__name__
        for module in kernel_modules()
        for value in vars(module).values()
        if isinstance(value, kernel)
    }
    assert listed == defined


def test_table(quick: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    result = runner.invoke(app, ["compile-cutile", "--arch", "sm_90", "--jobs", "1"])
    assert result.exit_code == 0
    for kernel, arch in quick:
        assert kernel in result.stdout
        assert arch in result.stdout


@pytest.mark.parametrize(
    ("arch", "words"),
    [("sm_95", "Cannot find option"), ("hopper", "such as sm_90"), ("sm_", "such as sm_90")],
)
def test_an_unknown_architecture(quick: list[tuple[str, str]], arch: str, words: str) -> None:
    result = runner.invoke(app, ["compile-cutile", "--arch", "sm_90", "--arch", arch, "--json"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: --arch: expected")
    assert repr(arch) in result.stderr
    assert words in result.stderr
    assert not quick


@pytest.mark.parametrize("what", ["package", "compiler"])
def test_nothing_to_compile_with(
    quick: list[tuple[str, str]], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise FileNotFoundError("no tileiras")

    if what == "package":
        monkeypatch.setattr(cutile, "installed", lambda: False)
    else:
        monkeypatch.setattr(cutile, "find_compiler", none)
    result = runner.invoke(app, ["compile-cutile", "--arch", "sm_90"])
    assert result.exit_code == 2
    assert "not installed" in result.stderr if what == "package" else "no tileiras" in result.stderr
    assert not quick


def test_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutile, "why_not_arch", lambda arch: None)
    broken = "h_aggregate_bwd_kernel"

    def compile_one(task: tuple[int, int, str]) -> tuple[int, str]:
        name = compile_cutile._launches(task[0], task[2])[task[1]].kernel
        return (0, "TileError: no such layout") if name == broken else (9, "")

    monkeypatch.setattr(compile_cutile, "_compile", compile_one)
    result = runner.invoke(app, ["compile-cutile", "--arch", "sm_90", "--jobs", "1", "--json"])
    assert result.exit_code == 1
    assert result.stderr == f"error: h_aggregate {broken} for sm_90: TileError: no such layout\n"
    assert broken not in {row["kernel"] for row in json.loads(result.stdout)}


def test_processes_compile_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, the real compiler, the kernels of one operation."""
    everything = compile_cutile._launches(4, "sm_120")
    wanted = [i for i, launch in enumerate(everything) if launch.op == "h_aggregate"]
    assert cutile.why_not_arch("sm_120") is None
    found = list(compile_cutile._results([(4, i, "sm_120") for i in wanted], 2))
    assert len(found) == 2
    assert all(size > 10_000 and error == "" for size, error in found), found
