"""Environment variables: the one place that reads ``os.environ``.

``VARIABLES`` documents each of them; ``fused-mhc doctor`` prints the table with the values in force.
A value that is not understood is an `InputError`, raised by the first call that needs it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import InputError

__all__ = [
    "BACKENDS",
    "VARIABLES",
    "cache_dir",
    "cuda_paths",
    "disabled",
    "dispatch_state",
    "forced_backend",
    "interpreting",
    "raw_values",
    "without_cuda_paths",
]

BACKENDS = ("auto", "native", "triton", "cutile")

VARIABLES: dict[str, str] = {
    "MHC_FORCE_BACKEND": "use this backend everywhere, whatever `backend=` says: auto, native, triton or cutile "
    "(aliases: torch, pytorch, none = native; mixed, default = auto; triton_native = triton; "
    "cu_tile, cuda_tile = cutile; case, `-` and `+` do not matter). A forced backend never falls back.",
    "MHC_DISABLE_TRITON": "1: the triton backend reports that it is switched off (0 or empty: no effect)",
    "MHC_DISABLE_CUTILE": "1: the cutile backend reports that it is switched off (0 or empty: no effect)",
    "FUSED_MHC_CACHE_DIR": "folder for tuned configurations (default: $XDG_CACHE_HOME/fused-mhc, else ~/.cache/fused-mhc)",
    "TRITON_INTERPRET": "1: Triton kernels run on CPU tensors in Triton's interpreter (slow; read by Triton at import)",
}

_ALIASES = {
    "torch": "native",
    "pytorch": "native",
    "none": "native",
    "mixed": "auto",
    "default": "auto",
    "triton_native": "triton",
    "cu_tile": "cutile",
    "cuda_tile": "cutile",
}
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def _flag(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value not in _TRUE and value not in _FALSE:
        raise InputError(f"{name}: expected 0 or 1, got {value!r}")
    return value in _TRUE


def raw_values() -> dict[str, str | None]:
    """Each variable of `VARIABLES` as it is set, None where it is not."""
    return {name: os.environ.get(name) for name in VARIABLES}


#: CPython keeps the environment in a plain dict behind `os.environ` (bytes on POSIX); asking it three times there costs a
#: tenth of asking `os.environ`, which every call of an operation does.
_PLAIN: Any = getattr(os.environ, "_data", os.environ)
_ENCODE: Any = getattr(os.environ, "encodekey", str)
_DECIDING = tuple(_ENCODE(name) for name in ("MHC_FORCE_BACKEND", "MHC_DISABLE_TRITON", "MHC_DISABLE_CUTILE"))


def dispatch_state() -> tuple[Any, Any, Any]:
    """The raw values that decide a backend, as the platform keeps them; a cheap key for caches of resolved kernels."""
    get = _PLAIN.get
    force, triton, cutile = _DECIDING
    return get(force), get(triton), get(cutile)


def forced_backend() -> str | None:
    """The backend named by ``MHC_FORCE_BACKEND``, or None when it is unset or empty.

    Raises:
        InputError: the value names no backend, or one that ``MHC_DISABLE_*`` switches off.
    """
    raw = os.environ.get("MHC_FORCE_BACKEND", "")
    name = raw.strip().lower().replace("-", "_").replace("+", "_")
    if not name:
        return None
    name = _ALIASES.get(name, name)
    if name not in BACKENDS:
        raise InputError(f"MHC_FORCE_BACKEND: expected one of {', '.join(BACKENDS)} or an alias, got {raw!r}")
    if name in ("triton", "cutile") and disabled(name):
        raise InputError(
            f"MHC_FORCE_BACKEND: expected a backend that is not switched off, got {raw!r} "
            f"together with MHC_DISABLE_{name.upper()}"
        )
    return name


def disabled(backend: str) -> bool:
    """True when ``MHC_DISABLE_TRITON`` or ``MHC_DISABLE_CUTILE`` switches this backend off."""
    return backend in ("triton", "cutile") and _flag(f"MHC_DISABLE_{backend.upper()}")


def interpreting() -> bool:
    """True when Triton kernels run in Triton's interpreter (``TRITON_INTERPRET=1``)."""
    return _flag("TRITON_INTERPRET")


def cache_dir() -> Path:
    """Where tuned configurations are kept; the folder need not exist."""
    own = os.environ.get("FUSED_MHC_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fused-mhc"


#: Variables by which CUDA's tools find a toolkit.
_CUDA_PATHS = ("CUDA_HOME", "CUDA_PATH")


def cuda_paths() -> list[str]:
    """The toolkits that ``CUDA_HOME`` and ``CUDA_PATH`` name."""
    return [value for name in _CUDA_PATHS if (value := os.environ.get(name))]


@contextlib.contextmanager
def without_cuda_paths() -> Iterator[None]:
    """The process's environment without ``CUDA_HOME`` and ``CUDA_PATH``, for a tool that runs inside."""
    kept = {name: os.environ.pop(name) for name in _CUDA_PATHS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
