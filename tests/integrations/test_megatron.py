"""Megatron-Core's names: all there, with its argument orders, and nothing else behind them than this library."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fused_mhc
from fused_mhc import BackendError, InputError, dispatch
from fused_mhc.integrations import megatron as kernels
from fused_mhc.testing.compare import assert_bit_equal

S, B, N, C = 3, 2, 4, 8
PATH = "megatron.core.fusions.fused_mhc_kernels"

#: Function -> its parameters, "name" or "name=default".
SIGNATURES = {
    "is_cutile_available": "",
    "_get_tileiras_path": "",
    "_cutile_supports_current_device": "",
    "is_triton_available": "",
    "_validate_mhc_backend": "backend",
    "_backend_uses_triton": "backend",
    "_backend_uses_cutile": "backend",
    "_select_triton_cutile_native": "triton_impl backend",
    "_mhc_backend_status": "backend='auto'",
    "_mhc_backend_selection": "backend='auto'",
    "log_fused_mhc_backend_once": "backend='auto'",
    "fused_add_3": "a b c",
    "_get_triton_sinkhorn": "backend='auto'",
    "_get_triton_h_aggregate_fwd": "backend='auto'",
    "_get_triton_h_post_bda_fwd": "backend='auto'",
    "_get_triton_h_post_bda_bwd": "backend='auto'",
    "_torch_h_aggregate_bwd": "grad_output x h_pre",
    "_torch_h_post_bda_bwd": "grad_output h_res original_residual h_post x bias",
    "_torch_proj_rms_compute_h": "x weight alpha_pre alpha_post alpha_res bias n eps compute_h_eps=1e-06",
    "fused_sinkhorn": "input_logits num_iterations eps=1e-06 backend='auto'",
    "fused_h_aggregate": "x h_pre backend='auto'",
    "fused_h_post_bda": "h_res original_residual h_post x bias backend='auto'",
    "fused_proj_rms_compute_h": "x weight alpha_pre alpha_post alpha_res bias n eps=1e-06 compute_h_eps=1e-06"
    " backend='auto'",
    "triton_fused_sinkhorn": "input_logits num_iterations eps=1e-06",
    "fused_h_aggregate_into": "x h_pre out",
    "_cutile_sinkhorn_fwd": "input_logits num_iterations eps=1e-06",
    "_cutile_sinkhorn_bwd": "grad_output M_init num_iterations eps=1e-06",
    "_cutile_h_aggregate_bwd": "grad_output x h_pre",
    "_cutile_h_post_bda_bwd": "grad_output h_res original_residual h_post x bias",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(kernels, name)).parameters.values()
    told = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert told == SIGNATURES[name].split()


def test_data() -> None:
    assert kernels._VALID_MHC_BACKENDS == ("auto", "native", "triton", "cutile")
    assert kernels.LOG2E.hex() == "0x1.71547652b82fep+0"
    assert kernels.MHC_BACKEND_DETERMINISM is dispatch.MHC_BACKEND_DETERMINISM
    assert kernels.MHCBackend is dispatch.MHCBackend
    assert isinstance(kernels.logger, logging.Logger)
    assert isinstance(kernels._BACKEND_INFO_LOGGED, set)
    assert set(kernels._TRITON_IMPLS) == {"sinkhorn", "h_aggregate_fwd", "h_post_bda_fwd", "h_post_bda_bwd"}
    flags = ("_CUTILE_AVAILABLE", "_CUTILE_EXPERIMENTAL_AVAILABLE", "_TRITON_AVAILABLE")
    assert all(isinstance(getattr(kernels, flag), bool) for flag in flags)
    assert kernels._CUTILE_DEVICE_SUPPORT_CACHE is None
    assert issubclass(kernels.FusedHAggregate, torch.autograd.Function)
    assert issubclass(kernels.FusedHPostBDA, torch.autograd.Function)


# The operations


@pytest.fixture(autouse=True)
def on_device(device: str) -> Iterator[None]:
    with torch.device(device):
        yield


def equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_bit_equal(a, b, f"tensor {i}")


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype).uniform_(-0.5, 0.5).requires_grad_()


def gradients(call: Callable[..., Any], *tensors: Tensor | None) -> list[Tensor]:
    """The results of ``call``, then the gradients of ``tensors`` for fixed output gradients."""
    results = call(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    torch.manual_seed(1)
    grads = [torch.randn_like(t) for t in results]
    inputs = [t for t in tensors if t is not None]
    return [*(t.detach() for t in results), *torch.autograd.grad(results, inputs, grads)]


def test_sinkhorn_is_ours(backend: str) -> None:
    logits = leaf(S, B, N, N)
    ours = gradients(lambda t: fused_mhc.fused_sinkhorn(t, 5, 1e-6, backend), logits)
    equal(gradients(lambda t: kernels.fused_sinkhorn(t, 5, 1e-6, backend), logits), ours)


def test_aggregate_is_ours(backend: str) -> None:
    x, h_pre = leaf(S, B, N, C), leaf(S, B, N)
    ours = gradients(lambda *t: fused_mhc.fused_h_aggregate(*t, backend), x, h_pre)
    equal(gradients(lambda *t: kernels.fused_h_aggregate(*t, backend), x, h_pre), ours)
    equal(gradients(lambda *t: kernels.FusedHAggregate.apply(*t, backend), x, h_pre), ours)
    if backend == "native":
        torch.manual_seed(1)
        grad = torch.randn(S, B, C, dtype=torch.bfloat16)
        equal(list(kernels._torch_h_aggregate_bwd(grad, x.detach(), h_pre.detach())), ours[1:])


@pytest.mark.parametrize("with_bias", [True, False])
def test_post_is_ours(backend: str, with_bias: bool) -> None:
    tensors = [
        leaf(S, B, N, N),
        leaf(S, B, N, C),
        leaf(S, B, N),
        leaf(S, B, C),
        leaf(C) if with_bias else None,
    ]
    ours = gradients(lambda *t: fused_mhc.fused_h_post_bda(*t, backend), *tensors)
    equal(gradients(lambda *t: kernels.fused_h_post_bda(*t, backend), *tensors), ours)
    equal(gradients(lambda *t: kernels.FusedHPostBDA.apply(*t, backend), *tensors), ours)
    if backend == "native":
        torch.manual_seed(1)
        grad = torch.randn(S, B, N, C, dtype=torch.bfloat16)
        found = kernels._torch_h_post_bda_bwd(grad, *(t if t is None else t.detach() for t in tensors))
        assert len(found) == 5
        assert (found[4] is None) is not with_bias
        equal([t for t in found if t is not None], ours[1:])


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype", "result"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_projection_rounds_as_megatron_does(
    backend: str, x_dtype: torch.dtype, weight_dtype: torch.dtype, result: torch.dtype
) -> None:
    rows = N * N + 2 * N
    shapes = ((rows, N * C), (1,), (1,), (1,), (rows,))
    tensors = [leaf(S * B, N * C, dtype=x_dtype), *(leaf(*shape, dtype=weight_dtype) for shape in shapes)]
    exact = fused_mhc.fused_proj_rms_compute_h(*tensors, N, backend=backend)
    found = kernels.fused_proj_rms_compute_h(*tensors, N, 1e-6, 1e-6, backend)
    assert [t.dtype for t in found] == [result] * 4
    equal([t.detach() for t in found], [t.detach().to(result) for t in exact])
    grads = torch.autograd.grad(found[:3], tensors, [torch.ones_like(t) for t in found[:3]])
    assert [g.dtype for g in grads] == [t.dtype for t in tensors]
    if backend == "native":
        again = kernels._torch_proj_rms_compute_h(*tensors, N, 1e-6)
        equal([t.detach() for t in again], [t.detach() for t in found])


def test_orientation() -> None:
    """Row F1: the matrix is applied transposed."""
    h_res = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    streams = torch.tensor([[[[10.0, 100.0], [1.0, 2.0]]]])
    out = kernels.fused_h_post_bda(h_res, streams, torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), None)
    assert out.tolist() == [[[[13.0, 106.0], [24.0, 208.0]]]]


def test_aggregate_into() -> None:
    x, h_pre = leaf(S, B, N, C), leaf(S, B, N)
    out = torch.full((S, B, C), torch.nan, dtype=torch.bfloat16)
    address = out.data_ptr()
    assert kernels.fused_h_aggregate_into(x, h_pre, out) is out
    assert out.data_ptr() == address
    assert not out.requires_grad
    assert torch.equal(out, fused_mhc.fused_h_aggregate(x, h_pre))
    with pytest.raises(InputError, match="out: expected dtype"):
        kernels.fused_h_aggregate_into(x, h_pre, out.float())
    with pytest.raises(InputError, match="out: expected shape"):
        kernels.fused_h_aggregate_into(x, h_pre, out[:1])


def test_functions_refuse_a_second_gradient_and_spare_frozen_inputs() -> None:
    x, h_pre = leaf(S, B, N, C), leaf(S, B, N).detach()
    out = kernels.FusedHAggregate.apply(x, h_pre, "native")
    (grad,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second-order"):
        grad.float().sum().backward()


def test_compiles_without_a_break() -> None:
    x, h_pre = leaf(S, B, N, C), leaf(S, B, N)
    compiled = torch.compile(kernels.fused_h_aggregate, fullgraph=True, backend="aot_eager")
    equal(gradients(compiled, x, h_pre), gradients(kernels.fused_h_aggregate, x, h_pre))


# The backend


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MHC_FORCE_BACKEND", raising=False)
    monkeypatch.setattr(kernels, "_TRITON_AVAILABLE", False)
    monkeypatch.setattr(kernels, "_CUTILE_AVAILABLE", False)


@pytest.fixture
def with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MHC_FORCE_BACKEND", raising=False)
    monkeypatch.setattr(kernels, "_TRITON_AVAILABLE", True)
    monkeypatch.setattr(kernels, "_CUTILE_AVAILABLE", True)
    monkeypatch.setattr(kernels, "_CUTILE_DEVICE_SUPPORT_CACHE", True)


@pytest.mark.usefixtures("without_triton")
def test_policy_without_accelerators() -> None:
    for backend in ("auto", "native"):
        kernels._validate_mhc_backend(backend)
    for backend in ("triton", "cutile"):
        with pytest.raises(RuntimeError, match=backend):
            kernels._validate_mhc_backend(backend)
        with pytest.raises(BackendError, match=backend):
            kernels.fused_sinkhorn(torch.zeros(2, 2), 1, backend=backend)
    for get in (kernels._get_triton_sinkhorn, kernels._get_triton_h_post_bda_bwd):
        assert get() is None
    assert kernels._select_triton_cutile_native(None, "auto") == "native"
    text, all_native = kernels._mhc_backend_status()
    assert all_native
    assert kernels._mhc_backend_selection() == text
    assert "proj_rms_compute_h bwd: native" in text


@pytest.mark.usefixtures("with_both")
def test_policy_with_both() -> None:
    for backend in kernels._VALID_MHC_BACKENDS:
        kernels._validate_mhc_backend(backend)
    uses = [
        (kernels._backend_uses_triton(b), kernels._backend_uses_cutile(b))
        for b in kernels._VALID_MHC_BACKENDS
    ]
    assert uses == [(True, True), (False, False), (True, False), (False, True)]
    assert kernels._get_triton_sinkhorn("triton") is kernels.triton_fused_sinkhorn
    assert kernels._get_triton_h_aggregate_fwd("cutile") is None
    assert kernels._get_triton_h_post_bda_fwd("auto") is kernels._TRITON_IMPLS["h_post_bda_fwd"]
    select = kernels._select_triton_cutile_native
    assert select(kernels._get_triton_sinkhorn("auto"), "auto") == "triton"
    assert [select(None, backend) for backend in kernels._VALID_MHC_BACKENDS] == [
        "cutile",
        "native",
        "native",
        "cutile",
    ]


@pytest.mark.parametrize("backend", ["cuda", "", None, "Triton"])
def test_unknown_backend(backend: Any) -> None:
    with pytest.raises(ValueError, match="backend: expected one of auto, native, triton, cutile"):
        kernels._validate_mhc_backend(backend)


@pytest.mark.usefixtures("with_both")
def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_DISABLE_TRITON", "1")
    assert not kernels.is_triton_available()
    monkeypatch.setenv("MHC_DISABLE_CUTILE", "1")
    assert not kernels.is_cutile_available()
    monkeypatch.setenv("MHC_FORCE_BACKEND", "triton-native")
    with pytest.raises(ValueError, match="MHC_DISABLE_TRITON"):
        kernels._validate_mhc_backend("auto")
    monkeypatch.delenv("MHC_DISABLE_TRITON")
    assert kernels._backend_uses_triton("native")
    monkeypatch.setenv("MHC_FORCE_BACKEND", "pytorch")
    kernels._validate_mhc_backend("cutile")
    assert not kernels._backend_uses_triton("triton")


def test_cutile_probe_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row F47: an unproven no is not kept; the reason is."""
    monkeypatch.setattr(kernels, "_CUTILE_AVAILABLE", True)
    monkeypatch.setattr(kernels, "_CUTILE_DEVICE_SUPPORT_ERROR", None)
    monkeypatch.setattr(dispatch, "is_cutile_available", lambda: False)
    assert not kernels.is_cutile_available()
    assert kernels._CUTILE_DEVICE_SUPPORT_ERROR
    monkeypatch.setattr(dispatch, "is_cutile_available", lambda: True)
    assert kernels.is_cutile_available()
    assert kernels._CUTILE_DEVICE_SUPPORT_ERROR is None


