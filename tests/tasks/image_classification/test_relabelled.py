"""Other data than a model was trained on: its labels become the model's numbers, whatever kind of source they are in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from packed import CLASSES, opened
from sources import check_contract, everything, recipe

from app.errors import DataError
from app.tasks.image_classification.data.open import open_data
from app.tasks.image_classification.data.relabelled import relabelled
from app.tasks.image_classification.sections import AugmentRecipe

MODEL = ("cat", "zebra", "ant", "bee")


def test_arrays_are_numbered_anew() -> None:
    source = open_data(recipe("digits")).test
    names = tuple(reversed(source.classes))
    found = relabelled(source, names)
    check_contract(found)
    assert found.classes == names
    assert not found.workers
    assert torch.equal(everything(found)[0], everything(source)[0])
    assert torch.equal(everything(found)[1], 9 - everything(source)[1])
    assert relabelled(source, list(source.classes)) is source


@pytest.mark.parametrize("decoder", ["libjpeg", "reduced"])
def test_pictures_are_numbered_anew_as_they_are_read(pictures: Path, decoder: str) -> None:
    source = opened("imagefolder", pictures, jpeg_decoder=decoder).test
    assert source.classes == CLASSES == ("ant", "bee", "cat")
    found = relabelled(source, MODEL)
    check_contract(found)
    assert torch.equal(everything(found)[0], everything(source)[0])
    assert everything(found)[1].tolist() == [(2, 3, 0)[label] for label in everything(source)[1].tolist()]


def test_samples_without_a_list_of_labels_are_numbered_anew() -> None:
    source = open_data(recipe("fakedata", image_size=8, fake_classes=3, fake_test_samples=9)).test
    found = relabelled(source, ("2", "1", "0"))
    assert torch.equal(everything(found)[1], 2 - everything(source)[1])


@pytest.mark.parametrize("crop", [None, 0.5])
def test_a_class_that_the_model_does_not_know_is_named(crop: float | None) -> None:
    source = open_data(replace(recipe("digits", image_size=8), augment=AugmentRecipe(resized_crop_min_area=crop))).train
    with pytest.raises(
        DataError, match=r"^the model does not know 1 of the data's 10 classes: '7'\. It knows '0', .* and 1 more"
    ):
        relabelled(source, [name for name in "0123456789" if name != "7"])
    with pytest.raises(DataError, match=r"^the model has several classes with the same name, .*: '3', '3'$"):
        relabelled(source, [*"0123456789", "3"])
    assert np.array_equal(everything(relabelled(source, "x0123456789"))[1], everything(source)[1] + 1)
