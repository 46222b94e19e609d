"""`samerun launch`: run what its arguments come to (`resolved.py`), and see it through.

On one machine it runs `accelerate launch`, or the one process that it would start. In an allocation it runs, by the scheduler's
command, `samerun launch` once on every node, which runs the `accelerate launch` of that node when all have met
(`rendezvous.py`). From where it was typed, the run is watched (`supervise.py`) until it is over: restarted after a crash, and
its job requeued. Each start continues from the newest checkpoint of the run folder (`--resume auto`).
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from app.environment import host
from app.environment.variables import ERRORS
from app.errors import STOPPED, HangError, SamerunError, TrainingError
from app.files.lines import parsed
from app.runs import failure, run_folder
from launch.schedulers.job import ATTEMPT, NotDoneError
from launch.start import supervise
from launch.start.rendezvous import find_token, meet, new_token, without_token
from launch.start.resolved import Resolved, checked
from launch.start.supervise import Ending


def launch(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run `samerun launch` with these arguments and return its exit code. Raises SamerunError."""
    resolved = checked(argv, environment)
    options = resolved.options
    if resolved.topology.node_rank == 0:  # or each node would print the same
        resolved.introduce(say)
    if options.dry_run:
        for line in resolved.origins(environment):
            say(line)
        sys.stdout.writelines(resolved.dry_run())
        return 0
    if resolved.is_task:
        return _run_task(_met(resolved, environment, say), environment, say)
    is_new = resolved.run_dir is None or not Path(resolved.run_dir).exists()
    run_dir = run_folder.choose(resolved.run_dir, resolved.loaded.name, may_exist=True)
    resolved = replace(resolved, run_dir=resolved.run_dir or str(run_dir))
    say(shlex.join(resolved.command()))
    try:
        return _run(resolved, environment, say)
    finally:
        if not (run_dir / run_folder.STARTS).exists():  # the run did not begin to write
            shutil.rmtree(run_dir / failure.FOLDER, ignore_errors=True)
            with suppress(OSError):
                if is_new:
                    run_dir.rmdir()


