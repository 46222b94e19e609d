"""Checkpoints on disk: whatever is damaged is found, and neither a kill nor a disk harms the others."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from saved import piece, refusal, save_small

from app.checkpoints import manifest, step_folders
from app.checkpoints.step_folders import (
    Reader,
    begin,
    commit,
    committed,
    newest,
    path_of,
    prune,
    temporary_of,
    verify,
    write_pieces,
)
from app.errors import CheckpointError
from app.runs.claim import Claim, claim

REPOSITORY = Path(__file__).parents[2]


# What is damaged is found ----------------------------------------------------------------------------------------------------

FILES = ["rank-00000.safetensors", "rank-00001.safetensors", "buffers.safetensors", "state.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_found_and_the_checkpoint_before_it_taken(tmp_path: Path, name: str) -> None:
    older, newer = save_small(tmp_path, 1), save_small(tmp_path, 2)
    path = newer / name
    content = path.read_bytes()
    size = len(content)

    def falls_back(*words: str) -> None:
        found, (problem,) = newest(tmp_path)
        assert found == older
        assert problem == refusal(lambda: verify(newer))
        assert all(word in problem for word in (str(path), *words)), problem

    sizes = {"manifest.json": ["is truncated or has changed"]}
    for length in (0, 1, size // 2, size - 1):
        path.write_bytes(content[:length])
        falls_back(*sizes.get(name, [f"is truncated: it has {length} bytes instead of {size}"]))
    path.write_bytes(content + b"\n")
    falls_back(*sizes.get(name, [f"has grown: it has {size + 1} bytes instead of {size}"]))
    path.unlink()
    falls_back("is missing")
    path.write_bytes(content)
    assert newest(tmp_path) == (newer, [])


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_in_every_byte(tmp_path: Path, name: str) -> None:
    folder = save_small(tmp_path, 1)
    path = folder / name
    content = bytearray(path.read_bytes())
    for place in range(len(content)):
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        assert str(path) in refusal(lambda: verify(folder))
        content[place] ^= 1 << place % 8
    path.write_bytes(content)
    verify(folder)


def test_parts_of_a_verification_are_the_whole(tmp_path: Path) -> None:
    folder = save_small(tmp_path, 1)
    for name in FILES[:-1]:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found = []
        for index in range(3):
            try:
                verify(folder, part=(index, 3))
            except CheckpointError as error:
                found.append(str(error))
        assert len(found) == 1, name
        assert name in found[0]
        (folder / name).write_bytes(content)
    assert [verify(folder, part=(index, 9)) for index in range(9)] == [None] * 9


def test_a_damaged_state_or_tensor_file_is_not_loaded_unverified(tmp_path: Path) -> None:
    folder = save_small(tmp_path, 1)
    tensors = folder / "rank-00001.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert f"{tensors} is damaged" in refusal(lambda: Reader(folder).read_into(piece(torch.zeros(12))))
    tensors.unlink()
    assert f"{tensors} cannot be read: " in refusal(lambda: Reader(folder).read_into(piece(torch.zeros(12))))
    (folder / "state.json").write_text('{"step": 7}')
    assert "state.json" in refusal(lambda: Reader(folder))


def test_another_format_is_said(tmp_path: Path) -> None:
    folder = save_small(tmp_path, 1)
    (folder / "manifest.json").write_bytes(manifest._sealed(b'{"format": 3}'))
    assert "has format 3, and this version reads formats 1 and 2" in refusal(lambda: verify(folder))


def test_where_there_is_no_checkpoint_none_is_found(tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, [])
    assert "manifest.json is missing" in refusal(lambda: verify(tmp_path))
    begin(claim(tmp_path), 5)
    assert newest(tmp_path) == (None, [])


# What a kill leaves ----------------------------------------------------------------------------------------------------------

# For each line of its input, a time in seconds, a process that saves one checkpoint after the other is killed so long after
# its first one appeared.
# Forked, because it is torch that takes long to import.
WRITERS = """
import os, signal, sys, time, torch
from pathlib import Path
from app.checkpoints.step_folders import begin, commit, committed, prune, write_pieces
from app.init.region import Piece, Region
from app.runs.claim import claim

