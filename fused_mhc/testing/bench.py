"""The benchmark runner: every operation against the copy bandwidth of the same run, beside what else is installed.

A row is one operation in one direction on one backend (or peer) at one shape: the median time with a cold L2 cache,
and the fewest bytes the operation must move over that time as a share of the copy bandwidth. Inputs are bf16 streams
with fp32 mixes and parameters unless asked otherwise. Backward times are those of ``torch.autograd.grad`` for every
input; device time alone counts, since calls are queued ahead of the device.
"""

from __future__ import annotations

import datetime as dt
import importlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checks import check_choice
from ..device import device_info
from ..dispatch import FORWARD_ONLY, OPERATIONS, backend_status
from .byte_counts import fewest_bytes
from .inputs import CATALOGUE, Shape, make_tensors
from .timing import copy_bandwidth, measure

__all__ = [
    "CASES",
    "PEERS",
    "BenchRow",
    "Case",
    "Report",
    "case_calls",
    "host_time",
    "installed_peers",
    "run_bench",
]

#: Tokens of random data that are drawn; longer inputs repeat them (drawing on the CPU would take minutes).
_DRAWN_TOKENS = 64
#: Calls queued at a time to measure the host's cost of one (small calls: the device keeps up, so its launch queue does
#: not fill).
_HOST_CALLS = 1000

#: Calls in a graph whose time is shared among them.
_GRAPH_CALLS = 20

Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class BenchRow:
    """One measurement. ``us`` is a median in microseconds, ``bytes`` the fewest that must move, ``pct_copy`` their
    rate as a percentage of the copy bandwidth of the same run. Note ``"host"``: the host's time of a call instead,
    with calls queued back to back (``pct_copy`` is None). Note ``"graph"``: the call replayed from a CUDA graph, with a
    cold L2 cache too; ``"graph, warm"``: one of several calls that follow one another in a graph."""

    op: str
    direction: str
    backend: str
    T: int
    n: int
    C: int
    dtype: str
    us: float
    bytes: int
    pct_copy: float | None
    note: str = ""


@dataclass(frozen=True)
class Report:
    """All rows of a run, what they were measured on, and which peers could not run a case, with the reason."""

    gpu: str
    driver: str
    torch: str
    triton: str
    commit: str
    date: str
    copy_gbps: float
    rows: list[BenchRow]
    failures: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Case:
    """What to time: an operation of `CATALOGUE`, or ``"sublayer"`` (`mhc_pre`, identity, `fused_h_post_bda`);
    ``absent`` names optional tensors to leave out."""

    op: str
    shape: Shape
    dtype: torch.dtype = torch.bfloat16
    absent: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        return f"without {', '.join(self.absent)}" if self.absent else ""


CASES = (*OPERATIONS, "sublayer")


