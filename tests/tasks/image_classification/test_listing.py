"""Lists of pictures: what ImageFolder finds, kept as long as no folder changes, and shared by all processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchvision.datasets import ImageFolder

from app.errors import DataError
from app.tasks.image_classification.data import folders
from app.tasks.image_classification.data.folders import Listing, images_below

LONG_AGO_S = time.time() - 3600
FORK = multiprocessing.get_context("fork")
NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12)


def write(folder: Path, *files: str, changed_s: float = LONG_AGO_S) -> Path:
    """Empty files below a folder, all folders of which were last changed then: before what a date may miss."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for place, _, _ in os.walk(folder):
        os.utime(place, (changed_s, changed_s))
    return folder


def found(files: Listing) -> list[tuple[str, int]]:
    return [(files.path(index), int(files.labels[index])) for index in range(len(files))]


def by_torchvision(folder: Path) -> list[tuple[str, int]]:
    """Without hidden files, which torchvision takes."""
    samples = [(os.path.relpath(path, folder), label) for path, label in ImageFolder(str(folder), allow_empty=True).samples]
    return [(path, label) for path, label in samples if not any(part.startswith(".") for part in Path(path).parts)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAMERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "listings"


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sub-folders that are listed."""
    names: list[str] = []
    walk = folders.walk

    def noting(top: Path, below: str, not_read: object) -> object:
        names.extend([below] if below else [])
        return walk(top, below, not_read)

    monkeypatch.setattr(folders, "walk", noting)
    return names


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(NAMES, max_size=2), NAMES), max_size=12))
def test_it_is_what_imagefolder_finds(tmp_path_factory: pytest.TempPathFactory, tree: list[tuple[str, list[str], str]]) -> None:
    folder = tmp_path_factory.mktemp("tree")
    for name in "ab":
        (folder / name).mkdir()
    for top, between, name in tree:
        place = folder.joinpath(top, *(f"{part}.d" for part in between))
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.JPG").touch()
        (place / f"{name}.txt").touch()
    assert found(images_below(folder, "ab")) == by_torchvision(folder)


def test_it_is_made_once_for_all_processes(tmp_path: Path, cache: Path, scans: list[str]) -> None:
    folder = write(tmp_path / "pictures", "a/0.png", "a/deep/1.png", "b/2.jpg")
    processes = [FORK.Process(target=images_below, args=(folder, "ab")) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    files = images_below(folder, "ab")
    assert scans == []  # in this process
    assert found(files) == [("a/0.png", 0), ("a/deep/1.png", 0), ("b/2.jpg", 1)]
    assert found(pickle.loads(pickle.dumps(files))) == found(files)
    assert len(pickle.dumps(files)) < 300
    assert len(list(cache.iterdir())) == 2  # with the lock


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file more": lambda folder: (folder / "a/deep/3.png").touch(),
    "a file less": lambda folder: (folder / "b/2.jpg").unlink(),
    "a file of another name": lambda folder: (folder / "a/0.png").rename(folder / "a/00.png"),
    "a folder more": lambda folder: (folder / "b/new").mkdir(),
    "a folder less": lambda folder: shutil.rmtree(folder / "a/deep"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_is_made_anew_when_a_folder_changes(
    tmp_path: Path, cache: Path, scans: list[str], change: Callable[[Path], object]
) -> None:
    folder = write(tmp_path / "pictures", "a/0.png", "a/deep/1.png", "b/2.jpg")
    images_below(folder, "ab")
    change(folder)
    for _ in range(2):  # the second time, too: its folders have changed just now
        assert found(images_below(folder, "ab")) == by_torchvision(folder)
    assert scans == list("ababab")
    write(folder, changed_s=LONG_AGO_S + 60)
    for _ in range(2):
        assert found(images_below(folder, "ab")) == by_torchvision(folder)
    assert scans == list("abababab")


def test_of_other_classes_it_is_another(tmp_path: Path, cache: Path) -> None:
    folder = write(tmp_path / "pictures", "a/0.png", "b/2.jpg")
    assert found(images_below(folder, "ab")) == [("a/0.png", 0), ("b/2.jpg", 1)]
    assert found(images_below(folder, "b")) == [("b/2.jpg", 0)]


@pytest.mark.parametrize("name", ["names.bin", "ends.bin", "labels.bin", "listing.json"])
def test_a_damaged_list_is_made_again(tmp_path: Path, cache: Path, name: str) -> None:
    folder = write(tmp_path / "pictures", "a/0.png", "b/2.jpg")
    expected = found(images_below(folder, "ab"))
    (place,) = (path for path in cache.iterdir() if path.is_dir())
    content = (place / name).read_bytes()
    (place / name).write_bytes(content[: len(content) // 2])
    assert found(images_below(folder, "ab")) == expected


def test_without_a_cache_it_is_made_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "pictures", "a/0.png", "b/2.jpg")
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAMERUN_CACHE", str(tmp_path / "file"))
    files = images_below(folder, "ab")
    assert found(pickle.loads(pickle.dumps(files))) == [("a/0.png", 0), ("b/2.jpg", 1)]


def test_a_list_in_use_that_is_no_more_is_said(tmp_path: Path, cache: Path) -> None:
    folder = write(tmp_path / "pictures", "a/0.png", "b/2.jpg")
    pickled = pickle.dumps(images_below(folder, "ab"))
    (about,) = cache.glob("*/listing.json")
    about.write_text(json.dumps({**json.loads(about.read_text()), "listed_ns": 1}))
    with pytest.raises(DataError, match="was replaced as their folder changed: start the run again"):
        pickle.loads(pickled)
    shutil.rmtree(cache)
    with pytest.raises(DataError, match=r"is gone .* start the run again"):
        pickle.loads(pickled)


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, cache: Path) -> None:
    folder = write(tmp_path / "pictures", "a/0.png")
    with pytest.raises(DataError, match=rf"^{folder}/b cannot be read \(No such file or directory\); repair or remove it$"):
        images_below(folder, "ab")
    assert not list(cache.glob("*.tmp"))
