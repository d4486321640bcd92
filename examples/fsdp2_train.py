"""A small language model with hyper-connections under FSDP2: bf16 sublayers, fp32 mappings, checkpointed blocks.

    torchrun --nproc-per-node 2 examples/fsdp2_train.py

Runs on CPUs (gloo) as on GPUs (NCCL). What is special to hyper-connections are three lines: `check_ranks_agree` once,
`fully_shard_mappings` before the blocks are sharded, and ``cast_forward_inputs=False``.
"""

from __future__ import annotations

import argparse
import gc
import os
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fused_mhc import HyperConnection, input_expand
from fused_mhc.integrations.distributed import check_ranks_agree, fully_shard_mappings
from fused_mhc.nn.contract import LearnedOutputContract

VOCABULARY = 64


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            nn.RMSNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        q, k, v = parts.unbind(2)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Two sublayers, each with its hyper-connection; streams in, streams out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.mlp = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.attention_hc, self.mlp_hc = HyperConnection(width), HyperConnection(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp_hc(self.attention_hc(x, self.attention), self.mlp)


class Model(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.contract = LearnedOutputContract(width)
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = input_expand(self.embedding(ids), 4)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(self.contract(x)))


def batch(rank: int, step: int, device: torch.device, size: int = 8, length: int = 32) -> Tensor:
    """Sequences that count upwards from a random start, others on every rank."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(VOCABULARY, (size, 1), generator=random)
    return ((start + torch.arange(length)) % VOCABULARY).to(device)


def train(width: int, depth: int, steps: int, device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    check_ranks_agree(device=device)

    torch.manual_seed(0)
    model = Model(width, depth).to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    fully_shard_mappings(model, mesh=mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        ids = batch(rank, step, device)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            dist.all_reduce(loss.detach(), op=dist.ReduceOp.SUM)
            if rank == 0:
                print(f"step {step:3d}  loss {loss.item() / ranks:.4f}")
    if rank == 0:
        print(
            f"mapping parameters: {model.blocks[0].mlp_hc.weight.dtype}, logits: {logits.dtype}, {ranks} ranks"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    arguments = parser.parse_args()
    # The streams leave a mapping as they came, which FSDP notes as a view; nothing here writes to them in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(arguments.width, arguments.depth, arguments.steps, device)
    gc.collect()  # a sharded model holds its process groups; they end before the interpreter does
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
