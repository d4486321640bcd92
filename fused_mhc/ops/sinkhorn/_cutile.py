"""Sinkhorn in cuTile.

Up to four streams, one thread holds a token's whole matrix: entry (i, j) of a block of tokens is one register vector,
``m[i*n + j]``, so row and column sums are additions between registers and no lane waits for another. Above that a few
lanes share a matrix that zeros fill up to 8 x 8 (`*_wide_*`); vectors would take the compiler half a minute. A division
by a sum is a multiplication by its reciprocal.

The backward works on ``P = gM * M`` instead of ``gM``: undoing ``Y = M/d`` along an axis, with ``a`` the sum of P along
it, is ``P - a*Y`` (``a = 0`` where the clamp of the paper's variant holds d constant), without a division and for zero
entries too. The iterations run again with their divisors d kept in registers, ``segment`` steps at a time, last segment
first; Y is restored by ``Y*d``. Nothing but the gradient is written.
"""

from __future__ import annotations

import cuda.tile as ct
import torch
from torch import Tensor

from .._cutile_common import Launcher, kernel, power_of_two, reciprocal, widen
from .._strides import alignment, flatten

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

#: Most streams whose matrix a thread holds.
MAX_REGISTER_STREAMS = 4
#: Steps whose divisors the backward keeps at a time; even.
SEGMENT = 40
#: Tokens in a program: as many as it has threads.
TOKENS = 128
#: Tokens in a program whose lanes share matrices, of 64 entries each.
WIDE_TOKENS = 16


def _divisor(total, eps, PAPER):
    return ct.maximum(total, eps, propagate_nan=True) if PAPER else total + eps


def _sums(m, n, ROW):
    """The n sums over the entries of each row (or column), first to last."""
    sums = ()
    for i in ct.static_iter(range(n)):
        total = m[i * n] if ROW else m[i]
        for j in ct.static_iter(range(1, n)):
            total = total + (m[i * n + j] if ROW else m[j * n + i])
        sums = sums + (total,)
    return sums


def _divisors(m, eps, n, PAPER, ROW):
    sums = _sums(m, n, ROW)
    divisors = ()
    for i in ct.static_iter(range(n)):
        divisors = divisors + (_divisor(sums[i], eps, PAPER),)
    return divisors


def _reciprocals(divisors, n):
    factors = ()
    for i in ct.static_iter(range(n)):
        factors = factors + (reciprocal(divisors[i]),)
    return factors


def _scale(m, factors, n, ROW):
    """Each row (or column) times its factor."""
    scaled = ()
    for i in ct.static_iter(range(n)):
        for j in ct.static_iter(range(n)):
            scaled = scaled + (m[i * n + j] * (factors[i] if ROW else factors[j]),)
    return scaled


def _step(m, eps, n, PAPER, ROW):
    return _scale(m, _reciprocals(_divisors(m, eps, n, PAPER, ROW), n), n, ROW)


def _row_maxima(logits, n):
    maxima = ()
    for i in ct.static_iter(range(n)):
        top = logits[i * n]
        for j in ct.static_iter(range(1, n)):
            top = ct.maximum(top, logits[i * n + j], propagate_nan=True)
        maxima = maxima + (top,)
    return maxima


def _start(logits, n, PAPER):
    """``exp(L - rowmax)``, divided by its row sum in the softmax variant."""
    maxima = _row_maxima(logits, n)
    m = ()
    for i in ct.static_iter(range(n)):
        for j in ct.static_iter(range(n)):
            m = m + (ct.exp(logits[i * n + j] - maxima[i]),)
    return m if PAPER else _step(m, 0.0, n, False, True)


def _add(m, value, n):
    shifted = ()
    for k in ct.static_iter(range(n * n)):
        shifted = shifted + (m[k] + value,)
    return shifted


def _pairs(m, COUNT, eps, n, PAPER):
    """COUNT times the two steps that a variant repeats: rows then columns in the paper's variant, columns then rows
    (from its first column step on) in the softmax variant."""
    for _ in range(COUNT):
        m = _step(m, eps, n, PAPER, PAPER)
        m = _step(m, eps, n, PAPER, not PAPER)
    return m


