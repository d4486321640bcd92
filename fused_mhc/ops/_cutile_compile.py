"""Every cuTile kernel, compiled without a GPU: the hosts run on small CPU tensors, and what they would launch is
compiled for the architectures asked for, with the signature that a launch has."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import compilation
from torch import Tensor

from .. import cutile
from ..dispatch import OPERATIONS
from . import _cutile_common as common

__all__ = ["Launch", "Shape", "collect", "cubin"]

_DTYPES = {
    torch.bfloat16: ct.bfloat16,
    torch.float16: ct.float16,
    torch.float32: ct.float32,
    torch.int64: ct.int64,
}


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for: streams, hidden size of one, dtype of the activations (parameters are fp32)."""

    n: int = 4
    width: int = 4096
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Launch:
    """A kernel as one host launches it.

    Attributes:
        op: the folder of the operation.
        kernel: the kernel's name, with the way of calling in brackets where there are several.
        function: the kernel.
        signature: what it is compiled for.
        key: equal for launches that compile to the same.
        label: the way of calling.
    """

    op: str
    kernel: str
    function: Any = field(compare=False)
    signature: Any = field(compare=False)
    key: tuple[Any, ...]
    label: str = ""


def _array(t: Tensor | common.Whole) -> compilation.ArrayConstraint:
    """A tensor as `Launcher` hands it over: an aligned address with one element; or whole, with what a launch finds
    out about its shape and strides."""
    whole = t.tensor if isinstance(t, common.Whole) else t.as_strided((1,), (1,))
    vector = 16 // whole.element_size()
    return compilation.ArrayConstraint(
        _DTYPES[whole.dtype],
        whole.dim(),
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=[1 if stride == 1 else None for stride in whole.stride()],
        shape_constant=[1 if size == 1 else None for size in whole.shape],
        stride_divisible_by=[vector if stride % vector == 0 else 1 for stride in whole.stride()],
        shape_divisible_by=[16 if size % 16 == 0 else 1 for size in whole.shape],
        base_addr_divisible_by=16,
    )


def signature(
    arrays: Sequence[Any], numbers: Sequence[type], constants: Sequence[Any]
) -> compilation.KernelSignature:
    """The signature of a launch with these arrays and numbers of these types."""
    scalars = [compilation.ScalarConstraint(ct.float32 if kind is float else ct.int64) for kind in numbers]
    return compilation.KernelSignature(
        [*arrays, *scalars, *constants], compilation.CallingConvention.cutile_python_v2()
    )


class _Recorder:
    """Takes the launches of one operation after the other."""

    def __init__(self) -> None:
        self.folder, self.label = "", ""
        self.found: dict[tuple[Any, ...], Launch] = {}

    def __call__(self, function: Any, grid: Any, tensors: Any, numbers: Any, constants: Any) -> None:
        types = tuple(map(_array, tensors)), tuple(map(type, numbers)), tuple(constants)
        key = (self.folder, function._pyfunc.__name__, *types)
        if key not in self.found:
            same = sum(
                launch.key[:2] == key[:2] and launch.label == self.label for launch in self.found.values()
            )
            ways = [self.label] * bool(self.label) + [str(same + 1)] * bool(same)
            name = key[1] + (f"[{', '.join(ways)}]" if ways else "")
            self.found[key] = Launch(self.folder, name, function, signature(*types), key, self.label)


def collect(shape: Shape, arch: str = "sm_90") -> list[Launch]:
    """Every kernel, once for each set of types and constants that a forward and a full backward launch it with on
    ``arch``."""
    recorder = _Recorder()
    with common.intercept(recorder, arch):
        for op, folder in OPERATIONS.items():
            name = f"fused_mhc.ops.{folder}._cutile"
            if importlib.util.find_spec(name):
                recorder.folder = folder
                for recorder.label, call in _calls(op, importlib.import_module(name), shape):
                    call()
    return list(recorder.found.values())


def cubin(launch: Launch, arch: str) -> bytes:
    """The launch compiled for ``arch``.

    Raises:
        Exception: whatever cuda-tile raises when the compiler is missing or fails.
    """
    named = launch.signature.with_mangled_symbol(launch.function._pyfunc.__name__)
    return cutile.compile_kernel(launch.function, named, arch)


def _calls(op: str, module: Any, shape: Shape) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Forward and full backward of an operation, on tensors without contents, in each way that has code of its own."""
    n, width, dtype = shape.n, shape.width, shape.dtype
    tokens, size = 48, n * n + 2 * n

    def streams() -> Tensor:
        return torch.empty(tokens, n, width, dtype=dtype)

    def branch() -> Tensor:
        return torch.empty(tokens, width, dtype=dtype)

    def fp32(*sizes: int) -> Tensor:
        return torch.empty(sizes)

    mixes = (fp32(tokens, n), fp32(tokens, n), fp32(tokens, n, n))
    if op == "sinkhorn":
        for variant in ("softmax", "paper"):
            label = "" if variant == "softmax" else variant
            yield label, partial(module.sinkhorn_fwd, mixes[2], 20, 1e-6, variant)
            yield label, partial(module.sinkhorn_bwd, mixes[2], mixes[2], 20, 1e-6, variant)
    elif op == "h_aggregate":
        yield "", partial(module.h_aggregate_fwd, streams(), mixes[0])
        yield "", partial(module.h_aggregate_bwd, branch(), streams(), mixes[0], [True, True])
    elif op == "h_post_bda":
        seed = torch.zeros((), dtype=torch.int64)
        for label, bias, dropout in (
            ("", None, (0.0, None)),
            ("bias", branch()[0], (0.0, None)),
            ("dropout", None, (0.1, seed)),
        ):
            values = (mixes[2], streams(), mixes[1], branch(), bias, *dropout)
            yield label, partial(module.h_post_bda_fwd, *values)
            yield label, partial(module.h_post_bda_bwd, streams(), *values, [True] * 4 + [bias is not None])
    elif op == "proj_rms_compute_h":
        x, weight = streams().flatten(1), fp32(size, n * width)
        parameters = (x, weight, fp32(1), fp32(1), fp32(1), fp32(size))
        grads = (mixes[0], mixes[1], mixes[2].flatten(1), fp32(tokens, 1))
        saved = (fp32(tokens, size), fp32(tokens, 1))
        last = (n, 1e-6, "outside", "fp32", [True] * 6)
        yield "", partial(module.proj_rms_compute_h_fwd, *parameters, n, 1e-6, 1e-6, "outside", "fp32")
        yield "", partial(module.proj_rms_compute_h_bwd, *grads, *parameters, *saved, *last)
    elif op == "mega_mhc":
        state = (branch(), streams(), *mixes)
        site = (fp32(size, n * width), fp32(3), fp32(size), fp32(width))
        yield "", partial(module.mega_mhc_fwd, *state, *site, 1e-6, 1e-6, 20)
