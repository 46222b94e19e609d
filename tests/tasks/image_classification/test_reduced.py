"""Large photographs that are decoded smaller: nearly the same images, the same everywhere, and only where enough is left."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, JpegImagePlugin
from sources import check_workers_and_pickling, fetched

from app.data.draws import SampleDraws
from app.errors import DataError, RecipeError
from app.tasks.image_classification.data import jpeg
from app.tasks.image_classification.data.framing import Framing
from app.tasks.image_classification.data.open import Data, open_data
from app.tasks.image_classification.data.reduced import reduced
from app.tasks.image_classification.sections import AugmentRecipe, DataRecipe, Sections

SIDE = 16
SIZES = [(300, 200), (150, 400), (31, 40), (129, 128)]  # width, height in pixels
MOST = 1.5
"""That images may differ by on average, of 255: smooth pictures lose little, whether frequencies or pixels are left out."""


def file_of(width: int, height: int, *, seed: int = 0, mode: str = "RGB") -> bytes:
    """A smooth picture as a JPEG file."""
    noise = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8))
    file = io.BytesIO()
    noise.resize((width, height), Image.Resampling.BICUBIC).convert(mode).save(file, "JPEG", quality=92)
    return file.getvalue()


def whole(content: bytes, framing: Framing, draws: SampleDraws) -> torch.Tensor:
    with Image.open(io.BytesIO(content)) as picture:
        array = np.array(picture)
    return framing.random(torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1), draws)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photographs")
    for split in ("train", "test"):
        for label in ("ant", "bee"):
            (root / split / label).mkdir(parents=True)
            for number, size in enumerate(SIZES):
                (root / split / label / f"{number}.jpg").write_bytes(file_of(*size, seed=number))
            with Image.open(io.BytesIO(file_of(200, 200))) as picture:
                picture.save(root / split / label / "other.png")
    return root


def opened(root: Path, decoder: str, *, crop: float | None = None) -> Data:
    data = DataRecipe(source="imagefolder", path=str(root), image_size=SIDE, resize_size=20, jpeg_decoder=decoder)
    return open_data(Sections(data=data, augment=AugmentRecipe(resized_crop_min_area=crop)))


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The sizes, width and height, that pictures are decoded to when they are decoded smaller."""
    seen: list[tuple[int, int]] = []
    draft = JpegImagePlugin.JpegImageFile.draft

    def noted(picture: Image.Image, mode: str, size: tuple[int, int]) -> object:
        found = draft(picture, mode, size)
        seen.append(picture.size)
        return found

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "draft", noted)
    return seen


@pytest.mark.parametrize("crop", [None, 0.3])
def test_images_are_nearly_those_of_whole_pictures(folder: Path, crop: float | None) -> None:
    for small, full in zip(
        opened(folder, "reduced", crop=crop).there.values(), opened(folder, "libjpeg", crop=crop).there.values(), strict=True
    ):
        indices = np.arange(len(full))
        (found, labels), (expected, expected_labels) = fetched(small, indices), fetched(full, indices)
        assert torch.equal(labels, expected_labels)
        difference = (found.float() - expected.float()).abs().mean((1, 2, 3))
        assert difference.max() < MOST
        assert (difference > 0).any()
        exact = [index for index in indices if index % 5 in (2, 4)]  # too small, and no JPEG
        assert torch.equal(found[exact], expected[exact])
        check_workers_and_pickling(small)


def test_a_picture_is_decoded_as_small_as_the_image_allows(drafts: list[tuple[int, int]]) -> None:
    for size, least, expected in [(16, 300, (38, 38)), (16, 127, (32, 32)), (16, 63, (32, 32)), (16, 31, None)]:
        drafts.clear()
        image = reduced(file_of(least, least), Framing(image_size=size), None, channels=3)
        assert (image is None) == (expected is None)
        assert drafts == ([] if expected is None else [expected])


@given(
    st.integers(100, 500),
    st.integers(100, 500),
    st.integers(0, 10**6),
    st.sampled_from(["RGB", "L"]),
    st.sampled_from([0.2, None]),
    st.sampled_from([None, *range(SIDE, SIDE + 9)]),
)
@settings(max_examples=150, deadline=None)
def test_any_crop_of_any_picture(
    width: int, height: int, sample: int, mode: str, min_area: float | None, resize_size: int | None
) -> None:
    framing = Framing(image_size=SIDE, resize_size=resize_size, min_area=min_area)
    draws = SampleDraws(5, sample)
    content = file_of(width, height, mode=mode)
    image = reduced(content, framing, draws, channels=3 if mode == "RGB" else 1)
    expected = whole(content, framing, draws)
    if image is not None:
        assert image.shape == expected.shape
        assert (image.float() - expected.float()).abs().mean() < MOST


def test_a_damaged_picture_is_named_by_who_decodes_it_whole(folder: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split / "one").mkdir(parents=True)
        (tmp_path / split / "one" / "0.jpg").write_bytes(file_of(300, 300))
    content = file_of(300, 300)
    (tmp_path / "train" / "one" / "1.jpg").write_bytes(content[: len(content) // 2])
    (tmp_path / "train" / "one" / "2.jpg").write_bytes(content[: len(content) // 2] + jpeg._END)
    train = opened(tmp_path, "reduced").train
    for index in (1, 2):
        try:
            train.fetch(np.array([index]), None)
        except DataError as error:
            assert f"{index}.jpg cannot be read as an image" in str(error)  # noqa: PT017 - Pillow fills in for the second
        else:
            assert index == 2


def test_a_size_is_needed() -> None:
    with pytest.raises(RecipeError, match=r"data\.jpeg_decoder=reduced needs data\.image_size"):
        Sections(data=DataRecipe(source="webdataset", jpeg_decoder="reduced"))


def test_pixels_are_not_decoded() -> None:
    with pytest.raises(RecipeError, match=r"data\.jpeg_decoder is reduced, and data\.source=fakedata holds pixels"):
        open_data(Sections(data=DataRecipe(source="fakedata", image_size=8, jpeg_decoder="reduced")))
