"""From a YAML file and `key=value` overrides to a checked `Recipe`, and back.

The precedence stands in `load` and nowhere else: defaults < recipe file < command line. Every value remembers where it came
from, and all problems are reported at once, each with its key, its value, its origin and what would be right.

Standard library and PyYAML only: it runs on login nodes, in milliseconds.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from app import tasks
from app.errors import RecipeError, RunFolderError, did_you_mean
from app.files import hub, text_files
from app.recipe import task_file
from app.recipe.kinds import Kind, Problem, is_null, kinds_in, sections_in, shown
from app.recipe.schema import ALL_KEYS, ALTERNATIVES, Recipe, problems_of_mixture, sections_of
from app.runs import run_folder

SHIPPED = Path(__file__).parent / "shipped"
DEFAULT, _COMMAND_LINE = "default", "command line"
_OF_NO_SECTION = ("seed", "task")
_RENAMED = {"optim.cosine_steps": "optim.schedule_steps"}
"""Keys by their earlier names, which recipes and run folders can still have."""
_REMOVED = ("model.revision", "model.download")
"""Keys of an earlier version, which recipes and run folders can still have without a value."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and where each of its values came from."""

    recipe: Recipe
    name: str
    """Name of the shipped recipe, or of the file without its ending."""
    origins: Mapping[str, str]
    """For each key: `default`, `FILE:LINE` or `command line`."""
    notes: tuple[str, ...] = ()
    """Notes for the user, one sentence each."""

    @property
    def left_to_model(self) -> set[str]:
        """Keys that the recipe leaves out, and for which its model has values."""
        return {key for key in getattr(self.recipe.sections, "model_keys", ()) if self.origins[key] == DEFAULT}


# Keys, such as `seed` or `optim.lr`, from the dataclasses of `schema.py` and of the task -------------------------------------


@functools.cache
def sections(task: str) -> Mapping[str, type]:
    """Return the sections of a recipe for a task, its own first, and the dataclass of each."""
    return {**own_sections(task), **sections_in(Recipe)}


def own_sections(task: str) -> Mapping[str, type]:
    """Return the task's own sections, and the dataclass of each."""
    return sections_in(sections_of(task))


@functools.cache
def kinds(task: str) -> Mapping[str, Kind]:
    """Return the kind of every key of a recipe for a task, in the order of the sections."""
    common = kinds_in(Recipe)
    return {**{key: common[key] for key in _OF_NO_SECTION}, **kinds_in(sections_of(task)), **common}


@functools.cache
def marked(name: str, task: str) -> frozenset[str]:
    """Return the keys that the class variable `name` of their sections lists (see `schema.py`).

    `not_learnt` do not affect what is trained; `places` have the path of something whose fingerprint is compared.
    """
    found: set[str] = set()
    for section, cls in sections(task).items():
        listed = getattr(cls, name, ())
        found |= {f"{section}.{field.name}" for field in fields(cls) if listed == ALL_KEYS or field.name in listed}
    return frozenset(found)


def build(values: Mapping[str, Any]) -> Recipe:
    """Return a recipe with these values, by key, and defaults elsewhere. Raises RecipeError as `Recipe` does."""
    values = renamed(values)
    task = values.get("task", tasks.DEFAULT)
    top = {key: value for key, value in values.items() if "." not in key}
    own: dict[str, Any] = {}
    for section, cls in sections(task).items():
        prefix = f"{section}."
        built = cls(**{key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)})
        (own if section in own_sections(task) else top)[section] = built
    return Recipe(**top, sections=sections_of(task)(**own))


