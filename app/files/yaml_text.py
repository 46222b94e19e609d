"""Reads YAML files that people write (recipes, presets); errors name the line. Standard library and PyYAML."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import yaml


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
