"""The types of a recipe's values: how a YAML node is read as one, the range of a number, and what is wrong with a value.

A value is read as the type of its field, not as what YAML 1.1 makes of it: `1e-3` is a number where a number is expected,
`no` is text where text is expected, and nothing becomes a date. Standard library and PyYAML only: it is read on login nodes.
"""

from __future__ import annotations

import collections.abc
import functools
import json
import math
import operator
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from app.errors import did_you_mean
from app.files import text_files


class Problem(str):
    """A sentence about the values of some keys. `recipe_file.load` adds the origins of these values."""

    __slots__ = ("keys",)
    keys: tuple[str, ...]

    def __new__(cls, text: str, *keys: str) -> Problem:
        """Return the text as a problem of the keys."""
        problem = super().__new__(cls, text)
        problem.keys = keys
        return problem


def problem(sections: Any, text: str, *keys: str) -> Problem:
    """Return the problem `KEY is VALUE and KEY is VALUE: text`, with the values that the sections have."""
    values = (f"{key} is {json.dumps(operator.attrgetter(key)(sections), ensure_ascii=False)}" for key in keys)
    return Problem(f"{' and '.join(values)}: {text}", *keys)


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers greater than `gt`, at least `ge`, less than `lt` and at most `le`."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def contains(self, number: float) -> bool:
        """Return True if the number is in the range."""
        return all(getattr(operator, name)(number, bound) for name, bound in vars(self).items() if bound is not None)

    def __str__(self) -> str:
        words = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
        return " and ".join(f"{words[name]} {bound:,}" for name, bound in vars(self).items() if bound is not None)


POSITIVE, NOT_NEGATIVE, SHARE = Range(gt=0), Range(ge=0), Range(ge=0, le=1)


@dataclass(frozen=True)
class Kind:
    """The type of a field, taken apart."""

    scalar: type
    """bool, int, float, str or dict: type of the value, or of each element of a list."""
    choices: tuple[str, ...] = ()
    """All texts that are allowed; empty: any text."""
    optional: bool = False
    """True if null is allowed."""
    length: int | None = None
    """Number of elements of a list; 0: at least one. None: no list."""
    limits: Range | None = None
    """Range of the number, or of each number of a list."""
    pairs: bool = False
    """True if each element of a list is a pair."""
    words: tuple[str, ...] = ()
    """Texts that are allowed in place of a number."""

    @classmethod
    def of(cls, hint: Any) -> Kind:
        """Take the type annotation of a field apart."""
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return replace(cls.of(arguments[0]), limits=arguments[1])
        if origin is Literal:
            return cls(str, choices=arguments)
        if origin is tuple and get_origin(arguments[0]) is tuple:
            return replace(cls.of(arguments[0]), length=0, pairs=True)
        if origin is tuple:
            return replace(cls.of(arguments[0]), length=0 if arguments[-1] is Ellipsis else len(arguments))
        if origin in (types.UnionType, Union):
            words = [word for it in arguments[1:] if get_origin(it) is Literal for word in get_args(it)]
            return replace(cls.of(arguments[0]), optional=type(None) in arguments, words=tuple(words))
        return cls(dict if origin is collections.abc.Mapping else hint)

    def describe(self) -> str:
        """Return what is expected, in words."""
        words, plural = _WORDS[self.scalar]
        if self.choices:
            words = f"one of {', '.join(self.choices)}"
        elif self.length is not None:
            words = f"a list of {self.length or ''} {plural}".replace("  ", " ")
        if self.pairs:
            words = f"a list of pairs of {plural} such as [[10, 20], [30, 31]]"
        others = [*self.words, *["null"] * self.optional]
        return " or ".join([", ".join([words, *others[:-1]]), *others[-1:]])

    def read(self, node: yaml.Node) -> Any:
        """Return the value of a YAML node. Raises ValueError, with what is expected, if it is of another kind."""
        if self.optional and is_null(node):
            return None
        if self.scalar is dict and self.length is None and isinstance(node, yaml.MappingNode):
            return plain(node)
        with suppress(ValueError):
            if self.pairs and isinstance(node, yaml.SequenceNode) and node.value:
                return tuple(replace(self, length=2, optional=False, pairs=False).read(item) for item in node.value)
            if self.length is None:
                return self._read_scalar(node)
            items = tuple(map(self._read_scalar, _items(node)))
            if items and self.length in (0, len(items)) and not self.pairs:
                return items
        near = did_you_mean(node.value, self.choices) if self.choices and is_plain(node) else ""
        if self.scalar is float and re.fullmatch(r"0,\d+", str(node.value)):
            near = f"did you mean {node.value.replace(',', '.')}?"
        raise ValueError(f"expected {self.describe()}{near and '; '}{near}")

    def _read_scalar(self, node: yaml.Node) -> Any:
        if self.scalar is dict and isinstance(node, yaml.MappingNode):
            return plain(node)
        if self.scalar is str and isinstance(node, yaml.ScalarNode):
            if node.value in self.choices if self.choices else not is_null(node):  # `none` can be a choice
                return node.value
        elif isinstance(node, yaml.ScalarNode) and node.value in self.words:
            return node.value
        elif self.scalar in _PARSERS and is_plain(node):
            return _PARSERS[self.scalar](node.value)
        raise ValueError(f"not of type {self.scalar}")


