"""What the Hopper kernels in Gluon share: names that differ between Triton versions, and TMA descriptors."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["COLUMNS", "Capped", "follow_launch", "load_tile", "store_tile", "thread_barrier", "tiles_of"]

# These names changed after Triton 3.6.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

#: Columns of the projection in a product of the backward: N rounded up.
COLUMNS = gl.constexpr(32)


@gluon.jit
def follow_launch():
    """`_triton_common.follow`, which a kernel in Gluon cannot call."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@functools.lru_cache(maxsize=None)
def _layout(rows: int, columns: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


def tiles_of(t: Tensor, shape: tuple[int, int], stride: int, rows: int, columns: int) -> TensorDescriptor:
    """How TMA reads or writes tiles ``[rows, columns]`` of bf16 rows. (The constructor's checks cost as much as a
    launch; the callers have made them.)"""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base, descriptor.padding = t, "zero"
    descriptor.shape, descriptor.strides = list(shape), [stride, 1]
    descriptor.block_shape, descriptor.layout = [rows, columns], _layout(rows, columns)
    return descriptor


class Capped:
    """A kernel whose launches start with at most this many registers a thread."""

    def __init__(self, kernel: Any, registers: int) -> None:
        self.kernel, self.registers = kernel, registers

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self.kernel[grid], maxnreg=self.registers)
