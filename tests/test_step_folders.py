"""Checkpoints on disk: any cutting is read back under any other, whatever is damaged is found, and a kill or a disk harms none.

Several ranks are several calls of `write_pieces`. The reference is the tensor that was cut, bit for bit, and for the files
themselves the safetensors library.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from app.checkpoints import durable, manifest, step_folders
from app.checkpoints.piece import Piece
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

REPOSITORY = Path(__file__).parent.parent
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def random_bits(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, so that every NaN and denormal has to survive."""
    bits = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist() if tensor.numel() else []


def piece(values: torch.Tensor, start: int = 0, *, key: str = "weight", name: str = "w", shape: Sequence[int] = (12,)) -> Piece:
    return Piece(key, name, tuple(shape), start, values)


def save(run_dir: Path, step: int, *ranks: list[Piece], state: dict[str, Any] | None = None) -> Path:
    folder = begin(run_dir, step)
    entries = [write_pieces(folder, rank, pieces) for rank, pieces in enumerate(ranks)]
    buffers = {"norm.mean": torch.tensor([0.5, 1.5]), "norm.count": torch.tensor(7)}
    return commit(run_dir, step, entries, state={"step": step} if state is None else state, buffers=buffers)


def save_small(run_dir: Path, step: int) -> Path:
    weight = torch.arange(12.0) + step
    return save(run_dir, step, [piece(weight[:5])], [piece(weight[5:], 5)])


def refusal(call: Callable[[], Any]) -> str:
    """The sentence that a call is refused with."""
    with pytest.raises(CheckpointError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is written is read -----------------------------------------------------------------------------------------------------

shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=3)
cuts = st.lists(st.integers(0, 125), max_size=6)


def cut(tensor: torch.Tensor, at: list[int], key: str, name: str) -> list[Piece]:
    flat = tensor.reshape(-1)
    edges = [0, *sorted({min(place, flat.numel()) for place in at} - {0, flat.numel()}), flat.numel()]
    return [Piece(key, name, tuple(tensor.shape), a, flat[a:b]) for a, b in pairwise(edges)]


@settings(max_examples=40, deadline=None)
@given(shapes=shapes, ranks=st.integers(1, 4), data=st.data())
def test_any_cutting_is_read_back_bit_by_bit_under_any_other(
    shapes: list[tuple[int, ...]], ranks: int, data: st.DataObject
) -> None:
    written: list[list[Piece]] = [[] for _ in range(ranks + 1)]  # one more rank, whose share is empty
    tensors = {}
    for number, shape in enumerate(shapes):
        for key, dtype in zip(("weight", "exp_avg", "average"), DTYPES, strict=True):
            size = torch.Size(shape).numel()
            tensors[key, f"p{number}"] = random_bits(size, dtype, number).reshape(shape)
            for part in cut(tensors[key, f"p{number}"], data.draw(cuts), key, f"p{number}"):
                written[data.draw(st.integers(0, ranks - 1))].append(part)
    with tempfile.TemporaryDirectory() as directory:
        reader = Reader(save(Path(directory), 1, *written))
        assert reader.keys() == ["average", "exp_avg", "weight"]
        assert reader.shapes() == {f"p{number}": shape for number, shape in enumerate(shapes)}
        for (key, name), tensor in tensors.items():
            for part in cut(torch.zeros_like(tensor), data.draw(cuts), key, name):
                reader.read_into(part)
                assert bits(part.values) == bits(tensor.reshape(-1)[part.start : part.start + part.values.numel()])
        verify(reader.folder)


def test_the_files_are_what_safetensors_reads(tmp_path: Path) -> None:
    wide, narrow = random_bits(3, torch.float64, 0), random_bits(7, torch.bfloat16, 1)
    folder = save(tmp_path, 1, [piece(narrow, key="m", shape=[7]), piece(wide, name="v", shape=[3])], [])
    found = load_file(folder / "rank-00000.safetensors")
    assert {name: bits(tensor) for name, tensor in found.items()} == {"m/w@0": bits(narrow), "weight/v@0": bits(wide)}
    assert load_file(folder / "rank-00001.safetensors") == {}
    assert load_file(folder / "buffers.safetensors")["norm.count"].item() == 7


