"""Train one model of the demo, and what is measured while it trains."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .corpus import Corpus
from .model import ByteModel

__all__ = ["Result", "Settings", "train"]

#: The held-out loss is read this many times, evenly spread, the last time after the last step.
READINGS = 12


@dataclass(frozen=True)
class Settings:
    """What all models of one demo share."""

    steps: int
    device: torch.device
    streams: int
    hidden: int
    seed: int
    layers: int = 4
    batch: int = 8
    length: int = 128
    held_out_windows: int = 24
    learning_rate: float = 4e-3
    warmup: int = 20

    def rate(self, step: int) -> float:
        """Learning rate of a step (from 0): a linear warm-up, then a cosine down to a tenth."""
        warm = min(1.0, (step + 1) / min(self.warmup, self.steps))
        return self.learning_rate * warm * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))


@dataclass
class Result:
    """One trained model's figures. Losses are in nats a byte.

    Attributes:
        train_loss: of each step's batch.
        held_out: ``(steps done, loss)``, always of the same windows.
        step_seconds: median time of a training step.
        peak_bytes: parameters, optimizer state, and the most that one training step holds beside them.
    """

    name: str
    parameters: int
    train_loss: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    step_seconds: float = 0.0
    peak_bytes: int = 0

    def last_third(self) -> tuple[float, float]:
        """Held-out loss after two thirds of the steps (the last reading before), and at the end."""
        done, end = self.held_out[-1]
        before = [loss for step, loss in self.held_out if step <= done * 2 / 3]
        return (before or [self.held_out[0][1]])[-1], end


def _windows(data: Tensor, starts: Tensor, length: int) -> Tensor:
    """Bytes ``starts[i] .. starts[i] + length`` (one more than ``length``: inputs and targets overlap), int64."""
    return data[starts[:, None] + torch.arange(length + 1)].long()


def _loss(model: ByteModel, windows: Tensor) -> Tensor:
    # The plain form of attention on a GPU: the fused ones add up their gradients in no fixed order.
    plain = sdpa_kernel(SDPBackend.MATH) if windows.is_cuda else contextlib.nullcontext()
    with plain:
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW that lets matrices decay; norms, biases and mixing scales do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def train(
    name: str, model: ByteModel, corpus: Corpus, settings: Settings, report: Callable[[float], None]
) -> Result:
    """Train ``model`` and measure it.

    Every model of one demo sees the same batches in the same order, and is judged on the same windows.

    Args:
        name: the model's name in the result.
        model: fresh parameters, on the settings' device.
        corpus: what to train on.
        settings: shared by all models.
        report: called after each step with its loss.
    """
    result = Result(name, sum(p.numel() for p in model.parameters()))
    generator = torch.Generator().manual_seed(settings.seed)
    held_out_starts = torch.linspace(
        0, len(corpus.held_out) - settings.length - 1, settings.held_out_windows
    ).long()
    held_out = _windows(corpus.held_out, held_out_starts, settings.length).to(settings.device)
    readings = {max(1, round(settings.steps * k / READINGS)) for k in range(1, READINGS + 1)}
    optimizer = _optimizer(model)
    seconds = []
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step)
        starts = torch.randint(len(corpus.train) - settings.length, (settings.batch,), generator=generator)
        batch = _windows(corpus.train, starts, settings.length).to(settings.device)
        began = time.perf_counter()
        loss = _loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        result.train_loss.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - began)
        report(result.train_loss[-1])
        if step + 1 in readings:
            with torch.no_grad():
                result.held_out.append((step + 1, _loss(model, held_out).item()))
    result.step_seconds = statistics.median(seconds)
    kept = sum(t.nbytes for t in model.parameters())
    kept += sum(
        t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)
    )
    result.peak_bytes = kept + _step_peak(model, batch)
    return result


def _step_peak(model: ByteModel, batch: Tensor) -> int:
    """Most bytes that a forward and a backward hold at once, gradients included, beyond what was there before."""
    if batch.is_cuda:
        torch.cuda.reset_peak_memory_stats(batch.device)
        before = torch.cuda.memory_allocated(batch.device)
        _loss(model, batch).backward()
        peak = torch.cuda.max_memory_allocated(batch.device) - before
    else:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with _quiet(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            _loss(model, batch).backward()
        peak = _peak_of(profile)
    model.zero_grad()
    return peak


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing on the process's standard error: the profiler's library reports its start and stop there."""
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _peak_of(profile: torch.profiler.profile) -> int:
    """The highest sum of allocations less releases, in order of time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    memory = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    held = peak = 0
    for event in memory:
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak
