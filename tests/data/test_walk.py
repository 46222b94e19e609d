"""What of a folder is data: one rule and one count for images and texts, wherever they are read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from app.checks.data import main
from app.errors import DataError
from app.tasks.image_classification.data.open import staged
from app.tasks.image_classification.sections import DataRecipe, Sections

KEYS = ["data.image_size=16", "augment.resized_crop_min_area=null", "data.resize_size=null"]


def picture(path: Path, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(path)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two splits of two classes with four pictures each, and in train what is no data, and what is though it looks odd."""
    top = tmp_path / "pictures"
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            for number in range(4):
                picture(top / split / name / f"{number}.png", number)
    picture(top / "train/.ipynb_checkpoints/0-checkpoint.png")
    picture(top / "train/ant/.ipynb_checkpoints/0-checkpoint.png")
    (top / "train/ant/._1.png").write_bytes(b"\0\5\x16\7")
    (top / "train/ant/notes.txt").touch()
    picture(top / "train/stray.png")
    picture(top / "train/ant/_data.png", 10)
    picture(top / "train/ant/UPPER.JPEG", 11)
    picture(tmp_path / "elsewhere/linked.png", 12)
    (top / "train/bee/link").symlink_to(tmp_path / "elsewhere")
    return top


LEFT_OUT = "train: 5 files or folders left out: 1 .txt, 3 hidden, 1 next to the class folders"


def test_of_a_folder_of_pictures_every_command_says_the_same(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(pictures), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["not_read"] == [f"{pictures}/{LEFT_OUT}"]
    assert facts["train"]["samples_by_class"] == {"ant": 6, "bee": 5}
    for command in (
        ["inspect", str(pictures)],
        ["check", str(pictures), *KEYS],
        ["pack", str(pictures), "--to", "webdataset", "--out", str(tmp_path / "packed")],
    ):
        assert main(command) == 0
        assert f"{pictures}/{LEFT_OUT}\n" in capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *command: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        main([str(word) for word in command])
    capsys.readouterr()
    return str(caught.value)


def test_a_link_in_a_circle_is_refused(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pictures / "train/ant/circle").symlink_to("..")
    for command in (["inspect", pictures], ["tokenize", pictures, "--format", "text", "--out", tmp_path / "o"]):
        assert "contains itself, by a link in it" in refused(capsys, *command)


def test_a_link_that_cannot_be_copied_is_named(pictures: Path, tmp_path: Path) -> None:
    (pictures / "train/ant/gone.png").symlink_to("gone.png")
    data = DataRecipe(source="imagefolder", path=str(pictures), stage_to=str(tmp_path), image_size=8)
    with pytest.raises(DataError, match=rf"^{pictures}/train/ant/gone\.png cannot be read \("):
        staged(Sections(data=data))


def as_jsonl(path: Path) -> None:
    path.write_text(json.dumps({"text": path.name}) + "\n")


def as_parquet(path: Path, *columns: str) -> None:
    columns = columns or ("text",)
    table = pyarrow.Table.from_arrays([pyarrow.array([f"{number} {path.name}"]) for number in range(len(columns))], [*columns])
    pyarrow.parquet.write_table(table, path)


@pytest.mark.parametrize(
    ("form", "numbers", "missing"),
    [
        ("train-{:05}-of-00003.jsonl", (0, 2), "train-00001-of-00003.jsonl"),
        ("part_{}_of_3.txt", (1, 3), "part_2_of_3.txt"),
        ("train-{:05}-of-00002-0123456789abcde{}.parquet", (0,), "train-00001-of-00002.parquet"),
    ],
)
def test_a_numbered_set_with_a_missing_shard_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, numbers: tuple[int, ...], missing: str
) -> None:
    (tmp_path / "texts").mkdir()
    for number in numbers:
        file = tmp_path / "texts" / form.format(number, number)
        (as_parquet if file.suffix == ".parquet" else as_jsonl)(file)
    out = tmp_path / "tokens"
    for source in (tmp_path / "texts", tmp_path / "texts" / f"*{file.suffix}"):
        said = refused(capsys, "tokenize", source, "--out", out)
        assert f"{tmp_path}/texts lacks 1 of " in said
        assert f"shards of a numbered set: {missing}; copy them here, or name each file to read" in said


def test_a_numbered_set_may_be_whole_or_chosen_by_number(tmp_path: Path) -> None:
    for name in (*(f"a-{number:05}-of-00003" for number in (1, 2, 3)), "chapter 1", "chapter 3"):  # as weights are numbered
        as_jsonl(tmp_path / f"{name}.jsonl")
    for number, source in enumerate((tmp_path, tmp_path / "a-0000[12]-of-*.jsonl", tmp_path / "a-00002-of-00003.jsonl")):
        assert main(["tokenize", str(source), "--out", str(tmp_path / f".tokens{number}"), "--workers", "1"]) == 0


def test_shards_of_a_pattern_and_of_a_data_set_are_complete_too(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = tmp_path / "shards"
    assert main(["pack", str(pictures), "--to", "webdataset", "--out", str(shards)]) == 0
    (shards / "train-000002.tar").write_bytes((shards / "train-000000.tar").read_bytes())
    said = refused(capsys, "inspect", shards, "data.train_split=train-*.tar")
    assert "lacks 1 of 3 shards of the pattern train-*.tar: train-000001.tar; copy them here, or exclude their numbers" in said
    assert main(["inspect", str(shards), "data.train_split=train-00000[02].tar"]) == 0
    rows = tmp_path / "rows"
    rows.mkdir()
    as_parquet(rows / "train-00001-of-00002.parquet", "image", "label")
    assert f"{rows} lacks 1 of 2 shards of a numbered set: train-00000-of" in refused(capsys, "inspect", rows)


def test_a_table_with_a_column_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, texts, rows = (tmp_path / name for name in ("a.csv", "a.parquet", "rows.parquet"))
    table.write_text("text,text\nfirst,last\n")
    as_parquet(texts, "text", "text")
    as_parquet(rows, "image", "label", "label")
    for path in (table, texts):
        said = refused(capsys, "tokenize", path, "--out", tmp_path / "tokens")
        assert "has the column 'text' twice" in said
        assert str(path) in said
    assert "data.path=" in refused(capsys, "inspect", rows)


def test_damaged_files_are_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Deflate data that zlib itself refuses, rather than gzip by its checksum, and a parquet file whose text is not UTF-8."""
    deflated, table = tmp_path / "bad.txt.gz", tmp_path / "a.parquet"
    deflated.write_bytes(gzip.compress(b"bad")[:10] + b"\xff" * 20)
    as_parquet(table)
    table.write_bytes(table.read_bytes().replace(b"0 a.parquet", b"\xff\xff\xff\xffparquet"))
    for file in (deflated, table):
        said = refused(capsys, "tokenize", file, "--workers", "1", "--out", tmp_path / "tokens")
        assert f"{file} cannot be read (" in said
