"""The command line: ``fused-mhc``.

Exit codes: 0 all is well; 1 a check failed or a Program did not finish; 2 an option, an argument or an environment
variable is not what was expected (`InputError`), or the asked backend cannot run here (`BackendError`). Each error
is one line on standard error.
"""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from .. import __version__
from ..errors import BackendError, InputError, ScheduleError
from .bench import bench_command
from .cutile import compile_cutile_command
from .demo import demo_command
from .doctor import doctor_command
from .plan import plan_command
from .trace import trace_command
from .tune import tune_command
from .verify import verify_command

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """Turns the library's own errors into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (InputError, BackendError, ScheduleError) as error:
            Console(stderr=True, soft_wrap=True).print(
                f"error: {error}", style="red", markup=False, highlight=False
            )
            raise typer.Exit(1 if isinstance(error, ScheduleError) else 2) from error


app = typer.Typer(
    name="fused-mhc",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Manifold-constrained hyper-connections (mHC): what runs here, whether it is right, and a model that trains.",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fused-mhc {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and leave."
    ),
) -> None:
    """Options before the command."""


app.command("doctor")(doctor_command)
app.command("verify")(verify_command)
app.command("bench")(bench_command)
app.command("plan")(plan_command)
app.command("trace")(trace_command)
app.command("tune")(tune_command)
app.command("demo")(demo_command)
app.command("compile-cutile")(compile_cutile_command)


def main() -> None:
    """Entry point of the ``fused-mhc`` script."""
    app()
