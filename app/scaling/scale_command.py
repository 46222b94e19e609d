"""`samerun scale`: how a recipe scales over devices and nodes, measured by real runs and fitted.

    samerun scale --recipe R --presets multi_gpu,deepspeed_zero2 --processes 1,2,4 --out DIR     run what is missing, and report
    samerun scale ... --nodes 1,2                in an allocation of two nodes, or
    samerun scale ... --submit='--time 00:20:00' as one job per case; the same command later collects them
    samerun scale --from DIR                     report what a folder holds, which may come from another machine
    samerun scale --from TIMES.csv               the same report and fit from times that are known

Finished cases are kept, so an interrupted sweep goes on by the same command; one that failed stays a row that says why, until
--retry-failed.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.errors import RunFolderError
from app.options.command_line import Parser
from app.options.values import names, numbers, positive, share
from app.place import cores
from app.recipe import recipe_file
from app.record import run_folder
from app.scaling import figures, report, running, sweep
from app.scaling.advice import advise
from app.scaling.figures import Row
from app.scaling.report import Report
from app.scaling.running import Attempt
from app.scaling.sweep import Case, Folder, Size, Sweep
from app.tools.parity import refuse_own_keys
from launch import preset as presets

_INTERRUPTED = 128 + signal.SIGINT
"""Exit code, as shells have it."""


def main(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run `samerun scale` with these arguments; 0 if no case is missing or failed. Raises SamerunError."""
    options = _parser().parse_all(argv)
    source = Path(options.source or options.out or f"scale-{Path(options.recipe).stem}")
    if options.source and not source.is_dir():
        return _report(Path(options.out or f"scale-{source.stem}"), _of_times(source, options.efficiency), say)
    if not options.source:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the case would run on, and nobody wait for it
        try:
            _measure(source, options, argv, environment, say)
        except KeyboardInterrupt:
            say("interrupted; finished cases are kept, and the same command resumes")
            return _INTERRUPTED
        finally:
            signal.signal(signal.SIGTERM, before)
    return _report(Path(options.out or source), _of_sweep(sweep.read(source), options.efficiency), say)


