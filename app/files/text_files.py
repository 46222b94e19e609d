"""Reads text: line files of a run folder, YAML files that people write, and paths in recipes. Standard library and PyYAML.

In a line file each line is a JSON object. A kill cuts the last line, a loss of power may leave anything: half a block of zeros,
bytes that are no text, a line of another file. So each line is read alone, and a broken one is counted and reported, never
raised: the others are still valid.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import yaml

from app.errors import RecipeError, RunFolderError, did_you_mean

MOST = 2**63 - 1
"""Upper limit of any count that a run writes; a larger number means that the file is damaged."""


def parsed(text: bytes | bytearray) -> Any:
    """Return the JSON value of a line or a file. Raises ValueError, with a short reason, for anything else."""
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None


def is_count(value: Any) -> bool:
    """Return True for a whole number that a run may have written."""
    return type(value) is int and 0 <= value <= MOST


def is_finite(value: Any) -> bool:
    """Return True for a finite number; a bool is not one."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST and math.isfinite(value)


def opened(path: Path) -> IO[bytes]:
    """Open a file to read. Raises OSError; also for a pipe or a device, which could make the reader wait."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file")
    return file


def composed(text: str) -> yaml.Node | None:
    """Return the nodes of a YAML document; None: it is empty. Raises yaml.YAMLError, also for tags such as `!!python/object`.

    `yaml.compose` keeps them, and readers of the nodes would ignore them.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)  # before the tags: it refuses what is nested too deeply
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if (tag := getattr(event, "tag", None)) and tag not in yaml.SafeLoader.yaml_constructors:
            problem = f"the tag {tag.replace('tag:yaml.org,2002:', '!!')} is not allowed, write a plain value"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]
    return root


class Lines:
    """The lines of a file, and how many were left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left_out: list[str] = []

    def __iter__(self) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
        """Yield each whole line: its number from 1, its bytes with their end, and its object.

        Raises RunFolderError if the file is missing or cannot be read.
        """
        try:
            with opened(self._path) as file:
                for number, line in enumerate(file, start=1):
                    try:
                        values = parsed(line)
                        why = "" if isinstance(values, dict) else f"it is {type(values).__name__}, not an object"
                    except ValueError as error:
                        why = str(error)
                    if why or not line.endswith(b"\n"):
                        self.leave_out(number, why if line.endswith(b"\n") else "it is cut")
                    else:
                        yield number, line, values
        except OSError as error:
            raise RunFolderError(f"{self._path} cannot be read: {error.strerror or error}.") from error

    def leave_out(self, number: int, why: str) -> None:
        """Count a line that cannot be used; whoever reads the values may find more of them."""
        self._left_out.append(f"line {number}: {why}")

    @property
    def complaint(self) -> str | None:
        """A sentence on what was left out, when all were read; None if nothing was."""
        if not self._left_out:
            return None
        count, first = len(self._left_out), self._left_out[0]
        what = f"a line is damaged or truncated ({first})"
        if count > 1:
            what = f"{count} lines are damaged or truncated (the first is {first})"
        return f"{self._path}: {what}, and ignored."


def find_yaml(what: str, name_or_path: str, shipped: Path, *, error: Callable[[str], Exception]) -> Path:
    """Return the file of a shipped name or of a path; a shipped name takes precedence. `what`: a recipe or a preset."""
    names = sorted(path.stem for path in shipped.glob("*.yaml"))
    if name_or_path in names:
        return shipped / f"{name_or_path}.yaml"
    if (path := Path(name_or_path)).exists():
        return path
    then = f"correct the path, or see `samerun {what}s`" if path.parent.name else f"the package has {', '.join(names)}"
    hint = did_you_mean(path.stem.lower(), names, then=then)
    raise error(f"{what} {name_or_path}: there is no {what} or file of that name; {hint}")


def compose_yaml(path: Path, *, name: str, error: Callable[[str], Exception]) -> tuple[str, yaml.Node]:
    """Return the text of a file and its one document. Raises `error` of one sentence, which begins with `name` and the line."""
    if not path.is_file():
        what = "it is a folder: give a YAML file in it" if path.is_dir() else "it is not a text file"
        raise error(f"{name}: {what if path.exists() else 'there is no such file'}")
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
        root = composed(text)
    except OSError as reason:
        raise error(f"{name}: it cannot be read: {reason.strerror}") from reason
    except UnicodeDecodeError as reason:
        line = data.count(b"\n", 0, reason.start) + 1
        what = f"it is not UTF-8 (byte {data[reason.start]:#x}): save it as UTF-8, or remove non-ASCII characters"
        raise error(f"{name}:{line}: {what}") from reason
    except yaml.MarkedYAMLError as reason:
        line = reason.problem_mark.line + 1 if reason.problem_mark else 1
        why = f"{reason.problem} ({reason.context})" if reason.context else reason.problem
        raise error(f"{name}:{line}: it is {'Python, ' * (path.suffix == '.py')}not YAML: {why}") from reason
    except (yaml.YAMLError, RecursionError) as reason:
        raise error(f"{name}: it is not YAML: {str(reason).splitlines()[0]}") from reason
    if root is None:
        raise error(f"{name}: the file is empty, or has only comments: it must contain `key: value` lines")
    return text, root


def key_text(node: yaml.Node) -> str | None:
    """Return the text of a key, quoted or not; None: it is a list or a mapping."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) else None


def keys_with_lines(root: yaml.Node) -> Iterator[tuple[str, int, int]]:
    """Yield each key of each mapping, the line where the mapping has it already, if any, else 0, and its line, from 1 on.

    Of a repeated key PyYAML keeps the last.
    """
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
                if key is not None:
                    yield key, first.get(key, 0), line
                first.setdefault(key, line)
                waiting.append(value)


def filled_in(key: str, text: str) -> str:
    """Return the path of a recipe's key with `~` and variables replaced. Raises RecipeError for a variable that is not set."""
    filled = os.path.expandvars(Path(text).expanduser())
    if missing := re.search(r"\$\{?(\w+)", filled):
        raise RecipeError(f"{key} is {text}, and the environment variable {missing[1]} is not set: set it, or write the path")
    return filled


def duration(seconds: float) -> str:
    """Return a time span in words of two units: `45 s`, `3 min 20 s`, `5 h 12 min`, `3 d 4 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{max(seconds, 0.0):.2g} s"
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    unit_s, unit, part_s, part = next(row for row in units if seconds >= row[0])
    whole, rest = divmod(int(seconds), unit_s)
    return f"{whole} {unit} {rest // part_s} {part}"
