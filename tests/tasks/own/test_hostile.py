"""A run folder that somebody else wrote: what only reads it runs no code of it, though its recipe names some."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from app.errors import RecipeError

EVIL = """
import pathlib
pathlib.Path("{marker}").touch()

class Task:
    def __init__(self): ...

task = Task
"""


def test_nothing_that_reads_a_run_folder_runs_its_code(digits_run: Path, tmp_path: Path) -> None:
    run, marker = tmp_path / "run", tmp_path / "was_run"
    shutil.copytree(digits_run, run)
    (run / "evil.py").write_text(EVIL.format(marker=marker))
    recipe = (run / "recipe.yaml").read_text().replace("task: image_classification", f"task: {run / 'evil.py'}")
    own = recipe.index("data:"), recipe.index("train:")
    (run / "recipe.yaml").write_text(recipe[: own[0]] + recipe[own[1] :])
    about = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps({**about, "recipe": {"task": str(run / "evil.py")}}))
    told = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**told, "task": str(run / "evil.py")}))

    reading = [
        ["report", str(run)],
        ["compare", str(run), str(digits_run)],
        ["watch", str(run), "--once"],
        ["verify", str(run)],
        ["launch", "--dry-run", "--preset", "cpu", "--recipe", str(run / "recipe.yaml")],
    ]
    for words in reading:
        done = subprocess.run([sys.executable, "-m", "launch.cli", *words], capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr, (words, done.stderr)
        assert not marker.exists(), words
        assert done.returncode == 0 or words[0] == "compare", (words, done.stdout, done.stderr)
    (run / "run.json").unlink()  # the other files mark a run folder as well
    done = subprocess.run([sys.executable, "-m", "app.evaluate", str(run)], capture_output=True, text=True, check=False)
    assert "code in a run folder is never executed" in done.stderr, done.stderr
    assert done.returncode == RecipeError.exit_code
    assert not marker.exists()
