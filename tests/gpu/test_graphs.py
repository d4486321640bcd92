"""CUDA graphs: forward and backward captured, replayed with changed inputs, equal eager; cold caches included."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fused_mhc.nn import HyperConnection, SinglePassHyperConnection

DEVICE = "cuda"
T, N, C = 40, 4, 256


def _two_pass() -> tuple[nn.Module, Callable[[Tensor], Tensor], tuple[int, ...]]:
    site, branch = HyperConnection(C, N, alpha_init=0.3, device=DEVICE), nn.Linear(C, C, device=DEVICE)
    return nn.ModuleList([site, branch]), lambda x: site(x, branch), (T, N, C)


def _single_pass() -> tuple[nn.Module, Callable[[Tensor], Tensor], tuple[int, ...]]:
    first, second = (SinglePassHyperConnection(C, N, alpha_init=0.3, device=DEVICE) for _ in range(2))
    branch = nn.Linear(C, C, device=DEVICE)

    def run(x: Tensor) -> Tensor:
        block_input, residual, mixes = first.entry(x)
        block_input, residual, mixes = second(branch(block_input), residual, mixes)
        return second.exit(branch(block_input), residual, mixes)

    return nn.ModuleList([first, second, branch]), run, (T, C)


@pytest.mark.parametrize("make", [_two_pass, _single_pass])
def test_replay_equals_eager(
    make: Callable[[], tuple[nn.Module, Callable[[Tensor], Tensor], tuple[int, ...]]],
) -> None:
    """F52."""
    torch.manual_seed(0)
    module, run, shape = make()
    x = torch.randn(shape, device=DEVICE, requires_grad=True)
    cotangent = torch.randn_like(run(x))
    leaves = [x, *module.parameters()]

    def step() -> list[Tensor]:
        out = run(x)
        grads = torch.autograd.grad(out, leaves, cotangent, allow_unused=True, materialize_grads=True)
        return [out.detach(), *grads]  # a graph kept alive would tie the leaves to the capturing stream

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.normal_()
            cotangent.normal_()
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert torch.equal(a, b)


_COLD = """
import torch
from fused_mhc import fused_h_post_bda, mhc_pre
from fused_mhc.testing.inputs import Shape, make_tensors

tensors = make_tensors("mhc_pre", Shape(({tokens},), 4, 160), torch.bfloat16, device="cuda")
leaves = {{k: t.requires_grad_() for k, t in tensors.items()}}

def step():
    layer_input, h_post, h_res, x = mhc_pre(**leaves)
    out = fused_h_post_bda(h_res, x, h_post, layer_input)
    return [out, *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))]

torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = step()
for _ in range(3):
    graph.replay()
torch.cuda.synchronize()
assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
"""


@pytest.mark.parametrize("tokens", [3, 5000])
def test_capture_with_a_cold_cache(tokens: int) -> None:
    """F44, F50: the first call ever is inside a capture: nothing is tuned, synchronised or allocated outside the
    graph's pool."""
    script = textwrap.dedent(_COLD.format(tokens=tokens))
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_the_example() -> None:
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "examples/cuda_graph.py"],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    assert ran.stdout.count("same bits: True") == 5
