"""The comparison of two commits: it finds one changed number, and passes where nothing has changed."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import same_as
from outcomes import differences
from processes import REPOSITORY, Finished, Started

OWN = ("same_as.py", "processes.py", "generated.py", "outcomes.py", "scripts", "environments")
NEEDED = ("app", "launch", "samerun", "accelerate_configs", "pyproject.toml", *(f"tests/{name}" for name in OWN))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one commit: this tree's files as they are."""
    root = tmp_path / "tree"
    (root / "tests").mkdir(parents=True)
    for name in NEEDED:
        there, here = REPOSITORY / name, root / name
        if there.is_dir():
            shutil.copytree(there, here, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(there, here)
    (root / ".gitignore").write_text("__pycache__/\n")
    git(root, "init", "--quiet")
    commit(root)
    return root


def git(root: Path, *words: str) -> str:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@localhost")
    return subprocess.run(["git", *identity, *words], cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "a commit")


def compared(root: Path, *options: str) -> Finished:
    return Started([sys.executable, "tests/same_as.py", "HEAD", *options], cwd=root).wait()


def change(root: Path, *, old: str, new: str) -> None:
    """Change one number of the code, wherever it stands."""
    (path,) = (path for path in (root / "app").rglob("*.py") if old in path.read_text())
    path.write_text(path.read_text().replace(old, new))


def cells(output: str, name: str) -> list[str]:
    (line,) = (line for line in output.splitlines() if line.startswith(f"{name}  "))
    return line.split()[len(name.split()) :]


@pytest.mark.multiproc
@pytest.mark.long
def test_the_same_tree_is_equal_and_a_changed_number_is_found(tree: Path) -> None:
    same = compared(tree, "--only", "averages").check()
    assert cells(same.output, "averages") == ["cpu", "1", *["equal"] * 6]
    assert "1 cases in " in same.output
    assert git(tree, "worktree", "list").count("\n") == 1  # the base's is gone

    change(tree, old="eps: float = 1e-8", new="eps: float = 1e-7")
    other = compared(tree, "--only", "averages")
    assert other.returncode == 1, other.output
    found = cells(other.output.replace(" of ", "/"), "averages")
    assert found[:2] == ["cpu", "1"]
    assert "equal" not in (found[2], *found[5:])
    assert found[3:5] == ["equal", "equal"]  # rates and samples
    assert "and 1 changed files" in other.output
    assert "averages, cpu, 1: losses: loss at step 2: base " in other.output


def test_numbers_are_compared_to_the_last_bit_unless_they_may_differ() -> None:
    last = math.nextafter(0.1, 1.0)
    assert differences({"a": 0.1, "b": math.nan}, {"a": last, "b": math.nan}, tolerance=0.0) == [f"a: base 0.1, here {last}"]
    assert differences({"a": 0.1}, {"a": last}, tolerance=1e-12) == []
    assert differences({"a": 1.0}, {"b": 1.0}, tolerance=1e-12) == ["a: base 1.0, here (none)", "b: base (none), here 1.0"]
    assert differences({"count": 10**13}, {"count": 10**13 + 1}, tolerance=1e-12) != []  # whole numbers are exact


def test_every_shipped_recipe_and_preset_is_among_the_cases(tmp_path: Path) -> None:
    recipes = {path.stem for path in (REPOSITORY / "app").rglob("shipped/*.yaml")}
    presets = {path.stem for path in (REPOSITORY / "accelerate_configs").glob("*.yaml")}
    assert {case.name for case in same_as.cases_of_recipes(tmp_path)} == recipes
    # A small convolutional network has no matrices that are divided.
    assert {case.preset for case in same_as.cases_of_digits()} == presets - {"tensor_parallel", "context_parallel"}
    trained = {case.preset for case in same_as.every_case() if isinstance(case, same_as.Case)}
    assert trained == presets
