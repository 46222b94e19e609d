"""Small checkpoints, as several ranks write them: several calls of `write_pieces`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoints.step_folders import FileEntry, begin, commit, write_pieces
from app.errors import CheckpointError
from app.init.region import Piece, Region
from app.runs.claim import claim

BUFFERS = {"norm.mean": torch.tensor([0.5, 1.5]), "norm.count": torch.tensor(7)}


def random_bits(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, so that every NaN and denormal has to survive."""
    bits = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist() if tensor.numel() else []


def piece(values: torch.Tensor, start: int = 0, *, key: str = "weight", name: str = "w", shape: Sequence[int] = (12,)) -> Piece:
    return Piece(key, name, tuple(shape), Region.flat(start, values.numel()), values)


def save(
    run_dir: Path,
    step: int,
    *ranks: list[Piece],
    state: dict[str, Any] | None = None,
    buffers: Mapping[str, torch.Tensor] = BUFFERS,
    frozen: FileEntry | None = None,
) -> Path:
    run_dir.mkdir(exist_ok=True)
    ours = claim(run_dir)
    folder = begin(ours, step)
    entries = [write_pieces(folder, rank, pieces) for rank, pieces in enumerate(ranks)]
    return commit(ours, step, entries, state=state or {"step": step}, buffers=buffers, frozen=frozen)


def save_split(run_dir: Path, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], **more: Any) -> Path:
    """Save tensors, by key and name, of two ranks that each have a part of every tensor."""
    ranks: list[list[Piece]] = [[], []]
    for key, named in tensors.items():
        for name, tensor in named.items():
            flat = tensor.detach().reshape(-1)
            first = len(flat) // 3
            for rank, region in enumerate((Region.flat(0, first), Region.flat(first, len(flat) - first))):
                ranks[rank].append(Piece(key, name, tuple(tensor.shape), region, region.take(flat)))
    return save(run_dir, step, *ranks, **more)


def save_small(run_dir: Path, step: int) -> Path:
    weight = torch.arange(12.0) + step
    return save(run_dir, step, [piece(weight[:5])], [piece(weight[5:], 5)])


def refusal(call: Callable[[], Any]) -> str:
    """The sentence that a call is refused with."""
    with pytest.raises(CheckpointError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 2 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root and permission to mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