def flat(recipe: Recipe) -> dict[str, Any]:
    """Return every key with its value as plain JSON, lists instead of tuples: equal recipes give equal JSON."""
    values: dict[str, Any] = {}
    for key, kind in kinds(recipe.task).items():
        value = attrgetter(key)(recipe.sections if key.partition(".")[0] in own_sections(recipe.task) else recipe)
        if value is not None and value not in kind.words:
            if kind.pairs:
                value = [[kind.scalar(number) for number in pair] for pair in value]
            else:
                value = kind.scalar(value) if kind.length is None else [kind.scalar(element) for element in value]
        values[key] = value
    return values


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values by the keys of this version."""
    return {_RENAMED.get(key, key): value for key, value in values.items() if key not in _REMOVED or value}


def hub_places(recipe: Recipe) -> dict[str, str]:
    """Return the values `hub:...` of a recipe, which name models of the hub, by key."""
    values = flat(recipe)
    return {key: values[key] for key in sorted(marked("hub", recipe.task)) if hub.parsed(values[key])}


def with_places(recipe: Recipe, places: Mapping[str, str]) -> Recipe:
    """Return the recipe with other values of some keys of sections."""
    for key, value in places.items():
        section, _, name = key.partition(".")
        holder = recipe.sections if section in own_sections(recipe.task) else recipe
        changed = replace(holder, **{section: replace(getattr(holder, section), **{name: value})})
        recipe = changed if holder is recipe else replace(recipe, sections=changed)
    return recipe


def with_commits_of(recipe: Recipe, run_dir: str | None, resume: str | None) -> Recipe:
    """Return the recipe with the commits that the run to resume has recorded for its models of the hub.

    A branch can have moved since. Another name or revision keeps its value, which `check_same_run` then refuses.
    """
    places = hub_places(recipe)
    place = run_dir if resume in (None, "auto") else resume
    if not places or place is None or resume == "never":
        return recipe
    run = Path(place).absolute()
    run = run.parents[1] if run.parent.name == "checkpoints" else run  # the folder of a run, or of the run of a checkpoint
    try:
        recorded = hub_places(load(str(run / run_folder.RECIPE)).recipe)
    except RecipeError:  # no run yet, or a recipe of another version
        return recipe
    same = {key for key in places.keys() & recorded if hub.revision(places[key]) == hub.revision(recorded[key])}
    return with_places(recipe, {key: recorded[key] for key in same})


def _suggest(key: str, task: str) -> str:
    """Return what may have been meant by a key that does not exist."""
    known, (section, _, leaf) = list(kinds(task)), key.rpartition(".")
    if leaf.isdecimal():
        return "within braces a comma begins another key, so write a decimal number with a point, as in {lr: 0.1}"
    near = [*known, *sections(task)]
    have = "a recipe has " + ", ".join([*_OF_NO_SECTION, *sections(task)])
    if section in sections(task):
        have = f"{section} has " + ", ".join(one.partition(".")[2] for one in known if one.startswith(f"{section}."))
        near = [one for one in known if get_close_matches(leaf, [one.rpartition(".")[2]])]
    return meant(key, task) or did_you_mean(key, near, otherwise=have, cutoff=0.75)


def meant(name: str, task: str, options: Collection[str] = (), *, lead: str = "give") -> str:
    """Return what to give for the name of a key without its section, or of an option or key of another program, if it is known.

    `options` are the options of the command; `lead` stands before a `key=value`.
    """
    name = name.lstrip("-").lower().replace("-", "_")
    known, leaf = kinds(task), name.rpartition(".")[2]
    found = [
        hint
        for hint, names in other_programs().items()
        if not {name, leaf}.isdisjoint(names.split()) and {*re.findall(r"\b([a-z]+\.\w+)=", hint)} <= known.keys()
    ]
    of_command = [hint for hint in found if set(re.findall("--[a-z-]+", hint)) <= set(options)]
    hint = "" if name in known else next(iter(of_command or reversed(found)), "")
    if hint.startswith("--"):
        return f"give {hint}" if of_command else f"`samerun launch` has {hint}"
    if not hint:
        keys = [name] if name in known else [key for key in known if key.rpartition(".")[2] == leaf != "name"]
        hint = " or ".join(f"{key}={'true' if known[key].scalar is bool else '...'}" for key in keys[:3])
    return f"{lead} {hint}" if re.match(r"[a-z.]+[\w.]*=", hint) else hint


@functools.cache
def other_programs() -> dict[str, str]:
    """Return the names of options and keys of other programs, separated by spaces, by what to give for them."""
    return dict(re.findall("(.+) <- (.+)", Path(__file__).with_name("other_programs.txt").read_text()))


def meanings(task: str) -> dict[str, str]:
    """Return the text under each field of the sections' dataclasses, by key, on one line; and of each section, by its name."""
    texts = {**dict.fromkeys(kinds(task), ""), **{name: inspect.getdoc(cls) or "" for name, cls in sections(task).items()}}
    for prefix, cls in {"": Recipe, **{f"{section}.": cls for section, cls in sections(task).items()}}.items():
        found = getattr(cls, "__meanings__", None)  # read from a user's file
        if found is None:
            found = task_file.meanings(_class_nodes(cls.__module__)[cls.__name__])
        texts |= {prefix + name: text for name, text in found.items()}
    return texts


