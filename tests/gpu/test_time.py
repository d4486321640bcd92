"""Times that must not depend on a shape's luck."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fused_mhc.testing.bench import Case, run_bench
from fused_mhc.testing.inputs import Shape
from fused_mhc.testing.verify import forced


@pytest.fixture(autouse=True)
def triton() -> Any:
    with forced("triton"):
        yield


@pytest.mark.parametrize("op", ["sinkhorn", "h_aggregate", "h_post_bda", "proj_rms_compute_h"])
def test_an_odd_token_count_costs_as_much_as_its_neighbour(op: str) -> None:
    """F30."""
    cases = [Case(op, Shape((tokens,), 4, 4096)) for tokens in (8192, 8191)]
    rows = run_bench(cases, ["triton"], device="cuda", copy_gbps=1.0).rows
    even, odd = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    for a, b in zip(even, odd, strict=True):
        assert b.us <= 1.1 * a.us, (a, b)


def test_a_new_token_count_costs_no_host_time() -> None:
    """F45: later calls at 64 new values of T stay under a millisecond of host time."""
    import time

    from fused_mhc import fused_h_aggregate

    x, h = torch.randn(200, 4, 512, device="cuda", dtype=torch.bfloat16), torch.rand(200, 4, device="cuda")
    for tokens in (1, 2, 16):
        fused_h_aggregate(x[:tokens], h[:tokens])
    torch.cuda.synchronize()
    for tokens in range(100, 164):
        began = time.perf_counter()
        fused_h_aggregate(x[:tokens], h[:tokens])
        assert time.perf_counter() - began < 1e-3, tokens
