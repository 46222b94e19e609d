"""The keys of a recipe, such as `seed` or `optim.lr`, read from the dataclasses of `schema.py` and of the task.

Standard library and PyYAML only, like `recipe_file.py`, which it serves.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import sys
from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

from app import tasks
from app.recipe import task_file
from app.recipe.kinds import Kind, kinds_in, sections_in
from app.recipe.schema import ALL_KEYS, Recipe, sections_of

OF_NO_SECTION = ("seed", "task")


@functools.cache
def sections(task: str) -> Mapping[str, type]:
    """The sections of a recipe for a task, its own first, and the dataclass of each, in the order of their sources."""
    return {**of_task(task), **sections_in(Recipe)}


def of_task(task: str) -> Mapping[str, type]:
    """The task's own sections, and the dataclass of each."""
    return sections_in(sections_of(task))


@functools.cache
def kinds(task: str) -> Mapping[str, Kind]:
    """Every key of a recipe for a task, as `seed` or `optim.lr`, in the order of the sections."""
    common = kinds_in(Recipe)
    return {**{key: common[key] for key in OF_NO_SECTION}, **kinds_in(sections_of(task)), **common}


def not_learnt(task: str) -> frozenset[str]:
    """The keys that decide nothing of what is learnt."""
    return marked("not_learnt", task)


def places(task: str) -> frozenset[str]:
    """The keys with the place of something whose fingerprint is compared."""
    return marked("places", task)


@functools.cache
def marked(name: str, task: str) -> frozenset[str]:
    """The keys that the class variable `name` of their sections lists (see `schema.py`)."""
    found: set[str] = set()
    for section, cls in sections(task).items():
        listed = getattr(cls, name, ())
        found |= {f"{section}.{field.name}" for field in fields(cls) if listed == ALL_KEYS or field.name in listed}
    return frozenset(found)


def build(values: Mapping[str, Any]) -> Recipe:
    """A recipe with these values, by key, and defaults elsewhere. Raises RecipeError as `Recipe` does."""
    task = values.get("task", tasks.DEFAULT)
    top = {key: value for key, value in values.items() if "." not in key}
    own: dict[str, Any] = {}
    for section, cls in sections(task).items():
        prefix = f"{section}."
        built = cls(**{key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)})
        (own if section in of_task(task) else top)[section] = built
    return Recipe(**top, sections=sections_of(task)(**own))


def flat(recipe: Recipe) -> dict[str, Any]:
    """Every key with its value as plain JSON, lists instead of tuples: equal recipes give equal JSON."""
    values: dict[str, Any] = {}
    for key, kind in kinds(recipe.task).items():
        value = attrgetter(key)(recipe.sections if key.partition(".")[0] in of_task(recipe.task) else recipe)
        if value is not None:
            value = kind.scalar(value) if kind.length is None else [kind.scalar(element) for element in value]
        values[key] = value
    return values


def suggest(key: str, task: str) -> str:
    """For a key that does not exist: the nearest that do."""
    known = list(kinds(task))
    leaf, section = key.rpartition(".")[2], key.partition(".")[0]
    near_leaves = difflib.get_close_matches(leaf, dict.fromkeys(one.rpartition(".")[2] for one in known), n=3, cutoff=0.7)
    nearest = [one for near in near_leaves for one in known if one.rpartition(".")[2] == near]
    # `optim.epochs` is more likely a wrong section than `optim.eps`, and `optm.lr` a slip in the whole key.
    nearest += difflib.get_close_matches(key, [*known, *sections(task)], n=2, cutoff=0.8)
    if nearest:
        return f"did you mean {' or '.join(list(dict.fromkeys(nearest))[:3])}?"
    if section in sections(task):
        return f"{section} has " + ", ".join(one.partition(".")[2] for one in known if one.startswith(f"{section}."))
    return "a recipe has " + ", ".join([*OF_NO_SECTION, *sections(task)])


def meanings(task: str) -> dict[str, str]:
    """The text under each field of the sections' dataclasses, by key, on one line; and of each section, by its name."""
    texts = {**dict.fromkeys(kinds(task), ""), **{name: inspect.getdoc(cls) or "" for name, cls in sections(task).items()}}
    for prefix, cls in {"": Recipe, **{f"{section}.": cls for section, cls in sections(task).items()}}.items():
        found = getattr(cls, "__meanings__", None)  # read from a user's file
        if found is None:
            (node,) = (node for node in _parsed(cls.__module__) if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
            found = task_file.meanings(node)
        texts |= {prefix + name: text for name, text in found.items()}
    return texts


@functools.cache
def _parsed(module: str) -> list[ast.stmt]:
    return ast.parse(inspect.getsource(sys.modules[module])).body
