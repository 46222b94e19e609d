"""WebDataset, HDF5, LMDB and TFRecord: the same samples as an image folder, whoever wrote them, and every error."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from processes import clean_environment, read_lines, train
from sources import check_contract, check_workers_and_pickling, everything
from tfrecord.reader import tfrecord_loader
from tfrecord.writer import TFRecordWriter
from torchvision.datasets import ImageFolder

from app.data import containers, lmdb_file, tfrecords
from app.data.open import Data, open_data
from app.data.record import Record
from app.data.source import FINGERPRINT_SAMPLES
from app.data.turns import alone
from app.data.writers import WRITERS, write_tfrecord, write_webdataset
from app.errors import DataError, RecipeError
from app.recipe import AugmentRecipe, DataRecipe, Recipe

FORMATS = sorted(WRITERS)
CLASSES = ("ant", "bee", "cat")
SIZES = [(40, 30), (31, 47), (25, 60)]  # width, height in pixels


def file_of(width: int, height: int, *, seed: int, kind: str = "JPEG", mode: str = "RGB") -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).convert(mode).save(content, kind)
    return content.getvalue()


PICTURE = file_of(8, 8, seed=1)


def write_folder(root: Path, *, mode: str = "RGB") -> None:
    """Nine pictures a split: JPEG and PNG, of several sizes."""
    for split in ("train", "test"):
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for number, size in enumerate(SIZES):
                kind, extension = (("JPEG", "jpg"), ("PNG", "png"))[number % 2]
                content = file_of(*size, seed=10 * label + number + len(split), kind=kind, mode=mode)
                (root / split / name / f"{number}.{extension}").write_bytes(content)


def records(folder: Path) -> Iterator[Record]:
    """A split of an image folder, in its order."""
    for name, label in ImageFolder(str(folder)).samples:
        path = Path(name)
        yield Record(str(path.relative_to(folder).with_suffix("")), path.read_bytes(), path.suffix[1:], label)


def pack(pictures: Path, target: Path, source: str) -> Path:
    for split in ("train", "test"):
        WRITERS[source](target, split, CLASSES, records(pictures / split))
    return target


def opened(source: str, path: Path | None, *, crop: float | None = None, **keys) -> Data:
    data = DataRecipe(source=source, path=None if path is None else str(path), **{"image_size": 24, **keys})
    return open_data(Recipe(data=data, augment=AugmentRecipe(resized_crop_min_area=crop)))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    write_folder(root)
    return root


@pytest.fixture(scope="module")
def packed(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pictures in every container."""
    root = tmp_path_factory.mktemp("packed")
    return {source: pack(pictures, root / source, source) for source in FORMATS}


# The same samples


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_a_container_is_the_image_folder(pictures: Path, packed: dict[str, Path], source: str) -> None:
    for expected, found in zip(
        opened("imagefolder", pictures, crop=0.3), opened(source, packed[source], crop=0.3), strict=True
    ):
        check_contract(found)
        assert found.decodes
        assert found.classes == expected.classes == CLASSES
        indices, samples = np.arange(9)[::-1].copy(), np.arange(9)[::-1] + 18
        for one, other in zip(expected.fetch(indices, samples), found.fetch(indices, samples), strict=True):
            assert torch.equal(one, other)
        check_workers_and_pickling(found)


def test_all_containers_of_the_same_pictures_have_one_fingerprint(packed: dict[str, Path]) -> None:
    facts = [opened(source, packed[source]).facts for source in FORMATS]
    assert facts.count(facts[0]) == 4


@pytest.mark.parametrize("source", FORMATS)
def test_gray_pictures_stay_gray_where_the_recipe_says_so(tmp_path: Path, source: str) -> None:
    write_folder(tmp_path / "pictures", mode="L")
    pack(tmp_path / "pictures", tmp_path / "packed", source)
    for color, channels in (("auto", 3), ("gray", 1)):
        expected, _ = opened("imagefolder", tmp_path / "pictures", color=color)
        found, _ = opened(source, tmp_path / "packed", color=color)
        assert found.channels == expected.channels == channels
        assert torch.equal(everything(found)[0], everything(expected)[0])


