"""Sees a run through to its end: restarts it after a crash, and has the scheduler requeue the job.

Each start goes on from the newest checkpoint of the run folder (`--resume auto`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.environment.variables import ERRORS
from app.errors import STOPPED, HangError
from app.runs import failure
from launch.schedulers.job import ATTEMPT, Job, NotDoneError
from launch.start import signals, supervise
from launch.start.outcome import OutcomeFile, RunOutcome
from launch.start.supervise import Ending


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run, and how often."""

    command: Callable[[bool], Sequence[str]]
    """The command of the first start (False) and of every further one, which goes on with the run."""
    environment: Mapping[str, str]
    pass_on: signals.PassOn
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
            from app.environment.processes import kill_all_with  # not at the top: the launcher starts at once

            kill_all_with(ATTEMPT, mark)
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
