"""compute-sanitizer finds nothing in a small run of every operation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = """
import torch
from fused_mhc.dispatch import OPERATIONS
from fused_mhc.testing.bits import differing_repeats
from fused_mhc.testing.inputs import Shape
from fused_mhc.testing.verify import forced

with forced("triton"):
    for op in OPERATIONS:
        differing_repeats(op, Shape((19,), 3, 40), torch.device("cuda", 0), 1)
torch.cuda.synchronize()
"""


@pytest.mark.timeout(580)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool: str, tmp_path: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    script = tmp_path / "small.py"
    script.write_text(SMALL)
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=570, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
