"""Memory of a Program on one device: inputs bound, everything else allocated and poisoned."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from fused_mhc.errors import InputError
from fused_mhc.scheduler import Buffer, Program

__all__ = ["DTYPES", "allocate", "reduce_partials", "torch_dtype_name"]

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def torch_dtype_name(dtype: torch.dtype) -> str:
    """The name a Program uses for a dtype."""
    return _NAMES[dtype]


def allocate(
    program: Program,
    inputs: Mapping[str, Tensor | None],
    wanted: Collection[str] | None,
    device: torch.device,
    *,
    poison: bool = True,
) -> dict[str, Tensor | None]:
    """A tensor for every buffer, by name.

    Inputs are bound as they are (None: absent, as a gradient nobody has). Outputs that are not ``wanted``
    stay None, and so do partial sums whose result is not wanted. With ``poison`` all that is allocated starts as NaN,
    so that a dependency that is missing shows.

    Raises:
        InputError: an input has another shape or dtype than the Program says, or a name is unknown.
    """
    names = {buffer.name for buffer in program.buffers}
    for name in (*inputs, *(wanted or ())):
        if name not in names:
            raise InputError(f"{name}: expected a buffer of the {program.graph} Program, got this name")
    results = {step.partial: step.result for step in program.epilogue}
    memory: dict[str, Tensor | None] = {}
    for buffer in program.buffers:
        if buffer.role == "input":
            memory[buffer.name] = _bound(buffer, inputs.get(buffer.name))
            continue
        name = results.get(buffer.name, buffer.name)
        if buffer.role != "scratch" and wanted is not None and name not in wanted:
            memory[buffer.name] = None
            continue
        tensor = torch.empty(buffer.shape, dtype=DTYPES[buffer.dtype], device=device)
        memory[buffer.name] = tensor.fill_(float("nan")) if poison else tensor
    return memory


def _bound(buffer: Buffer, value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    if tuple(value.shape) != buffer.shape or value.dtype != DTYPES[buffer.dtype]:
        raise InputError(
            f"{buffer.name}: expected {buffer.dtype} {buffer.shape}, got {value.dtype} {tuple(value.shape)}"
        )
    return value


def reduce_partials(program: Program, memory: dict[str, Tensor | None]) -> None:
    """The epilogue: every result is the sum of its partial sums, added in tile order."""
    for step in program.epilogue:
        partial, result = memory[step.partial], memory[step.result]
        if partial is None or result is None:
            continue
        total = torch.zeros_like(partial[0])
        for part in partial:
            total += part
        result.copy_(total.view(result.shape))
