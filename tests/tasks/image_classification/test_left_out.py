"""`samerun data check` finds what is damaged, and `data.leave_out` trains on the rest, as if it had never been there."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from packed import file_of, write
from processes import read_lines, run, train
from sources import check_contract, check_workers_and_pickling, everything

from app.errors import CheckpointError, DataError, RecipeError
from app.recipe import recipe_file
from app.tasks.image_classification.data.images import Data
from app.tasks.image_classification.data.open import open_data
from app.tasks.image_classification.sections import DataRecipe, Sections
from app.tools.data_command import main

pytestmark = pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
BAD = ["test/bee/1.png", "train/ant/0.jpg", "train/bee/3.jpg", "train/bee/4.png"]
KEYS = ["data.image_size=16", "augment.resized_crop_min_area=null", "data.resize_size=null"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of five pictures a split, of which four are cut, empty, a text, and a link to nothing."""
    root = tmp_path / "pictures"
    for at, split in enumerate(("train", "test")):
        for label, name in enumerate(("ant", "bee")):
            (root / split / name).mkdir(parents=True)
            for number in range(5):
                kind, ending = (("JPEG", "jpg"), ("PNG", "png"))[number in (1, 4)]
                (root / split / name / f"{number}.{ending}").write_bytes(
                    file_of(24, 20, seed=100 * at + 10 * label + number, kind=kind)
                )
    (root / BAD[0]).write_text("no picture")
    (root / BAD[1]).unlink()
    (root / BAD[1]).symlink_to(tmp_path / "gone.jpg")
    (root / BAD[2]).write_bytes(file_of(24, 20, seed=3)[:-300])
    (root / BAD[3]).write_bytes(b"")
    return root


def opened(source: str, path: Path, leave_out: Path | None = None) -> Data:
    named = None if leave_out is None else str(leave_out)
    return open_data(Sections(data=DataRecipe(source=source, path=str(path), image_size=16, leave_out=named)))


def names_in(file: Path) -> list[str]:
    return sorted(line for line in file.read_text().splitlines() if not line.startswith("# "))


def test_damaged_files_are_listed_and_left_out_as_if_deleted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.txt"
    assert main(["check", str(folder), *KEYS]) == DataError.exit_code
    said = capsys.readouterr().out
    assert f"unreadable: {BAD[0]}: {folder / BAD[0]} cannot be read as an image (UnidentifiedImageError" in said
    assert f"unreadable: {BAD[1]}: {folder / BAD[1]} cannot be read (No such file or directory)" in said
    assert "4 cannot be read: repair them, or list them in a file for data.leave_out (--write FILE)" in said
    assert main(["check", "--recipe", str(folder), *KEYS, "--processes", "2", "--write", str(file)]) == 0
    assert names_in(file) == BAD
    rest = opened("imagefolder", folder, file)
    shutil.copytree(folder, tmp_path / "mended", symlinks=True)
    for name in BAD:
        (tmp_path / "mended" / name).unlink()
    for split, mended in opened("imagefolder", tmp_path / "mended").items():
        mine = rest[split]
        assert mine.fingerprint == mended.fingerprint
        assert [torch.equal(*pair) for pair in zip(everything(mine), everything(mended), strict=True)] == [True, True]
        check_contract(mine)
        check_workers_and_pickling(mine)
    capsys.readouterr()
    assert main(["check", str(folder), *KEYS, f"data.leave_out={file}"]) == 0
    assert capsys.readouterr().out == "train: 7 samples\ntest: 9 samples\nall can be read\n"


