"""A stranger's run folder: nothing outside it is touched, what was made by hand is passed over, and none of its code runs."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import read, train

from app.checkpoints import step_folders
from app.errors import CheckpointError, RunFolderError
from launch import cli

RECIPE = ("--recipe", "digits", "train.global_batch_size=64", "train.steps=4", "checkpoint.every_steps=2", "--resume", "auto")
OLD, NEW = "checkpoints/step-00000002", "checkpoints/step-00000004"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    train("cpu", run_dir, *RECIPE).check()
    return run_dir


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def sealed(folder: Path, change: Callable[[dict[str, Any]], object] | None = None, *, text: str = "") -> None:
    """Write a manifest by hand, with the right sums of all files and of itself."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["sha256"]
    for name in content["files"]:
        data = (folder / name).read_bytes()
        content["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if change:
        change(content)
    raw = text.encode() if text else json.dumps(content).encode()
    (folder / "manifest.json").write_bytes(step_folders._sealed(raw))


def of_weight(content: dict[str, Any]) -> Any:
    return next(iter(content["tensors"]["weight"].values()))


DEEP = "[" * 1_000_000
BY_HAND: dict[str, Callable[[Path], object]] = {
    "nested": lambda it: sealed(it, text='{"a": ' + DEEP + "]}"),
    "no state": lambda it: sealed(it, lambda content: content["files"].pop("state.json")),
    "outside": lambda it: sealed(
        it, lambda content: content["files"].update({"../../../etc/hostname": {"bytes": 1, "sha256": ""}})
    ),
    "a number as range": lambda it: sealed(it, lambda content: of_weight(content).update(ranges=[7])),
    "elements that no file has": lambda it: sealed(it, lambda content: of_weight(content).update(ranges=[])),
    "a state that is no text": lambda it: ((it / "state.json").write_bytes(b"\x93"), sealed(it)),
    "an unknown file": lambda it: sealed(it, lambda content: of_weight(content)["ranges"][0].__setitem__(2, "x.safetensors")),
}


def test_a_checkpoint_made_by_hand_is_passed_over_and_the_older_one_taken(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for case, spoil in BY_HAND.items():
        shutil.copytree(run_dir / NEW, tmp_path / "before")
        spoil(run_dir / NEW)
        out = tmp_path / f"{case}.safetensors"
        assert cli.main(["export", str(run_dir), "--out", str(out)]) == 0, case
        said = capfd.readouterr()
        assert f"skipped: {run_dir / NEW}" in said.err, (case, said)
        assert "after 2 steps" in said.out, case
        shutil.rmtree(run_dir / NEW)
        (tmp_path / "before").rename(run_dir / NEW)


@pytest.mark.multiproc
def test_a_start_passes_it_over_too_and_without_another_ends_with_a_sentence(run_dir: Path) -> None:
    (run_dir / "outcome.json").unlink()  # as if it had not finished
    BY_HAND["outside"](run_dir / NEW)
    link = run_dir.with_name("link")  # the run folder itself can be one
    link.symlink_to(run_dir)
    begun = train("multi_gpu", link, *RECIPE, processes=2).check()
    assert f"skipped: {link / NEW}/" in begun.output
    BY_HAND["outside"](run_dir / NEW)
    shutil.rmtree(run_dir / OLD)
    (run_dir / "outcome.json").unlink()
    refused = train("cpu", run_dir, *RECIPE)
    assert refused.returncode == CheckpointError.exit_code
    assert "it names '../../../etc/hostname', which is not in its folder" in refused.output
    assert "Traceback" not in refused.output


@pytest.mark.parametrize("name", ["starts", "checkpoints", "STOP", "starts/7"])
def test_a_link_in_the_run_folder_is_refused_before_anything_is_removed(run_dir: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    for place in ("1", "2", "step-00000002"):
        (elsewhere / place).mkdir(parents=True)
        (elsewhere / place / "precious").touch()
    link = run_dir / name
    if link.is_dir():
        shutil.rmtree(link)
    link.symlink_to(elsewhere)
    before = sorted(path for path in tmp_path.rglob("*"))
    refused = train("cpu", run_dir, *RECIPE, "train.steps=6")
    assert refused.returncode == RunFolderError.exit_code, refused.output
    assert f"{link} is a symbolic link, and a run writes and removes only files within its run folder" in refused.output
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_what_a_run_folder_says_cannot_command_the_terminal(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x9b1m"
    for name, change in {
        "run.json": lambda told: told | {"recipe": evil, "commit": evil, "versions": {evil: evil}, "preset": evil},
        "result.json": lambda told: told | {evil: 0.5},
        "model.json": lambda told: told | {evil: evil},
    }.items():
        (run_dir / name).write_text(json.dumps(change(read(run_dir / name))))
    with (run_dir / "recipe.yaml").open("a") as file:
        file.write(f"{json.dumps(evil)}: {json.dumps(evil)}\n")
    lines = [
        json.loads(line) | {f"test_{evil}": 0.25, f"{evil}": 0.5}
        for line in (run_dir / "evaluations.jsonl").read_text().splitlines()
    ]
    (run_dir / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    other = run_dir.rename(tmp_path / f"run{evil}".replace("/", ""))
    plain = tmp_path / "plain"
    shutil.copytree(other, plain)
    (plain / "run.json").unlink()
    for command in (
        ["watch", "--once", str(other)],
        ["compare", str(other), str(plain)],
        ["runs", str(tmp_path)],
        ["runs", str(tmp_path), "--format", "csv"],
        ["verify", str(other)],
        ["report", str(other)],
        ["export", str(other), "--out", str(tmp_path / f"w{evil}.safetensors")],
        ["curves", str(other), "--out", str(tmp_path / f"c{evil}")],
        ["report", str(tmp_path / f"none{evil}")],
    ):
        cli.main(command)
        said = "".join(capfd.readouterr())
        assert said, command
        assert not {"\x1b", "\x07", "\x9b"} & set(said), (command, said)
