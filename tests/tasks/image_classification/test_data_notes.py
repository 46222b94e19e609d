"""What is said of data before a run because a person would want to read it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from app.errors import DataError
from app.tasks.image_classification.data.open import notes_on, open_data
from app.tasks.image_classification.sections import DataRecipe, Sections


def notes(source: str, path: Path | None, **keys: object) -> list[str]:
    data = DataRecipe(source=source, path=None if path is None else str(path), **keys)  # type: ignore[arg-type]
    return notes_on(open_data(Sections(data=data)))


def test_of_the_shipped_data_there_is_nothing_to_say(pictures: Path) -> None:
    assert notes("digits", None) == []
    assert notes("fakedata", None, image_size=24) == []
    assert notes("imagefolder", pictures, image_size=24) == []


@pytest.mark.parametrize(
    ("first", "words"), [(0, None), (100, "100 of the 103 classes have no training samples ('0', '1', '2'")]
)
def test_labels_that_are_numbers_with_a_gap_are_told(tmp_path: Path, first: int, words: str | None) -> None:
    from datasets import Dataset  # here, so that a Python without it collects the other tests

    image = np.zeros((8, 8), np.uint8)
    rows = Dataset.from_dict({"image": [image] * 6, "label": [first, first + 1, first + 2] * 2})
    rows.to_parquet(tmp_path / "rows.parquet")
    said = notes("huggingface", tmp_path / "rows.parquet", train_split="train", test_split="train")
    if words is None:
        assert said == []
        return
    (note,) = said
    assert words in note
    assert note.endswith("Number classes from 0 without gaps, or name them")


def test_pictures_of_a_kind_that_is_not_read_are_told(pictures: Path, tmp_path: Path) -> None:
    for _ in range(2):  # listed, and found in the cache
        shutil.copytree(pictures, tmp_path / "data", dirs_exist_ok=True)
        place = tmp_path / "data" / "train" / sorted(path.name for path in (pictures / "train").iterdir())[0]
        for number in range(3):
            Image.new("RGB", (8, 8)).save(place / f"moving{number}.GIF")
        (place / "notes.txt").touch()
        (place / ".DS_Store").touch()
        (note,) = notes("imagefolder", tmp_path / "data", image_size=24)
        assert note.startswith(
            f"{tmp_path / 'data' / 'train'}: 5 files or folders left out: 3 .gif, 1 .txt, 1 hidden, such as "
        )
    for path in place.iterdir():
        if path.suffix in (".jpg", ".png"):
            path.unlink()
    with pytest.raises(
        DataError, match=rf"there are no images in the class folder\(s\) {place.name} \(5 files or folders left out: 3 .gif, 1"
    ):
        notes("imagefolder", tmp_path / "data", image_size=24)
