"""Two-pass mHC around any sublayer: a byte predictor that trains on a CPU in seconds.

Run: python examples/two_pass.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fused_mhc import HyperConnection, input_expand, output_contract
from training import CONTEXT, train

HIDDEN, STREAMS, LAYERS = 64, 4, 3


class Predictor(nn.Module):
    """The last eight bytes, ``[T, 8]``, to logits of the next one, ``[T, 256]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256 * CONTEXT, HIDDEN)
        self.connections = nn.ModuleList(HyperConnection(HIDDEN, STREAMS) for _ in range(LAYERS))
        self.sublayers = nn.ModuleList(
            nn.Sequential(
                nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Sequential(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 256))

    def forward(self, context: Tensor) -> Tensor:
        places = 256 * torch.arange(CONTEXT, device=context.device)
        x = input_expand(self.embed(context + places).sum(-2), STREAMS)  # [T, n, C]
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            layer_input, state = connection.pre(x)  # collapse the streams: [T, C]
            x = connection.post(state, sublayer(layer_input))  # mix them, add the output to each
        return self.head(output_contract(x))


if __name__ == "__main__":
    train(Predictor)
