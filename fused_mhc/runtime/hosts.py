"""The hosts ``dispatch`` takes for ``schedule="mega"``: the arguments of a backend's own host, run as a
Program."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

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

__all__ = ["HOSTS", "Runner", "Shape", "program_host"]

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


class Shape(NamedTuple):
    """What decides a Program: sizes, and the names of the dtypes of streams, of what is computed and of single buffers;
    the device; and whether it is the first site of a chain."""

    token_count: int
    width: int
    n: int
    stream: str
    compute: str
    dtypes: tuple[tuple[str, str], ...]
    device: torch.device
    entry: bool

    @property
    def has_norm_weight(self) -> bool:
        """Whether the RMSNorm has a weight."""
        return any(name == "norm_weight" for name, _ in self.dtypes)


class _Executor(Protocol):
    def run(
        self,
        inputs: Mapping[str, Tensor | None],
        *,
        settings: Settings | None = None,
        wanted: Collection[str] | None = None,
    ) -> dict[str, Tensor]: ...


class Runner(NamedTuple):
    """Who runs Programs: the backend's name, the type of its devices, and its executor for a direction and a shape."""

    backend: str
    device_type: str
    executor: Callable[[str, Shape], _Executor]


def program_host(op: str, direction: str, backend: str) -> Callable[..., Any]:
    """The host function that runs ``op`` in ``direction`` as a Program.

    Raises:
        BackendError: that backend runs no Programs.
    """
    if backend == "native":
        return functools.partial(HOSTS[op, direction], _CPU)
    if backend == "triton":
        hosts = importlib.import_module("fused_mhc.runtime.gpu_hosts")
        host: Callable[..., Any] = hosts.program_host(op, direction)
        return host
    raise BackendError(
        f"schedule 'mega' cannot run {op} {direction} with backend {backend!r}: it runs no Programs"
    )


@functools.lru_cache(maxsize=16)
def _cpu_executor(direction: str, shape: Shape) -> CpuExecutor:
    """Proven Programs of the shapes seen last."""
    program = lower_mega_mhc(
        direction,
        shape.token_count,
        shape.width,
        shape.n,
        num_cube_workers=_CUBE_WORKERS,
        num_vector_workers=_VECTOR_WORKERS,
        stream_dtype=shape.stream,
        compute_dtype=shape.compute,
        dtypes=dict(shape.dtypes),
        has_norm_weight=shape.has_norm_weight,
    )
    return CpuExecutor(program)


_CPU = Runner("native", "cpu", _cpu_executor)


def _flat(name: str, tensor: Tensor | None) -> Tensor | None:
    """The tensor as its buffer: leading dimensions flattened, the single column of a per-token scalar
    dropped."""
    if tensor is None or name in _SITE:
        return tensor
    if name in ("u", "mixed_rstd"):
        return tokens(tensor, 1).squeeze(1)
    return tokens(tensor, _TRAILING.get(name.removeprefix("g_"), 1))


def _check(runner: Runner, tensor: Tensor, n: int) -> None:
    if tensor.device.type != runner.device_type:
        raise BackendError(
            f"schedule 'mega' with backend {runner.backend!r} runs on {runner.device_type.upper()} tensors, "
            f"got {tensor.device}"
        )
    if n > MAX_STREAMS:
        raise BackendError(f"schedule 'mega' runs with at most {MAX_STREAMS} streams, got {n}")


def _run(
    runner: Runner,
    direction: str,
    like: Tensor,
    dtype: torch.dtype,
    inputs: dict[str, Tensor | None],
    outputs: dict[str, torch.dtype],
    settings: Sequence[Any],
) -> dict[str, Tensor]:
    """Run one direction; ``like``: streams ``[T, n, C]``; ``outputs`` are wanted, in these dtypes."""
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    dtypes = {name: tensor.dtype for name, tensor in given.items()} | outputs
    named = tuple(sorted((name, torch_dtype_name(kind)) for name, kind in dtypes.items()))
    count, n, width = like.shape
    shape = Shape(
        count,
        width,
        n,
        torch_dtype_name(like.dtype),
        torch_dtype_name(dtype),
        named,
        like.device,
        "previous_residual_mix" not in given,
    )
    executor = runner.executor(direction, shape)
    return executor.run(given, settings=Settings(*settings), wanted=outputs.keys())


