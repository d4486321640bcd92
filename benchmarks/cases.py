"""What each suite times. The first case of a suite gives the shape of its picture. (``cutile`` is for a machine with
cuda-tile: its backend beside Triton.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fused_mhc.testing.bench import Case
from fused_mhc.testing.inputs import Shape

__all__ = ["SUITES", "Part"]

OWN = ("triton", "cutile")
CORE = ("sinkhorn", "h_aggregate", "h_post_bda", "proj_rms_compute_h")
KIN = ("fused_add_3", "input_expand", "output_contract", "learned_output_contract")


@dataclass(frozen=True)
class Part:
    """Cases that are timed beside the same backends and peers; ``host`` adds the host's time of a call."""

    cases: Sequence[Case]
    backends: Sequence[str] = OWN
    peers: Sequence[str] = ()
    host: bool = False


def _cases(ops: Sequence[str], *shapes: tuple[int, int, int]) -> list[Case]:
    """Every operation at every ``(T, n, C)``; the residual update with and without its bias."""
    found = []
    for tokens, n, width in shapes:
        shape = Shape((tokens,), n, width)
        for op in ops:
            # Sinkhorn's logits come from the projection, in fp32.
            found.append(Case(op, shape, torch.float32 if op == "sinkhorn" else torch.bfloat16))
            if op == "h_post_bda":
                found.append(Case(op, shape, absent=("bias",)))
    return found


SUITES: dict[str, tuple[Part, ...]] = {
    "ops": (
        Part(_cases(CORE, (8192, 4, 4096))),
        Part(_cases(KIN, (8192, 4, 4096))),
        Part(_cases(CORE, (8192, 4, 7168), (8192, 4, 5120), (8192, 4, 2560))),
        Part(_cases(CORE, (8191, 4, 4096), (16383, 4, 4096))),
        Part(_cases(CORE, (1, 4, 4096), (64, 4, 4096)), host=True),
        Part(_cases(CORE, (8, 4, 4096)), host=True),
        Part(_cases(CORE, (8192, 2, 4096), (8192, 3, 4096))),
        Part(_cases(CORE, (8192, 5, 4096))),
        Part(_cases(CORE, (8192, 8, 4096))),
        Part(_cases(CORE, (8192, 4, 4096)), backends=(), peers=("eager", "torch.compile")),
        Part(_cases(CORE, (8192, 4, 4096)), backends=(), peers=("liger",)),
        Part(_cases(CORE, (8192, 4, 7168)), backends=(), peers=("liger",)),
        Part(_cases(CORE, (8192, 4, 5120), (8192, 4, 2560)), backends=(), peers=("liger",)),
    ),
    "sublayer": (
        Part(_cases(("sublayer", "mhc_pre"), (8192, 4, 4096), (8192, 4, 7168))),
        Part(_cases(("sublayer",), (8192, 4, 4096)), backends=(), peers=("eager", "torch.compile")),
        Part(_cases(("sublayer",), (8192, 4, 4096)), backends=(), peers=("liger",)),
        Part(_cases(("sublayer",), (8192, 4, 7168)), backends=(), peers=("torch.compile", "liger")),
    ),
    "single-pass": (
        Part(_cases(("mega_mhc", "mega_mhc_entry", "mega_mhc_exit"), (8192, 4, 4096))),
        Part(_cases(("mega_mhc",), (8192, 4, 5120), (8192, 4, 7168))),
        Part(_cases(("mega_mhc",), (1, 4, 5120), (16, 4, 5120), (64, 4, 5120), (128, 4, 5120)), host=True),
        Part(_cases(("mega_mhc",), (8192, 4, 4096)), backends=(), peers=("eager", "torch.compile")),
    ),
    "cutile": (
        Part(_cases((*CORE, "mega_mhc"), (8192, 4, 4096))),
        Part(_cases(CORE, (8192, 4, 7168), (8191, 4, 4096), (8192, 8, 4096))),
        Part(_cases(CORE, (1, 4, 4096), (64, 4, 4096)), host=True),
    ),
}
