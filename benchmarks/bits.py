"""Evidence for `MHC_BACKEND_DETERMINISM`: 1,000 repeats of every operation that a
backend has in both directions, and token 0 alone and among others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from fused_mhc.dispatch import FORWARD_ONLY, OPERATIONS, backend_status
from fused_mhc.errors import InputError
from fused_mhc.testing.bench import run_bench
from fused_mhc.testing.bits import run_bits
from fused_mhc.testing.timing import copy_bandwidth


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    backend: Annotated[str, typer.Option(help="Backend to certify.")] = "triton",
    repeats: Annotated[int, typer.Option(help="Repeats of every operation.")] = 1000,
    commit: Annotated[str, typer.Option(help="Recorded in the result.")] = "unknown",
) -> None:
    """Run the checks on the current CUDA device; exit code 1 when a bit differs."""
    if not torch.cuda.is_available():
        raise InputError("device: expected a CUDA device, got none")
    device = torch.device("cuda", torch.cuda.current_device())
    lacking = {(row.op, row.direction) for row in backend_status(backend, device) if row.chosen != backend}
    ops = [op for op in OPERATIONS if (op, "fwd") not in lacking]
    forward_only = [op for op in ops if (op, "bwd") in lacking and op not in FORWARD_ONLY]
    rows = run_bits(backend, device, ops=ops, forward_only=forward_only, repeats=repeats)
    for row in rows:
        print(f"{row.op:26s} {row.check:8s} {row.shape:34s} {row.different} of {row.trials} differ")
    head = run_bench([], [], device=device, commit=commit, copy_gbps=copy_bandwidth(device))
    out.write_text(json.dumps({**head.to_dict(), "rows": [r.to_dict() for r in rows]}, indent=1) + "\n")
    if any(row.different for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
