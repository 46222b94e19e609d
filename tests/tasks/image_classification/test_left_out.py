"""`samerun data check` finds what is damaged, and `data.leave_out` trains on the rest, as if it had never been there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from image_sources import check_same, check_workers_and_pickling, everything, file_of, opened, refused, write, write_folder
from processes import train

from app.checks.data import main
from app.errors import CheckpointError, DataError, RecipeError
from app.tasks.image_classification.sections import DataRecipe, Sections

pytestmark = pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
BAD = ["test/bee/1.png", "train/ant/0.jpg", "train/bee/0.jpg", "train/bee/1.png"]
KEYS = ["data.image_size=16", "augment.resized_crop_min_area=null", "data.resize_size=null"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of three images a split, of which four are a text, a link to nothing, truncated and empty."""
    root = write_folder(tmp_path / "images")
    (root / BAD[0]).write_text("no image")
    (root / BAD[1]).unlink()
    (root / BAD[1]).symlink_to(tmp_path / "gone.jpg")
    (root / BAD[2]).write_bytes(file_of(24, 20, seed=3)[:-300])
    (root / BAD[3]).write_bytes(b"")
    return root


def names_in(file: Path) -> list[str]:
    return sorted(line for line in file.read_text().splitlines() if not line.startswith("# "))


def test_damaged_files_are_listed_and_left_out_as_if_deleted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.txt"
    assert main(["check", str(folder), *KEYS]) == DataError.exit_code
    output = capsys.readouterr().out
    assert f"unreadable: {BAD[0]}: {folder / BAD[0]} cannot be read as an image (UnidentifiedImageError" in output
    assert f"unreadable: {BAD[1]}: {folder / BAD[1]} cannot be read (No such file or directory)" in output
    assert "4 cannot be read: repair them, or list them in a file for data.leave_out (--write FILE)" in output
    assert main(["check", "--recipe", str(folder), *KEYS, "--workers", "2", "--write", str(file)]) == 0
    assert names_in(file) == BAD
    rest = opened("imagefolder", folder, leave_out=str(file))
    shutil.copytree(folder, tmp_path / "mended", symlinks=True)
    for name in BAD:
        (tmp_path / "mended" / name).unlink()
    mended = opened("imagefolder", tmp_path / "mended")
    check_same(rest, mended)
    for split, images in rest.items():
        assert images.fingerprint == mended[split].fingerprint
        check_workers_and_pickling(images)
    capsys.readouterr()
    assert main(["check", str(folder), *KEYS, f"data.leave_out={file}"]) == 0
    assert capsys.readouterr().out == "train: 6 samples\ntest: 8 samples\nall can be read\n"


def test_containers_name_samples_by_split_and_number(tmp_path: Path) -> None:
    """The first is among them, which opening needs; what is named already stays named."""
    for split, bad in {"train": (0, 3), "test": (1,)}.items():
        samples = [(file_of(24, 20, seed=at, kind="PNG")[: 60 if at in bad else None], at % 2) for at in range(6)]
        write("webdataset", tmp_path / "data", split, ("even", "odd"), samples)
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("train/3\n\n# by hand\n")
    words = ["check", str(tmp_path / "data"), *KEYS, "data.source=webdataset"]
    assert main([*words, f"data.leave_out={first}", "--write", str(second)]) == 0
    assert names_in(second) == ["test/1", "train/0", "train/3"]
    train = opened("webdataset", tmp_path / "data", leave_out=str(second))["train"]
    assert everything(train)[1].tolist() == [1, 0, 0, 1]


def test_what_cannot_be_left_out_is_named(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.txt"
    sentence = r"bad\.txt cannot be read \(No such file .*write the file with `samerun data check"
    refused("imagefolder", folder, sentence, leave_out=str(file))
    file.write_text("train/ant/0.jpg\ntrain/ant/7.jpg\nant/1.png\n")
    sentence = r"lists ant/1\.png, train/ant/7\.jpg, and data\.path=\S+ has no such samples"
    refused("imagefolder", folder, sentence, leave_out=str(file))
    (problem,) = Sections(data=DataRecipe(leave_out="bad.txt")).contradictions()
    assert 'data.source is "digits": leave_out is for imagefolder, huggingface' in problem
    with pytest.raises(RecipeError, match=r"--write makes a file for data\.leave_out, a key of image_classification, and"):
        main(["check", "--recipe", "lm_tiny", "--write", str(file)])
    (folder / "train/ant/7\n.png").write_bytes(b"no image")
    for place, sentence in (
        (tmp_path / "no" / "file", "cannot be written"),
        (file, r"'train/ant/7\\n\.png' has a line break"),
    ):
        with pytest.raises(DataError, match=sentence):
            main(["check", str(folder), *KEYS, "--write", str(place)])


@pytest.mark.usefixtures("own_imports")
def test_every_task_can_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--recipe", "lm_tiny"]) == 0
    assert main(["check", "examples/regression.yaml"]) == 0
    assert capsys.readouterr().out.count("all can be read") == 2


@pytest.mark.multiproc
def test_a_resumed_run_leaves_out_the_same_samples_wherever_the_file_is(folder: Path, tmp_path: Path) -> None:
    file, run_dir = tmp_path / "bad.txt", tmp_path / "run"
    file.write_text("".join(f"{name}\n" for name in BAD))
    words = ["--recipe", "imagefolder", f"data.path={folder}", *KEYS, "model.name=convnet", "train.global_batch_size=2",
             "optim.warmup_epochs=0", "checkpoint.every_steps=2", "train.steps=2"]  # fmt: skip
    train("cpu", run_dir, *words, f"data.leave_out={file}").check()
    moved = file.rename(tmp_path / "elsewhere.txt")
    words[-1] = "train.steps=4"
    train("cpu", run_dir, *words, f"data.leave_out={moved}", "--resume", "auto").check()
    moved.write_text(moved.read_text() + "train/ant/2.jpg\n")
    again = train("cpu", run_dir, *words, f"data.leave_out={moved}", "--resume", "auto")
    assert again.returncode == CheckpointError.exit_code
    assert "data.leave_out" in again.output
