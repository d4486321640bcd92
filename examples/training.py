"""What the examples share: their text, and a training loop."""

from __future__ import annotations

import argparse
import inspect

import torch
import torch.nn.functional as F
from torch import nn

CONTEXT = 8


def train(build: type[nn.Module]) -> None:
    """Train ``build()`` to predict a byte of a library module's source from the eight before it.

    The model takes ``[T, 8]`` bytes as int64 and gives ``[T, 256]`` logits.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(inspect.getsource(argparse), "utf-8"), dtype=torch.uint8).long()
    windows = text.unfold(0, CONTEXT + 1, 1)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        batch = windows[torch.randint(len(windows), (256,))]
        loss = F.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 or (step + 1) % 50 == 0 or step + 1 == steps:
            print(f"step {step + 1:4}: {loss.item():.3f} nats a byte")
