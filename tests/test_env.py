"""The environment variables, each with values it takes and values it refuses."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fused_mhc
from fused_mhc import InputError, env


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("value", ["", "  "])
def test_nothing_is_forced(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.forced_backend() is None
    monkeypatch.setenv("MHC_FORCE_BACKEND", value)
    assert env.forced_backend() is None


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("native", "native"),
        ("torch", "native"),
        ("PyTorch", "native"),
        ("none", "native"),
        ("auto", "auto"),
        ("mixed", "auto"),
        ("Default", "auto"),
        ("triton", "triton"),
        ("TRITON-native", "triton"),
        ("triton+native", "triton"),
        ("cutile", "cutile"),
        ("cu_tile", "cutile"),
        ("CUDA-Tile", "cutile"),
        (" native ", "native"),
    ],
)
def test_names_and_aliases(value: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_FORCE_BACKEND", value)
    assert env.forced_backend() == name


@pytest.mark.parametrize("value", ["cuda", "tritn", "native,triton", "0"])
def test_unknown_backend(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_FORCE_BACKEND", value)
    with pytest.raises(InputError, match=rf"MHC_FORCE_BACKEND: expected one of .*got '{value}'"):
        env.forced_backend()


def test_a_bad_variable_stops_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("MHC_FORCE_BACKEND", "no such")
    with pytest.raises(InputError, match="MHC_FORCE_BACKEND"):
        fused_mhc.fused_h_aggregate(torch.zeros(1, 2, 3), torch.zeros(1, 2))
    with pytest.raises(InputError, match="MHC_FORCE_BACKEND"):
        fused_mhc.fused_add_3(*[torch.zeros(2)] * 3)


@pytest.mark.parametrize("backend", ["triton", "cutile"])
def test_forced_and_switched_off(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_FORCE_BACKEND", backend)
    monkeypatch.setenv(f"MHC_DISABLE_{backend.upper()}", "1")
    with pytest.raises(InputError, match="not switched off"):
        env.forced_backend()


@pytest.mark.parametrize("backend", ["triton", "cutile"])
def test_switches(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not env.disabled(backend)
    for value, expected in (
        ("1", True),
        ("true", True),
        ("ON", True),
        ("0", False),
        ("", False),
        ("no", False),
    ):
        monkeypatch.setenv(f"MHC_DISABLE_{backend.upper()}", value)
        assert env.disabled(backend) is expected
    monkeypatch.setenv(f"MHC_DISABLE_{backend.upper()}", "maybe")
    with pytest.raises(InputError, match=rf"MHC_DISABLE_{backend.upper()}: expected 0 or 1, got 'maybe'"):
        env.disabled(backend)


def test_native_cannot_be_switched_off() -> None:
    assert not env.disabled("native")


def test_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not env.interpreting()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert env.interpreting()


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert env.cache_dir() == Path.home() / ".cache" / "fused-mhc"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / "fused-mhc"
    monkeypatch.setenv("FUSED_MHC_CACHE_DIR", str(tmp_path / "own"))
    assert env.cache_dir() == tmp_path / "own"


def test_env_is_the_only_reader_of_the_environment() -> None:
    """`testing.verify` sets one variable for a while; nothing else outside env.py touches ``os.environ``."""
    root = Path(fused_mhc.__file__).parent
    readers = set()
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            named = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            if (
                named
                and isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
            ):
                readers.add(path.relative_to(root).as_posix())
    assert readers <= {"env.py", "testing/verify.py"}


def test_every_variable_is_described() -> None:
    """A variable that env.py reads by name has its line in the table that doctor prints."""
    source = Path(env.__file__).read_text(encoding="utf-8")
    for name in env.VARIABLES:
        assert name in source
        assert env.VARIABLES[name]
