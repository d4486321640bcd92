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


def run_suites(
    paths: dict[str, Path], device: torch.device, commit: str, console: Console
) -> dict[str, Report]:
    """A report for every suite, all against one bandwidth. Our own parts come first, peers last (torch.compile and
    autotuning take a minute at every new shape), and a suite's file in ``paths`` is written after each part, so that
    what was measured is kept when a later part fails."""
    bandwidth = copy_bandwidth(device)
    reports: dict[str, Report] = {}
    for peers in (False, True):
        for name, path in paths.items():
            for part in SUITES[name]:
                if bool(part.peers) != peers:
                    continue
                report = run_bench(
                    part.cases,
                    part.backends,
                    [p for p in part.peers if p in installed_peers()],
                    device=device,
                    host=part.host,
                    commit=commit,
                    copy_gbps=bandwidth,
                    progress=lambda line: console.print(line, style="dim"),
                )
                whole = reports.setdefault(name, report)
                if whole is not report:
                    whole.rows.extend(report.rows)
                    whole.failures.extend(report.failures)
                path.write_text(json.dumps(whole.to_dict(), indent=1) + "\n")
    return reports


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
    paths = {name: out / f"{gpu}-{name}.json" for name in chosen}
    for name, report in run_suites(paths, device, commit or _commit(), console).items():
        print_report(report, console)
        plot_report(report, paths[name].with_suffix(".png"), f"fused-mhc {name}")
        console.print(f"wrote {paths[name]}")


if __name__ == "__main__":
    typer.run(main)
