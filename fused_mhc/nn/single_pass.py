"""The single-pass hyper-connection: one boundary between sublayers, with the pre-mix of the site before."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..checks import check_backend, check_count, check_positive
from ..dispatch import MHCBackend, check_schedule
from ..ops.mega_mhc import mega_mhc, mega_mhc_entry, mega_mhc_exit
from ._init import check_sizes, init_bias, init_projection, mark_sequence_parallel

__all__ = ["Mixes", "SinglePassHyperConnection"]


class Mixes(NamedTuple):
    """The mixes one site predicts for the next.

    Attributes:
        pre: ``[..., n]``.
        post: ``[..., n]``.
        residual: ``[..., n, n]`` (old, new).
    """

    pre: Tensor
    post: Tensor
    residual: Tensor


class SinglePassHyperConnection(nn.Module):
    """One site of a chain of shifted single passes.

    A model of L sublayers has L sites: the first is entered with `entry`, each further one called with the output of
    the sublayer before it, and the chain ends with `exit`. ``block_input`` goes straight into the sublayer: its
    RMSNorm is part of the pass.

    State dict: ``phi [N, K]``, ``alpha [3]``, ``bias [N]`` and, with ``norm=True``, ``norm_weight [C]``;
    ``K = n*C``, ``N = n*n + 2*n``; columns in the order pre, post, residual (old, new). Each parameter bears
    ``sequence_parallel = True``.

    Args:
        hidden_size: C, at least 1.
        num_streams: n, 1..16. Default 4.
        sinkhorn_iterations: at least 1. Default 20.
        hc_eps: of the mixes and of Sinkhorn, above 0. Default 1e-6.
        norm_eps: of both RMS, above 0. Default 1e-6.
        norm: True (default): the RMSNorm has a weight; False: it has none.
        alpha_init: first value of ``alpha``. Default 0.01.
        backend: ``"auto"`` (default) or a backend's name.
        schedule: ``"auto"`` (default), ``"fused"`` or ``"mega"``, see `mega_mhc`.
        device, dtype: of the parameters. Default dtype float32.

    Raises:
        InputError: an argument is not as above.

    Source: delayed pre-mix as in DeepSeek V4.1's single pass.
    """

    norm_weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        num_streams: int = 4,
        *,
        sinkhorn_iterations: int = 20,
        hc_eps: float = 1e-6,
        norm_eps: float = 1e-6,
        norm: bool = True,
        alpha_init: float = 0.01,
        backend: MHCBackend = "auto",
        schedule: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_sizes(hidden_size, num_streams, dtype, alpha_init)
        check_count("sinkhorn_iterations", sinkhorn_iterations)
        check_positive("hc_eps", hc_eps)
        check_positive("norm_eps", norm_eps)
        check_backend(backend)
        check_schedule(schedule)
        self.hidden_size, self.num_streams = hidden_size, num_streams
        self.sinkhorn_iterations = sinkhorn_iterations
        self.hc_eps, self.norm_eps, self.alpha_init = hc_eps, norm_eps, alpha_init
        self.backend, self.schedule = backend, schedule
        size = num_streams * num_streams + 2 * num_streams

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.phi = parameter(size, num_streams * hidden_size)
        self.alpha, self.bias = parameter(3), parameter(size)
        self.register_parameter("norm_weight", parameter(hidden_size) if norm else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start near a plain residual network, as `HyperConnection.reset_parameters`; ``norm_weight`` is 1."""
        init_projection(self.phi)
        nn.init.constant_(self.alpha, self.alpha_init)
        init_bias(self.bias, self.num_streams)
        if self.norm_weight is not None:
            nn.init.ones_(self.norm_weight)
        mark_sequence_parallel(self)  # again: to_empty makes new parameters

    def forward(
        self, previous_output: Tensor, residual: Tensor, mixes: Mixes
    ) -> tuple[Tensor, Tensor, Mixes]:
        """``previous_output [..., C]``, ``residual [..., n, C]`` and the mixes of the site before ->
        ``(block_input [..., C], new_residual [..., n, C], mixes)``.

        Raises:
            InputError: an argument does not fit the module.
            BackendError: the module's backend or schedule cannot run here.
        """
        new_residual, pre, post, res, block_input = mega_mhc(
            previous_output,
            residual,
            *mixes,
            self.phi,
            self.alpha,
            self.bias,
            self.norm_weight,
            hc_eps=self.hc_eps,
            norm_eps=self.norm_eps,
            num_iters=self.sinkhorn_iterations,
            backend=self.backend,
            schedule=self.schedule,
        )
        return block_input, new_residual, Mixes(pre, post, res)

    def entry(self, x: Tensor) -> tuple[Tensor, Tensor, Mixes]:
        """First site: ``x [..., C]`` fills every stream -> ``(block_input, new_residual, mixes)``.

        Raises:
            InputError: ``x`` does not fit the module.
            BackendError: the module's backend or schedule cannot run here.
        """
        new_residual, pre, post, res, block_input = mega_mhc_entry(
            x,
            self.num_streams,
            self.phi,
            self.alpha,
            self.bias,
            self.norm_weight,
            hc_eps=self.hc_eps,
            norm_eps=self.norm_eps,
            num_iters=self.sinkhorn_iterations,
            backend=self.backend,
            schedule=self.schedule,
        )
        return block_input, new_residual, Mixes(pre, post, res)

    def exit(self, previous_output: Tensor, residual: Tensor, mixes: Mixes) -> Tensor:
        """End of the chain: the last update, collapsed with the last pre-mix and normalised with this module's
        ``norm_weight`` -> ``[..., C]``. For a final norm with a weight of its own call `mega_mhc_exit`.

        Raises:
            InputError: an argument does not fit.
            BackendError: the module's backend cannot run here.
        """
        return mega_mhc_exit(
            previous_output, residual, *mixes, self.norm_weight, norm_eps=self.norm_eps, backend=self.backend
        )

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, num_streams={self.num_streams}, "
            f"sinkhorn_iterations={self.sinkhorn_iterations}, norm={self.norm_weight is not None}, "
            f"backend={self.backend!r}, schedule={self.schedule!r}"
        )
