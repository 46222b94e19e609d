"""Sweeps: every combination of a few recipe values, one for each task of a job array, or one run after the other.

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
    """Values of one run: a task of the array."""

    overrides: tuple[str, ...]
    """`key=value` for the recipe."""
    folder: str
    """Unique name for its run folder, which begins with its index: `2-lr=0.2-seed=0`."""
    name: str
    """The same without the index, if the names are unique without it."""


def parse(text: str, *, fixed: Sequence[str] = (), source: str = "--array") -> list[Combination]:
    """Return the combinations in the order of their indices. Raises SubmitError with all that is wrong, one problem a line.

    `fixed` are the recipe values, `key=value`, that all runs have. `source` is for errors.
    """
    values: dict[str, list[str]] = {}
    problems = []
    for part in text.split(";"):
        key, equals, listed = (word.strip() for word in part.partition("="))
        choices = _choices(listed)
        if not equals or not key or not all(choices):
            problems.append(f"{source} has {part!r}: expected key=value,value, as in 'optim.lr=0.1,0.2;seed=0,1'")
        elif key in values:
            problems.append(f"{source} has {key} twice: give all its values in one list")
        elif len(set(map(_normalized, choices))) < len(choices):
            problems.append(f"{source} has {part!r}: a value is given twice, and both runs would be the same")
        else:
            values[key] = choices
    repeated = {word.partition("=")[0].strip() for word in fixed} & values.keys()
    problems += [f"{key} is given by {source} and by {key}=...: remove one of them" for key in sorted(repeated)]
    combinations = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    if not problems and len(combinations) < 2:  # PBS refuses an array of one
        problems.append(f"{source} is {text!r}, which is a single run: give its values as key=value, without --array")
    if problems:
        raise SubmitError("\n".join(problems))
    width = len(str(len(combinations) - 1))
    names = list(map(_name, combinations))
    folders = [f"{index:0{width}}-{name}" for index, name in enumerate(names)]
    overrides = [tuple(f"{key}={value}" for key, value in combination.items()) for combination in combinations]
    are_distinct = len({name.casefold() for name in names}) == len(names)
    return list(map(Combination, overrides, folders, names if are_distinct else folders))


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
    """Return the index and the combination of this task of the array. Raises TopologyError outside an array."""
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


def _normalized(text: str) -> str:
    """Return the same text for equal values: 1e-3 and 0.001, a list with and without spaces, true and True."""
    try:
        return repr(float(text))
    except ValueError:
        return text.lower() if text.lower() in _CONSTANTS else re.sub(r"\s*([\[\]{},])\s*", r"\1", text)


def _name(chosen: Mapping[str, str]) -> str:
    """Return keys and values without characters that are awkward in a path; a key's section only where two keys need it."""
    leaves = [key.rpartition(".")[2] for key in chosen]
    names = [key if leaves.count(leaf) > 1 else leaf for key, leaf in zip(chosen, leaves, strict=True)]
    values = [re.sub(r"[^A-Za-z0-9.+-]+", "_", value).strip("_") for value in chosen.values()]
    return "-".join(f"{name}={value}" for name, value in zip(names, values, strict=True))[:_LONGEST_NAME]
