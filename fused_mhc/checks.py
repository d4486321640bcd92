"""Checks of arguments. Each error names the argument, what was expected and what came.

They run before anything is computed, trace under ``torch.compile`` (plain attribute reads, no data), and are
cheap: an operation pays for a few attribute reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .env import BACKENDS
from .errors import InputError

__all__ = [
    "FLOAT_DTYPES",
    "MAX_STREAMS",
    "check_backend",
    "check_choice",
    "check_count",
    "check_devices",
    "check_positive",
    "check_probability",
    "check_rank",
    "check_shape",
    "check_streams",
    "check_tensor",
    "check_width",
]

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_STREAMS = 16


def check_tensor(name: str, t: Any) -> None:
    """``t`` is a dense tensor of fp16, bf16, fp32 or fp64."""
    if not isinstance(t, Tensor):
        raise InputError(f"{name}: expected a tensor, got {type(t).__name__}")
    if t.layout != torch.strided:
        raise InputError(f"{name}: expected a dense (strided) tensor, got layout {t.layout}")
    if t.dtype not in FLOAT_DTYPES:
        raise InputError(f"{name}: expected dtype float16, bfloat16, float32 or float64, got {t.dtype}")


def check_rank(name: str, t: Any, least: int, layout: str) -> None:
    """``t`` is a tensor as `check_tensor` wants it, with at least ``least`` dimensions (``layout`` says which)."""
    check_tensor(name, t)
    if t.dim() < least:
        raise InputError(f"{name}: expected shape {layout}, got {tuple(t.shape)}")


def check_shape(name: str, t: Any, shape: Sequence[int], layout: str) -> None:
    """``t`` is a tensor as `check_tensor` wants it, of exactly this shape (``layout`` names it in symbols)."""
    check_tensor(name, t)
    if t.shape != torch.Size(shape):
        raise InputError(f"{name}: expected shape {layout} = {tuple(shape)}, got {tuple(t.shape)}")


def check_width(name: str, t: Tensor) -> None:
    """The last dimension of ``t`` (the hidden size) is at least 1."""
    if t.shape[-1] < 1:
        raise InputError(f"{name}: expected a hidden size of at least 1, got shape {tuple(t.shape)}")


def check_devices(first_name: str, first: Tensor, **others: Tensor | None) -> None:
    """Every tensor lies on the device of the first; None is passed over."""
    for name, t in others.items():
        if t is not None and t.device != first.device:
            raise InputError(f"{name}: expected device {first.device} (that of {first_name}), got {t.device}")


def check_streams(name: str, n: Any) -> None:
    """``n`` is an int in 1..16."""
    if isinstance(n, bool) or not isinstance(n, (int, torch.SymInt)):
        raise InputError(f"{name}: expected an int from 1 to {MAX_STREAMS}, got {n!r}")
    if not 1 <= n <= MAX_STREAMS:
        raise InputError(f"{name}: expected 1 to {MAX_STREAMS} streams, got {n}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """``value`` is an int (not a bool) of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise InputError(f"{name}: expected an int of at least {least}, got {value!r}")
    if value < least:
        raise InputError(f"{name}: expected at least {least}, got {value}")


def check_positive(name: str, value: Any) -> None:
    """``value`` is a finite real number above zero."""
    if isinstance(value, bool) or not isinstance(value, (float, int)):
        raise InputError(f"{name}: expected a number above 0, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{name}: expected a finite number above 0, got {value!r}")


def check_probability(name: str, value: Any) -> None:
    """``value`` is a real number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, (float, int)):
        raise InputError(f"{name}: expected a number in [0, 1), got {value!r}")
    if not 0 <= value < 1:
        raise InputError(f"{name}: expected a number in [0, 1), got {value!r}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def check_backend(value: Any) -> None:
    """``value`` names a backend (or ``"auto"``)."""
    if not isinstance(value, str) or value not in BACKENDS:
        raise InputError(f"backend: expected one of {', '.join(BACKENDS)}, got {value!r}")
