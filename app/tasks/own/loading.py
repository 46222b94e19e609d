"""A user's task file where it runs: imported from the place that the recipe names, and built from its own sections.

Only what trains, evaluates or predicts comes here. Reports, the launcher and the login node read the file's keys by `ast`
(`app/recipe/task_file.py`).
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from app.errors import RecipeError
from app.recipe import task_file
from app.tasks.own.own_task import OwnTask

_OF_RUNS = ("run.json", "model.json", "metrics.jsonl", "ledger.jsonl")
"""Files that mark a run folder: each is in the folder of some run that a command takes."""
_OURS = ("app", "launch", "samerun")


def task_of(recipe: Any) -> OwnTask:
    """Return the task of a recipe whose `task` is a file. Raises RecipeError for a file that is no task."""
    path = Path(recipe.task)
    module = _module(path)
    make = getattr(module, task_file.TASK)
    if not hasattr(module, task_file.SECTIONS):
        return OwnTask(make(), name=path.name)
    return OwnTask(make(_sections(module, recipe.sections, path)), name=path.name)


def sources(task: str) -> dict[str, str]:
    """Return the text of a task file, and of the modules of its folder that were imported, by their paths in the folder.

    Modules that are imported later, such as within a function that has not run yet, are not among them.
    """
    path = Path(task)
    found = {path.name: path.read_text()}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name.partition(".")[0] in _OURS or not file.endswith(task_file.ENDING):
            continue
        if Path(file).is_relative_to(path.parent) and "site-packages" not in Path(file).parts:
            found[str(Path(file).relative_to(path.parent))] = Path(file).read_text()
    return dict(sorted(found.items()))


def _module(path: Path) -> ModuleType:
    """Import the file under its own name, which is what pickles of its classes say. Its folder goes last on sys.path."""
    name, folder = path.stem, str(path.parent)
    loaded = sys.modules.get(name)
    if loaded is not None and _is(getattr(loaded, "__file__", None), path):
        return loaded
    above = (*path.absolute().parents, *path.resolve().parents)
    run = next((parent for parent in above if any((parent / name).exists() for name in _OF_RUNS)), None)
    if run is not None:
        raise RecipeError(
            f"task is {path}, which is in the run folder {run}: code in a run folder is never executed. Copy it elsewhere"
        )
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not _is(spec.origin, path):
        other = f", but Python finds {spec.origin or 'another module'} by that name" if spec else ", which is not a module name"
        raise RecipeError(f"task is {path}{other}. Give the file another name, such as my_{name.replace('-', '_')}.py")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        places = [path.parent / package, path.parent / f"{package}.py"]
        if package not in _OURS or not any(place.exists() for place in places):
            raise
        raise RecipeError(
            f"{path.name} imports {error.name} of {path.parent}, but Python finds Samerun's own package {package} ({error}): "
            f"give yours another name, such as my_{package}"
        ) from error


def _is(file: str | None, path: Path) -> bool:
    return file is not None and Path(file).exists() and path.samefile(file)


def _sections(module: ModuleType, read: Any, path: Path) -> Any:
    """Build the file's own `Sections` with the values that were read. Raises RecipeError for what it refuses."""
    own = getattr(module, task_file.SECTIONS)
    try:
        built = {}
        for section in fields(read):
            values = getattr(read, section.name)
            made = _kind_of(own, section.name, module)
            built[section.name] = made(**{key.name: getattr(values, key.name) for key in fields(values)})
        return own(**built)
    except RecipeError:
        raise
    except (ValueError, TypeError, AssertionError) as error:
        raise RecipeError(f"{error} (says {path.name})") from error


def _kind_of(own: Any, section: str, module: ModuleType) -> Any:
    annotation = own.__annotations__[section]
    return getattr(module, annotation.strip("'\"")) if isinstance(annotation, str) else annotation
