"""Which backend runs an operation: one table, one rule, and the reasons in words.

The rule: ``auto`` takes, per operation and direction, the first backend of `PREFERENCE` that can run on the
tensor's device, number of streams and dtype (cuTile before them where `CUTILE_WINS` says so); a backend asked for by
name (argument or ``MHC_FORCE_BACKEND``) never falls back. A backend's kernels for an operation lie in its folder
(``fused_mhc/ops/<folder>/<module>.py``) and are loaded only when asked for; the host functions have one name on every
backend: ``<op>_fwd`` and ``<op>_bwd``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from . import cutile, env
from .checks import check_backend, check_choice
from .device import device_info
from .errors import BackendError

__all__ = [
    "MHC_BACKEND_DETERMINISM",
    "OPERATIONS",
    "BackendRow",
    "MHCBackend",
    "backend_status",
    "is_cutile_available",
    "is_triton_available",
    "log_fused_mhc_backend_once",
    "resolve",
]

logger = logging.getLogger("fused_mhc")

MHCBackend = Literal["auto", "native", "triton", "cutile"]
DIRECTIONS = ("fwd", "bwd")
SCHEDULES = ("auto", "fused", "mega")

#: What is certified about repeats with equal inputs: "deterministic" only where tests hold it (native) or a kept run of
#: ``python -m benchmarks.bits`` shows it (``benchmarks/results/*-bits.json``).
MHC_BACKEND_DETERMINISM: dict[str, str] = {
    "native": "deterministic",
    "triton": "deterministic",
    "cutile": "unknown",
}

#: Operation -> folder under fused_mhc/ops that holds its kernels.
OPERATIONS: dict[str, str] = {
    "sinkhorn": "sinkhorn",
    "h_aggregate": "h_aggregate",
    "h_post_bda": "h_post_bda",
    "proj_rms_compute_h": "proj_rms_compute_h",
    "fused_add_3": "fused_add",
    "input_expand": "contract",
    "output_contract": "contract",
    "learned_output_contract": "contract",
    "mhc_pre": "mhc_pre",
    "mega_mhc": "mega_mhc",
    "mega_mhc_entry": "mega_mhc",
    "mega_mhc_exit": "mega_mhc",
}

#: Operations whose backward is plain casts of the gradient, with no kernel to choose.
FORWARD_ONLY = ("fused_add_3",)

_MODULES = {"native": "native", "triton": "_triton", "cutile": "_cutile"}
#: Order in which ``auto`` tries the backends on a device that is not a CPU.
PREFERENCE = ("triton", "native")
#: (architecture, operation, direction) where cuTile was measured faster than Triton and its repeats are certified:
#: there ``auto`` tries it first. On sm_90 it is faster nowhere (``benchmarks/results/*-cutile.json``); no other
#: architecture has been measured.
CUTILE_WINS: frozenset[tuple[str, str, str]] = frozenset()


@dataclass(frozen=True)
class BackendRow:
    """One line of `backend_status`: what runs an operation in one direction, and why nothing else does."""

    op: str
    direction: str
    chosen: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        why = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return f"{self.op} {self.direction}: {self.chosen}" + (f" ({why})" if why else "")


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is absent
        return False


@functools.lru_cache(maxsize=None)
def _host(op: str, direction: str, backend: str) -> Callable[..., Any] | None:
    """The host function, or None where the backend has none for this operation."""
    name = f"fused_mhc.ops.{OPERATIONS[op]}.{_MODULES[backend]}"
    if not _has_module(name):
        return None
    host: Callable[..., Any] | None = getattr(importlib.import_module(name), f"{op}_{direction}", None)
    return host


def _probe_device(backend: str, device: torch.device) -> str | None:
    """Why ``backend`` cannot run on ``device`` at all; None if it can."""
    if backend == "native":
        return None
    if env.disabled(backend):
        return f"switched off by MHC_DISABLE_{backend.upper()}"
    if backend == "cutile":
        return cutile.why_not(device)
    if not _has_module("triton"):
        return "the package triton is not installed"
    if device.type == "cuda" or (device.type == "cpu" and env.interpreting()):
        return None
    if device.type == "cpu":
        return "Triton kernels need a GPU (or TRITON_INTERPRET=1 to interpret them on the CPU)"
    return f"Triton kernels are not offered on device type {device.type!r}"


def _max_streams(backend: str, op: str) -> int:
    if backend == "cutile" or (backend == "triton" and op.startswith("mega_mhc")):
        return 8
    return 16


def _why_not(
    op: str, direction: str, backend: str, device: torch.device, n: int | None, double: bool
) -> str | None:
    """Why ``backend`` cannot run this call; None if it can."""
    reason = _probe_device(backend, device)
    if reason is not None:
        return reason
    if double and backend != "native":
        return "float64 runs on native only"
    limit = _max_streams(backend, op)
    if n is not None and n > limit:
        return f"{op} runs with at most {limit} streams there, got {n}"
    if _host(op, direction, backend) is None:
        return f"no {backend} kernel for {op} {direction}"
    return None


def _order(op: str, direction: str, policy: str, device: torch.device) -> tuple[str, ...]:
    """The backends that a policy tries, first to last."""
    if policy != "auto":
        return (policy,)
    if device.type == "cpu":
        return ("native",)
    if CUTILE_WINS and (device_info(device).arch, op, direction) in CUTILE_WINS:
        return ("cutile", *PREFERENCE)
    return PREFERENCE


def _pick(
    op: str, direction: str, policy: str, device: torch.device, n: int | None, double: bool
) -> tuple[str | None, dict[str, str]]:
    """The backend that runs the call (None: the named one cannot) and why those tried before it do not."""
    reasons: dict[str, str] = {}
    for backend in _order(op, direction, policy, device):
        reason = _why_not(op, direction, backend, device, n, double)
        if reason is None:
            return backend, reasons
        reasons[backend] = reason
    return None, reasons


def _choose(
    op: str, direction: str, policy: str, device: torch.device, n: int | None, double: bool
) -> tuple[str | None, dict[str, str]]:
    """The backend that runs the call (None: the named one cannot) and why each other one does not."""
    chosen, reasons = _pick(op, direction, policy, device, n, double)
    for backend in _MODULES:
        if backend != chosen and backend not in reasons:
            reason = _why_not(op, direction, backend, device, n, double)
            reasons[backend] = reason or (
                f"{policy} was asked for" if policy != "auto" else f"auto prefers {chosen}"
            )
    return chosen, reasons


def _policy(backend: str) -> str:
    forced = env.forced_backend()
    return backend if forced is None else forced


_RESOLVED: dict[tuple[Any, ...], Callable[..., Any]] = {}


def resolve(
    op: str,
    direction: str,
    backend: str,
    device: torch.device,
    n: int | None = None,
    double: bool = False,
    schedule: str = "fused",
) -> Callable[..., Any]:
    """The host function that runs ``op`` in ``direction``.

    Args:
        op: a key of `OPERATIONS`.
        direction: ``"fwd"`` or ``"bwd"``.
        backend: ``"auto"`` or a name; ``MHC_FORCE_BACKEND`` overrides it.
        device: where the tensors lie.
        n: number of streams, where the operation has one.
        double: True when the compute dtype is float64.
        schedule: ``"fused"`` (also what ``"auto"`` means) or ``"mega"`` (a task-graph Program).

    Raises:
        BackendError: the named backend cannot run the call; the message says why.
        InputError: ``MHC_FORCE_BACKEND`` or ``MHC_DISABLE_*`` holds a value that is not understood.
    """
    key = (op, direction, backend, device, n, double, schedule, env.dispatch_state())
    host = _RESOLVED.get(key)
    if host is None:
        policy = _policy(backend)
        for name in _MODULES:
            env.disabled(name)  # a value that is not understood is an error, whatever runs
        # Not `_choose`: what cuTile could do is asked of its compiler, and only where that matters.
        chosen, reasons = _pick(op, direction, policy, device, n, double)
        if chosen is None:
            raise BackendError(
                f"backend {policy!r} cannot run {op} {direction} on {device}: {reasons[policy]}"
            )
        if schedule == "mega":
            host = _mega_host(op, direction, chosen)
        else:
            host = _host(op, direction, chosen)
        assert host is not None  # _why_not has looked
        _RESOLVED[key] = host
        if policy == "auto":
            log_fused_mhc_backend_once("auto")
    return host


def _mega_host(op: str, direction: str, backend: str) -> Callable[..., Any]:
    """The host that runs a Program instead of the backend's own kernels (offered by `fused_mhc.runtime`)."""
    if not _has_module("fused_mhc.runtime.hosts"):
        raise BackendError(
            f"schedule 'mega' cannot run {op} {direction}: the task-graph runtime is not built in"
        )
    hosts = importlib.import_module("fused_mhc.runtime.hosts")
    host: Callable[..., Any] = hosts.program_host(op, direction, backend)
    return host