@pytest.mark.multiproc
def test_training_is_the_same_over_every_container(pictures: Path, packed: dict[str, Path], tmp_path: Path) -> None:
    recipe = (
        *("--recipe", "imagefolder", "model.name=convnet", "model.channels=8,8", "data.image_size=16", "data.resize_size=null"),
        *("data.test_split=test", "augment.resized_crop_min_area=0.3", "train.global_batch_size=6", "train.epochs=null"),
        *("train.steps=4", "optim.warmup_epochs=null", "log.every_steps=1", "checkpoint.every_minutes=null"),
    )
    losses = {}
    for source, path in {"imagefolder": pictures, **packed}.items():
        run_dir = tmp_path / source
        train("multi_gpu", run_dir, *recipe, f"data.source={source}", f"data.path={path}", processes=2).check()
        losses[source] = [line["loss"] for line in read_lines(run_dir / "metrics.jsonl")]
    assert len(set(losses["imagefolder"])) == 4
    assert all(values == losses["imagefolder"] for values in losses.values()), losses


# Written by others, read by others


def test_shards_of_webdataset_are_read(pictures: Path, tmp_path: Path) -> None:
    for split, pattern in (("train", "pets-train-%06d.tar"), ("test", "%05d.tar")):
        (tmp_path / "test").mkdir(exist_ok=True)
        target = tmp_path / ("test" if split == "test" else "") / pattern
        with webdataset.ShardWriter(str(target), maxcount=4, verbose=0) as writer:
            for record in records(pictures / split):
                key = f"{split}/{record.key.replace('/', '.x/')}"  # a dot in the folder is none of the extension
                writer.write({"__key__": key, record.extension: record.encoded, "cls": record.label, "json": {"a": 1}})
    assert len(list(tmp_path.glob("*.tar"))) == len(list(tmp_path.glob("test/*.tar"))) == 3
    names = ("train", "pets-train-{000000..000002}.tar", "*-train-*.tar")
    for expected, found in zip(
        [opened("imagefolder", pictures).train] * 3 + [opened("imagefolder", pictures).test],
        [opened("webdataset", tmp_path, train_split=name).train for name in names] + [opened("webdataset", tmp_path).test],
        strict=True,
    ):
        assert found.classes == ("0", "1", "2")
        for one, other in zip(everything(expected), everything(found), strict=True):
            assert torch.equal(one, other)


def test_webdataset_reads_our_shards(pictures: Path, packed: dict[str, Path]) -> None:
    with (packed["webdataset"] / "train-000000.tar").open("rb") as shard:
        members = webdataset.tariterators.tar_file_expander([{"url": shard.name, "stream": shard}])
        samples = list(webdataset.tariterators.group_by_keys(members))
    found = [(sample["jpg"] if "jpg" in sample else sample["png"], int(sample["cls"])) for sample in samples]
    assert found == [(record.encoded, record.label) for record in records(pictures / "train")]


def write_examples(path: Path, samples: list[Record], *, image: str, label: str) -> None:
    writer = TFRecordWriter(str(path))
    for record in samples:
        writer.write({image: (record.encoded, "byte"), label: (record.label, "int"), "height": (3.5, "float")})
    writer.close()


@pytest.mark.parametrize(
    ("names", "image", "label"),
    [
        (("train-00000-of-00002", "train-00001-of-00002"), "image/encoded", "image/class/label"),
        (("pets-train.tfrecord-00000-of-00002", "pets-train.tfrecord-00001-of-00002"), "image", "label"),
    ],
    ids=["imagenet", "tensorflow datasets"],
)
def test_tfrecords_of_others_are_read(pictures: Path, tmp_path: Path, names: tuple[str, str], image: str, label: str) -> None:
    for split in ("train", "test"):
        samples = list(records(pictures / split))
        for name, part in zip(names, (samples[:4], samples[4:]), strict=True):
            write_examples(tmp_path / name.replace("train", split), part, image=image, label=label)
    for expected, found in zip(opened("imagefolder", pictures), opened("tfrecord", tmp_path), strict=True):
        for one, other in zip(everything(expected), everything(found), strict=True):
            assert torch.equal(one, other)


