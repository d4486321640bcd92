"""``fused-mhc bench``: the benchmark runner for users."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import env
from ..errors import InputError
from .options import check_matplotlib, check_names, chosen_device

if TYPE_CHECKING:
    from ..testing.bench import Report
    from ..testing.inputs import Shape

__all__ = ["bench_command", "parse_shape", "print_report"]

_DTYPES = ("bfloat16", "float16", "float32")


def parse_shape(text: str) -> Shape:
    from ..testing.inputs import Shape

    try:
        tokens, n, width = (int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--shape: expected T,n,C as three integers, got {text!r}") from None
    if tokens < 0 or not 1 <= n <= 16 or width < 1:
        raise InputError(f"--shape: expected T >= 0, n in 1..16, C >= 1, got {text!r}")
    return Shape((tokens,), n, width)


def print_report(report: Report, console: Console) -> None:
    """The rows as a table."""
    table = Table(
        title=f"{report.gpu}, torch {report.torch}, copy {report.copy_gbps:.0f} GB/s", title_justify="left"
    )
    for column in ("operation", "direction", "backend", "T", "n", "C", "dtype"):
        table.add_column(column, no_wrap=True)
    for column in ("us", "% of copy"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("note")
    for r in report.rows:
        share = "" if r.pct_copy is None else f"{r.pct_copy:.1f}"
        table.add_row(
            r.op, r.direction, r.backend, str(r.T), str(r.n), str(r.C), r.dtype, f"{r.us:.1f}", share, r.note
        )
    console.print(table)
    for failure in report.failures:
        console.print(f"failed: {failure}", style="yellow", markup=False)


def bench_command(
    op: Annotated[
        list[str] | None,
        typer.Option(help="Only this operation (or sublayer); may be repeated. Default: all."),
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="T,n,C; may be repeated. Default: 8192,4,4096.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Only this backend; may be repeated. Default: all that can run here."),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Also this peer (eager, torch.compile, liger); may be repeated.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the streams: bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:1.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Timed calls a row.")] = 30,
    host: Annotated[
        bool,
        typer.Option("--host", help="Also time the host's cost of a call, and a forward in a CUDA graph."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a bar chart against the limit (PNG).")] = None,
    commit: Annotated[str, typer.Option(help="Recorded in the report.")] = "unknown",
) -> None:
    """Time operations against the copy bandwidth of the same run, beside what else is installed."""
    import torch

    from ..checks import check_count
    from ..testing.bench import CASES, PEERS, Case, installed_peers, run_bench
    from ..testing.plot import plot_report

    check_count("--repeats", repeats)
    if dtype not in _DTYPES:
        raise InputError(f"--dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}")
    check_names("--op", op, tuple(CASES))
    check_names("--backend", backend, env.BACKENDS[1:])
    check_names("--peer", peer, tuple(PEERS))
    ops, backends, peers = op or list(CASES), backend or list(env.BACKENDS[1:]), peer or []
    for name in peers:
        if name not in installed_peers():
            raise InputError(f"--peer: expected one that is installed, got {name!r}")
    if plot is not None:
        check_matplotlib("--plot")
        if not plot.absolute().parent.is_dir():
            raise InputError(f"--plot: expected a file in a folder that exists, got {plot}")
    where = chosen_device(device)
    shapes = [parse_shape(text) for text in shape or ["8192,4,4096"]]
    cases = [Case(name, s, getattr(torch, dtype)) for s in shapes for name in ops]

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("copy bandwidth", total=None)
        report = run_bench(
            cases,
            backends,
            peers,
            device=where,
            repeats=repeats,
            host=host,
            commit=commit,
            progress=lambda line: bar.update(task, description=line, advance=1),
        )
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1))
    else:
        print_report(report, Console())
    if plot is not None:
        plot_report(report, plot, "fused-mhc")
