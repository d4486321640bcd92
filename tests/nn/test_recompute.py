"""`nn.recompute_streams`: the same bits for less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fused_mhc.errors import InputError
from fused_mhc.nn import HyperConnection, recompute_streams
from fused_mhc.nn.recompute import _Group

N, C, SUBLAYERS = 3, 16, 4


def _model(dtype: torch.dtype) -> tuple[list[HyperConnection], list[nn.Module]]:
    torch.manual_seed(0)
    connections = [HyperConnection(C, N, sinkhorn_iterations=3, alpha_init=0.5) for _ in range(SUBLAYERS)]
    branches = [
        nn.Sequential(nn.Linear(C, C, dtype=dtype), nn.Tanh(), nn.Linear(C, C, dtype=dtype))
        for _ in range(SUBLAYERS)
    ]
    return connections, branches


def _plain(x: Tensor, connections: list[HyperConnection], branches: list[nn.Module]) -> Tensor:
    for connection, branch in zip(connections, branches, strict=True):
        x = connection(x, branch)
    return x


def _gradients(out: Tensor, x: Tensor, modules: list[nn.Module], retain: bool = False) -> list[Tensor]:
    parameters = [p for m in modules for p in m.parameters()]
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return list(torch.autograd.grad(out, [x, *parameters], cotangent, retain_graph=retain))


@pytest.mark.parametrize("stream_dtype", [torch.float32, torch.bfloat16])
def test_equal_bits(stream_dtype: torch.dtype) -> None:
    connections, branches = _model(stream_dtype)
    modules = [*connections, *branches]
    x = torch.randn(2, 5, N, C, dtype=stream_dtype, requires_grad=True)
    expected = _plain(x, connections, branches)
    result = recompute_streams(x, list(zip(connections, branches, strict=True)))
    assert torch.equal(result.x, expected)
    assert result.bytes_saved == (SUBLAYERS - 1) * x.nbytes
    want = _gradients(expected, x, modules)
    for _ in range(2):  # a second backward makes the streams again
        got = _gradients(result.x, x, modules, retain=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_streams_in_between_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    connections, branches = _model(torch.float32)
    x = torch.randn(7, N, C, requires_grad=True)
    kept: list[Tensor | int] = []
    pack = _Group.pack

    def recorded(group: _Group, t: Tensor) -> Tensor | int:
        kept.append(pack(group, t))
        return kept[-1]

    monkeypatch.setattr(_Group, "pack", recorded)
    recompute_streams(x, list(zip(connections, branches, strict=True)))
    streams = [t for t in kept if isinstance(t, Tensor) and t.shape == x.shape]
    assert streams
    assert all(t.data_ptr() == x.data_ptr() for t in streams)
    # Each later sublayer wanted its streams twice: for the prediction, and for the residual update.
    assert [t for t in kept if isinstance(t, int)] == [k for k in range(1, SUBLAYERS) for _ in range(2)]


def test_no_sublayers() -> None:
    with pytest.raises(InputError, match="sublayers: expected at least one"):
        recompute_streams(torch.zeros(2, N, C), [])