def test_others_read_our_tfrecords(pictures: Path, packed: dict[str, Path]) -> None:
    path = str(packed["tfrecord"] / "train-00000-of-00001.tfrecord")
    kinds = {"image/encoded": "byte", "image/class/label": "int", "image/class/text": "byte", "image/filename": "byte"}
    for example, record in zip(tfrecord_loader(path, None, kinds), records(pictures / "train"), strict=True):
        assert example["image/encoded"] == record.encoded
        assert example["image/class/label"].tolist() == [record.label]
        assert example["image/class/text"].decode() == CLASSES[record.label]
        assert example["image/filename"].decode() == f"{record.key}.{record.extension}"


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NHW", "compressed"])
def test_hdf5_of_pixels_is_read(tmp_path: Path, layout: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 8, 6), dtype=np.uint8)
    stored = {"NHWC": pixels.transpose(0, 2, 3, 1), "NHW": pixels[:, 0]}.get(layout, pixels)
    for split in ("train", "test"):
        with h5py.File(tmp_path / f"{split}.hdf5", "w") as file:
            file.create_dataset("image", data=stored, compression="gzip" if layout == "compressed" else None)
            file.create_dataset("kind", data=np.array([[0], [2], [1], [0], [2]], np.int32))
    train, _ = opened("hdf5", tmp_path, image_size=None, label_column="kind")
    check_contract(train)
    images, labels = everything(train)
    assert torch.equal(images, torch.from_numpy(pixels[:, :1] if layout == "NHW" else pixels))
    assert labels.tolist() == [0, 2, 1, 0, 2]
    assert train.classes == ("0", "1", "2")


def write_database(path: Path, samples: list[Record], *, subdir: bool = True, **also: bytes) -> None:
    containers.let_go()  # within a process LMDB opens nothing twice
    with lmdb.open(str(path), map_size=1 << 24, subdir=subdir) as environment, environment.begin(write=True) as transaction:
        labels = np.array([record.label for record in samples], "<i8")
        values = {b"__labels__": labels.tobytes(), b"__len__": str(len(samples)).encode()}
        values |= {b"%08d" % index: record.encoded for index, record in enumerate(samples)}
        for key, value in (values | {name.encode(): value for name, value in also.items()}).items():
            transaction.put(key, value)


def test_lmdb_of_others_is_read(pictures: Path, tmp_path: Path) -> None:
    write_database(tmp_path / "train.lmdb", list(records(pictures / "train")))
    write_database(tmp_path / "test", list(records(pictures / "test")), subdir=False)
    for expected, found in zip(opened("imagefolder", pictures), opened("lmdb", tmp_path), strict=True):
        for one, other in zip(everything(expected), everything(found), strict=True):
            assert torch.equal(one, other)


# Writing


@pytest.mark.parametrize("source", FORMATS)
def test_names_of_any_letters_come_back(tmp_path: Path, source: str) -> None:
    """As folders have them: `\\udcff` is how Python spells a byte that is no UTF-8."""
    names = ("0:a", " b ", "c\u00e9\udcff", "")
    for split in ("train", "test"):
        WRITERS[source](tmp_path, split, names, [Record("\u00e9\udcff", PICTURE, "jpg", 3)] * 2)
    train, _ = opened(source, tmp_path)
    assert train.classes == names
    assert everything(train)[1].tolist() == [3, 3]


@pytest.mark.parametrize("source", FORMATS)
def test_a_container_appears_whole_or_not_at_all(pictures: Path, tmp_path: Path, source: str) -> None:
    def seen() -> set[str]:
        return {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} - {"labels.txt"}

    def interrupted() -> Iterator[Record]:
        yield from records(pictures / "train")
        assert not seen()
        raise DataError("a picture cannot be read")

    with pytest.raises(DataError, match=r"^a picture cannot be read$"):
        WRITERS[source](tmp_path, "train", CLASSES, interrupted())
    assert not seen()
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(DataError, match=r"^x has label 3, but labels must be in 0\.\.2; mend it$"):
        WRITERS[source](tmp_path, "train", CLASSES, [Record("x", b"", "jpg", 3)])
    with pytest.raises(DataError, match=r"^there are no samples to write$"):
        WRITERS[source](tmp_path, "train", CLASSES, [])
    WRITERS[source](tmp_path, "train", CLASSES, records(pictures / "train"))
    assert seen()
    with pytest.raises(DataError, match=rf"^{tmp_path}/train.* is there already; remove it, or write to another folder$"):
        WRITERS[source](tmp_path, "train", CLASSES, records(pictures / "train"))


