"""Samerun as a user has it: a wheel in an environment, and no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ONE_THREAD, REPOSITORY, TIMEOUT_S, Finished, clean_environment


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment into which our wheel is installed; all else it has from this one."""
    place = tmp_path_factory.mktemp("installed")
    pip, quiet = [sys.executable, "-m", "pip", "--disable-pip-version-check"], ["--quiet", "--no-deps", "--no-index"]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
    source = place / "source"
    source.mkdir()  # what building leaves beside the sources is left there
    for name in ("app", "launch", "samerun", "accelerate_configs", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(REPOSITORY / name)
    build = [*pip, "wheel", *quiet, "--no-build-isolation", "--wheel-dir", place, source]
    subprocess.run(build, check=True)
    (wheel,) = place.glob("*.whl")
    subprocess.run([*pip, "--python", place / "venv", "install", *quiet, wheel], check=True)
    (site_packages,) = (place / "venv" / "lib").glob("*/site-packages")
    ours = next(entry for entry in sys.path if entry.endswith("site-packages"))
    (site_packages / "more.pth").write_text(f"{ours}\n")
    return place / "venv" / "bin"


def run_installed(installed: Path, command: list[str], folder: Path) -> Finished:
    """Run a command in a folder with the programs of that environment first on the PATH, and nothing of this repository."""
    environment = {**clean_environment(), **ONE_THREAD, "PATH": f"{installed}{os.pathsep}{os.environ['PATH']}"}
    del environment["PYTHONPATH"]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return Finished(ended.returncode, ended.stdout + ended.stderr)
