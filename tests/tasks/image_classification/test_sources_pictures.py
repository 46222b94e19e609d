"""Folders of pictures: decoding, crops and every error, against torchvision and Pillow."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sources import check_contract, check_workers_and_pickling, everything, fetched
from torchvision.datasets import ImageFolder
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as F

from app.data.draws import SampleDraws
from app.errors import DataError
from app.tasks.image_classification.data import decoding
from app.tasks.image_classification.data.decoding import RATIOS, Framing, crop_box, decode
from app.tasks.image_classification.data.open import open_data
from app.tasks.image_classification.sections import AugmentRecipe, DataRecipe, Sections
from app.tasks.image_classification.task import ImageClassification

SIZES = [(40, 30), (31, 47), (64, 64), (25, 90)]  # width, height in pixels


def picture(width: int, height: int, *, seed: int, mode: str = "RGB") -> Image.Image:
    """A smooth picture, so that JPEG keeps it."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def write_folder(
    root: Path, *, classes: tuple[str, ...] = ("ant", "bee", "cat"), splits: tuple[str, ...] = ("train", "test")
) -> None:
    for split in splits:
        for number, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for index, size in enumerate(SIZES):
                file = root / split / name / f"{index}.{('jpg', 'png', 'webp', 'JPEG')[index]}"
                picture(*size, seed=10 * number + index + len(split)).save(file, quality=90)


def recipe(path: Path | None, *, crop: float | None = None, seed: int = 0, **keys) -> Sections:
    keys = {"image_size": 24, **keys}
    data = DataRecipe(source="imagefolder", path=None if path is None else str(path), **keys)
    return Sections(data=data, augment=AugmentRecipe(resized_crop_min_area=crop))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    write_folder(root)
    return root


# Decoding


@pytest.mark.parametrize("resize_size", [None, 29])
def test_pictures_are_those_of_torchvision(folder: Path, resize_size: int | None) -> None:
    for source, split in zip(open_data(recipe(folder, resize_size=resize_size)).there.values(), ("train", "test"), strict=True):
        reference = ImageFolder(str(folder / split))
        check_contract(source)
        assert source.workers
        assert (len(source), source.channels, source.image_size) == (12, 3, (24, 24))
        assert source.classes == tuple(reference.classes)
        images, labels = everything(source)
        for index, (original, label) in enumerate(reference):
            resized = F.resize(F.pil_to_tensor(original), [resize_size or 24], antialias=True)
            assert torch.equal(images[index], F.center_crop(resized, [24, 24]))
            assert labels[index] == label


@given(width=st.integers(1, 70), height=st.integers(1, 70), size=st.integers(1, 40), extra=st.integers(0, 10))
def test_the_centre_crop_is_torchvisions(width: int, height: int, size: int, extra: int) -> None:
    pixels = F.pil_to_tensor(picture(width, height, seed=width))
    expected = F.center_crop(F.resize(pixels, [size + extra], antialias=True), [size, size])
    assert torch.equal(Framing(image_size=size, resize_size=size + extra).fixed(pixels), expected)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_every_8_bit_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("picture.jpg" if mode == "CMYK" else "picture.png")
    picture(20, 10, seed=1).convert(mode).save(path)
    with Image.open(path) as reopened:
        expected = F.pil_to_tensor(reopened.convert("RGB"))
    assert torch.equal(decode(path.read_bytes(), channels=3, name="it"), expected)


def test_a_palette_with_transparency_gives_no_warning(tmp_path: Path) -> None:
    picture(20, 10, seed=1).convert("P").save(tmp_path / "it.png", transparency=bytes(range(256)))
    assert decode((tmp_path / "it.png").read_bytes(), channels=3, name="it").shape == (3, 10, 20)


def test_grayscale_can_stay_grayscale(tmp_path: Path) -> None:
    gray = picture(20, 10, seed=1, mode="L")
    gray.save(tmp_path / "it.png")
    assert torch.equal(decode((tmp_path / "it.png").read_bytes(), channels=1, name="it"), F.pil_to_tensor(gray))
    picture(20, 10, seed=1).save(tmp_path / "colour.png")
    with pytest.raises(DataError, match=r"^this one is in color \(mode RGB\) in a grayscale data set"):
        decode((tmp_path / "colour.png").read_bytes(), channels=1, name="this one")


def test_more_than_8_bits_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match=r"^deep\.png has more than 8 bits per channel \(mode I;16\)"):
        decode((tmp_path / "deep.png").read_bytes(), channels=3, name="deep.png")


