"""A tiny random DeepSeek V4 of transformers, switched over and not: same numbers, same weights, undone without trace.

Bounds. fp32: the two do the same sums in other orders; over the few hundred roundings that lie between a mapping and
the logits 1e-5 of the largest logit is ample, and for a gradient 2e-5 of its largest element plus 2e-7 of the largest
of all gradients (the gradient of a scale is a sum that cancels). bf16: neither is the truth; both are compared with
the fp32 model of the same weights, and the switched one may not be further away than 1.3 times the other.
"""

from __future__ import annotations

import copy
import importlib.metadata
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_mhc import BackendError, InputError
from fused_mhc.integrations.transformers import (
    apply_fused_mhc_to_deepseek_v4,
    undo_fused_mhc_to_deepseek_v4,
)
from fused_mhc.testing.compare import assert_bit_equal

modeling: Any = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

CLASSES = ("DeepseekV4HyperConnection", "DeepseekV4DecoderLayer", "DeepseekV4HyperHead")


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """Nothing is left of a patch after a test."""
    before = {name: vars(getattr(modeling, name)).copy() for name in CLASSES}
    yield
    undo_fused_mhc_to_deepseek_v4()
    assert {name: vars(getattr(modeling, name)).copy() for name in CLASSES} == before


def tiny(**options: Any) -> Any:
    """One layer of each kind of attention, one of them with the hash router."""
    from transformers import DeepseekV4Config

    kinds = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "layer_types": list(kinds),
        "compress_rates": {kinds[1]: 2, kinds[2]: 4},
        "num_attention_heads": 4,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
        "sliding_window": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_hash_layers": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    return DeepseekV4Config(**sizes | options)


def build(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return modeling.DeepseekV4ForCausalLM(tiny(**options)).train()


def tokens(length: int = 12) -> Tensor:
    return torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(7))


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and every gradient of one training step."""
    model.zero_grad()
    out = model(tokens(), labels=tokens())
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Within the fp32 bounds above."""
    off = (found[0] - expected[0]).abs().max() / expected[0].abs().max()
    assert off <= 1e-5, f"logits: off by {off:.1e} of the largest"
    assert found[1].keys() == expected[1].keys()
    largest = max(g.abs().max() for g in expected[1].values())
    for name, grad in expected[1].items():
        off = (found[1][name] - grad).abs().max()
        assert off <= 2e-5 * grad.abs().max() + 2e-7 * largest, f"{name}: off by {off:.1e}"


def assert_equal_steps(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]
) -> None:
    assert_bit_equal(found[0], expected[0], "logits")
    for name, grad in expected[1].items():
        assert_bit_equal(found[1][name], grad, name)


# Same numbers


@pytest.mark.parametrize("n", [1, 3, 4])
def test_logits_and_gradients(n: int) -> None:
    model = build(n, hc_mult=n)
    expected = step(model)
    names = list(model.state_dict())
    apply_fused_mhc_to_deepseek_v4(model)
    assert_same(step(model), expected)
    assert list(model.state_dict()) == names
    undo_fused_mhc_to_deepseek_v4(model)
    assert_equal_steps(step(model), expected)


