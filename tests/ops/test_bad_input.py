"""What the contract forbids is an InputError that names the argument, before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fused_mhc
from fused_mhc import InputError
from fused_mhc.testing.inputs import CATALOGUE, Shape, make_tensors

SHAPE = Shape((3,), 4, 6)
TENSORS = [(name, argument) for name in CATALOGUE for argument in make_tensors(name, SHAPE, torch.float32)]
OPTIONAL = {("h_post_bda", "bias"), ("mega_mhc", "norm_weight"), ("mega_mhc_entry", "norm_weight")} | {
    ("mega_mhc_exit", "norm_weight")
}
#: With a single tensor there is nothing it could fail to fit.
ONE_TENSOR = ("sinkhorn", "input_expand", "output_contract")
#: Dimensions that no other argument fixes: tokens beside parameters, and the hidden size of an aggregate.
FREE = {
    ("h_aggregate", "x"): 2,
    ("proj_rms_compute_h", "x"): 0,
    ("learned_output_contract", "x"): 0,
    ("mhc_pre", "x"): 0,
    ("mega_mhc_entry", "x"): 0,
}
EPS = {
    "sinkhorn": ("eps",),
    "proj_rms_compute_h": ("eps", "compute_h_eps"),
    "learned_output_contract": ("eps", "norm_eps"),
    "mhc_pre": ("rms_eps", "compute_h_eps", "sinkhorn_eps"),
    "mega_mhc": ("hc_eps", "norm_eps"),
    "mega_mhc_entry": ("hc_eps", "norm_eps"),
    "mega_mhc_exit": ("norm_eps",),
}
COUNTS = {
    "sinkhorn": "num_iterations",
    "mhc_pre": "num_iterations",
    "mega_mhc": "num_iters",
    "mega_mhc_entry": "num_iters",
}
CHOICES = [
    ("sinkhorn", "variant"),
    ("proj_rms_compute_h", "rms_eps_mode"),
    ("proj_rms_compute_h", "precision"),
    ("mhc_pre", "rms_eps_mode"),
    ("mhc_pre", "variant"),
    ("mhc_pre", "precision"),
    ("mega_mhc", "schedule"),
    ("mega_mhc_entry", "schedule"),
    *((name, "backend") for name, op in CATALOGUE.items() if op.has_backend),
]


def refused(name: str, argument: str, match: str | None = None, /, **changes: Any) -> str:
    """Call operation ``name`` with valid arguments but for ``changes``; the message of the InputError it must raise,
    which starts with the name of ``argument``."""
    op = CATALOGUE[name]
    arguments = {**make_tensors(name, SHAPE, torch.float32), **op.options(op.modes[0], SHAPE), **changes}
    with pytest.raises(InputError, match=match) as caught:
        op.function(**arguments)
    message = str(caught.value)
    assert message.startswith(f"{argument}: expected"), message
    assert "got" in message, message
    return message


def given(name: str, argument: str) -> Tensor:
    t = make_tensors(name, SHAPE, torch.float32)[argument]
    assert t is not None
    return t


def test_input_error_is_a_value_error() -> None:
    assert issubclass(InputError, ValueError)
    assert issubclass(fused_mhc.BackendError, RuntimeError)
    assert issubclass(fused_mhc.ScheduleError, RuntimeError)


@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_not_a_tensor(name: str, argument: str) -> None:
    for value in ([1.0], 1.0, "x", given(name, argument).numpy()):
        refused(name, argument, type(value).__name__, **{argument: value})
    if (name, argument) not in OPTIONAL:
        refused(name, argument, "NoneType", **{argument: None})


@pytest.mark.parametrize(
    "foreign",
    [torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn],
    ids=str,
)
@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_wrong_dtype(name: str, argument: str, foreign: torch.dtype) -> None:
    refused(name, argument, str(foreign), **{argument: given(name, argument).to(foreign)})


@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_sparse(name: str, argument: str) -> None:
    refused(name, argument, "layout", **{argument: given(name, argument).to_sparse()})


@pytest.mark.parametrize(("name", "argument"), [pair for pair in TENSORS if pair[0] not in ONE_TENSOR])
def test_wrong_shape(name: str, argument: str) -> None:
    """One element more in any dimension: what does not fit is named, with the shape that came."""
    op = CATALOGUE[name]
    t = given(name, argument)
    for dim in range(t.dim()):
        if FREE.get((name, argument)) == dim:
            continue
        shape = list(t.shape)
        shape[dim] += 1
        tensors = {**make_tensors(name, SHAPE, torch.float32), argument: torch.zeros(shape)}
        with pytest.raises(InputError, match=r"expected .*got "):
            op.function(**tensors, **op.options(op.modes[0], SHAPE))


def test_sinkhorn_wants_squares() -> None:
    refused("sinkhorn", "input_logits", "square", input_logits=torch.zeros(3, 4, 5))


@pytest.mark.parametrize(("name", "argument"), [pair for pair in TENSORS if pair != ("fused_add_3", "a")])
def test_wrong_rank(name: str, argument: str) -> None:
    """A scalar never fits (the first summand apart, which sets the shape of the others)."""
    refused(name, argument, "shape", **{argument: torch.zeros(())})


@pytest.mark.parametrize(("name", "argument"), [pair for pair in TENSORS if pair[0] not in ONE_TENSOR])
def test_mixed_devices(name: str, argument: str) -> None:
    """The meta device stands for any other device."""
    op = CATALOGUE[name]
    tensors = make_tensors(name, SHAPE, torch.float32)
    tensors[argument] = given(name, argument).to("meta")
    with pytest.raises(InputError, match=r"expected device .* got .*"):
        op.function(**tensors, **op.options(op.modes[0], SHAPE))


@pytest.mark.parametrize("n", [0, 17])
@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "fused_add_3"])
def test_number_of_streams(name: str, n: int) -> None:
    op, shape = CATALOGUE[name], Shape((3,), n, 4)
    with pytest.raises(InputError, match=rf"1 to 16 streams, got {n}|hidden size of at least 1"):
        op.function(**make_tensors(name, shape, torch.float32), **op.options(op.modes[0], shape))


@pytest.mark.parametrize("n", [True, 4.0, "4", None])
@pytest.mark.parametrize("name", ["proj_rms_compute_h", "input_expand", "mega_mhc_entry"])
def test_number_of_streams_is_an_int(name: str, n: Any) -> None:
    refused(name, "n", None, n=n)


def test_streams_divide_the_width() -> None:
    message = refused("proj_rms_compute_h", "x", None, x=torch.zeros(3, 25))
    assert "divisible" in message


@pytest.mark.parametrize("value", [0.0, -1e-6, float("inf"), float("nan"), "1e-6", None, True, 1j])
@pytest.mark.parametrize(("name", "eps"), [(name, eps) for name, all_eps in EPS.items() for eps in all_eps])
def test_eps(name: str, eps: str, value: Any) -> None:
    refused(name, eps, None, **{eps: value})


@pytest.mark.parametrize("value", [0, -1, 2.0, "20", None, True])
@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_iterations(name: str, count: str, value: Any) -> None:
    refused(name, count, None, **{count: value})


@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, float("nan"), "0.1", None, True])
def test_dropout_probability(value: Any) -> None:
    refused("h_post_bda", "dropout_p", None, dropout_p=value)


@pytest.mark.parametrize(
    "seed",
    [
        1.0,
        True,
        "7",
        2**63,
        -(2**63) - 1,
        torch.tensor(7, dtype=torch.int32),
        torch.tensor([7]),
        torch.tensor(7.0),
        torch.tensor(7, device="meta"),
    ],
)
def test_seed(seed: Any) -> None:
    refused("h_post_bda", "seed", None, dropout_p=0.5, seed=seed)


@pytest.mark.parametrize("value", ["no such", "", "NATIVE", None, 1])
@pytest.mark.parametrize(("name", "choice"), CHOICES)
def test_choices(name: str, choice: str, value: Any) -> None:
    message = refused(name, choice, None, **{choice: value})
    assert "one of" in message


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in ("sinkhorn", "fused_add_3")])
def test_hidden_size_zero(name: str) -> None:
    op, shape = CATALOGUE[name], Shape((3,), 4, 0)
    with pytest.raises(InputError, match="hidden size of at least 1"):
        op.function(**make_tensors(name, shape, torch.float32), **op.options(op.modes[0], shape))


def test_nothing_is_computed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before any kernel: a call with a bad last argument resolves none."""

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr("fused_mhc.dispatch.resolve", never)
    refused("h_post_bda", "dropout_p", None, dropout_p=2.0)
    refused("mega_mhc", "schedule", None, schedule="soon")
    refused("mhc_pre", "precision", None, precision="fp8")
    refused("sinkhorn", "variant", None, variant="both")
    refused("learned_output_contract", "norm_eps", None, norm_eps=0.0)
