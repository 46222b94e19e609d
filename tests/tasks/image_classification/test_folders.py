"""Folders of images: decoding, crops and every error, against torchvision and Pillow."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_sources import check_contract, everything, fetched, file_of, opened, recipe, refused, write_folder
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as F

from app.data.draws import SampleDraws
from app.errors import DataError
from app.tasks.image_classification.data import decoding
from app.tasks.image_classification.data.decoding import RATIOS, crop_box, decode
from app.tasks.image_classification.data.folders import images_below
from app.tasks.image_classification.data.open import notes_on, open_data
from app.tasks.image_classification.data.pack import shrunk
from app.tasks.image_classification.task import ImageClassification

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12)

# Decoding


@pytest.mark.parametrize("resize_size", [None, 29])
def test_images_are_those_of_torchvision(image_folder: Path, resize_size: int | None) -> None:
    data = opened("imagefolder", image_folder, resize_size=resize_size)
    for source, split in zip(data.values(), ("train", "test"), strict=True):
        reference = ImageFolder(str(image_folder / split))
        check_contract(source)
        assert source.workers
        assert (len(source), source.channels, source.image_size) == (9, 3, (24, 24))
        assert source.classes == tuple(reference.classes)
        images, labels = everything(source)
        for index, (original, label) in enumerate(reference):
            resized = F.resize(F.pil_to_tensor(original), [resize_size or 24], antialias=True)
            assert torch.equal(images[index], F.center_crop(resized, [24, 24]))
            assert labels[index] == label


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_every_8_bit_mode_becomes_rgb(mode: str) -> None:
    content = file_of(20, 10, seed=1, kind="JPEG" if mode == "CMYK" else "PNG", mode=mode)
    with Image.open(io.BytesIO(content)) as reopened:
        expected = F.pil_to_tensor(reopened.convert("RGB"))
    assert torch.equal(decode(content, channels=3, name="it"), expected)


def test_what_is_not_decoded_to_rgb() -> None:
    with_palette = file_of(20, 10, seed=1, kind="PNG", mode="P", transparency=bytes(range(256)))
    assert decode(with_palette, channels=3, name="it").shape == (3, 10, 20)  # without a warning
    gray = file_of(20, 10, seed=1, kind="PNG", mode="L")
    with Image.open(io.BytesIO(gray)) as image:
        assert torch.equal(decode(gray, channels=1, name="it"), F.pil_to_tensor(image))
    with pytest.raises(DataError, match=r"^it is in color \(mode RGB\) in a grayscale data set"):
        decode(file_of(20, 10, seed=1, kind="PNG"), channels=1, name="it")
    with pytest.raises(DataError, match=r"^it has more than 8 bits per channel \(mode I;16\)"):
        decode(file_of(4, 4, seed=1, kind="PNG", mode="I;16"), channels=3, name="it")


@given(st.sampled_from(["JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM"]), st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_damaged_image_is_a_data_error_or_an_image(kind: str, data: st.DataObject) -> None:
    stored = file_of(20, 10, seed=1, kind=kind)
    content = bytearray(stored[: data.draw(st.integers(0, len(stored)), label="length")])
    for _ in range(data.draw(st.integers(0, 3), label="changes")):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert decode(bytes(content), channels=3, name="it").shape[0] == 3
    except DataError as error:
        assert str(error).startswith("it ")  # noqa: PT017 - decoding damaged data may also succeed


def test_a_large_image_is_decoded_at_half_its_sides_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Image.new("L", (12000, 8000))
    whole.paste(255, (6000, 0, 12000, 8000))

    def stored(kind: str, **options) -> bytes:
        file = io.BytesIO()
        whole.save(file, kind, **options)
        return file.getvalue()

    for content in (stored("PNG", compress_level=1), stored("JPEG", progressive=True)):
        with pytest.raises(DataError, match=r"^it has 12000x8000 pixels: above 64 megapixels only baseline JPEG files are"):
            decode(content, channels=3, name="it")
    monkeypatch.setattr(decoding, "torchcodec", lambda: pytest.fail)  # Pillow decodes it
    content = stored("JPEG")
    pixels = decode(content, channels=1, name="it")
    assert pixels.shape == (1, 4000, 6000)
    assert (pixels[0, 2000, 100].item(), pixels[0, 2000, -100].item()) == (0, 255)
    with Image.open(io.BytesIO(shrunk(content, 700, name="it"))) as packed:
        assert packed.size == (1050, 700)


@pytest.mark.skipif(decoding.torchcodec() is None, reason="needs torchcodec (extra jpeg)")
@pytest.mark.parametrize(
    ("mode", "options"), [("RGB", {"progressive": True}), ("L", {}), ("CMYK", {}), ("RGB", {"subsampling": 1, "quality": 30})]
)
def test_jpeg_files_are_the_same_pixels_with_and_without_torchcodec(
    monkeypatch: pytest.MonkeyPatch, mode: str, options: dict
) -> None:
    calls, decoder = [], decoding.torchcodec()
    content, channels = file_of(83, 59, seed=0, mode=mode, **options), 1 if mode == "L" else 3
    monkeypatch.setattr(decoding, "torchcodec", lambda: lambda *args, **keys: calls.append(1) or decoder(*args, **keys))
    decoded = decode(content, channels=channels, name="x")
    assert bool(calls) == (mode != "CMYK")
    monkeypatch.setattr(decoding, "torchcodec", lambda: None)
    assert torch.equal(decode(content, channels=channels, name="x"), decoded)


def test_a_jpeg_that_was_cut_is_refused_with_and_without_torchcodec(monkeypatch: pytest.MonkeyPatch) -> None:
    for decoder in (decoding.torchcodec(), None):
        monkeypatch.setattr(decoding, "torchcodec", lambda decoder=decoder: decoder)
        with pytest.raises(DataError, match=r"^it cannot be read as an image \(OSError: .*truncated"):
            decode(file_of(200, 200, seed=1)[:-40], channels=3, name="it")


# Random crops


def torchvisions_box(height: int, width: int, draws: SampleDraws, min_area: float, monkeypatch: pytest.MonkeyPatch) -> tuple:
    """RandomResizedCrop.get_params, fed with our random numbers, in double precision."""
    tries = iter([f"crop {what} {attempt}" for attempt in range(10) for what in ("area", "ratio")])
    places = iter(["crop top", "crop left"])

    def uniform(tensor: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return tensor.fill_(low + (high - low) * draws.uniform(next(tries)))

    def randint(low: int, high: int, size: tuple[int, ...]) -> torch.Tensor:
        return torch.full(size, low + draws.integers(next(places), high - low), dtype=torch.int64)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "uniform_", uniform)
        patch.setattr(torch, "randint", randint)
        torch.set_default_dtype(torch.float64)
        try:
            return RandomResizedCrop.get_params(torch.empty(3, height, width), [min_area, 1.0], list(RATIOS))
        finally:
            torch.set_default_dtype(torch.float32)


def test_the_random_crop_is_torchvisions(monkeypatch: pytest.MonkeyPatch) -> None:
    fallbacks = 0

    @given(st.integers(1, 400), st.integers(1, 400), st.floats(0.05, 1), st.integers(0, 2**60))
    @settings(max_examples=300, deadline=None)
    def check(height: int, width: int, min_area: float, sample: int) -> None:
        nonlocal fallbacks
        box = crop_box(height, width, SampleDraws(7, sample), min_area=min_area)
        assert box == torchvisions_box(height, width, SampleDraws(7, sample), min_area, monkeypatch)
        top, left, box_height, box_width = box
        assert 0 <= top <= top + box_height <= height
        assert 0 <= left <= left + box_width <= width
        fallbacks += box_height * box_width < 0.9 * min_area * height * width

    check()
    assert fallbacks > 0, "the central box was never needed: the sizes tried are too tame"


def test_cropped_images_are_torchvisions(image_folder: Path) -> None:
    train = opened("imagefolder", image_folder, crop=0.1)["train"]
    reference = ImageFolder(str(image_folder / "train"))
    indices, samples = np.arange(9), np.arange(9) + 3 * 9
    images, _ = fetched(train, indices, samples, seed=5)
    for index, sample in zip(indices.tolist(), samples.tolist(), strict=True):
        original = F.pil_to_tensor(reference[index][0])
        top, left, height, width = crop_box(*original.shape[1:], SampleDraws(5, sample), min_area=0.1)
        expected = F.resized_crop(original, top, left, height, width, [24, 24], antialias=True)
        assert torch.equal(images[index], expected)


def test_a_crop_depends_on_the_seed_and_the_sample_number_alone(image_folder: Path) -> None:
    train, test = opened("imagefolder", image_folder, crop=0.1).values()
    indices = np.arange(9)
    first_epoch, _ = fetched(train, indices)
    assert torch.equal(fetched(train, indices[7:4:-1])[0], first_epoch[[7, 6, 5]])
    assert not torch.equal(fetched(train, indices, indices + 9)[0], first_epoch)
    assert not torch.equal(fetched(train, indices, seed=1)[0], first_epoch)
    assert torch.equal(fetched(test, indices)[0], fetched(test, indices, indices + 9)[0])
    centers, _ = everything(opened("imagefolder", image_folder)["train"])
    assert torch.equal(train.fetch(indices, None)["images"], centers)


# The folder


def test_the_fingerprint_is_of_names_labels_and_contents(tmp_path: Path) -> None:
    def fingerprint(root: Path) -> str:
        return opened("imagefolder", root)["train"].fingerprint

    here, there = (write_folder(tmp_path / name) for name in ("here", "there"))
    assert fingerprint(here) == fingerprint(there)
    (there / "train/ant/0.jpg").write_bytes(file_of(40, 30, seed=99))
    assert fingerprint(here) != fingerprint(there)
    (here / "train/ant/0.jpg").rename(here / "train/ant/00.jpg")
    renamed = fingerprint(here)
    (here / "train/ant/00.jpg").rename(here / "train/bee/00.jpg")
    assert len({renamed, fingerprint(here), fingerprint(there)}) == 3


def test_a_split_may_be_missing_and_a_training_needs_its_own(tmp_path: Path) -> None:
    shutil.rmtree(write_folder(tmp_path) / "train")
    data = opened("imagefolder", tmp_path)
    assert (set(data), len(data["test"])) == ({"test"}, 9)
    assert len(opened("imagefolder", tmp_path, train_split="test")["train"]) == 9
    task = ImageClassification(recipe("imagefolder", tmp_path, image_size=24))
    assert len(task.samples("test")) == 9
    with pytest.raises(DataError, match=rf"^data\.path={tmp_path} has no split data\.train_split=train: correct"):
        task.samples("train")


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(NAMES, max_size=2), NAMES), max_size=12))
def test_the_files_are_those_of_imagefolder(
    tmp_path_factory: pytest.TempPathFactory, tree: list[tuple[str, list[str], str]]
) -> None:
    folder = tmp_path_factory.mktemp("tree")
    for name in "ab":
        (folder / name).mkdir()
    for top, between, name in tree:
        place = folder.joinpath(top, *(f"{part}.d" for part in between))
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.JPG").touch()
        (place / f"{name}.txt").touch()
    expected = [(os.path.relpath(path, folder), label) for path, label in ImageFolder(str(folder), allow_empty=True).samples]
    files, labels, _ = images_below(folder, "ab")
    assert list(zip(map(os.fsdecode, files.tolist()), labels.tolist(), strict=True)) == [
        (path, label) for path, label in expected if not any(part.startswith(".") for part in Path(path).parts)
    ]


def of_other_classes(root: Path) -> None:
    write_folder(root)
    (root / "test/ant").rename(root / "test/cow")


def with_a_pipe(root: Path) -> None:
    write_folder(root)
    os.mkfifo(root / "train/ant/z.png")


def with_an_empty_class(root: Path) -> None:
    write_folder(root)
    for split in ("train", "test"):
        (root / split / "dog").mkdir()
        (root / split / "dog/notes.txt").write_text("no image")


@pytest.mark.parametrize(
    ("write", "keys", "sentence"),
    [
        (Path.exists, {}, r"{0}/train cannot be read \(No such file or directory\); .*\(data\.train_split is its"),
        (write_folder, {"test_split": "nope"}, r"{0}/nope cannot be read .*\(data\.test_split is its name\)"),
        (write_folder, {"image_size": None}, r"sample 1 of {0}/train is 31x47 pixels .* is 40x30 .* set data\.image_size"),
        (lambda root: (root / "train").mkdir(), {}, r"{0}/train contains no class folders"),
        (of_other_classes, {}, r"two splits have different classes: 'ant' only in {0}/train; 'cow' only in {0}/test; give"),
        (with_a_pipe, {}, r"{0}/train/ant/z\.png cannot be read \(it is a pipe or a device, not a regular file"),
        (with_an_empty_class, {}, r"{0}/train: there are no images in the class folder\(s\) dog; .* 1 file .*: 1 \.txt"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(tmp_path: Path, write, keys: dict, sentence: str) -> None:
    write(tmp_path)
    refused("imagefolder", tmp_path, f"^{sentence.format(tmp_path)}", **keys)


def test_file_names_of_any_bytes(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "train/ant/0.jpg").rename(tmp_path / "train/ant" / "0 \u00e9\udcff.jpg")
    assert everything(opened("imagefolder", tmp_path)["train"])[0].shape == (9, 3, 24, 24)


def test_labels_that_are_numbers_with_a_gap_are_noted(tmp_path: Path) -> None:
    from datasets import Dataset  # here, so that a Python without it collects the other tests

    rows = Dataset.from_dict({"image": [np.zeros((8, 8), np.uint8)] * 6, "label": [100, 101, 102] * 2})
    rows.to_parquet(tmp_path / "rows.parquet")
    (note,) = notes_on(open_data(recipe("huggingface", tmp_path / "rows.parquet", test_split="train")))
    assert note.startswith("100 of the 103 classes have no training samples (0, 1, 2, 3, 4 and 95 more")