def _forward(
    runner: Runner,
    inputs: dict[str, Tensor | None],
    lead: Sequence[int],
    dtype: torch.dtype,
    settings: Sequence[Any],
) -> tuple[Tensor, ...]:
    residual = inputs["residual"]
    assert residual is not None
    outputs = dict.fromkeys(_RESULTS, dtype) | dict.fromkeys(("new_residual", "block_input"), residual.dtype)
    made = _run(runner, "forward", residual, dtype, inputs, outputs, settings)
    values = [made[name].unsqueeze(1) if made[name].dim() == 1 else made[name] for name in _RESULTS]
    return tuple(value.view(*lead, *value.shape[1:]) for value in values)


def _mega_mhc_fwd(runner: Runner, *args: Any) -> tuple[Tensor, ...]:
    residual = args[1]
    if residual.numel() == 0:
        return native.mega_mhc_fwd(*args)
    _check(runner, residual, residual.shape[-2])
    names = (*_STATE, *_SITE)
    inputs = {name: _flat(name, tensor) for name, tensor in zip(names, args, strict=False)}
    return _forward(runner, inputs, residual.shape[:-2], compute_dtype(*args[:9]), args[9:])


def _mega_mhc_entry_fwd(runner: Runner, x: Tensor, n: int, *args: Any) -> tuple[Tensor, ...]:
    if x.numel() == 0:
        return native.mega_mhc_entry_fwd(x, n, *args)
    _check(runner, x, n)
    inputs: dict[str, Tensor | None] = dict(zip(_SITE, args, strict=False))
    inputs["residual"] = tokens(x, 1).unsqueeze(1).expand(-1, n, -1)
    return _forward(runner, inputs, x.shape[:-1], compute_dtype(x, *args[:4]), args[4:])


def _backward(
    runner: Runner,
    inputs: dict[str, Tensor | None],
    targets: dict[str, Tensor | None],
    needs: Sequence[bool],
    dtype: torch.dtype,
    settings: Sequence[Any],
) -> list[Tensor]:
    """The needed gradients of ``targets``, in their shapes and dtypes."""
    new_residual = inputs["new_residual"]
    assert new_residual is not None
    wanted = {
        f"g_{name}": t
        for (name, t), need in zip(targets.items(), needs, strict=True)
        if need and t is not None
    }
    outputs = {name: t.dtype for name, t in wanted.items()}
    made = _run(runner, "backward", new_residual, dtype, inputs, outputs, settings)
    return [made[name].view(t.shape) for name, t in wanted.items()]


def _mega_mhc_bwd(runner: Runner, *args: Any) -> list[Tensor]:
    values = args[5:14]
    if values[1].numel() == 0:
        return native.mega_mhc_bwd(*args)
    _check(runner, values[1], values[1].shape[-2])
    names = (*_INCOMING, *_STATE, *_SITE, *_SAVED)
    inputs = {name: _flat(name, tensor) for name, tensor in zip(names, args, strict=False)}
    targets = dict(zip((*_STATE, *_SITE), values, strict=True))
    return _backward(runner, inputs, targets, args[-1], compute_dtype(*values), args[21:24])


def _mega_mhc_entry_bwd(runner: Runner, *args: Any) -> list[Tensor]:
    x, site = args[5], args[6:10]
    if x.numel() == 0:
        return native.mega_mhc_entry_bwd(*args)
    _check(runner, x, args[10].shape[-2])
    names = (*_INCOMING, "previous_output", *_SITE, *_SAVED)
    inputs = {name: _flat(name, tensor) for name, tensor in zip(names, args, strict=False)}
    # The gradient of x leaves as that of the "output before": see the last stage's tile body.
    del inputs["previous_output"]
    targets = {"previous_output": x, **dict(zip(_SITE, site, strict=True))}
    return _backward(runner, inputs, targets, args[-1], compute_dtype(x, *site), args[17:20])


#: Host functions of every backend; the first argument is who runs the Program.
HOSTS: dict[tuple[str, str], Callable[..., Any]] = {
    ("mega_mhc", "fwd"): _mega_mhc_fwd,
    ("mega_mhc", "bwd"): _mega_mhc_bwd,
    ("mega_mhc_entry", "fwd"): _mega_mhc_entry_fwd,
    ("mega_mhc_entry", "bwd"): _mega_mhc_entry_bwd,
}
