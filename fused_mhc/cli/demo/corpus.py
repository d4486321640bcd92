"""The demo's text: the source of the Python standard library on this machine, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...errors import InputError

__all__ = ["Corpus", "load_corpus"]

#: Folders of the library's tree that hold no library source.
SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes of other files to judge by.

    Attributes:
        train: uint8 ``[bytes]``.
        held_out: uint8 ``[bytes]``; every tenth file, in order of the paths.
        files: how many files were read.
        root: the folder they were found in.
    """

    train: Tensor
    held_out: Tensor
    files: int
    root: Path


def load_corpus(root: Path | None = None) -> Corpus:
    """Read every ``*.py`` below ``root``, in order of their paths.

    Args:
        root: default: the standard library's folder by `sysconfig`.

    Raises:
        InputError: there are fewer than ten source files.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    paths = sorted(
        path for path in folder.rglob("*.py") if not SKIPPED.intersection(path.relative_to(folder).parts[:-1])
    )
    if len(paths) < HELD_OUT_EVERY:
        raise InputError(
            f"library source: expected at least {HELD_OUT_EVERY} Python files below {folder}, got {len(paths)}"
        )
    held_out = paths[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = [path for index, path in enumerate(paths) if index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    return Corpus(_read(train), _read(held_out), len(paths), folder)


def _read(paths: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in paths)), dtype=torch.uint8)
