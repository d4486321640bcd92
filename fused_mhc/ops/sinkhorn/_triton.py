"""Sinkhorn in Triton.

Up to eight streams (six in the backward), one thread holds a token's whole matrix: entry (i, j) of a block of tokens is
one register vector, ``m[i*n + j]``, so row and column sums are additions between registers and no lane waits for
another. Above that, a warp shares a few matrices (`*_wide_*`). A division by a sum is a multiplication by its reciprocal.

The backward works on ``P = gM * M`` instead of ``gM``: undoing ``Y = M/d`` along an axis, with ``a`` the sum of P along
it, is ``P - a*Y`` (``a = 0`` where the clamp of the paper's variant holds d constant), without a division and for zero
entries too. The iterations run again with their divisors d kept in registers, ``segment`` steps at a time, last segment
first; Y is restored by ``Y*d``. Nothing but the gradient is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._strides import alignment, flatten
from .._triton_common import Launcher, elements, follow, reciprocal, store, unpack, widen
from .._tuning import tuned
from .config import MAX_REGISTER_STREAMS, MAX_REGISTER_STREAMS_BWD, candidates, heuristic

__all__ = [
    "sinkhorn_bwd",
    "sinkhorn_bwd_tile",
    "sinkhorn_fwd",
    "sinkhorn_load_tile",
    "sinkhorn_store_tile",
    "sinkhorn_tile",
    "sinkhorn_wide_bwd_tile",
    "sinkhorn_wide_tile",
]


@triton.jit
def _divisor(total, eps, PAPER: tl.constexpr):
    if PAPER:
        return tl.maximum(total, eps, propagate_nan=tl.PropagateNan.ALL)
    else:
        return total + eps


@triton.jit
def _sums(m, n: tl.constexpr, ROW: tl.constexpr):
    """The n sums over the entries of each row (or column), first to last."""
    sums = ()
    for i in tl.static_range(n):
        total = m[i * n] if ROW else m[i]
        for j in tl.static_range(1, n):
            total = total + (m[i * n + j] if ROW else m[j * n + i])
        sums = sums + (total,)
    return sums


@triton.jit
def _divisors(m, eps, n: tl.constexpr, PAPER: tl.constexpr, ROW: tl.constexpr):
    sums = _sums(m, n, ROW)
    divisors = ()
    for i in tl.static_range(n):
        divisors = divisors + (_divisor(sums[i], eps, PAPER),)
    return divisors


@triton.jit
def _reciprocals(divisors, n: tl.constexpr):
    factors = ()
    for i in tl.static_range(n):
        factors = factors + (reciprocal(divisors[i]),)
    return factors


@triton.jit
def _scale(m, factors, n: tl.constexpr, ROW: tl.constexpr):
    """Each row (or column) times its factor."""
    scaled = ()
    for i in tl.static_range(n):
        for j in tl.static_range(n):
            scaled = scaled + (m[i * n + j] * (factors[i] if ROW else factors[j]),)
    return scaled


@triton.jit
def _step(m, eps, n: tl.constexpr, PAPER: tl.constexpr, ROW: tl.constexpr):
    return _scale(m, _reciprocals(_divisors(m, eps, n, PAPER, ROW), n), n, ROW)


@triton.jit
def _row_maxima(logits, n: tl.constexpr):
    maxima = ()
    for i in tl.static_range(n):
        top = logits[i * n]
        for j in tl.static_range(1, n):
            top = tl.maximum(top, logits[i * n + j], propagate_nan=tl.PropagateNan.ALL)
        maxima = maxima + (top,)
    return maxima


@triton.jit
def _start(logits, n: tl.constexpr, PAPER: tl.constexpr):
    """``exp(L - rowmax)``, divided by its row sum in the softmax variant."""
    maxima = _row_maxima(logits, n)
    m = ()
    for i in tl.static_range(n):
        for j in tl.static_range(n):
            m = m + (tl.exp(logits[i * n + j] - maxima[i]),)
    if PAPER:
        return m
    else:
        return _step(m, 0.0, n, False, True)


@triton.jit
def _add(m, value, n: tl.constexpr):
    shifted = ()
    for k in tl.static_range(n * n):
        shifted = shifted + (m[k] + value,)
    return shifted


@triton.jit
def _pairs(m, count, eps, n: tl.constexpr, PAPER: tl.constexpr):
    """``count`` times the two steps that a variant repeats: rows then columns in the paper's variant, columns then
    rows (from its first column step on) in the softmax variant."""
    for _ in range(count):
        m = _step(m, eps, n, PAPER, PAPER)
        m = _step(m, eps, n, PAPER, not PAPER)
    return m


@triton.jit
def _pack(columns, COUNT: tl.constexpr):
    """Inverse of `unpack`."""
    if COUNT == 1:
        return tl.reshape(columns[0], (columns[0].shape[0], 1))
    else:
        evens = ()
        odds = ()
        for k in tl.static_range(COUNT // 2):
            evens = evens + (columns[2 * k],)
            odds = odds + (columns[2 * k + 1],)
        pair = tl.join(_pack(evens, COUNT // 2), _pack(odds, COUNT // 2))
        return tl.reshape(pair, (pair.shape[0], COUNT))


@triton.jit
def sinkhorn_load_tile(pointer, stride, tokens, mask, n: tl.constexpr, ALIGN: tl.constexpr):
    """The n*n entries of every token as a tuple of fp32 vectors; masked tokens read 0; the token stride is ``stride *
    ALIGN``. (One wide load: the compiler's
    time grows with the square of the number of memory operations.)"""
    SIZE: tl.constexpr = triton.next_power_of_2(n * n)
    entry = tl.arange(0, SIZE)
    inside = mask[:, None] & (entry < n * n)[None, :]
    tile = tl.load(
        pointer + (tokens * elements(stride, ALIGN))[:, None] + entry[None, :], mask=inside, other=0.0
    )
    return unpack(widen(tile), SIZE)[: n * n]


@triton.jit
def sinkhorn_store_tile(pointer, m, tokens, mask, n: tl.constexpr):
    """Write the n*n entries of every token, contiguous, in the pointer's dtype."""
    SIZE: tl.constexpr = triton.next_power_of_2(n * n)
    for _ in tl.static_range(n * n, SIZE):
        m = m + (m[0],)
    entry = tl.arange(0, SIZE)
    inside = mask[:, None] & (entry < n * n)[None, :]
    store(pointer + (tokens * (n * n))[:, None] + entry[None, :], _pack(m, SIZE), inside)