@pytest.mark.parametrize(
    ("source", "write", "names"),
    [
        ("webdataset", write_webdataset, "train-{:06d}.tar"),
        ("tfrecord", write_tfrecord, "train-{:05d}-of-{:05d}.tfrecord"),
    ],
)
def test_shards_are_numbered_and_read_in_order(
    pictures: Path, packed: dict[str, Path], tmp_path: Path, source: str, write: Callable[..., None], names: str
) -> None:
    samples = list(records(pictures / "train")) * 20
    write(tmp_path, "train", CLASSES, samples, shard_bytes=1)  # one sample a shard: more shards than are kept open
    assert len(samples) > containers.MOST_OPEN_FILES
    assert {path.name for path in tmp_path.glob("train-*")} == {names.format(index, 180) for index in range(180)}
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    train, _ = opened(source, tmp_path, test_split="train")
    for one, other in zip(everything(train), everything(opened(source, packed[source]).train), strict=True):
        assert torch.equal(one, torch.cat([other] * 20))
    # The other split had its fingerprint taken, and both have an index.
    assert len(os.listdir("/proc/self/fd")) <= before + containers.MOST_OPEN_FILES + FINGERPRINT_SAMPLES + 4  # noqa: PTH208
    (tmp_path / names.format(7, 180)).unlink()
    refused(source, tmp_path, rf"^{tmp_path} lacks 1 of 180 shards of data\.train_split=train: {names.format(7, 180)}; bring")
    if source == "webdataset":  # as a writer that was killed while it renamed would leave them
        (tmp_path / "train-000000.tar").unlink()
        refused(source, tmp_path, r"lacks 2 of 180 shards .*: train-000000\.tar, train-000007\.tar")


# The index

INDEXING = """
import sys
from pathlib import Path
from app.data.index import indexed

def read(path):
    print("reads", flush=True)
    yield 0, 1, 0

print(indexed([Path(sys.argv[1])], "kind", read).path)
"""


