"""Lists of runs: the combinations of a sweep, and the runner of `sweep`, `scale` and `parity`, one run after the other."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import yaml

from app.environment.slurm_variables import JOB
from app.errors import STOPPED, SamerunError, SubmitError, TopologyError, UsageError
from app.options import Parser
from app.recipe import kinds, recipe_file
from launch.run_module import program
from launch.start import resolved, supervise

_INDICES = (JOB.array_task_id, "PBS_ARRAY_INDEX")
_LONGEST_NAME = 120  # characters; file systems take 255


@dataclass(frozen=True)
class Combination:
    """Values of one run of a sweep."""

    overrides: tuple[str, ...]
    """`key=value` for the recipe."""
    name: str
    """Unique name for its run folder: `lr=0.2-seed=0`."""


def combinations(text: str, *, fixed: Sequence[str] = (), source: str = "--array") -> list[Combination]:
    """Return the combinations of a sweep in the order of their indices.

        optim.lr=0.1,0.2;seed=0,1     four combinations, of which the last key changes fastest
        model.channels=[8,16],[32,64] a comma within brackets or braces belongs to the value

    The same text gives the same combinations in the same order, before the queue and in every task of an array. `fixed` are the
    recipe values, `key=value`, that all runs have. `source` is for errors. Raises SubmitError with all that is wrong, one
    problem a line.
    """
    values: dict[str, list[str]] = {}
    problems = []
    for part in text.split(";"):
        key, equals, listed = (word.strip() for word in part.partition("="))
        choices = _choices(listed)
        values_of = {kinds.plain(yaml.ScalarNode("", choice)) for choice in choices}  # 1e-3 and 0.001 are one
        if not equals or not key or not all(choices) or key in values or len(values_of) < len(choices):
            example = "expected key=value,value, each key and value once, as in 'optim.lr=0.1,0.2;seed=0,1'"
            problems.append(f"{source} has {part!r}: {example}")
        values[key] = choices
    repeated = {word.partition("=")[0].strip() for word in fixed} & values.keys()
    problems += [f"{key} is given by {source} and by {key}=...: remove one of them" for key in sorted(repeated)]
    chosen = [dict(zip(values, choices, strict=True)) for choices in itertools.product(*values.values())]
    if not problems and len(chosen) < 2:  # PBS refuses an array of one
        problems.append(f"{source} is {text!r}, which is a single run: give its values as key=value, without --array")
    if problems:
        raise SubmitError("\n".join(problems))
    names = list(map(_name, chosen))
    if len({name.casefold() for name in names}) < len(names):
        names = [f"{index}-{name}" for index, name in enumerate(names)]
    overrides = [tuple(f"{key}={value}" for key, value in each.items()) for each in chosen]
    return list(map(Combination, overrides, names))


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


def _name(chosen: Mapping[str, str]) -> str:
    """Return keys and values without characters that are awkward in a path; a key's section only where two keys need it."""
    leaves = [key.rpartition(".")[2] for key in chosen]
    names = [key if leaves.count(leaf) > 1 else leaf for key, leaf in zip(chosen, leaves, strict=True)]
    values = [re.sub(r"[^A-Za-z0-9.+-]+", "_", value).strip("_") for value in chosen.values()]
    return "-".join(f"{name}={value}" for name, value in zip(names, values, strict=True))[:_LONGEST_NAME]


def array_task(text: str, environment: Mapping[str, str]) -> tuple[int, Combination]:
    """Return the index and the combination of this task of a job array. Raises TopologyError outside an array."""
    all_combinations = combinations(text)
    index = next((environment[name] for name in _INDICES if name in environment), "")
    if not index.isdecimal() or int(index) >= len(all_combinations):
        raise TopologyError(
            f"the index of the array ({' or '.join(_INDICES)}) is {index!r}, but the sweep {text!r} has the indices 0 to "
            f"{len(all_combinations) - 1}: this command belongs in the script of a job array written by `samerun submit`"
        )
    return int(index), all_combinations[int(index)]


@dataclass(frozen=True)
class RunCase:
    """One run of a list."""

    name: str
    """In messages."""
    run_dir: Path
    argv: list[str]
    """Arguments of `samerun launch`, with --run-dir."""

    @property
    def is_finished(self) -> bool:
        """True if an earlier attempt at the list has finished this run."""
        return (self.run_dir / "result.json").exists()

    @property
    def log(self) -> Path:
        """File with the output of a logged case, next to its run folder."""
        return self.run_dir.parent / f"{self.run_dir.name}.log"


def problems(case: RunCase, environment: Mapping[str, str]) -> list[str]:
    """Return what is wrong with a case before it runs, for example that it was finished with another recipe."""
    try:
        checked = resolved.checked(case.argv, environment)
        if checked.is_task:
            return ["srun started this command: leave out srun, because each run starts its own processes"]
        if not case.is_finished:
            return []
        loaded, recipe = checked.loaded, checked.loaded.recipe
        before, now = map(recipe_file.flat, (recipe_file.load(str(case.run_dir / "recipe.yaml")).recipe, recipe))
    except SamerunError as error:
        return str(error).splitlines()
    before, now = (recipe_file.without_places(values, recipe.task) for values in (before, now))
    may_differ = recipe_file.marked("not_learnt", recipe.task) | loaded.left_to_model
    differing = [key for key in now if key not in may_differ and before.get(key) != now[key]]
    which = ", ".join(f"{key} is {before.get(key)} there and {now[key]} here" for key in differing)
    return [f"{case.run_dir} holds a finished run of another recipe, {which}: choose another folder"] if differing else []


