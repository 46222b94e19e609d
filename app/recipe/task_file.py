"""Reads the keys of a user's task file by `ast`, for login nodes. Nothing of the file is run.

So it must say its sections plainly: dataclasses of this file, annotations of plain types, literal defaults.

    @dataclass(frozen=True)
    class Data:
        "The samples."
        path: str | None = None
        "CSV file."

    @dataclass(frozen=True)
    class Sections:
        data: Data = Data()

Standard library only.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from app.errors import RecipeError

ENDING = ".py"
SECTIONS, TASK = "Sections", "task"
"""What a task file calls the dataclass of its sections, and the class or function that makes the task."""

_SCALARS: Mapping[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
_SAID = ("not_learnt", "places")
_PLAIN = "bool, int, float, str, Literal of texts, tuple[X, ...] of one of these, or one of them | None"


def is_own(task: str) -> bool:
    """Whether a recipe's `task` is a file."""
    return task.endswith(ENDING)


def name_of(task: str) -> str:
    """Return what a task is called wherever its file lies: the name of the file."""
    return os.path.basename(task)  # noqa: PTH119 - of a shipped task, its name


def located(text: str, folder: Path) -> str:
    """Return the absolute path of the file that `text` names, seen from `folder`; `~` and variables are filled in."""
    return os.path.abspath(folder / os.path.expandvars(Path(text).expanduser()))  # noqa: PTH100 - links stay as they are


@functools.cache
def sections_of(path: str) -> type:
    """Return a dataclass with the sections that a task file names, and the keys, types and defaults of each.

    Beside them it has what a shipped task's has: `group_size`, `why_grouped`, `inputs`. Raises RecipeError.
    """
    classes, module = _parsed(path)
    group_size = _group_size(module, classes, path)
    sections = [(name, _section(path, name, classes[of])) for name, of in _named(path, classes).items()]
    return make_dataclass(
        SECTIONS,
        [(name, section, field(default_factory=section)) for name, section in sections],
        frozen=True,
        kw_only=True,
        namespace={
            "group_size": group_size,
            "why_grouped": f"{Path(path).name} combines {group_size} neighbouring samples",
            "inputs": property(_inputs),
        },
    )


def _parsed(path: str) -> tuple[dict[str, ast.ClassDef], ast.Module]:
    try:
        module = ast.parse(Path(path).read_bytes(), filename=path)
    except OSError as error:
        raise RecipeError(f"task is {path}: it cannot be read: {error.strerror or error}") from None
    except (SyntaxError, ValueError) as error:
        raise RecipeError(f"task is {path}: it is not valid Python: {error}") from None
    names = [target.id for node in module.body for target in _targets(node)]
    functions = (ast.ClassDef, ast.FunctionDef)
    if TASK not in names and not any(isinstance(node, functions) and node.name == TASK for node in module.body):
        raise RecipeError(f"task is {path}: the file must end with `task = MyTask`, the class that says what is learnt")
    return {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}, module


def _targets(node: ast.stmt) -> Iterator[ast.Name]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return (target for target in targets if isinstance(target, ast.Name))


_RESERVED = ("group_size", "why_grouped", "inputs")


def _named(path: str, classes: Mapping[str, ast.ClassDef]) -> dict[str, str]:
    """The sections by name, and the class of each. A file without `Sections` has none."""
    if SECTIONS not in classes:
        return {}
    found = {}
    for node in classes[SECTIONS].body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if node.target.id in _RESERVED:
            raise RecipeError(f"{path}:{node.lineno}: {node.target.id} is not a valid section name")
        kind = ast.unparse(node.annotation).strip("'")
        if kind not in classes:
            raise RecipeError(
                f"{path}:{node.lineno}: {node.target.id} of {SECTIONS} is a {kind}: it must be a dataclass of this file, "
                "which login nodes read without running it"
            )
        found[node.target.id] = kind
    return found


def _section(path: str, name: str, node: ast.ClassDef) -> type:
    said: dict[str, Any] = {}
    keys, meanings = [], {}
    for one, after in itertools.zip_longest(node.body, node.body[1:]):
        target = next(_targets(one), None)
        if target is None:
            continue
        if target.id in _SAID:
            said[target.id] = _literal(path, f"{name}.{target.id}", one)
        elif isinstance(one, ast.AnnAssign):
            key = f"{name}.{target.id}"
            hint, default = _hint(path, key, one), _literal(path, key, one)
            if not _fits(default, hint):
                said_type = ast.unparse(one.annotation)
                raise RecipeError(f"{path}:{one.lineno}: {key} is annotated as {said_type}, and its default is {default!r}")
            keys.append((target.id, hint, default))
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            meanings[target.id] = " ".join(str(text).split())
    said["__meanings__"] = meanings
    return make_dataclass(
        node.name,
        [(key, hint, field(default=default)) for key, hint, default in keys],
        frozen=True,
        kw_only=True,
        namespace={**said, "__doc__": ast.get_docstring(node) or f"Of {Path(path).name}."},
    )


