"""What the GPU's counters say of each kernel: ``python -m benchmarks.counters --out FILE`` (needs Nsight Compute).

Two passes over the same calls, each after the same L2 flush that the timings use. "flushed" counts in one go, with the
caches as the flush left them: the bytes that cross the memory bus in the kernel's time, its own or not. "clean" lets
the profiler replay each kernel with clean caches: where its warps wait.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fused_mhc.errors import InputError
from fused_mhc.testing.bench import Case, case_calls, run_bench
from fused_mhc.testing.inputs import Shape
from fused_mhc.testing.timing import copy_bandwidth

OPS = ("sinkhorn", "h_aggregate", "h_post_bda", "proj_rms_compute_h", "mega_mhc")
SHAPE = Shape((8192,), 4, 4096)
FLUSH_BYTES = 256 << 20

_BYTES = ("gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum")
_STALLS = (
    "long_scoreboard",
    "short_scoreboard",
    "barrier",
    "wait",
    "math_pipe_throttle",
    "mio_throttle",
    "lg_throttle",
    "membar",
    "gmma",
)
_PASSES: dict[str, tuple[str, ...]] = {
    "flushed": _BYTES,
    "clean": (
        *_BYTES,
        "smsp__issue_active.avg.pct_of_peak_sustained_active",
        "sm__warps_active.avg.pct_of_peak_sustained_active",
        "launch__registers_per_thread",
        *(f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio" for why in _STALLS),
    ),
}


def _calls() -> None:
    """Every operation once in each direction, twice: the first round compiles."""
    device = torch.device("cuda", torch.cuda.current_device())
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    for op in OPS:
        for name, call in case_calls(Case(op, SHAPE), "triton", device).items():
            call()
            flush.zero_()
            torch.cuda.synchronize()
            # Start and end, not push and pop: a backward's launches come from a thread of autograd's own.
            range_id = torch.cuda.nvtx.range_start(f"{op}__{name}")
            call()
            torch.cuda.synchronize()
            torch.cuda.nvtx.range_end(range_id)


def _profile(state: str) -> list[dict[str, Any]]:
    command = [
        shutil.which("ncu") or "ncu",
        *("--csv", "--page", "raw", "--print-units", "base", "--nvtx"),
        *("--clock-control", "none", "--cache-control", "none" if state == "flushed" else "all"),
        *(f"--nvtx-include={op}__{way}" for op in OPS for way in ("fwd", "bwd")),
        *("--metrics", ",".join(_PASSES[state])),
        *(sys.executable, "-m", "benchmarks.counters", "--calls", "--out", os.devnull),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in ran.stdout.splitlines() if line.startswith('"')]
    if ran.returncode or len(lines) < 3:
        raise InputError(
            f"ncu: expected a table, got exit code {ran.returncode}: {(ran.stdout + ran.stderr)[-2000:]}"
        )
    rows = []
    for line in list(csv.DictReader(io.StringIO("\n".join(lines))))[1:]:  # the first row holds the units
        ranges = "".join(v or "" for k, v in line.items() if k and "Range" in k)
        found = re.search(r"(\w+)__(fwd|bwd)", ranges)
        values = {
            name: float(line[name].replace(",", ""))
            for name in _PASSES[state]
            if line.get(name) not in (None, "")
        }
        op, way = found.groups() if found else ("", "")
        rows.append({"op": op, "direction": way, "kernel": line["Kernel Name"], "caches": state, **values})
    return rows


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    commit: Annotated[str, typer.Option(help="Recorded in the result.")] = "unknown",
    calls: Annotated[
        bool, typer.Option("--calls", help="Only make the calls (what the profiler runs).")
    ] = False,
) -> None:
    """Count on the current CUDA device."""
    if not torch.cuda.is_available():
        raise InputError("device: expected a CUDA device, got none")
    if calls:
        _calls()
        return
    if shutil.which("ncu") is None:
        raise InputError("ncu: expected Nsight Compute's command on PATH, got none")
    device = torch.device("cuda", torch.cuda.current_device())
    head = run_bench([], [], device=device, commit=commit, copy_gbps=copy_bandwidth(device))
    rows = [row for state in _PASSES for row in _profile(state)]
    out.write_text(json.dumps({**head.to_dict(), "rows": rows}, indent=1) + "\n")
    for row in rows:
        if row["caches"] == "flushed":
            read, written = row["dram__bytes_read.sum"] / 1e6, row["dram__bytes_write.sum"] / 1e6
            micros = row["gpu__time_duration.sum"] / 1e3
            print(
                f"{row['op']:20s} {row['direction']:4s} {row['kernel'][:40]:40s} {micros:8.1f} us  "
                f"read {read:7.1f} MB  written {written:7.1f} MB"
            )


if __name__ == "__main__":
    typer.run(main)
