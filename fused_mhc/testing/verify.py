"""Every operation on every backend against fp64: what ``fused-mhc verify`` and the parity tests run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import FLOAT_DTYPES, check_backend, check_choice
from ..dispatch import OPERATIONS, backend_status
from ..errors import BackendError
from .compare import Difference, difference, evaluate, factor, oracle
from .inputs import CATALOGUE, Mode, Operation, Shape, make_cotangents, make_tensors

__all__ = ["SHAPES", "VerifyCase", "VerifyRow", "forced", "plan_verify", "run_case", "run_verify"]

#: Odd on purpose: no tokens, one token, more than one leading dimension, sizes that no tile divides, every kind of n.
SHAPES = (
    Shape((0,), 4, 8),
    Shape((1,), 1, 1),
    Shape((7,), 4, 64),
    Shape((2, 3), 3, 37),
    Shape((5,), 2, 5),
    Shape((3,), 5, 24),
    Shape((2,), 8, 33),
    Shape((67,), 4, 130),
)


@dataclass(frozen=True)
class VerifyRow:
    """One comparison: the worst element of all results (``direction`` ``"fwd"``) or gradients (``"bwd"``).

    Attributes:
        op: operation, with the mode in brackets where it has several.
        backend: what ran it.
        direction: ``"fwd"`` or ``"bwd"``.
        dtype: of the streams.
        shape: in words.
        result: the result, or the argument whose gradient it is, that came nearest to its bound.
        error: how far that element is from fp64.
        bound: how far it may be.
        ok: error <= bound.
    """

    op: str
    backend: str
    direction: str
    dtype: str
    shape: str
    result: str
    error: float
    bound: float
    ok: bool

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class VerifyCase:
    """One operation in one mode, on one backend, in one dtype and shape; forward and backward."""

    op: str
    mode: Mode
    backend: str
    dtype: torch.dtype
    shape: Shape

    def __str__(self) -> str:
        mode = f"[{self.mode.label}]" if self.mode.label else ""
        return f"{self.op}{mode} {self.backend} {str(self.dtype).removeprefix('torch.')} {self.shape}"


@contextlib.contextmanager
def forced(backend: str) -> Iterator[None]:
    """Run operations on ``backend`` inside, also those that take no backend argument."""
    before = os.environ.get("MHC_FORCE_BACKEND")
    os.environ["MHC_FORCE_BACKEND"] = backend
    try:
        yield
    finally:
        if before is None:
            del os.environ["MHC_FORCE_BACKEND"]
        else:
            os.environ["MHC_FORCE_BACKEND"] = before


def _lacking(backend: str, device: torch.device) -> dict[str, str]:
    """The operations that ``backend`` cannot run on ``device`` in both directions, and why."""
    with forced(backend):
        rows = backend_status(backend, device)
    return {row.op: row.reasons[backend] for row in rows if row.chosen != backend}


def plan_verify(
    backends: Sequence[str] | None = None,
    ops: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
    shapes: Sequence[Shape] = SHAPES,
) -> list[VerifyCase]:
    """The cases that can run here. See `run_verify`."""
    where = torch.device(device)
    for name in ops or ():
        check_choice("ops", name, tuple(OPERATIONS))
    for name in backends or ():
        check_backend(name)
        check_choice("backends", name, ("native", "triton", "cutile"))
    cases = []
    for backend in backends or ("native", "triton", "cutile"):
        lacking = _lacking(backend, where)
        able = [op for op in ops or OPERATIONS if op not in lacking]
        if not able and backends:
            reasons = "; ".join(sorted(set(lacking.values())))
            raise BackendError(f"backend {backend!r} cannot run what was asked for on {where}: {reasons}")
        for op in able:
            for mode in CATALOGUE[op].modes:
                for dtype in FLOAT_DTYPES:
                    if dtype is torch.float64 and backend != "native":
                        continue  # fp64 is native's alone
                    cases += [VerifyCase(op, mode, backend, dtype, shape) for shape in shapes]
    return cases


def stored_residual(
    op: Operation, tensors: dict[str, Tensor | None], shape: Shape, results: dict[str, Tensor]
) -> Tensor | None:
    """The new residual that a single-pass operation rounded and read, or None for the others.

    `mega_mhc_exit` does not hand it out; `mega_mhc` takes the same first step and does.
    """
    if op.name == "mega_mhc":
        return results["new_residual"]
    if op.name != "mega_mhc_exit":
        return None
    residual = tensors["residual"]
    assert residual is not None
    dtype = torch.float64 if residual.dtype is torch.float64 else torch.float32
    zeros = residual.new_zeros(shape.logits, shape.width, dtype=dtype)
    stored: Tensor = CATALOGUE["mega_mhc"].function(
        **{name: t.detach() for name, t in tensors.items() if t is not None and name != "norm_weight"},
        phi=zeros,
        alpha=zeros.new_zeros(3),
        bias=zeros.new_zeros(shape.logits),
        norm_weight=None,
    )[0]
    return stored


def run_case(case: VerifyCase, device: torch.device | str = "cpu", seed: int = 0) -> list[VerifyRow]:
    """Forward and backward of one case against fp64: two rows."""
    op, shape = CATALOGUE[case.op], case.shape
    options = op.options(case.mode, shape)
    tensors = make_tensors(op.name, shape, case.dtype, mode=case.mode, device=device, seed=seed)
    with forced(case.backend):
        forward = evaluate(op.function, op.results, tensors, options)
        cotangents = make_cotangents(forward.results, seed + 1)
        actual = evaluate(op.function, op.results, tensors, options, cotangents)
        rounded = stored_residual(op, tensors, shape, actual.results)
    expected = oracle(op, shape, tensors, options, cotangents, rounded)

    def worst(direction: str) -> VerifyRow:
        gradient = direction == "bwd"
        values, exact, scales = (
            (e.gradients if gradient else e.results) for e in (actual, expected.exact, expected.scales)
        )
        found: list[tuple[str, Difference]] = []
        for name, value in values.items():
            reference, scale = exact[name], scales[name]
            assert value is not None, name
            assert reference is not None, name
            assert scale is not None, name
            allowed = factor(op, name, shape, options, gradient)
            found.append((name, difference(value, reference, scale, allowed)))
        name, furthest = max(found, key=lambda pair: pair[1].ratio)
        return VerifyRow(
            op=op.name + (f"[{case.mode.label}]" if case.mode.label else ""),
            backend=case.backend,
            direction=direction,
            dtype=str(case.dtype).removeprefix("torch."),
            shape=str(shape),
            result=name,
            error=furthest.error,
            bound=furthest.bound,
            ok=furthest.ok,
        )

    return [worst("fwd"), worst("bwd")]


def run_verify(
    backends: Sequence[str] | None = None,
    ops: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> list[VerifyRow]:
    """Compare every operation with fp64, forward and backward, on every backend that can run it.

    Args:
        backends: of ``"native"``, ``"triton"``, ``"cutile"``; default: all that can run. What one of them cannot run in
            both directions on ``device`` is left out.
        ops: keys of `OPERATIONS`; default: all.
        device: where the tensors lie. Default ``"cpu"``.
        progress: called before every case with a line that says which.

    Returns:
        Two rows (forward, backward) for each operation, mode, backend, dtype (fp16, bf16, fp32, and fp64 on native)
        and shape of `SHAPES`.

    Raises:
        InputError: an unknown operation or backend.
        BackendError: a backend asked for by name can run none of the operations.
    """
    cases = plan_verify(backends, ops, device)
    rows: list[VerifyRow] = []
    for index, case in enumerate(cases):
        if progress is not None:
            progress(f"{index + 1} of {len(cases)}: {case}")
        rows += run_case(case, device)
    return rows