def test_a_tensor_larger_than_a_chunk_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "CHUNK_BYTES", 64)
    values = random_bits(1001, torch.float32, 3)
    folder = save(tmp_path, 1, [piece(values, shape=[1001])])
    assert bits(load_file(folder / "rank-00000.safetensors")["weight/w@0"]) == bits(values)
    verify(folder)


def test_values_are_converted_to_what_they_are_read_into(tmp_path: Path) -> None:
    reader = Reader(save_small(tmp_path, 1))
    parameter = torch.nn.Parameter(torch.zeros(12, dtype=torch.bfloat16))
    reader.read_into(piece(parameter.view(-1)[3:9], 3))
    assert parameter.tolist() == [0, 0, 0, 4, 5, 6, 7, 8, 9, 0, 0, 0]


def test_state_and_buffers_come_back_and_outlive_the_folder(tmp_path: Path) -> None:
    state = {"step": 3, "beta": 0.1 + 0.2, "seen": 2**60, "none": None, "names": ["\u00e9"]}
    reader = Reader(save(tmp_path, 3, [piece(torch.zeros(12))], state=state))
    buffers = reader.buffers()
    shutil.rmtree(tmp_path / "checkpoints")
    assert reader.state == state
    assert buffers["norm.mean"].tolist() == [0.5, 1.5]
    assert buffers["norm.count"].shape == ()


def test_a_tensor_that_is_not_there_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    reader = Reader(save_small(tmp_path, 1))
    into = torch.zeros(12)
    assert "no 'exp_avg' of any parameter: it has weight" in refusal(lambda: reader.read_into(piece(into, key="exp_avg")))
    assert "no 'weight' of other" in refusal(lambda: reader.read_into(piece(into, name="other")))
    assert "w has the shape (3, 4) in this run's model and (12,) in" in refusal(
        lambda: reader.read_into(piece(into, shape=[3, 4]))
    )
    assert into.tolist() == [0.0] * 12


def test_many_ranges_are_searched_by_halves(tmp_path: Path) -> None:
    """A read of the last of 5,000 ranges compares about 13 starts; a search from the front would compare 5,000."""
    values = torch.arange(5_000.0)
    entry = write_pieces(begin(tmp_path, 1), 0, [piece(values[at : at + 1], at, shape=[5_000]) for at in range(5_000)])
    reader = Reader(commit(tmp_path, 1, [entry], state={}, buffers={}))
    compared = 0

    class Counted(list[tuple[int, int, str]]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal compared
            compared += 1
            return super().__getitem__(index)

    stored = reader._tensors["weight"]["w"]
    reader._tensors["weight"]["w"] = manifest.Stored(stored.shape, stored.dtype, Counted(stored.ranges))
    last = torch.zeros(1)
    reader.read_into(piece(last, 4_999, shape=[5_000]))
    assert last.item() == 4_999
    assert 1 <= compared <= 20


# What is not whole is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranges", "problem"),
    [
        ([(0, 5), (6, 12)], "elements 5 to 5 are in no file"),
        ([(1, 12)], "elements 0 to 0 are in no file"),
        ([(0, 11)], "elements 11 to 11 are in no file"),
        ([(0, 0)], "elements 0 to 11 are in no file"),
        ([(0, 7), (5, 12)], "elements 5 to 6 are in two files, one of them rank-00001.safetensors"),
        ([(0, 12), (3, 4)], "elements 3 to 3 are in two files, one of them rank-00001.safetensors"),
        ([(0, 12), (0, 12)], "elements 0 to 11 are in two files, one of them rank-00001.safetensors"),
        ([(0, 12), (12, 13)], "it has 12 elements, and 13 are in files"),
    ],
)
def test_ranges_that_do_not_cover_a_tensor_once_are_not_committed(
    tmp_path: Path, ranges: list[tuple[int, int]], problem: str
) -> None:
    before = save_small(tmp_path, 1)
    said = refusal(lambda: save(tmp_path, 2, *([piece(torch.zeros(stop - start), start)] for start, stop in ranges)))
    assert f"step-00000002 cannot be written: of weight of w, {problem}." in said
    assert newest(tmp_path) == (before, [])


