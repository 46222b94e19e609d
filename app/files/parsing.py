"""Reads YAML that people write, with errors that name the line, and files of JSON lines, some of which may be broken.

A kill cuts the last line, a loss of power may leave anything: half a block of zeros, bytes that are no text, a line of another
file. So a line is read alone, and what is none is counted and said, never raised: what the others say is still true.
Standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from app.errors import RunFolderError
from app.files import paths

MOST = 2**63 - 1
"""Upper limit of any count that a run writes; a larger number means that the file is damaged."""


def parsed(text: bytes | bytearray) -> Any:
    """Return the JSON value of a line or a file. Raises ValueError, with a short reason, for what is none."""
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number that a run may have written."""
    return type(value) is int and 0 <= value <= MOST


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number; true, which is 1 in Python, is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST and math.isfinite(value)


class Lines:
    """The lines of a file, and what had to be left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left_out = 0
        self._first: tuple[int, str] | None = None

    def __iter__(self) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
        """Yield each whole line: its number from 1, its bytes with their end, and its object.

        Raises RunFolderError if the file is missing or cannot be read.
        """
        try:
            with paths.open_regular(self._path) as file:
                for number, line in enumerate(file, start=1):
                    if line.isspace():
                        continue
                    values = self._object(line, number)
                    if values is not None:
                        yield number, line, values
        except FileNotFoundError:
            raise RunFolderError(f"{self._path} is missing.") from None
        except OSError as error:
            raise RunFolderError(f"{self._path} cannot be read: {error.strerror or error}.") from error

    def _object(self, line: bytes, number: int) -> dict[str, Any] | None:
        try:
            values = parsed(line)
        except ValueError as error:
            self.leave_out(number, "it is cut" if not line.endswith(b"\n") else str(error))
            return None
        if not line.endswith(b"\n"):
            self.leave_out(number, "it is cut")
            return None
        if not isinstance(values, dict):
            self.leave_out(number, f"it is {type(values).__name__}, not an object")
            return None
        return values

    def leave_out(self, number: int, why: str) -> None:
        """Count a line that cannot be used; whoever reads the values may find more of them."""
        self._left_out += 1
        self._first = self._first or (number, why)

    @property
    def complaint(self) -> str | None:
        """A sentence on what was left out, when all were read; None if nothing was."""
        if self._first is None:
            return None
        number, why = self._first
        if self._left_out == 1:
            return f"{self._path}: a line is damaged or truncated (line {number}: {why}), and is ignored."
        return (
            f"{self._path}: {self._left_out} lines are damaged or truncated (the first is line {number}: {why}), "
            "and are ignored."
        )


def compose(path: Path, *, name: str, error: Callable[[str], Exception]) -> tuple[str, yaml.Node]:
    """Return the text of a file and its one document. Raises `error` of one sentence, which begins with `name` and the line."""
    text = _text(path, name, error)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as reason:
        line = reason.problem_mark.line + 1 if reason.problem_mark else 1
        raise error(f"{name}:{line}: {_reason(reason, text.splitlines(), line)}") from reason
    except yaml.reader.ReaderError as reason:
        line = text.count("\n", 0, reason.position) + 1
        raise error(f"{name}:{line}: it is not YAML: it contains the invalid character {chr(reason.character)!r}") from reason
    except RecursionError:
        raise error(f"{name}: its lists or mappings are nested too deeply") from None
    if root is None:
        raise error(f"{name}: the file is empty, or has only comments: it must contain `key: value` lines")
    return text, root


def _text(path: Path, name: str, error: Callable[[str], Exception]) -> str:
    if not path.is_file():
        raise error(f"{name}: it is not a text file" if path.exists() else f"{name}: there is no such file")
    try:
        data = path.read_bytes()
    except OSError as reason:
        raise error(f"{name}: it cannot be read: {reason.strerror}") from reason
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        line = data.count(b"\n", 0, reason.start) + 1
        what = f"it is not UTF-8 (byte {data[reason.start]:#x}): save it as UTF-8, or remove non-ASCII characters"
        raise error(f"{name}:{line}: {what}") from reason


def _reason(error: yaml.MarkedYAMLError, lines: list[str], line: int) -> str:
    """What is wrong, in other words where the library's say little."""
    if "expected a single document" in str(error):
        return "a second document begins here (---): keep one"
    problem = str(error.problem or error)
    around = lines[max(line - 2, 0) : line]
    if r"'\t'" in problem or any("\t" in one[: len(one) - len(one.lstrip())] for one in around):
        return "YAML does not allow tabs for indentation: indent with spaces"
    context = f" ({error.context})" if error.context and error.context not in problem else ""
    return f"it is not YAML: {problem}{context}"


def key_text(node: yaml.Node) -> str | None:
    """Return a key as it is meant, with quotes or without; None: it is a list or a mapping."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) else None


def repeated(root: yaml.Node) -> Iterator[tuple[str, int, int]]:
    """Yield each key that a mapping has twice, where PyYAML keeps the last, with the lines of the two, from 1 on."""
    seen_nodes: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen_nodes:  # by an alias
            continue
        seen_nodes.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            first: dict[str | None, int] = {}
            for key_node, value in node.value:
                key, line = key_text(key_node), key_node.start_mark.line + 1
                if key is not None and key in first:
                    yield key, first[key], line
                first.setdefault(key, line)
                waiting.append(value)
