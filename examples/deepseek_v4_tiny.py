"""A tiny random DeepSeek V4 of transformers, switched over to the fused hyper-connections and back.

    python examples/deepseek_v4_tiny.py

Needs ``pip install 'fused-mhc[hf]'``; runs on a CPU in seconds. For a real checkpoint the one line is the same:
``apply_fused_mhc_to_deepseek_v4()`` before ``from_pretrained``, or ``apply_fused_mhc_to_deepseek_v4(model)`` after.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from fused_mhc import backend_status
from fused_mhc.integrations.transformers import (
    apply_fused_mhc_to_deepseek_v4,
    undo_fused_mhc_to_deepseek_v4,
)

VOCABULARY = 64


def build(device: torch.device) -> DeepseekV4ForCausalLM:
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        num_attention_heads=4,
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=8,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        num_hash_layers=0,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=None,
    )
    return DeepseekV4ForCausalLM(config).to(device)


def batch(device: torch.device, size: int = 8, length: int = 32) -> torch.Tensor:
    """Sequences that count upwards from a random start: learnt in a few steps."""
    start = torch.randint(VOCABULARY - 1, (size, 1))
    return ((start + torch.arange(length)) % (VOCABULARY - 1) + 1).to(device)


def train(model: DeepseekV4ForCausalLM, steps: int, device: torch.device) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        ids = batch(device)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    model = build(device)
    ids = batch(device)
    with torch.no_grad():
        expected = model(ids).logits
        apply_fused_mhc_to_deepseek_v4(model)
        off = (model(ids).logits - expected).abs().max() / expected.abs().max()
    print(*(row for row in backend_status(device=device) if row.op in ("mhc_pre", "h_post_bda")), sep="\n")
    print(f"logits differ by at most {off:.1e} of the largest")

    began = time.perf_counter()
    losses = train(model, arguments.steps, device)
    print(f"fused:       loss {losses[0]:.4f} -> {losses[-1]:.4f} in {time.perf_counter() - began:.1f} s")
    prompt = batch(device, 1, 8)
    told = model.eval().generate(prompt, max_new_tokens=8, do_sample=False)
    undo_fused_mhc_to_deepseek_v4(model)
    same = torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), told)
    print(f"generated {told[0, 8:].tolist()} after {prompt[0].tolist()}; unswitched the same: {same}")
    plain = train(build(device), arguments.steps, device)
    print(f"transformers: loss {plain[0]:.4f} -> {plain[-1]:.4f}")


if __name__ == "__main__":
    main()
