"""The cuTile probe with a stub for a compiler (row F47 and its kin), and its place in the environment."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_mhc import cutile, dispatch

ct = pytest.importorskip("cuda.tile")

ARCH = "sm_90"
#: What a stub answers to a probe: the second argument after ``-o`` names the file to write.
GOOD = '#!/bin/sh\nwhile [ "$1" != "-o" ]; do shift; done\necho cubin > "$2"\n'
Install = Callable[[str], Path]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing proven, no disk cache that answers in the compiler's place, no waiting between probes."""
    monkeypatch.setattr(cutile, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(ct._cext.default_tile_context.config, "cache_dir", None)
    cutile.forget()
    cutile._forget_fallback()
    yield
    cutile.forget()
    cutile._forget_fallback()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Puts a script in the compiler's place."""

    def install(script: str) -> Path:
        path = tmp_path / "bin" / "tileiras"
        path.parent.mkdir(exist_ok=True)
        path.write_text(script)
        path.chmod(0o755)
        binary = ct._compile._CompilerBinary(str(path), os.environ["PATH"], "", pass_cuda_home_var=True)
        monkeypatch.setattr(ct._compile, "_find_compiler_bin", lambda: binary)
        cutile._forget_fallback()
        return path

    return install


def test_a_compiler_that_works_is_asked_once(stub: Install) -> None:
    path = stub(GOOD)
    assert cutile.why_not_arch(ARCH) is None
    path.write_text("#!/bin/sh\nexit 1\n")
    assert cutile.why_not_arch(ARCH) is None, "a proven yes is kept"
    assert cutile.why_not_arch("sm_100") is not None, "for its architecture alone"


def test_the_real_one_compiles() -> None:
    assert cutile.why_not_arch(ARCH) is None
    assert Path(cutile.find_compiler().path).name == "tileiras"


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutile, "installed", lambda: False)
    assert (
        cutile.why_not_arch(ARCH)
        == "the package cuda-tile is not installed (pip install 'fused-mhc[cutile]')"
    )


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise FileNotFoundError("'tileiras' compiler not found")

    monkeypatch.setattr(ct._compile, "_find_compiler_bin", none)
    reason = cutile.why_not_arch(ARCH)
    assert reason is not None
    assert "no tileiras" in reason


def test_exit_1_with_odd_text_is_no_proof(stub: Install) -> None:
    stub("#!/bin/sh\necho 'warning: the moon is full' >&2\nexit 1\n")
    reason = cutile.why_not_arch(ARCH)
    assert reason is not None
    assert "the moon is full" in reason
    assert ARCH in reason


def test_exit_0_without_a_cubin_is_no_proof(stub: Install) -> None:
    stub("#!/bin/sh\nexit 0\n")
    assert cutile.why_not_arch(ARCH) is not None


def test_unsupported_architecture(stub: Install) -> None:
    stub(
        '#!/bin/sh\nfor a in "$@"; do if [ "$a" = sm_90 ]; then echo "Cannot find option named sm_90" >&2; exit 1; fi; done\n'
        + GOOD.split("\n", 1)[1]
    )
    reason = cutile.why_not_arch(ARCH)
    assert reason is not None
    assert "Cannot find option" in reason
    assert cutile.why_not_arch("sm_100") is None
    assert cutile.why_not_arch("sm_75") == "cuTile kernels need an NVIDIA GPU of sm_80 or newer, got sm_75"
    assert cutile.why_not_arch("gfx942") == "cuTile kernels need an NVIDIA GPU of sm_80 or newer, got gfx942"


def test_a_time_out_and_then_success_recovers(stub: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutile, "PROBE_TIMEOUT", 0.2)
    stub("#!/bin/sh\nexec sleep 5\n")
    # The question for the newest bytecode has no time-out of its own.
    version = ct._compile.BytecodeVersion.V_13_3
    monkeypatch.setattr(ct._compile, "_get_max_supported_bytecode_version", lambda *a, **k: version)
    reason = cutile.why_not_arch(ARCH)
    assert reason is not None
    assert "timeout" in reason
    monkeypatch.setattr(cutile, "PROBE_TIMEOUT", 20.0)
    stub(GOOD)
    assert cutile.why_not_arch(ARCH) is None


