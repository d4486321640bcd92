"""The Triton kernels of the elementwise operations on the device, at the widths that models have, against native there.

Bits of bf16 count here (the interpreter rounds by other code): what both backends round once, in the same order, is
equal; dot products, Sinkhorn and sums over tokens are held to fp64.
"""

from __future__ import annotations

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

DEVICE = "cuda"
#: (tokens, n, C): every model width at n = 4, every other n once, odd widths, C past what one group of columns holds.
SHAPES = [
    (33, 4, 4096),
    (17, 4, 7168),
    (17, 4, 5120),
    (17, 4, 2560),
    (17, 4, 16384),
    (3, 4, 4097),
    (300, 4, 96),
    *((9, n, 2048) for n in (1, 2, 3, 5, 6, 7, 8, 16)),
    (5, 11, 333),
]


def streams(
    tokens: int, n: int, width: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Streams, their gradient, a branch's output, the mixing matrix, the weights, the bias."""
    sizes = ((tokens, n, width), (tokens, n, width), (tokens, width), (tokens, n, n), (tokens, n), (width,))
    return tuple(  # type: ignore[return-value]
        torch.randn(s, device=DEVICE, dtype=dtype if k < 3 else torch.float32) for k, s in enumerate(sizes)
    )


def near(actual: Tensor, exact: Tensor, relative: float) -> None:
    """Every element within ``relative`` of the largest, and half a unit in the last place of its dtype."""
    allowed = relative * exact.abs().max() + exact.abs() * torch.finfo(actual.dtype).eps / 2
    assert ((actual.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_aggregate_and_ends(shape: tuple[int, int, int]) -> None:
    x, _, grad, _, h, _ = streams(*shape)
    n = shape[1]
    assert bit_equal(aggregate.h_aggregate_fwd(x, h), aggregate_native.h_aggregate_fwd(x, h))
    g_x, g_h = aggregate.h_aggregate_bwd(grad, x, h, [True, True])
    assert bit_equal(g_x, aggregate_native.h_aggregate_bwd(grad, x, h, [True, False])[0])
    near(g_h, aggregate_native.h_aggregate_bwd(grad.double(), x.double(), h.double(), [False, True])[0], 1e-6)
    assert bit_equal(contract.input_expand_fwd(grad, n), contract_native.input_expand_fwd(grad, n))
    assert bit_equal(contract.input_expand_bwd(x), contract_native.input_expand_bwd(x))
    assert bit_equal(contract.output_contract_fwd(x), contract_native.output_contract_fwd(x))
    assert bit_equal(contract.output_contract_bwd(grad, n), contract_native.output_contract_bwd(grad, n))
    assert bit_equal(add.fused_add_3_fwd(x, x, x.float()), add_native.fused_add_3_fwd(x, x, x.float()))


@pytest.mark.parametrize(("with_bias", "dropout_p"), [(False, 0.0), (True, 0.1)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_post(shape: tuple[int, int, int], with_bias: bool, dropout_p: float) -> None:
    residual, grad, branch, h_res, h_post, bias = streams(*shape)
    inputs = (h_res, residual, h_post, branch, bias if with_bias else None)
    drop = (dropout_p, torch.tensor(0x123456789ABCDEF, device=DEVICE) if dropout_p else None)
    assert bit_equal(post.h_post_bda_fwd(*inputs, *drop), post_native.h_post_bda_fwd(*inputs, *drop))
    needs = [True, True, True, True, with_bias]
    actual = post.h_post_bda_bwd(grad, *inputs, *drop, needs)
    same = post_native.h_post_bda_bwd(grad, *inputs, *drop, needs)
    double = (v.double() if v is not None else None for v in inputs)
    exact = post_native.h_post_bda_bwd(grad.double(), *double, *drop, needs)
    assert bit_equal(actual[1], same[1])
    assert bit_equal(actual[3], same[3])
    for k in range(0, len(actual), 2):
        near(actual[k], exact[k], 1e-6)


def test_bias_gradient_over_many_chunks() -> None:
    """More chunks than the second stage takes in one go."""
    residual, grad, branch, h_res, h_post, bias = streams(8211, 2, 264)
    call = (h_res, residual, h_post, branch, bias, 0.0, None, [True] * 5)
    results = post.h_post_bda_bwd(grad, *call)
    double = [v.double() if isinstance(v, Tensor) else v for v in call]
    for k, exact in enumerate(post_native.h_post_bda_bwd(grad.double(), *double)):
        near(results[k], exact, 1e-6)


@pytest.mark.parametrize("variant", ["softmax", "paper"])
@pytest.mark.parametrize("n", range(1, 17))
def test_sinkhorn(n: int, variant: str) -> None:
    logits, grad = 2 * torch.randn(77, n, n, device=DEVICE), torch.randn(77, n, n, device=DEVICE)
    options = (20, 1e-6, variant)
    forward = sinkhorn_native.sinkhorn_fwd(logits.double(), *options)
    near(sinkhorn.sinkhorn_fwd(logits, *options), forward, 1e-6)
    backward = sinkhorn_native.sinkhorn_bwd(grad.double(), logits.double(), *options)
    near(sinkhorn.sinkhorn_bwd(grad, logits, *options), backward, 2e-6 if n > 1 else 1.0)
