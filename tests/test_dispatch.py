"""Which backend runs what: the policy of SPEC.md, with its reasons."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import fused_mhc
from fused_mhc import BackendError, InputError, backend_status, dispatch, env
from fused_mhc.testing.inputs import CATALOGUE, Shape, make_tensors

CPU = torch.device("cpu")
OPS = list(dispatch.OPERATIONS)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable set, nothing resolved before."""
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dispatch, "_RESOLVED", {})
    monkeypatch.setattr(dispatch, "_LOGGED", set())


def call(name: str, dtype: torch.dtype = torch.float32, n: int = 4, **more: Any) -> Any:
    op, shape = CATALOGUE[name], Shape((2,), n, 4)
    return op.function(**make_tensors(name, shape, dtype), **op.options(op.modes[0], shape), **more)


def test_names() -> None:
    assert fused_mhc.MHCBackend.__args__ == ("auto", "native", "triton", "cutile")  # type: ignore[attr-defined]
    assert set(fused_mhc.MHC_BACKEND_DETERMINISM) == {"native", "triton", "cutile"}
    assert set(fused_mhc.MHC_BACKEND_DETERMINISM.values()) <= {"deterministic", "unknown", "nondeterministic"}
    assert fused_mhc.MHC_BACKEND_DETERMINISM["native"] == "deterministic"


def test_status_names_a_backend_and_gives_reasons_for_the_others() -> None:
    rows = backend_status("auto", CPU)
    assert {row.op for row in rows} == set(OPS)
    assert {row.direction for row in rows} == {"fwd", "bwd"}
    for row in rows:
        assert row.chosen == "native"
        assert set(row.reasons) == {"triton", "cutile"}
        assert all(row.reasons.values())
        assert row.op in str(row)
        assert row.chosen in str(row)


def test_status_of_a_backend_that_cannot_run() -> None:
    for name in ("triton", "cutile"):
        for row in backend_status(name, CPU):
            assert row.chosen == "none"
            assert row.reasons[name]


def test_status_says_what_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_DISABLE_TRITON", "1")
    monkeypatch.setenv("MHC_DISABLE_CUTILE", "1")
    for row in backend_status("auto", CPU):
        assert row.reasons["triton"] == "switched off by MHC_DISABLE_TRITON"
        assert row.reasons["cutile"] == "switched off by MHC_DISABLE_CUTILE"
    assert not fused_mhc.is_triton_available()
    assert not fused_mhc.is_cutile_available()


def test_status_refuses_unknown_backends() -> None:
    with pytest.raises(InputError, match="backend: expected one of"):
        backend_status("cuda")


@pytest.mark.parametrize("backend", ["triton", "cutile"])
@pytest.mark.parametrize("name", [name for name, op in CATALOGUE.items() if op.has_backend])
def test_a_named_backend_never_falls_back(name: str, backend: str) -> None:
    with pytest.raises(BackendError, match=rf"backend '{backend}' cannot run {name} fwd on cpu: \w+"):
        call(name, backend=backend)


@pytest.mark.parametrize("backend", ["triton", "cutile"])
@pytest.mark.parametrize("name", OPS)
def test_a_forced_backend_never_falls_back(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations without a backend argument too."""
    monkeypatch.setenv("MHC_FORCE_BACKEND", backend)
    with pytest.raises(BackendError, match=f"backend '{backend}' cannot run {name} fwd"):
        call(name)


def test_forcing_overrides_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_FORCE_BACKEND", "native")
    call("h_aggregate", backend="triton")
    monkeypatch.setenv("MHC_FORCE_BACKEND", "triton")
    with pytest.raises(BackendError):
        call("h_aggregate", backend="native")


def test_the_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    call("h_aggregate")
    monkeypatch.setenv("MHC_FORCE_BACKEND", "cutile")
    with pytest.raises(BackendError):
        call("h_aggregate")
    monkeypatch.delenv("MHC_FORCE_BACKEND")
    call("h_aggregate")


def test_a_bad_switch_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_DISABLE_TRITON", "perhaps")
    with pytest.raises(InputError, match="MHC_DISABLE_TRITON"):
        call("h_aggregate")


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_backward_is_resolved_too(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward are resolved one by one, when they run."""
    asked: list[str] = []
    resolve = dispatch.resolve

    def record(op: str, direction: str, *rest: Any) -> Any:
        asked.append(direction)
        return resolve(op, direction, *rest)

    monkeypatch.setattr(dispatch, "resolve", record)
    x = torch.randn(2, 3, 4, requires_grad=True)
    out = fused_mhc.fused_h_aggregate(x, torch.rand(2, 3))
    if direction == "bwd":
        out.sum().backward()
    assert asked[-1] == direction


def test_fp64_runs_on_native_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("MHC_FORCE_BACKEND", "triton")
    with pytest.raises(BackendError, match="float64 runs on native only"):
        call("h_aggregate", torch.float64)


def test_more_streams_than_the_backend_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BackendError, match="at most 8 streams there, got 9"):
        call("mega_mhc", n=9, backend="triton")
    call("mega_mhc", n=9)


def test_schedules() -> None:
    for schedule in ("auto", "fused"):
        call("mega_mhc", schedule=schedule)
    with pytest.raises(InputError, match="schedule: expected one of auto, fused, mega"):
        call("mega_mhc", schedule="eager")


def test_availability_is_about_here_and_now(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.cuda.is_available()
    assert fused_mhc.is_triton_available() is gpu
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert fused_mhc.is_triton_available()
    has_module = dispatch._has_module
    monkeypatch.setattr(dispatch, "_has_module", lambda name: name != "triton" and has_module(name))
    assert not fused_mhc.is_triton_available()
    for row in backend_status("auto", CPU):
        assert row.reasons["triton"] == "the package triton is not installed"


def test_a_probe_that_breaks_is_not_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error inside a backend's module is shown, not read as "this backend has no such kernel"."""
    dispatch._host.cache_clear()

    def broken(name: str) -> Any:
        raise ImportError("cannot import name 'gone'")

    monkeypatch.setattr(dispatch.importlib, "import_module", broken)
    with pytest.raises(ImportError, match="gone"):
        dispatch.resolve("h_aggregate", "fwd", "native", CPU)
    dispatch._host.cache_clear()


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fused_mhc"):
        fused_mhc.log_fused_mhc_backend_once("auto")
        lines = len(caplog.records)
        assert lines >= len(OPS)
        fused_mhc.log_fused_mhc_backend_once("auto")
        assert len(caplog.records) == lines
        call("h_aggregate")
        assert len(caplog.records) == lines
    assert any("sinkhorn fwd: native" in record.getMessage() for record in caplog.records)


def test_auto_logs_on_its_first_use(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fused_mhc"):
        call("h_aggregate")
        assert caplog.records
        call("h_aggregate", backend="native")


def test_logging_refuses_unknown_backends() -> None:
    with pytest.raises(InputError):
        fused_mhc.log_fused_mhc_backend_once("gpu")


def test_auto_never_looks_at_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is resolved depends on operation, direction, device, streams and dtype: T is not among the arguments."""
    seen = []
    resolve = dispatch.resolve

    def record(*args: Any) -> Any:
        seen.append(args)
        return resolve(*args)

    monkeypatch.setattr(dispatch, "resolve", record)
    for tokens in (1, 3, 50):
        fused_mhc.fused_h_aggregate(torch.zeros(tokens, 2, 4), torch.zeros(tokens, 2))
    assert len(set(seen)) == 1