@functools.cache
def _class_nodes(module: str) -> dict[str, ast.ClassDef]:
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


# Files and the command line ------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """Names of the recipes that come with the package, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe: defaults < the recipe file < `key=value` overrides. A key may stand once in the file and once in those.

    Two keys of `recipe.ALTERNATIVES` say one thing in different units: one on the command line replaces the other in the file.
    Raises RecipeError with everything that is wrong, one problem a line.
    """
    path = text_files.find_yaml("recipe", name_or_path, SHIPPED, error=RecipeError)
    file = path.name if path.parent == SHIPPED else str(path)
    _, root = text_files.compose_yaml(path, name=file, error=RecipeError)
    task = _task(root, path, file, overrides)
    problems: list[str] = []
    in_file = _by_key(_entries(root, "", file, task, problems), task, problems)
    on_command_line = _by_key(_words(overrides, task, problems), task, problems)
    for one, other in (*ALTERNATIVES, *((other, one) for one, other in ALTERNATIVES)):
        if one in on_command_line and not is_null(on_command_line[one].node):
            in_file.pop(other, None)
    given = in_file | on_command_line
    values, unread = {}, set()
    for key, item in given.items():
        try:
            values[key] = kinds(task)[key].read(item.node)
        except ValueError as error:
            unread.add(key)
            hint = key in ("train.dtype", "optim.schedule") and meant(shown(item.node), task)
            problems.append(f"{key} is {shown(item.node)} ({item.origin}): {error}{f'; {hint}' if hint else ''}")
    values["task"] = task  # its absolute path
    origins = {key: given[key].origin if key in given else DEFAULT for key in kinds(task)}
    recipe = None
    try:
        recipe = build(values)
        if getattr(recipe.sections, "is_mixture", False) and (found := [*problems_of_mixture(recipe)]):
            raise RecipeError(*found)
    except RecipeError as error:
        # A key that could not be read has its default here, so a problem with its value may not be true.
        about = {problem: problem.keys if isinstance(problem, Problem) else () for problem in error.problems}
        problems += [_with_origins(problem, keys, origins) for problem, keys in about.items() if unread.isdisjoint(keys)]
    if problems or recipe is None:
        raise RecipeError(*problems, recipe=recipe if recipe and unread.isdisjoint(recipe.inputs) else None)
    name = path.stem
    with suppress(RunFolderError):  # a run's own recipe keeps its name
        name = str(run_folder.read_json(path.parent / run_folder.RUN).get("recipe", name))
    return LoadedRecipe(recipe, name, origins)


def completed(loaded: LoadedRecipe) -> LoadedRecipe:
    """Return a recipe in which keys that it leaves to its model have the model's values.

    A note names other values of the model. Imports the task, and with it torch, if there are such keys. Raises RecipeError.
    """
    left_out = loaded.left_to_model
    if not left_out:
        return loaded
    sections, origins, unlike = loaded.recipe.sections, dict(loaded.origins), []
    found, origin = tasks.of(loaded.recipe).model_defaults(left_out, loaded.recipe.train.init_from)
    for key, value in found.items():
        section, _, name = key.partition(".")
        if key in left_out:
            sections = replace(sections, **{section: replace(getattr(sections, section), **{name: value})})
            origins[key] = origin
        elif attrgetter(key)(sections) != value:
            unlike.append(f"{key}={_yaml([*value] if isinstance(value, tuple) else value)}")
    notes = (f"{origin} has {', '.join(unlike)}; the recipe sets other values",) * bool(unlike)
    return replace(loaded, recipe=replace(loaded.recipe, sections=sections), origins=origins, notes=notes)


def _with_origins(problem: str, keys: Sequence[str], origins: Mapping[str, str]) -> str:
    """Return a problem of these keys with the origins of their values."""
    found = {key: origins[key] for key in keys if origins[key] != DEFAULT}
    if len(set(found.values())) > 1:
        return f"{problem} ({', '.join(f'{key}: {origin}' for key, origin in found.items())})"
    return f"{problem} ({next(iter(found.values()))})" if found else problem


def replaced(overrides: Sequence[str], later: Sequence[str]) -> list[str]:
    """Return both lists of `key=value` as one, in which those of `later` take the place of the others for their keys."""
    keys_of_later = {word.partition("=")[0].strip() for word in later}
    return [*(word for word in overrides if word.partition("=")[0].strip() not in keys_of_later), *later]


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML, defaults included, that `load` reads back to an equal one."""
    return flat_to_yaml(flat(recipe))


