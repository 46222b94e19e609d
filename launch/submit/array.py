"""A sweep: every combination of a few recipe values, one for each task of a job array, or one run after the other.

    optim.lr=0.1,0.2;seed=0,1     four combinations, of which the last key changes fastest
    model.channels=[8,16],[32,64] a comma within brackets or braces belongs to the value

The same text gives the same combinations in the same order, before the queue and in every task. Pure; standard library only.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.environment.slurm_variables import JOB
from app.errors import SubmitError, TopologyError

_INDICES = (JOB.array_task_id, "PBS_ARRAY_INDEX")
_LONGEST_NAME = 120  # characters; file systems take 255
_CONSTANTS = ("true", "false", "null", "yes", "no", "on", "off")  # of YAML, in any case


@dataclass(frozen=True)
class Combination:
    """What one run trains, a task of the array."""

    overrides: tuple[str, ...]
    """`key=value` for the recipe."""
    folder: str
    """Name of its run folder, different for each: `2-lr=0.2-seed=0`, its index first."""
    name: str
    """The same without the index, where it is different for each so."""


def parse(text: str, *, fixed: Sequence[str] = (), said_by: str = "--array") -> list[Combination]:
    """Return the combinations in the order of their indices. Raises SubmitError with all that is wrong, one problem a line.

    `fixed` are the recipe values, `key=value`, that all runs have. `said_by` is for errors.
    """
    values, problems = _values(text, said_by)
    given = {word.partition("=")[0].strip() for word in fixed}
    problems += [f"{key} is given by {said_by} and by {key}=...: remove one of them" for key in sorted(given & values.keys())]
    if not problems and len(list(itertools.product(*values.values()))) < 2:  # PBS refuses an array of one
        problems.append(f"{said_by} is {text!r}, which is a single run: give its values as key=value, without --array")
    if problems:
        raise SubmitError("\n".join(problems))
    combinations = list(itertools.product(*values.values()))
    width = len(str(len(combinations) - 1))
    each = [dict(zip(values, combination, strict=True)) for combination in combinations]
    names = list(map(_name, each))
    folders = [f"{index:0{width}}-{name}" for index, name in enumerate(names)]
    words = [tuple(f"{key}={value}" for key, value in one.items()) for one in each]
    return list(map(Combination, words, folders, names if len({name.casefold() for name in names}) == len(names) else folders))


def has_several(word: str) -> bool:
    """Return whether a `key=value` gives a key several values."""
    return len(_choices(word.partition("=")[2])) > 1


def _choices(text: str) -> list[str]:
    """Return the values between commas. A comma within brackets or braces belongs to a value."""
    choices, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth <= 0:
            choices.append("")
        else:
            choices[-1] += character
    return [choice.strip() for choice in choices]


def chosen(text: str, environment: Mapping[str, str]) -> tuple[int, Combination]:
    """Return the combination of the array task that `environment` is in, with its index. Raises TopologyError elsewhere."""
    combinations = parse(text)
    name = next((name for name in _INDICES if name in environment), None)
    if name is None:
        raise TopologyError(
            f"none of {', '.join(_INDICES)} is set: this command belongs in the script of a job array written "
            "by `samerun submit`"
        )
    index = environment[name]
    if not index.isdecimal() or int(index) >= len(combinations):
        raise TopologyError(
            f"{name} is {index!r}, but the sweep {text!r} has {len(combinations)} combinations: "
            f"submit the array with the indices 0 to {len(combinations) - 1}"
        )
    return int(index), combinations[int(index)]


def _values(text: str, said_by: str) -> tuple[dict[str, list[str]], list[str]]:
    """The values of each key, and what is wrong with them."""
    values: dict[str, list[str]] = {}
    problems = []
    for part in text.split(";"):
        key, equals, listed = (word.strip() for word in part.partition("="))
        choices = _choices(listed)
        if not equals or not key or not all(choices):
            problems.append(f"{said_by} has {part!r}: expected key=value,value, as in 'optim.lr=0.1,0.2;seed=0,1'")
        elif key in values:
            problems.append(f"{said_by} has {key} twice: give all its values in one list")
        elif len(set(map(_value, choices))) < len(choices):
            problems.append(f"{said_by} has {part!r}: a value is given twice, and both runs would be the same")
        else:
            values[key] = choices
    return values, problems


def _value(text: str) -> str:
    """The same text for the same value: 1e-3 and 0.001, a list with and without spaces, true and True."""
    try:
        return repr(float(text))
    except ValueError:
        return text.lower() if text.lower() in _CONSTANTS else re.sub(r"\s*([\[\]{},])\s*", r"\1", text)


def _name(chosen: Mapping[str, str]) -> str:
    """Key and value of each, without what is awkward in a path; the section of a key only where two keys need it."""
    leaves = [key.rpartition(".")[2] for key in chosen]
    names = [key if leaves.count(leaf) > 1 else leaf for key, leaf in zip(chosen, leaves, strict=True)]
    values = [re.sub(r"[^A-Za-z0-9.+-]+", "_", value).strip("_") for value in chosen.values()]
    return "-".join(f"{name}={value}" for name, value in zip(names, values, strict=True))[:_LONGEST_NAME]
