"""The keys of a recipe and the type of each, read from the dataclasses of `schema.py` and of the task.

A value is read as the type of its field, not as what YAML 1.1 makes of it: `1e-3` is a number where a number is expected,
`no` is text where text is expected, and nothing becomes a date. Standard library and PyYAML only, like `recipe_file.py`,
which it serves.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from app import tasks
from app.errors import RecipeError
from app.recipe.schema import ALL_KEYS, Recipe, sections_of


@dataclass(frozen=True)
class Kind:
    """The type of a field, taken apart."""

    scalar: type
    """bool, int, float or str: of the value, or of each element of a list."""
    choices: tuple[str, ...] = ()
    """All that the text may be; empty: any text."""
    optional: bool = False
    """Whether null may stand for no value."""
    length: int | None = None
    """Number of elements of a list; 0: at least one. None: no list."""

    @classmethod
    def of(cls, hint: Any) -> Kind:
        """Take the type annotation of a field apart."""
        arguments = get_args(hint)
        if get_origin(hint) is Literal:
            return cls(str, choices=arguments)
        if get_origin(hint) is tuple:
            return cls(arguments[0], length=0 if arguments[-1] is Ellipsis else len(arguments))
        if get_origin(hint) in (types.UnionType, Union):
            return replace(cls.of(arguments[0]), optional=True)
        return cls(hint)

    def describe(self) -> str:
        """What is expected, in words."""
        singular, plural = _WORDS[self.scalar]
        or_null = " or null" if self.optional else ""
        if self.choices:
            return "one of " + ", ".join(self.choices) + or_null
        if self.length is not None:
            return (f"a list of {self.length} {plural}" if self.length else f"a list of {plural}") + or_null
        return singular + or_null

    def read(self, node: yaml.Node) -> Any:
        """The value of a YAML node. Raises ValueError if it is not of this kind."""
        if self.optional and is_null(node):
            return None
        if self.length is None:
            return self._read_scalar(node)
        items = tuple(self._read_scalar(item) for item in _items(node))
        if not items or self.length not in (0, len(items)):
            raise ValueError(f"{len(items)} elements")
        return items

    def _read_scalar(self, node: yaml.Node) -> Any:
        if self.scalar is not str:
            if not is_plain(node):
                raise ValueError("not a plain scalar")
            return _PARSERS[self.scalar](node.value)
        if self.choices and isinstance(node, yaml.ScalarNode) and node.value in self.choices:
            return node.value  # `none` may be one of them
        if not isinstance(node, yaml.ScalarNode) or is_null(node):
            raise ValueError("not text")
        if self.choices:
            raise ValueError("not one of the choices")
        return node.value


_WORDS = {
    bool: ("true or false", "true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
}


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("neither true nor false")
    return text.lower() == "true"


def _parse_float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError("not finite")
    return number


_PARSERS: Mapping[type, Callable[[str], Any]] = {bool: _parse_bool, int: int, float: _parse_float}


def is_plain(node: yaml.Node) -> bool:
    """Whether the node is a single value without quotes."""
    return isinstance(node, yaml.ScalarNode) and node.style is None


def is_null(node: yaml.Node) -> bool:
    """Whether the node is nothing, or a word for it."""
    return is_plain(node) and node.value.lower() in ("", "~", "null", "none")


def shown(node: yaml.Node) -> str:
    """The node on one line, for a message."""
    if isinstance(node, yaml.ScalarNode):
        return "empty" if is_plain(node) and not node.value else node.value if is_plain(node) else repr(node.value)
    if isinstance(node, yaml.SequenceNode):  # one level only: with an alias, a list may hold itself
        return "[" + ", ".join(shown(item) if isinstance(item, yaml.ScalarNode) else "..." for item in node.value) + "]"
    return "a mapping"


def _items(node: yaml.Node) -> list[yaml.Node]:
    """The elements of a list; `1,2` and `1` are lists too."""
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if not is_plain(node):
        return [node]
    text: str = node.value
    if text.startswith("[") and text.endswith("]"):  # [*.bias] is no YAML
        text = text[1:-1]
    return [yaml.ScalarNode(node.tag, part.strip()) for part in text.split(",")]


OF_NO_SECTION = ("seed", "task")


@functools.cache
def sections(task: str) -> Mapping[str, type]:
    """The sections of a recipe for a task, its own first, and the dataclass of each, in the order of their sources."""
    return {**of_task(task), **_dataclasses(Recipe)}


def of_task(task: str) -> Mapping[str, type]:
    """The task's own sections, and the dataclass of each."""
    return _dataclasses(sections_of(task))


def _dataclasses(cls: type) -> dict[str, type]:
    return {name: hint for name, hint in get_type_hints(cls).items() if isinstance(hint, type) and is_dataclass(hint)}


