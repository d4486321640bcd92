"""The demo's byte-level transformer, with three ways to carry its residual stream.

All three are built from the same branches (attention and feed-forward in turn) and differ only in what connects
them: one stream with an addition, n streams with `HyperConnection`, n streams with `SinglePassHyperConnection`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...nn import HyperConnection, SinglePassHyperConnection
from ...ops.contract import input_expand, output_contract
from ...ops.mega_mhc import mega_mhc_exit

__all__ = ["HEAD_SIZE", "MODELS", "PLAIN", "ByteModel", "build"]

BYTES = 256
HEAD_SIZE = 32


def _rotate(x: Tensor) -> Tensor:
    """Rotary positions for ``[batch, heads, length, head size]``."""
    length, size = x.shape[-2:]
    rates = 10000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.arange(length, device=x.device)[:, None] * rates
    sin, cos = angles.sin(), angles.cos()
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class Attention(nn.Module):
    """Causal self-attention, ``[batch, length, hidden]`` to the same."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // HEAD_SIZE
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear maps with a GELU between, ``[batch, length, hidden]`` to the same."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.out = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x)))


class ByteModel(nn.Module, ABC):
    """Bytes to logits of the next byte; what lies between is the subclass's way to connect the branches.

    Args:
        hidden: width of one stream, a multiple of `HEAD_SIZE`.
        layers: pairs of attention and feed-forward.
        streams: residual streams.
    """

    def __init__(self, hidden: int, layers: int, streams: int) -> None:
        super().__init__()
        self.streams = streams
        self.embed = nn.Embedding(BYTES, hidden)
        self.branches = nn.ModuleList(
            kind(hidden) for _ in range(layers) for kind in (Attention, FeedForward)
        )
        self.head = nn.Linear(hidden, BYTES, bias=False)
        with torch.no_grad():
            for branch in self.branches:  # branches start small beside the stream that they add to
                assert isinstance(branch, (Attention, FeedForward))
                branch.out.weight.mul_((2 * layers) ** -0.5)
            self.head.weight.mul_(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, length]`` bytes to ``[batch, length, 256]`` logits."""
        return self.head(self.connect(self.embed(tokens), None))

    def mixing(self, tokens: Tensor) -> Tensor:
        """The residual mixing matrices of every site and token: ``[sites, batch * length, n(old), n(new)]``."""
        matrices: list[Tensor] = []
        self.connect(self.embed(tokens), matrices)
        return torch.stack([m.flatten(0, -3) for m in matrices])

    @abstractmethod
    def connect(self, x: Tensor, matrices: list[Tensor] | None) -> Tensor:
        """Carry ``x [batch, length, hidden]`` through all branches to the normed features of the head.

        Each site's residual mixing matrix is appended to ``matrices`` where a list is given.
        """


class ResidualModel(ByteModel):
    """One stream: ``x + branch(norm(x))``."""

    def __init__(self, hidden: int, layers: int, streams: int) -> None:
        super().__init__(hidden, layers, 1)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2 * layers + 1))

    def connect(self, x: Tensor, matrices: list[Tensor] | None) -> Tensor:
        for branch, norm in zip(self.branches, self.norms, strict=False):  # the last norm is the head's
            x = x + branch(norm(x))
            if matrices is not None:
                matrices.append(x.new_ones(*x.shape[:-1], 1, 1))
        return self.norms[-1](x)


class TwoPassModel(ByteModel):
    """n streams, two-pass: a site mixes before its branch (`pre`) and again after it (`post`)."""

    def __init__(self, hidden: int, layers: int, streams: int) -> None:
        super().__init__(hidden, layers, streams)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2 * layers + 1))
        self.sites = nn.ModuleList(HyperConnection(hidden, streams) for _ in range(2 * layers))

    def connect(self, x: Tensor, matrices: list[Tensor] | None) -> Tensor:
        x = input_expand(x, self.streams)
        for branch, norm, site in zip(self.branches, self.norms, self.sites, strict=False):
            assert isinstance(site, HyperConnection)
            layer_input, state = site.pre(x)
            x = site.post(state, branch(norm(layer_input)))
            if matrices is not None:
                matrices.append(state.h_res)
        return self.norms[-1](output_contract(x))


class SinglePassModel(ByteModel):
    """n streams, single pass: a site ends the branch before it and begins its own (`entry`, `forward`, `exit`).

    The norm before each branch is the site's own; the head has one too.
    """

    def __init__(self, hidden: int, layers: int, streams: int) -> None:
        super().__init__(hidden, layers, streams)
        self.sites = nn.ModuleList(SinglePassHyperConnection(hidden, streams) for _ in range(2 * layers))
        self.norm = nn.RMSNorm(hidden)

    def connect(self, x: Tensor, matrices: list[Tensor] | None) -> Tensor:
        first, *rest = self.sites
        assert isinstance(first, SinglePassHyperConnection)
        block_input, residual, mixes = first.entry(x)
        for branch, site in zip(self.branches, rest, strict=False):
            output = branch(block_input)
            if matrices is not None:
                matrices.append(mixes.residual)
            block_input, residual, mixes = site(output, residual, mixes)
        output = self.branches[-1](block_input)
        if matrices is not None:
            matrices.append(mixes.residual)
        return mega_mhc_exit(output, residual, mixes.pre, mixes.post, mixes.residual, self.norm.weight)


#: The model that the others are compared with.
PLAIN = "plain residual"
MODELS: dict[str, type[ByteModel]] = {
    PLAIN: ResidualModel,
    "two-pass mHC": TwoPassModel,
    "single-pass mHC": SinglePassModel,
}


def build(name: str, hidden: int, layers: int, streams: int, seed: int) -> ByteModel:
    """The model of that name. One seed gives every model the same embedding, branches and head."""
    torch.manual_seed(seed)
    return MODELS[name](hidden, layers, streams)