@pytest.mark.parametrize("mode", ["weights", "autocast"])
def test_bf16(mode: str) -> None:
    """Every expert and every compressed entry is chosen: a choice that a rounding turns over is no measure."""

    def run() -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"):
            logits, grads = step(model)
        return logits.float(), torch.cat([g.float().flatten() for g in grads.values()])

    def error(found: Tensor, exact: Tensor) -> float:
        return float((found - exact).norm() / exact.norm())

    model = build(3, n_routed_experts=2, index_topk=32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    logits, grads = step(model)
    exact = logits, torch.cat([g.flatten() for g in grads.values()])
    if mode == "weights":
        model = model.bfloat16()
    theirs = [error(*pair) for pair in zip(run(), exact, strict=True)]
    apply_fused_mhc_to_deepseek_v4(model)
    ours = [error(*pair) for pair in zip(run(), exact, strict=True)]
    assert all(a <= 1.3 * b for a, b in zip(ours, theirs, strict=True)), f"{ours} against {theirs}"
    assert ours[0] <= 2**-6


def test_generation_token_for_token() -> None:
    model = build().eval()
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(tokens(5), **options)
    apply_fused_mhc_to_deepseek_v4(model)
    assert torch.equal(model.generate(tokens(5), **options), expected)


def test_the_classes_return_what_they_returned() -> None:
    """Other callers of the modules get the three mixes and the head's output, in the same dtypes."""
    torch.manual_seed(0)
    model = build()
    x = torch.randn(2, 3, 4, 32).bfloat16()
    connection, head = model.model.layers[0].attn_hc, model.model.hc_head
    expected = [*connection(x), head(x)]
    apply_fused_mhc_to_deepseek_v4(model)
    for found, exact in zip([*connection(x), head(x)], expected, strict=True):
        assert found.dtype == exact.dtype
        torch.testing.assert_close(
            found, exact, rtol=2**-7 if exact.dtype is torch.bfloat16 else 1e-5, atol=1e-6
        )


# With the rest of the library


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = build()
    apply_fused_mhc_to_deepseek_v4(model)
    expected = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_equal_steps(step(model), expected)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about graph breaks in the model's own code
def test_compile() -> None:
    """The hyper-connections trace as one graph each; a whole model compiles (its own code breaks the graph)."""
    model = build(num_hidden_layers=1, layer_types=["sliding_attention"])
    apply_fused_mhc_to_deepseek_v4(model)
    connection = model.model.layers[0].attn_hc
    x = torch.randn(2, 3, 4, 32)
    compiled = torch.compile(connection, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(x), connection(x), strict=True):
        assert_bit_equal(found.detach(), expected.detach())
    expected = step(model)
    model.compile(backend="eager")
    assert_same(step(model), expected)


def test_trainer_step(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    def trained(switch: bool) -> dict[str, Tensor]:
        model = build()
        if switch:
            apply_fused_mhc_to_deepseek_v4(model)
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            optim="sgd",
            learning_rate=1.0,
            gradient_checkpointing=True,
        )
        data = [{"input_ids": row, "labels": row} for row in tokens()]
        result = Trainer(model, arguments, train_dataset=data).train()
        assert result.global_step == 1
        return {name: p.detach() for name, p in model.named_parameters()}

    theirs, ours = trained(False), trained(True)
    start = dict(build().named_parameters())
    moved = max((theirs[name] - start[name]).abs().max() for name in start)
    assert moved > 1e-3
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() <= 2e-5 * moved + 1e-6, name


def test_save_and_load(tmp_path: Path) -> None:
    """A switched model saves what an unswitched one loads, and the other way round."""
    model = build().eval()
    expected = model(tokens()).logits
    apply_fused_mhc_to_deepseek_v4(model)
    model.save_pretrained(tmp_path)
    ours = model(tokens()).logits
    loaded = modeling.DeepseekV4ForCausalLM.from_pretrained(tmp_path)
    assert_bit_equal(loaded(tokens()).logits, expected)
    apply_fused_mhc_to_deepseek_v4()
    loaded = modeling.DeepseekV4ForCausalLM.from_pretrained(tmp_path)
    assert_bit_equal(loaded(tokens()).logits, ours)


def test_copies() -> None:
    """A copy is switched as its model is, and a pickle needs nothing of this library to load."""
    model = build().eval()
    expected = model(tokens()).logits
    apply_fused_mhc_to_deepseek_v4(model)
    ours = model(tokens()).logits
    assert_bit_equal(copy.deepcopy(model)(tokens()).logits, ours)
    stored = pickle.dumps(model)
    undo_fused_mhc_to_deepseek_v4()
    assert b"fused_mhc." not in stored
    assert_bit_equal(pickle.loads(stored)(tokens()).logits, expected)


# What is switched


def is_fused(model: Any) -> bool:
    """Whether the fused operations run: only they name themselves in the graph."""
    graph: list[Any] = [model(tokens()).logits.grad_fn]
    seen: set[Any] = set()
    while graph:
        node = graph.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        graph.extend(parent for parent, _ in node.next_functions)
    return any("MhcPre" in type(node).__name__ for node in seen)


def test_one_model_or_all() -> None:
    first, second = build(), build()
    apply_fused_mhc_to_deepseek_v4(first)
    assert (is_fused(first), is_fused(second)) == (True, False)
    apply_fused_mhc_to_deepseek_v4(first, backend="native")  # again, with another backend
    apply_fused_mhc_to_deepseek_v4()
    assert (is_fused(first), is_fused(second), is_fused(build())) == (True, True, True)
    with pytest.raises(InputError, match="leave the model out"):
        undo_fused_mhc_to_deepseek_v4(second)
    undo_fused_mhc_to_deepseek_v4(first)
    assert is_fused(second)  # the classes still are
    undo_fused_mhc_to_deepseek_v4()
    assert (is_fused(first), is_fused(second)) == (False, False)


def test_undo_of_the_last_model_restores_the_classes() -> None:
    original = modeling.DeepseekV4DecoderLayer.forward
    first, second = build(), build()
    apply_fused_mhc_to_deepseek_v4(first)
    apply_fused_mhc_to_deepseek_v4(second)
    assert modeling.DeepseekV4DecoderLayer.forward is not original
    undo_fused_mhc_to_deepseek_v4(first)
    assert (is_fused(first), is_fused(second)) == (False, True)
    undo_fused_mhc_to_deepseek_v4(second)
    assert modeling.DeepseekV4DecoderLayer.forward is original


def test_named_backend_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MHC_FORCE_BACKEND", raising=False)
    monkeypatch.setenv("MHC_DISABLE_TRITON", "1")
    model = build()
    apply_fused_mhc_to_deepseek_v4(model, backend="triton")
    with pytest.raises(BackendError, match="MHC_DISABLE_TRITON"):
        model(tokens())


# Bad input: an error that says what to do, and nothing changed


def refused(told: str, *args: Any, **options: Any) -> None:
    before = {name: vars(getattr(modeling, name)).copy() for name in CLASSES}
    with pytest.raises(InputError, match=told):
        apply_fused_mhc_to_deepseek_v4(*args, **options)
    assert {name: vars(getattr(modeling, name)).copy() for name in CLASSES} == before
    for model in args:
        if isinstance(model, nn.Module):
            assert not any("fused_mhc_backend" in vars(module) for module in model.modules())


@pytest.mark.parametrize("version", ["5.16.3", "4.57.0", None])
def test_unsupported_version(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", told)
    refused(f"expected version 5.17 or newer, got {version or 'none'}.*pip install")


def test_unknown_form_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor, more: Tensor) -> Tensor:
        return x + more

    forward.__module__ = modeling.__name__
    monkeypatch.setattr(modeling.DeepseekV4HyperHead, "forward", forward)
    refused(
        "DeepseekV4HyperHead.forward: expected the parameters self, x, got self, x, more.*not supported yet"
    )


def test_patched_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    with monkeypatch.context() as patch:
        patch.setattr(modeling.DeepseekV4DecoderLayer, "forward", forward)
        refused(
            "DeepseekV4DecoderLayer.forward: expected the one of transformers.*undo the other patch first"
        )
    model = build()
    layer = model.model.layers[1]
    layer.forward = layer.forward
    refused("model.layers.1: expected a module that runs its class's forward.*without a model", model)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), "deepseek-ai/DeepSeek-V4", object()])