@functools.cache
def kinds(task: str) -> Mapping[str, Kind]:
    """Every key of a recipe for a task, as `seed` or `optim.lr`, in the order of the sections."""
    found = {name: Kind.of(get_type_hints(Recipe)[name]) for name in OF_NO_SECTION}
    for section, cls in sections(task).items():
        hints = get_type_hints(cls)
        found |= {f"{section}.{field.name}": Kind.of(hints[field.name]) for field in fields(cls)}
    return found


@functools.cache
def not_learnt(task: str) -> frozenset[str]:
    """The keys that decide nothing of what is learnt, as the sections say it."""
    return _said(task, "not_learnt")


@functools.cache
def places(task: str) -> frozenset[str]:
    """The keys that say where something lies of which a fingerprint is compared, as the sections say it."""
    return _said(task, "places")


@functools.cache
def contents(task: str) -> frozenset[str]:
    """The keys that name a file of which the content decides what is learnt, as the sections say it."""
    return _said(task, "contents")


def _said(task: str, name: str) -> frozenset[str]:
    found: set[str] = set()
    for section, cls in sections(task).items():
        said = getattr(cls, name, ())
        found |= {f"{section}.{field.name}" for field in fields(cls) if said == ALL_KEYS or field.name in said}
    return frozenset(found)


def build(values: Mapping[str, Any]) -> Recipe:
    """A recipe with these values, by key, and defaults elsewhere. Raises RecipeError as `Recipe` and the task's sections do."""
    of_application = {key: value for key, value in values.items() if "." not in key}
    own = sections_of(of_application.get("task", tasks.DEFAULT))
    of_task: dict[str, Any] = {}
    for section, cls in sections(of_application.get("task", tasks.DEFAULT)).items():
        prefix = f"{section}."
        built = cls(**{key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)})
        (of_task if section in _dataclasses(own) else of_application)[section] = built
    problems: list[str] = []
    try:
        of_application["sections"] = own(**of_task)
    except RecipeError as error:
        problems, of_application["sections"] = list(error.problems), own()  # so that the rest is checked as well
    try:
        recipe = Recipe(**of_application)
    except RecipeError as error:
        problems += error.problems
    if problems:
        raise RecipeError(*problems)
    return recipe


def flat(recipe: Recipe) -> dict[str, Any]:
    """Every key with its value as bool, int, float, str, None or a list of those: equal recipes give equal JSON."""
    values: dict[str, Any] = {}
    for key, kind in kinds(recipe.task).items():
        section, _, name = key.rpartition(".")
        holder = recipe.sections if hasattr(recipe.sections, section) else recipe
        value = getattr(getattr(holder, section) if section else recipe, name)
        if value is not None:
            value = kind.scalar(value) if kind.length is None else [kind.scalar(element) for element in value]
        values[key] = value
    return values


_EARLIER = {"log.train_accuracy": "log.train_scores", "log.images": "log.examples"}
"""Keys of before, whose names do not resemble those of now."""


def suggest(key: str, task: str) -> str:
    """For a key that does not exist: the nearest that do."""
    if key in _EARLIER:
        return f"did you mean {_EARLIER[key]}?"
    known = list(kinds(task))
    leaf, section = key.rpartition(".")[2], key.partition(".")[0]
    by_leaf: dict[str, list[str]] = {}
    for one in known:
        by_leaf.setdefault(one.rpartition(".")[2], []).append(one)
    near_leaves = difflib.get_close_matches(leaf, by_leaf, n=3, cutoff=0.7)
    nearest = [one for near in near_leaves for one in by_leaf[near]]
    # `optim.epochs` is more likely a wrong section than `optim.eps`, and `optm.lr` a slip in the whole key.
    nearest += difflib.get_close_matches(key, [*known, *sections(task)], n=2, cutoff=0.8)
    if nearest:
        return f"did you mean {' or '.join(list(dict.fromkeys(nearest))[:3])}?"
    if section in sections(task):
        return f"{section} has " + ", ".join(one.partition(".")[2] for one in known if one.startswith(f"{section}."))
    return "a recipe has " + ", ".join([*OF_NO_SECTION, *sections(task)])


def meanings(task: str) -> dict[str, str]:
    """The text under each field of the sections' dataclasses, by key, on one line; and of each section, by its name."""
    texts = {section: inspect.getdoc(cls) or "" for section, cls in sections(task).items()}
    for prefix, cls in {"": Recipe, **{f"{section}.": cls for section, cls in sections(task).items()}}.items():
        if hasattr(cls, "__meanings__"):  # read from a user's file
            texts |= {prefix + name: text for name, text in cls.__meanings__.items()}
            continue
        classes = [node for node in _parsed(cls.__module__) if isinstance(node, ast.ClassDef)]
        (body,) = (node.body for node in classes if node.name == cls.__name__)
        for field, after in itertools.pairwise(body):
            match field, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[prefix + name] = " ".join(text.split())
    return texts


@functools.cache
def _parsed(module: str) -> list[ast.stmt]:
    return ast.parse(inspect.getsource(sys.modules[module])).body
