"""Devices by short names, with the memory that a process finds there. What they compute is in `app/metrics/flops.py`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from app.errors import UsageError

GIB = 2**30
_UNITS = {"mib": 2**20, "gib": GIB, "tib": 2**40, "mb": 10**6, "gb": 10**9, "tb": 10**12}

# torch's name, and the GiB that torch calls the total capacity: less than a data sheet's 80 GB, because error correction takes
# a share on some, and the driver on all. Each is the least that was observed.
DEVICES = {
    "b200": ("NVIDIA B200", 178.3),  # data sheet: 180 GB
    "gh200": ("NVIDIA GH200 480GB", 94.5),  # 96 GB
    "h200": ("NVIDIA H200", 139.7),  # 141 GB
    "h100": ("NVIDIA H100 80GB HBM3", 79.1),  # 80 GB
    "h100-pcie": ("NVIDIA H100 PCIe", 79.1),  # 80 GB
    "h100-nvl": ("NVIDIA H100 NVL", 93.0),  # 94 GB
    "a100-80": ("NVIDIA A100-SXM4-80GB", 79.1),  # 80 GB
    "a100-40": ("NVIDIA A100-SXM4-40GB", 39.3),  # 40 GB
    "a40": ("NVIDIA A40", 44.3),  # 48 GB, some of it for error correction
    "a30": ("NVIDIA A30", 23.5),  # 24 GB
    "a10": ("NVIDIA A10", 21.9),  # 24 GB, some of it for error correction
    "l40s": ("NVIDIA L40S", 44.3),  # 48 GB, some of it for error correction
    "l40": ("NVIDIA L40", 44.3),  # 48 GB, some of it for error correction
    "l4": ("NVIDIA L4", 21.9),  # 24 GB, some of it for error correction
    "rtx4090": ("NVIDIA GeForce RTX 4090", 23.5),  # 24 GB
    "rtx3090": ("NVIDIA GeForce RTX 3090", 23.5),  # 24 GB
    "v100-32": ("Tesla V100-SXM2-32GB", 31.7),  # 32 GB
    "v100-16": ("Tesla V100-SXM2-16GB", 15.7),  # 16 GB
    "t4": ("Tesla T4", 14.5),  # 16 GB, some of it for error correction
    "mi300x": ("AMD Instinct MI300X", 191.9),  # 192 GB
    "mi250x": ("AMD Instinct MI250X", 63.9),  # half of 128 GB: it is two devices
}


@dataclass(frozen=True)
class Device:
    """A kind of device."""

    name: str
    memory: int
    """Bytes."""
    torch_name: str = ""
    """Its name in torch; empty: only its memory is known."""


def named(text: str) -> Device:
    """Return a device by its name, or one with a memory such as 24GiB. Raises UsageError."""
    name = text.lower()
    if name in DEVICES:
        torch_name, gib = DEVICES[name]
        return Device(name, int(gib * GIB), torch_name)
    if memory := size_of(text):
        return Device(text.strip(), memory)
    near = [each for each in DEVICES if each.startswith(f"{name}-")] or difflib.get_close_matches(name, DEVICES, 1, 0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"--device is {text!r}: {meant}Known are {', '.join(DEVICES)}, or give its memory, such as 24GiB")


def size_of(text: str) -> int:
    """Return the bytes of a size such as 24GiB; 0 for a text that is no size."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})", text.strip().lower())
    return int(float(match[1]) * _UNITS[match[2]]) if match else 0
