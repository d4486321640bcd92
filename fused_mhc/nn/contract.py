"""Modules for the ends of the streams."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..checks import check_backend, check_positive, check_streams
from ..dispatch import MHCBackend
from ..ops.contract import input_expand, learned_output_contract, output_contract
from ._init import check_sizes, init_projection, mark_sequence_parallel

__all__ = ["InputExpand", "LearnedOutputContract", "OutputContract"]


class InputExpand(nn.Module):
    """`input_expand` as a module: ``[..., C] -> [..., n, C]``.

    Args:
        num_streams: n, 1..16. Default 4.

    Raises:
        InputError: ``num_streams`` is not as above.
    """

    def __init__(self, num_streams: int = 4) -> None:
        super().__init__()
        check_streams("num_streams", num_streams)
        self.num_streams = num_streams

    def forward(self, x: Tensor) -> Tensor:
        return input_expand(x, self.num_streams)

    def extra_repr(self) -> str:
        return f"num_streams={self.num_streams}"


class OutputContract(nn.Module):
    """`output_contract` as a module: the mean over streams, ``[..., n, C] -> [..., C]``."""

    def forward(self, x: Tensor) -> Tensor:
        return output_contract(x)


class LearnedOutputContract(nn.Module):
    """`learned_output_contract` as a module: ``[..., n, C] -> [..., C]``.

    State dict: ``weight [n, K]``, ``scale [1]``, ``base [n]``.

    Args:
        hidden_size: C, at least 1.
        num_streams: n, 1..16. Default 4.
        eps: added to the weights, above 0. Default 1e-6.
        norm_eps: of the RMS, above 0. Default 1e-6.
        scale_init: first value of ``scale``. Default 0.01.
        backend: ``"auto"`` (default) or a backend's name.
        device, dtype: of the parameters. Default dtype float32.

    Raises:
        InputError: an argument is not as above.
    """

    def __init__(
        self,
        hidden_size: int,
        num_streams: int = 4,
        *,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
        scale_init: float = 0.01,
        backend: MHCBackend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_sizes(hidden_size, num_streams, dtype, scale_init)
        check_positive("eps", eps)
        check_positive("norm_eps", norm_eps)
        check_backend(backend)
        self.hidden_size, self.num_streams = hidden_size, num_streams
        self.eps, self.norm_eps, self.scale_init, self.backend = eps, norm_eps, scale_init, backend
        self.weight = nn.Parameter(
            torch.empty(num_streams, num_streams * hidden_size, device=device, dtype=dtype)
        )
        self.scale = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.base = nn.Parameter(torch.empty(num_streams, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """``weight`` normal with deviation ``K**-0.5``, ``scale`` its first value, ``base`` 0 (weights 1/2)."""
        init_projection(self.weight)
        nn.init.constant_(self.scale, self.scale_init)
        nn.init.zeros_(self.base)
        mark_sequence_parallel(self)  # again: to_empty makes new parameters

    def forward(self, x: Tensor) -> Tensor:
        return learned_output_contract(
            x, self.weight, self.scale, self.base, self.eps, self.norm_eps, self.backend
        )

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, num_streams={self.num_streams}, backend={self.backend!r}"
