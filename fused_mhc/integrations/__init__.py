"""Where people already are: Transformers' DeepSeek V4, Megatron-Core's names, torch.distributed, weight formats.

Each module loads on first use; importing this package imports neither transformers nor megatron.

- `transformers`: one call switches a DeepSeek V4 model over, one call undoes it.
- `megatron`: the names of Megatron-Core's ``core.fusions.fused_mhc_kernels``, and ``install()``.
- `distributed`: sequence parallelism, FSDP2, pipeline stages, agreement of ranks.
- `weights`: parameters of the mapping between the formats of four libraries.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import distributed, megatron, transformers, weights

__all__ = ["distributed", "megatron", "transformers", "weights"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