_WORDS = {
    bool: ("true or false", "true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    dict: ('a mapping such as {"name": 0.1}', "mappings such as [{path: texts, weight: 0.5}]"),
}


def _parse_float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError("not finite")
    return number


_PARSERS: Mapping[type, Callable[[str], Any]] = {
    bool: lambda text: ("false", "true").index(text.lower()) == 1,
    int: int,
    float: _parse_float,
}


def plain(node: yaml.Node, depth: int = 0) -> Any:
    """Return a node without a type of its own: a mapping, a list, null, true or false, a number or else text."""
    if depth > 9:  # with an alias, a mapping can contain itself
        raise ValueError("it is nested too deeply")
    if isinstance(node, yaml.MappingNode):
        if twice := [key for key, first, _ in text_files.keys_with_lines(node) if first]:
            raise ValueError(f"it has {twice[0]} twice")
        return {text_files.key_text(key): plain(value, depth + 1) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [plain(item, depth + 1) for item in node.value]
    if is_null(node):
        return None
    for parse in _PARSERS.values() if is_plain(node) else ():
        with suppress(ValueError):
            return parse(node.value)
    return node.value


def is_plain(node: yaml.Node) -> bool:
    """Return True for a single value without quotes."""
    return isinstance(node, yaml.ScalarNode) and node.style is None


def is_null(node: yaml.Node) -> bool:
    """Return True for an empty value, or a word for null."""
    return is_plain(node) and node.value.lower() in ("", "~", "null", "none")


def shown(node: yaml.Node, depth: int = 0) -> str:
    """Return the node on one line, for a message."""
    if isinstance(node, yaml.ScalarNode):
        return (node.value or "empty") if is_plain(node) else repr(node.value)
    if isinstance(node, yaml.SequenceNode):  # two levels only: with an alias, a list can contain itself
        return "..." if depth > 1 else "[" + ", ".join(shown(item, depth + 1) for item in node.value) + "]"
    return "a mapping"


def _items(node: yaml.Node) -> list[yaml.Node]:
    """Return the elements of a list; `1,2` and `1` are lists too."""
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if not is_plain(node):
        return [node]
    text: str = node.value
    if text.startswith("[") and text.endswith("]"):  # [*.bias] is no YAML
        text = text[1:-1]
    return [yaml.ScalarNode(node.tag, part.strip()) for part in text.split(",")]


@functools.cache
def sections_in(cls: type) -> Mapping[str, type]:
    """Return the sections of a dataclass: its fields that are dataclasses themselves."""
    return {name: hint for name, hint in get_type_hints(cls).items() if isinstance(hint, type) and is_dataclass(hint)}


@functools.cache
def kinds_in(cls: type) -> Mapping[str, Kind]:
    """Return the kind of each key of a dataclass; the keys of a section are `section.field`."""
    hints = get_type_hints(cls, include_extras=True)
    found: dict[str, Kind] = {}
    for name in (field.name for field in fields(cls)):
        if name in sections_in(cls):
            found |= {f"{name}.{key}": kind for key, kind in kinds_in(hints[name]).items()}
        elif hints[name] is not Any:
            found[name] = Kind.of(hints[name])
    return found


def weights_problem(names: Sequence[str], weights: Sequence[Any], window: int) -> str:
    """Return what is wrong with the weights of these sources in windows of so many samples; empty: nothing."""
    if len(weights) != len(names) or not all(isinstance(it, (int, float)) and 0 <= it < math.inf for it in weights):
        return f"the weights are {[*weights]}: give a number of 0 or more for each of {len(names)} sources"
    if not any(weights):
        return "all weights are 0: give one that is greater"
    total = sum(weights)
    small = next((name for name, weight in zip(names, weights, strict=True) if 0 < weight * window < total), None)
    return (
        f"the share of {small} is less than a sample in a window of {window:,}: raise its weight, or the window"
        if small
        else ""
    )


def out_of_range(sections: Any) -> Iterator[Problem]:
    """Yield a problem for each key of these sections with a number that is out of the range in its annotation."""
    for key, kind in kinds_in(sections.__class__).items():
        value = operator.attrgetter(key)(sections)
        numbers = value if isinstance(value, tuple) else (value,)
        if kind.limits and not all(it is None or it in kind.words or kind.limits.contains(it) for it in numbers):
            yield problem(sections, f"it must be {kind.limits}", key)
