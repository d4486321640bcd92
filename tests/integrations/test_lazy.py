"""Importing the package of integrations loads no framework, and each of its modules only its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "code",
    [
        "import fused_mhc.integrations as i; assert 'torch' not in sys.modules; assert i.weights.FORMATS",
        "import fused_mhc.integrations.transformers, fused_mhc.integrations.megatron",
        "import fused_mhc.integrations.distributed, fused_mhc.integrations.weights",
    ],
)
def test_no_framework_is_imported(code: str) -> None:
    check = "assert not {'transformers', 'megatron', 'accelerate', 'cuda'} & set(sys.modules), 'loaded'"
    subprocess.run([sys.executable, "-c", f"import sys; {code}; {check}"], check=True, cwd=ROOT, timeout=60)


def test_unknown_name() -> None:
    import fused_mhc.integrations

    with pytest.raises(AttributeError, match="liger"):
        _ = fused_mhc.integrations.liger
    assert "megatron" in dir(fused_mhc.integrations)
