"""The origin of a run: the preset of its processes, and the commit of this program."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class PresetFile:
    """The preset file this process was launched with."""

    name: str
    """File name without its ending."""
    text: str


def launched_preset(told: str | None) -> PresetFile | None:
    """Return the preset that this process was started with, or None if it was started without one.

    `accelerate launch` hands on what the preset says, but not its name: the command line of the parent process has it.
    `samerun launch`, where it starts the process itself, has `told` the file.
    """
    try:
        parent = psutil.Process().parent()
        command = parent.cmdline() if parent else []
        directory = parent.cwd() if parent else ""
    except psutil.Error:  # the parent is gone, or belongs to somebody else: then its name is not known
        return None
    for position, word in enumerate(command):
        if word == "--config_file" and position + 1 < len(command):
            path = Path(directory, command[position + 1])
        elif word.startswith("--config_file="):
            path = Path(directory, word.partition("=")[2])
        else:
            continue
        return _read(path)
    return _read(Path(told)) if told else None


def _read(path: Path) -> PresetFile | None:
    return PresetFile(path.stem, path.read_text()) if path.is_file() else None


def source_commit() -> str | None:
    """Return the git commit of this program's checkout, with `+changes` if files differ from it; None outside git."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "HEAD")
    return f"{commit}+changes" if git("status", "--porcelain", "--untracked-files=no") else commit or None
