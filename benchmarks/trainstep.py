"""A training step of a small stack of transformer blocks: plain residual, two-pass mHC, single-pass mHC.

Hidden size 4096, 32 heads, SDPA attention, SwiGLU 14336, bf16, batch 1, sequence 4096, 4 layers, fp32 mapping
parameters. A step is forward and backward; the optimiser is left out, since it costs every row the same.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from fused_mhc.errors import InputError
from fused_mhc.nn import HyperConnection, SinglePassHyperConnection, recompute_streams
from fused_mhc.ops.contract import input_expand, output_contract
from fused_mhc.testing.timing import copy_bandwidth


@dataclass(frozen=True)
class Sizes:
    hidden: int = 4096
    heads: int = 32
    inner: int = 14336
    sequence: int = 4096
    layers: int = 4
    streams: int = 4


@dataclass(frozen=True)
class StepRow:
    """One way to run the step. ``share_mhc`` is the share of the step over that of the plain residual."""

    model: str
    mode: str
    ms: float
    peak_gib: float
    over_plain_pct: float
    over_plain_gib: float


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, norm: bool) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norm = nn.RMSNorm(sizes.hidden) if norm else nn.Identity()
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    def __init__(self, sizes: Sizes, norm: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.hidden) if norm else nn.Identity()
        self.up = nn.Linear(sizes.hidden, 2 * sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        out: Tensor = self.down(F.silu(gate) * value)
        return out


class Stack(nn.Module):
    """The blocks' sublayers in a row; ``kind`` says how they are connected."""

    def __init__(self, sizes: Sizes, kind: str) -> None:
        super().__init__()
        norm = kind != "single-pass"  # the single pass normalises its block input itself
        self.kind, self.sizes = kind, sizes
        self.branches = nn.ModuleList(
            kinds(sizes, norm) for _ in range(sizes.layers) for kinds in (Attention, SwiGLU)
        )
        self.to(torch.bfloat16)
        connection = {"two-pass": HyperConnection, "two-pass recompute": HyperConnection}.get(kind)
        if kind == "single-pass":
            connection = SinglePassHyperConnection
        self.sites = nn.ModuleList(
            connection(sizes.hidden, sizes.streams) for _ in (self.branches if connection else ())
        )

    def forward(self, x: Tensor) -> Tensor:
        pairs = list(zip(self.sites, self.branches, strict=False))
        if self.kind == "plain":
            for branch in self.branches:
                x = x + branch(x)
            return x
        if self.kind == "single-pass":
            (first, branch), *rest = pairs
            block_input, residual, mixes = first.entry(x)
            output = branch(block_input)
            for site, branch in rest:
                block_input, residual, mixes = site(output, residual, mixes)
                output = branch(block_input)
            return pairs[-1][0].exit(output, residual, mixes)
        streams = input_expand(x, self.sizes.streams)
        if self.kind == "two-pass recompute":
            for start in range(0, len(pairs), 4):
                streams = recompute_streams(streams, pairs[start : start + 4]).x
        else:
            for site, branch in pairs:
                streams = site(streams, branch)
        return output_contract(streams)


KINDS = ("plain", "two-pass", "two-pass recompute", "single-pass")
MODES = ("eager", "eager, CUDA graph", "torch.compile", "torch.compile, CUDA graph")


