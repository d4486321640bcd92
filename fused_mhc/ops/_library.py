"""How every operation meets torch: one library, functional custom ops, explicit backwards.

A custom op here is a schema, a fake and one body that asks `dispatch.resolve` for the backend's host function. Its
last arguments are always ``str backend`` (the policy, resolved when the op runs). A backward op takes
``bool[] needs`` and returns only the gradients that are needed, so frozen inputs cost nothing; it has no derivative
of its own and says so when one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import dispatch

__all__ = ["compute_dtype", "define", "needed", "refuse_second_order", "spread", "with_backward"]

_LIBRARY = torch.library.Library("fused_mhc", "DEF")


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 if any tensor is fp64, else fp32; None is passed over."""
    for t in tensors:
        if t is not None and t.dtype is torch.float64:
            return torch.float64
    return torch.float32


def define(
    op: str,
    direction: str,
    schema: str,
    fake: Callable[..., Any],
    streams: Callable[..., int] | None = None,
) -> Callable[..., Any]:
    """Register ``fused_mhc::<op>_<direction>`` and return what calls it.

    Args:
        op: key of `dispatch.OPERATIONS`.
        direction: ``"fwd"`` or ``"bwd"``.
        schema: arguments and returns; the last argument is ``str backend``, or ``str backend, str schedule``.
        fake: shapes and dtypes of the results, from the same arguments.
        streams: number of streams from the same arguments (without the policy ones); None where there is none.
    """
    name = f"{op}_{direction}"
    scheduled = "str schedule" in schema
    policies = 2 if scheduled else 1

    def body(*args: Any) -> Any:
        call = args[:-policies]
        schedule = args[-1] if scheduled else "fused"
        device, double = None, False
        for a in call:
            if isinstance(a, Tensor):
                device = device or a.device
                double = double or a.dtype is torch.float64
        assert device is not None  # every operation takes a tensor
        n = streams(*call) if streams is not None else None
        host = dispatch.resolve(op, direction, args[-policies], device, n, double, schedule)
        if torch.is_autocast_enabled(device.type):
            # The body of a custom op still sees autocast; the mapping must not.
            with torch.autocast(device.type, enabled=False):
                return host(*call)
        return host(*call)

    _LIBRARY.define(name + schema)
    torch.library.impl(_LIBRARY, name, "CompositeExplicitAutograd")(body)
    torch.library.register_fake(f"fused_mhc::{name}", fake, lib=_LIBRARY)
    overload: Callable[..., Any] = getattr(torch.ops.fused_mhc, name).default
    if direction == "bwd":
        torch.library.register_autograd(f"fused_mhc::{name}", _raising_backward(op), lib=_LIBRARY)
    return _short_cut(overload)


def _short_cut(overload: Callable[..., Any]) -> Callable[..., Any]:
    """``overload``, past torch's Python layer for autograd (a quarter of a small call's host time) where no gradient is
    wanted."""

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return overload(*args)
        if torch.is_grad_enabled():
            for a in args:
                if isinstance(a, Tensor) and a.requires_grad:
                    return overload(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    return call


def with_backward(op: str, setup: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Give ``fused_mhc::<op>_fwd`` its backward. Gradients of unused results arrive as None."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        setup(ctx, inputs, output)

    torch.library.register_autograd(
        f"fused_mhc::{op}_fwd", backward, setup_context=setup_context, lib=_LIBRARY
    )


def _second_order_error(op: str) -> RuntimeError:
    return RuntimeError(
        f"{op}: second-order gradients are not supported (the backward has no derivative); "
        "call backward without create_graph=True"
    )


def _raising_backward(op: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _second_order_error(op)

    return backward


class _Once(torch.autograd.Function):
    """Identity whose derivative is an error: marks a gradient that must not be differentiated again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, op: str) -> Tensor:
        ctx.op = op
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _second_order_error(ctx.op)


def refuse_second_order(grad: Tensor, op: str) -> Tensor:
    """``grad`` itself, marked so that differentiating it again is a clear error (no copy, no cost otherwise)."""
    if torch.is_grad_enabled() and grad.requires_grad:
        marked: Tensor = _Once.apply(grad, op)
        return marked
    return grad


def needed(ctx: Any, count: int, *grads: Tensor | None) -> list[bool]:
    """Which of the first ``count`` inputs want a gradient; none when no gradient came in."""
    if all(g is None for g in grads):
        return [False] * count
    return list(ctx.needs_input_grad[:count])


def spread(grads: Sequence[Tensor], needs: Sequence[bool], total: int) -> tuple[Tensor | None, ...]:
    """Gradients of the needed inputs, with None for every other of ``total`` arguments."""
    rest: Iterator[Tensor] = iter(grads)
    return tuple(next(rest) if i < len(needs) and needs[i] else None for i in range(total))