def test_ranks_that_differ_in_a_dtype_or_shape_are_not_committed(tmp_path: Path) -> None:
    halves = [piece(torch.zeros(6))], [piece(torch.zeros(6, dtype=torch.float64), 6)]
    assert "weight of w is F32 (12,) on one rank and F64 (12,) in rank-00001" in refusal(lambda: save(tmp_path, 1, *halves))
    halves = [piece(torch.zeros(6))], [piece(torch.zeros(6), 6, shape=[3, 4])]
    assert "weight of w is F32 (12,) on one rank and F32 (3, 4) in rank-00001" in refusal(lambda: save(tmp_path, 1, *halves))


def test_a_file_of_a_rank_that_does_not_share_the_folder_is_missed(tmp_path: Path) -> None:
    here, there = begin(tmp_path / "here", 1), begin(tmp_path / "there", 1)
    entries = [write_pieces(here, 0, [piece(torch.zeros(6))]), write_pieces(there, 1, [piece(torch.zeros(6), 6)])]
    said = refusal(lambda: commit(tmp_path / "here", 1, entries, state={}, buffers={}))
    assert "rank-00001.safetensors is not what its rank has just written: the run folder has to be on a file system" in said
    assert committed(tmp_path / "here") == []


def test_a_dtype_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    values = torch.zeros(12, dtype=torch.complex64)
    said = refusal(lambda: write_pieces(begin(tmp_path, 1), 0, [piece(values)]))
    assert said.startswith("weight/w@0 is of torch.complex64, which cannot be saved")


# What is damaged is found ----------------------------------------------------------------------------------------------------

FILES = ["rank-00000.safetensors", "rank-00001.safetensors", "buffers.safetensors", "state.json", "manifest.json"]


def test_these_are_all_files(tmp_path: Path) -> None:
    assert sorted(file.name for file in save_small(tmp_path, 1).iterdir()) == sorted(FILES)


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
        falls_back(*sizes.get(name, [f"is truncated: it has {length} bytes, and {size} were written"]))
    path.write_bytes(content + b"\n")
    falls_back(*sizes.get(name, [f"has grown: it has {size + 1} bytes, and {size} were written"]))
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
    (folder / "manifest.json").write_bytes(manifest._sealed(b'{"format": 2}'))
    assert "is of format 2, and this version reads format 1" in refusal(lambda: verify(folder))


def test_where_there_is_no_checkpoint_none_is_found(tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, [])
    assert "manifest.json is missing" in refusal(lambda: verify(tmp_path))
    begin(tmp_path, 5)
    assert newest(tmp_path) == (None, [])


# What a kill leaves ----------------------------------------------------------------------------------------------------------

