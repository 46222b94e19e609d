"""Runs `samerun launch` for a list of cases, one after the other: the runner of `sweep`, `scale` and `parity`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from app.errors import STOPPED, SamerunError
from app.recipe import recipe_file, recipe_keys
from launch.run_module import program
from launch.start import launch, supervise


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
        """Whether an earlier start of the list has finished this run."""
        return (self.run_dir / "result.json").exists()

    @property
    def log(self) -> Path:
        """File with the output of a logged case, next to its run folder."""
        return self.run_dir.parent / f"{self.run_dir.name}.log"


def problems(case: RunCase, environment: Mapping[str, str]) -> list[str]:
    """Return what is wrong with a case before it runs, for example that it was finished with another recipe."""
    try:
        resolved = launch.checked(case.argv, environment)
        if resolved.is_task:
            return ["srun started this command: leave out srun, because each run starts its own processes"]
        if not case.is_finished:
            return []
        recipe = resolved.loaded.recipe
        before, now = map(recipe_file.flat, (recipe_file.load(str(case.run_dir / "recipe.yaml")).recipe, recipe))
    except SamerunError as error:
        return str(error).splitlines()
    may_differ = recipe_keys.not_learnt(recipe.task) | recipe_keys.places(recipe.task)
    differing = [key for key in now if key not in may_differ and before.get(key) != now[key]]
    which = ", ".join(f"{key} is {before.get(key)} there and {now[key]} here" for key in differing)
    return [f"{case.run_dir} holds a finished run of another recipe, {which}: choose another folder"] if differing else []


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
            ending = supervise.run(launching, environment, pass_on=supervise.to_itself, watched=False, output=log)
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