@triton.jit
def sinkhorn_tile(logits, eps, n: tl.constexpr, ITERATIONS: tl.constexpr, PAPER: tl.constexpr):
    """Forward on a tuple of n*n fp32 vectors."""
    m = _start(logits, n, PAPER)
    if PAPER:
        return _pairs(m, ITERATIONS, eps, n, True)
    else:
        m = _pairs(_add(m, eps, n), ITERATIONS - 1, eps, n, False)
        return _step(m, eps, n, False, False)


@triton.jit
def _undo(p, y, divisors, eps, n: tl.constexpr, PAPER: tl.constexpr, ROW: tl.constexpr):
    """P before a step from P and Y after it."""
    sums = _sums(p, n, ROW)
    weights = ()
    for i in tl.static_range(n):
        if PAPER:
            weights = weights + (tl.where(divisors[i] > eps, -sums[i], 0.0),)
        else:
            weights = weights + (-sums[i],)
    before = ()
    for i in tl.static_range(n):
        for j in tl.static_range(n):
            before = before + (tl.fma(weights[i] if ROW else weights[j], y[i * n + j], p[i * n + j]),)
    return before


@triton.jit
def _kept_steps(y, eps, n: tl.constexpr, PAPER: tl.constexpr, COUNT: tl.constexpr):
    """Y after COUNT steps, and the divisors of each."""
    kept = ()
    for k in tl.static_range(COUNT):
        divisors = _divisors(y, eps, n, PAPER, (k % 2 == 0) == PAPER)
        kept = kept + divisors
        y = _scale(y, _reciprocals(divisors, n), n, (k % 2 == 0) == PAPER)
    return y, kept


@triton.jit
def _undo_steps(p, y, kept, eps, n: tl.constexpr, PAPER: tl.constexpr, COUNT: tl.constexpr):
    """P before COUNT steps from P and Y after them."""
    for k in tl.static_range(COUNT - 1, -1, -1):
        divisors = kept[k * n : k * n + n]
        p = _undo(p, y, divisors, eps, n, PAPER, (k % 2 == 0) == PAPER)
        y = _scale(y, divisors, n, (k % 2 == 0) == PAPER)
    return p


