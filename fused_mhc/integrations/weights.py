"""Parameters of the mapping between the formats of four libraries.

One mapping has a projection of the flattened streams to ``N = n*n + 2*n`` columns (pre, post, residual), three
scales and a bias. The libraries agree on the numbers and differ in names, shapes and the orientation of the residual
part:

| format | projection | scales | bias | residual part |
|---|---|---|---|---|
| ``"fused_mhc"`` | ``weight [N, K]`` | ``alpha_pre, alpha_post, alpha_res [1]`` | ``bias [N]`` | (old, new) |
| ``"deepseek_v4"`` | ``fn [N, K]`` | ``scale [3]`` | ``base [N]`` | (old, new) |
| ``"megatron"`` | ``mapping_proj.weight [N, K]`` | ``alpha_pre, alpha_post, alpha_res [1]`` | ``bias [N]`` | (old, new) |
| ``"liger"`` | ``phi [K, N]`` | ``alpha_pre, alpha_post, alpha_res []`` | ``b [N]`` | (new, old) |

A conversion moves numbers and rounds none: there and back gives equal bits. The functions that the libraries compute
with them differ in what no weight can carry: Megatron adds eps outside the square root (``rms_eps_mode="outside"``),
and Liger normalises the transposed matrix, so with finitely many iterations its rows play the part of our columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_choice, check_shape
from ..errors import InputError

__all__ = ["FORMATS", "convert_mapping", "convert_state_dict"]


class _Format(NamedTuple):
    """Names in the order projection, scales, bias; ``marks``: names that together give the format away; whether the
    projection is ``[K, N]``; whether the residual part is (new, old); the shape of one scale."""

    projection: str
    scales: tuple[str, ...]
    bias: str
    marks: tuple[str, ...]
    columns_last: bool = False
    new_old: bool = False
    scale_shape: tuple[int, ...] = (1,)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.projection, *self.scales, self.bias)


_ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")
_FORMATS = {
    "fused_mhc": _Format("weight", _ALPHAS, "bias", ("weight", "alpha_pre")),
    "deepseek_v4": _Format("fn", ("scale",), "base", ("fn", "scale", "base"), scale_shape=(3,)),
    "megatron": _Format("mapping_proj.weight", _ALPHAS, "bias", ("mapping_proj.weight", "alpha_pre")),
    "liger": _Format("phi", _ALPHAS, "b", ("phi", "alpha_pre"), True, True, ()),
}
#: Names of the formats.
FORMATS = tuple(_FORMATS)


def _streams(rows: int) -> int:
    """n from ``N = n*n + 2*n``.

    Raises:
        InputError: N is not of that form with n in 1..16.
    """
    n = next((n for n in range(1, 17) if n * n + 2 * n == rows), None)
    if n is None:
        raise InputError(f"projection: expected n*n + 2*n columns with n from 1 to 16, got {rows}")
    return n


def _turn(rows: Tensor, n: int) -> Tensor:
    """Transpose the residual part of ``[N, ...]``: (old, new) to (new, old) or back."""
    residual = rows[2 * n :].unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1)
    return torch.cat([rows[: 2 * n], residual])


def _check(state: Mapping[str, Tensor], form: _Format, where: str) -> int:
    """Names and shapes of one mapping; returns n."""
    missing = [name for name in form.names if name not in state]
    if missing:
        raise InputError(
            f"{where}: expected parameters {', '.join(form.names)}, got none named {', '.join(missing)}"
        )
    projection = state[form.projection]
    if projection.dim() != 2:
        raise InputError(
            f"{where}{form.projection}: expected two dimensions, got shape {tuple(projection.shape)}"
        )
    rows, width = projection.shape[::-1] if form.columns_last else projection.shape
    n = _streams(rows)
    if width % n != 0 or width == 0:
        raise InputError(f"{where}{form.projection}: expected a width K divisible by n = {n}, got {width}")
    for name in form.scales:
        check_shape(where + name, state[name], form.scale_shape, str(list(form.scale_shape)))
    check_shape(where + form.bias, state[form.bias], (rows,), "[N]")
    return n


def _convert(state: Mapping[str, Tensor], source: _Format, target: _Format, where: str) -> dict[str, Tensor]:
    n = _check(state, source, where)
    projection, bias = state[source.projection], state[source.bias]
    if source.columns_last:
        projection = projection.t()
    if source.new_old != target.new_old:
        projection, bias = _turn(projection, n), _turn(bias, n)
    if target.columns_last:
        projection = projection.t()
    scales = torch.cat([state[name].reshape(-1) for name in source.scales])
    parts = scales.split(scales.numel() // len(target.scales))
    values = (projection, *(part.reshape(target.scale_shape) for part in parts), bias)
    return {
        name: value.clone(memory_format=torch.contiguous_format)
        for name, value in zip(target.names, values, strict=True)
    }


def convert_mapping(state: Mapping[str, Tensor], source: str, target: str) -> dict[str, Tensor]:
    """One mapping's parameters from one format to another: values are moved, never rounded.

    Args:
        state: parameter name -> tensor, with the names and shapes of ``source``; any dtype and device.
        source, target: one of `FORMATS`.

    Returns:
        Name -> tensor in the format ``target``; new tensors, dtypes and devices as they were.

    Raises:
        InputError: a format is unknown, a parameter is missing or has another shape.
    """
    check_choice("source", source, FORMATS)
    check_choice("target", target, FORMATS)
    return _convert(state, _FORMATS[source], _FORMATS[target], "")


def _prefixes(names: Iterable[str], marks: tuple[str, ...]) -> list[str]:
    """The prefixes (with their dot) under which every one of ``marks`` lies, in the order of ``names``."""
    known = set(names)
    found = (
        name.removesuffix(marks[-1]) for name in names if name == marks[-1] or name.endswith("." + marks[-1])
    )
    return [prefix for prefix in found if all(prefix + mark in known for mark in marks)]


def convert_state_dict(
    state_dict: Mapping[str, Tensor],
    source: str,
    target: str,
    rename: Callable[[str], str] | None = None,
) -> dict[str, Tensor]:
    """Every mapping of a model's state dict from one format to another; all else is handed on as it is.

    A mapping is found by its names under one prefix (``layers.0.attn_hc.fn``, ``.scale`` and ``.base``).

    Args:
        state_dict: name -> tensor of a whole model.
        source, target: one of `FORMATS`.
        rename: from the prefix of a mapping (without its dot) to its new one; default: unchanged.

    Returns:
        A new dict in the order of ``state_dict``; tensors outside mappings are the same objects.

    Raises:
        InputError: a format is unknown, no mapping is found, one lacks a parameter or has another shape, or two
            parameters would have one name.
    """
    check_choice("source", source, FORMATS)
    check_choice("target", target, FORMATS)
    before, after = _FORMATS[source], _FORMATS[target]
    prefixes = _prefixes(state_dict, before.marks)
    if not prefixes:
        raise InputError(
            f"state_dict: expected at least one mapping in the format {source!r} "
            f"(parameters {', '.join(before.names)} under one prefix), got none"
        )
    converted: dict[str, dict[str, Tensor]] = {}
    for prefix in prefixes:
        own = {name: state_dict[prefix + name] for name in before.names if prefix + name in state_dict}
        new = _convert(own, before, after, prefix)
        stem = prefix.removesuffix(".")
        renamed = stem if rename is None else rename(stem)
        converted[prefix] = {f"{renamed}.{name}" if renamed else name: value for name, value in new.items()}
    home = {prefix + name: prefix for prefix in prefixes for name in before.names}
    result: dict[str, Tensor] = {}
    for name, value in state_dict.items():
        items = converted.pop(home[name], {}) if name in home else {name: value}
        for key, tensor in items.items():
            if key in result:
                raise InputError(f"rename: expected new names that differ from all others, got {key} twice")
            result[key] = tensor
    return result
