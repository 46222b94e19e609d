"""Sees a run to its end, read from the file in its folder: restarts it after a crash, and has the scheduler requeue the job.

The exit code of its launcher does not tell a run that has stopped from one that failed.

Each start goes on from the newest checkpoint of the run folder (`--resume auto`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.environment import host
from app.environment.variables import ERRORS
from app.errors import STOPPED, HangError, TrainingError
from app.files.lines import parsed
from app.runs import failure
from launch.schedulers.job import ATTEMPT, Job, NotDoneError
from launch.start import supervise
from launch.start.supervise import Ending

_FILE = "outcome.json"


@dataclass(frozen=True)
class RunOutcome:
    """What the main rank wrote at the end."""

    outcome: str
    """`finished`, or `stopped` before the last step, with a checkpoint."""
    reason: str
    go_on: bool
    """Whether it is to be started again by itself: not where the user asked it to stop."""
    step: int
    total_steps: int

    def __str__(self) -> str:
        return f"{self.outcome} at step {self.step} of {self.total_steps} ({self.reason})"


class OutcomeFile:
    """That of a run folder, looked at before a run and after it: only what has changed is its outcome, whatever clocks say."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / _FILE
        self._before = self._content()

    def of_success(self, exit_code: int) -> RunOutcome | None:
        """Return the outcome, if any. Raises TrainingError for a run without one whose processes succeeded all the same."""
        outcome = self.outcome()
        if exit_code == 0 and outcome is None:
            raise TrainingError(
                "the training process ended with exit code 0, but it neither finished the run nor stopped it "
                f"({self._file} was not written): something called os._exit, perhaps your task file or a library that it uses"
            )
        return outcome

    def outcome(self) -> RunOutcome | None:
        """Return the outcome that was written since, or None if there is none."""
        content = self._content()
        if content is None or content == self._before:
            return None
        try:
            said = parsed(content)
            return RunOutcome(**{name: said[name] for name in RunOutcome.__dataclass_fields__})
        except (ValueError, KeyError, TypeError):  # as little as a file that cannot be read
            return None

    def _content(self) -> bytes | None:
        try:
            return self._file.read_bytes()
        except OSError:  # a file that cannot be read tells as little as none; who writes into the folder says why
            return None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run, and how often."""

    command: Callable[[bool], Sequence[str]]
    """The command of the first start (False) and of every further one, which goes on with the run."""
    environment: Mapping[str, str]
    pass_on: supervise.PassOn
    run_dir: Path
    job: Job | None
    max_restarts: int
    """Further starts after a crash."""
    max_requeues: int
    """Further runs of the job."""
    by_hand: str
    """What a user types to go on with it."""
    writes_outcome: bool
    """Whether a process that this machine starts writes the outcome: on other nodes their own launcher looks for it."""
    memory_remedy: str
    """What to change in a run that the kernel has ended for lack of memory."""


def run(plan: Plan, say: Callable[[str], None]) -> int:
    """Run it to its end and return the exit code for this process."""
    for restart in range(plan.max_restarts + 1):
        mark = f"{secrets.token_hex(8)}-{restart}"
        folder, errors = OutcomeFile(plan.run_dir), plan.run_dir.absolute() / failure.FOLDER / mark
        ending = supervise.run(
            plan.command(restart > 0),
            {**plan.environment, ATTEMPT: mark, ERRORS: str(errors)},
            pass_on=plan.pass_on,
            watched=True,
            errors=errors,
        )
        if ending.exit_code:  # on this machine a scheduler's command, which has ended, may have started more
            host.kill_all_with(ATTEMPT, mark)
        if ending.lacks_memory:
            say(f"the kernel killed a process for lack of memory. {plan.memory_remedy}")
        outcome = folder.of_success(ending.exit_code) if plan.writes_outcome else folder.outcome()
        if outcome is not None and outcome.outcome == "stopped":
            return _after_stop(plan, outcome, ending, say)
        if outcome is not None or restart == plan.max_restarts or not _may_restart(ending, say):
            break
        say(f"the run crashed, and resumes from its newest checkpoint: restart {restart + 1} of {plan.max_restarts}")
    return ending.exit_code


def _may_restart(ending: Ending, say: Callable[[str], None]) -> bool:
    """Whether it crashed by something that may not happen again, on nodes that are still there."""
    if ending.lost_node:
        say(f"{ending.lost_node} has failed, which ends this job: Slurm requeues it, unless it was submitted with --no-requeue")
        return False
    # A run that found itself stuck made no mistake that the next start would repeat.
    repeats = ending.is_error and ending.exit_code != HangError.exit_code
    return not (ending.exit_code == 0 or ending.signals or repeats)


def _after_stop(plan: Plan, outcome: RunOutcome, ending: Ending, say: Callable[[str], None]) -> int:
    """Have the scheduler run the job again if the run is to go on, or say how to."""
    job = plan.job
    if not outcome.go_on:
        why_not = ""
    elif job is None or job.requeue is None:
        why_not = "nothing here restarts it automatically. "
    elif job.requeues >= plan.max_requeues:
        why_not = f"--max-requeues is {plan.max_requeues}, and the job was requeued {job.requeues} times. "
    else:
        try:
            requeued = job.requeue(ending.signals)
        except NotDoneError as error:
            why_not = f"{error}. "
        else:
            times = f"{job.requeues + 1} of at most {plan.max_requeues} times"
            say(f"the run {outcome}; {requeued.sentence}, {times}")
            return requeued.exit_code
    say(f"the run {outcome}. {why_not}To resume it: {plan.by_hand}")
    return STOPPED
