"""Checkpoints on disk: any damage is found, and neither a kill nor a full disk harms the other checkpoints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from saved import piece, refusal, save_small

from app.checkpoints import step_folders
from app.checkpoints.step_folders import Reader, begin, choose, commit, committed, path_of, prune, verify, write_pieces
from app.runs.claim import claim

FILES = ["rank-00000.safetensors", "rank-00001.safetensors", "buffers.safetensors", "state.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
def test_damage_of_any_file_is_found_and_the_checkpoint_before_it_taken(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = save_small(tmp_path, 1), save_small(tmp_path, 2)
    path = newer / name
    content = path.read_bytes()
    size = len(content)
    for length in (0, 1, size // 2, size - 1, size + 1):
        path.write_bytes((content + b"\n")[:length])
        assert choose(tmp_path) == older
        report = capsys.readouterr().err
        assert report.startswith(f"skipped: {path}")
        assert ("is truncated or has changed" if name == "manifest.json" else f"has {length} bytes instead of {size}") in report
    path.unlink()
    assert f"{path} " in refusal(lambda: verify(newer))
    for place in range(0, size, 3):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        assert str(path) in refusal(lambda: verify(newer))
    path.write_bytes(content)
    assert choose(tmp_path) == newer


def test_parts_of_a_verification_are_the_whole(tmp_path: Path) -> None:
    folder = save_small(tmp_path, 1)
    assert [verify(folder, part=(index, 9)) for index in range(9)] == [None] * 9
    for name in FILES[:-1]:
        (folder / name).write_bytes(b"damaged")
    sentences = "".join(refusal(lambda index=index: verify(folder, part=(index, 4))) for index in range(4))
    assert all(name in sentences for name in FILES[:-1])


def test_damage_after_the_verification_is_a_sentence(tmp_path: Path) -> None:
    folder = save_small(tmp_path, 1)
    tensors = folder / "rank-00001.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert f"{tensors} is damaged" in refusal(lambda: Reader(folder).read_into(piece(torch.zeros(12))))
    tensors.unlink()
    assert f"{tensors} cannot be read: " in refusal(lambda: Reader(folder).read_into(piece(torch.zeros(12))))
    (folder / "manifest.json").write_bytes(step_folders._sealed(b'{"format": 3}'))
    assert "has format 3, and this version reads formats 1 and 2" in refusal(lambda: verify(folder))


def test_a_run_folder_without_a_committed_checkpoint_has_none(tmp_path: Path) -> None:
    begin(claim(tmp_path), 5)
    assert "contains no complete checkpoint" in refusal(lambda: choose(tmp_path))
    assert "manifest.json is missing" in refusal(lambda: verify(tmp_path))


def test_remains_of_killed_and_failed_saves_are_removed(tmp_path: Path) -> None:
    before = save_small(tmp_path, 1)
    ours = claim(tmp_path)
    folder = begin(ours, 4)
    write_pieces(folder, 7, [piece(torch.zeros(12))])
    step_folders.discard(ours, folder)
    step_folders.discard(ours, folder)
    assert [path.name for path in ours.place.iterdir()] == ["start.json"]
    write_pieces(begin(ours, 4), 7, [piece(torch.zeros(12))])
    before.rename(ours.place / f"{before.name}.removed")  # as a kill leaves a removal
    folder = save_small(tmp_path, 4)
    assert not ours.place.exists()
    assert sorted(file.name for file in folder.iterdir()) == sorted(FILES)
    assert list(folder.parent.iterdir()) == [folder]
    assert [path.name for path in (tmp_path / "starts").glob("*/*")] == ["start.json"]
    (folder / "state.json").write_text("damaged")
    assert save_small(tmp_path, 4) == folder
    assert choose(tmp_path) == folder


def test_pruning_keeps_the_last_checkpoints_and_does_not_count_later_steps(tmp_path: Path) -> None:
    for step in (1, 2, 3, 99_999_999, 100_000_000):
        save_small(tmp_path, step)
    (tmp_path / "checkpoints" / "notes").mkdir()

    def left(latest: int, *, keep_last: int, **kept: int) -> list[int]:
        prune(claim(tmp_path), path_of(tmp_path, latest), keep_last=keep_last, **kept)
        return [int(path.name.removeprefix("step-")) for path in committed(tmp_path)]

    assert left(3, keep_last=1, keep_step=1) == [100_000_000, 99_999_999, 3, 1]
    save_small(tmp_path, 2)
    assert left(3, keep_last=2) == [100_000_000, 99_999_999, 3, 2]
    assert left(3, keep_last=1) == left(100_000_000, keep_last=9) == [100_000_000, 99_999_999, 3]
    assert left(100_000_000, keep_last=1, keep_every=3) == [100_000_000, 99_999_999, 3]
    assert left(100_000_000, keep_last=1) == [100_000_000]
    assert (tmp_path / "checkpoints" / "notes").exists()


def test_a_full_or_read_only_disk_is_a_sentence_and_the_checkpoint_before_stays(small_disk: Path) -> None:
    before = save_small(small_disk, 1)
    ours = claim(small_disk)
    folder = begin(ours, 2)
    file = folder / "rank-00003.safetensors"
    large = [piece(torch.zeros(2**20), shape=[2**20])]
    why = "No space left on device. Free space there, or keep fewer checkpoints."
    assert refusal(lambda: write_pieces(folder, 3, large)) == f"{file} cannot be written: {why}"
    assert choose(small_disk) == before
    step_folders.discard(ours, folder)
    entry = write_pieces(begin(ours, 2), 0, [piece(torch.zeros(12))])
    sentence = refusal(lambda: commit(ours, 2, [entry], state={}, buffers={"large": torch.zeros(2**20)}))
    assert f"{folder / 'buffers.safetensors'} cannot be written: No space left on device." in sentence
    after = save_small(small_disk, 2)  # the remains that filled the disk are gone with the next save
    assert choose(small_disk) == after
    ours = claim(small_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    why = "Read-only file system. Make it writable for this user, or choose another --run-dir."
    folder = step_folders.temporary_of(ours, 3)
    assert refusal(lambda: begin(ours, 3)) == f"{folder} cannot be written: {why}"
    assert choose(small_disk) == after
