"""Every example runs as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """An example's process, on a machine without a CUDA device."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("name", ["two_pass", "single_pass"])
def test_example_learns(name: str) -> None:
    done = run(name, "--steps", "20")
    assert done.returncode == 0, done.stderr
    first, *_, last = (float(line.split(":")[1].split()[0]) for line in done.stdout.splitlines())
    assert last < first - 1


def test_cuda_graph_without_a_device() -> None:
    done = run("cuda_graph")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "a CUDA graph needs a CUDA device, and there is none" in done.stderr


def test_cuda_graph_takes_the_same_steps_eagerly() -> None:
    done = run("cuda_graph", "--no-graph", "--steps", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2", "step 3"]
    assert all(line.endswith("30 gradients, same bits: True") for line in lines)
    first, *_, last = (float(line.split("loss ")[1].split(",")[0]) for line in lines)
    assert last < first
