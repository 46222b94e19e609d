"""Reads YAML files that people write (recipes, presets); errors name the line. Standard library and PyYAML."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import yaml


def compose(path: Path, *, name: str, error: Callable[[str], Exception]) -> tuple[str, yaml.Node]:
    """Return the text of a file and its one document. Raises `error` of one sentence, which begins with `name` and the line."""
    if not path.is_file():
        raise error(f"{name}: it is not a text file" if path.exists() else f"{name}: there is no such file")
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as reason:
        raise error(f"{name}: it cannot be read: {reason.strerror}") from reason
    except UnicodeDecodeError as reason:
        line = data.count(b"\n", 0, reason.start) + 1
        what = f"it is not UTF-8 (byte {data[reason.start]:#x}): save it as UTF-8, or remove non-ASCII characters"
        raise error(f"{name}:{line}: {what}") from reason
    except yaml.MarkedYAMLError as reason:
        line = reason.problem_mark.line + 1 if reason.problem_mark else 1
        context = f" ({reason.context})" if reason.context else ""
        raise error(f"{name}:{line}: it is not YAML: {reason.problem}{context}") from reason
    except (yaml.YAMLError, RecursionError) as reason:
        raise error(f"{name}: it is not YAML: {str(reason).splitlines()[0]}") from reason
    if root is None:
        raise error(f"{name}: the file is empty, or has only comments: it must contain `key: value` lines")
    return text, root


def key_text(node: yaml.Node) -> str | None:
    """Return the text of a key, quoted or not; None: it is a list or a mapping."""
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
