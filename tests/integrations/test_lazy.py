"""Importing the package of integrations loads no framework, and each of its modules only its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[2]


def test_no_framework_is_imported() -> None:
    code = """
        import sys
        import fused_mhc.integrations as integrations
        assert 'torch' not in sys.modules
        for name in integrations.__all__:
            getattr(integrations, name)
        assert not {'transformers', 'megatron', 'accelerate', 'cuda.tile'} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", dedent(code)], check=True, cwd=ROOT, timeout=60)


def test_unknown_name() -> None:
    import fused_mhc.integrations

    with pytest.raises(AttributeError, match="liger"):
        _ = fused_mhc.integrations.liger
    assert "megatron" in dir(fused_mhc.integrations)
