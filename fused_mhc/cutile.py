"""Whether cuTile kernels compile for a device, and the environment in which they do.

cuTile kernels are compiled at run time by ``tileiras``, which comes with the packages of ``cuda-tile[tileiras]`` or
with a CUDA toolkit. Whether it works is asked by compiling a small kernel for the architecture of the tensor's own
device: an exit code, a version or a file's presence proves nothing. A yes is kept for the process; a no is kept for
`RETRY_SECONDS` only, for what failed once (a busy machine, a package being installed) may work later.

``tileiras`` loads the libnvvm that ``CUDA_HOME`` or ``CUDA_PATH`` names rather than the one beside it, and fails
without a word about it when that one is older. So it runs without these variables, unless it is itself the compiler of
the toolkit that they name.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import re
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import env
from .device import device_info

__all__ = [
    "PROBE_TIMEOUT",
    "RETRY_SECONDS",
    "Compiler",
    "compile_kernel",
    "compiler_path",
    "compiling",
    "find_compiler",
    "forget",
    "installed",
    "why_not",
    "why_not_arch",
]

#: How long a failed probe counts before it is made again.
RETRY_SECONDS = 5.0
#: What a probe's compiler may take.
PROBE_TIMEOUT = 60.0
#: Oldest architecture that cuTile kernels are compiled for.
_OLDEST = 80
#: Packages that must be of one version to work together.
_PACKAGES = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")

_PROVEN: set[str] = set()
_FAILED: dict[str, tuple[float, str]] = {}
_LOCK = threading.RLock()


@dataclass(frozen=True)
class Compiler:
    """The ``tileiras`` that would run.

    Attributes:
        path: its file.
        own_toolkit: it belongs to the toolkit that ``CUDA_HOME`` or ``CUDA_PATH`` names, and keeps these variables.
    """

    path: str
    own_toolkit: bool


def installed() -> bool:
    """True when the package cuda-tile is there (nothing is loaded)."""
    try:
        return importlib.util.find_spec("cuda.tile") is not None
    except (ModuleNotFoundError, ValueError):  # no parent package; a stub in sys.modules without a spec
        return False


def _mismatch() -> str | None:
    """What is wrong with the versions of the compiler's packages; None if they fit or are not all there."""
    try:
        found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    except importlib.metadata.PackageNotFoundError:
        return None
    if len({tuple(version.split(".")[:2]) for version in found.values()}) == 1:
        return None
    return "package versions do not match: " + ", ".join(f"{n} {v}" for n, v in found.items())


def find_compiler() -> Compiler:
    """The compiler that cuda-tile finds: that of the pip packages, else on PATH, else under CUDA_HOME.

    Raises:
        FileNotFoundError: there is none, or it is not clear which.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own words on mismatched packages; `_mismatch` says it too
        module: Any = importlib.import_module("cuda.tile._compile")
        lookup = getattr(module, "_find_compiler_bin", None)
        if lookup is None:
            raise FileNotFoundError("this version of cuda-tile does not say which compiler it uses")
        path = str(lookup().path)
    toolkits = [Path(root).resolve() for root in env.cuda_paths()]
    return Compiler(path, any(root in Path(path).resolve().parents for root in toolkits))


def compiler_path() -> str | None:
    """The file of the compiler that would run, or None where there is no package or no compiler."""
    try:
        return find_compiler().path if installed() else None
    except (FileNotFoundError, ImportError):
        return None


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """The environment in which cuTile's compiler is run; the process's own, so one thread at a time."""
    with _LOCK:
        try:
            clean = not find_compiler().own_toolkit
        except (FileNotFoundError, ImportError):
            clean = True
        with env.without_cuda_paths() if clean else contextlib.nullcontext():
            yield


def compile_kernel(kernel: Any, signature: Any, arch: str) -> bytes:
    """The cubin of a kernel for ``arch``, as the compiler makes it at a launch; needs no GPU.

    Args:
        kernel: a ``cuda.tile.kernel``.
        signature: its ``cuda.tile.compilation.KernelSignature``.
        arch: such as ``"sm_90"``.

    Raises:
        Exception: whatever cuda-tile raises when the compiler is missing or fails.
    """
    compilation: Any = importlib.import_module("cuda.tile.compilation")
    file = io.BytesIO()
    with compiling(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compilation.export_kernel(kernel, [signature], file, gpu_code=arch, output_format="cubin")
    return file.getvalue()


def _probe(arch: str) -> None:
    """Compile a small kernel for ``arch``; raises what cuda-tile raises."""
    ct: Any = importlib.import_module("cuda.tile")
    common: Any = importlib.import_module("fused_mhc._cutile_probe")
    with ct.compiler_timeout(PROBE_TIMEOUT):
        if not compile_kernel(common.probe_kernel, common.probe_signature(), arch):
            raise RuntimeError("the compiler wrote nothing")


def _forget_fallback() -> None:
    """cuda-tile takes the newest bytecode that the compiler accepts, and keeps the oldest for good when that question
    failed: let it ask again."""
    module: Any = importlib.import_module("cuda.tile._compile")
    clear = getattr(getattr(module, "_get_max_supported_bytecode_version", None), "cache_clear", None)
    if clear is not None:
        clear()


def _in_words(error: Exception, arch: str) -> str:
    text = " ".join(str(getattr(error, "message", None) or error).split())
    code = getattr(error, "return_code", None)
    return f"the compiler failed for {arch}" + (f" (exit {code})" if code is not None else "") + f": {text}"


def why_not_arch(arch: str) -> str | None:
    """Why cuTile kernels cannot be compiled for ``arch`` here; None if a small one just was, or was before."""
    number = re.fullmatch(r"sm_(\d+)", arch)
    if number is None or int(number[1]) < _OLDEST:
        return f"cuTile kernels need an NVIDIA GPU of sm_{_OLDEST} or newer, got {arch}"
    if not installed():
        return "the package cuda-tile is not installed (pip install 'fused-mhc[cutile]')"
    with _LOCK:
        if arch in _PROVEN:
            return None
        when, reason = _FAILED.get(arch, (0.0, ""))
        if reason and time.monotonic() - when < RETRY_SECONDS:
            return reason
        try:
            find_compiler()
            _probe(arch)
        except FileNotFoundError:
            reason = (
                _mismatch() or "no tileiras, cuTile's compiler, was found (pip install 'fused-mhc[cutile]')"
            )
        except Exception as error:  # noqa: BLE001  # whatever went wrong, it is no proof that kernels run
            mismatch = _mismatch()
            reason = _in_words(error, arch) + (f"; {mismatch}" if mismatch else "")
            _forget_fallback()
        else:
            _PROVEN.add(arch)
            _FAILED.pop(arch, None)
            return None
        _FAILED[arch] = (time.monotonic(), reason)
        return reason


def why_not(device: torch.device) -> str | None:
    """Why cuTile kernels cannot run on ``device``; None if they can."""
    if device.type != "cuda":
        return "cuTile kernels need an NVIDIA GPU"
    return why_not_arch(device_info(device).arch)


def forget(archs: Sequence[str] | None = None) -> None:
    """Ask again at the next call, for these architectures or for all."""
    with _LOCK:
        for arch in list(_PROVEN | set(_FAILED)) if archs is None else archs:
            _PROVEN.discard(arch)
            _FAILED.pop(arch, None)
