"""Single-pass mHC: one fused boundary between sublayers; the state travels as arguments and results.

Run: python examples/single_pass.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fused_mhc import SinglePassHyperConnection
from training import CONTEXT, train

HIDDEN, STREAMS, LAYERS = 64, 4, 3


class Predictor(nn.Module):
    """The last eight bytes, ``[T, 8]``, to logits of the next one, ``[T, 256]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256 * CONTEXT, HIDDEN)
        self.sites = nn.ModuleList(SinglePassHyperConnection(HIDDEN, STREAMS) for _ in range(LAYERS))
        # No norm here: each site ends with the RMSNorm of its sublayer.
        self.sublayers = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(HIDDEN, 256)

    def forward(self, context: Tensor) -> Tensor:
        places = 256 * torch.arange(CONTEXT, device=context.device)
        first, *rest = self.sites
        block_input, residual, mixes = first.entry(self.embed(context + places).sum(-2))
        output = self.sublayers[0](block_input)
        for site, sublayer in zip(rest, self.sublayers[1:], strict=True):
            block_input, residual, mixes = site(output, residual, mixes)
            output = sublayer(block_input)
        return self.head(self.sites[-1].exit(output, residual, mixes))


if __name__ == "__main__":
    train(Predictor)
