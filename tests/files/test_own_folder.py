"""Folders in places that others can write to: made for one user, and refused where somebody else may have prepared them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from app.data.preprocessing import own_folder, refuse_prepared
from app.distributed.runtime import load_operators
from app.errors import DataError, PresetError
from app.tasks.image_classification.data import arrays
from app.tasks.image_classification.data.open import staged
from app.tasks.image_classification.sections import DataRecipe, Sections

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to create folders of another user")


@pytest.fixture
def everybodys(tmp_path: Path) -> Path:
    """A folder like /tmp."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def prepared(place: Path, how: str) -> Path:
    """What a stranger makes where we are expected to."""
    if how == "link":
        target = place.parent / "target"
        target.mkdir()
        place.symlink_to(target)
    elif how == "open":
        place.mkdir()
        place.chmod(0o777)
    else:
        os.mkfifo(place)
    os.chown(place, STRANGER, STRANGER, follow_symlinks=False)
    return place


def test_it_is_made_for_one_user(everybodys: Path) -> None:
    before = os.umask(0)
    try:
        folder = own_folder(everybodys / "a" / "b")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    assert stat.S_IMODE(own_folder(folder).stat().st_mode) == 0o700, "one of an earlier version"
    (everybodys / "link").symlink_to(folder)
    assert own_folder(everybodys / "link") == everybodys / "link", "our own link, as to a disk with more room"
    (everybodys / "file").touch()
    with pytest.raises(FileExistsError):
        own_folder(everybodys / "file")


@as_root
@pytest.mark.parametrize("how", ["link", "open", "pipe"])
def test_what_a_stranger_has_prepared_is_refused(everybodys: Path, how: str) -> None:
    place = prepared(everybodys / "samerun", how)
    whose = f"{place} {'is a link of' if how == 'link' else 'belongs to'} user {STRANGER}, who may have prepared it"
    with pytest.raises(PermissionError, match=whose):
        own_folder(place)
    assert how == "pipe" or list(everybodys.rglob("*/*")) == []
    if how == "open":
        with pytest.raises(PermissionError, match=whose):
            own_folder(place / "below")
        with pytest.raises(PermissionError, match=whose):
            refuse_prepared(place / "below" / "that")
    os.chown(everybodys, STRANGER, STRANGER)
    everybodys.chmod(0o755)
    own_folder(everybodys / "of a colleague, who is known")


@as_root
def test_cache_staging_and_compiled_operators_refuse_it(
    everybodys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMERUN_CACHE", str(prepared(everybodys / "cache", "open")))
    with pytest.raises(DataError, match=rf"user {STRANGER}, who may have prepared it\); set SAMERUN_CACHE"):
        arrays.keep(["x"], arrays.SMALL_BYTES + 1, pytest.fail)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "x").write_bytes(b"x")
    prepared(everybodys / "samerun-0", "open")
    data = DataRecipe(source="mnist", path=str(tmp_path / "pictures"), stage_to=str(everybodys))
    with pytest.raises(DataError, match=rf"cannot be copied to data\.stage_to={everybodys}: .* user {STRANGER}, who may"):
        staged(Sections(data=data))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(prepared(everybodys / "extensions", "open")))
    with pytest.raises(PresetError, match=r"who may have prepared it\): set TORCH_EXTENSIONS_DIR"):
        load_operators()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "pictures" / "x"))
    with pytest.raises(PresetError, match=rf"{tmp_path}/pictures/x, which cannot be used \(.*\): set TORCH_EXTENSIONS_DIR"):
        load_operators()
    assert list(everybodys.rglob("cache/*")) == []