def _unpack(tile, SIZE, TOKENS, COUNT):
    """The first COUNT columns of ``[TOKENS, SIZE]`` as vectors, in order."""
    columns = ()
    for k in ct.static_iter(range(COUNT)):
        columns = columns + (ct.reshape(ct.extract(tile, (0, k), (TOKENS, 1)), (TOKENS,)),)
    return columns


def _pack(columns, SIZE, TOKENS):
    """Inverse of `_unpack` for SIZE columns: at each turn column k is joined with the one half a tuple away."""
    parts = ()
    for k in ct.static_iter(range(SIZE)):
        parts = parts + (ct.reshape(columns[k], (TOKENS, 1)),)
    for half in ct.static_iter([SIZE >> t for t in range(1, SIZE.bit_length())]):
        joined = ()
        for k in ct.static_iter(range(half)):
            pair = (
                ct.reshape(parts[k], (TOKENS, SIZE // half // 2, 1)),
                ct.reshape(parts[k + half], (TOKENS, SIZE // half // 2, 1)),
            )
            joined = joined + (ct.reshape(ct.cat(pair, 2), (TOKENS, SIZE // half)),)
        parts = joined
    return parts[0]


def sinkhorn_load_tile(memory, first, stride, T, n, SIZE, ALIGN, TOKENS):
    """The n*n entries of TOKENS tokens from ``first`` on as a tuple of fp32 vectors; tokens past T read 0."""
    token = ct.arange(TOKENS, dtype=ct.int64)
    entry = ct.arange(SIZE, dtype=ct.int64)
    mask = ((first + token) < T)[:, None] & (entry < n * n)[None, :]
    rows = ct.assume_divisible_by(first * stride, ALIGN) + token * ct.assume_divisible_by(stride, ALIGN)
    tile = memory.load_offset(rows[:, None] + entry[None, :], mask=mask, padding_value=0)
    return _unpack(widen(tile), SIZE, TOKENS, n * n)


def sinkhorn_store_tile(memory, m, first, T, n, SIZE, TOKENS):
    """Write the n*n entries of every token, contiguous, in the tensor's dtype."""
    for _ in ct.static_iter(range(n * n, SIZE)):
        m = m + (m[0],)
    token = ct.arange(TOKENS, dtype=ct.int64)
    entry = ct.arange(SIZE, dtype=ct.int64)
    mask = ((first + token) < T)[:, None] & (entry < n * n)[None, :]
    at = (first * (n * n) + token * (n * n))[:, None] + entry[None, :]
    memory.store_offset(at, ct.astype(_pack(m, SIZE, TOKENS), memory.dtype), mask=mask)


def sinkhorn_tile(logits, eps, n, ITERATIONS, PAPER):
    """Forward on a tuple of n*n fp32 vectors."""
    m = _start(logits, n, PAPER)
    if PAPER:
        m = _pairs(m, ITERATIONS, eps, n, True)
    else:
        m = _pairs(_add(m, eps, n), ITERATIONS - 1, eps, n, False)
        m = _step(m, eps, n, False, False)
    return m


def _undo(p, y, divisors, eps, n, PAPER, ROW):
    """P before a step from P and Y after it."""
    sums = _sums(p, n, ROW)
    weights = ()
    for i in ct.static_iter(range(n)):
        weights = weights + ((ct.where(divisors[i] > eps, sums[i], 0.0) if PAPER else sums[i]),)
    before = ()
    for i in ct.static_iter(range(n)):
        for j in ct.static_iter(range(n)):
            before = before + (p[i * n + j] - (weights[i] if ROW else weights[j]) * y[i * n + j],)
    return before


def _kept_steps(y, eps, n, PAPER, COUNT):
    """Y after COUNT steps, and the divisors of each."""
    kept = ()
    for k in ct.static_iter(range(COUNT)):
        divisors = _divisors(y, eps, n, PAPER, (k % 2 == 0) == PAPER)
        kept = kept + (divisors,)
        y = _scale(y, _reciprocals(divisors, n), n, (k % 2 == 0) == PAPER)
    return y, kept


def _undo_steps(p, y, kept, eps, n, PAPER, COUNT):
    """P before COUNT steps from P and Y after them."""
    for k in ct.static_iter(range(COUNT - 1, -1, -1)):
        p = _undo(p, y, kept[k], eps, n, PAPER, (k % 2 == 0) == PAPER)
        y = _scale(y, kept[k], n, (k % 2 == 0) == PAPER)
    return p


def _softmax_start_bwd(p, start, eps, n):
    """Gradient of the logits from P at ``M = start + eps``, start the softmax."""
    weighted = ()
    for k in ct.static_iter(range(n * n)):
        weighted = weighted + (p[k] * (start[k] / (start[k] + eps)),)
    sums = _sums(weighted, n, True)
    result = ()
    for i in ct.static_iter(range(n)):
        for j in ct.static_iter(range(n)):
            result = result + (weighted[i * n + j] - start[i * n + j] * sums[i],)
    return result


def _exp_start_bwd(p, logits, n):
    """Gradient of the logits from P at ``M = exp(L - rowmax)``: the shift takes a row's sum of P back from the first
    of its maxima."""
    maxima = _row_maxima(logits, n)
    sums = _sums(p, n, True)
    result = ()
    for i in ct.static_iter(range(n)):
        left = sums[i]
        for j in ct.static_iter(range(n)):
            top = logits[i * n + j] == maxima[i]
            result = result + (ct.where(top, p[i * n + j] - left, p[i * n + j]),)
            left = ct.where(top, 0.0, left)
    return result


def sinkhorn_bwd_tile(grad, logits, eps, n, ITERATIONS, PAPER, SEGMENT):
    """Gradient of the logits from tuples of n*n fp32 vectors. SEGMENT is even."""
    STEPS = 2 * ITERATIONS - (0 if PAPER else 1)
    SEGMENTS = (STEPS + SEGMENT - 1) // SEGMENT
    LAST = (SEGMENTS - 1) * SEGMENT
    start = _start(logits, n, PAPER)
    first = start if PAPER else _add(start, eps, n)
    y, kept = _kept_steps(_pairs(first, LAST // 2, eps, n, PAPER), eps, n, PAPER, STEPS - LAST)
    p = ()
    for k in ct.static_iter(range(n * n)):
        p = p + (grad[k] * y[k],)
    p = _undo_steps(p, y, kept, eps, n, PAPER, STEPS - LAST)
    for segment in ct.static_iter(range(SEGMENTS - 2, -1, -1)):
        y, kept = _kept_steps(_pairs(first, segment * (SEGMENT // 2), eps, n, PAPER), eps, n, PAPER, SEGMENT)
        p = _undo_steps(p, y, kept, eps, n, PAPER, SEGMENT)
    return _exp_start_bwd(p, logits, n) if PAPER else _softmax_start_bwd(p, start, eps, n)


def _wide_divisor(m, eps, PAPER, ROW):
    return _divisor(ct.sum(m, 2 if ROW else 1, keepdims=True), eps, PAPER)


def _wide_start(logits, inside, column, n, PAPER):
    """`_start` on ``[tokens, 8, 8]``; entries outside the n*n matrix are 0."""
    # Rows past n stay finite, so that no sum of a row is 0.
    shifted = ct.where(column < n, logits, -float("inf"))
    m = ct.exp(shifted - ct.max(shifted, 2, keepdims=True, propagate_nan=True))
    if not PAPER:
        m = m * reciprocal(ct.sum(m, 2, keepdims=True))
    return ct.where(inside, m, 0.0)


def _wide_pairs(m, COUNT, eps, PAPER):
    for _ in range(COUNT):
        m = m * reciprocal(_wide_divisor(m, eps, PAPER, PAPER))
        m = m * reciprocal(_wide_divisor(m, eps, PAPER, not PAPER))
    return m


def sinkhorn_wide_tile(logits, inside, column, eps, n, ITERATIONS, PAPER):
    """Forward on ``[tokens, 8, 8]``; ``inside`` marks the n*n matrix, ``column`` counts the columns."""
    m = _wide_start(logits, inside, column, n, PAPER)
    if PAPER:
        m = _wide_pairs(m, ITERATIONS, eps, True)
    else:
        m = _wide_pairs(ct.where(inside, m + eps, 0.0), ITERATIONS - 1, eps, False)
        m = m * reciprocal(_wide_divisor(m, eps, False, False))
    return m


def _wide_kept_steps(y, eps, PAPER, COUNT):
    kept = ()
    for k in ct.static_iter(range(COUNT)):
        divisor = _wide_divisor(y, eps, PAPER, (k % 2 == 0) == PAPER)
        kept = kept + (divisor,)
        y = y * reciprocal(divisor)
    return y, kept


def _wide_undo_steps(p, y, kept, eps, PAPER, COUNT):
    for k in ct.static_iter(range(COUNT - 1, -1, -1)):
        weight = ct.sum(p, 2 if (k % 2 == 0) == PAPER else 1, keepdims=True)
        if PAPER:
            weight = ct.where(kept[k] > eps, weight, 0.0)
        p = p - weight * y
        y = y * kept[k]
    return p


def sinkhorn_wide_bwd_tile(grad, logits, inside, column, eps, n, ITERATIONS, PAPER, SEGMENT):
    """`sinkhorn_bwd_tile` on ``[tokens, 8, 8]``; ``inside`` marks the n*n matrix, ``column`` counts the columns."""
    STEPS = 2 * ITERATIONS - (0 if PAPER else 1)
    SEGMENTS = (STEPS + SEGMENT - 1) // SEGMENT
    LAST = (SEGMENTS - 1) * SEGMENT
    start = _wide_start(logits, inside, column, n, PAPER)
    first = start if PAPER else ct.where(inside, start + eps, 0.0)
    y, kept = _wide_kept_steps(_wide_pairs(first, LAST // 2, eps, PAPER), eps, PAPER, STEPS - LAST)
    p = _wide_undo_steps(grad * y, y, kept, eps, PAPER, STEPS - LAST)
    for segment in ct.static_iter(range(SEGMENTS - 2, -1, -1)):
        y, kept = _wide_kept_steps(
            _wide_pairs(first, segment * (SEGMENT // 2), eps, PAPER), eps, PAPER, SEGMENT
        )
        p = _wide_undo_steps(p, y, kept, eps, PAPER, SEGMENT)
    if PAPER:
        shifted = ct.where(column < n, logits, -float("inf"))
        top = ct.max(shifted, 2, keepdims=True, propagate_nan=True)
        index = ct.min(ct.where(shifted == top, column, 8), 2, keepdims=True)
        result = p - ct.where(column == index, ct.sum(p, 2, keepdims=True), 0.0)
    else:
        weighted = p * (start / (start + eps))
        result = weighted - start * ct.sum(weighted, 2, keepdims=True)
    return result


@kernel
def sinkhorn_fwd_kernel(
    logits_,
    out_,
    stride: ct.ScalarInt64,
    T: ct.ScalarInt64,
    eps: float,
    n: ct.Constant[int],
    ITERATIONS: ct.Constant[int],
    PAPER: ct.Constant[bool],
    SIZE: ct.Constant[int],
    ALIGN: ct.Constant[int],
):
    first = ct.astype(ct.bid(0), ct.int64) * TOKENS
    logits = sinkhorn_load_tile(logits_.get_raw_memory(), first, stride, T, n, SIZE, ALIGN, TOKENS)
    m = sinkhorn_tile(logits, eps, n, ITERATIONS, PAPER)
    sinkhorn_store_tile(out_.get_raw_memory(), m, first, T, n, SIZE, TOKENS)


@kernel
def sinkhorn_bwd_kernel(
    grad_,
    logits_,
    out_,
    grad_stride: ct.ScalarInt64,
    stride: ct.ScalarInt64,
    T: ct.ScalarInt64,
    eps: float,
    n: ct.Constant[int],
    ITERATIONS: ct.Constant[int],
    PAPER: ct.Constant[bool],
    SIZE: ct.Constant[int],
    ALIGN: ct.Constant[int],
):
    first = ct.astype(ct.bid(0), ct.int64) * TOKENS
    grad = sinkhorn_load_tile(grad_.get_raw_memory(), first, grad_stride, T, n, SIZE, ALIGN, TOKENS)
    logits = sinkhorn_load_tile(logits_.get_raw_memory(), first, stride, T, n, SIZE, ALIGN, TOKENS)
    result = sinkhorn_bwd_tile(grad, logits, eps, n, ITERATIONS, PAPER, SEGMENT)
    sinkhorn_store_tile(out_.get_raw_memory(), result, first, T, n, SIZE, TOKENS)


def _wide_entries(token, T, n):
    """Of ``[tokens, 8, 8]``: every entry's offset in a contiguous matrix, which belong to one, which to a token."""
    row = ct.arange(8, dtype=ct.int64)
    inside = ((row < n)[:, None] & (row < n)[None, :])[None, :, :]
    return (row[:, None] * n + row[None, :])[None, :, :], inside, inside & (token < T)[:, None, None]


def _wide_load(memory, rows, entry, mask):
    return widen(memory.load_offset(rows[:, None, None] + entry, mask=mask, padding_value=0))


@kernel
def sinkhorn_wide_fwd_kernel(
    logits_,
    out_,
    stride: ct.ScalarInt64,
    T: ct.ScalarInt64,
    eps: float,
    n: ct.Constant[int],
    ITERATIONS: ct.Constant[int],
    PAPER: ct.Constant[bool],
):
    token = ct.astype(ct.bid(0), ct.int64) * WIDE_TOKENS + ct.arange(WIDE_TOKENS, dtype=ct.int64)
    entry, inside, mask = _wide_entries(token, T, n)
    column = ct.arange(8, dtype=ct.int32)[None, None, :]
    out = out_.get_raw_memory()
    logits = _wide_load(logits_.get_raw_memory(), token * stride, entry, mask)
    result = sinkhorn_wide_tile(logits, inside, column, eps, n, ITERATIONS, PAPER)
    out.store_offset((token * (n * n))[:, None, None] + entry, ct.astype(result, out.dtype), mask=mask)


@kernel
def sinkhorn_wide_bwd_kernel(
    grad_,
    logits_,
    out_,
    grad_stride: ct.ScalarInt64,
    stride: ct.ScalarInt64,
    T: ct.ScalarInt64,
    eps: float,
    n: ct.Constant[int],
    ITERATIONS: ct.Constant[int],
    PAPER: ct.Constant[bool],
):
    token = ct.astype(ct.bid(0), ct.int64) * WIDE_TOKENS + ct.arange(WIDE_TOKENS, dtype=ct.int64)
    entry, inside, mask = _wide_entries(token, T, n)
    column = ct.arange(8, dtype=ct.int32)[None, None, :]
    out = out_.get_raw_memory()
    grad = _wide_load(grad_.get_raw_memory(), token * grad_stride, entry, mask)
    logits = _wide_load(logits_.get_raw_memory(), token * stride, entry, mask)
    result = sinkhorn_wide_bwd_tile(grad, logits, inside, column, eps, n, ITERATIONS, PAPER, SEGMENT)
    out.store_offset((token * (n * n))[:, None, None] + entry, ct.astype(result, out.dtype), mask=mask)


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
    numbers, constants = (stride, count, eps), (n, num_iterations, variant == "paper")
    if n > MAX_REGISTER_STREAMS:
        _wide_fwd((-(-count // WIDE_TOKENS),), (logits, out), numbers, constants)
    else:
        layout = (power_of_two(n * n), alignment(stride))
        _fwd((-(-count // TOKENS),), (logits, out), numbers, (*constants, *layout))
    return out


def sinkhorn_bwd(grad: Tensor, input_logits: Tensor, num_iterations: int, eps: float, variant: str) -> Tensor:
    n = input_logits.shape[-1]
    out = torch.empty(input_logits.shape, dtype=input_logits.dtype, device=input_logits.device)
    count = input_logits.numel() // (n * n)
    if count == 0:
        return out
    grad, grad_stride = flatten(grad, 2, dense=True)
    logits, stride = flatten(input_logits, 2, dense=True)
    numbers, constants = (grad_stride, stride, count, eps), (n, num_iterations, variant == "paper")
    if n > MAX_REGISTER_STREAMS:
        _wide_bwd((-(-count // WIDE_TOKENS),), (grad, logits, out), numbers, constants)
    else:
        layout = (power_of_two(n * n), alignment(grad_stride, stride))
        _bwd((-(-count // TOKENS),), (grad, logits, out), numbers, (*constants, *layout))
    return out