def test_a_no_is_kept_for_a_while_only(stub: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutile, "RETRY_SECONDS", 3600.0)
    stub("#!/bin/sh\necho no >&2\nexit 1\n")
    first = cutile.why_not_arch(ARCH)
    stub(GOOD)
    assert cutile.why_not_arch(ARCH) == first
    later = cutile.time.monotonic() + 3601
    monkeypatch.setattr(cutile.time, "monotonic", lambda: later)
    assert cutile.why_not_arch(ARCH) is None


def test_packages_of_different_versions(stub: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"nvidia-cuda-tileiras": "13.4.92", "nvidia-cuda-nvcc": "13.2.1", "nvidia-nvvm": "13.4.92"}
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or real(name))
    stub("#!/bin/sh\necho 'failed to compile Tile IR program' >&2\nexit 5\n")
    reason = cutile.why_not_arch(ARCH)
    assert reason is not None
    assert "nvidia-cuda-nvcc 13.2.1" in reason
    assert "failed to compile" in reason


@pytest.mark.parametrize("own", [False, True])
def test_environment_of_the_compiler(
    own: bool, stub: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA_HOME and CUDA_PATH reach the compiler only when it is that toolkit's; they are there again afterwards."""
    seen = tmp_path / "seen"
    stub(f'#!/bin/sh\necho "[$CUDA_HOME][$CUDA_PATH]" >> {seen}\n' + GOOD.split("\n", 1)[1])
    home = str(tmp_path if own else tmp_path / "elsewhere")
    monkeypatch.setenv("CUDA_HOME", home)
    monkeypatch.setenv("CUDA_PATH", home)
    assert cutile.why_not_arch(ARCH) is None
    assert set(seen.read_text().split()) == {f"[{home}][{home}]" if own else "[][]"}
    assert os.environ["CUDA_HOME"] == os.environ["CUDA_PATH"] == home


def test_the_reason_is_in_the_status(stub: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the tensor's own device (row F49)."""
    stub("#!/bin/sh\necho 'the moon is full' >&2\nexit 1\n")
    archs = {0: "sm_90", 1: "sm_75"}
    monkeypatch.setattr(
        cutile, "device_info", lambda device: type("Info", (), {"arch": archs[device.index]})()
    )
    for index, words in ((0, "the moon is full"), (1, "got sm_75")):
        rows = dispatch.backend_status("cutile", torch.device("cuda", index))
        assert {row.chosen for row in rows} == {"none"}
        assert all(words in row.reasons["cutile"] for row in rows)
    stub(GOOD)
    rows = dispatch.backend_status("cutile", torch.device("cuda", 0))
    chosen = {(row.op, row.direction): row.chosen for row in rows}
    for op in ("sinkhorn", "h_aggregate", "h_post_bda", "proj_rms_compute_h"):
        assert chosen[op, "fwd"] == chosen[op, "bwd"] == "cutile"
    assert chosen["fused_add_3", "fwd"] == "none"


def test_auto_takes_it_only_where_it_was_measured_faster(
    stub: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(GOOD)
    monkeypatch.setattr(cutile, "device_info", lambda device: type("Info", (), {"arch": ARCH})())
    monkeypatch.setattr(dispatch, "device_info", lambda device: type("Info", (), {"arch": ARCH})())
    device = torch.device("cuda", 0)

    def chosen() -> dict[tuple[str, str], str]:
        return {(row.op, row.direction): row.chosen for row in dispatch.backend_status("auto", device)}

    assert "cutile" not in chosen().values()
    monkeypatch.setattr(dispatch, "CUTILE_WINS", frozenset({(ARCH, "sinkhorn", "fwd")}))
    found = chosen()
    assert found["sinkhorn", "fwd"] == "cutile"
    assert found["sinkhorn", "bwd"] != "cutile"
