"""How near is near enough: every tolerance of the suite, each with its reason.

Where two computations do the same sums in the same order they are compared bit by bit (`assert_bit_equal`).
Everywhere else the reference is the fp64 transcription on the same, already rounded, inputs, and an element may
differ from it by

    rounding(reference, dtype) + factor * scale

- `rounding`: storing the result rounds it once to nearest: half a unit in the last place.
- ``factor``: what the computation inside loses, from the compute dtype and the length of the sums (`factor`).
- ``scale``: what those losses are relative to. For a sum it is the sum of the absolute terms (a sum that cancels
  keeps the error of its terms); where no such sum is at hand, the largest element of the tensor. The gradient of a
  normalisation cancels most of what flows into it: the scale is taken before it does.

fp64 is held to 1e-12 of the scale, whatever the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .inputs import Operation, Shape

__all__ = [
    "Difference",
    "Evaluation",
    "assert_bit_equal",
    "assert_near",
    "bit_equal",
    "difference",
    "evaluate",
    "factor",
    "oracle",
    "projection_error",
    "rounding",
]

#: fp64 against fp64, relative to the scale: some thousand roundings of 1.1e-16.
DOUBLE = 1e-12


def projection_error(width: int, precision: str = "fp32") -> float:
    """What ``x @ weight.T`` may lose, relative to the largest product.

    fp32: 4e-6 up to K = 16384 and 8e-6 above (the contract; partial sums of about 1024 terms give it). tf32: each
    factor is rounded to 11 bits, 2^-12 apiece, and the terms' errors add like their sum: 2^-11.
    """
    if precision == "tf32":
        return 2.0**-11
    return 4e-6 if width <= 16384 else 8e-6


def rounding(reference: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a unit in the last place of ``dtype`` at each element (half a subnormal step near zero)."""
    info = torch.finfo(dtype)
    return (reference.abs() * (info.eps / 2)).clamp(min=info.smallest_normal * info.eps / 2)


def _sum_lengths(op: str, name: str, shape: Shape) -> int:
    """The longest sum behind a result, or behind the gradient of an argument, of an operation that only adds and
    multiplies."""
    n, width, tokens = shape.n, shape.hidden_size, shape.tokens
    lengths = {
        "h_aggregate": {"layer_input": n, "x": 1, "h_pre": width},
        "h_post_bda": {
            "out": n + 1,
            "h_res": width,
            "original_residual": n,
            "h_post": width,
            "x": n,
            "bias": n * tokens,
        },
        "fused_add_3": {"out": 3, "a": 1, "b": 1, "c": 1},
        "input_expand": {"out": 1, "x": n},
        "output_contract": {"out": n, "x": 1},
    }
    return lengths[op][name]


def _sinkhorn_factor(num_iterations: int, n: int, eps: float, gradient: bool) -> float:
    """Each normalisation rounds twice (sum, quotient), and what it does to whole rows and columns the next one mends,
    so roundings add up, they do not multiply: two a step, n for the sums, 8 for the exponential of a logit of up to
    about 8. The backward runs the steps again and undoes them: twice as many of each."""
    return (4.0 if gradient else 2.0) * (2 * num_iterations + n + 8) * eps


def factor(op: Operation, name: str, shape: Shape, options: Mapping[str, Any], gradient: bool) -> float:
    """The error of fp32 computation relative to the scale, for result ``name`` or the gradient of argument ``name``.

    - Only sums and products: ``(length + 2)`` units of 2^-23, an upper bound for every order of the sum (one rounding
      per product and per addition, two spare for a scaling such as that of dropout).
    - Sinkhorn: see `_sinkhorn_factor`.
    - Behind a projection: `projection_error` once in a forward. In a backward the saved product, the derivative of the
      sigmoid at it, the reciprocal rms with its own gradient, and the last product each bring it once: four times.
      Added to that are the sums over streams (forward), over C or over tokens (backward), and the factor of a Sinkhorn
      (in a backward always: where none lies in the path it is small beside the rest).
    """
    eps = torch.finfo(torch.float32).eps
    if op.linear:
        return (_sum_lengths(op.name, name, shape) + 2) * eps
    iterations = int(options.get("num_iterations", options.get("num_iters", 20)))
    sinkhorn = _sinkhorn_factor(iterations, shape.n, eps, gradient)
    if op.name == "sinkhorn":
        return sinkhorn
    product = projection_error(shape.width, str(options.get("precision", "fp32")))
    if not gradient:
        normalised = name == "next_residual_mix" or (op.name, name) == ("mhc_pre", "h_res")
        return product + (shape.n + 2) * eps + (sinkhorn if normalised else 0.0)
    length = shape.tokens if name in op.shared else shape.hidden_size
    return 4 * product + (length + 2) * eps + sinkhorn


@dataclass(frozen=True)
class Evaluation:
    """Results of one call and the gradients of its tensor arguments, by name."""

    results: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def evaluate(
    function: Callable[..., Any],
    names: tuple[str, ...],
    tensors: Mapping[str, Tensor | None],
    options: Mapping[str, Any],
    cotangents: Mapping[str, Tensor] | None = None,
) -> Evaluation:
    """Call ``function`` on fresh leaves and differentiate it.

    Args:
        function: called with every argument by name.
        names: of its results.
        tensors: the arguments to differentiate; None is handed through.
        options: the other arguments.
        cotangents: gradients of the results, by name; None: forward only.
    """
    leaves = {
        name: None if t is None else t.detach().requires_grad_(cotangents is not None)
        for name, t in tensors.items()
    }
    out = function(**leaves, **options)
    results = dict(zip(names, out if isinstance(out, tuple) else (out,), strict=True))
    if cotangents is None:
        return Evaluation(results, {})
    wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    used = [name for name in results if name in cotangents and results[name].requires_grad]
    grads = torch.autograd.grad(
        [results[name] for name in used],
        list(wanted.values()),
        [cotangents[name] for name in used],
        allow_unused=True,
    )
    detached = {name: t.detach() for name, t in results.items()}
    return Evaluation(detached, dict(zip(wanted, grads, strict=True)))


