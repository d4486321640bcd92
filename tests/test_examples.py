"""Every example runs as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", ["two_pass", "single_pass"])
def test_example_learns(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--steps", "20"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    first, *_, last = (float(line.split(":")[1].split()[0]) for line in done.stdout.splitlines())
    assert last < first - 1