def _measure(
    path: Path, options: argparse.Namespace, argv: Sequence[str], environment: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Run, or hand in, every case of the sweep that is not there yet."""
    refuse_own_keys(options.overrides, sweep.OWN_KEYS)
    asked = _asked(options)
    place = running.find_place(asked, environment) if options.submit is None else None
    about = {
        "machine": cores.machine(),
        "threads_per_process": place.threads if place else None,
        "command": shlex.join(["samerun", "scale", *argv]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    folder = sweep.open_for(path, asked, about)
    missing = _missing(folder, retry=options.retry_failed)
    if missing and place:
        _refuse_another_machine(folder)
    sweep.write(folder)
    for number, case in enumerate(missing, start=1):
        say(f"{number}/{len(missing)} {case}")
        if place is None:
            words = shlex.split(options.submit)
            running.hand_in(folder, case, options=words, environment=environment, say=say)
        elif failed := running.run_here(folder, case, place):
            say(f"{case} failed: {failed.why}")


def _refuse_another_machine(folder: Folder) -> None:
    if not (folder.path / sweep.DESCRIPTION).exists():
        return
    before, now = sweep.read(folder.path).about.get("machine"), folder.about["machine"]
    if before != now:
        raise RunFolderError(
            f"{folder.path} was measured on {before}, and this is {now}: their rows cannot be compared. "
            "Choose another --out, or report the existing results with --from."
        )


def _asked(options: argparse.Namespace) -> Sweep:
    for name in options.presets:
        presets.load(name)
    return Sweep(
        recipe=options.recipe,
        overrides=tuple(options.overrides),
        recipe_digest=recipe_file.digest(recipe_file.load(options.recipe, options.overrides).recipe),
        scaling=options.scaling,
        steps=options.steps,
        warm_up_steps=options.warm_up_steps,
        presets=tuple(options.presets),
        nodes=tuple(options.nodes),
        processes=tuple(options.processes),
        repeats=options.repeats,
    )


def _missing(folder: Folder, *, retry: bool) -> list[Case]:
    """The cases that have to run now."""

    def has_to_run(case: Case) -> bool:
        if folder.why_not(case.size) or (folder.run_dir(case) / run_folder.RESULT).exists():
            return False
        before = running.attempt(folder, case)
        return before is None or (retry and bool(before.why))

    return [case for case in folder.sweep.cases if has_to_run(case)]


def _of_sweep(folder: Folder, wanted: float) -> Report:
    """The report of what the folder of a sweep holds."""
    told = folder.sweep
    samples = f"{folder.recipe.train.global_batch_size} samples"
    facts = {
        "folder": str(folder.path),
        "recipe": " ".join((told.recipe, *told.overrides)),
        "global_batch": samples if told.scaling == "strong" else f"{samples} for each process",
        "measured": f"{told.steps} steps after {told.warm_up_steps}, {told.repeats} times each size",
        **{name: folder.about.get(name) for name in ("machine", "threads_per_process", "command", "time")},
        "commit": _commit(folder),
    }
    rows = [_row(folder, size) for size in told.sizes]
    title = f"{told.recipe}: {told.scaling} scaling"
    return _concluded(title, facts, "an epoch", rows, wanted=wanted, is_legal=folder.is_legal)


def _row(folder: Folder, size: Size) -> Row:
    runs, problems = [], []
    why_not = folder.why_not(size)
    for case in (case for case in folder.sweep.cases if case.size == size):
        try:
            measured = figures.read_case(folder, case)
            if measured:
                runs.append(measured)
            else:
                problems.append(f"{case}: {why_not or _what_became(running.attempt(folder, case))}")
        except RunFolderError as error:
            problems.append(f"{case}: {error}")
    return Row(
        method=Path(size.preset).stem,
        nodes=size.nodes,
        devices_per_node=size.processes,
        devices=size.devices,
        runs=runs,
        problems=problems,
    )


def _what_became(found: Attempt | None) -> str:
    if found is None:
        return "it has not run"
    return f"{found.why or f'job {found.job} is not over'} ({found.log})"


def _commit(folder: Folder) -> str | None:
    """The commit of the first case that tells it."""
    for case in folder.sweep.cases:
        path = folder.run_dir(case) / run_folder.RUN
        if path.exists():
            return str(run_folder.read_json(path).get("commit"))
    return None


def _of_times(path: Path, wanted: float) -> Report:
    rows = figures.read_times(path)
    return _concluded(path.stem, {"times": str(path)}, "the work", rows, wanted=wanted, is_legal=lambda _: True)


def _concluded(
    title: str,
    facts: Mapping[str, Any],
    work: str,
    rows: Sequence[Row],
    *,
    wanted: float,
    is_legal: Callable[[int], bool],
) -> Report:
    advice = [advise(method, wanted=wanted, is_legal=is_legal) for method in figures.methods_of(rows)]
    return Report(title=title, facts=facts, work=work, wanted=wanted, rows=rows, advice=advice)


def _report(folder: Path, found: Report, say: Callable[[str], None]) -> int:
    """Write the report and the picture, say the main figures, and return the exit code."""
    from app.scaling import plot  # matplotlib takes half a second, which the help does not need

    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.write(folder, found)
        plot.draw(folder, found)
    except OSError as error:
        raise RunFolderError(f"the report cannot be written into {folder}: {error.strerror}. Choose another --out.") from error
    for row in found.rows:
        sys.stdout.write(f"{report.sentence(found, row)}\n")
    for advice in found.advice:
        sys.stdout.write(f"{report.recommendation(found, advice)}\n")
    missing = sum(len(row.problems) for row in found.rows)
    if missing:
        say(f"{missing} of the cases are missing: {folder / report.MARKDOWN} says why")
    sys.stdout.write(f"written to {folder}: {report.MARKDOWN}, {report.TABLE}, {report.JSON}, {report.PLOT}.pdf and .png\n")
    return 1 if missing else 0


def _parser() -> Parser:
    parser = Parser(
        prog="samerun scale",
        usage="%(prog)s [options] [key=value ...]",
        description="Measure how a recipe scales. Run it for some steps on every number of devices, several times; report "
        "throughput, efficiency, cost, a fitted scaling law, and how many devices are worth using. The same command "
        "resumes an interrupted sweep.",
    )
    add = parser.add_argument
    add("--recipe", default="digits", help="name of a shipped recipe, or path of a YAML file (default: digits)")
    add("--presets", type=names, default=["multi_gpu"], help="presets, comma-separated (default: multi_gpu)")
    add("--processes", type=numbers, default=[1, 2], help="numbers of devices per node, comma-separated (default: 1,2)")
    add("--nodes", type=numbers, default=[1], help="numbers of nodes, comma-separated; more than 1 needs an allocation or "
        "--submit (default: 1)")  # fmt: skip
    add("--preset", "--config_file", dest="presets", type=names, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--num_machines", dest="nodes", type=numbers, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--strong", dest="scaling", action="store_const", const="strong", default="strong",
                      help="strong scaling: the recipe's global batch on every number of devices (default)")  # fmt: skip
    kind.add_argument("--weak", dest="scaling", action="store_const", const="weak", help="weak scaling: the recipe's global "
        "batch on each process")  # fmt: skip
    add("--steps", type=positive, default=50, help="optimizer steps to measure (default: 50)")
    add("--warm-up-steps", type=positive, default=20, metavar="N", help="steps before them, not measured (default: 20)")
    add("--repeats", type=positive, default=3, metavar="N", help="runs of each case, interleaved (default: 3)")
    add("--efficiency", type=share, default=0.8, metavar="E", help="lowest efficiency of the recommended number of devices "
        "(default: 0.8)")  # fmt: skip
    add("--submit", metavar="OPTIONS", help="submit each case as its own job, with these options of `samerun submit` in one "
        "argument, such as --submit='--time 00:20:00 --gpus-per-node {processes}'; {processes} is replaced by the case's "
        "number")  # fmt: skip
    add("--retry-failed", action="store_true", help="run failed cases again")
    add("--out", metavar="DIR", help="folder for the sweep and its report (default: scale-<recipe>)")
    add("--from", dest="source", metavar="PATH", help="run nothing; report an existing sweep folder, or a CSV file with "
        "columns devices and seconds, and optionally method")  # fmt: skip
    add("overrides", nargs="*", metavar="key=value", help="recipe values for all cases")
    return parser
