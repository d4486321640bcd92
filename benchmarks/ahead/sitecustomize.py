"""Cache keys of Triton that two machines share. Python imports this file when its folder is on ``PYTHONPATH``.

Triton's own keys hold hashes of its files and of its compiler's version, which differ between builds of one release.
Here a key is the kernel's source, arguments, architecture and options: right only where both machines have the same
release of Triton, and every cache starts from that release.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

_COMPILER = "triton.compiler.compiler"
#: Options that name files or versions of a machine.
_LOCAL = ("extern_libs", "ptx_version", "ptx_options")


def shared_key(src: Any, backend: Any, options: Any, env_vars: Mapping[str, str] | None = None) -> str:
    """In the place of `triton.runtime.cache.get_cache_key`."""
    chosen = sorted((k, str(v)) for k, v in vars(options).items() if k not in _LOCAL)
    return f"{src.hash()}-{backend.target.arch}-{chosen}"


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        module.get_cache_key = shared_key  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    """Changes the compiler's module when it is imported, and costs nothing before."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = _Loader(spec.loader)
        return spec


# Launchers linked where there was no driver do not name its library.
with contextlib.suppress(OSError):
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
if _COMPILER not in sys.modules:
    sys.meta_path.insert(0, _Finder())