@pytest.mark.usefixtures("without_triton")
def test_log_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kernels, "_BACKEND_INFO_LOGGED", set())
    with caplog.at_level(logging.INFO, kernels.logger.name):
        for policy in ("auto", "native"):
            with pytest.warns(UserWarning, match="native"):
                kernels.log_fused_mhc_backend_once(policy)
            kernels.log_fused_mhc_backend_once(policy)  # a warning here would fail the test
    assert len([r for r in caplog.records if r.name == kernels.logger.name]) == 2
    assert sorted(kernels._BACKEND_INFO_LOGGED) == ["auto", "native"]
    with pytest.raises(BackendError):
        kernels.log_fused_mhc_backend_once("triton")


# In Megatron's place


@pytest.fixture
def clean_modules() -> Iterator[None]:
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"}
    yield
    kernels.uninstall()
    after = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"}
    assert after == before


@pytest.mark.usefixtures("clean_modules")
def test_install_without_megatron() -> None:
    assert "megatron" not in sys.modules
    undo = kernels.install()
    assert kernels.install() is undo
    import megatron.core.fusions.fused_mhc_kernels as by_path
    from megatron.core.fusions import fused_mhc_kernels as by_name

    assert by_path is kernels
    assert by_name is kernels
    undo()
    undo()
    with pytest.raises(ModuleNotFoundError):
        import megatron.core.fusions.fused_mhc_kernels  # noqa: F401


@pytest.mark.usefixtures("clean_modules")
def test_install_over_megatron(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "megatron" / "core" / "fusions"
    folder.mkdir(parents=True)
    for package in (folder.parent.parent, folder.parent, folder):
        (package / "__init__.py").touch()
    (folder / "fused_mhc_kernels.py").write_text("theirs = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    from megatron.core.fusions import fused_mhc_kernels as theirs

    try:
        undo = kernels.install()
        from megatron.core.fusions import fused_mhc_kernels as ours

        assert ours is kernels
        undo()
        from megatron.core.fusions import fused_mhc_kernels as again

        assert again is theirs
        assert sys.modules[PATH] is theirs
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
            del sys.modules[name]


@pytest.mark.usefixtures("clean_modules")
def test_a_broken_megatron_leaves_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("import a_package_that_is_absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_absent"):
        kernels.install()
    sys.modules.pop("megatron", None)  # a namespace package that the import found
    assert kernels._installed is None