@pytest.mark.parametrize("source", ["lmdb", "tfrecord", "huggingface"])
def test_containers_name_samples_by_split_and_number(source: str, tmp_path: Path) -> None:
    """The first is among them, which opening needs; what is named already stays named."""
    damaged = {"train": (0, 3), "test": (1,)}
    for split, bad in damaged.items():
        rows = [(file_of(24, 20, seed=at, kind="PNG")[: 60 if at in bad else None], at % 2) for at in range(6)]
        if source == "huggingface":
            import datasets

            named = {"image": [row[0] for row in rows], "label": [row[1] for row in rows]}
            (tmp_path / "data").mkdir(exist_ok=True)
            datasets.Dataset.from_dict(named).to_parquet(tmp_path / "data" / f"{split}.parquet")
        else:
            write(source, tmp_path / "data", split, ("even", "odd"), rows)
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("train/3\n\n# by hand\n")
    words = ["check", str(tmp_path / "data"), *KEYS, f"data.source={source}"]
    assert main([*words, f"data.leave_out={first}", "--write", str(second)]) == 0
    assert names_in(second) == ["test/1", "train/0", "train/3"]
    data = opened(source, tmp_path / "data", second)
    assert everything(data["train"])[1].tolist() == [1, 0, 0, 1]


def test_what_cannot_be_left_out_is_told(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.txt"
    with pytest.raises(DataError, match=r"bad\.txt cannot be read \(No such file .*write the file with `samerun data check"):
        opened("imagefolder", folder, file)
    file.write_text("train/ant/0.jpg\ntrain/ant/7.jpg\nant/1.png\n")
    with pytest.raises(DataError, match=r"lists ant/1\.png, train/ant/7\.jpg, and data\.path=\S+ has no such samples"):
        opened("imagefolder", folder, file)
    (problem,) = Sections(data=DataRecipe(leave_out="bad.txt")).contradictions()
    assert 'data.source is "digits": leave_out is for imagefolder, huggingface' in problem
    with pytest.raises(RecipeError, match=r"--write makes a file for data\.leave_out, a key of image_classification, and"):
        main(["check", "--recipe", "lm_tiny", "--write", str(file)])


@pytest.mark.usefixtures("own_imports")
def test_every_task_can_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--recipe", "lm_tiny"]) == 0
    assert main(["check", "examples/regression.yaml"]) == 0
    assert capsys.readouterr().out.count("all can be read") == 2


@pytest.mark.multiproc
def test_one_and_two_processes_train_on_the_same_rest(folder: Path, tmp_path: Path) -> None:
    """And a start that would leave out others is refused, wherever the file lies."""
    file, runs = tmp_path / "bad.txt", [tmp_path / "one", tmp_path / "two"]
    assert main(["check", str(folder), *KEYS, "--write", str(file)]) == 0
    told = recipe_file.load("imagefolder", [f"data.path={folder}"]).recipe
    assert told.sections.data.leave_out is None
    words = [f"data.path={folder}", *KEYS, "model.name=convnet", "train.global_batch_size=4", "train.steps=6", "optim.lr=0.01",
             "optim.warmup_epochs=0", "log.every_steps=1", "log.samples=true", "checkpoint.every_steps=6"]  # fmt: skip
    for run_dir, processes in zip(runs, (1, 2), strict=True):
        preset = "multi_gpu" if processes > 1 else "cpu"
        train(preset, run_dir, "--recipe", "imagefolder", f"data.leave_out={file}", *words, processes=processes).check()
    one, two = ([line["loss"] for line in read_lines(run_dir / "metrics.jsonl")] for run_dir in runs)
    assert len(one) == 6
    assert np.allclose(one, two, atol=1e-5)
    assert (runs[0] / "samples.jsonl").read_text() == (runs[1] / "samples.jsonl").read_text()
    sound = shutil.copytree(folder / "test", tmp_path / "sound/test", ignore=lambda *_: ["1.png"]).parent
    for words_of in ([f"data.path={sound}", "data.leave_out=null"], []):
        run("cpu", 1, "app.evaluate", str(runs[0]), *words_of).check()
    moved = file.rename(tmp_path / "elsewhere.txt")
    moved.write_text(moved.read_text() + "train/ant/2.jpg\n")
    again = train("cpu", runs[0], "--recipe", "imagefolder", f"data.leave_out={moved}", *words, "--resume", "auto", processes=1)
    assert again.returncode == CheckpointError.exit_code
    assert "data.leave_out" in again.output
