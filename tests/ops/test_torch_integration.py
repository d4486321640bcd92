"""Custom ops under torch's own machinery: opcheck, torch.compile, checkpointing, second-order gradients."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fused_mhc import fused_h_post_bda, mhc_pre
from fused_mhc.testing.compare import assert_bit_equal, evaluate
from fused_mhc.testing.inputs import CATALOGUE, Mode, Operation, Shape, make_cotangents, make_tensors

CALLS = [
    pytest.param(name, mode, id=f"{name}[{mode.label}]" if mode.label else name)
    for name, op in CATALOGUE.items()
    for mode in op.modes
]


class _Recorder(TorchDispatchMode):
    """Arguments of every custom op of the library that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fused_mhc":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def _record(op: Operation, mode: Mode, shape: Shape, dtype: torch.dtype, device: str) -> list[Any]:
    options = op.options(mode, shape)
    tensors = make_tensors(op.name, shape, dtype, mode=mode, device=device)
    with _Recorder() as recorder:
        results = evaluate(op.function, op.results, tensors, options).results
        evaluate(op.function, op.results, tensors, options, make_cotangents(results))
    return recorder.calls


def test_the_catalogue_reaches_every_custom_op(device: str) -> None:
    seen = {
        func._schema.name.removeprefix("fused_mhc::")
        for op in CATALOGUE.values()
        for func, _ in _record(op, op.modes[0], Shape((2,), 2, 4), torch.float32, device)
    }
    registered = {
        name.removeprefix("fused_mhc::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fused_mhc::")
    }
    assert seen == registered


@pytest.mark.parametrize(("name", "mode"), CALLS)
def test_opcheck(name: str, mode: Mode, device: str) -> None:
    """Schema, fake, autograd registration and tracing of each custom op, with the arguments of a real call."""
    op = CATALOGUE[name]
    checked = set()
    for shape, dtype in ((Shape((2, 3), 3, 5), torch.bfloat16), (Shape((0,), 4, 4), torch.float32)):
        for func, args in _record(op, mode, shape, dtype, device):
            # Differentiated are the forwards that have a backward registered; mhc_pre hangs on an autograd.Function.
            leaves = "_fwd" in func._schema.name and name != "mhc_pre"
            given = tuple(
                a.detach().clone().requires_grad_(leaves and a.is_floating_point())
                if isinstance(a, Tensor)
                else a
                for a in args
            )
            torch.library.opcheck(func, given)
            checked.add(func._schema.name)
    assert checked


def test_opcheck_with_strided_arguments(device: str) -> None:
    """The fakes give the strides that the ops give, whatever strides the arguments have."""
    for op in CATALOGUE.values():
        for func, args in _record(op, op.modes[0], Shape((5,), 4, 6), torch.float32, device):
            given = tuple(
                a.transpose(-1, -2).contiguous().transpose(-1, -2)
                if isinstance(a, Tensor) and a.dim() > 1
                else a
                for a in args
            )
            torch.library.opcheck(func, given, test_utils=("test_schema", "test_faketensor"))


def _step(op: Operation, mode: Mode, shape: Shape) -> Callable[..., Any]:
    """Forward of ``op`` as a function of its tensors alone."""
    function, options = op.function, op.options(mode, shape)

    def step(**tensors: Tensor | None) -> Any:
        return function(**tensors, **options)

    return step


@pytest.mark.parametrize(("name", "mode"), CALLS)
def test_compile(name: str, mode: Mode, device: str) -> None:
    """One graph, forward and backward, the same bits as eager; a new T recompiles once, for the dynamic graph."""
    op = CATALOGUE[name]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_step(op, mode, Shape((7,), 4, 6)), fullgraph=True, backend=counter)
    counts = []
    for tokens in (7, 9, 12, 5):
        shape = Shape((tokens,), 4, 6)
        tensors = make_tensors(name, shape, torch.bfloat16, mode=mode, device=device)
        results = evaluate(op.function, op.results, tensors, op.options(mode, shape)).results
        cotangents = make_cotangents(results)
        expected = evaluate(op.function, op.results, tensors, op.options(mode, shape), cotangents)
        actual = evaluate(compiled, op.results, tensors, {}, cotangents)
        for key, value in actual.results.items():
            assert_bit_equal(value, expected.results[key], key)
        for key, gradient in actual.gradients.items():
            eager = expected.gradients[key]
            if gradient is None or eager is None:
                assert gradient is eager, key
            else:
                assert_bit_equal(gradient, eager, key)
        counts.append(counter.frame_count)
    assert counts[0] == 1
    assert counts[-1] <= 2, f"compilations after each T: {counts}"


