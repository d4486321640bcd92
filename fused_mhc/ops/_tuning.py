"""Configurations that ``fused-mhc tune`` found faster on this GPU.

A choice is only ever made among configurations that give the same bits, and nothing is timed while operations run: a
host asks `tuned` for its configuration, which is the one stored for this GPU in the user's cache folder, or the
heuristic one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import env
from ..device import device_info

__all__ = ["Asked", "forget", "overridden", "recording", "store_choices", "tuned", "tuning_file"]

logger = logging.getLogger("fused_mhc")

#: Of the files; a file of another version is passed over.
FORMAT = 1

C = TypeVar("C")


@dataclass(frozen=True)
class Asked:
    """One request for a configuration: what `fused-mhc tune` may try in its place.

    Attributes:
        kernel: name of the tuned kernel.
        arguments: what the configuration depends on; never a number of tokens.
        default: the heuristic configuration.
        candidates: configurations that give the same bits as the default, the default among them.
    """

    kernel: str
    arguments: tuple[Hashable, ...]
    default: Any
    candidates: tuple[Any, ...]


_CHOSEN: dict[tuple[Hashable, ...], Any] = {}
_OVERRIDES: dict[tuple[Hashable, ...], Any] = {}
_RECORDS: list[dict[tuple[Hashable, ...], Asked]] = []


def tuning_file(device: torch.device | str) -> Path:
    """Where the choices for this kind of device are kept."""
    name = re.sub(r"[^a-z0-9]+", "-", device_info(device).name.lower()).strip("-")
    return env.cache_dir() / f"tuned-{name}.json"


def _key(kernel: str, arguments: tuple[Hashable, ...]) -> str:
    return " ".join([kernel, *map(str, arguments)])


def _stored(device: torch.device) -> dict[str, list[int]]:
    path = tuning_file(device)
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        choices: dict[str, list[int]] = content["choices"] if content["format"] == FORMAT else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s): tuned configurations are not used", path, error)
        return {}
    return choices


def tuned(
    kernel: str,
    device: torch.device,
    heuristic: Callable[..., C],
    candidates: Callable[..., Sequence[C]],
    *arguments: Hashable,
) -> C:
    """The configuration of ``kernel`` for these arguments: stored by ``fused-mhc tune``, else ``heuristic``'s.

    Args:
        kernel: its name in the file.
        device: where it runs.
        heuristic, candidates: of the kernel's ``config.py``; called with ``arguments``.
    """
    key = (kernel, device, *arguments)
    if _OVERRIDES and key in _OVERRIDES:
        override: C = _OVERRIDES[key]
        return override
    found: C | None = _CHOSEN.get(key)
    if found is None or _RECORDS:
        default, possible = heuristic(*arguments), tuple(candidates(*arguments))
        wanted = _stored(device).get(_key(kernel, arguments))
        found = next((c for c in possible if list(astuple(c)) == wanted), default)  # type: ignore[call-overload]
        _CHOSEN[key] = found
        for record in _RECORDS:
            record[key] = Asked(kernel, arguments, default, possible)
    return found


def forget() -> None:
    """Drop what was read from the files: the next call reads them again."""
    _CHOSEN.clear()


@contextlib.contextmanager
def recording() -> Iterator[dict[tuple[Hashable, ...], Asked]]:
    """Collects what configurations are asked for inside."""
    record: dict[tuple[Hashable, ...], Asked] = {}
    _RECORDS.append(record)
    try:
        yield record
    finally:
        _RECORDS.remove(record)


@contextlib.contextmanager
def overridden(key: tuple[Hashable, ...], config: Any) -> Iterator[None]:
    """`tuned` answers ``config`` to this request inside."""
    _OVERRIDES[key] = config
    try:
        yield
    finally:
        del _OVERRIDES[key]


def store_choices(device: torch.device | str, choices: dict[tuple[str, tuple[Hashable, ...]], Any]) -> Path:
    """Add choices ``{(kernel, arguments): config}`` to the device's file and use them from now on.

    Raises:
        OSError: the file cannot be written.
    """
    path = tuning_file(device)
    stored = _stored(torch.device(device))
    for (kernel, arguments), config in choices.items():
        stored[_key(kernel, arguments)] = list(astuple(config))
    content = {"format": FORMAT, "choices": stored}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    forget()
    return path
