"""The JSON Schema of recipes, with which editors complete and check them: `samerun recipes --schema [RECIPE]`.

Draft 7, the newest that the YAML language server (https://github.com/redhat-developer/yaml-language-server) fully supports. It
describes each key alone. Rules about several keys, and files that must exist, are left to `recipe_file.load`. Some spellings
that `load` accepts are not in it: `none` for null, `1,2` for a list, and texts without quotes that YAML takes for numbers.

Standard library and PyYAML only. A user's task file is read and not run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from app import tasks
from app.recipe import recipe_file, task_file
from app.recipe.kinds import Kind, Range

FILE = "recipe.schema.json"
"""Name of a file with the schema."""

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}
_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


def text(recipe: str | None = None) -> str:
    """Return the schema as a JSON text, with the keys of the own task of `recipe`, a name or a path, if it has one."""
    task = recipe_file.load(recipe).recipe.task if recipe else tasks.DEFAULT
    return f"{json.dumps(schema([task] if task_file.is_own(task) else []), indent=1)}\n"


def schema(own_tasks: Iterable[str] = ()) -> dict[str, Any]:
    """Return the schema of recipes for the shipped tasks and for these task files, given by their paths.

    Keys of other task files are not checked. Raises RecipeError for a task file that is wrong.
    """
    branches: list[dict[str, Any]] = []
    for task in (*tasks.SHIPPED, *own_tasks):
        named = {"pattern": f"(^|/){re.escape(task_file.name_of(task))}$"} if task_file.is_own(task) else {"const": task}
        condition = {"properties": {"task": named}} | ({} if task == tasks.DEFAULT else {"required": ["task"]})
        branches.append({"if": condition, "then": {"properties": _properties(task), "additionalProperties": False}})
    known = [branch["if"] for branch in branches]
    own = recipe_file.own_sections(tasks.DEFAULT)
    common = {name: it for name, it in _properties(tasks.DEFAULT).items() if name not in own}
    other_file = {"required": ["task"], "properties": {**common, "task": {"pattern": r"\.py$"}}}
    branches.append({"if": {"not": {"anyOf": known}}, "then": other_file})
    draft = "http://json-schema.org/draft-07/schema#"
    return {"$schema": draft, "title": "Samerun recipe", "type": "object", "allOf": branches}


def _properties(task: str) -> dict[str, Any]:
    """Return the schema of each key outside of sections, and of each section, of a recipe for a task."""
    texts, defaults = recipe_file.meanings(task), recipe_file.flat(recipe_file.build({"task": task}))
    found: dict[str, Any] = {}
    for key, kind in recipe_file.kinds(task).items():
        section, _, name = key.rpartition(".")
        keys = found
        if section:  # null if all its lines are comments
            empty = {"type": ["object", "null"], "description": texts[section], "properties": {}, "additionalProperties": False}
            keys = found.setdefault(section, empty)["properties"]
        about = {"description": re.sub(r"\bNone\b", "null", texts[key]), "default": defaults[key]}
        keys[name] = about | _of_kind(kind)
    return found


def _of_kind(kind: Kind) -> dict[str, Any]:
    """Return the schema of a value."""
    limits = {_BOUNDS[name]: bound for name, bound in vars(kind.limits or Range()).items() if bound is not None}
    one = {"type": _TYPES[kind.scalar], **({"enum": list(kind.choices)} if kind.choices else {}), **limits}
    types, found = [one["type"]], dict(one)
    if kind.length is not None:
        items = {"type": "array", "items": one, "minItems": 2, "maxItems": 2} if kind.pairs else one
        found |= {"items": items, "minItems": max(kind.length, 1)} | ({"maxItems": kind.length} if kind.length else {})
        # One text or number is a list too.
        types = ["array"] if kind.length or kind.pairs or kind.scalar is dict else ["array", *types]
    if kind.optional:
        types.append("null")
        found |= {"enum": [*found["enum"], None]} if kind.choices else {}
    found["type"] = types
    return {"anyOf": [found, {"enum": list(kind.words)}]} if kind.words else found
