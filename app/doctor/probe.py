"""Measurements for `samerun doctor`: the device alone, the processes together, the folder that a run would write to.

Those of several processes are collectives: every rank calls them at the same place, also one that has nothing to measure.
Times are taken with everything before them done and the device waited for; what is done once only goes before, unmeasured.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from app.checks import arithmetic
from app.distributed.handshake import versions
from app.distributed.runtime import Runtime
from app.doctor.diagnosis import Node

# A second or less for each, on a CPU through gloo as on GPUs through NCCL.
_NUMBERS = {"cpu": (2**20, 64)}
_NUMBERS_ON_ACCELERATOR = (2**24, 256)
"""Random numbers drawn at a time, and how many times."""
_SIZES_BYTES = {"cpu": (2**16, 2**20, 2**24)}
_SIZES_BYTES_ON_ACCELERATOR = (2**20, 2**24, 2**28)
_WARM_UPS, _REPEATS = 2, 5
_LINK_REPEATS = 3
_PIECE_BYTES, _PIECES, _MOST_WRITE_S = 2**22, 16, 5.0


def numbers_per_s(device: torch.device) -> float:
    """Return how many random numbers the device draws in a second."""
    at_a_time, times = _NUMBERS.get(device.type, _NUMBERS_ON_ACCELERATOR)
    torch.rand(at_a_time, device=device)
    _wait_for(device)
    start_s = time.perf_counter()
    for _ in range(times):
        torch.rand(at_a_time, device=device)
    _wait_for(device)
    return at_a_time * times / (time.perf_counter() - start_s)


def wrong_answers(runtime: Runtime) -> tuple[list[str], float]:
    """Return what this rank computes wrongly, and the seconds that the check took."""
    start_s = time.perf_counter()
    half = [torch.bfloat16] if runtime.device.type == "cpu" else [torch.bfloat16, torch.float16]
    faults = arithmetic.examine(runtime, [torch.float32, *half], arithmetic.OPERATIONS)
    return [fault.text for fault in faults if fault.rank == runtime.launched.rank], time.perf_counter() - start_s


def time_all_reduces(device: torch.device) -> Iterator[tuple[int, list[float], bool]]:
    """Yield, by size in bytes, the seconds of each all-reduce of float32 on this rank and whether every sum was right."""
    ranks = dist.get_world_size()
    for size_bytes in _SIZES_BYTES.get(device.type, _SIZES_BYTES_ON_ACCELERATOR):
        buffer = torch.empty(size_bytes // 4, device=device)
        elapsed_s, right = [], True
        for repeat in range(_WARM_UPS + _REPEATS):
            buffer.fill_(dist.get_rank() + 1)
            _wait_for(device)
            start_s = time.perf_counter()
            dist.all_reduce(buffer)
            _wait_for(device)
            if repeat >= _WARM_UPS:
                elapsed_s.append(time.perf_counter() - start_s)
            right = right and bool((buffer == ranks * (ranks + 1) / 2).all())  # exact in float32 up to 5,792 ranks
        yield size_bytes, elapsed_s, right


def time_link(first_ranks: Sequence[int], device: torch.device) -> float | None:
    """Return the bandwidth from this node to the next in the ring of all, in GB/s; None on all but `first_ranks`.

    One link of a node at a time: first from every other node, then from those between.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    payload = torch.zeros(_SIZES_BYTES.get(device.type, _SIZES_BYTES_ON_ACCELERATOR)[-1] // 4, device=device)
    receipt = torch.zeros(1, device=device)
    found = None
    for links in rounds(len(first_ranks)):
        for sender, receiver in ((first_ranks[a], first_ranks[b]) for a, b in links):
            elapsed_s = []
            for _ in range(1 + _LINK_REPEATS if rank in (sender, receiver) else 0):
                start_s = time.perf_counter()
                if rank == sender:
                    dist.send(payload, dst=receiver)
                    dist.recv(receipt, src=receiver)
                else:
                    dist.recv(payload, src=sender)
                    dist.send(receipt, dst=sender)
                _wait_for(device)
                elapsed_s.append(time.perf_counter() - start_s)
            if rank == sender:
                found = payload.nbytes / statistics.median(elapsed_s[1:]) / 1e9
    return found


def rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Return the links of a ring of nodes, from and to, in rounds in which no node takes part twice."""
    if num_nodes < 2:
        return []
    links = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    last = [links.pop()] if num_nodes % 2 else []
    return [part for part in (links[0::2], links[1::2], last) if part]


def write_files(run_dir: Path) -> Node:
    """Return how fast files are written for a run in `run_dir`, the free space there, or why none can be.

    Where the folder is not there yet, that is tried in the nearest above it that is: nothing is made that stays.
    """
    folder = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    piece = os.urandom(_PIECE_BYTES)  # a file system may compress zeros
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".samerun-doctor-") as file:
            start_s, written_bytes = time.perf_counter(), 0
            while written_bytes < _PIECE_BYTES * _PIECES and time.perf_counter() - start_s < _MOST_WRITE_S:
                written_bytes += file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            elapsed_s = time.perf_counter() - start_s
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return Node(folder=str(folder), folder_error=error.strerror or str(error))
    return Node(folder=str(folder), write_mb_per_s=written_bytes / elapsed_s / 1e6, free_disk_bytes=free_bytes)


def address_towards(host: str) -> str:
    """Return the IP address by which this machine goes to `host`. Nothing is sent: only a route is chosen."""
    family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


def memory(device: torch.device) -> tuple[int | None, int | None]:
    """Return the bytes of the device's memory that are free and all of them; None where unknown."""
    if device.type == "cpu":
        machine = psutil.virtual_memory()
        return machine.available, machine.total
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    return None, None


def device_name(device: torch.device) -> str:
    """Return the model of a GPU, and the kind of any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def software(device: torch.device) -> dict[str, str]:
    """Return what can change a run or keep it from starting where nodes differ, by name."""
    found = {"python": platform.python_version(), **versions()}
    if device.type == "cuda":
        found |= {"driver": _nvidia_driver(), "nccl": ".".join(str(part) for part in torch.cuda.nccl.version())}
    return found


def _nvidia_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):  # not installed here, as in some containers
        return "unknown"
    return lines[0] if lines else "unknown"


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