def grouped(problems: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the problems of several runs, by the runs' names, each once and with the names, unless all runs have it."""
    names: dict[str, list[str]] = {}
    for name, found in problems.items():
        for problem in found:
            names.setdefault(problem, []).append(name)
    return [text if len(runs) == len(problems) else f"{text} ({'; '.join(runs)})" for text, runs in names.items()]


def run(
    cases: Sequence[RunCase],
    environment: Mapping[str, str],
    *,
    say: Callable[[str], None],
    command: Sequence[str],
    logged: bool = False,
) -> tuple[int | None, dict[str, int]]:
    """Run the cases that are not finished.

    Return the exit code if they were stopped, by a signal for instance, and the exit code of each failed case by its name.
    `command` continues the list. The output of a `logged` case goes to its log.
    """
    failed: dict[str, int] = {}
    for number, case in enumerate(cases, 1):
        which = f"run {number} of {len(cases)}, {case.name}"
        if case.is_finished:
            say(f"{which}: finished already, {case.run_dir}")
            continue
        say(f"{which}: {case.run_dir}")
        launching = [*program("launch.cli"), "launch", *case.argv]
        with case.log.open("wb") if logged else nullcontext() as log:
            ending = supervise.run(launching, environment, output=log)
        if ending.signals or (ending.exit_code in (0, STOPPED) and not case.is_finished):
            done = sum(case.is_finished for case in cases)
            say(f"stopped, with {done} of {len(cases)} runs finished. To continue: {shlex.join(command)}")
            return ending.exit_code or STOPPED, failed
        if ending.exit_code:
            failed[case.name] = ending.exit_code
    if failed:
        listed = ", ".join(f"{name} (exit code {code})" for name, code in failed.items())
        say(f"{len(failed)} of {len(cases)} runs failed: {listed}. The same command runs these again")
    return None, failed


def sweep(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run `samerun sweep` with these arguments and return its exit code: the first failed run's, if one failed.

    A key with several values is swept, as in `samerun submit --array`; everything else is given to each run, which is an
    ordinary `samerun launch`. The same command again resumes the sweep. Raises SamerunError with everything that is wrong,
    before the first run.
    """
    parser = Parser("sweep", "Train every combination of some recipe values, one run after the other, each as `samerun "
        "launch` does, whose options it takes; then print a table of the runs and plot their curves. The same command resumes "
        "a sweep that was stopped.", usage="%(prog)s [options] key=value,value ... [key=value ...]",
        epilog="Keys with several values are swept: `samerun sweep optim.lr=1e-3,3e-3 seed=1,2 train.epochs=5` starts four "
        "runs. A comma within brackets or braces belongs to the value. `samerun submit --array` takes the same for jobs: "
        "'optim.lr=1e-3,3e-3;seed=1,2'. A failed run does not end the others.")  # fmt: skip
    parser.add_argument("--run-dir", metavar="PATH", help="folder of the run folders, each named by what differs (default: "
                        "runs/<recipe>-sweep)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="check like `samerun launch --dry-run`, print commands and stop")
    options, words = parser.parse_known_args(argv)
    launching, _, training = resolved.read(words)
    swept = [word for word in training.overrides if len(_choices(word.partition("=")[2])) > 1]
    if not swept:
        raise UsageError(
            f"no key has several values in {shlex.join(training.overrides)!r}: separate values by commas without spaces, such "
            "as optim.lr=1e-3,3e-3; for a single run use `samerun launch`"
        )
    try:
        fixed = [word for word in training.overrides if word not in swept]
        chosen = combinations(";".join(swept), fixed=fixed, source="the sweep")
    except SubmitError as error:
        raise UsageError(str(error)) from error
    folder = Path(options.run_dir or Path("runs", f"{Path(launching.recipe).stem}-sweep"))
    common = [word for word in words if word not in swept]
    runs = [
        RunCase(" ".join(it.overrides), path := folder / it.name, ["--run-dir", str(path), *common, *it.overrides])
        for it in chosen
    ]
    if found := grouped({case.name: problems(case, environment) for case in runs}):
        raise UsageError("\n".join(found))
    if options.dry_run:
        sys.stdout.writelines(f"{shlex.join(['samerun', 'launch', *case.argv])}\n" for case in runs)
        return 0
    say(f"{len(runs)} runs, one after the other, in {folder}")
    stopped, failed = run(runs, environment, say=say, command=["samerun", "sweep", *argv])
    if stopped is not None:
        return stopped
    run_dirs = [str(case.run_dir) for case in runs if case.run_dir.exists()]
    for command in (["runs", *run_dirs], ["curves", "--out", str(folder), *run_dirs]):
        subprocess.run([*program("launch.cli"), *command], check=False)  # it reports its own errors
    return next(iter(failed.values()), 0)