@given(st.sampled_from(["JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM"]), st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_damaged_picture_is_a_data_error_or_a_picture(kind: str, data: st.DataObject) -> None:
    stored = io.BytesIO()
    picture(20, 10, seed=1).save(stored, kind)
    content = bytearray(stored.getvalue()[: data.draw(st.integers(0, len(stored.getvalue())), label="length")])
    for _ in range(data.draw(st.integers(0, 3), label="changes")):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert decode(bytes(content), channels=3, name="it").shape[0] == 3
    except DataError as error:
        assert str(error).startswith("it ")  # noqa: PT017 - decoding damaged data may also succeed


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


def test_cropped_pictures_are_torchvisions(folder: Path) -> None:
    train, *_ = open_data(recipe(folder, crop=0.1, seed=5))
    reference = ImageFolder(str(folder / "train"))
    indices, samples = np.arange(12), np.arange(12) + 3 * 12
    images, _ = fetched(train, indices, samples, seed=5)
    for index, sample in zip(indices.tolist(), samples.tolist(), strict=True):
        original = F.pil_to_tensor(reference[index][0])
        top, left, height, width = crop_box(*original.shape[1:], SampleDraws(5, sample), min_area=0.1)
        expected = F.resized_crop(original, top, left, height, width, [24, 24], antialias=True)
        assert torch.equal(images[index], expected)


def test_a_crop_depends_on_the_seed_and_the_sample_number_alone(folder: Path) -> None:
    train, *_, test = open_data(recipe(folder, crop=0.1))
    indices = np.arange(12)
    first_epoch, _ = fetched(train, indices)
    shuffled = np.random.default_rng(0).permutation(12)
    assert torch.equal(fetched(train, shuffled)[0], first_epoch[shuffled])
    assert torch.equal(fetched(train, indices[7:8])[0], first_epoch[7:8])
    assert not torch.equal(fetched(train, indices, indices + 12)[0], first_epoch)
    assert not torch.equal(fetched(train, indices, seed=1)[0], first_epoch)
    assert torch.equal(fetched(test, indices)[0], fetched(test, indices, indices + 12)[0])


def test_without_draws_the_crop_is_the_centre(folder: Path) -> None:
    cropped, plain = open_data(recipe(folder, crop=0.1)).train, open_data(recipe(folder)).train
    fields, expected = cropped.fetch(np.arange(12), None), plain.fetch(np.arange(12), None)
    assert list(fields) == ["images", "labels"]
    assert all(torch.equal(fields[name], expected[name]) for name in fields)
    assert not torch.equal(fields["images"], everything(cropped)[0])


@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_workers_crop_like_this_process(folder: Path) -> None:
    check_workers_and_pickling(open_data(recipe(folder, crop=0.3)).train)


# The folder


def test_the_fingerprint_is_of_names_labels_and_contents(tmp_path: Path) -> None:
    def fingerprint(root: Path) -> str:
        return open_data(recipe(root)).train.fingerprint

    for name in ("here", "there"):
        write_folder(tmp_path / name)
    assert fingerprint(tmp_path / "here") == fingerprint(tmp_path / "there")
    picture(40, 30, seed=99).save(tmp_path / "there/train/ant/0.jpg")
    assert fingerprint(tmp_path / "here") != fingerprint(tmp_path / "there")
    (tmp_path / "here/train/ant/0.jpg").rename(tmp_path / "here/train/ant/00.jpg")
    renamed = fingerprint(tmp_path / "here")
    (tmp_path / "here/train/ant/00.jpg").rename(tmp_path / "here/train/bee/00.jpg")
    assert len({renamed, fingerprint(tmp_path / "here"), fingerprint(tmp_path / "there")}) == 3


def test_a_split_may_have_any_name_and_be_missing(tmp_path: Path) -> None:
    write_folder(tmp_path, splits=("train",))
    assert set(open_data(recipe(tmp_path)).there) == {"train"}
    assert len(open_data(recipe(tmp_path, test_split="train")).test) == 12


def with_a_file(root: Path) -> None:
    write_folder(root, splits=("train",))
    (root / "test").write_text("a file")


def without_classes(root: Path) -> None:
    write_folder(root, splits=("train",))
    (root / "test").mkdir()
    picture(10, 10, seed=0).save(root / "test/stray.png")


def of_other_classes(root: Path) -> None:
    write_folder(root, splits=("train",), classes=("ant", "bee", "cat"))
    write_folder(root, splits=("test",), classes=("bee", "cow", "dog"))


def with_an_empty_class(root: Path) -> None:
    write_folder(root)
    for split in ("train", "test"):
        (root / split / "dog").mkdir()
        (root / split / "dog/notes.txt").write_text("no picture")


def with_a_link_to_nowhere(root: Path) -> None:
    write_folder(root)
    (root / "train/ant/0.jpg").unlink()
    (root / "train/ant/0.jpg").symlink_to("nowhere.jpg")


@pytest.mark.parametrize(
    ("write", "keys", "text"),
    [
        (Path.exists, {}, r"{}/train cannot be read \(No such file or directory\); .* data\.train_split"),
        (write_folder, {"test_split": "nope"}, r"{}/nope cannot be read .* data\.test_split is its name"),
        (with_a_file, {}, r"{}/test cannot be read \(Not a directory\)"),
        (without_classes, {}, r"{}/test contains no class folders"),
        (of_other_classes, {}, r"ant, cat only in {0}/train; cow, dog only in {0}/test\. Both need"),
        (with_an_empty_class, {}, r"{}/train: there are no images in the class folder\(s\) dog"),
        (with_a_link_to_nowhere, {}, r"{}/train/ant/0\.jpg cannot be read \(No such file or directory\); repair or remove"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(tmp_path: Path, write, keys: dict, text: str) -> None:
    write(tmp_path)
    with pytest.raises(DataError, match=text.format(tmp_path)):
        open_data(recipe(tmp_path, **keys))


def test_a_folder_with_a_test_split_alone_is_one_to_score_and_not_to_train_on(tmp_path: Path) -> None:
    write_folder(tmp_path, splits=("test",))
    opened = open_data(recipe(tmp_path))
    assert (set(opened.there), len(opened.test)) == ({"test"}, 12)
    task = ImageClassification(recipe(tmp_path))
    assert len(task.samples("test")) == 12
    with pytest.raises(DataError, match=rf"^{tmp_path}/train cannot be read .* data\.train_split is its name$"):
        task.samples("train")


@pytest.mark.parametrize("kind", ["truncated", "text", "gone"])
def test_an_unreadable_picture_is_named_when_it_is_fetched(tmp_path: Path, kind: str) -> None:
    write_folder(tmp_path)
    path = tmp_path / "train/bee/0.jpg"
    train, *_ = open_data(recipe(tmp_path))
    if kind == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:200] if kind == "truncated" else b"<html>not found")
    train.fetch(np.arange(4), None)
    with pytest.raises(DataError, match=rf"^{path} cannot be read (as an image )?\(.+\); (replace|repair) or remove it$"):
        train.fetch(np.arange(12), None)


def test_file_names_of_any_bytes(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "train/ant/0.jpg").rename(tmp_path / "train/ant" / "0 \u00e9\udcff.jpg")
    train, *_ = open_data(recipe(tmp_path))
    assert everything(train)[0].shape == (12, 3, 24, 24)


@pytest.mark.skipif(decoding.torchcodec() is None, reason="needs torchcodec, of the extra jpeg")
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 1, "quality": 30}])
def test_jpeg_files_are_the_same_pixels_with_and_without_torchcodec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, options: dict
) -> None:
    small = Image.fromarray(np.random.default_rng(0).integers(0, 256, (7, 9, 3)).astype(np.uint8))
    file = tmp_path / "picture.jpg"
    small.resize((83, 59), Image.Resampling.BICUBIC).convert(mode).save(file, "JPEG", **options)
    asked = []
    decoder = decoding.torchcodec()
    monkeypatch.setattr(decoding, "torchcodec", lambda: lambda *args, **keys: asked.append(1) or decoder(*args, **keys))
    for channels in (3, 1) if mode == "L" else (3,):
        sooner = decode(file.read_bytes(), channels=channels, name="x")
        with monkeypatch.context() as without:
            without.setattr(decoding, "torchcodec", lambda: None)
            assert torch.equal(decode(file.read_bytes(), channels=channels, name="x"), sooner)
    assert bool(asked) == (mode != "CMYK")


def test_a_jpeg_that_was_cut_is_refused_with_and_without_torchcodec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "picture.jpg"
    Image.new("RGB", (200, 200), "red").save(file)
    file.write_bytes(file.read_bytes()[:-40])
    for decoder in (decoding.torchcodec(), None):
        monkeypatch.setattr(decoding, "torchcodec", lambda decoder=decoder: decoder)
        with pytest.raises(DataError, match=r"picture\.jpg cannot be read as an image \(OSError: .*truncated"):
            decode(file.read_bytes(), channels=3, name=str(file))
