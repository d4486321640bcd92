"""The hosts ``dispatch`` takes for ``schedule="mega"``: the arguments of a backend's own host, run as a
Program."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_mhc.errors import BackendError
from fused_mhc.ops._library import compute_dtype
from fused_mhc.ops._native import tokens
from fused_mhc.ops.mega_mhc import native
from fused_mhc.scheduler import lower_mega_mhc
from fused_mhc.scheduler.boundary import MAX_STREAMS

from .buffers import torch_dtype_name
from .cpu import CpuExecutor
from .tiles import Settings

__all__ = ["program_host"]

# The counts the graph is built from: those of the device it was first made for, so that rings and waves are
# realistic; how many threads run it is the executor's business.
_CUBE_WORKERS, _VECTOR_WORKERS = 20, 40
_STATE = (
    "previous_output",
    "residual",
    "previous_pre_mix",
    "previous_post_mix",
    "previous_residual_mix",
)
_SITE = ("phi", "alpha", "bias", "norm_weight")
_SAVED = ("new_residual", "logits", "u", "mixed_rstd", "next_pre_mix", "next_post_mix", "next_residual_mix")
_INCOMING = (
    "g_new_residual",
    "g_next_pre_mix",
    "g_next_post_mix",
    "g_next_residual_mix",
    "g_block_input",
)
_RESULTS = (
    "new_residual",
    "next_pre_mix",
    "next_post_mix",
    "next_residual_mix",
    "block_input",
    "logits",
    "u",
    "mixed_rstd",
)
_TRAILING = {"residual": 2, "new_residual": 2, "previous_residual_mix": 2, "next_residual_mix": 2}


def program_host(op: str, direction: str, backend: str) -> Callable[..., Any]:
    """The host function that runs ``op`` in ``direction`` as a Program.

    Raises:
        BackendError: that backend runs no Programs.
    """
    if backend == "native":
        return _HOSTS[op, direction]
    if backend == "triton" and importlib.util.find_spec("fused_mhc.runtime.gpu_hosts") is not None:
        hosts = importlib.import_module("fused_mhc.runtime.gpu_hosts")
        host: Callable[..., Any] = hosts.program_host(op, direction)
        return host
    why = "its persistent megakernel is not there yet" if backend == "triton" else "it runs no Programs"
    raise BackendError(f"schedule 'mega' cannot run {op} {direction} with backend {backend!r}: {why}")


@functools.lru_cache(maxsize=16)
def _executor(
    direction: str,
    count: int,
    width: int,
    n: int,
    stream: str,
    compute: str,
    dtypes: tuple[tuple[str, str], ...],
) -> CpuExecutor:
    """Proven Programs of the shapes seen last."""
    program = lower_mega_mhc(
        direction,
        count,
        width,
        n,
        num_cube_workers=_CUBE_WORKERS,
        num_vector_workers=_VECTOR_WORKERS,
        stream_dtype=stream,
        compute_dtype=compute,
        dtypes=dict(dtypes),
        has_norm_weight=any(name == "norm_weight" for name, _ in dtypes),
    )
    return CpuExecutor(program)


def _flat(name: str, tensor: Tensor | None) -> Tensor | None:
    """The tensor as its buffer: leading dimensions flattened, the single column of a per-token scalar
    dropped."""
    if tensor is None or name in _SITE:
        return tensor
    if name in ("u", "mixed_rstd"):
        return tokens(tensor, 1).squeeze(1)
    return tokens(tensor, _TRAILING.get(name.removeprefix("g_"), 1))


def _check(tensor: Tensor, n: int) -> None:
    if tensor.device.type != "cpu":
        raise BackendError(f"schedule 'mega' with backend 'native' runs on CPU tensors, got {tensor.device}")
    if n > MAX_STREAMS:
        raise BackendError(f"schedule 'mega' runs with at most {MAX_STREAMS} streams, got {n}")


def _run(
    direction: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    stream: torch.dtype,
    inputs: dict[str, Tensor | None],
    outputs: dict[str, torch.dtype],
    settings: Sequence[Any],
) -> dict[str, Tensor]:
    """Run one direction; ``shape`` is (T, C, n), ``outputs`` are wanted, in these dtypes."""
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    dtypes = {name: tensor.dtype for name, tensor in given.items()} | outputs
    named = tuple(sorted((name, torch_dtype_name(kind)) for name, kind in dtypes.items()))
    executor = _executor(direction, *shape, torch_dtype_name(stream), torch_dtype_name(dtype), named)
    return executor.run(given, settings=Settings(*settings), wanted=outputs.keys())


def _forward(
    inputs: dict[str, Tensor | None], lead: Sequence[int], dtype: torch.dtype, settings: Sequence[Any]
) -> tuple[Tensor, ...]:
    residual = inputs["residual"]
    assert residual is not None
    count, n, width = residual.shape
    outputs = dict.fromkeys(_RESULTS, dtype) | dict.fromkeys(("new_residual", "block_input"), residual.dtype)
    made = _run("forward", (count, width, n), dtype, residual.dtype, inputs, outputs, settings)
    values = [made[name].unsqueeze(1) if made[name].dim() == 1 else made[name] for name in _RESULTS]
    return tuple(value.view(*lead, *value.shape[1:]) for value in values)


def _mega_mhc_fwd(*args: Any) -> tuple[Tensor, ...]:
    residual = args[1]
    if residual.numel() == 0:
        return native.mega_mhc_fwd(*args)
    _check(residual, residual.shape[-2])
    names = (*_STATE, *_SITE)
    inputs = {name: _flat(name, tensor) for name, tensor in zip(names, args, strict=False)}
    return _forward(inputs, residual.shape[:-2], compute_dtype(*args[:9]), args[9:])


def _mega_mhc_entry_fwd(x: Tensor, n: int, *args: Any) -> tuple[Tensor, ...]:
    if x.numel() == 0:
        return native.mega_mhc_entry_fwd(x, n, *args)
    _check(x, n)
    inputs: dict[str, Tensor | None] = dict(zip(_SITE, args, strict=False))
    inputs["residual"] = tokens(x, 1).unsqueeze(1).expand(-1, n, -1)
    return _forward(inputs, x.shape[:-1], compute_dtype(x, *args[:4]), args[4:])


def _backward(
    inputs: dict[str, Tensor | None],
    targets: dict[str, Tensor | None],
    needs: Sequence[bool],
    dtype: torch.dtype,
    settings: Sequence[Any],
) -> list[Tensor]:
    """The needed gradients of ``targets``, in their shapes and dtypes."""
    new_residual = inputs["new_residual"]
    assert new_residual is not None
    count, n, width = new_residual.shape
    wanted = {
        f"g_{name}": t
        for (name, t), need in zip(targets.items(), needs, strict=True)
        if need and t is not None
    }
    outputs = {name: t.dtype for name, t in wanted.items()}
    made = _run("backward", (count, width, n), dtype, new_residual.dtype, inputs, outputs, settings)
    return [made[name].view(t.shape) for name, t in wanted.items()]


def _mega_mhc_bwd(*args: Any) -> list[Tensor]:
    values = args[5:14]
    if values[1].numel() == 0:
        return native.mega_mhc_bwd(*args)
    _check(values[1], values[1].shape[-2])
    names = (*_INCOMING, *_STATE, *_SITE, *_SAVED)
    inputs = {name: _flat(name, tensor) for name, tensor in zip(names, args, strict=False)}
    targets = dict(zip((*_STATE, *_SITE), values, strict=True))
    return _backward(inputs, targets, args[-1], compute_dtype(*values), args[21:24])


def _mega_mhc_entry_bwd(*args: Any) -> list[Tensor]:
    x, site = args[5], args[6:10]
    if x.numel() == 0:
        return native.mega_mhc_entry_bwd(*args)
    _check(x, args[10].shape[-2])
    names = (*_INCOMING, "previous_output", *_SITE, *_SAVED)
    inputs = {name: _flat(name, tensor) for name, tensor in zip(names, args, strict=False)}
    # The gradient of x leaves as that of the "output before": see the last stage's tile body.
    del inputs["previous_output"]
    targets = {"previous_output": x, **dict(zip(_SITE, site, strict=True))}
    return _backward(inputs, targets, args[-1], compute_dtype(x, *site), args[17:20])


_HOSTS: dict[tuple[str, str], Callable[..., Any]] = {
    ("mega_mhc", "fwd"): _mega_mhc_fwd,
    ("mega_mhc", "bwd"): _mega_mhc_bwd,
    ("mega_mhc_entry", "fwd"): _mega_mhc_entry_fwd,
    ("mega_mhc_entry", "bwd"): _mega_mhc_entry_bwd,
}
