"""Options that several commands share."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    import torch

__all__ = ["check_matplotlib", "check_names", "chosen_device", "make_folder"]


def chosen_device(name: str) -> torch.device:
    """The device that ``--device`` names: ``auto`` is the GPU if there is one, else the CPU.

    Raises:
        InputError: the name is no device, or one that is not here.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise InputError(f"--device: expected auto, cpu, cuda or cuda:<index>, got {name!r}")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device: expected a device that is here, got {name!r}; CUDA devices: {torch.cuda.device_count()}"
        )
    return torch.device(name)


def check_matplotlib(asker: str) -> None:
    """matplotlib is installed; ``asker`` is the option or command that draws.

    Raises:
        InputError: it is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            f"{asker}: expected matplotlib to be installed (pip install 'fused-mhc[report]'), got none"
        )


def check_names(option: str, names: Sequence[str] | None, known: Sequence[str]) -> None:
    """Each of ``names`` (an option that may be repeated) is one of ``known``.

    Raises:
        InputError: one is not.
    """
    for name in names or ():
        if name not in known:
            raise InputError(f"{option}: expected one of {', '.join(known)}, got {name!r}")


def make_folder(option: str, folder: Path) -> None:
    """Make ``folder`` if it is not there, and see that it can be written.

    Raises:
        InputError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{option}: expected a folder that can be written, got {str(folder)!r} ({error})"
        ) from error
