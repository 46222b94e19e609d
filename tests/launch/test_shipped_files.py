"""`samerun recipes|presets|script`: what comes with the package; `samerun --version` and what a help imports."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from installation import run_installed
from processes import read

from app.recipe import recipe_file
from launch import cli, preset

LAUNCH = Path(cli.__file__).parent


@pytest.mark.parametrize(
    ("command", "names", "folder", "ending"),
    [
        ("recipes", recipe_file.names(), recipe_file.SHIPPED, ".yaml"),
        ("presets", preset.names(), preset.SHIPPED, ".yaml"),
        ("script", sorted(path.name for pattern in ("*.sh", "*.pbs") for path in LAUNCH.glob(pattern)), LAUNCH, ""),
    ],
)
def test_each_file_is_listed_and_printed(command: str, names: list[str], folder: Path, ending: str, capsys) -> None:
    assert cli.main([command]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names
    for name in names:
        assert cli.main([command, name]) == 0
        assert capsys.readouterr().out == (folder / f"{name}{ending}").read_text()
    assert cli.main([command, "nothing"]) == 2
    assert f"`samerun {command}` lists all" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"samerun {version('samerun')}\n"


HELPS = """import sys
from launch import cli
for command in cli._COMMANDS:
    try:
        cli.main([command, "--help"])
    except SystemExit as end:
        assert not end.code, command
    assert not {"torch", "matplotlib", "transformers"} & sys.modules.keys(), command
"""


def test_a_help_imports_neither_torch_nor_matplotlib() -> None:
    done = subprocess.run([sys.executable, "-c", HELPS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") >= len(cli._COMMANDS)


@pytest.mark.multiproc
def test_a_job_script_of_the_wheel_trains_in_another_folder(installed: Path, tmp_path: Path) -> None:
    for name in ("local.sh", "multinode.sh", "multinode.pbs", "mpirun.sh"):
        printed = run_installed(installed, ["samerun", "script", name], tmp_path).check().output
        assert printed == (LAUNCH / name).read_text()
        (tmp_path / name).write_text(printed)
    words = ["--preset", "cpu", "--recipe", "digits", "--run-dir", "run", "--trackers", "none", "train.steps=2"]
    run_installed(installed, ["sh", "local.sh", *words], tmp_path).check()
    assert read(tmp_path / "run" / "result.json")["steps"] == 2
