"""``python -m benchmarks.ahead [suite[:part] | bits ...]``: compile what benchmarks launch, for a GPU that is not here.

The hosts run on CPU tensors, with a driver that compiles and launches nothing, and leave their kernels in
``TRITON_CACHE_DIR``. That folder, at the same path on the machine with the GPU and the same releases of Python and Triton
there, and ``PYTHONPATH=benchmarks/ahead`` on both, spare a short time on it the compiling:

    TRITON_CACHE_DIR=/tmp/kernels PYTHONPATH=.:benchmarks/ahead python -m benchmarks.ahead sublayer single-pass ops
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import triton
import triton.runtime.build
import typer
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from benchmarks.cases import SUITES
from fused_mhc import device, dispatch
from fused_mhc.errors import InputError
from fused_mhc.testing.bench import Case, case_calls
from fused_mhc.testing.bits import run_bits

#: Shared memory that a program may take, in bytes, and multiprocessors: of an H100 or H200.
SHARED_MEMORY, MULTIPROCESSORS = 232_448, 132


class _Utils:
    """What Triton asks a driver for; nothing is loaded."""

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_MEMORY,
            "multiprocessor_count": MULTIPROCESSORS,
            "max_num_regs": 65536,
            "warpSize": 32,
        }

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024

    def fill_tma_descriptor(self, *_: Any) -> None:
        return None


class _Launcher(nvidia.CudaLauncher):  # type: ignore[misc]
    """Is built like the real one, which leaves it in the cache, and launches nothing."""

    def __call__(self, *_: Any) -> None:
        return None


class _Driver:
    utils, launcher_cls = _Utils(), _Launcher

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda

    def map_python_to_cpp_type(self, name: str) -> str:
        return nvidia.ty_to_cpp(name)  # type: ignore[no-any-return]

    def is_active(self) -> bool:
        return True


def pretend(arch: int, folder: Path) -> None:
    """From now on CPU tensors pass for those of a GPU of this architecture. ``folder`` takes an empty driver library for
    the launchers to be linked with."""
    (folder / "empty.c").write_text("")
    library = folder / "libcuda.so.1"
    link = [
        "gcc",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(library),
        str(folder / "empty.c"),
    ]
    subprocess.run(link, check=True)
    nvidia.libcuda_dirs.cache_clear()
    triton.knobs.nvidia.libcuda_path = str(folder)
    names = ("launch", "load_binary", "get_device_properties", "cuOccupancyMaxActiveClusters")
    names = (*names, "set_printf_fifo_size", "fill_tma_descriptor", "PyCUtensorMap")
    # What was built for that driver cannot be loaded here.
    triton.runtime.build._load_module_from_path = lambda *_: SimpleNamespace(**dict.fromkeys(names))
    nvidia.CudaUtils()
    triton.runtime.driver.set_active(_Driver(arch))
    torch.cuda.current_device = lambda: None  # type: ignore[assignment, return-value]
    torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[misc, assignment]
    info = device.DeviceInfo("a GPU that is not here", f"sm_{arch}", MULTIPROCESSORS, 32, 60 << 20, 128 << 30)
    device._query = lambda *_: info  # type: ignore[assignment]
    probe = dispatch._probe_device
    dispatch._probe_device = lambda backend, where: None if backend == "triton" else probe(backend, where)


def cases_of(suites: list[str]) -> list[Case]:
    """The cases of suites, or of a part ``suite:number``, that run on Triton, each once."""
    found: dict[Case, None] = {}
    for name in suites:
        suite, _, part = name.partition(":")
        if suite not in SUITES or (part and not part.isdigit()):
            raise InputError(
                f"suites: expected some of {', '.join(SUITES)}, with or without :part, got {name!r}"
            )
        parts = SUITES[suite][int(part) : int(part) + 1] if part else SUITES[suite]
        found |= {case: None for p in parts if "triton" in p.backends for case in p.cases}
    return list(found)


def main(
    suites: Annotated[
        list[str] | None,
        typer.Argument(help="Suites, suite:part, or bits (what certifies repeats). Default: all suites."),
    ] = None,
    arch: Annotated[int, typer.Option(help="Compute capability, times ten.")] = 90,
    share: Annotated[int, typer.Option(help="Compile every share-th case (for several processes).")] = 1,
    first: Annotated[int, typer.Option(help="The first of them.")] = 0,
) -> None:
    """Compile the Triton kernels of benchmark suites without a GPU."""
    cases = cases_of([name for name in suites or list(SUITES) if name != "bits"])
    with tempfile.TemporaryDirectory() as folder:
        pretend(arch, Path(folder))
        for case in cases[first::share]:
            began = time.perf_counter()
            for call in case_calls(case, "triton", torch.device("cpu")).values():
                call()
            print(f"{case.op} {case.shape} {time.perf_counter() - began:.1f} s", flush=True)
        if "bits" in (suites or ()) and first == 0:
            run_bits("triton", "cpu", repeats=1, progress=lambda op: print(f"bits: {op}", flush=True))


if __name__ == "__main__":
    typer.run(main)
