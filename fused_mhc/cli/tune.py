"""``fused-mhc tune``: pick faster kernel configurations for this GPU, among those that give the same bits."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .bench import parse_shape
from .options import check_names, chosen_device

__all__ = ["tune_command"]


def tune_command(
    op: Annotated[
        list[str] | None, typer.Option(help="Only this operation; may be repeated. Default: all.")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="T,n,C; may be repeated. Default: 8192,4,4096.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:1.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Timed calls a candidate.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Time the Triton kernels' configurations and store the fastest in the cache folder.

    Results never change: only configurations that give the same bits are tried. Nothing is tuned unless this command
    runs; delete the file it names to go back.
    """
    from ..checks import check_count
    from ..dispatch import OPERATIONS, resolve
    from ..testing.bench import Case
    from ..testing.tune import run_tune

    check_count("--repeats", repeats)
    check_names("--op", op, tuple(OPERATIONS))
    where = chosen_device(device)
    shapes = [parse_shape(text) for text in shape or ["8192,4,4096"]]
    ops = op or list(OPERATIONS)
    for name in ops:
        resolve(name, "fwd", "triton", where)  # a BackendError says why there is nothing to tune here
    with Console(stderr=True).status("starting") as status:
        rows, path = run_tune(
            [Case(name, s) for s in shapes for name in ops], where, repeats=repeats, progress=status.update
        )
    if as_json:
        typer.echo(json.dumps({"file": str(path), "rows": [row.to_dict() for row in rows]}, indent=1))
        return
    table = Table(title=f"Stored in {path}", title_justify="left")
    for column in ("kernel", "for", "configuration"):
        table.add_column(column)
    table.add_column("us", justify="right")
    table.add_column("")
    for row in rows:
        note = "kept" if row.kept else "default" if row.default else ""
        table.add_row(row.kernel, row.arguments, row.config, f"{row.us:.2f}", note)
    Console().print(table)
