"""What a run leaves of its predictions: exact, the same on any topology, and small."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from processes import read, train

from app.checkpoints import stored_weights
from app.recipe import recipe_file
from app.tasks.image_classification.data.augment import Preparation
from app.tasks.image_classification.data.open import open_data
from app.tasks.image_classification.predictions import write


def left(run_dir: Path) -> dict[str, bytes]:
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
    sure, said = (values.tolist() for values in probabilities.max(dim=1))
    truth = labels.tolist()
    assert found["classes"] == list(source.classes)
    assert {(label, predicted): count for label, predicted, count in found["pairs"]} == Counter(zip(truth, said, strict=True))
    assert found["samples_left_out"] == 0

    wrong = sorted((-sure[index], index) for index in range(len(truth)) if truth[index] != said[index])
    assert len(wrong) > 6
    assert [row["sample"] for row in found["mistakes"]] == [index for _, index in wrong[:6]]
    assert [row["sample"] for row in found["spread"]] == [0, 71, 143, 214, 286, 358]
    for row in found["spread"] + found["mistakes"]:
        index = row["sample"]
        assert (row["label"], row["predicted"]) == (truth[index], said[index])
        assert row["probability"] == pytest.approx(sure[index], abs=6e-4)
        with Image.open(digits_run / "test_predictions" / f"{index}.png") as picture:
            assert np.array_equal(np.asarray(picture), images[index, 0].numpy())


@pytest.mark.multiproc
def test_shards_on_two_processes_leave_the_same_bytes_as_one_process(digits_run: Path, tmp_path: Path) -> None:
    arguments = ("--recipe", "digits", "train.epochs=2", "train.global_batch_size=64", "log.every_steps=5")
    train("fsdp2", tmp_path / "two", *arguments, processes=2).check()
    assert read(tmp_path / "two" / "run.json")["world_size"] == 2
    alone = left(digits_run)
    assert len(alone) == 13
    assert left(tmp_path / "two") == alone


class _Noise:
    """A thousand classes of large pictures that no compression makes smaller."""

    facts: ClassVar = {"classes": [f"class {label}" for label in range(1000)]}

    def fetch(self, indices: np.ndarray, draw: None) -> dict[str, torch.Tensor]:
        return {"images": torch.randint(0, 256, (len(indices), 3, 224, 160), dtype=torch.uint8)}


def test_a_thousand_classes_leave_the_most_frequent_mistakes_and_little_to_carry(tmp_path: Path) -> None:
    rows = [(label, predicted) for label in range(0, 1000, 10) for predicted in range(0, 1000, 10)] + [(3, 7)] * 5
    folder = tmp_path / "test_predictions"
    folder.mkdir()
    write(folder, _Noise(), torch.tensor([(*row, 0.5) for row in rows], dtype=torch.float64))  # type: ignore[arg-type]
    found = read(folder / "predictions.json")
    kept = {(label, predicted): count for label, predicted, count in found["pairs"]}
    assert len(kept) == 2000
    assert kept[3, 7] == 5
    assert kept[990, 990] == 1
    assert sum(kept.values()) + found["samples_left_out"] == len(rows)
    files = left(tmp_path)
    assert sum(map(len, files.values())) < 200_000
    with Image.open(io.BytesIO(files["0.png"])) as picture:
        assert max(picture.size) == 72