@triton.jit
def _softmax_start_bwd(p, start, eps, n: tl.constexpr):
    """Gradient of the logits from P at ``M = start + eps``, start the softmax."""
    weighted = ()
    for k in tl.static_range(n * n):
        weighted = weighted + (p[k] * (start[k] / (start[k] + eps)),)
    sums = _sums(weighted, n, True)
    result = ()
    for i in tl.static_range(n):
        for j in tl.static_range(n):
            result = result + (weighted[i * n + j] - start[i * n + j] * sums[i],)
    return result


@triton.jit
def _exp_start_bwd(p, logits, n: tl.constexpr):
    """Gradient of the logits from P at ``M = exp(L - rowmax)``: the shift takes a row's sum of P back from the first
    of its maxima."""
    maxima = _row_maxima(logits, n)
    sums = _sums(p, n, True)
    result = ()
    for i in tl.static_range(n):
        left = sums[i]
        for j in tl.static_range(n):
            top = logits[i * n + j] == maxima[i]
            result = result + (tl.where(top, p[i * n + j] - left, p[i * n + j]),)
            left = tl.where(top, 0.0, left)
    return result


@triton.jit
def sinkhorn_bwd_tile(
    grad, logits, eps, n: tl.constexpr, ITERATIONS: tl.constexpr, PAPER: tl.constexpr, SEGMENT: tl.constexpr
):
    """Gradient of the logits from tuples of n*n fp32 vectors. SEGMENT is even."""
    STEPS: tl.constexpr = 2 * ITERATIONS - (0 if PAPER else 1)
    SEGMENTS: tl.constexpr = (STEPS + SEGMENT - 1) // SEGMENT
    LAST: tl.constexpr = (SEGMENTS - 1) * SEGMENT
    start = _start(logits, n, PAPER)
    first = start if PAPER else _add(start, eps, n)
    y, kept = _kept_steps(_pairs(first, LAST // 2, eps, n, PAPER), eps, n, PAPER, STEPS - LAST)
    p = ()
    for k in tl.static_range(n * n):
        p = p + (grad[k] * y[k],)
    p = _undo_steps(p, y, kept, eps, n, PAPER, STEPS - LAST)
    for segment in tl.static_range(SEGMENTS - 2, -1, -1):
        y, kept = _kept_steps(_pairs(first, segment * (SEGMENT // 2), eps, n, PAPER), eps, n, PAPER, SEGMENT)
        p = _undo_steps(p, y, kept, eps, n, PAPER, SEGMENT)
    if PAPER:
        return _exp_start_bwd(p, logits, n)
    else:
        return _softmax_start_bwd(p, start, eps, n)


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _wide_divisor(m, eps, PAPER: tl.constexpr, ROW: tl.constexpr):
    return _divisor(tl.sum(m, 2 if ROW else 1, keep_dims=True), eps, PAPER)


@triton.jit
def _wide_columns(logits, n: tl.constexpr):
    """Logits with -inf in the columns past n. (Rows past n stay finite, so that no sum of a row is 0.)"""
    column = tl.arange(0, logits.shape[2])[None, None, :]
    return tl.where(column < n, logits, float("-inf"))


@triton.jit
def _wide_start(logits, inside, n: tl.constexpr, PAPER: tl.constexpr):
    """`_start` on ``[tokens, P, P]``; entries outside the n*n matrix are 0."""
    shifted = _wide_columns(logits, n)
    m = tl.exp(shifted - tl.reduce(shifted, 2, _nan_max, keep_dims=True))
    if not PAPER:
        m = m * reciprocal(tl.sum(m, 2, keep_dims=True))
    return tl.where(inside, m, 0.0)


@triton.jit
def _wide_pairs(m, count, eps, PAPER: tl.constexpr):
    for _ in range(count):
        m = m * reciprocal(_wide_divisor(m, eps, PAPER, PAPER))
        m = m * reciprocal(_wide_divisor(m, eps, PAPER, not PAPER))
    return m


@triton.jit
def sinkhorn_wide_tile(logits, inside, eps, n: tl.constexpr, ITERATIONS: tl.constexpr, PAPER: tl.constexpr):
    """Forward on ``[tokens, P, P]`` in fp32; ``inside`` marks the n*n matrix."""
    m = _wide_start(logits, inside, n, PAPER)
    if PAPER:
        return _wide_pairs(m, ITERATIONS, eps, True)
    else:
        m = _wide_pairs(tl.where(inside, m + eps, 0.0), ITERATIONS - 1, eps, False)
        return m * reciprocal(_wide_divisor(m, eps, False, False))


@triton.jit
def _wide_kept_steps(y, eps, PAPER: tl.constexpr, COUNT: tl.constexpr):
    kept = ()
    for k in tl.static_range(COUNT):
        divisor = _wide_divisor(y, eps, PAPER, (k % 2 == 0) == PAPER)
        kept = kept + (divisor,)
        y = y * reciprocal(divisor)
    return y, kept


@triton.jit
def _wide_undo_steps(p, y, kept, eps, PAPER: tl.constexpr, COUNT: tl.constexpr):
    for k in tl.static_range(COUNT - 1, -1, -1):
        weight = -tl.sum(p, 2 if (k % 2 == 0) == PAPER else 1, keep_dims=True)
        if PAPER:
            weight = tl.where(kept[k] > eps, weight, 0.0)
        p = tl.fma(tl.broadcast_to(weight, p.shape), y, p)
        y = y * kept[k]
    return p


@triton.jit
def sinkhorn_wide_bwd_tile(
    grad,
    logits,
    inside,
    eps,
    n: tl.constexpr,
    ITERATIONS: tl.constexpr,
    PAPER: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """`sinkhorn_bwd_tile` on ``[tokens, P, P]``."""
    STEPS: tl.constexpr = 2 * ITERATIONS - (0 if PAPER else 1)
    SEGMENTS: tl.constexpr = (STEPS + SEGMENT - 1) // SEGMENT
    LAST: tl.constexpr = (SEGMENTS - 1) * SEGMENT
    start = _wide_start(logits, inside, n, PAPER)
    first = start if PAPER else tl.where(inside, start + eps, 0.0)
    y, kept = _wide_kept_steps(_wide_pairs(first, LAST // 2, eps, PAPER), eps, PAPER, STEPS - LAST)
    p = _wide_undo_steps(grad * y, y, kept, eps, PAPER, STEPS - LAST)
    for segment in tl.static_range(SEGMENTS - 2, -1, -1):
        y, kept = _wide_kept_steps(
            _wide_pairs(first, segment * (SEGMENT // 2), eps, PAPER), eps, PAPER, SEGMENT
        )
        p = _wide_undo_steps(p, y, kept, eps, PAPER, SEGMENT)
    if PAPER:
        shifted = _wide_columns(logits, n)
        top = tl.reduce(shifted, 2, _nan_max, keep_dims=True)
        column = tl.arange(0, logits.shape[2])[None, None, :]
        index = tl.min(tl.where(shifted == top, column, logits.shape[2]), 2, keep_dims=True)
        return p - tl.where(column == index, tl.sum(p, 2, keep_dims=True), 0.0)
    else:
        weighted = p * (start / (start + eps))
        return weighted - start * tl.sum(weighted, 2, keep_dims=True)


@triton.jit
def _wide_offsets(tokens, stride, n: tl.constexpr, P: tl.constexpr):
    row = tl.arange(0, P)
    return (tokens * stride)[:, None, None] + (row[:, None] * n + row[None, :])[None, :, :]


@triton.jit(do_not_specialize=["stride", "T"])
def sinkhorn_fwd_kernel(
    logits_ptr,
    out_ptr,
    stride: tl.int64,
    T: tl.int64,
    eps: tl.float32,
    n: tl.constexpr,
    ITERATIONS: tl.constexpr,
    PAPER: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    follow()
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < T
    logits = sinkhorn_load_tile(logits_ptr, stride, tokens, mask, n, ALIGN)
    m = sinkhorn_tile(logits, eps, n, ITERATIONS, PAPER)
    sinkhorn_store_tile(out_ptr, m, tokens, mask, n)


@triton.jit(do_not_specialize=["grad_stride", "stride", "T"])
def sinkhorn_bwd_kernel(
    grad_ptr,
    logits_ptr,
    out_ptr,
    grad_stride: tl.int64,
    stride: tl.int64,
    T: tl.int64,
    eps: tl.float32,
    n: tl.constexpr,
    ITERATIONS: tl.constexpr,
    PAPER: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    ALIGN: tl.constexpr,
):
    follow()
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < T
    grad = sinkhorn_load_tile(grad_ptr, grad_stride, tokens, mask, n, ALIGN)
    logits = sinkhorn_load_tile(logits_ptr, stride, tokens, mask, n, ALIGN)
    result = sinkhorn_bwd_tile(grad, logits, eps, n, ITERATIONS, PAPER, SEGMENT)
    sinkhorn_store_tile(out_ptr, result, tokens, mask, n)


@triton.jit(do_not_specialize=["stride", "T"])
def sinkhorn_wide_fwd_kernel(
    logits_ptr,
    out_ptr,
    stride: tl.int64,
    T: tl.int64,
    eps: tl.float32,
    n: tl.constexpr,
    ITERATIONS: tl.constexpr,
    PAPER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    follow()
    P: tl.constexpr = triton.next_power_of_2(n)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, P)
    inside = ((row < n)[:, None] & (row < n)[None, :])[None, :, :]
    mask = inside & (tokens < T)[:, None, None]
    logits = widen(tl.load(logits_ptr + _wide_offsets(tokens, stride, n, P), mask=mask, other=0.0))
    m = sinkhorn_wide_tile(logits, inside, eps, n, ITERATIONS, PAPER)
    store(out_ptr + _wide_offsets(tokens, n * n, n, P), m, mask)


@triton.jit(do_not_specialize=["grad_stride", "stride", "T"])
def sinkhorn_wide_bwd_kernel(
    grad_ptr,
    logits_ptr,
    out_ptr,
    grad_stride: tl.int64,
    stride: tl.int64,
    T: tl.int64,
    eps: tl.float32,
    n: tl.constexpr,
    ITERATIONS: tl.constexpr,
    PAPER: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    follow()
    P: tl.constexpr = triton.next_power_of_2(n)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, P)
    inside = ((row < n)[:, None] & (row < n)[None, :])[None, :, :]
    mask = inside & (tokens < T)[:, None, None]
    grad = widen(tl.load(grad_ptr + _wide_offsets(tokens, grad_stride, n, P), mask=mask, other=0.0))
    logits = widen(tl.load(logits_ptr + _wide_offsets(tokens, stride, n, P), mask=mask, other=0.0))
    result = sinkhorn_wide_bwd_tile(grad, logits, inside, eps, n, ITERATIONS, PAPER, SEGMENT)
    store(out_ptr + _wide_offsets(tokens, n * n, n, P), result, mask)


_fwd = Launcher(sinkhorn_fwd_kernel)
_bwd = Launcher(sinkhorn_bwd_kernel)
_wide_fwd = Launcher(sinkhorn_wide_fwd_kernel)
_wide_bwd = Launcher(sinkhorn_wide_bwd_kernel)


def sinkhorn_fwd(input_logits: Tensor, num_iterations: int, eps: float, variant: str) -> Tensor:
    n = input_logits.shape[-1]
    out = torch.empty(input_logits.shape, dtype=input_logits.dtype, device=input_logits.device)
    count = input_logits.numel() // (n * n)
    if count == 0:
        return out
    logits, stride = flatten(input_logits, 2, dense=True)
    wide = n > MAX_REGISTER_STREAMS
    config = tuned("sinkhorn_fwd", out.device, heuristic, candidates, n, wide)
    align = 1 if wide else alignment(stride)
    constants = (n, num_iterations, variant == "paper", config.block)
    (_wide_fwd if wide else _fwd)(
        (triton.cdiv(count, config.block),),
        (logits, out, stride // align, count, eps),
        constants if wide else (*constants, align),
        config.num_warps,
    )
    return out


def sinkhorn_bwd(grad: Tensor, input_logits: Tensor, num_iterations: int, eps: float, variant: str) -> Tensor:
    n = input_logits.shape[-1]
    out = torch.empty(input_logits.shape, dtype=input_logits.dtype, device=input_logits.device)
    count = input_logits.numel() // (n * n)
    if count == 0:
        return out
    grad, grad_stride = flatten(grad, 2, dense=True)
    logits, stride = flatten(input_logits, 2, dense=True)
    wide = n > MAX_REGISTER_STREAMS_BWD
    config = tuned("sinkhorn_bwd", out.device, heuristic, candidates, n, wide)
    align = 1 if wide else alignment(grad_stride, stride)
    constants = (n, num_iterations, variant == "paper", config.block, config.segment)
    (_wide_bwd if wide else _bwd)(
        (triton.cdiv(count, config.block),),
        (grad, logits, out, grad_stride // align, stride // align, count, eps),
        constants if wide else (*constants, align),
        config.num_warps,
    )
    return out