def _run_task(resolved: Resolved, environment: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Run the processes of this node."""
    say(shlex.join(resolved.accelerate_argv()))
    exported = resolved.with_threads(without_token(resolved.times(environment).added_to(environment)))
    file = OutcomeFile(Path(resolved.run_dir)) if resolved.run_dir and resolved.writes_outcome else None
    parent = os.getppid()

    def is_lost() -> bool:
        """Return True if the ssh that started this is gone. Daemons of batch systems may be restarted meanwhile."""
        return "SSH_CONNECTION" in environment and os.getppid() != parent

    exit_code = supervise.run(resolved.local_argv(exported), exported, watched=False, is_lost=is_lost).exit_code
    outcome = file.read(exit_code, is_required=True) if file else None
    # Where `samerun launch` started this, it reads the outcome itself.
    is_stopped = outcome is not None and outcome.outcome == "stopped" and ATTEMPT not in environment
    return STOPPED if is_stopped and exit_code == 0 else exit_code


def _met(resolved: Resolved, environment: Mapping[str, str], say: Callable[[str], None]) -> Resolved:
    """Return the same when its nodes have met: with another port, if a program is at the one made from the job's id."""
    topology = resolved.topology
    if topology.num_nodes == 1:
        return resolved
    key = find_token(environment, resolved.run_dir, resolved.job.name if resolved.job else "")
    port = meet(topology, key, only_port=resolved.options.port is not None)
    if port != topology.port and topology.node_rank == 0:
        say(f"{topology.described('port')} is in use on {topology.hosts[0]}: the run uses {port}")
    return replace(resolved, topology=replace(topology, port=port))


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
    """The outcome file of a run folder, read before a run and after it: only what has changed is its outcome.

    The exit code of a launcher does not tell a run that has stopped from one that failed.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / "outcome.json"
        self._before = self._content()

    def read(self, exit_code: int, *, is_required: bool) -> RunOutcome | None:
        """Return the outcome that was written since, if any.

        Raises TrainingError for a run that succeeded without one, if it `is_required`.
        """
        content = self._content()
        if content is not None and content != self._before:
            try:
                values = parsed(content)
                return RunOutcome(**{name: values[name] for name in RunOutcome.__dataclass_fields__})
            except (ValueError, KeyError, TypeError):  # as little as a file that cannot be read
                return None
        if is_required and exit_code == 0:
            raise TrainingError(
                "the training process ended with exit code 0, but it neither finished the run nor stopped it "
                f"({self._file} was not written): something called os._exit, perhaps your task file or a library that it uses"
            )
        return None

    def _content(self) -> bytes | None:
        try:
            return self._file.read_bytes()
        except OSError:  # a file that cannot be read tells as little as none; who writes into the folder says why
            return None


def _run(resolved: Resolved, environment: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Run it from here, a batch script or this machine, to its end, and return the exit code for this process."""
    assert resolved.run_dir is not None
    run_dir, is_elsewhere, max_restarts = Path(resolved.run_dir), resolved.is_started_elsewhere, resolved.options.max_restarts
    times = resolved.times(environment)
    if resolved.job and times.ends_s is None:
        say(f"the end of the job's time is unknown ({times.origin}), so the run cannot stop and save before it")
    exported = resolved.with_threads(times.added_to(environment)) | (new_token() if is_elsewhere else {})
    for restart in range(max_restarts + 1):
        mark, again = f"{secrets.token_hex(8)}-{restart}", restart > 0
        file, errors = OutcomeFile(run_dir), run_dir.absolute() / failure.FOLDER / mark
        command = resolved.start(again=again) if is_elsewhere else resolved.local_argv(exported, again=again)
        ending = supervise.run(command, {**exported, ATTEMPT: mark, ERRORS: str(errors)}, watched=True, errors=errors)
        if ending.exit_code:  # on this machine a scheduler's command, which has ended, may have started more
            host.kill_all_with(ATTEMPT, mark)
        if ending.is_out_of_memory:
            # The kernel kills for the host's memory, with GPUs too: offloading to it, or more devices in it, would not help.
            remedy = resolved.preset.sharding(resolved.degrees).what_to_change(
                resolved.topology.world_size,
                micro_batch=resolved.plan.micro_batch,
                checkpoint_activations=resolved.loaded.recipe.train.checkpoint_activations,
                on_cpu=True,
            )
            say(f"the kernel killed a process for lack of memory. {remedy}")
        # On other nodes their own launcher looks for the outcome.
        outcome = file.read(ending.exit_code, is_required=resolved.writes_outcome and not is_elsewhere)
        if outcome is not None and outcome.outcome == "stopped":
            return _after_stop(resolved, outcome, ending, say)
        if outcome is not None or restart == max_restarts or not _may_restart(ending, say):
            break
        say(f"the run crashed, and resumes from its newest checkpoint: restart {restart + 1} of {max_restarts}")
    return ending.exit_code


def _may_restart(ending: Ending, say: Callable[[str], None]) -> bool:
    """Whether it crashed by something that may not happen again, on nodes that are still there."""
    if ending.lost_node:
        say(f"{ending.lost_node} has failed, which ends this job: Slurm requeues it, unless it was submitted with --no-requeue")
        return False
    # A run that found itself stuck made no mistake that the next start would repeat.
    mistakes = {error.exit_code for error in SamerunError.__subclasses__()} - {HangError.exit_code}
    return ending.exit_code not in {0, *mistakes} and not ending.signals


def _after_stop(resolved: Resolved, outcome: RunOutcome, ending: Ending, say: Callable[[str], None]) -> int:
    """Have the scheduler run the job again if the run is to continue, or report how to resume it."""
    job, max_requeues = resolved.job, resolved.options.max_requeues
    if not outcome.go_on:
        why_not = ""
    elif job is None or job.requeue is None:
        why_not = "nothing here restarts it automatically. "
    elif job.requeues >= max_requeues:
        why_not = f"--max-requeues is {max_requeues}, and the job was requeued {job.requeues} times. "
    else:
        try:
            requeued = job.requeue(ending.signals)
        except NotDoneError as error:
            why_not = f"{error}. "
        else:
            say(f"the run {outcome}; {requeued}, {job.requeues + 1} of at most {max_requeues} times")
            return 0
    by_hand = [] if resolved.options.run_dir else ["--run-dir", str(resolved.run_dir)]
    say(f"the run {outcome}. {why_not}To resume it: {shlex.join(['samerun', 'launch', *by_hand, *resolved.argv])}")
    return STOPPED
