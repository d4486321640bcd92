"""What the Triton kernels share: exact conversions, dots and stores that the interpreter gets right too, and a launch
with little host cost.

Kernel conventions of this package:

- Token counts and strides are annotated ``tl.int64`` and named in ``do_not_specialize``, so neither their size nor
  their divisibility makes another compile. The alignment of strided rows comes in as one constexpr (`alignment`);
  the strides themselves come divided by it and are multiplied again inside (`elements`), which tells the compiler
  that loads may be wide.
- Constexprs stand last in a kernel's signature.
- A kernel begins with `follow`, or, where thousands of short programs would each pay for the wait, with `lead`; its
  `Launcher` says which.
- FP contraction is off at every launch: a kernel writes ``tl.fma`` where it wants one, so the rounding is that of
  the source on every Triton version.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import target_info
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import env
from ..device import device_info

__all__ = [
    "INTERPRETING",
    "Launcher",
    "block_sums",
    "cast",
    "dot_bf16",
    "elements",
    "follow",
    "lane_dots",
    "lane_zeros",
    "last_first",
    "lead",
    "load_columns",
    "load_scalars",
    "load_streams",
    "reciprocal",
    "sigmoid",
    "store",
    "store_columns",
    "unpack",
    "widen",
]

#: True when kernels run in Triton's interpreter; Triton too decides that once, when a kernel is defined.
INTERPRETING = tl.constexpr(env.interpreting())
#: PTX may be written by hand: compiled, and not for AMD.
PTX = tl.constexpr(not env.interpreting() and torch.version.hip is None)
#: A string default of a device function must be a constexpr (Triton 3.6).
NO_POLICY = tl.constexpr("")


@triton.jit
def lead():
    """Let the next launch bring its programs in place beside our last ones (Hopper and later)."""
    if PTX:
        if target_info.cuda_capability_geq(9, 0):
            gdc_launch_dependents()


@triton.jit
def follow():
    """Wait until the launch before this one has ended, beside whose last programs ours may have come in place; then
    `lead`. Nothing is read or written before."""
    if PTX:
        if target_info.cuda_capability_geq(9, 0):
            gdc_wait()
    lead()


@triton.jit
def widen(value):
    """``value`` in fp32, exactly. (The interpreter's own bf16 conversion is wrong for NaN and subnormals.)"""
    if INTERPRETING:
        if value.dtype == tl.bfloat16:
            bits = value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
            return bits.to(tl.float32, bitcast=True)
        else:
            return value.to(tl.float32)
    else:
        return value.to(tl.float32)


@triton.jit
def cast(value, dtype: tl.constexpr):
    """fp32 ``value`` in ``dtype``, rounded to nearest even. (The interpreter truncates to bf16.)"""
    if INTERPRETING:
        if dtype == tl.bfloat16:
            bits = value.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            quiet_nan = (bits >> 16) | 0x40
            kept = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet_nan, rounded)
            return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            return value.to(dtype)
    else:
        return value.to(dtype)


@triton.jit
def store(pointer, value, mask=None, eviction_policy: tl.constexpr = NO_POLICY):
    """Store fp32 ``value`` in the pointer's dtype, rounded to nearest even."""
    tl.store(pointer, cast(value, pointer.dtype.element_ty), mask=mask, eviction_policy=eviction_policy)


@triton.jit
def dot_bf16(a, b, acc):
    """``acc + a @ b`` for bf16 operands: products exact, sums in fp32. (The interpreter multiplies bit patterns.)"""
    if INTERPRETING:
        return tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def reciprocal(x):
    """``1/x`` within 1 ulp for normal ``x`` below 2^126 (NVIDIA: one instruction; ``1.0 / x`` is five)."""
    if PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return 1.0 / x


@triton.jit
def sigmoid(x):
    """``1/(1+exp(-x))`` in fp32: no overflow on either side, relative accuracy in both tails."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def elements(stride, ALIGN: tl.constexpr):
    """A stride in elements, 64-bit, from one in units of ALIGN. (The interpreter gives a number no more bits than its
    value needs.)"""
    return tl.cast(stride, tl.int64) * ALIGN


@triton.jit
def last_first():
    """This program's place from the end: the kernels that walk streams by themselves go from the last token to the
    first, the projections beside them from the first to the last, so each finds in the L2 cache what the one before it
    has read or written last."""
    return (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)


@triton.jit
def load_scalars(pointer, COUNT: tl.constexpr, STEP: tl.constexpr = 1):
    """COUNT numbers, every STEP-th, as a tuple of fp32 scalars."""
    values = ()
    for k in tl.static_range(COUNT):
        values = values + (widen(tl.load(pointer + k * STEP)),)
    return values


@triton.jit
def load_columns(pointer, columns, C: tl.constexpr, FULL: tl.constexpr):
    """The elements ``columns`` of a row of C, in its own dtype; 0 past the end. FULL: none is past the end."""
    if FULL:
        return tl.load(pointer + columns)
    else:
        return tl.load(pointer + columns, mask=columns < C, other=0.0)


@triton.jit
def load_streams(row, stream_stride, columns, n: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr):
    """The same columns of the n streams of a token, each in the tensor's dtype."""
    streams = ()
    for i in tl.static_range(n):
        streams = streams + (load_columns(row + i * stream_stride, columns, C, FULL),)
    return streams


@triton.jit
def store_columns(pointer, columns, value, C: tl.constexpr, FULL: tl.constexpr):
    """Write fp32 ``value`` to the elements ``columns`` of a row of C, in its dtype; none past the end."""
    if FULL:
        store(pointer + columns, value)
    else:
        store(pointer + columns, value, columns < C)