def _literal(path: str, key: str, node: ast.stmt) -> Any:
    assert isinstance(node, (ast.Assign, ast.AnnAssign))
    try:
        if node.value is None:
            raise ValueError
        found = ast.literal_eval(node.value)
    except ValueError:
        raise RecipeError(
            f"{path}:{node.lineno}: {key} has no literal default: write a number, a text, true or false, a tuple of these, or "
            "None, which login nodes can read without running the file"
        ) from None
    return tuple(found) if isinstance(found, list) else found


def _hint(path: str, key: str, node: ast.AnnAssign) -> Any:
    try:
        return _type(node.annotation)
    except ValueError:
        raise RecipeError(
            f"{path}:{node.lineno}: {key} is annotated as {ast.unparse(node.annotation)}: keys of a recipe are {_PLAIN}"
        ) from None


def _type(node: ast.expr) -> Any:  # noqa: PLR0911 - one for each kind
    """The type that an annotation says. Raises ValueError if it is not one that a key can have."""
    match node:
        case ast.Name(id=name) if name in _SCALARS:
            return _SCALARS[name]
        case ast.Constant(value=str(text)):
            return _type(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=kind, op=ast.BitOr(), right=ast.Constant(value=None)):
            return Union[_type(kind), None]  # noqa: UP007 - of a type that is only known now
        case ast.Subscript(value=ast.Name(id="Optional") | ast.Attribute(attr="Optional"), slice=kind):
            return Union[_type(kind), None]  # noqa: UP007
        case ast.Subscript(value=ast.Name(id="Literal") | ast.Attribute(attr="Literal"), slice=words):
            texts = ast.literal_eval(words)
            texts = texts if isinstance(texts, tuple) else (texts,)
            if texts and all(isinstance(text, str) for text in texts):
                return Literal[texts]
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[kind, ast.Constant(value=last)])) if last is ...:
            return tuple[_scalar(kind), ...]  # type: ignore[misc]
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[kind, *more])):
            if len({_scalar(one) for one in (kind, *more)}) == 1:
                return tuple[(_scalar(kind),) * (1 + len(more))]  # type: ignore[misc]
    raise ValueError(ast.unparse(node))


def _fits(value: Any, hint: Any) -> bool:
    arguments = get_args(hint)
    if get_origin(hint) is Union:
        return value is None or _fits(value, arguments[0])
    if get_origin(hint) is Literal:
        return value in arguments
    if get_origin(hint) is tuple:
        is_long = arguments[-1] is Ellipsis or (isinstance(value, tuple) and len(value) == len(arguments))
        return isinstance(value, tuple) and is_long and all(_fits(one, arguments[0]) for one in value)
    return isinstance(value, (int, float) if hint is float else hint) and isinstance(value, bool) == (hint is bool)


def _scalar(node: ast.expr) -> type:
    found = _type(node)
    if found not in _SCALARS.values():
        raise ValueError(ast.unparse(node))
    return found  # type: ignore[no-any-return]


def _group_size(module: ast.Module, classes: Mapping[str, ast.ClassDef], path: str) -> int:
    """What the task's class says of them; 1 if it says nothing."""
    named = {target.id: node for node in module.body for target in _targets(node)}.get(TASK)
    value = getattr(named, "value", None)
    node = classes.get(value.id) if isinstance(value, ast.Name) else None
    for one in node.body if node else ():
        if any(target.id == "group_size" for target in _targets(one)):
            found = _literal(path, "group_size", one)
            if not isinstance(found, int) or found < 1:
                raise RecipeError(f"{path}:{one.lineno}: group_size is {found!r}: it must be a whole number, 1 or more")
            return found
    return 1


def _inputs(sections: Any) -> dict[str, str]:
    """What must be there before the run: what the `places` of the sections say."""
    found = {}
    for name in sections.__dataclass_fields__:
        section = getattr(sections, name)
        for key in getattr(section, "places", ()):
            if isinstance(path := getattr(section, key), str):
                found[f"{name}.{key}"] = path
    return found
