"""The engine of ``fused-mhc tune``: times the configurations that give the same bits, and keeps the fastest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ops import _tuning
from .bench import Case, case_calls
from .timing import measure

__all__ = ["TuneRow", "run_tune"]

#: A candidate must be this much faster than the heuristic one to be stored: less is noise.
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class TuneRow:
    """One candidate of one kernel: its median time as part of the operation's call, and whether it was kept."""

    kernel: str
    arguments: str
    config: str
    us: float
    default: bool
    kept: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _tensors(result: Any) -> list[Tensor]:
    found = result if isinstance(result, (tuple, list)) else [result]
    return [t for t in found if isinstance(t, Tensor)]


def _tune_call(
    call: Callable[[], Any],
    asked: dict[tuple[Hashable, ...], _tuning.Asked],
    device: torch.device,
    repeats: int,
    progress: Callable[[str], None] | None,
) -> tuple[list[TuneRow], dict[tuple[str, tuple[Hashable, ...]], Any]]:
    rows: list[TuneRow] = []
    choices: dict[tuple[str, tuple[Hashable, ...]], Any] = {}
    for key, request in asked.items():
        with _tuning.overridden(key, request.default):
            expected = _tensors(call())
        times: dict[Any, float] = {}
        for config in request.candidates:
            if progress is not None:
                progress(f"{request.kernel} {astuple(config)}")
            with _tuning.overridden(key, config):
                same = all(torch.equal(a, b) for a, b in zip(_tensors(call()), expected, strict=True))
                # candidates() promises equal bits; a wrong promise must not reach anybody's results.
                assert same, f"{request.kernel}: {config} gives other bits than {request.default}"
                times[config] = measure(call, device, repeats=repeats).median
        best = min(times, key=lambda c: times[c])
        if times[best] > times[request.default] * (1 - _LEAST_GAIN):
            best = request.default
        choices[request.kernel, request.arguments] = best
        rows += [
            TuneRow(
                request.kernel,
                " ".join(map(str, request.arguments)),
                str(astuple(config)),
                round(us, 2),
                config == request.default,
                config == best,
            )
            for config, us in times.items()
        ]
    return rows, choices


def run_tune(
    cases: Sequence[Case],
    device: torch.device | str,
    *,
    backend: str = "triton",
    repeats: int = 30,
    progress: Callable[[str], None] | None = None,
) -> tuple[list[TuneRow], Path]:
    """Time every candidate of every kernel that ``cases`` run, and store the fastest for this kind of device.

    Args:
        cases: operations and shapes; a choice holds for every number of tokens.
        device: where.
        backend: whose kernels. Default ``"triton"``.
        repeats: timed calls a candidate. Default 30.
        progress: called with a line before each candidate.

    Returns:
        The rows, and the file that holds the choices.
    """
    where = torch.device(device)
    rows: list[TuneRow] = []
    choices: dict[tuple[str, tuple[Hashable, ...]], Any] = {}
    for case in cases:
        for call in case_calls(case, backend, where).values():
            with _tuning.recording() as asked:
                call()
            found, chosen = _tune_call(call, asked, where, repeats, progress)
            rows += found
            choices.update(chosen)
    return rows, _tuning.store_choices(where, choices)
