"""``fused-mhc verify``: every operation, backend, dtype and a set of odd shapes against fp64."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import env
from .options import check_names, chosen_device

if TYPE_CHECKING:
    from ..testing.verify import VerifyRow

__all__ = ["verify_command"]


def _worst(rows: list[VerifyRow]) -> str:
    """Error and bound of the row that comes nearest to its bound (or exceeds it most)."""
    row = max(rows, key=lambda r: (not r.ok, r.error / r.bound if r.bound else 0.0))
    return f"{row.error:.1e} of {row.bound:.1e}"


def _table(rows: list[VerifyRow], device: str) -> Table:
    """A line per operation, backend and dtype: all shapes together, the one nearest to its bound shown."""
    table = Table(title=f"Against fp64 on {device}: error and bound of the worst shape", title_justify="left")
    for column in ("operation", "backend", "dtype"):
        table.add_column(column)
    for column in ("forward", "backward", "passed"):
        table.add_column(column, justify="right")
    groups: dict[tuple[str, str, str], list[VerifyRow]] = {}
    for row in rows:
        groups.setdefault((row.op, row.backend, row.dtype), []).append(row)
    for key, group in groups.items():
        passed = sum(row.ok for row in group)
        style = "green" if passed == len(group) else "bold red"
        forward, backward = (_worst([r for r in group if r.direction == d]) for d in ("fwd", "bwd"))
        table.add_row(*map(escape, key), forward, backward, f"[{style}]{passed}/{len(group)}[/]")
    return table


def verify_command(
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Only this backend; may be repeated. Default: all that can run here."),
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option(help="Only this operation; may be repeated. Default: all.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:1.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Compare every operation with fp64: largest error, its bound, pass or fail.

    Leaves with exit code 1 if any row fails.
    """
    from ..dispatch import OPERATIONS
    from ..testing.verify import run_verify

    check_names("--backend", backend, env.BACKENDS[1:])
    check_names("--op", op, tuple(OPERATIONS))
    where = str(chosen_device(device))
    with Console(stderr=True).status("starting") as status:
        rows = run_verify(backend or None, op or None, where, progress=status.update)

    failed = [row for row in rows if not row.ok]
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=2))
    else:
        console = Console()
        console.print(_table(rows, where))
        for row in failed:
            console.print(f"FAIL {row.to_dict()}", style="red", markup=False, highlight=False)
        console.print(
            f"{len(rows) - len(failed)} passed, {len(failed)} failed", style="red" if failed else "green"
        )
    if failed:
        raise typer.Exit(1)
