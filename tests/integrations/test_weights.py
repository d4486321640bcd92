"""Conversions move numbers and round none; every pair of formats goes there and back; the meaning is kept."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor

from fused_mhc import InputError, fused_h_post_bda
from fused_mhc.integrations.weights import FORMATS, convert_mapping, convert_state_dict
from fused_mhc.nn import HyperConnection

N, C = 3, 5


def mapping() -> dict[str, Tensor]:
    module = HyperConnection(C, N)
    return {name: torch.randn_like(p) for name, p in module.state_dict().items()}


@pytest.mark.parametrize(("source", "target"), list(permutations(FORMATS, 2)))
def test_round_trip(source: str, target: str) -> None:
    start = convert_mapping(mapping(), "fused_mhc", source)
    there = convert_mapping(start, source, target)
    back = convert_mapping(there, target, source)
    assert list(back) == list(start)
    assert all(
        torch.equal(back[name], start[name]) and back[name].shape == start[name].shape for name in start
    )


@pytest.mark.parametrize("target", FORMATS)
def test_names_and_shapes(target: str) -> None:
    rows, width = N * N + 2 * N, N * C
    found = convert_mapping(mapping(), "fused_mhc", target)
    alphas = {f"alpha_{part}": () if target == "liger" else (1,) for part in ("pre", "post", "res")}
    expected = {
        "fused_mhc": {"weight": (rows, width), **alphas, "bias": (rows,)},
        "deepseek_v4": {"fn": (rows, width), "scale": (3,), "base": (rows,)},
        "megatron": {"mapping_proj.weight": (rows, width), **alphas, "bias": (rows,)},
        "liger": {"phi": (width, rows), **alphas, "b": (rows,)},
    }[target]
    assert {name: tuple(value.shape) for name, value in found.items()} == expected


def test_module_loads_what_comes_back() -> None:
    module = HyperConnection(C, N)
    names = convert_mapping(dict(module.state_dict()), "fused_mhc", "deepseek_v4")
    module.load_state_dict(convert_mapping(names, "deepseek_v4", "fused_mhc"))


def test_liger_orientation() -> None:
    """Liger applies its matrix as ``[new, old]``: the same logits give the same streams."""
    ours, x = mapping(), torch.randn(N * C)
    liger = convert_mapping(ours, "fused_mhc", "liger")
    logits = (ours["weight"] @ x * ours["alpha_res"] + ours["bias"])[2 * N :].view(N, N)
    theirs = (x @ liger["phi"] * liger["alpha_res"] + liger["b"])[2 * N :].view(N, N)
    torch.testing.assert_close(theirs, logits.t())
    mixed = fused_h_post_bda(logits, x.view(N, C), torch.zeros(N), torch.zeros(C))
    torch.testing.assert_close(torch.einsum("oi,ic->oc", theirs, x.view(N, C)), mixed)


def test_dtype_and_new_storage() -> None:
    ours = {name: value.to(torch.bfloat16) for name, value in mapping().items()}
    theirs = convert_mapping(ours, "fused_mhc", "deepseek_v4")
    assert {value.dtype for value in theirs.values()} == {torch.bfloat16}
    theirs["fn"].zero_()
    assert ours["weight"].any()


@pytest.mark.parametrize(("source", "target"), list(permutations(FORMATS, 2)))
def test_state_dict_round_trip(source: str, target: str) -> None:
    """Two mappings among other parameters, some with the names of a mapping's."""
    start: dict[str, Tensor] = {"embed.weight": torch.randn(4, C), "norm.bias": torch.randn(C)}
    for layer in range(2):
        start |= {
            f"layers.{layer}.attn_hc.{name}": value
            for name, value in convert_mapping(mapping(), "fused_mhc", source).items()
        }
        start[f"layers.{layer}.linear.weight"] = torch.randn(C, C)
        start[f"layers.{layer}.linear.bias"] = torch.randn(C)
    there = convert_state_dict(start, source, target)
    assert there["embed.weight"] is start["embed.weight"]
    assert len([name for name in there if name.startswith("layers.1.attn_hc.")]) in (3, 5)
    back = convert_state_dict(there, target, source)
    assert list(back) == list(start)
    assert all(torch.equal(back[name], start[name]) for name in start)


def test_rename_prefixes() -> None:
    start = {f"model.layers.0.attn_hc.{k}": v for k, v in mapping().items()}
    found = convert_state_dict(
        start,
        "fused_mhc",
        "megatron",
        lambda prefix: prefix.replace("attn_hc", "self_attention_hyper_connection"),
    )
    assert "model.layers.0.self_attention_hyper_connection.mapping_proj.weight" in found
    assert len(convert_state_dict(mapping(), "fused_mhc", "liger")) == 5  # no prefix at all


def without(name: str) -> dict[str, Tensor]:
    return {k: v for k, v in mapping().items() if k != name}


@pytest.mark.parametrize(
    ("state", "source", "target", "told"),
    [
        (mapping(), "hf", "liger", "source: expected one of"),
        (mapping(), "fused_mhc", "hf", "target: expected one of"),
        (without("bias"), "fused_mhc", "liger", "got none named bias"),
        (mapping(), "liger", "fused_mhc", "got none named phi, b"),
        (mapping() | {"weight": torch.zeros(14, 15)}, "fused_mhc", "liger", "n\\*n \\+ 2\\*n columns"),
        (mapping() | {"weight": torch.zeros(15, 16)}, "fused_mhc", "liger", "divisible by n = 3, got 16"),
        (mapping() | {"weight": torch.zeros(15)}, "fused_mhc", "liger", "two dimensions"),
        (mapping() | {"bias": torch.zeros(14)}, "fused_mhc", "liger", "bias: expected shape"),
        (mapping() | {"alpha_res": torch.zeros(())}, "fused_mhc", "liger", "alpha_res: expected shape"),
    ],
)
def test_bad_input(state: dict[str, Tensor], source: str, target: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        convert_mapping(state, source, target)


def test_bad_state_dicts() -> None:
    with pytest.raises(InputError, match="at least one mapping in the format 'deepseek_v4'"):
        convert_state_dict(mapping(), "deepseek_v4", "liger")
    two = {f"{layer}.{k}": v for layer in "ab" for k, v in mapping().items()}
    with pytest.raises(InputError, match="twice"):
        convert_state_dict(two, "fused_mhc", "liger", lambda prefix: "same")
    with pytest.raises(InputError, match="got none named bias"):
        convert_state_dict({k: v for k, v in two.items() if k != "b.bias"}, "fused_mhc", "liger")