# For each line of its input, a time in seconds, a process that saves one checkpoint after the other is killed so long after
# its first one appeared.
# Forked, because it is torch that takes long to import.
WRITERS = """
import os, signal, sys, time, torch
from pathlib import Path
from app.checkpoints.step_folders import begin, commit, committed, prune, write_pieces
from app.checkpoints.piece import Piece

def write(run_dir):
    step = max([int(path.name[5:]) for path in committed(run_dir)], default=0)
    while True:
        step += 1
        folder, values = begin(run_dir, step), torch.arange(1_000_000.0) + step
        halves = [Piece("weight", "w", (1_000_000,), at, values[at : at + 500_000]) for at in (0, 500_000)]
        entries = [write_pieces(folder, rank, [half]) for rank, half in enumerate(halves)]
        prune(commit(run_dir, step, entries, state={"step": step}, buffers={}), keep_last=2)

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
            leftovers += any((tmp_path / "checkpoints").glob(".*"))
            last = step_that_reads_whole(tmp_path, at_least=last)
    assert last > 0
    assert leftovers > 0, "no kill was within a save"
    save_small(tmp_path, last + 1)
    assert not list((tmp_path / "checkpoints").glob(".*"))


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
    write_pieces(begin(tmp_path, 4), 7, [piece(torch.zeros(12))])
    assert temporary_of(tmp_path, 4).is_dir()
    folder = save_small(tmp_path, 4)
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
    prune(path_of(tmp_path, 3), keep_last=1, keep_step=1)
    assert committed(tmp_path) == [path_of(tmp_path, step) for step in (100_000_000, 99_999_999, 3, 1)]
    save_small(tmp_path, 2)
    prune(path_of(tmp_path, 3), keep_last=2)
    assert committed(tmp_path) == [path_of(tmp_path, step) for step in (100_000_000, 99_999_999, 3, 2)]
    prune(path_of(tmp_path, 3), keep_last=1)
    prune(path_of(tmp_path, 100_000_000), keep_last=9)
    assert committed(tmp_path) == [path_of(tmp_path, step) for step in (100_000_000, 99_999_999, 3)]
    prune(path_of(tmp_path, 100_000_000), keep_last=1)
    assert committed(tmp_path) == [path_of(tmp_path, 100_000_000)]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["notes", "step-100000000"]


def test_a_removal_that_was_killed_is_finished_by_the_next_save(tmp_path: Path) -> None:
    step_folders._set_aside(save_small(tmp_path, 1))
    assert committed(tmp_path) == []
    folder = save_small(tmp_path, 2)
    assert list(folder.parent.iterdir()) == [folder]


def test_a_save_that_failed_can_be_discarded(tmp_path: Path) -> None:
    before = save_small(tmp_path, 1)
    folder = begin(tmp_path, 2)
    write_pieces(folder, 0, [piece(torch.zeros(3))])
    step_folders.discard(folder)
    step_folders.discard(folder)
    assert list(before.parent.iterdir()) == [before]


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
    folder = begin(small_disk, 2)
    said = refusal(lambda: write_pieces(folder, 3, [piece(torch.zeros(2**20), shape=[2**20])]))
    file = folder / "rank-00003.safetensors"
    assert said == f"{file} cannot be written: No space left on device. Free space there, or keep fewer checkpoints."
    assert newest(small_disk) == (before, [])
    step_folders.discard(folder)
    entry = write_pieces(begin(small_disk, 2), 0, [piece(torch.zeros(12))])
    buffers = {"large": torch.zeros(2**20)}
    said = refusal(lambda: commit(small_disk, 2, [entry], state={}, buffers=buffers))
    assert f"{folder / 'buffers.safetensors'} cannot be written: No space left on device." in said
    assert newest(small_disk) == (before, [])
    after = save_small(small_disk, 2)  # what filled the disk is gone with the next save
    assert newest(small_disk) == (after, [])


def test_a_disk_that_cannot_be_written_is_said_and_still_read(small_disk: Path) -> None:
    before = save_small(small_disk, 1)
    folder = begin(small_disk, 2)
    assert mount("-o", "remount,ro", "tmpfs", str(small_disk))
    because = "Read-only file system. Mount it writable, or choose another --run-dir."
    file = folder / "rank-00000.safetensors"
    assert refusal(lambda: write_pieces(folder, 0, [])) == f"{file} cannot be written: {because}"
    assert refusal(lambda: begin(small_disk, 2)) == f"{folder} cannot be written: {because}"
    assert refusal(lambda: step_folders.discard(folder)) == f"{folder} cannot be removed: {because}"
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
    with suppress(PermissionError):
        tmp_path.chmod(0o500)
    said = refusal(lambda: begin(tmp_path, 1))
    assert said.startswith(f"{temporary_of(tmp_path, 1)} cannot be written: Permission denied. Give this user the right to")