def is_triton_available() -> bool:
    """True when Triton kernels can run here now: Triton is installed, not switched off, and there is a CUDA device
    (or the interpreter is on)."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return _probe_device("triton", torch.device(kind)) is None


def is_cutile_available() -> bool:
    """True when cuTile kernels can run here now: not switched off, and a small one compiles for the current device
    (or did before)."""
    return torch.cuda.is_available() and _probe_device("cutile", torch.device("cuda")) is None


def _default_device() -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def backend_status(backend: str = "auto", device: torch.device | str | None = None) -> list[BackendRow]:
    """What would run each operation, and why nothing else does.

    Args:
        backend: the policy to explain; default ``"auto"``. ``MHC_FORCE_BACKEND`` overrides it.
        device: where the tensors would lie; default the current CUDA device, else the CPU.

    Returns:
        One `BackendRow` per operation and direction (four streams, float32 computation). ``chosen`` is ``"none"``
        where the named backend cannot run it.

    Raises:
        InputError: ``backend`` is unknown.
    """
    check_backend(backend)
    where = _default_device() if device is None else torch.device(device)
    rows = []
    for op in OPERATIONS:
        for direction in ("fwd",) if op in FORWARD_ONLY else DIRECTIONS:
            chosen, reasons = _choose(op, direction, _policy(backend), where, 4, False)
            rows.append(BackendRow(op, direction, chosen or "none", reasons))
    return rows


_LOGGED: set[str] = set()


def log_fused_mhc_backend_once(backend: str = "auto") -> None:
    """Say at INFO level, once per policy and process, which backend runs each operation and why.

    Args:
        backend: the policy to explain; default ``"auto"``.

    Raises:
        InputError: ``backend`` is unknown.
    """
    check_backend(backend)
    if backend in _LOGGED or not logger.isEnabledFor(logging.INFO):
        return
    _LOGGED.add(backend)
    where = _default_device()
    logger.info("fused_mhc backends for policy %r on %s (%s):", backend, where, device_info(where).name)
    for row in backend_status(backend, where):
        logger.info("  %s", row)


def check_schedule(value: Any) -> None:
    """``value`` names a schedule.

    Raises:
        InputError: it does not.
    """
    check_choice("schedule", value, SCHEDULES)