#: The default compiler of torch.compile builds C++ on a CPU.
COMPILERS = ["aot_eager", "inductor"] if shutil.which("g++") or torch.cuda.is_available() else ["aot_eager"]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compile_a_sublayer(compiler: str, device: str) -> None:
    """Both ends of a sublayer and elementwise work between them, in one graph."""
    torch._dynamo.reset()
    tensors = make_tensors("mhc_pre", Shape((6,), 4, 8), torch.float32, device=device)

    def sublayer(**given: Tensor | None) -> Tensor:
        layer_input, h_post, h_res, x = mhc_pre(**given)  # type: ignore[arg-type]
        return fused_h_post_bda(h_res, x, h_post, 2.0 * layer_input, dropout_p=0.1, seed=3)

    results = evaluate(sublayer, ("out",), tensors, {}).results
    cotangents = make_cotangents(results)
    expected = evaluate(sublayer, ("out",), tensors, {}, cotangents)
    compiled = torch.compile(sublayer, fullgraph=True, backend=compiler)
    actual = evaluate(compiled, ("out",), tensors, {}, cotangents)
    assert_bit_equal(actual.results["out"], expected.results["out"])
    for key, gradient in actual.gradients.items():
        eager = expected.gradients[key]
        assert gradient is not None
        assert eager is not None
        assert_bit_equal(gradient, eager, key)


@pytest.mark.parametrize(("name", "mode"), CALLS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_is_bit_equal(name: str, mode: Mode, reentrant: bool, device: str) -> None:
    """The recomputed pass gives the same bits; arguments that are no tensors pass through unharmed."""
    op, shape = CATALOGUE[name], Shape((5,), 4, 6)
    options = op.options(mode, shape)
    tensors = make_tensors(name, shape, torch.bfloat16, mode=mode, device=device)
    results = evaluate(op.function, op.results, tensors, options).results
    cotangents = make_cotangents(results)
    expected = evaluate(op.function, op.results, tensors, options, cotangents)
    leaves = {k: None if t is None else t.detach().requires_grad_() for k, t in tensors.items()}

    def run(names: tuple[str, ...], more: dict[str, Any], *values: Tensor | None) -> Any:
        return op.function(**dict(zip(names, values, strict=True)), **more)

    out = checkpoint(run, tuple(leaves), options, *leaves.values(), use_reentrant=reentrant)
    outs = dict(zip(op.results, out if isinstance(out, tuple) else (out,), strict=True))
    torch.autograd.backward(list(outs.values()), [cotangents[k] for k in outs])
    for key, value in outs.items():
        assert_bit_equal(value, expected.results[key], key)
    for key, leaf in leaves.items():
        gradient = expected.gradients.get(key)
        if leaf is not None and gradient is not None:
            assert leaf.grad is not None
            assert_bit_equal(leaf.grad, gradient, key)


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_second_order_gradients_raise(name: str, device: str) -> None:
    """A gradient made with ``create_graph=True`` can be differentiated neither by the incoming gradient nor by what
    the backward has saved; it says so instead of dropping a term."""
    op, shape = CATALOGUE[name], Shape((3,), 3, 4)
    options = op.options(op.modes[0], shape)
    tensors = make_tensors(name, shape, torch.float32, device=device)
    leaves = {k: t.detach().requires_grad_() for k, t in tensors.items() if t is not None}
    out = op.function(**leaves, **options)
    results = dict(zip(op.results, out if isinstance(out, tuple) else (out,), strict=True))
    cotangents = {k: g.requires_grad_() for k, g in make_cotangents(results).items()}
    gradients = torch.autograd.grad(
        list(results.values()), list(leaves.values()), list(cotangents.values()), create_graph=True
    )
    # The linear ones save nothing: their gradients depend on the incoming one alone.
    linear = name in ("fused_add_3", "input_expand", "output_contract")
    for argument, gradient in zip(leaves, gradients, strict=True):
        assert gradient.requires_grad, argument
        targets = list(cotangents.values()) if linear else [*cotangents.values(), *leaves.values()]
        for target in targets:
            with pytest.raises(RuntimeError, match="second-order gradients are not supported"):
                torch.autograd.grad(gradient.sum(), target, retain_graph=True)


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_a_gradient_penalty_raises(name: str, device: str) -> None:
    """The usual form of the mistake: a loss of the squared gradient."""
    op, shape = CATALOGUE[name], Shape((3,), 3, 4)
    tensors = make_tensors(name, shape, torch.float32, device=device)
    leaves = {k: t.detach().requires_grad_() for k, t in tensors.items() if t is not None}
    out = op.function(**leaves, **op.options(op.modes[0], shape))
    loss = sum((t.float() ** 2).sum() for t in (out if isinstance(out, tuple) else (out,)))
    gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    penalty = sum((g**2).sum() for g in gradients)
    with pytest.raises(RuntimeError, match="second-order gradients are not supported"):
        penalty.backward()