def indexing(shard: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", INDEXING, str(shard)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment())


def test_processes_make_an_index_once(tmp_path: Path) -> None:
    shard, lock = tmp_path / "train.tar", tmp_path / ".samerun.lock"
    shard.write_bytes(b"x")
    with alone(lock):
        started = [indexing(shard) for _ in range(3)]
        while len(re.findall(rf"-> FLOCK .*:{lock.stat().st_ino} ", Path("/proc/locks").read_text())) < 3:
            assert all(process.poll() is None for process in started)
    outputs = [process.communicate()[0] for process in started]
    assert sorted(output.count("reads") for output in outputs) == [0, 0, 1]
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_the_index_is_made_again_when_a_shard_has_changed(pictures: Path, tmp_path: Path) -> None:
    pack(pictures, tmp_path, "webdataset")
    shard = tmp_path / "train-000000.tar"

    def indexes() -> set[int]:
        opened("webdataset", tmp_path)
        return {path.stat().st_ino for path in tmp_path.glob(".samerun-index-*")}

    first = indexes()
    assert len(first) == 2
    assert indexes() == first
    content = bytearray(shard.read_bytes())
    with tarfile.open(shard) as tar:
        label = tar.getmember("00000000.cls")
    content[label.offset_data : label.offset_data + 1] = b"2"
    shard.write_bytes(content)  # as long as before
    assert len(indexes() & first) == 1
    assert len(indexes()) == 2
    assert opened("webdataset", tmp_path).train.fetch(np.array([0]), np.array([0]))[1].item() == 2


def test_where_the_data_cannot_be_written_the_index_is_kept_in_the_cache(
    packed: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("data", "cache"):
        monkeypatch.setenv("SAMERUN_CACHE", str(tmp_path / "cache"))
        shutil.copytree(packed["tfrecord"], tmp_path / place / "packed", ignore=shutil.ignore_patterns(".*"))
    path = tmp_path / "data" / "packed"
    (path / ".samerun.lock").mkdir()  # stands in the way even of a superuser
    train, _ = opened("tfrecord", path)
    assert not list(path.glob(".samerun-index-*"))
    (index,) = (tmp_path / "cache").rglob(train.read.records.index.path.name)  # type: ignore[attr-defined]
    assert index.stat().st_size == 128 + 9 * 32
    monkeypatch.setenv("SAMERUN_CACHE", str(path / "labels.txt"))
    shutil.rmtree(tmp_path / "cache" / "indexes")
    with pytest.raises(
        DataError, match=rf"the index of {path} cannot be kept in {path} \(Is a directory\) nor in .*SAMERUN_CACHE"
    ):
        opened("tfrecord", path)


# Errors


@pytest.fixture
def copied(packed: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Copies a container, without its index, to be damaged."""

    def copy(source: str) -> Path:
        return Path(shutil.copytree(packed[source], tmp_path / source, ignore=shutil.ignore_patterns(".*")))

    return copy


def change(path: Path, *, at: int, to: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(to)


def refused(source: str, path: Path, sentence: str, **keys) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        everything(opened(source, path, **keys).train)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", FORMATS)
def test_what_is_missing_is_named(packed: dict[str, Path], tmp_path: Path, source: str) -> None:
    with pytest.raises(RecipeError, match=rf"^data\.source={source} needs data\.path: the folder"):
        opened(source, None)
    path = packed[source]
    refused(
        source, path, rf"^{path} holds no .* data\.test_split=val.*; correct data\.path or data\.test_split", test_split="val"
    )
    refused(source, tmp_path / "none", rf"^(data\.path=)?{tmp_path}/none .*; correct data\.path")


@pytest.mark.parametrize("source", FORMATS)
def test_splits_of_other_classes_are_refused(pictures: Path, packed: dict[str, Path], tmp_path: Path, source: str) -> None:
    for split, classes in (("train", CLASSES), ("test", ("ant", "bee", "dog"))):
        place = tmp_path / split
        WRITERS[source](place, split, classes, records(pictures / split))
    if source == "tfrecord":
        with pytest.raises(DataError, match=rf"^{tmp_path}/train/labels\.txt names other classes than this split has"):
            WRITERS[source](tmp_path / "train", "test", ("ant", "bee", "dog"), records(pictures / "test"))
        return
    for file in (tmp_path / "test").glob("test*"):
        file.rename(tmp_path / "train" / file.name)
    refused(
        source, tmp_path / "train", r"^the classes of the two splits differ: 3 \(ant, bee, cat\) in .*, 3 \(ant, bee, dog\)"
    )


@pytest.mark.parametrize("source", FORMATS)
def test_a_container_that_was_cut_is_refused_when_it_is_opened(copied: Callable[[str], Path], source: str) -> None:
    path = copied(source)
    (file,) = (file for file in path.rglob("*") if file.is_file() and "train" in str(file.relative_to(path)))
    os.truncate(file, file.stat().st_size - 5000)
    refused(source, path, rf"^(the record at byte \d+ of )?{file} .*(cut|truncated|end of data).*replace")


@pytest.mark.parametrize("source", FORMATS)
def test_a_damaged_picture_is_named(copied: Callable[[str], Path], pictures: Path, source: str) -> None:
    path = copied(source)
    (file,) = (file for file in path.rglob("*") if file.is_file() and "train" in str(file.relative_to(path)))
    first = (pictures / "train/ant/0.jpg").read_bytes()
    change(file, at=file.read_bytes().index(first), to=bytes(len(first) // 2))
    what = {
        "webdataset": rf"00000000\.jpg of {file} \(sample 0\) cannot be read as an image",
        "tfrecord": rf"the record at byte 0 of {file} is damaged or cut \(its CRC is another\); replace the file",
        "hdf5": rf"sample 0 of {file} cannot be read as an image",
        "lmdb": rf"record 00000000 of {path}/train\.lmdb cannot be read as an image",
    }
    refused(source, path, f"^{what[source]}")


@pytest.mark.parametrize(
    ("source", "places", "sentence"),
    [
        ("hdf5", [96], r"^{} cannot be read \(Unable to .*\); replace train\.h5$"),
        ("lmdb", range(8192, 1 << 15, 4096), r"^{} is damaged \(.*CORRUPTED.*\); replace it$"),
    ],
)
def test_damage_that_a_library_finds_is_told(
    copied: Callable[[str], Path], source: str, places: Sequence[int], sentence: str
) -> None:
    path = copied(source)
    (found,) = path.glob("train.*")
    for place in places:
        change(found / "data.mdb" if found.is_dir() else found, at=place, to=bytes(600))
    refused(source, path, sentence.format(found))


def shard_of(path: Path, *members: tuple[str, bytes]) -> Path:
    for split in ("train", "test"):
        with tarfile.open(path / f"{split}.tar", "w") as tar:
            for name, content in members:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


NAMED = ("__classes__", json.dumps(CLASSES).encode())


A_PICTURE, A_LABEL = ("a.jpg", PICTURE), ("a.cls", b"1")


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ([A_PICTURE], r"the sample a of {} has the members jpg, but must have one picture \(jpg, .*\) and one cls"),
        ([A_LABEL, ("b.cls", b"1")], r"the sample a of {} has the members cls, but must"),
        ([("a.l.jpg", b""), ("a.r.jpg", b""), A_LABEL], r"the sample a of {} has the members l\.jpg, r\.jpg, cls, but"),
        ([A_PICTURE, ("a.cls", b"ant")], r"a\.cls of {} holds b'ant', not the number of a class; mend it or leave it out"),
        ([NAMED, A_PICTURE, ("a.cls", b"3")], r"sample 0 of the train split of .* has label 3, but .* must be in 0\.\.2"),
        ([A_PICTURE, ("a.cls", b"99999999")], r"the train split of .* holds 99999999; labels are 0 up to"),
        ([("__classes__", b"ant bee"), A_PICTURE, A_LABEL], r"__classes__ of {} is b'ant bee', not a JSON list"),
        ([("readme", b"")], r"{}: there are no samples in it"),
        ([], r"{}: there are no samples in it"),
    ],
)
def test_a_tar_file_that_is_no_shard(tmp_path: Path, members: list[tuple[str, bytes]], sentence: str) -> None:
    shard_of(tmp_path, *members)
    refused("webdataset", tmp_path, "^" + sentence.format(tmp_path / "train.tar"))


def test_damage_in_the_middle_of_a_tar_file_is_not_its_end(tmp_path: Path) -> None:
    shard_of(tmp_path, *[(f"{index}.{kind}", b"1") for index in range(3) for kind in ("jpg", "cls")])
    change(tmp_path / "train.tar", at=2048, to=b"x" * 512)
    refused(
        "webdataset", tmp_path, rf"^{tmp_path}/train\.tar cannot be read as a tar file \(it is damaged or cut at byte 2048\)"
    )
    (tmp_path / "train.tar").write_bytes(b"\x1f\x8b" + bytes(1000))
    refused(
        "webdataset", tmp_path, r"train\.tar cannot be read as a tar file \(.*\); replace it, or unpack it if it is compressed"
    )


def test_two_sets_of_shards_are_told_apart_by_a_pattern(packed: dict[str, Path], tmp_path: Path) -> None:
    for name in ("cats-train-000000.tar", "dogs-train-000000.tar"):
        shutil.copy(packed["webdataset"] / "train-000000.tar", tmp_path / name)
    refused("webdataset", tmp_path, r"^data\.train_split=train may be .*dogs-train-000000\.tar .*; say which by a pattern")
    keys = {"train_split": "cats-*.tar", "test_split": "dogs-train-{000000..000001}.tar"}
    refused(
        "webdataset", tmp_path, rf"^{tmp_path}/dogs-train-000001\.tar is missing; bring it, or leave its number out", **keys
    )


def test_tfrecords_that_cannot_be_read(copied: Callable[[str], Path], pictures: Path) -> None:
    path = copied("tfrecord")
    (shard,) = path.glob("train-*")
    write_examples(shard, list(records(pictures / "train"))[:1], image="photo", label="kind")
    refused(
        "tfrecord", path, rf"^the record at byte 0 of {shard} has the features height, kind, photo, but needs image/encoded or"
    )
    train, _ = opened("tfrecord", path, image_column="photo", label_column="kind", test_split="train")
    assert len(train) == 1
    change(shard, at=0, to=b"\xff")
    refused("tfrecord", path, rf"^the record at byte 0 of {shard} does not begin as one \(its length's CRC is wrong\)")
    content = b"no example"
    length = tfrecords.HEADER.pack(len(content), 0)[:8]
    crcs = [tfrecords.FOOTER.pack(tfrecords.masked_crc(part)) for part in (length, content)]
    shard.write_bytes(length + crcs[0] + content + crcs[1])
    refused("tfrecord", path, rf"^the record at byte 0 of {shard} is no tf\.train\.Example")
    (path / "labels.txt").write_text("ant\nbee\n")
    refused(
        "tfrecord", path, rf"^{path}/labels\.txt does not name the classes 0, 1, \.\.\. in order, as 0:ant", train_split="test"
    )


@pytest.mark.parametrize(
    ("images", "labels", "sentence"),
    [
        ({"name": "x", "data": [1]}, {}, r"has none of the datasets images, image, but labels, x; name one of these in data\."),
        ({"data": np.zeros((1, 8, 8), np.float32)}, {}, r"/images is float32 \[1, 8, 8\]; store picture files as uint8"),
        ({}, {"data": [0.5]}, r"/labels is float64 \[1\], but must be whole numbers, one for each of the 1 rows of /images"),
        ({}, {"data": [1, 2]}, r"/labels is int64 \[2\], but must be"),
        ({"data": np.zeros((0, 8, 8), np.uint8)}, {"data": np.zeros(0, np.int64)}, r" holds no samples"),
    ],
)
def test_hdf5_that_cannot_be_read(tmp_path: Path, images: dict, labels: dict, sentence: str) -> None:
    for split in ("train", "test"):
        with h5py.File(tmp_path / f"{split}.h5", "w") as file:
            file.create_dataset(**{"name": "images", "data": np.zeros((1, 8, 8), np.uint8), **images})
            file.create_dataset(**{"name": "labels", "data": [0], **labels})
    refused("hdf5", tmp_path, rf"{tmp_path}/train\.h5.*{sentence}")


def test_databases_that_cannot_be_read(tmp_path: Path) -> None:
    path, samples = tmp_path / "train.lmdb", [Record("x", PICTURE, "jpg", 0)] * 2
    write_database(path, samples)
    write_database(path, [], **{"00000000": PICTURE})
    refused(
        "lmdb",
        tmp_path,
        rf"^{path} holds 2 pictures, but its __labels__ are 0 bytes and its __len__ is b'0'; write",
        test_split="train",
    )
    write_database(path, samples)
    with lmdb.open(str(path)) as environment, environment.begin(write=True) as transaction:
        transaction.delete(lmdb_file.LABELS)
    refused("lmdb", tmp_path, rf"^{path} has no record __labels__; write it as docs/data\.md says", test_split="train")


@pytest.mark.parametrize(
    ("source", "module", "package", "split"),
    [
        ("hdf5", "h5py", "h5py", "train"),
        ("lmdb", "lmdb", "lmdb", "train"),
        ("tfrecord", "google_crc32c", "google-crc32c", "train"),
        ("webdataset", "braceexpand", "braceexpand", "train-{000000..000000}.tar"),
    ],
)
def test_a_library_that_is_missing_is_named(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, source: str, module: str, package: str, split: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # what an import then raises is what it raises without the library
    refused(source, copied(source), rf"needs a library that is not installed \(.*\): pip install {package}$", train_split=split)