def _repeated(t: Tensor | None, count: int, shared: bool) -> Tensor | None:
    if t is None or shared:
        return t
    times = -(-count // t.shape[0]) if count else 0
    return t.repeat(times, *[1] * (t.dim() - 1))[:count].contiguous()


def _tensors(case: Case, device: torch.device) -> dict[str, Tensor | None]:
    op = "mhc_pre" if case.op == "sublayer" else case.op
    shape = case.shape
    small = Shape((min(_DRAWN_TOKENS, shape.tokens) or 1,), shape.n, shape.hidden_size)
    drawn = make_tensors(op, small, case.dtype, device=device)
    shared = CATALOGUE[op].shared
    return {
        name: None if name in case.absent else _repeated(t, shape.tokens, name in shared)
        for name, t in drawn.items()
    }


def _options(case: Case) -> dict[str, Any]:
    if case.op == "sublayer":
        return {}
    operation = CATALOGUE[case.op]
    options = {"num_iterations": 20} if case.op == "sinkhorn" else {}
    takes_n = operation.options(operation.modes[0], case.shape).get("n")
    return options if takes_n is None else {**options, "n": takes_n}


def _sublayer(backend: Any) -> Callable[..., Tensor]:
    from ..ops.h_post_bda import fused_h_post_bda
    from ..ops.mhc_pre import mhc_pre

    def call(**tensors: Any) -> Tensor:
        layer_input, h_post, h_res, x = mhc_pre(**tensors, backend=backend)
        return fused_h_post_bda(h_res, x, h_post, layer_input, backend=backend)

    return call


def _own(case: Case, backend: str) -> Callable[..., Any]:
    if case.op == "sublayer":
        return _sublayer(backend)
    operation = CATALOGUE[case.op]
    function = operation.function
    if not operation.has_backend:
        return function
    return lambda **arguments: function(**arguments, backend=backend)


def _eager(case: Case) -> Callable[..., Any]:
    """The formula as a user would write it: computed in fp32, streams returned in their own dtype."""
    from . import transcription

    def reference(**arguments: Any) -> Any:
        if case.op != "sublayer":
            return CATALOGUE[case.op].reference(**arguments)
        layer_input, h_post, h_res, x = transcription.mhc_pre(**arguments)
        return transcription.fused_h_post_bda(h_res, x, h_post, layer_input)

    def call(**arguments: Any) -> Any:
        wide = {k: v.float() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        results = reference(**wide)
        outs = results if isinstance(results, tuple) else (results,)
        width = case.shape.hidden_size
        return tuple(o.to(case.dtype) if o.shape[-1] == width else o for o in outs)

    return call


def _compiled(case: Case) -> Callable[..., Any]:
    torch.compiler.reset()  # every case is new code for the same frame, and a frame's compiles are limited
    compiled = torch.compile(_eager(case), fullgraph=True, dynamic=False)

    def call(**arguments: Any) -> Any:
        # The timed backward runs many times, so it must not be given its saved tensors' memory.
        with torch._functorch.config.patch(donated_buffer=False):
            return compiled(**arguments)

    return call


def _liger(case: Case) -> Callable[..., Any] | None:
    """Liger's operations where they do the same work (its projection includes Sinkhorn)."""
    functional = importlib.import_module("liger_kernel.transformers.functional")

    def coefficients(x: Tensor, weight: Tensor, *rest: Tensor) -> Any:
        alpha_pre, alpha_post, alpha_res, bias = rest
        return functional.liger_mhc_coeffs(x, weight, bias, alpha_pre, alpha_post, alpha_res)

    def projection(x: Tensor, n: int, **p: Tensor) -> Any:
        return coefficients(x.unflatten(-1, (n, -1)), *p.values())

    def sublayer(x: Tensor, **p: Tensor) -> Any:
        h_pre, h_post, h_res = coefficients(x, *p.values())
        return functional.liger_mhc_post_res(x, functional.liger_mhc_pre(x, h_pre), h_post, h_res)

    def post(h_res: Tensor, original_residual: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None) -> Any:
        branch = x if bias is None else x + bias
        return functional.liger_mhc_post_res(original_residual, branch, h_post, h_res)

    return {
        "h_aggregate": functional.liger_mhc_pre,
        "h_post_bda": post,
        "proj_rms_compute_h": projection,
        "sublayer": sublayer,
    }.get(case.op)


def _liger_layout(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Liger's parameters: the projection as ``[K, N]`` in bf16 (its advice for tensor cores), alphas as scalars."""
    given = dict(tensors)
    weight = given.get("weight")
    if weight is not None:
        given["weight"] = weight.T.contiguous().bfloat16()
    for name in ("alpha_pre", "alpha_post", "alpha_res"):
        alpha = given.get(name)
        if alpha is not None:
            given[name] = alpha.reshape(())
    return given


#: Name of a peer -> how to call it for a case (None where it has no such operation).
PEERS: dict[str, Callable[[Case], Callable[..., Any] | None]] = {
    "eager": _eager,
    "torch.compile": _compiled,
    "liger": _liger,
}


def installed_peers() -> list[str]:
    """The peers that can run here."""
    have_liger = importlib.util.find_spec("liger_kernel") is not None
    return [name for name in PEERS if name != "liger" or have_liger]


def _directions(
    function: Callable[..., Any],
    tensors: dict[str, Tensor | None],
    options: dict[str, Any],
    directions: Sequence[str],
) -> Calls:
    """The timed calls. The backward's graph is built once and kept."""

    def forward() -> Any:
        with torch.no_grad():
            return function(**tensors, **options)

    calls: Calls = {"fwd": forward} if "fwd" in directions else {}
    if "bwd" in directions:
        leaves = {k: None if t is None else t.detach().requires_grad_() for k, t in tensors.items()}
        results = function(**leaves, **options)
        outs = [o for o in (results if isinstance(results, tuple) else (results,)) if o.requires_grad]
        inputs = [t for t in leaves.values() if t is not None]
        cotangents = [torch.randn_like(o) for o in outs]
        calls["bwd"] = lambda: torch.autograd.grad(
            outs, inputs, cotangents, retain_graph=True, allow_unused=True
        )
    return calls


def case_calls(
    case: Case, backend: str, device: torch.device, directions: Sequence[str] = ("fwd", "bwd")
) -> Calls:
    """The calls of ``case`` on one of our backends, by direction, on seeded inputs."""
    return _directions(_own(case, backend), _tensors(case, device), _options(case), directions)


def host_time(call: Callable[[], Any], device: torch.device | str) -> float:
    """Microseconds of host time a call takes when calls are queued back to back."""
    device = torch.device(device)
    for _ in range(20):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(_HOST_CALLS):
            call()
        best = min(best, (time.perf_counter() - began) / _HOST_CALLS * 1e6)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return best


def captured(call: Callable[[], Any], times: int = 1) -> Callable[[], None]:
    """A replay of ``times`` calls from a CUDA graph, on the current device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    replay: Callable[[], None] = graph.replay
    return replay


def _fewest(case: Case, direction: str) -> int:
    shape, size = case.shape, case.dtype.itemsize
    names = ("mhc_pre", "h_post_bda") if case.op == "sublayer" else (case.op,)
    return sum(
        fewest_bytes(name, direction, shape.tokens, shape.n, shape.hidden_size, size) for name in names
    )


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none"
    asked = subprocess.run(
        [tool, "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.splitlines()[0].strip() if asked.returncode == 0 and asked.stdout else "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _able(case: Case, backend: str, directions: Sequence[str], device: torch.device) -> list[str]:
    """The directions in which our ``backend`` has all that a case needs."""
    chosen = {(row.op, row.direction): row.chosen for row in backend_status(backend, device)}
    needed = ("mhc_pre", "h_post_bda") if case.op == "sublayer" else (case.op,)

    def runs(direction: str) -> bool:
        return all(chosen[op, "fwd" if op in FORWARD_ONLY else direction] == backend for op in needed)

    return [direction for direction in directions if runs("fwd") and runs(direction)]


def _columns(
    case: Case,
    backends: Sequence[str],
    peers: Sequence[str],
    directions: Sequence[str],
    device: torch.device,
) -> Iterator[tuple[str, Any, Sequence[str]]]:
    """Name, function and directions of every backend and peer that runs a case."""
    for backend in backends:
        able = _able(case, backend, directions, device)
        if able:
            yield backend, _own(case, backend), able
    for peer in peers:
        function = PEERS[peer](case)
        if function is not None:
            yield peer, function, directions


def _time_column(
    case: Case,
    name: str,
    function: Callable[..., Any],
    tensors: dict[str, Tensor | None],
    device: torch.device,
    directions: Sequence[str],
    repeats: int,
    host: bool,
    bandwidth: float,
) -> list[BenchRow]:
    """The rows of one case on one backend or peer."""
    given = _liger_layout(tensors) if name == "liger" else tensors
    shape, dtype = case.shape, str(case.dtype).removeprefix("torch.")
    note = "with sinkhorn" if (case.op, name) == ("proj_rms_compute_h", "liger") else case.note
    rows = []
    for direction, call in _directions(function, given, _options(case), directions).items():
        size = _fewest(case, direction)
        row = (case.op, direction, name, shape.tokens, shape.n, shape.hidden_size, dtype)
        timing = measure(call, device, repeats=repeats)
        share = size / timing.median / 1e3 / bandwidth * 100
        rows.append(BenchRow(*row, round(timing.median, 2), size, round(share, 1), note))
        if host:
            rows.append(BenchRow(*row, round(host_time(call, device), 1), 0, None, "host"))
        # Autograd runs a backward on the stream of its forward, which is not the one that captures.
        if host and device.type == "cuda" and direction == "fwd":
            for kind, times in (("graph", 1), ("graph, warm", _GRAPH_CALLS)):
                replay = captured(call, times)
                us = measure(replay, device, repeats=repeats, cold=times == 1).median / times
                rows.append(
                    BenchRow(*row, round(us, 2), size, round(size / us / 1e3 / bandwidth * 100, 1), kind)
                )
    return rows


def run_bench(
    cases: Sequence[Case],
    backends: Sequence[str],
    peers: Sequence[str] = (),
    *,
    device: torch.device | str,
    directions: Sequence[str] = ("fwd", "bwd"),
    repeats: int = 30,
    host: bool = False,
    commit: str = "unknown",
    copy_gbps: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Time ``cases`` on every backend and peer.

    Args:
        cases: what to time.
        backends: names of our backends; one that cannot run an operation is passed over.
        peers: keys of `PEERS`. Default none.
        device: where.
        directions: ``"fwd"``, ``"bwd"`` or both (default).
        repeats: timed calls a row. Default 30.
        host: also time the host's cost of a call and, on a GPU, the forward in a CUDA graph. Default False.
        commit: recorded in the report.
        copy_gbps: bandwidth to divide by, when it was measured in this process; default: measured now.
        progress: called with a line before each row.

    Raises:
        InputError: an unknown case or peer.
    """
    for case in cases:
        check_choice("op", case.op, CASES)
    for peer in peers:
        check_choice("peer", peer, tuple(PEERS))
    where = torch.device(device)
    bandwidth = copy_bandwidth(where) if copy_gbps is None else copy_gbps
    rows: list[BenchRow] = []
    failures: list[str] = []
    for case in cases:
        tensors = _tensors(case, where)
        for name, function, able in _columns(case, backends, peers, directions, where):
            if progress is not None:
                progress(f"{case.op} {name} {case.shape}")
            try:
                rows += _time_column(case, name, function, tensors, where, able, repeats, host, bandwidth)
            except Exception as error:  # somebody else's code may fail in any way; ours may not
                if name not in PEERS:
                    raise
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                failures.append(f"{case.op} {case.shape} {name}: {reason}")
    return Report(
        gpu=device_info(where).name,
        driver=_driver(),
        torch=torch.__version__,
        triton=_version("triton"),
        commit=commit,
        date=dt.datetime.now(dt.timezone.utc).date().isoformat(),
        copy_gbps=round(bandwidth, 1),
        rows=rows,
        failures=failures,
    )
