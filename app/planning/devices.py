"""Devices by short names, with the memory that a process finds there. Standard library only: login nodes read it too.

What a device computes is in `app/metrics/flops.py`, by the name that torch has for it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from app.errors import UsageError

GIB = 2**30
_UNITS = {"MiB": 2**20, "GiB": GIB, "TiB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Device:
    """A kind of device."""

    name: str
    """As the command line has it."""
    memory: int
    """Bytes that a process finds."""
    torch_name: str = ""
    """What torch calls it; empty: only its memory is known."""


def _device(name: str, gib: float, torch_name: str) -> Device:
    return Device(name, int(gib * GIB), torch_name)


# The memory is what torch calls the device's total capacity when there is no more of it. Data sheets round it to 80 GB, 141 GB,
# ...; error correction takes a share of some, and the driver of all. Each is the least of what was seen.
_DEVICES = (
    _device("b200", 178.3, "NVIDIA B200"),  # data sheet: 180 GB
    _device("gh200", 94.5, "NVIDIA GH200 480GB"),  # 96 GB
    _device("h200", 139.7, "NVIDIA H200"),  # 141 GB
    _device("h100", 79.1, "NVIDIA H100 80GB HBM3"),  # 80 GB
    _device("h100-pcie", 79.1, "NVIDIA H100 PCIe"),  # 80 GB
    _device("h100-nvl", 93.0, "NVIDIA H100 NVL"),  # 94 GB
    _device("a100-80", 79.1, "NVIDIA A100-SXM4-80GB"),  # 80 GB
    _device("a100-40", 39.3, "NVIDIA A100-SXM4-40GB"),  # 40 GB
    _device("a40", 44.3, "NVIDIA A40"),  # 48 GB, some of it for error correction
    _device("a30", 23.5, "NVIDIA A30"),  # 24 GB
    _device("a10", 21.9, "NVIDIA A10"),  # 24 GB, some of it for error correction
    _device("l40s", 44.3, "NVIDIA L40S"),  # 48 GB, some of it for error correction
    _device("l40", 44.3, "NVIDIA L40"),  # 48 GB, some of it for error correction
    _device("l4", 21.9, "NVIDIA L4"),  # 24 GB, some of it for error correction
    _device("rtx4090", 23.5, "NVIDIA GeForce RTX 4090"),  # 24 GB
    _device("rtx3090", 23.5, "NVIDIA GeForce RTX 3090"),  # 24 GB
    _device("v100-32", 31.7, "Tesla V100-SXM2-32GB"),  # 32 GB
    _device("v100-16", 15.7, "Tesla V100-SXM2-16GB"),  # 16 GB
    _device("t4", 14.5, "Tesla T4"),  # 16 GB, some of it for error correction
    _device("mi300x", 191.9, "AMD Instinct MI300X"),  # 192 GB
    _device("mi250x", 63.9, "AMD Instinct MI250X"),  # half of 128 GB: it is two devices
)


def names() -> list[str]:
    """Names of the devices that are known."""
    return [device.name for device in _DEVICES]


def named(text: str) -> Device:
    """Return a device by its name, or one of so much memory, as 24GiB. Raises UsageError."""
    name = text.lower()
    for device in _DEVICES:
        if device.name == name:
            return device
    if memory := size_of(text):
        return Device(text.strip(), memory)
    of_kind = [each for each in names() if each.startswith(f"{name}-")]
    near = of_kind or difflib.get_close_matches(name, names(), 1, 0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"--device is {text!r}: {meant}Known are {', '.join(names())}, or give its memory, such as 24GiB")


def size_of(text: str) -> int:
    """Return the bytes of a size, as 24GiB; 0: it is none."""
    found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})", text.strip(), re.IGNORECASE)
    return int(float(found[1]) * next(size for key, size in _UNITS.items() if key.lower() == found[2].lower())) if found else 0


def of_scheduler(kind: str) -> Device | None:
    """Return the device that a site's name for it (Slurm's `a100` of gres=gpu:a100:4) can mean; the smallest of several."""
    name = kind.lower().replace("_", "-").removeprefix("nvidia-")
    found = [device for device in _DEVICES if device.name == name or device.name.startswith(f"{name}-")]
    return min(found, key=lambda device: device.memory, default=None)


def of_nvidia_smi(lines: Sequence[str]) -> Device | None:
    """Return the smallest of the devices of `nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits`."""
    found = []
    for line in lines:
        torch_name, _, mib = line.rpartition(",")
        if mib.strip().isdecimal():
            known = next((device for device in _DEVICES if device.torch_name == torch_name.strip()), None)
            found.append(known or Device(torch_name.strip(), int(mib) * 2**20))
    return min(found, key=lambda device: device.memory, default=None)
