"""What the modules share: checks of constructor arguments, and where the mixes start."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..checks import FLOAT_DTYPES, check_count, check_streams
from ..errors import InputError

#: Logit of a matrix entry off the diagonal at the start; on it 0. Soft enough for its gradient not to vanish.
OFF_DIAGONAL = -4.0


def check_sizes(hidden_size: Any, num_streams: Any, dtype: Any, alpha_init: Any = 0.0) -> None:
    """Constructor arguments that every module has.

    Raises:
        InputError: one is not as the modules' docstrings say.
    """
    check_count("hidden_size", hidden_size)
    check_streams("num_streams", num_streams)
    if dtype not in FLOAT_DTYPES:
        raise InputError(f"dtype: expected float32, bfloat16, float16 or float64, got {dtype!r}")
    if (
        isinstance(alpha_init, bool)
        or not isinstance(alpha_init, (int, float))
        or not math.isfinite(alpha_init)
    ):
        raise InputError(f"alpha_init: expected a finite number, got {alpha_init!r}")


def mark_sequence_parallel(module: torch.nn.Module) -> None:
    """Set ``sequence_parallel = True`` on every parameter: under sequence parallelism each rank sees a part of the
    tokens, so these gradients must be summed over the group (Megatron-Core reads this attribute)."""
    for parameter in module.parameters(recurse=False):
        parameter.sequence_parallel = True  # type: ignore[attr-defined]


@torch.no_grad()
def init_projection(weight: Tensor) -> None:
    """Normal with deviation ``K**-0.5``: the projection of a normalised token then has unit variance."""
    weight.normal_(0.0, weight.shape[1] ** -0.5)


@torch.no_grad()
def init_bias(bias: Tensor, n: int) -> None:
    """Start near the plain residual network: pre-mixes 1/n (one stream: 1/2), post-mixes 1, mixing near identity."""
    bias[:n] = -math.log(max(n - 1, 1))
    bias[n : 2 * n] = 0.0
    bias[2 * n :] = OFF_DIAGONAL
    bias[2 * n :: n + 1] = 0.0
