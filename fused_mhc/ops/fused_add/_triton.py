"""Sum of three tensors in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._strides import alignment
from .._triton_common import Launcher, elements, lead, store, widen
from .._tuning import tuned
from .config import candidates, heuristic

__all__ = ["add_3_tile", "fused_add_3_fwd"]


@triton.jit
def add_3_tile(a, b, c):
    """``(a + b) + c`` in fp32."""
    return widen(a) + widen(b) + widen(c)


@triton.jit(do_not_specialize=["count"])
def fused_add_3_kernel(
    a_ptr, b_ptr, c_ptr, out_ptr, count: tl.int64, BLOCK: tl.constexpr, ALIGN: tl.constexpr
):
    lead()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements(count, ALIGN)
    a = tl.load(a_ptr + at, mask=inside, other=0.0)
    b = tl.load(b_ptr + at, mask=inside, other=0.0)
    c = tl.load(c_ptr + at, mask=inside, other=0.0)
    store(out_ptr + at, add_3_tile(a, b, c), inside)


_add_3 = Launcher(fused_add_3_kernel, follows=False)


def fused_add_3_fwd(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    out = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    count = out.numel()
    if count:
        config = tuned("fused_add_3", out.device, heuristic, candidates)
        align = alignment(count)
        _add_3(
            (triton.cdiv(count, config.block),),
            (a.contiguous(), b.contiguous(), c.contiguous(), out, count // align),
            (config.block, align),
            config.num_warps,
        )
    return out
