"""What every operation promises beside its formula: dtypes, shapes, strides, frozen inputs, equal bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fused_mhc.testing.compare import assert_bit_equal, assert_near, evaluate, projection_error
from fused_mhc.testing.inputs import CATALOGUE, Operation, Shape, Tensors, make_cotangents, make_tensors

OPS = list(CATALOGUE)
#: Results behind the projection's product, the one sum that native leaves to a library.
BEHIND_PRODUCT = {
    "proj_rms_compute_h": ("h_pre", "h_post", "h_res"),
    "learned_output_contract": ("out",),
    "mhc_pre": ("layer_input", "h_post", "h_res"),
    "mega_mhc": ("next_pre_mix", "next_post_mix", "next_residual_mix"),
    "mega_mhc_entry": ("next_pre_mix", "next_post_mix", "next_residual_mix"),
}
#: The dtype that a result takes: an argument's, or the compute dtype (the first of its argument and fp32).
RESULT_DTYPE = {
    "sinkhorn": {"h_res": "input_logits"},
    "h_aggregate": {"layer_input": "x"},
    "h_post_bda": {"out": "original_residual"},
    "proj_rms_compute_h": dict.fromkeys(("h_pre", "h_post", "h_res", "r"), "compute"),
    "fused_add_3": {"out": "a"},
    "input_expand": {"out": "x"},
    "output_contract": {"out": "x"},
    "learned_output_contract": {"out": "x"},
    "mhc_pre": {"layer_input": "x", "h_post": "compute", "h_res": "compute", "x": "x"},
    "mega_mhc": {
        "new_residual": "residual",
        "next_pre_mix": "compute",
        "next_post_mix": "compute",
        "next_residual_mix": "compute",
        "block_input": "residual",
    },
    "mega_mhc_entry": {
        "new_residual": "x",
        "next_pre_mix": "compute",
        "next_post_mix": "compute",
        "next_residual_mix": "compute",
        "block_input": "x",
    },
    "mega_mhc_exit": {"out": "residual"},
}


def call(op: Operation, tensors: Tensors, shape: Shape, gradients: bool = True) -> dict[str, Tensor]:
    """Results and gradients of the first mode in one dictionary, gradients under ``"gradient of <name>"``."""
    options = op.options(op.modes[0], shape)
    results = evaluate(op.function, op.results, tensors, options).results
    if not gradients:
        return results
    found = evaluate(op.function, op.results, tensors, options, make_cotangents(results))
    return found.results | {f"gradient of {k}": g for k, g in found.gradients.items() if g is not None}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert_bit_equal(value, expected[name], name)


def mixed(tensors: Tensors, choose: Callable[[int], torch.dtype]) -> Tensors:
    return {k: None if t is None else t.to(choose(i)) for i, (k, t) in enumerate(tensors.items())}


@pytest.mark.parametrize("name", OPS)
def test_dtypes_of_results_and_gradients(name: str, device: str, dtypes: list[torch.dtype]) -> None:
    """For every pair of dtypes, dealt out to the arguments in two ways."""
    op, shape = CATALOGUE[name], Shape((3,), 2, 4)
    made = make_tensors(name, shape, torch.float32, device=device)
    for first, second in itertools.product(dtypes, dtypes):
        for tensors in (
            mixed(made, lambda i, a=first, b=second: a if i == 0 else b),
            mixed(made, lambda i, a=first, b=second: b if i % 2 else a),
        ):
            present = {k: t for k, t in tensors.items() if t is not None}
            double = any(t.dtype is torch.float64 for t in present.values())
            compute = torch.float64 if double else torch.float32
            found = call(op, tensors, shape)
            for result, source in RESULT_DTYPE[name].items():
                expected = compute if source == "compute" else present[source].dtype
                assert found[result].dtype is expected, (result, first, second)
            for argument, t in present.items():
                gradient = found[f"gradient of {argument}"]
                assert gradient.dtype is t.dtype, (argument, first, second)
                assert gradient.shape == t.shape, argument


@pytest.mark.parametrize("name", OPS)
def test_mixed_dtypes_change_no_value(name: str, device: str) -> None:
    """bf16 is exact in fp32: a bf16 argument gives the results of the same numbers in fp32, but for the rounding of
    what takes its dtype."""
    op, shape = CATALOGUE[name], Shape((5,), 4, 8)
    made = make_tensors(name, shape, torch.bfloat16, mixes=torch.bfloat16, device=device)
    wide = mixed(made, lambda i: torch.float32)
    narrow_results, wide_results = call(op, made, shape, False), call(op, wide, shape, False)
    for result, source in RESULT_DTYPE[name].items():
        if name == "mega_mhc" and result != "new_residual":
            continue  # the rest reads the new residual as it was rounded
        expected = wide_results[result]
        if source != "compute":
            expected = expected.bfloat16()
        if name == "mega_mhc_exit":  # so does this, by half a unit of bf16 in each stream
            assert_near(narrow_results[result], expected, 2.0**-7, result)
        else:
            assert_bit_equal(narrow_results[result], expected, result)


@pytest.mark.parametrize("name", OPS)
def test_leading_dimensions_are_only_shape(name: str, dtype: torch.dtype, device: str) -> None:
    op = CATALOGUE[name]
    flat = Shape((6,), 3, 8)
    tensors = make_tensors(name, flat, dtype, device=device)
    expected = call(op, tensors, flat)
    for lead in ((2, 3), (1, 6, 1), (3, 1, 2)):
        shape = Shape(lead, 3, 8)
        reshaped = {
            k: t if t is None or k in op.shared else t.reshape(*lead, *t.shape[1:])
            for k, t in tensors.items()
        }
        options = op.options(op.modes[0], shape)
        results = evaluate(op.function, op.results, reshaped, options).results
        cotangents = {
            k: g.reshape(results[k].shape)
            for k, g in make_cotangents({k: expected[k] for k in results}).items()
        }
        found = evaluate(op.function, op.results, reshaped, options, cotangents)
        for result, value in found.results.items():
            assert value.shape[: len(lead)] == lead
            assert_bit_equal(value.reshape(expected[result].shape), expected[result], result)
        for argument, gradient in found.gradients.items():
            assert gradient is not None
            given = reshaped[argument]
            assert given is not None
            assert gradient.shape == given.shape
            flat_gradient = expected[f"gradient of {argument}"]
            assert_bit_equal(gradient.reshape(flat_gradient.shape), flat_gradient, argument)


@pytest.mark.parametrize("name", OPS)
def test_no_leading_dimension_is_one_token(name: str, device: str) -> None:
    op = CATALOGUE[name]
    one, none = Shape((1,), 4, 6), Shape((), 4, 6)
    expected = call(op, make_tensors(name, one, torch.float32, device=device), one)
    found = call(op, make_tensors(name, none, torch.float32, device=device), none)
    for key, value in found.items():
        assert_bit_equal(value, expected[key].reshape(value.shape), key)


@pytest.mark.parametrize("name", OPS)
def test_no_tokens(name: str, dtype: torch.dtype, device: str) -> None:
    """Empty results, empty gradients, and zeros for what the tokens share."""
    op = CATALOGUE[name]
    for lead in ((0,), (2, 0), (0, 3)):
        shape = Shape(lead, 4, 6)
        tensors = make_tensors(name, shape, dtype, device=device)
        found = call(op, tensors, shape)
        for result in op.results:
            assert found[result].shape[: len(lead)] == lead
        for argument, t in tensors.items():
            assert t is not None
            gradient = found[f"gradient of {argument}"]
            assert gradient.shape == t.shape
            assert not gradient.any()


def _strided(t: Tensor, way: str) -> Tensor:
    """The values of ``t`` with other strides."""
    if way == "every second column":
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype, device=t.device)
        wide[..., ::2] = t
        return wide[..., ::2]
    if way == "last dimensions swapped":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else t
    guarded = torch.full((t.shape[0] + 2, *t.shape[1:]), torch.nan, dtype=t.dtype, device=t.device)
    guarded[1:-1] = t
    return guarded[1:-1]


@pytest.mark.parametrize("way", ["every second column", "last dimensions swapped", "between guard rows"])
@pytest.mark.parametrize("name", OPS)
def test_strides_are_honoured(name: str, way: str, device: str) -> None:
    """Any strides give the bits of the contiguous tensor, but for products; what lies between its elements (NaN here)
    is not read; results and gradients are contiguous."""
    op, shape = CATALOGUE[name], Shape((5,), 4, 8)
    tensors = make_tensors(name, shape, torch.bfloat16, device=device)
    strided = {k: None if t is None else _strided(t, way) for k, t in tensors.items()}
    expected = call(op, tensors, shape)
    for key, value in call(op, strided, shape).items():
        if (name, key) != ("mhc_pre", "x"):
            assert value.is_contiguous(), key
        if name in BEHIND_PRODUCT and key != "new_residual":
            # A matrix library may take other strides in another order.
            assert_near(value, expected[key], 4 * projection_error(shape.width), key)
        else:
            assert_bit_equal(value, expected[key], key)


@pytest.mark.parametrize("name", OPS)
def test_expanded_inputs(name: str, device: str) -> None:
    """Stride 0 from ``expand``: the same token many times, and gradients for every copy."""
    op, shape = CATALOGUE[name], Shape((5,), 4, 8)
    one = make_tensors(name, Shape((1,), 4, 8), torch.bfloat16, device=device)
    expanded = {k: t if t is None or k in op.shared else t.expand(5, *t.shape[1:]) for k, t in one.items()}
    plain = {k: None if t is None else t.contiguous() for k, t in expanded.items()}
    assert_same(call(op, expanded, shape), call(op, plain, shape))


@pytest.mark.parametrize("name", OPS)
def test_strided_and_expanded_gradients(name: str, device: str) -> None:
    """Incoming gradients may have any strides too: those of ``sum()`` are all zero."""
    op, shape = CATALOGUE[name], Shape((5,), 4, 8)
    options = op.options(op.modes[0], shape)
    tensors = make_tensors(name, shape, torch.float32, device=device)
    results = evaluate(op.function, op.results, tensors, options).results
    for made in (
        {k: torch.ones((), device=device).to(t.dtype).expand(t.shape) for k, t in results.items()},
        {k: _strided(g, "every second column") for k, g in make_cotangents(results).items()},
    ):
        plain = {k: g.contiguous() for k, g in made.items()}
        actual = evaluate(op.function, op.results, tensors, options, made).gradients
        expected = evaluate(op.function, op.results, tensors, options, plain).gradients
        for argument, gradient in actual.items():
            other = expected[argument]
            assert gradient is not None
            assert other is not None
            assert_bit_equal(gradient, other, argument)


@pytest.mark.parametrize("name", OPS)
def test_repeats_are_bit_equal(name: str, dtype: torch.dtype, device: str) -> None:
    op, shape = CATALOGUE[name], Shape((9,), 4, 40)
    tensors = make_tensors(name, shape, dtype, device=device)
    first = call(op, tensors, shape)
    for _ in range(3):
        assert_same(call(op, tensors, shape), first)


@pytest.mark.parametrize("name", OPS)
def test_inputs_are_left_alone(name: str, device: str) -> None:
    op, shape = CATALOGUE[name], Shape((5,), 4, 8)
    tensors = make_tensors(name, shape, torch.float32, device=device)
    before = {k: None if t is None else t.clone() for k, t in tensors.items()}
    call(op, tensors, shape)
    for key, t in tensors.items():
        kept = before[key]
        assert t is not None
        assert kept is not None
        assert_bit_equal(t, kept, key)


@pytest.mark.parametrize("name", OPS)
def test_results_are_contiguous_and_own_their_memory(name: str, device: str) -> None:
    op, shape = CATALOGUE[name], Shape((2, 3), 4, 8)
    tensors = make_tensors(name, shape, torch.float32, device=device)
    storages = {t.untyped_storage().data_ptr() for t in tensors.values() if t is not None}
    for key, value in call(op, tensors, shape).items():
        if (name, key) == ("mhc_pre", "x"):
            assert value.data_ptr() == tensors["x"].data_ptr()  # type: ignore[union-attr]  # handed on, not copied
        elif not key.startswith("gradient"):
            assert value.is_contiguous(), key
            assert value.untyped_storage().data_ptr() not in storages, key


@pytest.mark.parametrize("name", OPS)
def test_a_token_alone_and_among_others(name: str, dtype: torch.dtype, device: str) -> None:
    """Batch-invariance of the forward: bit-equal, but for what native leaves to the projection's product."""
    op, among = CATALOGUE[name], Shape((33,), 4, 72)
    alone = Shape((1,), 4, 72)
    tensors = make_tensors(name, among, dtype, device=device)
    together = call(op, tensors, among, False)
    for token in (0, 16, 32):
        one = {k: t if t is None or k in op.shared else t[token : token + 1] for k, t in tensors.items()}
        for result, value in call(op, one, alone, False).items():
            expected = together[result][token : token + 1]
            if result in BEHIND_PRODUCT.get(name, ()):
                assert_near(value, expected, 2 * projection_error(among.width), result)
            else:
                assert_bit_equal(value, expected, result)


