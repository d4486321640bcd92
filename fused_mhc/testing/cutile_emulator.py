"""cuTile kernels on CPU tensors: `emulate` runs what the hosts launch, program after program, in plain torch.

cuTile has no interpreter. The kernels of this package use a small part of the language, and a kernel's body is a Python
function; here each operation of the language that they use is a few lines of torch. So a test sees the formulas, masks
and offsets of a kernel (an address outside the tensor's memory is an error, and so is a claim of divisibility that does
not hold), not what the compiler makes of them: sums over a tile have torch's order, and an approximate reciprocal is
exact.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..dispatch import OPERATIONS

__all__ = ["emulate", "kernel_modules"]


class _Memory:
    """``Array.get_raw_memory()``: the tensor's storage, by elements from the tensor's first one."""

    def __init__(self, t: Tensor) -> None:
        self.dtype = t.dtype
        length = t.untyped_storage().nbytes() // t.element_size()
        self._storage = t.as_strided((length,), (1,), 0)
        self._origin = int(t.storage_offset())

    def _at(self, offset: Any, mask: Any) -> tuple[Tensor, Tensor]:
        at = torch.as_tensor(offset).long() + self._origin
        inside = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        at, inside = torch.broadcast_tensors(at, inside)
        wanted = at[inside]
        if wanted.numel() and (int(wanted.min()) < 0 or int(wanted.max()) >= self._storage.numel()):
            raise IndexError(f"offsets {int(wanted.min())} to {int(wanted.max())} leave the memory")
        return at, inside

    def load_offset(self, offset: Any, *, mask: Any = None, padding_value: Any = 0) -> Tensor:
        at, inside = self._at(offset, mask)
        value = self._storage[torch.where(inside, at, 0)]
        return torch.where(inside, value, torch.as_tensor(padding_value, dtype=self.dtype))

    def store_offset(self, offset: Any, value: Any, *, mask: Any = None) -> None:
        at, inside = self._at(offset, mask)
        value = torch.as_tensor(value)
        if value.dtype != self.dtype:
            raise TypeError(f"a store of {value.dtype} into {self.dtype}")
        wanted = at[inside]
        if wanted.unique().numel() != wanted.numel():
            raise IndexError("a store writes one element twice")
        self._storage[wanted] = value.broadcast_to(at.shape)[inside]


class _Array:
    def __init__(self, t: Tensor) -> None:
        self.tensor = t
        self.dtype = t.dtype

    def get_raw_memory(self) -> _Memory:
        return _Memory(self.tensor)

    def slice(self, axis: int, start: int, stop: int) -> _Array:
        if not 0 <= start <= stop <= self.tensor.shape[axis]:
            raise IndexError(f"rows {start} to {stop} of {self.tensor.shape[axis]}")
        return _Array(self.tensor.narrow(axis, start, stop - start))

    def tile(self, index: Sequence[int], shape: Sequence[int]) -> tuple[Tensor, tuple[Any, ...]]:
        """The part of a tile that lies in the array, and where in the tile it lies."""
        found = self.tensor
        there = []
        for dim, (i, size) in enumerate(zip(index, shape, strict=True)):
            start, length = int(i) * size, found.shape[dim]
            if not 0 <= start < length:
                raise IndexError(f"tile {int(i)} of {size} lies outside of dimension {dim} of size {length}")
            found = found.narrow(dim, start, min(size, length - start))
            there.append(slice(0, found.shape[dim]))
        return found, tuple(there)


def _load(
    array: _Array, index: Any, shape: tuple[int, ...], *, padding_mode: Any, latency: int = 1
) -> Tensor:
    tile = torch.zeros(_powers_of_two(shape), dtype=array.dtype)
    found, there = array.tile(index, shape)
    tile[there] = found
    return tile


def _store(array: _Array, index: Any, tile: Tensor) -> None:
    if tile.dtype != array.dtype:
        raise TypeError(f"a store of {tile.dtype} into {array.dtype}")
    found, there = array.tile(index, tile.shape)
    found.copy_(tile[there])


def _astype(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, (bool, int)) and not dtype.is_floating_point:  # indices stay Python's
        return int(x)
    return torch.as_tensor(x).to(dtype)


def _fp32(x: Any) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float32) if not isinstance(x, Tensor) else x


def _divisible(x: Any, divisor: int) -> Any:
    if int(x) % divisor:
        raise ValueError(f"{int(x)} is not a multiple of {divisor}")
    return x


def _maximum(x: Any, y: Any, *, propagate_nan: bool = False) -> Tensor:
    x, y = torch.broadcast_tensors(torch.as_tensor(x), torch.as_tensor(y))
    return torch.maximum(x, y) if propagate_nan else torch.fmax(x, y)


def _minimum(x: Any, y: Any) -> Any:
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else torch.minimum(x, y)


def _where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(condition, bool):
        return x if condition else y
    x, y = (v if isinstance(v, Tensor) else torch.as_tensor(v) for v in (x, y))
    if x.dtype != y.dtype:  # a Python number takes the other's type
        x, y = (x.to(y.dtype), y) if x.dim() == 0 else (x, y.to(x.dtype))
    return torch.where(condition, x, y)


def _reduce(x: tuple[Tensor, ...], axis: int, function: Callable[..., Any], identity: Any) -> Any:
    """Neighbouring halves are combined until one element is left."""
    parts = list(x)
    while parts[0].shape[axis] > 1:
        half = parts[0].shape[axis] // 2
        low = [p.narrow(axis, 0, half) for p in parts]
        high = [p.narrow(axis, half, half) for p in parts]
        parts = list(function(*low, *high))
    return tuple(p.squeeze(axis) for p in parts)


def _extract(x: Tensor, index: Sequence[int], shape: Sequence[int]) -> Tensor:
    for dim, (i, size) in enumerate(zip(index, shape, strict=True)):
        x = x.narrow(dim, i * size, size)
    return x


def _mma(x: Tensor, y: Tensor, acc: Tensor) -> Tensor:
    if x.dtype != y.dtype:
        raise TypeError(f"a product of {x.dtype} and {y.dtype}")
    return torch.matmul(x.float(), y.float()) + acc


def _max(x: Tensor, axis: int, *, keepdims: bool = False, propagate_nan: bool = False) -> Tensor:
    if not propagate_nan:
        x = torch.where(x.isnan(), -torch.inf, x)
    return x.amax(axis, keepdim=keepdims)


def _powers_of_two(shape: Any) -> Any:
    for size in shape if isinstance(shape, tuple) else (shape,):
        if size & (size - 1):
            raise ValueError(f"a tile of shape {shape}")
    return shape


def _language(block: list[int]) -> SimpleNamespace:
    """The part of ``cuda.tile`` that the kernels use; ``block`` holds the running program's indices."""

    def dots(x: Tensor, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
        return x.sum() if axis is None else x.sum(axis, keepdim=keepdims)

    return SimpleNamespace(
        float32=torch.float32,
        bfloat16=torch.bfloat16,
        float16=torch.float16,
        tfloat32=torch.float32,
        int32=torch.int32,
        int64=torch.int64,
        uint64=torch.int64,  # products wrap alike; right shifts are masked by the kernels
        RoundingMode=SimpleNamespace(APPROX=None, RN=None),
        PaddingMode=SimpleNamespace(ZERO=None),
        load=_load,
        store=_store,
        bid=lambda axis: block[axis],
        num_blocks=lambda axis: block[axis + 3],
        astype=_astype,
        arange=lambda size, *, dtype: torch.arange(_powers_of_two(size), dtype=dtype),
        zeros=lambda shape, dtype: torch.zeros(_powers_of_two(shape), dtype=dtype),
        full=lambda shape, value, dtype: torch.full(_powers_of_two(shape), value, dtype=dtype),
        static_iter=lambda values: values,
        assume_divisible_by=_divisible,
        truediv=lambda x, y, **_: _fp32(x) / y,
        exp=torch.exp,
        sqrt=lambda x, **_: torch.sqrt(_fp32(x)),
        rsqrt=lambda x, **_: torch.rsqrt(_fp32(x)),
        maximum=_maximum,
        minimum=_minimum,
        max=_max,
        min=lambda x, axis, keepdims=False: x.amin(axis, keepdim=keepdims),
        sum=dots,
        reduce=_reduce,
        reshape=lambda x, shape: x.reshape(_powers_of_two(shape)),
        transpose=lambda x: x.transpose(0, 1),
        permute=lambda x, axes: x.permute(axes),
        broadcast_to=lambda x, shape: x.broadcast_to(_powers_of_two(shape)),
        cat=torch.cat,
        extract=_extract,
        where=_where,
        mma=_mma,
        cdiv=lambda a, b: -(-a // b),
    )


def kernel_modules() -> list[ModuleType]:
    """Every module that holds kernels, or functions that run inside one."""
    names = ["fused_mhc.ops._cutile_common"]
    for folder in dict.fromkeys(OPERATIONS.values()):
        package = importlib.import_module(f"fused_mhc.ops.{folder}")
        names += [
            f"fused_mhc.ops.{folder}.{path.stem}"
            for root in package.__path__
            for path in sorted(Path(root).glob("_cutile*.py"))
        ]
    return [importlib.import_module(name) for name in names]


@contextlib.contextmanager
def emulate() -> Iterator[None]:
    """Inside, hosts of the cuTile kernels run on CPU tensors.

    Raises:
        ImportError: cuda-tile is not installed (the kernels' modules are written in it).
    """
    common = importlib.import_module("fused_mhc.ops._cutile_common")
    block = [0, 0, 0, 1, 1, 1]
    language = _language(block)

    def execute(function: Any, grid: Any, tensors: Any, numbers: Any, constants: Any) -> None:
        sizes = (*grid, 1, 1)[:3]
        block[3:] = sizes
        arrays = [_Array(t.tensor if isinstance(t, common.Whole) else t) for t in tensors]
        rounded = [torch.tensor(v, dtype=torch.float32) if isinstance(v, float) else v for v in numbers]
        for z, y, x in itertools.product(*(range(s) for s in reversed(sizes))):
            block[:3] = [x, y, z]
            function._pyfunc(*arrays, *rounded, *constants)

    modules = kernel_modules()
    kept = [module.ct for module in modules]
    try:
        for module in modules:
            module.ct = language  # type: ignore[attr-defined]
        with common.intercept(execute):
            yield
    finally:
        for module, own in zip(modules, kept, strict=True):
            module.ct = own  # type: ignore[attr-defined]