@triton.jit
def unpack(tile, COUNT: tl.constexpr):
    """The COUNT columns of ``[rows, COUNT]`` (COUNT a power of two) as vectors, in order."""
    if COUNT == 1:
        return (tl.reshape(tile, (tile.shape[0],)),)
    else:
        even, odd = tl.split(tl.reshape(tile, (tile.shape[0], COUNT // 2, 2)))
        evens = unpack(even, COUNT // 2)
        odds = unpack(odd, COUNT // 2)
        columns = ()
        for k in tl.static_range(COUNT // 2):
            columns = columns + (evens[k], odds[k])
        return columns


@triton.jit
def lane_dots(sums, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, VECTOR: tl.constexpr):
    """Add the products of all pairs of left and right vectors to the lanes' sums (pair (i, j) at ``i*RIGHT + j``). A
    lane adds the VECTOR neighbours that it has loaded, one after the other, so no lane waits for another."""
    lefts = ()
    for i in tl.static_range(LEFT):
        lefts = lefts + unpack(tl.reshape(left[i], (left[i].shape[0] // VECTOR, VECTOR)), VECTOR)
    rights = ()
    for j in tl.static_range(RIGHT):
        rights = rights + unpack(tl.reshape(right[j], (right[j].shape[0] // VECTOR, VECTOR)), VECTOR)
    added = ()
    for i in tl.static_range(LEFT):
        for j in tl.static_range(RIGHT):
            total = sums[i * RIGHT + j]
            for k in tl.static_range(VECTOR):
                total = tl.fma(widen(lefts[i * VECTOR + k]), widen(rights[j * VECTOR + k]), total)
            added = added + (total,)
    return added


@triton.jit
def lane_zeros(COUNT: tl.constexpr, LANES: tl.constexpr):
    """COUNT vectors of fp32 zeros."""
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros = zeros + (tl.zeros((LANES,), tl.float32),)
    return zeros


@triton.jit
def _add_2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def block_sums(vectors, COUNT: tl.constexpr):
    """The sum of each of COUNT vectors over the whole program, up to four behind one barrier."""
    sums = ()
    if INTERPRETING:  # which walks a custom combination element by element
        for k in tl.static_range(COUNT):
            sums = sums + (tl.sum(vectors[k], 0),)
    else:
        for k in tl.static_range(0, COUNT - 3, 4):
            sums = sums + tl.reduce(vectors[k : k + 4], 0, _add_4)
        for k in tl.static_range(COUNT - COUNT % 4, COUNT - 1, 2):
            sums = sums + tl.reduce(vectors[k : k + 2], 0, _add_2)
        if COUNT % 2 == 1:
            sums = sums + (tl.sum(vectors[COUNT - 1], 0),)
    return sums


class Launcher:
    """Launches one kernel, remembering what it compiled to, so that a repeated launch skips Triton's own argument
    analysis and hooks (half of the host cost of a small operation). ``follows``: the kernel begins with `follow`."""

    def __init__(self, kernel: Any, follows: bool = True) -> None:
        self.kernel, self.follows = kernel, follows
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any, Any, Any]] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int = 2,
    ) -> None:
        """Run the kernel on the device of the first tensor.

        Args:
            grid: up to three extents.
            args: run-time arguments in signature order: tensors, None, numbers (see the module's conventions).
            constants: the constexprs that follow them, in order.
            num_warps, num_stages: Triton's.
        """
        if INTERPRETING.value:
            self._launch_by_triton(grid, args, constants, num_warps, num_stages)
            return
        device = args[0].device
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(grid, args, constants, num_warps, num_stages)
            return
        pointers = 0
        kinds: list[Any] = [device.index, num_warps, num_stages, constants]
        for a in args:
            if isinstance(a, Tensor):
                pointers |= a.data_ptr()
                kinds.append(a.dtype)
            elif a is None:
                kinds.append(None)
        if pointers & 15:  # rare: Triton's own analysis finds which loads may still be wide
            self._launch_by_triton(grid, args, constants, num_warps, num_stages)
            return
        key = tuple(kinds)
        compiled = self._compiled.get(key)
        if compiled is None:
            kernel = self._launch_by_triton(grid, args, constants, num_warps, num_stages)
            self._compiled[key] = (kernel, kernel.run, kernel.function, kernel.packed_metadata)
            return
        kernel, run, function, metadata = compiled
        if _profiled(triton.knobs.runtime.launch_enter_hook) or _profiled(
            triton.knobs.runtime.launch_exit_hook
        ):
            kernel[(*grid, 1, 1)[:3]](*args, *constants)
            return
        stream = triton.runtime.driver.active.get_current_stream(device.index)
        run(*(*grid, 1, 1)[:3], stream, function, metadata, None, None, None, *args, *constants)

    def _launch_by_triton(
        self,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
    ) -> Any:
        launch = self.kernel[grid]
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
        if self.follows and not INTERPRETING.value and _starts_early(args[0].device):
            options["launch_pdl"] = True
        return launch(*args, *constants, **options)


def _starts_early(device: torch.device) -> bool:
    """Whether a launch on ``device`` may bring programs in place while the one before it ends."""
    arch = device_info(device).arch
    return arch.startswith("sm_") and int(arch[3:]) >= 90


def _profiled(hook: Any) -> bool:
    """Somebody listens to launches: a chain of hooks with entries, or a hook put in its place."""
    return hook is not None and bool(getattr(hook, "calls", True))
