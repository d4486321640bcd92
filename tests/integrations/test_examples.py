"""The examples and the benchmark of this part run on a CPU and say what they should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    """What ``python arguments`` prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MHC_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        timeout=90,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "view tensor" not in done.stderr
    return done.stdout


def test_deepseek_v4_tiny() -> None:
    told = run("examples/deepseek_v4_tiny.py", "--device", "cpu", "--steps", "3")
    assert "unswitched the same: True" in told
    losses = [line.split("loss ")[1].split(" in ")[0] for line in told.splitlines() if "loss" in line]
    assert len(losses) == 2
    assert losses[0] == losses[1]


def test_fsdp2_train() -> None:
    told = run(
        "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/fsdp2_train.py", "--steps", "11"
    )
    assert "mapping parameters: torch.float32, logits: torch.bfloat16, 2 ranks" in told
    losses = [float(line.split()[-1]) for line in told.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] / 2


def test_benchmark(tmp_path: Path) -> None:
    options = ("--batch", "2", "--length", "8", "--repeats", "1", "--out", str(tmp_path), "--commit", "abc")
    run("-m", "benchmarks.deepseek_v4", "--tiny", "--device", "cpu", *options)
    report = json.loads((tmp_path / "cpu-deepseek-v4.json").read_text())
    header = {
        "gpu",
        "driver",
        "torch",
        "triton",
        "commit",
        "date",
        "copy_gbps",
        "rows",
        "failures",
        "transformers",
    }
    assert report.keys() == header
    kinds = [(row["backend"], row["direction"]) for row in report["rows"]]
    assert kinds == [(b, d) for b in ("transformers", "native") for d in ("fwd", "fwd+bwd")]
    assert all(row["tokens_per_s"] > 0 and row["T"] == 16 for row in report["rows"])
