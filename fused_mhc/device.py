"""What the library knows of a device: architecture, multiprocessors, limits. Asked once per device, then kept."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

__all__ = ["DeviceInfo", "device_info"]


@dataclass(frozen=True)
class DeviceInfo:
    """One device.

    Attributes:
        name: the driver's name for it.
        arch: ``"sm_90"`` on NVIDIA, ``"gfx942"`` on AMD, else the device type (``"cpu"``).
        sm_count: multiprocessors (0 on a CPU).
        warp_size: lanes of a warp or wave (0 on a CPU).
        l2_bytes: size of the L2 cache (0 where unknown).
        total_memory: bytes of device memory (0 on a CPU).
    """

    name: str
    arch: str
    sm_count: int
    warp_size: int
    l2_bytes: int
    total_memory: int


@functools.lru_cache(maxsize=None)
def _query(kind: str, index: int) -> DeviceInfo:
    if kind != "cuda":
        return DeviceInfo(name=kind, arch=kind, sm_count=0, warp_size=0, l2_bytes=0, total_memory=0)
    props = torch.cuda.get_device_properties(index)
    gcn = getattr(props, "gcnArchName", "")
    arch = gcn.split(":")[0] if torch.version.hip else f"sm_{props.major}{props.minor}"
    return DeviceInfo(
        name=props.name,
        arch=arch,
        sm_count=props.multi_processor_count,
        warp_size=getattr(props, "warp_size", 32),
        l2_bytes=getattr(props, "L2_cache_size", 0),
        total_memory=props.total_memory,
    )


def device_info(device: torch.device | str) -> DeviceInfo:
    """Facts about ``device``; a CUDA device without an index means the current one."""
    device = torch.device(device)
    index = device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device()
    return _query(device.type, index or 0)
