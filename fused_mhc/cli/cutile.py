"""``fused-mhc compile-cutile``: every cuTile kernel compiled for the architectures asked for, without a GPU."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import BackendError, InputError

if TYPE_CHECKING:
    from ..ops._cutile_compile import Launch

__all__ = ["compile_cutile_command"]

#: What continuous integration compiles for: Ampere, Hopper, Blackwell for servers and for desks.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
_STREAMS = 4


def _check(archs: list[str]) -> None:
    """The compiler is there and knows every architecture.

    Raises:
        BackendError: there is no cuda-tile, or no compiler.
        InputError: an architecture that it cannot compile a small kernel for.
    """
    from .. import cutile

    if not cutile.installed():
        raise BackendError(
            "compile-cutile: the package cuda-tile is not installed (pip install 'fused-mhc[cutile]')"
        )
    for arch in archs:
        if not re.fullmatch(r"sm_\d+", arch):
            raise InputError(f"--arch: expected an architecture such as sm_90, got {arch!r}")
    try:
        cutile.find_compiler()
    except FileNotFoundError as error:
        raise BackendError(f"compile-cutile: {error}") from error
    for arch in archs:
        reason = cutile.why_not_arch(arch)
        if reason is not None:
            raise InputError(f"--arch: expected one that the compiler knows, got {arch!r}: {reason}")


@functools.lru_cache(maxsize=None)
def _launches(streams: int, arch: str) -> list[Launch]:
    from ..ops._cutile_compile import Shape, collect

    return collect(Shape(n=streams), arch)


def _compile(task: tuple[int, int, str]) -> tuple[int, str]:
    """``(bytes, "")`` of one kernel's cubin, or ``(0, what went wrong)``."""
    streams, index, arch = task
    from ..ops._cutile_compile import cubin

    try:
        return len(cubin(_launches(streams, arch)[index], arch)), ""
    except Exception as error:  # noqa: BLE001  # whatever the compiler's front end raises is the answer
        return 0, " ".join(f"{type(error).__name__}: {error}".split())


def _results(tasks: list[tuple[int, int, str]], jobs: int) -> Iterator[tuple[int, str]]:
    if jobs == 1:
        yield from map(_compile, tasks)
        return
    # Not forked: torch has threads.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_compile, tasks)


def _show(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="cuTile kernels", title_justify="left")
    for column in ("op", "kernel", "arch"):
        table.add_column(column)
    table.add_column("bytes", justify="right")
    for row in rows:
        table.add_row(row["op"], row["kernel"].replace("[", "\\["), row["arch"], f"{row['bytes']:,}")
    return table


def compile_cutile_command(
    arch: Annotated[
        list[str] | None,
        typer.Option(help=f"Architecture, may be repeated. Default: {', '.join(ARCHITECTURES)}."),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, max=8, help="Number of streams n.")] = _STREAMS,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes that compile. Default: one a processor.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a list of {op, kernel, arch, bytes}.")
    ] = False,
) -> None:
    """Compile every cuTile kernel (bf16 streams of width 4096) without a GPU; list the size of each.

    Exit code 1: a kernel does not compile. 2: an unknown architecture, or no compiler.
    """
    archs = list(dict.fromkeys(arch or ARCHITECTURES))
    _check(archs)
    pairs = [(index, name) for name in archs for index in range(len(_launches(streams, name)))]
    processes = min(len(pairs), jobs or os.cpu_count() or 1)
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    tasks = [(streams, index, name) for index, name in pairs]
    for (index, name), (size, error) in zip(pairs, _results(tasks, processes), strict=True):
        launch = _launches(streams, name)[index]
        if error:
            failed.append(f"{launch.op} {launch.kernel} for {name}: {error}")
        else:
            rows.append({"op": launch.op, "kernel": launch.kernel, "arch": name, "bytes": size})
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        Console().print(_show(rows))
    for line in failed:
        Console(stderr=True, soft_wrap=True).print(
            f"error: {line}", style="red", markup=False, highlight=False
        )
    if failed:
        raise typer.Exit(1)
