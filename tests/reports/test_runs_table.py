"""`samerun runs`: the table of runs, and what stands in it."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from app.recipe import recipe_file
from launch import cli


@pytest.fixture
def folder(digits_run: Path, tmp_path: Path) -> Path:
    """Two runs of which one has another learning rate and has not ended."""
    for name in ("run-2", "run-10"):
        shutil.copytree(digits_run, tmp_path / name)
    recipe = tmp_path / "run-10" / "recipe.yaml"
    values = yaml.safe_load(recipe.read_text())
    values["optim"]["lr"] = 0.25
    recipe.write_text(yaml.safe_dump(values))
    (tmp_path / "run-10" / "result.json").unlink()
    return tmp_path


def printed(capsys, *arguments: object) -> str:
    assert cli.main(["runs", *map(str, arguments)]) == 0
    return str(capsys.readouterr().out)


def test_a_row_has_the_state_the_scores_and_what_differs(folder: Path, digits_run: Path, capsys) -> None:
    first, second = json.loads(printed(capsys, folder, "--json"))
    result = json.loads((digits_run / "result.json").read_text())
    assert [Path(row["run"]).name for row in (first, second)] == ["run-2", "run-10"]
    assert first["state"] == "finished"
    assert first["step"] == first["of"] == result["steps"]
    assert first["test_accuracy"] == result["test_accuracy"]
    assert second["optim.lr"] == 0.25 != first["optim.lr"]
    assert not {"optim.name", "seed"} & first.keys(), "alike in both"
    evaluated = json.loads((digits_run / "evaluations.jsonl").read_text().splitlines()[-1])
    last = {key: value for key, value in evaluated.items() if key.endswith("accuracy") and "top" not in key}
    assert last.items() <= second.items()


def test_runs_of_other_tasks_leave_the_table_readable(folder: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only one task has is no difference, and keys for which there is no room are named below."""
    (folder / "run-10" / "recipe.yaml").write_text(recipe_file.to_yaml(recipe_file.load("lm_tiny").recipe))
    rows = json.loads(printed(capsys, folder, "--json"))
    assert {"task", "optim.lr", "train.global_batch_size"} <= rows[0].keys()
    assert not {"data.image_size", "model.layers"} & rows[0].keys()
    monkeypatch.chdir(folder)  # for short paths
    table, _, left_out = " ".join(printed(capsys, ".").split()).partition("no room for: ")
    assert " run-2 finished 40 40 " in table
    assert "optim.weight_decay" in left_out


def test_a_column_that_is_not_there_is_named(folder: Path, capsys) -> None:
    assert cli.main(["runs", str(folder), "--sort", "optim.rate"]) == 2
    assert "--sort is 'optim.rate': the columns are run, state, step, of, optim.lr, started" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_narrow_terminal_keeps_what_differs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name, value in (("COLUMNS", "72"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", shown := Terminal())
    assert cli.main(["runs", ".", "--sort", "test accuracy"]) == 0
    heading, names, _, *rows = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).splitlines()
    assert heading.split() == ["optim.", "validation", "test"]
    assert names.split() == ["run", "state", "lr", "started", "duration", "accuracy", "accuracy"]
    assert max(map(len, [names, *rows])) <= 72
    assert re.search(r"run-10 +running|run-10 +stopped|run-10 +finished", shown.getvalue())
    assert "no room for: of, step" in shown.getvalue()


def test_every_form_has_the_same_rows_and_sorting_puts_what_is_missing_last(folder: Path, capsys) -> None:
    rows = list(csv.DictReader(io.StringIO(printed(capsys, folder, "--format", "csv", "--sort", "optim.lr", "--reverse"))))
    assert [row["optim.lr"] for row in rows] == ["0.25", rows[1]["optim.lr"]]
