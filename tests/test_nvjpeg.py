"""JPEG files that are decoded on the device: on a CPU the same images as ever, on a GPU close to them, elsewhere refused."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from processes import Started, read
from sources import recipe as any_recipe

from app.data import jpeg, loader, nvjpeg
from app.data.nvjpeg import StoredSource
from app.data.open import Data, open_data
from app.errors import DataError, RecipeError
from app.recipe import AugmentRecipe, DataRecipe, Recipe

pytestmark = pytest.mark.skipif(not jpeg.is_installed(), reason="needs torchcodec, of the extra jpeg")

SIDE, CLASSES, EACH = 24, ("ant", "bee"), 9
MODES = ("RGB", "L", "CMYK", "RGB")
"""Of the pictures, in turn; each fourth is a PNG."""


def picture(seed: int, mode: str = "RGB") -> Image.Image:
    """A smooth one of any size."""
    random = np.random.default_rng(seed)
    noise = Image.fromarray(random.integers(0, 256, (5, 5, 3), dtype=np.uint8))
    width, height = random.integers(25, 80, 2)
    return noise.resize((int(width), int(height)), Image.Resampling.BICUBIC).convert(mode)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    for split in ("train", "test"):
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for number in range(EACH):
                kind = "png" if number % 4 == 3 else "jpg"
                picture(10 * label + number + len(split), MODES[number % 4]).save(root / split / name / f"{number}.{kind}")
    return root


def opened(root: Path, decoder: str = "nvjpeg", *, crop: float | None = 0.1) -> Data:
    data = DataRecipe(source="imagefolder", path=str(root), image_size=SIDE, jpeg_decoder=decoder)
    return open_data(Recipe(seed=3, data=data, augment=AugmentRecipe(resized_crop_min_area=crop)))


@pytest.mark.parametrize("crop", [0.1, None])
def test_images_that_the_device_decodes_are_those_that_workers_decode(folder: Path, crop: float | None) -> None:
    numbers = np.random.default_rng(0).permutation(2 * len(CLASSES) * EACH)  # of two epochs
    for stored, decoded in zip(opened(folder, crop=crop), opened(folder, "libjpeg", crop=crop), strict=True):
        expected, labels = decoded.fetch(numbers % len(decoded), numbers)
        batch = loader.Samples(stored).__getitems__(numbers)
        assert {len(batch["images"].rows), len(batch["images"].images_rows)} == {2 * 2 * 5, 2 * 2 * 4}  # the PNG and CMYK ones
        assert torch.equal(batch["images"].to(torch.device("cpu")), expected)
        assert torch.equal(batch["labels"], labels)


def test_more_files_than_go_into_one_call_and_none_at_all(folder: Path) -> None:
    stored, decoded = (opened(folder, decoder).train for decoder in ("nvjpeg", "libjpeg"))
    for indices in (np.arange(4 * nvjpeg._TOGETHER) % len(stored), np.array([3, 7])):  # 3 and 7 are PNG
        expected, _ = decoded.fetch(indices, indices)
        images, _ = stored.fetch_stored(indices.tolist(), indices.tolist())
        assert torch.equal(images.to(torch.device("cpu")), expected)


def test_workers_and_accelerate_hand_them_on(folder: Path) -> None:
    source, expected = opened(folder).train, opened(folder, "libjpeg").train
    shares = list(np.arange(18).reshape(3, 6))
    prepared = Accelerator(cpu=True).prepare(
        loader.build(source, shares, local_world_size=1, device=torch.device("cpu")),
    )
    for numbers, batch in zip(shares, loader.batches_of(prepared), strict=True):
        assert torch.equal(batch["images"], expected.fetch(numbers, numbers)[0])
        assert torch.equal(batch["samples"], torch.from_numpy(numbers))


def test_one_that_cannot_be_decoded_is_named_and_spoils_no_other(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split / "one").mkdir(parents=True)
        for number in range(4):
            picture(number).save(tmp_path / split / "one" / f"{number}.jpg")
    damaged = tmp_path / "train" / "one" / "2.jpg"
    content = damaged.read_bytes()
    start = content.index(b"\xff\xda")  # of the scan, whose header says how many components there are
    damaged.write_bytes(content[: start + 4] + b"\x09" + content[start + 5 :])
    source = opened(tmp_path).train
    stored, _ = source.fetch_stored([0, 1, 3], [0, 1, 3])
    assert torch.equal(
        stored.to(torch.device("cpu")), opened(tmp_path, "libjpeg").train.fetch(np.array([0, 1, 3]), np.array([0, 1, 3]))[0]
    )
    stored, _ = source.fetch_stored([0, 1, 2, 3], [0, 1, 2, 3])
    with (
        pytest.warns(UserWarning, match=r"^sample 2 of .*train is decoded on the CPU, because nvJPEG cannot: "),
        pytest.raises(DataError, match=r"^sample 2 of .*train cannot be read as an image"),
    ):
        stored.to(torch.device("cpu"))


def test_files_that_are_stored_as_rgb_are_left_to_the_cpu() -> None:
    file = io.BytesIO()
    picture(0).save(file, "JPEG", keep_rgb=True)
    marked = file.getvalue()
    if b"Adobe" not in marked:  # what Pillow writes has no such mark, by which others say so
        marked = marked[:2] + b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00" + marked[2:]
    assert not nvjpeg._is_for_nvjpeg(marked, 3)
    assert nvjpeg._is_for_nvjpeg(jpeg_of(picture(0)), 3)


def jpeg_of(image: Image.Image, **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


# What is refused


def test_pixels_are_not_decoded() -> None:
    with pytest.raises(RecipeError, match=r"data\.jpeg_decoder is nvjpeg, and data\.source=fakedata holds pixels, not files"):
        open_data(any_recipe("fakedata", image_size=8, jpeg_decoder="nvjpeg"))


def test_a_size_is_needed() -> None:
    data = DataRecipe(source="webdataset", jpeg_decoder="nvjpeg")
    with pytest.raises(RecipeError, match=r"data\.jpeg_decoder=nvjpeg needs data\.image_size"):
        Recipe(data=data)


@pytest.mark.multiproc
def test_a_run_without_a_gpu_refuses_before_it_starts(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch.cli", "launch", "--preset", "cpu", "--run-dir", str(tmp_path / "run")]
    keys = [f"data.path={folder}", "data.test_split=test", f"data.image_size={SIDE}", f"data.resize_size={SIDE}"]
    finished = Started([*command, "--recipe", "imagefolder", *keys, "data.jpeg_decoder=nvjpeg"]).wait()
    assert finished.returncode == RecipeError.exit_code
    assert "data.jpeg_decoder is nvjpeg, which needs an NVIDIA GPU, and this process trains on cpu." in finished.output
    assert not (tmp_path / "run").exists()


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("subsampling", "most"), [(0, 1.0), (2, 4.0)])
def test_the_pixels_of_a_gpu_are_close(subsampling: int, most: float) -> None:
    for seed in range(4):
        file = torch.from_numpy(np.frombuffer(jpeg_of(picture(seed), subsampling=subsampling), np.uint8).copy())
        on_cpu, on_gpu = (nvjpeg._decoded([file], ["x"], channels=3, device=torch.device(name))[0] for name in ("cpu", "cuda"))
        assert on_gpu.device.type == "cuda"
        assert (on_gpu.cpu().float() - on_cpu.float()).abs().mean() < most


@pytest.mark.gpu
@pytest.mark.multiproc
def test_a_run_on_a_gpu_decodes_there(folder: Path, tmp_path: Path) -> None:
    assert isinstance(opened(folder).train, StoredSource)
    command = [sys.executable, "-m", "launch.cli", "launch", "--preset", "single_gpu", "--run-dir", str(tmp_path / "run")]
    keys = [f"data.path={folder}", "data.test_split=test", f"data.image_size={SIDE}", f"data.resize_size={SIDE}"]
    keys += ["model.name=convnet", "train.global_batch_size=6", "train.epochs=2", "data.jpeg_decoder=nvjpeg"]
    Started([*command, "--recipe", "imagefolder", "--trackers", "none", *keys]).wait().check()
    assert read(tmp_path / "run" / "outcome.json")["outcome"] == "finished"