@pytest.mark.parametrize("name", list(BEHIND_PRODUCT))
def test_batch_invariance_behind_an_exact_product(name: str, device: str) -> None:
    """Small whole numbers have one product, whatever the order of its sum: then all that follows is bit-equal too."""
    op, among, alone = CATALOGUE[name], Shape((37,), 4, 8), Shape((1,), 4, 8)
    made = make_tensors(name, among, torch.float32, device=device)
    tensors = {
        k: None if t is None else (2.0 * t).round() if t.shape[-1] in (8, among.width) else t
        for k, t in made.items()
    }
    if name == "mega_mhc":  # whole numbers stay whole through step 1
        tensors["previous_residual_mix"] = torch.eye(4, device=device).expand(37, 4, 4).contiguous()
        tensors["previous_post_mix"] = torch.ones(37, 4, device=device)
    weight = "weight" if "weight" in tensors else "phi"
    tensors[weight] = (8.0 * made[weight]).round()  # type: ignore[operator]
    together = call(op, tensors, among, False)
    for token in range(37):
        one = {k: t if t is None or k in op.shared else t[token : token + 1] for k, t in tensors.items()}
        for result, value in call(op, one, alone, False).items():
            assert_bit_equal(value, together[result][token : token + 1], result)


class _Calls(TorchDispatchMode):
    """The custom ops that run inside, and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fused_mhc":
            self.seen.append((func._schema.name.removeprefix("fused_mhc::"), args))
        return func(*args, **(kwargs or {}))


def _subsets(names: list[str]) -> Iterator[tuple[str, ...]]:
    """Every argument alone, all but each, all, and none."""
    yield from ((name,) for name in names)
    yield from (tuple(other for other in names if other != name) for name in names)
    yield tuple(names)
    yield ()


@pytest.mark.parametrize("name", OPS)
def test_frozen_inputs(name: str, device: str) -> None:
    """A frozen input gets None, the others the same bits as ever, and the backward is asked for no more than that."""
    op, shape = CATALOGUE[name], Shape((3,), 4, 8)
    options = op.options(op.modes[0], shape)
    tensors = {
        k: t for k, t in make_tensors(name, shape, torch.float32, device=device).items() if t is not None
    }
    full = call(op, tensors, shape)
    cotangents = make_cotangents({k: full[k] for k in op.results})
    for live in _subsets(list(tensors)):
        leaves = {k: t.detach().requires_grad_(k in live) for k, t in tensors.items()}
        out = op.function(**leaves, **options)
        results = dict(zip(op.results, out if isinstance(out, tuple) else (out,), strict=True))
        if not live:
            assert not any(t.requires_grad for t in results.values())
            continue
        reached = {k: t for k, t in results.items() if t.requires_grad}
        with _Calls() as calls:
            torch.autograd.backward(list(reached.values()), [cotangents[k] for k in reached])
        for argument, leaf in leaves.items():
            if argument not in live:
                assert leaf.grad is None, f"{argument} is frozen but has a gradient"
                continue
            assert leaf.grad is not None, f"{argument} has no gradient"
            assert_bit_equal(leaf.grad, full[f"gradient of {argument}"], argument)
        for op_name, args in calls.seen:
            needs = [a for a in args if isinstance(a, list) and a and isinstance(a[0], bool)]
            if needs:
                assert sum(needs[0]) == len(live), f"{op_name} computes {sum(needs[0])} gradients for {live}"


def test_frozen_streams_and_weight_cost_no_product(device: str) -> None:
    """With only the small parameters live, the projection's backward runs no matrix product."""
    op, shape = CATALOGUE["proj_rms_compute_h"], Shape((3,), 4, 64)
    tensors = make_tensors(op.name, shape, torch.float32, device=device)
    counts = {}
    for live in ("bias", "x", "weight"):
        leaves = {k: t.detach().requires_grad_(k == live) for k, t in tensors.items() if t is not None}
        out = op.function(**leaves, n=4)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
        ) as profile:
            torch.autograd.backward(out[:3], [torch.ones_like(t) for t in out[:3]])
        counts[live] = sum(event.key in ("aten::mm", "aten::addmm") for event in profile.events())
    assert counts["bias"] == 0
    assert counts["weight"] <= 1
    assert counts["x"] <= 1


