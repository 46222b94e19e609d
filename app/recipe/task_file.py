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
from typing import Any, Literal, Union

from app.errors import RecipeError
from app.recipe.kinds import Kind

ENDING = ".py"
SECTIONS, TASK = "Sections", "task"
"""What a task file calls the dataclass of its sections, and the class or function that makes the task."""

_SCALARS: Mapping[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
_MARKS = ("not_learnt", "places")
_RESERVED = ("group_size", "why_grouped", "inputs", "contradictions")
_PLAIN = "bool, int, float, str, Literal of texts, tuple[X, ...] of one of these, or one of them | None"


def is_own(task: str) -> bool:
    """Return True if a recipe's `task` is a file."""
    return task.endswith(ENDING)


def name_of(task: str) -> str:
    """Return the name of a task, wherever its file is: the name of the file."""
    return os.path.basename(task)  # noqa: PTH119 - of a shipped task, its name


def located(text: str, folder: Path) -> str:
    """Return the absolute path of the file that `text` names, seen from `folder`; `~` and variables are filled in."""
    return os.path.abspath(folder / os.path.expandvars(Path(text).expanduser()))  # noqa: PTH100 - links stay as they are


@functools.cache
def sections_of(path: str) -> type:
    """Return a dataclass with the sections that a task file names, and the keys, types and defaults of each.

    Beside them it has what a shipped task's has: `group_size`, `why_grouped`, `inputs`, `contradictions`. Raises RecipeError.
    """
    classes, module = _parse(path)
    sections = []
    for node in classes[SECTIONS].body if SECTIONS in classes else ():
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name, kind = node.target.id, ast.unparse(node.annotation).strip("'")
        if name in _RESERVED or kind not in classes:
            raise RecipeError(
                f"{path}:{node.lineno}: {name} of {SECTIONS} is a {kind}: it must be a dataclass of this file, with another "
                f"name than {', '.join(_RESERVED)}"
            )
        section = _section(path, name, classes[kind])
        sections.append((name, section, field(default_factory=section)))
    namespace = {
        "group_size": (group_size := _group_size(module, classes, path)),
        "why_grouped": f"{Path(path).name} combines {group_size} neighbouring samples",
        "inputs": property(_inputs),
        "contradictions": lambda _: (),
    }
    return make_dataclass(SECTIONS, sections, frozen=True, kw_only=True, namespace=namespace)


def _parse(path: str) -> tuple[dict[str, ast.ClassDef], ast.Module]:
    try:
        module = ast.parse(Path(path).read_bytes(), filename=path)
    except OSError as error:
        raise RecipeError(f"task is {path}: it cannot be read: {error.strerror or error}") from None
    except (SyntaxError, ValueError) as error:
        raise RecipeError(f"task is {path}: it is not valid Python: {error}") from None
    names = [target for node in module.body for target in _targets(node)]
    names += [node.name for node in module.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    if TASK not in names:
        raise RecipeError(f"task is {path}: the file must end with `task = MyTask`, the class of the task")
    return {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}, module


def _targets(node: ast.stmt) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return (target.id for target in targets if isinstance(target, ast.Name))


def meanings(node: ast.ClassDef) -> dict[str, str]:
    """Return the text under each annotated field of a class, on one line."""
    found = {}
    for one, after in itertools.pairwise(node.body):
        match one, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _section(path: str, name: str, node: ast.ClassDef) -> type:
    marks: dict[str, Any] = {}
    keys = []
    for one in node.body:
        target = next(_targets(one), "")
        key = f"{name}.{target}"
        if target in _MARKS:
            marks[target] = _literal(path, key, one)
        elif target and isinstance(one, ast.AnnAssign):
            default = _literal(path, key, one)
            try:
                hint = _type(one.annotation)
                if not _fits(default, Kind.of(hint)):
                    raise ValueError
            except ValueError:
                declared = f"{key} is annotated as {ast.unparse(one.annotation)}, and its default is {default!r}"
                raise RecipeError(f"{path}:{one.lineno}: {declared}: keys of a recipe are {_PLAIN}") from None
            keys.append((target, hint, field(default=default)))
    namespace = {**marks, "__meanings__": meanings(node), "__doc__": ast.get_docstring(node) or f"Of {Path(path).name}."}
    return make_dataclass(node.name, keys, frozen=True, kw_only=True, namespace=namespace)


def _literal(path: str, key: str, node: ast.stmt) -> Any:
    try:
        found = ast.literal_eval(getattr(node, "value", None) or "")
    except (SyntaxError, ValueError):
        raise RecipeError(
            f"{path}:{node.lineno}: {key} has no literal default: write a number, a text, true or false, a tuple of these, or "
            "None, which login nodes can read without running the file"
        ) from None
    return tuple(found) if isinstance(found, list) else found


def _type(node: ast.expr) -> Any:
    """Return the type that an annotation stands for. Raises ValueError if it is not one that a key can have."""
    match node:
        case ast.Name(id=name) if name in _SCALARS:
            return _SCALARS[name]
        case ast.BinOp(left=kind, op=ast.BitOr(), right=ast.Constant(value=None)):
            return Union[_type(kind), None]  # noqa: UP007 - of a type that is only known now
        case ast.Subscript(value=ast.Name(id="Literal") | ast.Attribute(attr="Literal"), slice=words):
            texts = ast.literal_eval(words)
            texts = texts if isinstance(texts, tuple) else (texts,)
            if all(isinstance(text, str) for text in texts):
                return Literal[texts]
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[first, *more])):
            kind, is_long = _type(first), [ast.unparse(one) for one in more] == ["..."]
            if kind in _SCALARS.values() and (is_long or all(_type(one) is kind for one in more)):
                return tuple[(kind, ...)] if is_long else tuple[(kind,) * (1 + len(more))]  # type: ignore[misc, valid-type]
    raise ValueError(ast.unparse(node))


def _fits(value: Any, kind: Kind) -> bool:
    if value is None:
        return kind.optional
    values, types = value if kind.length is not None else (value,), (int, float) if kind.scalar is float else kind.scalar
    if not isinstance(values, tuple) or kind.length not in (None, 0, len(values)):
        return False
    of_type = all(isinstance(one, types) and isinstance(one, bool) == (kind.scalar is bool) for one in values)
    return of_type and (not kind.choices or value in kind.choices)


def _group_size(module: ast.Module, classes: Mapping[str, ast.ClassDef], path: str) -> int:
    """Return the `group_size` of the task's class; 1 if it has none."""
    named = {target: node for node in module.body for target in _targets(node)}.get(TASK)
    node = classes.get(getattr(getattr(named, "value", None), "id", TASK))
    for one in node.body if node else ():
        if "group_size" in _targets(one):
            found = _literal(path, "group_size", one)
            if not isinstance(found, int) or found < 1:
                raise RecipeError(f"{path}:{one.lineno}: group_size is {found!r}: it must be a whole number, 1 or more")
            return found
    return 1


def _inputs(sections: Any) -> dict[str, str]:
    """Return what must be there before the run: what the `places` of the sections name."""
    return {
        f"{name}.{key}": path
        for name, section in vars(sections).items()
        for key in getattr(section, "places", ())
        if isinstance(path := getattr(section, key), str)
    }
