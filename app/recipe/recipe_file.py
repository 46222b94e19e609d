"""From a YAML file and `key=value` overrides to a checked `Recipe`, and back.

The precedence stands in `load` and nowhere else: defaults < recipe file < command line. Every value remembers where it came
from, and all problems are reported at once, each with its key, its value, its origin and what would be right.

Standard library and PyYAML only: it runs on login nodes, in milliseconds.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from app import tasks
from app.errors import RecipeError
from app.files import paths, yaml_text
from app.recipe import recipe_keys as keys
from app.recipe import task_file
from app.recipe.recipe_keys import flat
from app.recipe.schema import ALTERNATIVES, Recipe, sections_of

SHIPPED = Path(__file__).parent / "shipped"
DEFAULT, _COMMAND_LINE = "default", "command line"


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and where each of its values came from."""

    recipe: Recipe
    name: str
    """Name of the shipped recipe, or of the file without its ending."""
    origins: Mapping[str, str]
    """For each key: `default`, `FILE:LINE` or `command line`."""


def names() -> list[str]:
    """Names of the recipes that come with the package, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe: defaults < the recipe file < `key=value` overrides. A key may stand once in the file and once in those.

    Two keys of `recipe.ALTERNATIVES` say one thing in different units: one on the command line replaces the other in the file.
    Raises RecipeError with everything that is wrong, one problem a line.
    """
    path = _find(name_or_path)
    file = path.name if path.parent == SHIPPED else str(path)
    _, root = yaml_text.compose(path, name=file, error=RecipeError)
    task = _task(root, path, file, overrides)
    problems: list[str] = []
    in_file, on_command_line = _read_file(root, file, task, problems), _read_overrides(overrides, task, problems)
    for one, other in (*ALTERNATIVES, *((other, one) for one, other in ALTERNATIVES)):
        if one in on_command_line and not keys.is_null(on_command_line[one].node):
            in_file.pop(other, None)
    recipe, origins = _check(in_file | on_command_line, task, problems)
    return LoadedRecipe(recipe, path.stem, origins)


def replaced(overrides: Sequence[str], later: Sequence[str]) -> list[str]:
    """Return both lists of `key=value` as one, in which those of `later` take the place of the others for their keys."""
    keys_of_later = {word.partition("=")[0].strip() for word in later}
    return [*(word for word in overrides if word.partition("=")[0].strip() not in keys_of_later), *later]


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as nested plain dicts, with tuples as lists: what JSON and YAML can hold."""
    nested: dict[str, Any] = {}
    for key, value in flat(recipe).items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return nested


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML, defaults included, that `load` reads back to an equal one."""
    return flat_to_yaml(flat(recipe))


def flat_to_yaml(values: Mapping[str, Any]) -> str:
    """The same of a recipe as `flat` gives it, and a checkpoint keeps it."""
    return "".join(f"{line}\n" for line, _ in _lines(values))


def render(loaded: LoadedRecipe) -> str:
    """Every key with its value and, as a comment, where the value came from: a recipe file again."""
    lines = _lines(flat(loaded.recipe))
    width = max(len(line) for line, _ in lines)
    return "".join(f"{line:{width}}  # {loaded.origins[key]}\n" if key else f"{line}\n" for line, key in lines)


def digest(recipe: Recipe) -> str:
    """SHA-256, in hexadecimal, of all that decides what is learnt; logging and bounds on memory do not."""
    not_learnt = keys.not_learnt(recipe.task)
    learnt = {key: value for key, value in flat(recipe).items() if key not in not_learnt}
    learnt |= {key: _content(key, learnt[key]) for key in keys.contents(recipe.task)}
    return _digest(learnt | {"task": task_file.name_of(recipe.task)})


def _content(key: str, file: str | None) -> str | None:
    """Return the hash of a file, or its name where it cannot be read, which whoever needs it says."""
    try:
        return file and hashlib.sha256(Path(paths.filled_in(key, file)).read_bytes()).hexdigest()
    except (OSError, ValueError, RecipeError):
        return file


def digest_of_all(recipe: Recipe) -> str:
    """SHA-256, in hexadecimal, of every value. Ranks that log or save at other steps would wait for each other for ever."""
    return _digest(flat(recipe))


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def reference(task: str = tasks.DEFAULT) -> str:
    """Every key of a recipe for a task with its default, its type and its meaning, as the dataclasses say it."""
    meanings, blocks, section = keys.meanings(task), [], ""
    for key, default in flat(keys.build({"task": task})).items():
        if (head := key.rpartition(".")[0]) != section:
            section = head
            blocks.append(f"\n{section}: {meanings[section]}")
        blocks.append(f"  {key}={_yaml(default)}  ({keys.kinds(task)[key].describe()})\n      {meanings[key]}")
    return "\n".join(blocks)


