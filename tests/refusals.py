"""What every table of bad input asks: the exit code, the sentence, and nothing that only a programmer could read."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import NoReturn, Protocol

import pytest

from launch import cli

_OF_PYTHON = re.compile(
    r"Traceback|\b(Value|Key|Type|OS|Index|Attribute|Runtime|FileNotFound|UnicodeDecode|Recursion|Assertion|Overflow|JSONDecode|"
    r"NotADirectory|IsADirectory|Permission|ZeroDivision)Error\b|<class |object at 0x"
)


class Refused(Protocol):
    """What the fixture `refused` gives."""

    def __call__(self, command: list[str], sentence: str, code: int) -> None:
        """Call `samerun ...` or `app.train ...` within this process, in a new folder, and look at what it says."""


class _Left(BaseException):
    """The end of the process, where it would have ended: nothing catches that."""


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Refused:
    monkeypatch.chdir(tmp_path)
    here, end = os.getpid(), os._exit

    def leave(code: int) -> NoReturn:
        """End a fork as before; here the tests would end with it."""
        if os.getpid() != here:
            end(code)
        raise _Left(code)

    monkeypatch.setattr(os, "_exit", leave)

    def look(command: list[str], sentence: str, code: int) -> None:
        capsys.readouterr()
        program, *arguments = command
        ended: int | str | None
        try:
            ended = cli.main(arguments) if program == "samerun" else importlib.import_module(program).main(arguments)
        except SystemExit as left:
            ended = left.code
        except _Left as left:
            ended = left.args[0]
        captured = capsys.readouterr()
        text = captured.err + captured.out
        assert ended == code, text
        assert " ".join(sentence.split()) in " ".join(text.split()), text
        assert not _OF_PYTHON.search(text), text

    return look


def put(folder: Path, name: str, content: str | bytes | None) -> Path:
    """Write a file, or with None make a folder, and return its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
