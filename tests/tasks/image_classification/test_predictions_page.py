"""What the page of a run shows of a classifier of pictures: few classes as a table, many as a picture, nothing unknown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from app.errors import RunFolderError
from app.reports import past_run, report
from app.tasks.image_classification import page


def left(folder: Path, *, num_classes: int, samples_left_out: int = 0) -> Path:
    """What a run leaves of a model that takes every 7th class for the next one."""
    pairs = [[label, (label + (label % 7 == 6)) % num_classes, 3 + label % 2] for label in range(num_classes)]
    told = {"classes": [f"c{number}" for number in range(num_classes)], "pairs": pairs, "spread": [], "mistakes": []}
    (folder / "test_predictions").mkdir(parents=True)
    (folder / "test_predictions" / "predictions.json").write_text(json.dumps({**told, "samples_left_out": samples_left_out}))
    return folder


def test_the_confusion_matrix_is_drawn_if_all_of_it_is_known(tmp_path: Path) -> None:
    few, many = (page.read(left(tmp_path / str(size), num_classes=size)) for size in (8, 30))
    assert few.frequent_mistakes == [("c6", "c7", 3)]
    assert [text.get_text() for text in few.confusion.axes[0].texts][6 * 8 :][:8] == ["0"] * 7 + ["3"]
    assert len(many.confusion.axes[0].texts) == 0
    assert many.confusion_in_words == "30 classes; 91 of 105 samples are on the diagonal."
    partly = page.read(left(tmp_path / "partly", num_classes=30, samples_left_out=5))
    assert (partly.confusion, len(partly.frequent_mistakes)) == (None, 4)


def test_the_page_has_the_picture(digits_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(digits_run, tmp_path / "run", ignore=shutil.ignore_patterns("test_predictions")))
    html, complaints = report.render(past_run.read(left(folder, num_classes=30)), now=0.0)
    assert complaints == []
    assert "91 of 105 samples are on the diagonal" in html


def test_what_is_no_count_is_refused(tmp_path: Path) -> None:
    path = left(tmp_path, num_classes=3) / "test_predictions" / "predictions.json"
    path.write_text(path.read_text().replace("[[0, 0, 3]", "[[0, 9, 3]"))
    with pytest.raises(RunFolderError, match="a class is not one of the 3 in the file"):
        page.read(tmp_path)
    assert page.read(tmp_path / "nothing") is None
