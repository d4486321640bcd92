"""The Triton kernels of the elementwise operations in the interpreter, against native on the same inputs.

Where both round at the same places in the same order, the bits are equal: every forward of the streams, the gradients
of the streams and of the branch. Dot products and Sinkhorn add or divide in another order and are held to fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_mhc.ops.contract import _triton as contract
from fused_mhc.ops.contract import native as contract_native
from fused_mhc.ops.fused_add import _triton as add
from fused_mhc.ops.fused_add import native as add_native
from fused_mhc.ops.h_aggregate import _triton as aggregate
from fused_mhc.ops.h_aggregate import native as aggregate_native
from fused_mhc.ops.h_post_bda import _triton as post
from fused_mhc.ops.h_post_bda import native as post_native
from fused_mhc.ops.sinkhorn import _triton as sinkhorn
from fused_mhc.ops.sinkhorn import native as sinkhorn_native
from fused_mhc.testing.compare import bit_equal

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: (tokens, n, C, dtype): every kind of n, odd widths, a tail of a block, no tokens.
SHAPES = [
    (0, 4, 8, torch.bfloat16),
    (1, 1, 1, torch.float32),
    (17, 2, 5, torch.float32),
    (2, 3, 37, torch.float16),
    (1, 4, 1028, torch.bfloat16),
    (1, 4, 1040, torch.float32),
    (1, 5, 24, torch.bfloat16),
    (1, 8, 33, torch.float32),
    (1, 16, 3, torch.bfloat16),
]


def near(actual: Tensor, exact: Tensor, relative: float) -> None:
    """Every element within ``relative`` of the largest, and half a unit in the last place of its dtype."""
    if exact.numel():
        allowed = relative * exact.abs().max() + exact.abs() * torch.finfo(actual.dtype).eps / 2
        assert ((actual.double() - exact).abs() <= allowed).all()


def streams(shape: tuple[int, int, int, torch.dtype]) -> dict[str, Tensor]:
    tokens, n, width, dtype = shape
    sizes = {
        "x": (tokens, n, width),
        "grad": (tokens, n, width),
        "branch": (tokens, width),
        "h_res": (tokens, n, n),
        "h_post": (tokens, n),
        "bias": (width,),
    }
    mixes = ("h_res", "h_post", "bias")
    return {k: torch.randn(s, dtype=torch.float32 if k in mixes else dtype) for k, s in sizes.items()}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_aggregate(shape: tuple[int, int, int, torch.dtype]) -> None:
    t = streams(shape)
    x, h, grad = t["x"], t["h_post"], t["branch"]
    assert bit_equal(aggregate.h_aggregate_fwd(x, h), aggregate_native.h_aggregate_fwd(x, h))
    g_x, g_h = aggregate.h_aggregate_bwd(grad, x, h, [True, True])
    assert bit_equal(g_x, aggregate_native.h_aggregate_bwd(grad, x, h, [True, False])[0])
    near(g_h, aggregate_native.h_aggregate_bwd(grad.double(), x.double(), h.double(), [False, True])[0], 1e-6)


@pytest.mark.parametrize(("with_bias", "dropout_p"), [(False, 0.0), (True, 0.25)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_post(shape: tuple[int, int, int, torch.dtype], with_bias: bool, dropout_p: float) -> None:
    t = streams(shape)
    inputs = (t["h_res"], t["x"], t["h_post"], t["branch"], t["bias"] if with_bias else None)
    drop = (dropout_p, torch.tensor(-0x123456789ABCDEF) if dropout_p else None)
    assert bit_equal(post.h_post_bda_fwd(*inputs, *drop), post_native.h_post_bda_fwd(*inputs, *drop))
    needs = [True, True, True, True, with_bias]
    actual = post.h_post_bda_bwd(t["grad"], *inputs, *drop, needs)
    same = post_native.h_post_bda_bwd(t["grad"], *inputs, *drop, needs)
    exact = post_native.h_post_bda_bwd(
        t["grad"].double(), *(v.double() if v is not None else None for v in inputs), *drop, needs
    )
    assert bit_equal(actual[1], same[1])
    assert bit_equal(actual[3], same[3])
    for k in range(0, len(actual), 2):
        assert actual[k].dtype is same[k].dtype
        near(actual[k], exact[k], 1e-6)


@pytest.mark.parametrize("chunks", [1, 63, 512, 1030])
def test_second_stage_of_the_bias_gradient(chunks: int) -> None:
    sums, out = torch.randn(chunks, 33), torch.empty(33)
    post._sum((2,), (sums, None, None, out, None, None, 1, chunks, 0), (2, 33, 1, 32, 1024), 8)
    near(out, sums.double().sum(0), 1e-6)


@pytest.mark.parametrize("needed", range(5))
def test_each_gradient_alone(needed: int) -> None:
    t = streams((3, 3, 20, torch.bfloat16))
    inputs = (t["h_res"], t["x"], t["h_post"], t["branch"], t["bias"])
    drop = (0.5, torch.tensor(3))
    every = post.h_post_bda_bwd(t["grad"], *inputs, *drop, [True] * 5)
    (alone,) = post.h_post_bda_bwd(t["grad"], *inputs, *drop, [k == needed for k in range(5)])
    near(alone, every[needed].double(), 1e-6)
    if needed < 2:
        both = aggregate.h_aggregate_bwd(t["branch"], t["x"], t["h_post"], [True, True])
        (alone,) = aggregate.h_aggregate_bwd(t["branch"], t["x"], t["h_post"], [needed == 0, needed == 1])
        assert bit_equal(alone, both[needed])


@pytest.mark.parametrize("kind", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(0, 2, 4), (3, 1, 5), (2, 4, 1030), (3, 7, 8)], ids=str)
def test_sums_and_copies(shape: tuple[int, int, int], kind: torch.dtype) -> None:
    x, row, n = torch.randn(shape).to(kind), torch.randn(shape[0], shape[2]).to(kind), shape[1]
    assert bit_equal(contract.input_expand_fwd(row, n), contract_native.input_expand_fwd(row, n))
    assert bit_equal(contract.input_expand_bwd(x), contract_native.input_expand_bwd(x))
    assert bit_equal(contract.output_contract_fwd(x), contract_native.output_contract_fwd(x))
    assert bit_equal(contract.output_contract_bwd(row, n), contract_native.output_contract_bwd(row, n))
    b, c = (
        torch.randn(shape),
        torch.randn(shape).to(torch.bfloat16).transpose(0, 1).contiguous().transpose(0, 1),
    )
    assert bit_equal(add.fused_add_3_fwd(x, b, c), add_native.fused_add_3_fwd(x, b, c))


def _strided(t: Tensor) -> list[tuple[str, Tensor]]:
    """The same values with a wider token stride, a wider row, in two leading dimensions, and in another order."""
    tokens, rest = t.shape[0], t.shape[1:]
    wide = torch.full((tokens, 3, *rest), torch.nan, dtype=t.dtype)
    wide[:, 1] = t
    rows = torch.full((*t.shape[:-1], t.shape[-1] + 3), torch.nan, dtype=t.dtype)
    rows[..., : t.shape[-1]] = t
    turned = t.reshape(2, tokens // 2, *rest).transpose(0, 1).contiguous().transpose(0, 1)
    return [
        ("token stride", wide[:, 1]),
        ("row stride", rows[..., : t.shape[-1]]),
        ("leading dimensions", t.reshape(2, tokens // 2, *rest)),
        ("order", turned),
        ("columns", t.transpose(-1, -2).contiguous().transpose(-1, -2)),
    ]


def test_strides() -> None:
    """F35, F36: the same bits wherever the values lie; NaN around them is never read."""
    t = streams((4, 3, 16, torch.bfloat16))
    x, h, branch, h_res = t["x"], t["h_post"], t["branch"], t["h_res"]
    calls: list[tuple[Tensor, Callable[[Tensor], Any]]] = [
        (x, lambda v: aggregate.h_aggregate_fwd(v, h.view(*v.shape[:-1]))),
        (h, lambda v: aggregate.h_aggregate_fwd(x.view(*v.shape, 16), v)),
        (branch, lambda v: aggregate.h_aggregate_bwd(v, x.view(*v.shape[:-1], 3, 16), h, [False, True])[0]),
        (x, contract.output_contract_fwd),
        (branch, lambda v: contract.input_expand_fwd(v, 3)),
        (h_res, lambda v: sinkhorn.sinkhorn_fwd(v, 3, 1e-6, "softmax")),
        (h_res, lambda v: sinkhorn.sinkhorn_bwd(h_res.view(v.shape), v, 3, 1e-6, "paper")),
        (x, lambda v: add.fused_add_3_fwd(v, v, v)),
    ]
    for values, call in calls:
        expected = call(values)
        for name, view in _strided(values):
            found = call(view)
            assert bit_equal(
                found.reshape(expected.shape) if found.numel() == expected.numel() else found, expected
            ), name


@pytest.mark.parametrize("variant", ["softmax", "paper"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 16])
def test_sinkhorn(n: int, variant: str) -> None:
    longest = 20 if n <= 4 else 5
    for tokens, iterations, dtype in (
        (33, 2, torch.float32),
        (2, longest, torch.float32),
        (1, 1, torch.bfloat16),
    ):
        logits, grad = 2 * torch.randn(tokens, n, n).to(dtype), torch.randn(tokens, n, n).to(dtype)
        options = (iterations, 1e-6, variant)
        near(
            sinkhorn.sinkhorn_fwd(logits, *options),
            sinkhorn_native.sinkhorn_fwd(logits.double(), *options),
            1e-6,
        )
        near(
            sinkhorn.sinkhorn_bwd(grad, logits, *options),
            sinkhorn_native.sinkhorn_bwd(grad.double(), logits.double(), *options),
            2e-6 if n > 1 else 1.0,
        )
