"""Megatron-Core: the names of its ``core.fusions.fused_mhc_kernels``, and ``install()`` to put them in its place.

Every name, argument order and default is Megatron's, so a caller cannot tell the modules apart; what is behind the
names is this library. Shapes are ``[s, b, n, C]`` (any number of leading dimensions works), and ``h_pre``, ``h_post``
and ``h_res`` may come in the activations' dtype. Names with an underscore are here because Megatron's own tests and
modules reach for them.

Differences that a caller can notice:

- A backend asked for by name never falls back for a single operation; Megatron's "triton" runs its projection natively.
- ``_CUTILE_DEVICE_SUPPORT_CACHE`` is None unless somebody sets it: what is proven is kept by `fused_mhc.cutile`.
- The tensor that ``_cutile_sinkhorn_fwd`` returns for its backward holds the logits.

Source: Megatron-Core ``core.fusions.fused_mhc_kernels`` (names, argument orders, defaults, backend policy).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import cutile, dispatch, env
from ..checks import check_backend, check_devices, check_shape
from ..dispatch import MHC_BACKEND_DETERMINISM, MHCBackend
from ..errors import BackendError, InputError
from ..ops._library import needed, spread
from ..ops.fused_add import fused_add_3
from ..ops.h_aggregate import fused_h_aggregate as _h_aggregate
from ..ops.h_post_bda import fused_h_post_bda as _h_post_bda
from ..ops.proj_rms_compute_h import fused_proj_rms_compute_h as _proj_rms_compute_h
from ..ops.sinkhorn import fused_sinkhorn as _sinkhorn

__all__ = [
    "LOG2E",
    "MHC_BACKEND_DETERMINISM",
    "FusedHAggregate",
    "FusedHPostBDA",
    "MHCBackend",
    "fused_add_3",
    "fused_h_aggregate",
    "fused_h_aggregate_into",
    "fused_h_post_bda",
    "fused_proj_rms_compute_h",
    "fused_sinkhorn",
    "install",
    "is_cutile_available",
    "is_triton_available",
    "log_fused_mhc_backend_once",
    "logger",
    "triton_fused_sinkhorn",
    "uninstall",
]

logger = logging.getLogger(__name__)
LOG2E = math.log2(math.e)
_VALID_MHC_BACKENDS = env.BACKENDS


def _installed_package(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is absent
        return False


_CUTILE_AVAILABLE = _installed_package("cuda.tile")
_CUTILE_EXPERIMENTAL_AVAILABLE = _installed_package("cuda.tile_experimental")
_CUTILE_DEVICE_SUPPORT_CACHE: bool | None = None
_CUTILE_DEVICE_SUPPORT_ERROR: str | None = None
_TRITON_AVAILABLE = dispatch.is_triton_available()
_BACKEND_INFO_LOGGED: set[str] = set()

#: The operations that Megatron's module has, of those in `dispatch.OPERATIONS`.
_OPERATIONS = ("sinkhorn", "h_aggregate", "h_post_bda", "proj_rms_compute_h")


# Which backend


def is_cutile_available() -> bool:
    """True when cuTile kernels can run on the current device now."""
    return _CUTILE_AVAILABLE and not env.disabled("cutile") and _cutile_supports_current_device()


def _get_tileiras_path() -> str | None:
    """The cuTile compiler that would run (of the pip packages, on ``PATH``, or a toolkit's), or None."""
    return cutile.compiler_path()


def _cutile_supports_current_device() -> bool:
    """True when the cuTile backend has proven that it runs on the current device; else the reason is kept in
    ``_CUTILE_DEVICE_SUPPORT_ERROR``."""
    global _CUTILE_DEVICE_SUPPORT_ERROR  # noqa: PLW0603  # Megatron keeps it as a name of the module
    if isinstance(_CUTILE_DEVICE_SUPPORT_CACHE, bool):
        return _CUTILE_DEVICE_SUPPORT_CACHE
    supported = dispatch.is_cutile_available()
    _CUTILE_DEVICE_SUPPORT_ERROR = (
        None if supported else dispatch.backend_status("cutile")[0].reasons["cutile"]
    )
    return supported


def is_triton_available() -> bool:
    """True when Triton kernels can run here now."""
    return _TRITON_AVAILABLE and not env.disabled("triton")


def _policy(backend: str) -> str:
    return env.forced_backend() or backend


def _validate_mhc_backend(backend: str) -> None:
    """A known backend that can run here.

    Raises:
        InputError: a ValueError; the name is unknown.
        BackendError: a RuntimeError; the backend (or the one that ``MHC_FORCE_BACKEND`` names) cannot run here.
    """
    check_backend(backend)
    policy = _policy(backend)
    if policy == "triton" and not is_triton_available():
        raise BackendError(
            f"backend: expected one that can run here, got {policy!r}: Triton is not available"
        )
    if policy == "cutile" and not is_cutile_available():
        reason = _CUTILE_DEVICE_SUPPORT_ERROR or "cuda.tile is not available"
        raise BackendError(f"backend: expected one that can run here, got {policy!r}: {reason}")


def _backend_uses_triton(backend: str) -> bool:
    """True when this policy may choose Triton, and Triton can run."""
    return _policy(backend) in ("auto", "triton") and is_triton_available()


def _backend_uses_cutile(backend: str) -> bool:
    """True when this policy may choose cuTile, and cuTile can run."""
    return _policy(backend) in ("auto", "cutile") and is_cutile_available()


def _select_triton_cutile_native(triton_impl: Callable[..., Any] | None, backend: str) -> str:
    """The first that can run: Triton where there is an implementation, cuTile, native."""
    if triton_impl is not None:
        return "triton"
    return "cutile" if _backend_uses_cutile(backend) else "native"


def _mhc_backend_status(backend: str = "auto") -> tuple[str, bool]:
    """What runs each operation, in words, and whether all of it is native."""
    usable = {"native", "none"}
    usable |= {"triton"} if _backend_uses_triton(backend) else set()
    usable |= {"cutile"} if _backend_uses_cutile(backend) else set()
    chosen = {
        f"{row.op} {row.direction}": row.chosen if row.chosen in usable else "native"
        for row in dispatch.backend_status(backend)
        if row.op in _OPERATIONS
    }
    text = ", ".join(f"{name}: {choice}" for name, choice in chosen.items())
    return text, set(chosen.values()) == {"native"}


def _mhc_backend_selection(backend: str = "auto") -> str:
    """What runs each operation, in words."""
    return _mhc_backend_status(backend)[0]


def log_fused_mhc_backend_once(backend: str = "auto") -> None:
    """Say what runs each operation, once per policy and process; a UserWarning when all of it is native.

    Raises:
        InputError: the backend is unknown.
        BackendError: it cannot run here.
    """
    _validate_mhc_backend(backend)
    if backend in _BACKEND_INFO_LOGGED:
        return
    _BACKEND_INFO_LOGGED.add(backend)
    text, all_native = _mhc_backend_status(backend)
    logger.info("fused mHC backends for policy %r: %s", backend, text)
    if all_native:
        warnings.warn(
            f"fused mHC runs on the native (torch) backend alone for policy {backend!r}: {text}",
            UserWarning,
            stacklevel=2,
        )


# The operations


def fused_sinkhorn(
    input_logits: Tensor, num_iterations: int, eps: float = 1e-6, backend: MHCBackend = "auto"
) -> Tensor:
    """See `fused_mhc.fused_sinkhorn`: ``[s, b, n, n]``, in the logits' dtype."""
    _validate_mhc_backend(backend)
    return _sinkhorn(input_logits, num_iterations, eps, backend)


def fused_h_aggregate(x: Tensor, h_pre: Tensor, backend: MHCBackend = "auto") -> Tensor:
    """See `fused_mhc.fused_h_aggregate`: ``[s, b, n, C]``, ``[s, b, n]`` -> ``[s, b, C]``."""
    _validate_mhc_backend(backend)
    return _h_aggregate(x, h_pre, backend)


def fused_h_aggregate_into(x: Tensor, h_pre: Tensor, out: Tensor) -> Tensor:
    """`fused_h_aggregate` written to ``out [s, b, C]`` (dtype of ``x``), without a gradient; returns ``out``. The
    result is made first and then copied.

    Raises:
        InputError: ``out`` has another shape, dtype or device, or an argument is not as `fused_h_aggregate` says.
    """
    with torch.no_grad():
        result = _h_aggregate(x, h_pre)
        check_shape("out", out, result.shape, "[..., C]")
        check_devices("x", x, out=out)
        if out.dtype is not x.dtype:
            raise InputError(f"out: expected dtype {x.dtype} (that of x), got {out.dtype}")
        return out.copy_(result)


def fused_h_post_bda(
    h_res: Tensor,
    original_residual: Tensor,
    h_post: Tensor,
    x: Tensor,
    bias: Tensor | None,
    backend: MHCBackend = "auto",
) -> Tensor:
    """See `fused_mhc.fused_h_post_bda`: ``h_res [s, b, n(old), n(new)]`` -> ``[s, b, n, C]``."""
    _validate_mhc_backend(backend)
    return _h_post_bda(h_res, original_residual, h_post, x, bias, backend)


def fused_proj_rms_compute_h(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    n: int,
    eps: float = 1e-6,
    compute_h_eps: float = 1e-6,
    backend: MHCBackend = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `fused_mhc.fused_proj_rms_compute_h`; the four results are rounded to
    ``torch.promote_types(x.dtype, weight.dtype)``, as Megatron's are."""
    _validate_mhc_backend(backend)
    mixes = _proj_rms_compute_h(
        x, weight, alpha_pre, alpha_post, alpha_res, bias, n, eps, compute_h_eps, backend
    )
    dtype = torch.promote_types(x.dtype, weight.dtype)
    h_pre, h_post, h_res, r = (t.to(dtype) for t in mixes)
    return h_pre, h_post, h_res, r


def _aggregate_bwd(backend: str, needs: list[bool], *tensors: Tensor) -> list[Tensor]:
    """The needed gradients of ``x`` and ``h_pre`` from ``grad_output, x, h_pre``."""
    grads: list[Tensor] = torch.ops.fused_mhc.h_aggregate_bwd(*tensors, needs, backend)
    return grads


def _post_bwd(backend: str, needs: list[bool], *tensors: Tensor | None) -> list[Tensor]:
    """The needed gradients of all but the first of ``grad_output, h_res, original_residual, h_post, x, bias``."""
    grads: list[Tensor] = torch.ops.fused_mhc.h_post_bda_bwd(*tensors, 0.0, None, needs, backend)
    return grads


def _post_gradients(backend: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """``(g_h_res, g_residual, g_h_post, g_x, g_bias)``, the last None without a bias."""
    needs = [t is not None for t in tensors[1:]]
    return spread(_post_bwd(backend, needs, *tensors), needs, 5)


class FusedHAggregate(torch.autograd.Function):
    """``apply(x, h_pre, backend)``: `fused_h_aggregate` as a Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h_pre: Tensor, backend: MHCBackend) -> Tensor:
        ctx.save_for_backward(x, h_pre)
        ctx.backend = backend
        return fused_h_aggregate(x, h_pre, backend)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        needs = needed(ctx, 2, grad_output)
        return spread(_aggregate_bwd(ctx.backend, needs, grad_output, *ctx.saved_tensors), needs, 3)


class FusedHPostBDA(torch.autograd.Function):
    """``apply(h_res, original_residual, h_post, x, bias, backend)``: `fused_h_post_bda` as a Function."""

    @staticmethod
    def forward(
        ctx: Any,
        h_res: Tensor,
        original_residual: Tensor,
        h_post: Tensor,
        x: Tensor,
        bias: Tensor | None,
        backend: MHCBackend,
    ) -> Tensor:
        ctx.save_for_backward(h_res, original_residual, h_post, x, bias)
        ctx.backend = backend
        return fused_h_post_bda(h_res, original_residual, h_post, x, bias, backend)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        needs = needed(ctx, 5, grad_output)
        return spread(_post_bwd(ctx.backend, needs, grad_output, *ctx.saved_tensors), needs, 6)


# One backend by name


def triton_fused_sinkhorn(input_logits: Tensor, num_iterations: int, eps: float = 1e-6) -> Tensor:
    """`fused_sinkhorn` with ``backend="triton"``."""
    return fused_sinkhorn(input_logits, num_iterations, eps, "triton")


def _triton_h_aggregate_fwd(x: Tensor, h_pre: Tensor) -> Tensor:
    with torch.no_grad():
        return fused_h_aggregate(x, h_pre, "triton")


def _triton_h_post_bda_fwd(
    h_res: Tensor, original_residual: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None
) -> Tensor:
    with torch.no_grad():
        return fused_h_post_bda(h_res, original_residual, h_post, x, bias, "triton")


def _triton_h_post_bda_bwd(
    grad_output: Tensor,
    h_res: Tensor,
    original_residual: Tensor,
    h_post: Tensor,
    x: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor | None, ...]:
    return _post_gradients("triton", grad_output, h_res, original_residual, h_post, x, bias)


_TRITON_IMPLS: dict[str, Callable[..., Any]] = {
    "sinkhorn": triton_fused_sinkhorn,
    "h_aggregate_fwd": _triton_h_aggregate_fwd,
    "h_post_bda_fwd": _triton_h_post_bda_fwd,
    "h_post_bda_bwd": _triton_h_post_bda_bwd,
}


def _get_triton_sinkhorn(backend: str = "auto") -> Callable[..., Any] | None:
    return _TRITON_IMPLS["sinkhorn"] if _backend_uses_triton(backend) else None


def _get_triton_h_aggregate_fwd(backend: str = "auto") -> Callable[..., Any] | None:
    return _TRITON_IMPLS["h_aggregate_fwd"] if _backend_uses_triton(backend) else None


def _get_triton_h_post_bda_fwd(backend: str = "auto") -> Callable[..., Any] | None:
    return _TRITON_IMPLS["h_post_bda_fwd"] if _backend_uses_triton(backend) else None


def _get_triton_h_post_bda_bwd(backend: str = "auto") -> Callable[..., Any] | None:
    return _TRITON_IMPLS["h_post_bda_bwd"] if _backend_uses_triton(backend) else None


def _cutile_sinkhorn_fwd(
    input_logits: Tensor, num_iterations: int, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """``(matrices, what the backward reads)``."""
    with torch.no_grad():
        return fused_sinkhorn(input_logits, num_iterations, eps, "cutile"), input_logits


def _cutile_sinkhorn_bwd(
    grad_output: Tensor, M_init: Tensor, num_iterations: int, eps: float = 1e-6
) -> Tensor:
    """Gradient of the logits; ``M_init`` is the second result of `_cutile_sinkhorn_fwd`."""
    grad: Tensor = torch.ops.fused_mhc.sinkhorn_bwd(
        grad_output, M_init, num_iterations, eps, "softmax", "cutile"
    )
    return grad


def _cutile_h_aggregate_bwd(grad_output: Tensor, x: Tensor, h_pre: Tensor) -> tuple[Tensor, ...]:
    return tuple(_aggregate_bwd("cutile", [True, True], grad_output, x, h_pre))


def _cutile_h_post_bda_bwd(
    grad_output: Tensor,
    h_res: Tensor,
    original_residual: Tensor,
    h_post: Tensor,
    x: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor | None, ...]:
    return _post_gradients("cutile", grad_output, h_res, original_residual, h_post, x, bias)


def _torch_h_aggregate_bwd(grad_output: Tensor, x: Tensor, h_pre: Tensor) -> tuple[Tensor, ...]:
    """``(g_x, g_h_pre)``, natively."""
    return tuple(_aggregate_bwd("native", [True, True], grad_output, x, h_pre))


def _torch_h_post_bda_bwd(
    grad_output: Tensor,
    h_res: Tensor,
    original_residual: Tensor,
    h_post: Tensor,
    x: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """``(g_h_res, g_residual, g_h_post, g_x, g_bias or None)``, natively."""
    return _post_gradients("native", grad_output, h_res, original_residual, h_post, x, bias)


def _torch_proj_rms_compute_h(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    n: int,
    eps: float,
    compute_h_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fused_proj_rms_compute_h`, natively."""
    return fused_proj_rms_compute_h(
        x, weight, alpha_pre, alpha_post, alpha_res, bias, n, eps, compute_h_eps, "native"
    )


# In Megatron's place

_PARENTS = ("megatron", "megatron.core", "megatron.core.fusions")
_NAME = "fused_mhc_kernels"
_installed: ExitStack | None = None


def _package(name: str, undo: ExitStack) -> ModuleType:
    """The package ``name``; an empty one where Megatron is not installed, which ``undo`` takes away again."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    package = ModuleType(name)
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    package.__path__ = []
    undo.callback(sys.modules.pop, name)
    sys.modules[name] = package
    parent, _, leaf = name.rpartition(".")
    if parent:
        undo.callback(delattr, sys.modules[parent], leaf)
        setattr(sys.modules[parent], leaf, package)
    return package


def install() -> Callable[[], None]:
    """Register this module as ``megatron.core.fusions.fused_mhc_kernels``; a second call does nothing.

    Call it before the model is built: Megatron imports the functions when it builds a ``HyperConnectionModule`` with
    ``use_fused_mhc``. Where Megatron is not installed, empty parent packages are registered, so that the path can
    be imported.

    Returns:
        `uninstall`, which puts everything back.
    """
    global _installed  # noqa: PLW0603
    if _installed is None:
        with ExitStack() as undo:
            for name in _PARENTS:
                package = _package(name, undo)
            path, module = f"{_PARENTS[-1]}.{_NAME}", sys.modules[__name__]
            for space, key in ((sys.modules, path), (vars(package), _NAME)):
                undo.callback(*((space.__setitem__, key, space[key]) if key in space else (space.pop, key)))
                space[key] = module
            _installed = undo.pop_all()
    return uninstall


def uninstall() -> None:
    """Undo `install`; does nothing when it has not been called. Models that were built in between keep this module's
    functions."""
    global _installed  # noqa: PLW0603
    if _installed is not None:
        _installed.close()
        _installed = None