def test_unsupported_model(model: Any) -> None:
    refused("model: expected a DeepSeek V4 model of transformers", model)


def test_half_switched() -> None:
    model, other = build(), build()
    apply_fused_mhc_to_deepseek_v4(model)
    model.model.layers[1] = other.model.layers[1]
    with pytest.raises(InputError, match=r"layers.1 not; call undo_fused_mhc_to_deepseek_v4\(model\) first"):
        apply_fused_mhc_to_deepseek_v4(model)
    undo_fused_mhc_to_deepseek_v4(model)
    apply_fused_mhc_to_deepseek_v4(model)
    assert is_fused(model)


@pytest.mark.parametrize(("setting", "value"), [("hc_mult", 3), ("hidden_size", 16)])
def test_weights_that_do_not_fit_the_configuration(setting: str, value: int) -> None:
    model = build()
    setattr(model.config, setting, value)
    refused(r"attn_hc.fn: expected shape .* for config.hc_mult", model)


@pytest.mark.parametrize(("setting", "value"), [("hc_mult", 17), ("hc_eps", 0.0)])
def test_settings_out_of_range(setting: str, value: float) -> None:
    model = build()
    setattr(model.config, setting, value)
    refused(f"config.{setting}: expected", model)


def test_unknown_backend() -> None:
    refused("backend: expected one of", backend="cuda")
    refused("backend: expected one of", build(), backend="cuda")
