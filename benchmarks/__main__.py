"""``python -m benchmarks [suite ...]``: run the suites on this GPU, write ``<gpu>-<suite>.json`` and a picture each."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from fused_mhc.cli.bench import print_report
from fused_mhc.errors import InputError
from fused_mhc.testing.bench import Report, installed_peers, run_bench
from fused_mhc.testing.plot import plot_report
from fused_mhc.testing.timing import copy_bandwidth

from .cases import SUITES

RESULTS = Path(__file__).parent / "results"


def _commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def run_suite(name: str, device: torch.device, commit: str, console: Console) -> Report:
    """All parts of a suite in one report, against one bandwidth."""
    bandwidth = copy_bandwidth(device)
    reports = []
    for part in SUITES[name]:
        peers = [p for p in part.peers if p in installed_peers()]
        reports.append(
            run_bench(
                part.cases,
                part.backends,
                peers,
                device=device,
                host=part.host,
                commit=commit,
                copy_gbps=bandwidth,
                progress=lambda line: console.print(line, style="dim"),
            )
        )
    first, *rest = reports
    for report in rest:
        first.rows.extend(report.rows)
    return first


def main(
    suites: Annotated[list[str] | None, typer.Argument(help="Which suites. Default: all.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    commit: Annotated[str, typer.Option(help="Recorded in the results. Default: git's HEAD.")] = "",
) -> None:
    """Run benchmark suites on the current CUDA device."""
    chosen = suites or list(SUITES)
    for name in chosen:
        if name not in SUITES:
            raise InputError(f"suites: expected one of {', '.join(SUITES)}, got {name!r}")
    if not torch.cuda.is_available():
        raise InputError("device: expected a CUDA device, got none")
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    console = Console(width=140)
    for name in chosen:
        report = run_suite(name, device, commit or _commit(), console)
        print_report(report, console)
        path = out / f"{gpu}-{name}.json"
        path.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
        plot_report(report, path.with_suffix(".png"), f"fused-mhc {name}")
        console.print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