@dataclass(frozen=True)
class Oracle:
    """fp64 values and their scales, by name, of results and gradients."""

    exact: Evaluation
    scales: Evaluation


def _largest(t: Tensor) -> Tensor:
    """The largest absolute value, spread over the tensor's shape."""
    return (t.abs().max() if t.numel() else t.new_zeros(())).expand(t.shape)


def oracle(
    op: Operation,
    shape: Shape,
    tensors: Mapping[str, Tensor | None],
    options: Mapping[str, Any],
    cotangents: Mapping[str, Tensor] | None = None,
    rounded: Tensor | None = None,
) -> Oracle:
    """The transcription of ``op`` in fp64 and the scale of every result and gradient.

    A shared parameter is spread over the tokens first, so that its gradient comes as one term a token: the sum is the
    gradient, the sum of absolute values its scale.

    Args:
        op, shape, tensors, options: the call.
        cotangents: gradients of the results; None: forward only.
        rounded: the new residual as the backend stored it (single pass).
    """
    double = {name: None if t is None else t.detach().double() for name, t in tensors.items()}
    grads = None if cotangents is None else {name: g.double() for name, g in cotangents.items()}
    extra = {} if rounded is None else {"rounded": rounded.double()}

    def run(given: Mapping[str, Tensor | None], out: Mapping[str, Tensor] | None, **more: Any) -> Evaluation:
        spread = {
            name: t if t is None or name not in op.shared else t.expand(*shape.lead, *t.shape)
            for name, t in given.items()
        }
        return evaluate(op.reference, op.results, spread, {**options, **extra, **more}, out)

    def summed(evaluation: Evaluation, absolute: bool) -> dict[str, Tensor | None]:
        gradients = dict(evaluation.gradients)
        for name in op.shared:
            terms = gradients.get(name)
            if terms is not None:
                terms = terms.abs() if absolute else terms
                gradients[name] = terms.flatten(0, len(shape.lead) - 1).sum(0) if shape.lead else terms
        return gradients

    found = run(double, grads)
    exact = Evaluation(found.results, summed(found, False))
    if op.linear:
        positive = run(
            {name: None if t is None else t.abs() for name, t in double.items()},
            None if grads is None else {name: g.abs() for name, g in grads.items()},
        )
        return Oracle(exact, Evaluation(positive.results, summed(positive, True)))
    scales = summed(found, True)
    if op.normalises and cotangents is not None:
        for name, terms in summed(run(double, grads, frozen_rms=True), True).items():
            known = scales[name]
            if terms is not None:
                scales[name] = terms if known is None else torch.maximum(known.abs(), terms.abs())
    return Oracle(
        exact,
        Evaluation(
            {name: _largest(t) for name, t in found.results.items()},
            {name: None if t is None else _largest(t) for name, t in scales.items()},
        ),
    )


@dataclass(frozen=True)
class Difference:
    """The worst element of a comparison: how far off it is and how far it may be."""

    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        """Error over bound; 0 where there is no error at all."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.bound if self.bound > 0.0 else math.inf


def difference(actual: Tensor, exact: Tensor, scale: Tensor, factor: float) -> Difference:
    """The element of ``actual`` that uses up most of what it may differ from the finite ``exact``."""
    assert actual.shape == exact.shape, f"shapes differ: {tuple(actual.shape)} and {tuple(exact.shape)}"
    if actual.numel() == 0:
        return Difference(0.0, 0.0)
    exact, scale = exact.detach().cpu(), scale.detach().cpu()
    error = (actual.detach().cpu().double() - exact).abs()
    error = torch.where(torch.isfinite(error), error, math.inf)
    if actual.dtype is torch.float64:
        bound = DOUBLE * scale
    else:
        bound = rounding(exact, actual.dtype) + factor * scale
    bound = torch.broadcast_to(bound, error.shape)
    ratio = torch.where(error == 0.0, 0.0, error / bound)
    worst = int(torch.where(torch.isnan(ratio), math.inf, ratio).argmax())
    return Difference(float(error.flatten()[worst]), float(bound.flatten()[worst]))


def bit_equal(a: Tensor, b: Tensor) -> bool:
    """Same dtype, same shape, same bits (a NaN equals itself, -0 differs from 0)."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    kind = integers[a.element_size()]
    return torch.equal(a.detach().contiguous().view(kind), b.detach().contiguous().view(kind))


def assert_bit_equal(actual: Tensor, expected: Tensor, name: str = "result") -> None:
    """Raise AssertionError that says what differs unless `bit_equal`."""
    if bit_equal(actual, expected):
        return
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{name}: {actual.dtype} {tuple(actual.shape)} is not {expected.dtype} {tuple(expected.shape)}"
        )
    off = (actual.detach().double() - expected.detach().double()).abs()
    count = int((actual != expected).sum())
    raise AssertionError(
        f"{name}: {count} of {actual.numel()} elements differ, the largest by {off.max():.3e}"
    )


def assert_near(
    actual: Tensor, exact: Tensor, factor: float, name: str = "result", scale: Tensor | None = None
) -> None:
    """Raise AssertionError unless every element is within `rounding` and ``factor`` times ``scale`` (default: the
    largest element) of ``exact``."""
    exact = exact.double()
    found = difference(actual, exact, _largest(exact) if scale is None else scale, factor)
    assert found.ok, f"{name}: off by {found.error:.3e}, allowed {found.bound:.3e}"
