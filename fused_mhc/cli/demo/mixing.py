"""What a trained model's residual mixing does to a signal over depth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Gains", "gains"]


@dataclass(frozen=True)
class Gains:
    """Gains after each site, averaged over tokens (mHC paper, arXiv 2512.24880, section 3.1).

    The streams go through ``A = H_L^T ... H_2^T H_1^T``. ``forward`` is the largest absolute row sum of that product
    (how much a signal can grow on its way up), ``backward`` the largest absolute column sum (a gradient on its way
    down). Doubly stochastic matrices keep both at 1.
    """

    forward: list[float]
    backward: list[float]


def gains(matrices: Tensor) -> Gains:
    """Gains of ``[sites, tokens, n(old), n(new)]`` mixing matrices, composed up to each site."""
    forward, backward = [], []
    product = torch.eye(matrices.shape[-1], dtype=torch.float64).expand(*matrices.shape[1:])
    for matrix in matrices.double():
        product = matrix.mT @ product
        forward.append(product.abs().sum(-1).amax(-1).mean().item())
        backward.append(product.abs().sum(-2).amax(-1).mean().item())
    return Gains(forward, backward)
