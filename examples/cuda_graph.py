"""Forward and backward of a two-pass mHC model as one CUDA graph: captured once, replayed with new inputs and weights.

    python examples/cuda_graph.py              # needs a CUDA device
    python examples/cuda_graph.py --no-graph   # the same steps without a graph, on a CPU too

Every step is taken twice, by replay and by an eager copy of the model, with the same bits in loss and gradients.
Exit code 1: they differ. 2: there is no CUDA device.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_mhc import HyperConnection, input_expand, output_contract

HIDDEN, STREAMS, LAYERS, TOKENS = 256, 4, 3, 64


class Model(nn.Module):
    """``[T, C]`` to ``[T, C]`` through sublayers in bf16; the connections' parameters are fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.connections = nn.ModuleList(HyperConnection(HIDDEN, STREAMS) for _ in range(LAYERS))
        self.sublayers = nn.ModuleList(
            nn.Sequential(
                nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
            )
            for _ in range(LAYERS)
        ).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        streams = input_expand(x, STREAMS)
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            streams = connection(streams, sublayer)
        return output_contract(streams)


def forward_backward(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """The loss; the gradients are in the parameters, new ones each time."""
    model.zero_grad(set_to_none=True)
    loss = F.mse_loss(model(x).float(), target.float())
    loss.backward()
    return loss.detach()


def capture(model: nn.Module, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    """`forward_backward` as a graph. A replay reads what then lies in ``x``, in ``target`` and in the parameters, and
    writes the tensors that the capture made: the loss that it returns and the gradients."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_backward(model, x, target)  # kernels are compiled and libraries loaded outside of the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = forward_backward(model, x, target)

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--no-graph", action="store_true", help="the same steps without a graph")
    arguments = parser.parse_args()
    there = torch.cuda.is_available()
    if not (there or arguments.no_graph):
        parser.error("a CUDA graph needs a CUDA device, and there is none (--no-graph runs on a CPU)")
    device = torch.device("cuda" if there else "cpu")

    torch.manual_seed(0)
    model = Model().to(device)
    twin = copy.deepcopy(model)
    x, target = torch.zeros(2, TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
    step: Callable[[], Tensor]
    if arguments.no_graph:
        step = functools.partial(forward_backward, model, x, target)
    else:
        step = capture(model, x, target)
    # They change parameters in place and leave the gradients' tensors where they are: the graph writes to those.
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, twin)]
    for index in range(arguments.steps):
        x.normal_()
        target.copy_(x.roll(1, dims=-1))
        loss = step()
        expected = forward_backward(twin, x, target)
        pairs = [(loss, expected)]
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            pairs.append((ours.grad, theirs.grad))
        same = all(torch.equal(a, b) for a, b in pairs)
        print(f"step {index + 1}: loss {loss.item():.4f}, {len(pairs) - 1} gradients, same bits: {same}")
        if not same:
            sys.exit(1)
        for optimizer in optimizers:
            optimizer.step()


if __name__ == "__main__":
    main()
