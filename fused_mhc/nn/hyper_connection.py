"""The two-pass hyper-connection: predict and collapse before a sublayer, mix and add after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checks import check_backend, check_choice, check_count, check_positive
from ..dispatch import MHCBackend
from ..ops.h_post_bda import fused_h_post_bda
from ..ops.mhc_pre import mhc_pre
from ..ops.proj_rms_compute_h import RMS_EPS_MODES
from ..ops.sinkhorn import VARIANTS
from ._init import check_sizes, init_bias, init_projection, mark_sequence_parallel

__all__ = ["HyperConnected", "HyperConnection", "HyperConnectionState"]


class HyperConnectionState(NamedTuple):
    """What `HyperConnection.pre` hands to `HyperConnection.post`.

    Attributes:
        residual: the streams ``[..., n, C]``.
        h_post: ``[..., n]``.
        h_res: ``[..., n, n]`` (old, new).
    """

    residual: Tensor
    h_post: Tensor
    h_res: Tensor


class HyperConnection(nn.Module):
    """One manifold-constrained hyper-connection around a sublayer.

    `pre` predicts the mixes from the streams and collapses them into the sublayer's input; `post` mixes the streams
    with the doubly stochastic matrix and adds the sublayer's output. Nothing is kept on the module in between.

    State dict: ``weight [N, K]``, ``alpha_pre [1]``, ``alpha_post [1]``, ``alpha_res [1]``, ``bias [N]`` with
    ``K = n*C`` and ``N = n*n + 2*n``; columns in the order pre, post, residual (old, new). Each parameter bears
    ``sequence_parallel = True``: under sequence parallelism its gradient is to be summed over the group.

    Args:
        hidden_size: C, at least 1.
        num_streams: n, 1..16. Default 4.
        sinkhorn_iterations: at least 1. Default 20.
        rms_eps, compute_h_eps, sinkhorn_eps: above 0. Default 1e-6 each.
        rms_eps_mode: ``"inside"`` (default) or ``"outside"``, see `fused_proj_rms_compute_h`.
        variant: ``"softmax"`` (default) or ``"paper"``, see `fused_sinkhorn`.
        alpha_init: first value of the alphas. Default 0.01.
        backend: ``"auto"`` (default) or a backend's name.
        device, dtype: of the parameters. Default dtype float32; the mixes are computed in fp32 whatever the
            activations are.

    Raises:
        InputError: an argument is not as above.

    Source: mHC, arXiv 2512.24880.
    """

    def __init__(
        self,
        hidden_size: int,
        num_streams: int = 4,
        *,
        sinkhorn_iterations: int = 20,
        rms_eps: float = 1e-6,
        compute_h_eps: float = 1e-6,
        sinkhorn_eps: float = 1e-6,
        rms_eps_mode: str = "inside",
        variant: str = "softmax",
        alpha_init: float = 0.01,
        backend: MHCBackend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_sizes(hidden_size, num_streams, dtype, alpha_init)
        check_count("sinkhorn_iterations", sinkhorn_iterations)
        check_positive("rms_eps", rms_eps)
        check_positive("compute_h_eps", compute_h_eps)
        check_positive("sinkhorn_eps", sinkhorn_eps)
        check_choice("rms_eps_mode", rms_eps_mode, RMS_EPS_MODES)
        check_choice("variant", variant, VARIANTS)
        check_backend(backend)
        self.hidden_size, self.num_streams = hidden_size, num_streams
        self.sinkhorn_iterations = sinkhorn_iterations
        self.rms_eps, self.compute_h_eps, self.sinkhorn_eps = rms_eps, compute_h_eps, sinkhorn_eps
        self.rms_eps_mode, self.variant, self.alpha_init, self.backend = (
            rms_eps_mode,
            variant,
            alpha_init,
            backend,
        )
        size = num_streams * num_streams + 2 * num_streams

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.weight = parameter(size, num_streams * hidden_size)
        self.alpha_pre, self.alpha_post, self.alpha_res = parameter(1), parameter(1), parameter(1)
        self.bias = parameter(size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start near a plain residual network: ``weight`` normal with deviation ``K**-0.5``, the alphas
        ``alpha_init``, and a bias that gives pre-mixes 1/n, post-mixes 1 and a mixing matrix near the identity."""
        init_projection(self.weight)
        for alpha in (self.alpha_pre, self.alpha_post, self.alpha_res):
            nn.init.constant_(alpha, self.alpha_init)
        init_bias(self.bias, self.num_streams)
        mark_sequence_parallel(self)  # again: to_empty makes new parameters

    def pre(self, x: Tensor) -> tuple[Tensor, HyperConnectionState]:
        """Streams ``[..., n, C]`` -> the sublayer's input ``[..., C]`` and the state for `post`.

        Raises:
            InputError: ``x`` does not fit the module.
            BackendError: the module's backend cannot run here.
        """
        layer_input, h_post, h_res, passed = mhc_pre(
            x,
            self.weight,
            self.alpha_pre,
            self.alpha_post,
            self.alpha_res,
            self.bias,
            self.sinkhorn_iterations,
            self.backend,
            rms_eps=self.rms_eps,
            compute_h_eps=self.compute_h_eps,
            sinkhorn_eps=self.sinkhorn_eps,
            rms_eps_mode=self.rms_eps_mode,
            variant=self.variant,
        )
        return layer_input, HyperConnectionState(passed, h_post, h_res)

    def post(self, state: HyperConnectionState, output: Tensor, bias: Tensor | None = None) -> Tensor:
        """State of `pre` and the sublayer's output ``[..., C]`` (and its bias ``[C]``) -> streams ``[..., n, C]``.

        Raises:
            InputError: ``output`` or ``bias`` does not fit the state.
            BackendError: the module's backend cannot run here.
        """
        return fused_h_post_bda(state.h_res, state.residual, state.h_post, output, bias, self.backend)

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """``post(state, branch(layer_input))`` with ``layer_input, state = pre(x)``."""
        layer_input, state = self.pre(x)
        return self.post(state, branch(layer_input))

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, num_streams={self.num_streams}, "
            f"sinkhorn_iterations={self.sinkhorn_iterations}, rms_eps_mode={self.rms_eps_mode!r}, "
            f"variant={self.variant!r}, backend={self.backend!r}"
        )


class HyperConnected(nn.Module):
    """Any sublayer ``[..., C] -> [..., C]`` with a hyper-connection around it: streams in, streams out.

    State dict: ``branch.*`` and ``connection.*``.

    Args:
        branch: the sublayer (its own norm included).
        connection: the `HyperConnection` to put around it.
    """

    def __init__(self, branch: nn.Module, connection: HyperConnection) -> None:
        super().__init__()
        self.branch, self.connection = branch, connection

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Streams ``[..., n, C]`` -> streams; further arguments go to the branch."""
        return self.connection(x, lambda layer_input: self.branch(layer_input, *args, **kwargs))
