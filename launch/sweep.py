"""`samerun sweep optim.lr=1e-3,3e-3 seed=1,2 ...`: every combination of a few recipe values, one run after the other.

A key with several values is swept, as in `samerun submit --array`; everything else is given to each run, which is an ordinary
`samerun launch` with a run folder of its own. The same command again resumes the sweep: it skips runs that are finished.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from app.errors import SubmitError, UsageError
from app.options import Parser
from launch import cases
from launch.cases import RunCase
from launch.run_module import program
from launch.start import launch
from launch.submit import array


def sweep(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run `samerun sweep` with these arguments and return its exit code: that of the first run that failed, if one did.

    Raises SamerunError with everything that is wrong, before the first run.
    """
    parser = _parser()
    options, words = parser.parse_known_args(argv)
    parser.refuse_empty(options)
    launching, _, training = launch.read(words)
    swept = [word for word in training.overrides if array.has_several(word)]
    if not swept:
        raise UsageError(
            "no key has several values: give one, such as optim.lr=1e-3,3e-3; for a single run use `samerun launch`"
        )
    if launching.explain:
        raise UsageError("--explain is for one run: `samerun sweep --dry-run` prints the command of each")
    try:
        fixed = [word for word in training.overrides if word not in swept]
        combinations = array.parse(";".join(swept), fixed=fixed, source="the sweep")
    except SubmitError as error:
        raise UsageError(str(error)) from error
    folder = Path(options.run_dir or Path("runs", f"{Path(launching.recipe or 'digits').stem}-sweep"))
    common = [word for word in words if word not in swept]
    runs = [
        RunCase(" ".join(it.overrides), path := folder / it.name, ["--run-dir", str(path), *common, *it.overrides])
        for it in combinations
    ]
    problems: dict[str, list[str]] = {}
    for run in runs:
        for problem in cases.problems(run, environment):
            problems.setdefault(problem, []).append(run.name)
    if problems:
        raise UsageError(
            "\n".join(
                problem if len(names) == len(runs) else f"{problem} ({'; '.join(names)})" for problem, names in problems.items()
            )
        )
    if options.dry_run:
        sys.stdout.writelines(f"{shlex.join(['samerun', 'launch', *run.argv])}\n" for run in runs)
        return 0
    say(f"{len(runs)} runs, one after the other, in {folder}")
    stopped, failed = cases.run(runs, environment, say=say, command=["samerun", "sweep", *argv])
    if stopped is not None:
        return stopped
    run_dirs = [str(run.run_dir) for run in runs if run.run_dir.exists()]
    for command in (["runs", *run_dirs], ["curves", "--out", str(folder), *run_dirs]):
        subprocess.run([*program("launch.cli"), *command], check=False)  # it reports its own errors
    return next(iter(failed.values()), 0)


def _parser() -> Parser:
    parser = Parser(
        prog="samerun sweep",
        usage="%(prog)s [options] [options of samerun launch] key=value,value ... [key=value ...]",
        description="Train every combination of some recipe values, one run after the other, each as `samerun launch` does; "
        "then print a table of the runs and plot their curves. The same command resumes a sweep that was stopped.",
        epilog="Keys with several values are swept: `samerun sweep optim.lr=1e-3,3e-3 seed=1,2 train.epochs=5` starts four "
        "runs. A comma within brackets or braces belongs to the value. `samerun submit --array` takes the same for jobs: "
        "'optim.lr=1e-3,3e-3;seed=1,2'. A failed run does not end the others.",
    )
    parser.add_argument("--run-dir", metavar="D", help="folder of the run folders, each named by what differs (default: "
                        "runs/<recipe>-sweep)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the command of each run and stop")
    return parser