def flat_to_yaml(values: Mapping[str, Any]) -> str:
    """The same for a recipe as `flat` returns it and a checkpoint contains it."""
    return "".join(f"{line}\n" for line, _ in _lines(values))


def render(loaded: LoadedRecipe) -> str:
    """Every key with its value and, as a comment, where the value came from: a recipe file again."""
    lines = _lines(flat(loaded.recipe))
    width = max(len(line) for line, _ in lines)
    return "".join(f"{line:{width}}  # {loaded.origins[key]}\n" if key else f"{line}\n" for line, key in lines)


def without_places(values: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return the keys and values of a recipe without its `places`, which may differ in a resumed run."""
    found, places = dict(values), marked("places", task)
    for key in places & found.keys():
        if isinstance(value := found.pop(key), list):
            found[key] = [{name: it for name, it in entry.items() if name != "path"} for entry in value]
    return found


def digest(recipe: Recipe) -> str:
    """SHA-256, in hexadecimal, of all that decides what is learnt; logging and bounds on memory do not."""
    ignored = marked("not_learnt", recipe.task)
    learnt = {key: value for key, value in flat(recipe).items() if key not in ignored}
    learnt |= {key: _content(key, learnt[key]) for key in marked("contents", recipe.task)}
    return _digest(learnt | {"task": task_file.name_of(recipe.task)})


def _content(key: str, file: str | None) -> str | None:
    """Return the hash of a file, or its name where it cannot be read: opening the data reports that."""
    try:
        return file and hashlib.sha256(Path(text_files.filled_in(key, file)).read_bytes()).hexdigest()
    except (OSError, ValueError, RecipeError):
        return file


def digest_of_all(recipe: Recipe) -> str:
    """SHA-256, in hexadecimal, of every value. Ranks that log or save at other steps would wait for each other for ever."""
    return _digest(flat(recipe))


def _digest(values: Mapping[str, Any]) -> str:
    # Keys within a value are in their own order: the first group of parameters that matches counts.
    return hashlib.sha256(json.dumps(dict(sorted(values.items()))).encode()).hexdigest()


def reference(task: str = tasks.DEFAULT, pattern: str = "", *, known: Collection[tuple[str, str]] = ()) -> str:
    """Return the keys of a recipe for a task, each with its default, its type and its meaning, as the dataclasses have it.

    Only keys with `pattern` in their name or meaning, and none of the keys with meanings that are `known`.
    """
    texts, blocks, section = meanings(task), [], ""
    for key, default in flat(build({"task": task})).items():
        if (key, texts[key]) in known or pattern.lower() not in f"{key} {texts[key]}".lower():
            continue
        if (head := key.rpartition(".")[0]) != section:
            section = head
            blocks.append(f"\n{section}: {texts[section]}")
        meaning = re.sub(r"\bNone\b", "null", texts[key])  # as YAML has it
        blocks.append(f"  {key}={_yaml(default)}  ({kinds(task)[key].describe()})\n      {meaning}")
    return "\n".join(blocks)


@dataclass(frozen=True)
class _Given:
    """A value as written in the file or on the command line."""

    node: yaml.Node
    origin: str


def _task(root: yaml.Node, path: Path, file: str, overrides: Sequence[str]) -> str:
    """Return the task that the command line or the file names, which decides which keys exist. Raises RecipeError.

    A file of the user's is seen from the folder of the recipe, or from the working directory if the command line names it.
    """
    named = [(tasks.DEFAULT, DEFAULT, path.parent)]
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if text_files.key_text(key) == "task" and isinstance(value, yaml.ScalarNode) and not is_null(value):
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


def _by_key(entries: Iterable[tuple[str, _Given]], task: str, problems: list[str]) -> dict[str, _Given]:
    """Return the values by key; add what is wrong with the keys to `problems`."""
    given: dict[str, _Given] = {}
    for name, item in entries:
        key = _RENAMED.get(name, name)
        if key in _REMOVED and shown(item.node) in ("null", "false"):
            continue
        if key in given:
            first, both = given[key], f"{shown(given[key].node)} and {shown(item.node)}"
            where = f"{first.origin} and {item.origin}" if item.origin != first.origin else f"{item.origin}: {both}"
            problems.append(f"{key} is given twice ({where}): keep one of them")
        elif key not in kinds(task) and key not in sections(task):
            problems.append(f"{key} ({item.origin}): there is no such key; {_suggest(key, task)}")
        given.setdefault(key, item)
    return {key: item for key, item in given.items() if key in kinds(task)}


def _entries(node: yaml.Node, section: str, file: str, task: str, problems: list[str]) -> Iterator[tuple[str, _Given]]:
    """Yield every key of a mapping and of its sections, each as often as it is there: PyYAML would keep the last only."""
    if section and is_null(node):
        return  # a section of which every line is a comment
    if not isinstance(node, yaml.MappingNode):
        holder = f"section {section}" if section else "the file"
        problems.append(f"{file}:{node.start_mark.line + 1}: {holder} is {shown(node)}: expected lines of `key: value`")
        return
    for key_node, value in node.value:
        name = text_files.key_text(key_node) or shown(key_node)
        key = f"{section}.{name}" if section else name
        yield key, _Given(value, f"{file}:{key_node.start_mark.line + 1}")
        if key in sections(task):
            yield from _entries(value, key, file, task, problems)


def _words(overrides: Sequence[str], task: str, problems: list[str]) -> Iterator[tuple[str, _Given]]:
    """Yield every `key=value` of the command line; other words are added to `problems`."""
    for word in overrides:
        key, equals, text = (part.strip() for part in word.partition("="))
        key = key.strip("'\"")  # a key in quotes is a key, as in a file
        if not equals or not key:
            problems.append(f"{word!r} ({_COMMAND_LINE}): expected key=value without spaces, as in optim.lr=0.1")
        elif not text:
            problems.append(f"{word!r} ({_COMMAND_LINE}): there is no value; give one, or {key}=null")
        elif key in sections(task):
            one = next(known for known in kinds(task) if known.startswith(f"{key}."))
            problems.append(f"{word!r} ({_COMMAND_LINE}): {key} is a section; give its keys one by one, as in {one}=...")
        else:
            is_mapping = key in kinds(task) and kinds(task)[key].scalar is dict
            yield key, _Given(_override_node(text, is_mapping=is_mapping), _COMMAND_LINE)


def _override_node(text: str, *, is_mapping: bool) -> yaml.Node:
    """Lists, mappings and quoted text are YAML; all else is taken unchanged, so that a path can contain `: ` or ` #`."""
    plain = yaml.ScalarNode("tag:yaml.org,2002:str", text)
    if not text.startswith(("[", '"', "'", *("{" * is_mapping))):
        return plain
    try:
        return text_files.composed(text) or plain
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


def _yaml(value: Any, *, is_quoted: bool = False) -> str:
    """Return a plain value as YAML on one line; with `is_quoted`, texts are always in quotes."""
    if isinstance(value, dict):  # where no type is known, a word such as 1e-3 is a number
        return f"{{{', '.join(f'{_yaml(name, is_quoted=True)}: {_yaml(it, is_quoted=True)}' for name, it in value.items())}}}"
    if isinstance(value, list) and not all(isinstance(it, str) for it in value):
        return f"[{', '.join(_yaml(it, is_quoted=is_quoted) for it in value)}]"
    # Quoted where `load` could take it for something else: `none` is null to it, but text to PyYAML.
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    is_word = all(re.fullmatch(r"[\w./-]+", text, re.ASCII) and text.lower() != "none" for text in texts)
    style = None if is_word and not (is_quoted and texts) else '"'
    text = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")