@dataclass(frozen=True)
class _Given:
    """A value as somebody wrote it."""

    node: yaml.Node
    origin: str


def _task(root: yaml.Node, path: Path, file: str, overrides: Sequence[str]) -> str:
    """The task that the command line or the file names, which decides the keys that there are. Raises RecipeError.

    A file of the user's is seen from the folder of the recipe, or from the working directory if the command line names it.
    """
    named = [(tasks.DEFAULT, DEFAULT, path.parent)]
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if yaml_text.key_text(key) == "task" and isinstance(value, yaml.ScalarNode) and not keys.is_null(value):
            named.append((value.value, f"{file}:{key.start_mark.line + 1}", path.parent))
    for word in overrides:
        key, _, text = (part.strip(" '\"") for part in word.partition("="))
        named += [(text, _COMMAND_LINE, Path())] if key == "task" and text else []
    task, origin, folder = named[-1]
    if task_file.is_own(task):
        task = task_file.located(task, folder)
    try:
        sections_of(task)
    except RecipeError as error:
        raise RecipeError(f"{error} ({origin})") from None
    return task


def _check(given: Mapping[str, _Given], task: str, problems: list[str]) -> tuple[Recipe, dict[str, str]]:
    """Read every value as its type and build the recipe. Raises RecipeError with `problems` and all that it finds itself."""
    problems, values, broken = list(problems), {}, set()
    origins = {key: given[key].origin if key in given else DEFAULT for key in keys.kinds(task)}
    for key, item in given.items():
        kind = keys.kinds(task)[key]
        try:
            values[key] = kind.read(item.node)
        except ValueError:
            broken.add(key)
            quoted = isinstance(item.node, yaml.ScalarNode) and not keys.is_plain(item.node) and kind.scalar is not str
            expected = f"{kind.describe()}{', without quotes' if quoted else ''}"
            problems.append(f"{key} is {keys.shown(item.node)} ({item.origin}): expected {expected}")
    values["task"] = task  # its absolute path
    try:
        recipe = keys.build(values)
    except RecipeError as error:
        # A key that could not be read stands at its default here, so what is said about it may not be true.
        problems += [_with_origins(text, origins) for text in error.problems if broken.isdisjoint(_keys_in(text, origins))]
    if problems:
        raise RecipeError(*problems)
    return recipe, origins


def _keys_in(text: str, known: Collection[str]) -> list[str]:
    return [word for word in re.findall(r"\w+(?:\.\w+)*", text) if word in known]


def _with_origins(problem: str, origins: Mapping[str, str]) -> str:
    """The problem, with where the values it speaks of came from."""
    found = {key: origins[key] for key in _keys_in(problem, origins) if origins[key] != DEFAULT}
    if len(set(found.values())) > 1:
        return f"{problem} ({', '.join(f'{key}: {origin}' for key, origin in found.items())})"
    return f"{problem} ({next(iter(found.values()))})" if found else problem


