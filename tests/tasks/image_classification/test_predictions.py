"""What a run writes of its predictions: exact, the same on any topology and small; and what the page of a run shows."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from processes import read, train

from app.checkpoints import stored_weights
from app.errors import RunFolderError
from app.recipe import recipe_file
from app.reports import past_run, report
from app.tasks.image_classification import predictions
from app.tasks.image_classification.data.augment import Preparation
from app.tasks.image_classification.data.open import open_data


def written(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run_dir / "test_predictions").iterdir()}


def test_they_are_those_of_the_saved_weights_with_every_sample_once(digits_run: Path) -> None:
    recipe = recipe_file.load(str(digits_run / "recipe.yaml"), []).recipe
    source = open_data(recipe.sections)["test"]
    images, labels = source.fetch(np.arange(len(source)), None).values()
    _, model, _ = stored_weights.load(digits_run)
    preparation = Preparation(recipe.sections.data, recipe.sections.augment, channels=1, num_classes=10)
    with torch.no_grad():
        probabilities = model(preparation.evaluate({"images": images, "labels": labels})).softmax(dim=1)
    found = read(digits_run / "test_predictions" / "predictions.json")
    sure, answers = (values.tolist() for values in probabilities.max(dim=1))
    truth = labels.tolist()
    assert found["classes"] == list(source.classes)
    pairs = {(label, predicted): count for label, predicted, count in found["pairs"]}
    assert pairs == Counter(zip(truth, answers, strict=True))
    assert found["samples_left_out"] == 0

    wrong = sorted((-sure[index], index) for index in range(len(truth)) if truth[index] != answers[index])
    assert len(wrong) > 6
    assert [row["sample"] for row in found["mistakes"]] == [index for _, index in wrong[:6]]
    assert [row["sample"] for row in found["spread"]] == [0, 71, 143, 214, 286, 358]
    for row in found["spread"] + found["mistakes"]:
        index = row["sample"]
        assert (row["label"], row["predicted"]) == (truth[index], answers[index])
        assert row["probability"] == pytest.approx(sure[index], abs=6e-4)
        with Image.open(digits_run / "test_predictions" / f"{index}.png") as image:
            assert np.array_equal(np.asarray(image), images[index, 0].numpy())


@pytest.mark.multiproc
def test_shards_on_two_processes_write_the_same_bytes_as_one_process(digits_run: Path, tmp_path: Path) -> None:
    arguments = ("--recipe", "digits", "train.epochs=2", "train.global_batch_size=64", "log.every_steps=5")
    train("fsdp2", tmp_path / "two", *arguments, processes=2).check()
    assert len(written(digits_run)) == 13
    assert written(tmp_path / "two") == written(digits_run)


class Noise:
    """A thousand classes of large images that no compression makes smaller."""

    facts: ClassVar = {"classes": [f"class {label}" for label in range(1000)]}

    def fetch(self, indices: np.ndarray, draw: None) -> dict[str, torch.Tensor]:
        return {"images": torch.randint(0, 256, (len(indices), 3, 224, 160), dtype=torch.uint8)}


def test_of_a_thousand_classes_the_most_frequent_mistakes_are_written(tmp_path: Path) -> None:
    rows = [(label, predicted) for label in range(0, 1000, 10) for predicted in range(0, 1000, 10)] + [(3, 7)] * 5
    folder = tmp_path / "test_predictions"
    folder.mkdir()
    predictions.write(folder, Noise(), torch.tensor([(*row, 0.5) for row in rows], dtype=torch.float64))  # type: ignore[arg-type]
    found = read(folder / "predictions.json")
    kept = {(label, predicted): count for label, predicted, count in found["pairs"]}
    assert (len(kept), kept[3, 7], kept[990, 990]) == (2000, 5, 1)
    assert sum(kept.values()) + found["samples_left_out"] == len(rows)
    files = written(tmp_path)
    assert sum(map(len, files.values())) < 200_000
    with Image.open(io.BytesIO(files["0.png"])) as image:
        assert max(image.size) == 72
    summary = predictions.read(tmp_path)
    assert (summary.confusion, summary.frequent_mistakes[0]) == (None, ("class 3", "class 7", 5))


def write_counts(folder: Path, *, num_classes: int) -> Path:
    """Write what a run does, of a model that takes every 7th class for the next one."""
    pairs = [[label, (label + (label % 7 == 6)) % num_classes, 3 + label % 2] for label in range(num_classes)]
    content = {"classes": [f"c{number}" for number in range(num_classes)], "pairs": pairs, "spread": [], "mistakes": []}
    (folder / "test_predictions").mkdir(parents=True)
    (folder / "test_predictions" / "predictions.json").write_text(json.dumps({**content, "samples_left_out": 0}))
    return folder


def test_the_page_has_the_confusion_matrix(digits_run: Path, tmp_path: Path) -> None:
    few = predictions.read(write_counts(tmp_path / "few", num_classes=8))
    assert few.frequent_mistakes == [("c6", "c7", 3)]
    assert few.confusion[6] == ("c6", [*((f"c{said}", 0, 0.0) for said in range(7)), ("c7", 3, 1.0)])
    folder = Path(shutil.copytree(digits_run, tmp_path / "run", ignore=shutil.ignore_patterns("test_predictions")))
    html, complaints = report.render(past_run.read(write_counts(folder, num_classes=30)), now=0.0)
    assert complaints == []
    assert len(re.findall(r'title="c\d+ taken for c\d+: [34] \(100.0 %\)"', html)) == 30


def test_damaged_counts_are_refused(tmp_path: Path) -> None:
    path = write_counts(tmp_path, num_classes=3) / "test_predictions" / "predictions.json"
    path.write_text(path.read_text().replace("[[0, 0, 3]", "[[0, 9, 3]"))
    with pytest.raises(RunFolderError, match="a class is not one of the 3 in the file"):
        predictions.read(tmp_path)
    assert predictions.read(tmp_path / "nothing") is None
