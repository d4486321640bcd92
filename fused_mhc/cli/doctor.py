"""``fused-mhc doctor``: versions, devices, environment variables, and what runs each operation here."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import __version__, env

__all__ = ["collect", "doctor_command"]

_PACKAGES = ("torch", "triton", "numpy", "cuda-tile", "nvidia-cuda-tileiras", "transformers")


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def collect() -> dict[str, Any]:
    """Everything `doctor` shows, as plain data.

    Raises:
        InputError: an environment variable holds a value that is not understood.
    """
    import torch

    from .. import cutile
    from ..device import device_info
    from ..dispatch import MHC_BACKEND_DETERMINISM, backend_status, is_cutile_available, is_triton_available

    cuda = (
        [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "fused_mhc": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "packages": {name: _package_version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cutile_compiler": cutile.compiler_path(),
        "devices": {name: dataclasses.asdict(device_info(name)) for name in ["cpu", *cuda]},
        "environment": {
            name: {"value": value, "meaning": env.VARIABLES[name]} for name, value in env.raw_values().items()
        },
        "triton_available": is_triton_available(),
        "cutile_available": is_cutile_available(),
        "determinism": dict(MHC_BACKEND_DETERMINISM),
        "operations": [dataclasses.asdict(row) for row in backend_status()],
    }


def _facts(facts: dict[str, Any]) -> Table:
    table = Table(title="Versions", title_justify="left", show_header=False)
    table.add_row("fused-mhc", facts["fused_mhc"])
    table.add_row("Python", f"{facts['python']} on {facts['platform']}")
    for name, version in facts["packages"].items():
        table.add_row(name, version or "[dim]not installed[/]")
    runtime = (
        f"CUDA {facts['cuda']}" if facts["cuda"] else f"HIP {facts['hip']}" if facts["hip"] else "CPU only"
    )
    table.add_row("torch built for", runtime)
    table.add_row("cuTile compiler", facts["cutile_compiler"] or "[dim]none[/]")
    return table


def _devices(facts: dict[str, Any]) -> Table:
    table = Table(title="Devices", title_justify="left")
    for column in ("device", "name", "architecture", "SMs", "warp", "L2", "memory"):
        table.add_column(column)
    for name, info in facts["devices"].items():
        if info["sm_count"]:
            sizes = (f"{info['l2_bytes'] / 2**20:.0f} MiB", f"{info['total_memory'] / 2**30:.0f} GiB")
            table.add_row(
                name, info["name"], info["arch"], str(info["sm_count"]), str(info["warp_size"]), *sizes
            )
        else:
            table.add_row(name, f"{facts['cpu_threads']} threads", info["arch"], "", "", "", "")
    return table


def _environment(facts: dict[str, Any]) -> Table:
    table = Table(title="Environment variables", title_justify="left", show_lines=True)
    for column in ("variable", "value", "meaning"):
        table.add_column(column)
    for name, entry in facts["environment"].items():
        value = "[dim]not set[/]" if entry["value"] is None else escape(repr(entry["value"]))
        table.add_row(name, value, escape(entry["meaning"]))
    return table


def _operations(facts: dict[str, Any]) -> Table:
    table = Table(title="What runs each operation here (policy auto)", title_justify="left")
    chosen: dict[str, dict[str, str]] = {}
    for row in facts["operations"]:
        chosen.setdefault(row["op"], {})[row["direction"]] = row["chosen"]
    for column in ("operation", "forward", "backward"):
        table.add_column(column)
    for op, by_direction in chosen.items():
        marks = (f"[red]{b}[/]" if b == "none" else f"[green]{b}[/]" for b in by_direction.values())
        table.add_row(op, *marks)
    return table


def _reasons(facts: dict[str, Any]) -> Table:
    table = Table(title="Why nothing else does", title_justify="left", show_lines=True)
    for column in ("backend", "reason", "operations"):
        table.add_column(column)
    where: dict[tuple[str, str], list[str]] = {}
    for row in facts["operations"]:
        for backend, reason in row["reasons"].items():
            where.setdefault((backend, reason), []).append(f"{row['op']} {row['direction']}")
    for (backend, reason), ops in where.items():
        everywhere = len(ops) == len(facts["operations"])
        table.add_row(backend, escape(reason), "all" if everywhere else ", ".join(ops))
    return table


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the same facts as JSON.")] = False,
) -> None:
    """Versions, devices, environment variables, and which backend runs each operation here (and why)."""
    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = Console()
    for table in (_facts(facts), _devices(facts), _environment(facts), _operations(facts), _reasons(facts)):
        console.print(table)