def write(run_dir):
    step, ours = max([int(path.name[5:]) for path in committed(run_dir)], default=0), claim(run_dir)
    while True:
        step += 1
        folder, values = begin(ours, step), torch.arange(1_000_000.0) + step
        regions = [Region.flat(at, 500_000) for at in (0, 500_000)]
        halves = [Piece("weight", "w", (1_000_000,), region, region.take(values)) for region in regions]
        entries = [write_pieces(folder, rank, [half]) for rank, half in enumerate(halves)]
        prune(ours, commit(ours, step, entries, state={"step": step}, buffers={}), keep_last=2)

for line in sys.stdin:
    before = committed(Path(sys.argv[1]))
    writer = os.fork()
    if writer == 0:
        try:
            write(Path(sys.argv[1]))
        finally:
            os._exit(1)
    while committed(Path(sys.argv[1])) == before:
        time.sleep(0.001)
    time.sleep(float(line))
    os.kill(writer, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]), flush=True)
"""


def test_what_has_its_name_verifies_wherever_the_writer_is_killed(tmp_path: Path) -> None:
    chance, last, leftovers = random.Random(0), 0, 0
    command = [sys.executable, "-c", WRITERS, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        for _ in range(12):
            writers.stdin.write(f"{chance.uniform(0.01, 0.12)}\n")
            writers.stdin.flush()
            assert writers.stdout.readline() == f"{-signal.SIGKILL}\n"
            leftovers += any((tmp_path / "starts").glob("*/step-*"))
            last = step_that_reads_whole(tmp_path, at_least=last)
    assert last > 0
    assert leftovers > 0, "no kill was within a save"
    save_small(tmp_path, last + 1)
    assert not list((tmp_path / "starts").glob("*/step-*"))


def step_that_reads_whole(run_dir: Path, *, at_least: int) -> int:
    """The step of the newest checkpoint, 0 without any, after every one of them was found whole."""
    for folder in committed(run_dir):
        verify(folder)
    found, problems = newest(run_dir)
    assert problems == []
    if found is None:
        assert at_least == 0
        return 0
    reader, values = Reader(found), torch.zeros(1_000_000)
    step: int = reader.state["step"]
    assert found == path_of(run_dir, step)
    assert step >= at_least
    reader.read_into(piece(values, shape=[1_000_000]))
    assert torch.equal(values, torch.arange(1_000_000.0) + step)
    return step


def test_leftovers_of_a_killed_save_are_replaced(tmp_path: Path) -> None:
    ours = claim(tmp_path)
    write_pieces(begin(ours, 4), 7, [piece(torch.zeros(12))])
    assert temporary_of(ours, 4).is_dir()
    folder = save_small(tmp_path, 4)
    assert not ours.place.exists()
    assert sorted(file.name for file in folder.iterdir()) == sorted(FILES)
    assert [path.name for path in folder.parent.iterdir()] == ["step-00000004"]


def test_a_step_that_is_saved_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    folder = save_small(tmp_path, 4)
    (folder / "state.json").write_text("damaged")
    assert newest(tmp_path)[0] is None
    assert save_small(tmp_path, 4) == folder
    assert newest(tmp_path) == (folder, [])
    assert [path.name for path in folder.parent.iterdir()] == ["step-00000004"]


def test_pruning_keeps_the_last_ones_and_does_not_count_what_came_from_a_later_step(tmp_path: Path) -> None:
    for step in (1, 2, 3, 99_999_999, 100_000_000):
        save_small(tmp_path, step)
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert committed(tmp_path) == [path_of(tmp_path, step) for step in (100_000_000, 99_999_999, 3, 2, 1)]
    ours = claim(tmp_path)
    prune(ours, path_of(tmp_path, 3), keep_last=1, keep_step=1)
    assert committed(tmp_path) == [path_of(tmp_path, step) for step in (100_000_000, 99_999_999, 3, 1)]
    save_small(tmp_path, 2)
    ours = claim(tmp_path)
    prune(ours, path_of(tmp_path, 3), keep_last=2)
    assert committed(tmp_path) == [path_of(tmp_path, step) for step in (100_000_000, 99_999_999, 3, 2)]
    prune(ours, path_of(tmp_path, 3), keep_last=1)
    prune(ours, path_of(tmp_path, 100_000_000), keep_last=9)
    assert committed(tmp_path) == [path_of(tmp_path, step) for step in (100_000_000, 99_999_999, 3)]
    prune(ours, path_of(tmp_path, 100_000_000), keep_last=1)
    assert committed(tmp_path) == [path_of(tmp_path, 100_000_000)]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["notes", "step-100000000"]


def test_a_removal_that_was_killed_is_finished_by_the_next_save(tmp_path: Path) -> None:
    before = save_small(tmp_path, 1)
    ours = claim(tmp_path)
    before.rename(ours.place / f"{before.name}.removed")
    assert committed(tmp_path) == []
    folder = save_small(tmp_path, 2)
    assert list(folder.parent.iterdir()) == [folder]
    assert [path.name for path in (tmp_path / "starts").glob("*/*")] == ["start.json"]


def test_a_save_that_failed_can_be_discarded(tmp_path: Path) -> None:
    before = save_small(tmp_path, 1)
    ours = claim(tmp_path)
    folder = begin(ours, 2)
    write_pieces(folder, 0, [piece(torch.zeros(3))])
    step_folders.discard(ours, folder)
    step_folders.discard(ours, folder)
    assert list(before.parent.iterdir()) == [before]
    assert [path.name for path in ours.place.iterdir()] == ["start.json"]


# What a disk does ------------------------------------------------------------------------------------------------------------


def mount(*words: str) -> bool:
    command = ["mount", "-t", "tmpfs", *words]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() != 0 or not shutil.which("mount") or not mount("-o", "size=1m", "tmpfs", str(path)):
        pytest.skip("mounting a small file system takes root and the right to mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_is_said_and_the_checkpoint_before_stays(small_disk: Path) -> None:
    before = save_small(small_disk, 1)
    ours = claim(small_disk)
    folder = begin(ours, 2)
    said = refusal(lambda: write_pieces(folder, 3, [piece(torch.zeros(2**20), shape=[2**20])]))
    file = folder / "rank-00003.safetensors"
    assert said == f"{file} cannot be written: No space left on device. Free space there, or keep fewer checkpoints."
    assert newest(small_disk) == (before, [])
    step_folders.discard(ours, folder)
    entry = write_pieces(begin(ours, 2), 0, [piece(torch.zeros(12))])
    buffers = {"large": torch.zeros(2**20)}
    said = refusal(lambda: commit(ours, 2, [entry], state={}, buffers=buffers))
    assert f"{folder / 'buffers.safetensors'} cannot be written: No space left on device." in said
    assert newest(small_disk) == (before, [])
    after = save_small(small_disk, 2)  # what filled the disk is gone with the next save
    assert newest(small_disk) == (after, [])


def test_a_disk_that_cannot_be_written_is_said_and_still_read(small_disk: Path) -> None:
    before = save_small(small_disk, 1)
    ours = claim(small_disk)
    folder = begin(ours, 2)
    assert mount("-o", "remount,ro", "tmpfs", str(small_disk))
    because = "Read-only file system. Mount it writable, or choose another --run-dir."
    file = folder / "rank-00000.safetensors"
    assert refusal(lambda: write_pieces(folder, 0, [])) == f"{file} cannot be written: {because}"
    assert refusal(lambda: begin(ours, 2)) == f"{folder} cannot be written: {because}"
    assert refusal(lambda: step_folders.discard(ours, folder)) == f"{folder} cannot be removed: {because}"
    assert newest(small_disk) == (before, [])
    assert Reader(before).state == {"step": 1}


@pytest.fixture
def nobody() -> Iterator[None]:
    """Whoever runs the tests, inside them it is a user without rights, as root may write everywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


def test_a_folder_that_is_not_ours_is_said(tmp_path: Path, nobody: None) -> None:
    ours = Claim(tmp_path, tmp_path)
    with suppress(PermissionError):
        tmp_path.chmod(0o500)
    said = refusal(lambda: begin(ours, 1))
    assert said.startswith(f"{temporary_of(ours, 1)} cannot be written: Permission denied. Give this user the right to")