def _find(name_or_path: str) -> Path:
    """The file of a shipped name or of a path; a shipped name goes before a file of that name."""
    path = Path(name_or_path)
    if name_or_path in names():
        return SHIPPED / f"{name_or_path}.yaml"
    if path.is_dir():
        raise RecipeError(f"recipe {name_or_path}: that is a folder; give a YAML file or one of {', '.join(names())}")
    if path.exists():
        return path
    what = "there is no such file" if path.suffix or len(path.parts) > 1 else "there is no recipe and no file of that name"
    close = difflib.get_close_matches(path.stem, names(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise RecipeError(f"recipe {name_or_path}: {what}; {hint}the package has {', '.join(names())}")


def _read_file(root: yaml.Node, file: str, task: str, problems: list[str]) -> dict[str, _Given]:
    """Every value of a recipe file by its key; what is wrong with the keys is added to `problems`."""
    if keys.is_null(root) or (isinstance(root, yaml.MappingNode) and not root.value):
        raise RecipeError(f"{file}: the file is empty: a recipe holds lines of `key: value`, such as `seed: 0`")
    given: dict[str, _Given] = {}
    seen: dict[str, str] = {}
    for key, item in _entries(root, "", file, keys.sections(task), problems):
        if key in seen:
            problems.append(f"{key} is given twice ({seen[key]} and {item.origin}): keep one of them")
        elif key in keys.kinds(task):
            given[key] = item
        elif key not in keys.sections(task):
            problems.append(f"{key} ({item.origin}): there is no such key; {keys.suggest(key, task)}")
        seen.setdefault(key, item.origin)
    return given


def _entries(
    node: yaml.Node | None, section: str, file: str, sections: Collection[str], problems: list[str]
) -> Iterator[tuple[str, _Given]]:
    """Every key of a mapping, of its sections too, and as often as it stands there: PyYAML itself would keep the last only."""
    if node is None or keys.is_null(node):
        return  # an empty file, or a section of which every line is a comment
    if not isinstance(node, yaml.MappingNode):
        holder = f"section {section}" if section else "the file"
        problems.append(f"{file}:{node.start_mark.line + 1}: {holder} is {keys.shown(node)}: expected lines of `key: value`")
        return
    for key_node, value in node.value:
        name, line = yaml_text.key_text(key_node), key_node.start_mark.line + 1
        if name is None:
            problems.append(f"{file}:{line}: a key is {keys.shown(key_node)}: expected one word before the colon")
            continue
        if name == "<<":
            problems.append(f"{file}:{line}: << merges another mapping, which recipes do not support: write its keys here")
            continue
        key = f"{section}.{name}" if section else name
        yield key, _Given(value, f"{file}:{line}")
        if key in sections:
            yield from _entries(value, key, file, sections, problems)


def _read_overrides(overrides: Sequence[str], task: str, problems: list[str]) -> dict[str, _Given]:
    """Every value of the command line by its key; what is wrong with the keys is added to `problems`."""
    given: dict[str, _Given] = {}
    for override in _joined(overrides, problems):
        key, equals, text = (part.strip() for part in override.partition("="))
        key = key.strip("'\"")  # a key in quotes is a key, as in a file
        if not equals:
            problems.append(f"{override!r} ({_COMMAND_LINE}): expected key=value, as in optim.lr=0.1")
        elif key in keys.sections(task):
            one = next(known for known in keys.kinds(task) if known.startswith(f"{key}."))
            problems.append(f"{override!r} ({_COMMAND_LINE}): {key} is a section; give its keys one by one, as in {one}=...")
        elif key not in keys.kinds(task):
            problems.append(f"{key} ({_COMMAND_LINE}): there is no such key; {keys.suggest(key, task)}")
        elif key in given:
            both = f"{keys.shown(given[key].node)} and {text}"
            problems.append(f"{key} is given twice ({_COMMAND_LINE}: {both}): keep one of them")
        else:
            given[key] = _Given(_override_node(text), _COMMAND_LINE)
    return given


def _joined(overrides: Sequence[str], problems: list[str]) -> Iterator[str]:
    """The words, but for those of a `key = value` with spaces, which is added to `problems` as one."""
    words = list(overrides)
    while words:
        word = words.pop(0)
        apart = [word]
        if words and (words[0].startswith("=") or ("=" not in word[:-1] and word.endswith("=") and "=" not in words[0])):
            apart.append(words.pop(0))
            if apart[-1] == "=" and words and "=" not in words[0]:
                apart.append(words.pop(0))
        if len(apart) == 1:
            yield word
        else:
            problems.append(f"{' '.join(apart)!r} ({_COMMAND_LINE}) contains spaces: write {''.join(apart)}")


def _override_node(text: str) -> yaml.Node:
    """Lists and quoted text are YAML; all else is taken as it stands, so that a path may hold `: ` or ` #`."""
    plain = yaml.ScalarNode("tag:yaml.org,2002:str", text)
    if not text.startswith(("[", '"', "'")):
        return plain
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader) or plain
    except yaml.YAMLError:
        return plain  # not YAML after all: the type of the key decides whether that is right


def _lines(values: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """The recipe's YAML, line by line, each with its key (None: the line opens a section)."""
    lines: list[tuple[str, str | None]] = []
    section = ""
    for key, value in values.items():
        head, _, name = key.rpartition(".")
        if head != section:
            section = head
            lines.append((f"{head}:", None))
        lines.append((f"{'  ' if head else ''}{name}: {_yaml(value)}", key))
    return lines


def _yaml(value: Any) -> str:
    """A plain value as YAML on one line."""
    # Quoted where `load` could take it for something else: `none` is null to it, but text to PyYAML.
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    is_word = all(re.fullmatch(r"[\w./-]+", text, re.ASCII) and text.lower() != "none" for text in texts)
    text = yaml.safe_dump(value, default_flow_style=True, default_style=None if is_word else '"', width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")