@pytest.mark.parametrize("name", OPS)
def test_autocast_changes_nothing(name: str, device: str) -> None:
    op, shape = CATALOGUE[name], Shape((5,), 4, 16)
    tensors = make_tensors(name, shape, torch.float32, device=device)
    expected = call(op, tensors, shape)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_same(call(op, tensors, shape), expected)


@pytest.fixture
def low_precision() -> Iterator[None]:
    """Every process-wide switch that may trade precision for speed, thrown."""
    matmul = torch.backends.cuda.matmul
    before = (
        torch.get_float32_matmul_precision(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )
    torch.set_float32_matmul_precision("medium")
    matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_reduced_precision_reduction = True
    yield
    torch.set_float32_matmul_precision(before[0])
    matmul.allow_bf16_reduced_precision_reduction = before[1]
    matmul.allow_fp16_reduced_precision_reduction = before[2]


@pytest.fixture
def expected_results(device: str) -> dict[str, dict[str, Tensor]]:
    """Results under the default switches (made before `low_precision` throws them)."""
    shape = Shape((5,), 4, 16)
    return {
        name: call(op, make_tensors(name, shape, torch.float32, device=device), shape)
        for name, op in CATALOGUE.items()
    }


def test_global_precision_switches_change_nothing(
    expected_results: dict[str, dict[str, Tensor]], low_precision: None, device: str
) -> None:
    shape = Shape((5,), 4, 16)
    for name, op in CATALOGUE.items():
        tensors = make_tensors(name, shape, torch.float32, device=device)
        assert_same(call(op, tensors, shape), expected_results[name])
        assert torch.get_float32_matmul_precision() == "medium", f"{name} left the switch changed"


@pytest.mark.parametrize("name", OPS)
def test_inference_mode_and_no_grad(name: str, device: str) -> None:
    op, shape = CATALOGUE[name], Shape((5,), 4, 8)
    tensors = make_tensors(name, shape, torch.float32, device=device)
    expected = call(op, tensors, shape, False)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            out = op.function(**tensors, **op.options(op.modes[0], shape))
        values = out if isinstance(out, tuple) else (out,)
        for result, value in zip(op.results, values, strict=True):
            assert not value.requires_grad
            assert_bit_equal(value, expected[result], result)
