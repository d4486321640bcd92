"""The checks themselves: what they let through, and the words of what they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fused_mhc import InputError, checks


@pytest.mark.parametrize("dtype_name", ["float16", "bfloat16", "float32", "float64"])
def test_tensors_of_floats_pass(dtype_name: str) -> None:
    t = torch.zeros(2, 3, dtype=getattr(torch, dtype_name))
    checks.check_tensor("x", t)
    checks.check_rank("x", t, 2, "[a, b]")
    checks.check_shape("x", t, (2, 3), "[a, b]")
    checks.check_tensor("x", torch.nn.Parameter(t))


def test_numbers_pass() -> None:
    checks.check_count("k", 1)
    checks.check_count("k", 0, least=0)
    for value in (1e-6, 1, np.float64(2.0)):
        checks.check_positive("eps", value)
    for value in (0, 0.0, 0.999, np.float64(0.5)):
        checks.check_probability("p", value)
    for n in range(1, checks.MAX_STREAMS + 1):
        checks.check_streams("n", n)
    for name in ("auto", "native", "triton", "cutile"):
        checks.check_backend(name)
    checks.check_choice("mode", "a", ("a", "b"))
    checks.check_width("x", torch.zeros(0, 1))
    checks.check_devices("x", torch.zeros(1), y=torch.zeros(1), z=None)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: checks.check_tensor("x", [1.0]), "x: expected a tensor, got list"),
        (
            lambda: checks.check_tensor("x", torch.zeros(2, dtype=torch.int32)),
            "x: expected dtype float16, bfloat16, float32 or float64, got torch.int32",
        ),
        (
            lambda: checks.check_tensor("x", torch.zeros(2, 2).to_sparse()),
            "x: expected a dense (strided) tensor, got layout torch.sparse_coo",
        ),
        (
            lambda: checks.check_rank("x", torch.zeros(3), 2, "[..., n, C]"),
            "x: expected shape [..., n, C], got (3,)",
        ),
        (
            lambda: checks.check_shape("w", torch.zeros(3, 2), (3, 4), "[N, K]"),
            "w: expected shape [N, K] = (3, 4), got (3, 2)",
        ),
        (
            lambda: checks.check_width("x", torch.zeros(3, 0)),
            "x: expected a hidden size of at least 1, got shape (3, 0)",
        ),
        (
            lambda: checks.check_devices("x", torch.zeros(1), y=torch.zeros(1, device="meta")),
            "y: expected device cpu (that of x), got meta",
        ),
        (lambda: checks.check_streams("n", 17), "n: expected 1 to 16 streams, got 17"),
        (lambda: checks.check_streams("n", 2.0), "n: expected an int from 1 to 16, got 2.0"),
        (lambda: checks.check_count("k", 0), "k: expected at least 1, got 0"),
        (lambda: checks.check_count("k", True), "k: expected an int of at least 1, got True"),
        (lambda: checks.check_positive("eps", 0.0), "eps: expected a finite number above 0, got 0.0"),
        (lambda: checks.check_positive("eps", "1"), "eps: expected a number above 0, got '1'"),
        (lambda: checks.check_probability("p", 1.0), "p: expected a number in [0, 1), got 1.0"),
        (lambda: checks.check_choice("mode", "c", ("a", "b")), "mode: expected one of a, b, got 'c'"),
        (
            lambda: checks.check_backend("cuda"),
            "backend: expected one of auto, native, triton, cutile, got 'cuda'",
        ),
    ],
)
def test_messages(check: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        check()
    assert str(caught.value) == message