def _step(model: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(x).backward(cotangent)

    return step


def _graphed(step: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure_step(
    kind: str, mode: str, sizes: Sizes, device: torch.device, repeats: int
) -> tuple[float, float]:
    """``(median ms, peak GiB over what inputs, weights and weight gradients take)``."""
    torch.manual_seed(0)
    with torch.device(device):
        stack = Stack(sizes, kind)
        x = torch.randn(1, sizes.sequence, sizes.hidden, dtype=torch.bfloat16, requires_grad=True)
        cotangent = torch.randn_like(x)
    for tensor in (x, *stack.parameters()):
        tensor.grad = torch.zeros_like(tensor)
    call: Callable[[Tensor], Tensor] = stack
    if mode.startswith("torch.compile"):
        torch.compiler.reset()
        call = torch.compile(stack)
    step = _step(call, x, cotangent)
    for _ in range(3):
        step()
    if mode.endswith("CUDA graph"):
        step = _graphed(step)
        step()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            step()
            times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times), 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(times), torch.cuda.max_memory_allocated() / 2**30


def run(
    sizes: Sizes, device: torch.device, repeats: int, kinds: list[str], modes: list[str]
) -> Iterator[list[StepRow]]:
    """Every mode's rows, when they are measured."""
    for mode in modes:
        rows: list[StepRow] = []
        base: tuple[float, float] | None = None
        for kind in kinds:
            if kind == "two-pass recompute" and mode.startswith("torch.compile"):
                continue  # hooks on saved tensors are not traced
            ms, peak = measure_step(kind, mode, sizes, device, repeats)
            base = base or (ms, peak)
            over = 100 * (ms / base[0] - 1)
            rows.append(
                StepRow(kind, mode, round(ms, 2), round(peak, 2), round(over, 1), round(peak - base[1], 2))
            )
            print(
                f"{mode:28s} {kind:20s} {ms:8.2f} ms  +{over:5.1f} %  {peak:6.2f} GiB  {peak - base[1]:+.2f}",
                flush=True,
            )
            if device.type == "cuda":
                torch.cuda.empty_cache()
        yield rows


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Bars: the step of every model, a group for each mode."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(9, 4), layout="constrained").subplots()
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    kinds = list(dict.fromkeys(row["model"] for row in rows))
    for k, kind in enumerate(kinds):
        mine = [(modes.index(row["mode"]), row) for row in rows if row["model"] == kind]
        bars = axes.bar(
            [at + 0.8 * (k + 0.5) / len(kinds) - 0.4 for at, _ in mine],
            [row["ms"] for _, row in mine],
            0.8 / len(kinds),
            label=kind,
        )
        labels = [f"{row['over_plain_pct']:+.1f} %" if k else f"{row['ms']:.1f} ms" for _, row in mine]
        axes.bar_label(bars, labels, fontsize=7)
    axes.set_xticks(range(len(modes)), modes)
    axes.set_ylabel("ms a step (forward and backward)")
    axes.set_title(title)
    axes.legend(ncols=len(kinds), fontsize=8, loc="lower center")
    axes.figure.savefig(path, dpi=120)


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    commit: Annotated[str, typer.Option(help="Recorded in the result.")] = "unknown",
    repeats: Annotated[int, typer.Option(help="Timed steps a row.")] = 10,
    tiny: Annotated[bool, typer.Option(help="Tiny sizes, to try the script on a CPU.")] = False,
    kind: Annotated[list[str] | None, typer.Option(help="Only this model; may be repeated.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="Only this mode; may be repeated.")] = None,
) -> None:
    """Time the step in every mode and write the result."""
    for option, names, known in (("--kind", kind, KINDS), ("--mode", mode, MODES)):
        for name in names or ():
            if name not in known:
                raise InputError(f"{option}: expected one of {', '.join(known)}, got {name!r}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = Sizes(64, 4, 128, 32, 2, 4) if tiny else Sizes()
    from fused_mhc.testing.bench import run_bench

    head = run_bench(
        [], [], device=device, commit=commit, copy_gbps=copy_bandwidth(device, 1 << 20 if tiny else 2 << 30)
    )
    modes = mode or (["eager"] if device.type == "cpu" else list(MODES))
    report = {**head.to_dict(), "sizes": asdict(sizes)}
    for rows in run(sizes, device, repeats, kind or list(KINDS), modes):
        report["rows"] += [asdict(r) for r in rows]
        out.write_text(json.dumps(report, indent=1) + "\n")  # each mode is kept, whatever becomes of the next
        print(f"wrote {out}")
    plot(report["rows"], f"Training step on {head.gpu}", out.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
