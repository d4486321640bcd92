"""Seeded inputs for every operation, and the table that says what each operation takes, returns and can do.

Data is drawn on the CPU, so that a seed gives the same numbers on every device.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..dispatch import OPERATIONS
from . import transcription

__all__ = ["CATALOGUE", "Mode", "Operation", "Shape", "make_cotangents", "make_tensors", "mixes_dtype"]

Tensors = dict[str, "Tensor | None"]


@dataclass(frozen=True)
class Shape:
    """Leading dimensions, number of streams and hidden size of one stream."""

    lead: tuple[int, ...]
    n: int
    hidden_size: int

    @property
    def tokens(self) -> int:
        return math.prod(self.lead)

    @property
    def width(self) -> int:
        """``K = n*C``."""
        return self.n * self.hidden_size

    @property
    def logits(self) -> int:
        """``N = n*n + 2*n``."""
        return self.n * self.n + 2 * self.n

    def __str__(self) -> str:
        lead = ",".join(map(str, self.lead))
        return f"T=({lead}) n={self.n} C={self.hidden_size}"


@dataclass(frozen=True)
class Mode:
    """One way to call an operation: keyword options, and the optional tensors that are left out (None)."""

    label: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operation:
    """What the tests know of an operation.

    Attributes:
        name: its key in `dispatch.OPERATIONS`.
        public: its name in ``fused_mhc`` (and in `transcription`).
        results: names of what it returns.
        shared: tensor arguments that all tokens share, with the number of dimensions of each.
        modes: the ways to call it.
        linear: every result is linear in each tensor argument, so the same sums over absolute values bound the error.
        has_backend: it takes a ``backend`` argument.
    """

    name: str
    public: str
    results: tuple[str, ...]
    shared: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = (Mode(),)
    linear: bool = False
    has_backend: bool = True

    @property
    def normalises(self) -> bool:
        """A reciprocal rms lies in its path."""
        return not self.linear and self.name != "sinkhorn"

    @property
    def function(self) -> Callable[..., Any]:
        """The public function."""
        function: Callable[..., Any] = getattr(importlib.import_module("fused_mhc"), self.public)
        return function

    @property
    def reference(self) -> Callable[..., Any]:
        """Its transcription."""
        reference: Callable[..., Any] = getattr(transcription, self.public)
        return reference

    def options(self, mode: Mode, shape: Shape) -> dict[str, Any]:
        """The arguments that are no tensors."""
        takes_n = self.name in ("proj_rms_compute_h", "input_expand", "mega_mhc_entry")
        return {**mode.options, **({"n": shape.n} if takes_n else {})}


_SINKHORN_MODES = (
    Mode("softmax", {"num_iterations": 20}),
    Mode("softmax, 1 iteration, eps 1e-2", {"num_iterations": 1, "eps": 1e-2}),
    Mode("paper", {"num_iterations": 20, "variant": "paper"}),
    # Sums below such an eps are common: the clamp acts.
    Mode("paper, 2 iterations, eps 0.8", {"num_iterations": 2, "eps": 0.8, "variant": "paper"}),
)
_MAPPING = ("weight", "alpha_pre", "alpha_post", "alpha_res", "bias")
_SITE = ("phi", "alpha", "bias", "norm_weight")
_SITE_RESULTS = ("new_residual", "next_pre_mix", "next_post_mix", "next_residual_mix", "block_input")
_SITE_MODES = (
    Mode(),
    Mode(
        "no norm weight, 3 iterations, eps 1e-3",
        {"num_iters": 3, "hc_eps": 1e-3, "norm_eps": 1e-3},
        ("norm_weight",),
    ),
)

CATALOGUE: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("sinkhorn", "fused_sinkhorn", ("h_res",), modes=_SINKHORN_MODES),
        Operation("h_aggregate", "fused_h_aggregate", ("layer_input",), linear=True),
        Operation(
            "h_post_bda",
            "fused_h_post_bda",
            ("out",),
            shared=("bias",),
            modes=(
                Mode(),
                Mode("no bias", absent=("bias",)),
                Mode("dropout", {"dropout_p": 0.3, "seed": 1 << 40 | 7}),
            ),
            linear=True,
        ),
        Operation(
            "proj_rms_compute_h",
            "fused_proj_rms_compute_h",
            ("h_pre", "h_post", "h_res", "r"),
            shared=_MAPPING,
            modes=(Mode("outside"), Mode("inside, eps 1e-2", {"rms_eps_mode": "inside", "eps": 1e-2})),
        ),
        Operation("fused_add_3", "fused_add_3", ("out",), linear=True, has_backend=False),
        Operation("input_expand", "input_expand", ("out",), linear=True, has_backend=False),
        Operation("output_contract", "output_contract", ("out",), linear=True, has_backend=False),
        Operation(
            "learned_output_contract", "learned_output_contract", ("out",), shared=("weight", "scale", "base")
        ),
        Operation(
            "mhc_pre",
            "mhc_pre",
            ("layer_input", "h_post", "h_res", "x"),
            shared=_MAPPING,
            modes=(
                Mode("inside, softmax"),
                Mode("outside, paper", {"rms_eps_mode": "outside", "variant": "paper", "num_iterations": 3}),
            ),
        ),
        Operation("mega_mhc", "mega_mhc", _SITE_RESULTS, shared=_SITE, modes=_SITE_MODES),
        Operation("mega_mhc_entry", "mega_mhc_entry", _SITE_RESULTS, shared=_SITE, modes=_SITE_MODES),
        Operation(
            "mega_mhc_exit",
            "mega_mhc_exit",
            ("out",),
            shared=("norm_weight",),
            modes=(Mode(), Mode("no norm weight", absent=("norm_weight",))),
        ),
    )
}
assert list(CATALOGUE) == list(OPERATIONS), "every operation is in the catalogue"


def mixes_dtype(dtype: torch.dtype) -> torch.dtype:
    """The usual dtype of mixes and parameters beside streams of ``dtype``: fp64 beside fp64, else fp32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class _Draw:
    """Random tensors from one seed."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale + mean
        return drawn.to(dtype).to(self.device)

    def gates(self, *shape: int, dtype: torch.dtype, top: float) -> Tensor:
        """Numbers in (0, top), as the mappings are."""
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return (top * torch.sigmoid(drawn)).to(dtype).to(self.device)

    def mixing(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Matrices with rows that sum to 1 and no symmetry: a transposition shows."""
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return torch.softmax(2.0 * drawn, -1).to(dtype).to(self.device)


