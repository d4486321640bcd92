"""``python -m benchmarks.deepseek_v4``: Hugging Face's DeepSeek V4, with and without the fused hyper-connections.

One random model of four layers at hidden size 4096 (16 experts, so that it fits beside its gradients), bf16 with the
hyper-connections' parameters in fp32, runs a forward and a training step (forward and backward) as it is, then
switched over by `apply_fused_mhc_to_deepseek_v4`. Writes ``<gpu>-deepseek-v4.json`` in the form of the other results;
its rows bear ``tokens_per_s`` and ``peak_bytes`` (memory at its highest in the step, parameters included) beside, and
``bytes`` is what the hyper-connections alone must move. ``--tiny --device cpu`` shows that it runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fused_mhc import InputError, backend_status
from fused_mhc.integrations.transformers import (
    apply_fused_mhc_to_deepseek_v4,
    undo_fused_mhc_to_deepseek_v4,
)
from fused_mhc.testing.bench import run_bench
from fused_mhc.testing.byte_counts import fewest_bytes
from fused_mhc.testing.timing import copy_bandwidth, measure

RESULTS = Path(__file__).parent / "results"
LAYERS = 4
#: Sizes that differ from DeepSeek V4's own: enough experts to route among, a vocabulary that does not outweigh it all.
SIZES = {
    "full": {"hidden_size": 4096, "n_routed_experts": 16, "vocab_size": 32768},
    "tiny": {
        "hidden_size": 32,
        "n_routed_experts": 4,
        "vocab_size": 64,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
    },
}


def build(size: str, device: torch.device) -> Any:
    """The model: seeded random weights, bf16, its hyper-connections in fp32. Built without memory, so that each weight
    is drawn once, where it stays, in its own dtype."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(num_hidden_layers=LAYERS, num_hash_layers=0, pad_token_id=0, **SIZES[size])
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config).to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith(("attn_hc", "ffn_hc", "hc_head")):
            module.float()
    model.to_empty(device=device)
    torch.manual_seed(0)
    model.init_weights()
    return model.train()


def least_bytes(direction: str, tokens: int, n: int, width: int) -> int:
    """What the hyper-connections of a step must move: two mappings and two updates a layer, and the head."""
    ways = ("fwd",) if direction == "fwd" else ("fwd", "bwd")

    def moved(op: str) -> int:
        return sum(fewest_bytes(op, way, tokens, n, width, 2) for way in ways)

    return 2 * LAYERS * (moved("mhc_pre") + moved("h_post_bda")) + moved("learned_output_contract")


def timed(call: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, int | None]:
    """Median microseconds, and bytes allocated at the highest point of a call."""
    timing = measure(call, device, warmup=3, repeats=repeats, cold=False)
    if device.type != "cuda":
        return timing.median, None
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return timing.median, torch.cuda.max_memory_allocated(device)


def rows(model: Any, ids: torch.Tensor, backend: str, repeats: int) -> Iterator[dict[str, Any]]:
    """One row a direction of the model as it is now."""
    n, width = model.config.hc_mult, model.config.hidden_size

    def forward() -> None:
        with torch.no_grad():
            model(ids, labels=ids)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids).loss.backward()

    for direction, call in (("fwd", forward), ("fwd+bwd", step)):
        us, peak = timed(call, ids.device, repeats)
        model.zero_grad(set_to_none=True)
        row = {
            "op": "deepseek_v4",
            "direction": direction,
            "backend": backend,
            "T": ids.numel(),
            "n": n,
            "C": width,
            "dtype": "bfloat16",
            "us": round(us, 1),
            "bytes": least_bytes(direction, ids.numel(), n, width),
            "pct_copy": None,
            "note": f"{LAYERS} layers, {model.config.n_routed_experts} experts, {tuple(ids.shape)} tokens",
            "tokens_per_s": round(ids.numel() / us * 1e6, 1),
            "peak_bytes": peak,
        }
        memory = "" if peak is None else f", {peak / 2**30:.2f} GiB"
        print(f"{backend:>12} {direction:>7}: {row['tokens_per_s']:>10.0f} tokens/s{memory}", flush=True)
        yield row


def main(
    device: Annotated[str, typer.Option(help="Where to run.")] = "cuda",
    backend: Annotated[str, typer.Option(help="Policy of the switched model.")] = "auto",
    batch: Annotated[int, typer.Option(help="Sequences in a step.", min=1)] = 4,
    length: Annotated[int, typer.Option(help="Tokens in a sequence.", min=1)] = 1024,
    repeats: Annotated[int, typer.Option(help="Timed calls a row.", min=1)] = 10,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of a few thousand parameters.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    commit: Annotated[str, typer.Option(help="Recorded in the results. Default: git's HEAD.")] = "",
) -> None:
    """Tokens per second and memory of DeepSeek V4, unpatched and patched."""
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device: expected one that exists, got 'cuda' without a GPU")
    if not commit:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = asked.stdout.strip() or "unknown"
    bandwidth = copy_bandwidth(where, 1 << (20 if tiny else 30))
    report = run_bench([], [], device=where, commit=commit, copy_gbps=bandwidth).to_dict()
    report["transformers"] = importlib.metadata.version("transformers")
    began = time.perf_counter()
    model = build("tiny" if tiny else "full", where)
    size = sum(p.numel() for p in model.parameters())
    print(f"built {size:,} parameters in {time.perf_counter() - began:.1f} s", flush=True)
    ids = torch.randint(1, model.config.vocab_size, (batch, length), device=where)
    report["rows"] = list(rows(model, ids, "transformers", repeats))
    apply_fused_mhc_to_deepseek_v4(model, backend=backend)
    chosen = next(row.chosen for row in backend_status(backend, where) if row.op == "mhc_pre")
    report["rows"] += rows(model, ids, chosen, repeats)
    undo_fused_mhc_to_deepseek_v4(model)
    gpu = re.sub(r"[^a-z0-9]+", "-", report["gpu"].lower()).strip("-")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{gpu}-deepseek-v4.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
