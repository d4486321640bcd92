"""The import rule of ARCHITECTURE.md, read from the imports of every file: downwards only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fused_mhc"

#: room -> the rooms it may import from (its own always).
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "env": {"errors"},
    "device": {"errors"},
    "checks": {"errors", "env", "device"},
    "cutile": {"errors", "env", "device", "_cutile_probe"},
    "_cutile_probe": set(),
    "dispatch": {"errors", "env", "device", "checks", "cutile"},
    "ops": {"errors", "env", "device", "checks", "cutile", "dispatch"},
    "nn": {"errors", "env", "device", "checks", "dispatch", "ops"},
    "integrations": {"errors", "env", "device", "checks", "cutile", "dispatch", "ops", "nn"},
    "scheduler": {"errors"},
    "profiler": {"errors", "scheduler"},
    "runtime": {"errors", "env", "device", "checks", "scheduler", "profiler", "ops"},
    "testing": {
        "errors",
        "env",
        "device",
        "checks",
        "dispatch",
        "ops",
        "nn",
        "scheduler",
        "profiler",
        "runtime",
    },
    "cli": {
        "errors",
        "env",
        "device",
        "checks",
        "cutile",
        "dispatch",
        "ops",
        "nn",
        "integrations",
        "scheduler",
        "profiler",
        "runtime",
        "testing",
        "__version__",
    },
}
#: The only files of cli that may see `testing`.
SEES_TESTING = {"cli/verify.py", "cli/bench.py", "cli/tune.py"}
#: Folders of ops that fuse others: they may use what another one's kernel files offer, tile functions and hosts.
FUSING = {"contract", "mega_mhc", "mhc_pre"}
KERNELS = ("_triton", "_gluon", "_cutile")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """What ``path`` imports from the package: (parts below fused_mhc, name taken or None)."""
    module = ("fused_mhc", *path.relative_to(PACKAGE).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = tuple(alias.name.split("."))
                if parts[0] == "fused_mhc":
                    yield parts[1:], None
        elif isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            if base[0] == "fused_mhc":
                for alias in node.names:
                    yield base[1:], alias.name


def modules(path: Path) -> Iterator[tuple[str, ...]]:
    """The modules of the package that ``path`` imports, as parts below fused_mhc."""
    for parts, name in imports(path):
        below = PACKAGE.joinpath(*parts)
        if name is not None and ((below / name).is_dir() or (below / f"{name}.py").is_file()):
            yield (*parts, name)
        else:
            yield parts or (name or "",)


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_point_downwards(path: Path) -> None:
    inner = path.relative_to(PACKAGE)
    room = inner.parts[0].removesuffix(".py")
    if room == "__init__":
        return  # names every room, loads none: test_the_package_loads_nothing_heavy
    assert room in ALLOWED, f"{room} has no place in the import rule"
    for target in modules(path):
        assert target[0] == room or target[0] in ALLOWED[room], f"{inner} imports {'.'.join(target)}"
        if target[0] == "testing" and room == "cli":
            assert inner.as_posix() in SEES_TESTING, f"{inner} imports testing"


def offered(parts: tuple[str, ...]) -> list[str]:
    """``__all__`` of a module."""
    tree = ast.parse(PACKAGE.joinpath(*parts).with_suffix(".py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "ops").rglob("*.py")), ids=lambda p: f"{p.parent.name}/{p.name}"
)
def test_kernels_stay_in_their_folder(path: Path) -> None:
    folder = path.relative_to(PACKAGE / "ops").parts[0]
    for parts, name in imports(path):
        foreign = len(parts) > 2 and parts[0] == "ops" and parts[1] != folder and parts[2].startswith(KERNELS)
        if foreign:
            assert folder in FUSING, f"{path} imports the kernels of {parts[1]}"
            assert name is not None, f"{path} imports all kernels of {parts[1]}"
            assert name in offered(parts), f"{path} imports {name} of {parts[1]}, which does not offer it"
            assert not name.endswith("_kernel"), f"{path} imports {name} of {parts[1]}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "ops").rglob("__init__.py")), ids=lambda p: p.parent.name)
def test_kernels_load_only_when_asked_for(path: Path) -> None:
    loaded = {part for parts in modules(path) for part in parts}
    assert not [part for part in loaded if part.startswith(KERNELS)]


def fresh(code: str) -> None:
    """Run ``code`` in an interpreter of its own."""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_scheduler_needs_no_torch() -> None:
    fresh("import sys, fused_mhc.scheduler; assert 'torch' not in sys.modules")


def test_the_package_loads_nothing_heavy() -> None:
    fresh("import sys, fused_mhc; assert not {'torch', 'triton', 'numpy', 'typer'} & set(sys.modules)")


def test_library_and_command_line_load_no_kernels() -> None:
    fresh(
        "import sys, fused_mhc.nn, fused_mhc.cli\n"
        "loaded = [m for m in sys.modules if m.startswith('fused_mhc') and m.endswith(('_triton', '_cutile'))]\n"
        "assert not loaded, loaded\n"
        "assert not {'cuda.tile', 'matplotlib', 'fused_mhc.testing'} & set(sys.modules)"
    )


def test_cutile_kernels_need_no_triton() -> None:
    pytest.importorskip("cuda.tile")
    files = [path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("_cutile*.py")]
    fresh(
        "import importlib, sys\n"
        f"for name in {['.'.join(path.parts) for path in files]}: importlib.import_module(name)\n"
        "assert 'triton' not in sys.modules"
    )