def make_tensors(
    op: str,
    shape: Shape,
    dtype: torch.dtype,
    *,
    mixes: torch.dtype | None = None,
    mode: Mode | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Tensors:
    """The tensor arguments of operation ``op``, by name and in order.

    Args:
        op: a key of `CATALOGUE`.
        shape: the sizes.
        dtype: of everything as wide as a stream.
        mixes: of mappings and parameters; default `mixes_dtype` of ``dtype``.
        mode: says which optional tensors are None; default: none is.
        device: where they go.
        seed: equal seeds, equal numbers.
    """
    draw = _Draw(seed, device)
    small = mixes_dtype(dtype) if mixes is None else mixes
    lead, n, width = shape.lead, shape.n, shape.hidden_size
    projection = 1.0 / math.sqrt(max(shape.width, 1))  # logits of about unit size

    def streams() -> Tensor:
        return draw.normal(*lead, n, width, dtype=dtype)

    def one_stream() -> Tensor:
        return draw.normal(*lead, width, dtype=dtype)

    def mapping() -> Tensors:
        return {
            "weight": draw.normal(shape.logits, shape.width, dtype=small, scale=projection),
            "alpha_pre": draw.normal(1, dtype=small, scale=0.1, mean=0.7),
            "alpha_post": draw.normal(1, dtype=small, scale=0.1, mean=1.1),
            "alpha_res": draw.normal(1, dtype=small, scale=0.1, mean=0.9),
            "bias": draw.normal(shape.logits, dtype=small, scale=0.5),
        }

    def mixes_before() -> Tensors:
        return {
            "previous_pre_mix": draw.gates(*lead, n, dtype=small, top=1.0),
            "previous_post_mix": draw.gates(*lead, n, dtype=small, top=2.0),
            "previous_residual_mix": draw.mixing(*lead, n, n, dtype=small),
        }

    def site() -> Tensors:
        return {
            "phi": draw.normal(shape.logits, shape.width, dtype=small, scale=projection),
            "alpha": draw.normal(3, dtype=small, scale=0.1, mean=0.9),
            "bias": draw.normal(shape.logits, dtype=small, scale=0.5),
            "norm_weight": draw.normal(width, dtype=small, scale=0.2, mean=1.0),
        }

    makers: dict[str, Callable[[], Tensors]] = {
        "sinkhorn": lambda: {"input_logits": draw.normal(*lead, n, n, dtype=dtype)},
        "h_aggregate": lambda: {"x": streams(), "h_pre": draw.gates(*lead, n, dtype=small, top=1.0)},
        "h_post_bda": lambda: {
            "h_res": draw.mixing(*lead, n, n, dtype=small),
            "original_residual": streams(),
            "h_post": draw.gates(*lead, n, dtype=small, top=2.0),
            "x": one_stream(),
            "bias": draw.normal(width, dtype=dtype, scale=0.5),
        },
        "proj_rms_compute_h": lambda: {"x": streams().flatten(-2), **mapping()},
        "fused_add_3": lambda: {"a": streams(), "b": streams(), "c": streams()},
        "input_expand": lambda: {"x": one_stream()},
        "output_contract": lambda: {"x": streams()},
        "learned_output_contract": lambda: {
            "x": streams(),
            "weight": draw.normal(n, shape.width, dtype=small, scale=projection),
            "scale": draw.normal(1, dtype=small, scale=0.1, mean=0.8),
            "base": draw.normal(n, dtype=small, scale=0.5),
        },
        "mhc_pre": lambda: {"x": streams(), **mapping()},
        "mega_mhc": lambda: {
            "previous_output": one_stream(),
            "residual": streams(),
            **mixes_before(),
            **site(),
        },
        "mega_mhc_entry": lambda: {"x": one_stream(), **site()},
        "mega_mhc_exit": lambda: {
            "previous_output": one_stream(),
            "residual": streams(),
            **mixes_before(),
            "norm_weight": draw.normal(width, dtype=small, scale=0.2, mean=1.0),
        },
    }
    tensors = makers[op]()
    return {name: None if mode is not None and name in mode.absent else t for name, t in tensors.items()}


def make_cotangents(results: Mapping[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """A random gradient for every result, in its dtype and on its device."""
    draw = _Draw(seed, "cpu")
    return {name: draw.normal(*t.shape, dtype=t.dtype).to(t.device) for name, t in results.items()}
