"""Every operation, mode, dtype and odd shape against the fp64 transcription, forward and backward."""

from __future__ import annotations

import pytest
import torch

from fused_mhc.testing.compare import difference, evaluate, factor, oracle
from fused_mhc.testing.inputs import CATALOGUE, Shape, make_cotangents, make_tensors
from fused_mhc.testing.verify import VerifyCase, run_case, stored_residual


def test_matches_fp64(case: VerifyCase, device: str) -> None:
    for row in run_case(case, device):
        assert row.ok, f"{row.direction} {row.result}: off by {row.error:.3e}, allowed {row.bound:.3e}"


@pytest.mark.parametrize("name", [n for n, op in CATALOGUE.items() if len(op.results) > 1])
def test_gradients_of_each_result_alone(name: str, device: str) -> None:
    """The gradients of results that nothing uses arrive as None, and count as zeros."""
    op, shape = CATALOGUE[name], Shape((5,), 3, 8)
    mode = op.modes[0]
    options = op.options(mode, shape)
    tensors = make_tensors(name, shape, torch.float32, mode=mode, device=device)
    results = evaluate(op.function, op.results, tensors, options).results
    cotangents = make_cotangents(results)
    rounded = stored_residual(op, tensors, shape, results)
    for result in op.results:
        alone = {result: cotangents[result]}
        actual = evaluate(op.function, op.results, tensors, options, alone)
        expected = oracle(op, shape, tensors, options, alone, rounded)
        for argument, gradient in actual.gradients.items():
            exact, scale = expected.exact.gradients[argument], expected.scales.gradients[argument]
            if gradient is None:
                assert exact is None or not exact.any(), f"{argument} lost its gradient of {result}"
                continue
            if exact is None:
                assert not gradient.any(), f"{argument} got a gradient of {result} that it does not have"
                continue
            assert scale is not None
            found = difference(gradient, exact, scale, factor(op, argument, shape, options, True))
            assert found.ok, f"{argument} from {result}: off by {found.error:.3e}, allowed {found.bound:.3e}"


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_every_number_of_streams(name: str, backend: str, device: str) -> None:
    most = 16 if backend == "native" or not name.startswith("mega_mhc") else 8
    for n in range(1, most + 1):
        case = VerifyCase(name, CATALOGUE[name].modes[0], backend, torch.float32, Shape((2,), n, 3))
        for row in run_case(case, device):
            assert row.ok, f"n={n} {row.direction} {row.result}: {row.error:.3e}, allowed {row.bound:.3e}"
