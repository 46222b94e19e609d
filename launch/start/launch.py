"""`samerun launch`: run what its arguments come to (`resolved.py`), and see it through. `samerun doctor`: examine its machines.

On one machine it runs `accelerate launch`, or the one process that it would start. In an allocation it runs, by the scheduler's
command, `samerun launch` once on every node, which runs the `accelerate launch` of that node when all have met
(`rendezvous.py`). From where it was typed, the run is watched (`supervise.py`) until it is over: restarted after a crash, and
its job requeued. Each start continues from the newest checkpoint of the run folder (`--resume auto`).

`samerun doctor` starts `app.checks.doctor` in the same way on the machines that a run there would find.
"""

from __future__ import annotations

import argparse
import os
import resource
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from app.environment import host
from app.environment.topology import ERRORS, MICRO_BATCH, Topology, listed
from app.errors import STOPPED, HangError, LackOfMemoryError, SamerunError, TrainingError, UsageError
from app.files.text_files import parsed
from app.options import Parser, above_zero
from app.recipe import recipe_file
from app.recipe.schema import BatchPlan
from app.runs import run_folder
from launch import preset
from launch.node_command import accelerate_argv, one_process_argv
from launch.run_module import program
from launch.schedulers import detect
from launch.schedulers.hosts import ATTEMPT, NotDoneError, count_accelerators
from launch.start import spares, supervise
from launch.start.rendezvous import PATIENCE_S, find_token, meet, new_token, without_token
from launch.start.resolved import Resolved, add_processes, checked, default_preset, set_processes, with_port
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
    recipe = recipe_file.with_commits_of(resolved.loaded.recipe, resolved.run_dir, resolved.resume)
    over = run_folder.finished(resolved.run_dir, resolved.resume, recipe_file.digest(recipe))
    if over and "--print-recipe" not in resolved.passed_on:
        say(over)
        return 0
    if resolved.is_task:
        met = _met(resolved.topology, options, environment, run_dir=resolved.run_dir, timeout_s=PATIENCE_S)
        return _run_task(replace(resolved, topology=met), environment, say)
    is_new = resolved.run_dir is None or not Path(resolved.run_dir).exists()
    run_dir = run_folder.choose(resolved.run_dir, resolved.loaded.name, may_exist=True)
    resolved = replace(resolved, run_dir=resolved.run_dir or str(run_dir))
    say(shlex.join(resolved.command()))
    try:
        return _run(resolved, environment, say)
    finally:
        if not (run_dir / run_folder.STARTS).exists():  # the run did not begin to write
            shutil.rmtree(run_dir / run_folder.ERRORS, ignore_errors=True)
            with suppress(OSError):
                if is_new:
                    run_dir.rmdir()


def resume(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run `samerun resume` with these arguments: `samerun launch` in a run's folder. Raises SamerunError."""
    parser = Parser("resume", "Continue a run from its newest checkpoint by `samerun launch`, with its recipe, preset, "
        "precision and trackers, and on one machine with as many processes as before; in a job, with those of the job. "
        "Options and key=value after RUN replace these. To continue in another folder: `samerun launch --resume RUN`.",
        usage="%(prog)s RUN [options of samerun launch] [key=value ...]")  # fmt: skip
    parser.add_argument("run", type=run_folder.existing, metavar="RUN", help="run folder")
    folder, words = parser.parse_all(argv[:1]).run, argv[1:]
    about, given = run_folder.read_json(folder / run_folder.RUN), {word.partition("=")[0] for word in words}
    own, trackers = folder / run_folder.PRESET, folder / run_folder.TRACKERS
    shipped = preset.SHIPPED / f"{about.get('preset')}.yaml"
    found = {"--recipe": folder / run_folder.RECIPE, "--run-dir": folder, "--mixed-precision": about.get("mixed_precision")}
    is_own = own.exists() and not (shipped.exists() and own.read_bytes() == shipped.read_bytes())
    found["--preset"] = own if is_own else about.get("preset")
    found["--trackers"] = ",".join(run_folder.read_json(trackers)) if trackers.exists() else "none"
    if not any("processes" in word for word in given) and not detect.find(environment):
        if (nodes := len({rank.split()[0] for rank in about.get("ranks", [])})) > 1:
            raise UsageError(
                f"{folder} ran on {nodes} nodes, and this is not within a job: submit it again with `samerun submit --nodes "
                f"{nodes} --run-dir {folder} ...`, or give --processes N to continue it on this machine"
            )
        found |= {f"--{it.replace('_', '-')}": about.get(it) for it in ("tensor_parallel", "context_parallel", "replicas")}
        found["--processes"] = about.get("world_size")
    start = [str(word) for pair in found.items() if pair[1] and pair[0] not in given for word in pair]
    say(shlex.join(["samerun", "launch", *start, *words]))
    if "--dry-run" not in given:  # of a run that was killed before it saw the file
        (folder / run_folder.STOP).unlink(missing_ok=True)
    return launch([*start, *words], environment, say=say)


def stop(argv: list[str]) -> int:
    """Run `samerun stop` with these arguments. Raises RunFolderError."""
    parser = Parser("stop", "Make a run save a checkpoint and stop, on whatever machines it is, by the file RUN/STOP. The run "
        "looks for it about once a second.")  # fmt: skip
    parser.add_argument("run", type=run_folder.existing, metavar="RUN", help="run folder")
    run = parser.parse_all(argv).run
    run_folder.read_json(run / run_folder.RUN)
    outcome = run / run_folder.OUTCOME
    ended = run_folder.read_json(outcome).get("outcome") if outcome.exists() else run_folder.newest_failure(run) and "failed"
    if ended:
        sys.stdout.write(f"{run} is not running: it {ended}\n")
    else:
        run_folder.write_text(run / run_folder.STOP, "")
        again = shlex.join(["samerun", "resume", str(run)])
        sys.stdout.write(f"{run / run_folder.STOP} is written: the run saves a checkpoint and stops. To continue it: {again}\n")
    return 0


def _run_task(resolved: Resolved, environment: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Run the processes of this node."""
    say(shlex.join(resolved.accelerate_argv()))
    exported = resolved.with_threads(without_token(resolved.times(environment).added_to(environment)))
    file = OutcomeFile(Path(resolved.run_dir)) if resolved.run_dir and resolved.writes_outcome else None
    # By ssh it ends when that has. Daemons of batch systems may be restarted meanwhile.
    by_ssh = "SSH_CONNECTION" in environment
    ending = supervise.run(resolved.local_argv(exported), exported, ends_with_parent=by_ssh)
    if resolved.plan.is_auto and ending.is_killed_for_memory:  # the first node's launcher, which restarts all, reads it
        raise LackOfMemoryError("the kernel killed a process: the host ran out of memory")
    exit_code = ending.exit_code
    outcome = file.read(exit_code, is_required=True) if file else None
    # Where `samerun launch` started this, it reads the outcome itself.
    is_stopped = outcome is not None and outcome.outcome == "stopped" and ATTEMPT not in environment
    return STOPPED if is_stopped and exit_code == 0 else exit_code


def _met(
    topology: Topology, options: argparse.Namespace, environment: Mapping[str, str], *, run_dir: str | None, timeout_s: float
) -> Topology:
    """Return the topology when its nodes have met: with another port, if a program is at the one made from the job's id."""
    if topology.num_nodes == 1:
        return topology
    job = detect.job(environment)
    token = find_token(environment, run_dir, job.name if job else "")
    return replace(topology, port=meet(topology, token, timeout_s=timeout_s, only_port=options.port is not None))


@dataclass(frozen=True)
class RunOutcome:
    """The line that the main rank wrote at the end."""

    outcome: str
    """`finished`, or `stopped` before the last step, with a checkpoint."""
    reason: str
    go_on: bool
    """True if it is to be restarted automatically: not if the user stopped it."""
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
            values = parsed(content)
            return RunOutcome(**{name: values[name] for name in RunOutcome.__dataclass_fields__})
        if is_required and exit_code == 0:
            raise TrainingError(
                "the training process ended with exit code 0, but it neither finished the run nor stopped it "
                f"({self._file} was not written): something called os._exit, perhaps your task file or a library that it uses"
            )
        return None

    def _content(self) -> bytes | None:
        return self._file.read_bytes() if self._file.exists() else None


def _run(resolved: Resolved, environment: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Run it from here, a batch script or this machine, to its end, and return the exit code for this process."""
    assert resolved.run_dir is not None
    run_dir, is_elsewhere, max_restarts = Path(resolved.run_dir), resolved.is_started_elsewhere, resolved.options.max_restarts
    times = resolved.times(environment)
    if resolved.job and times.ends_s is None:
        say(f"the end of the job's time is unknown ({times.origin}), so the run cannot stop and save before it")
    resume = resolved.resume_command() if resolved.job else ""
    exported = resolved.with_threads(times.added_to(environment)) | (new_token() if is_elsewhere else {})
    restarts = starts = 0
    while True:
        attempt = replace(resolved, earlier_starts=resolved.earlier_starts + starts)
        starts += 1
        mark = f"{secrets.token_hex(8)}-{attempt.earlier_starts}"
        file, errors = OutcomeFile(run_dir), run_dir.absolute() / run_folder.ERRORS / mark
        command = attempt.start_argv() if is_elsewhere else attempt.local_argv(exported)
        variables = {ATTEMPT: mark, ERRORS: str(errors)}
        variables |= {MICRO_BATCH: str(resolved.plan.micro_batch)} if resolved.plan.is_auto else {}
        with spares.guarded(attempt, environment):
            ending = supervise.run(command, exported | variables, errors=errors, resume=resume)
        if ending.exit_code:  # on this machine a scheduler's command, which has ended, may have started more
            host.kill_all_with(ATTEMPT, mark)
        lost = spares.lost_nodes(resolved, errors, environment) if ending.exit_code and not ending.signals else []
        if lost and not ending.signals:  # one might come during the search
            left = spares.without(resolved, lost, environment)
            if left is None:
                say(f"the run lost {listed(lost)}")  # Slurm can end this process in the midst of a requeue
                return _requeue(resolved, "cannot continue in this job", ending, say)
            resolved = left
            on = listed(resolved.topology.hosts)
            say(f"the run lost {listed(lost)}, and resumes from its newest checkpoint on {on}")
            continue
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if _may_restart(ending) and limit != resource.RLIM_INFINITY:
            say(f"the address space is limited to {limit / 2**30:.1f} GiB, which may be the cause: try `ulimit -v unlimited`")
        if resolved.plan.is_auto and ending.needs_less_memory and not ending.signals:
            on_cpu = ending.is_killed_for_memory or count_accelerators(environment)[0] == 0
            resolved, size = _with_less(resolved, run_dir, mark, on_cpu=on_cpu), resolved.plan.micro_batch
            numbers = [it.name.removeprefix("step-") for it in run_dir.glob("checkpoints/step-*")]
            began_at = run_folder.read_json(run_dir / run_folder.RUN).get("resumed_step", 0)
            step = max((int(it) for it in numbers if it.isdecimal()), default=began_at)
            say(f"out of memory with micro-batch {size}: starting again with {resolved.plan.micro_batch} from step {step}")
            continue
        if ending.is_out_of_memory:
            # The kernel kills for the host's memory, with GPUs too: offloading to it, or more devices in it, would not help.
            say(f"the kernel killed a process: the host ran out of memory. {_remedy(resolved, on_cpu=True)}")
        # On other nodes their own launcher looks for the outcome.
        outcome = file.read(ending.exit_code, is_required=resolved.writes_outcome and not is_elsewhere)
        if outcome is not None and outcome.outcome == "stopped":
            return _requeue(resolved, outcome, ending, say, is_wanted=outcome.go_on)
        if outcome is not None or restarts == max_restarts or not _may_restart(ending):
            return ending.exit_code
        restarts += 1
        say(f"the run crashed, and resumes from its newest checkpoint: restart {restarts} of {max_restarts}")


def _with_less(resolved: Resolved, run_dir: Path, mark: str, *, on_cpu: bool) -> Resolved:
    """Return a run that was out of memory with at most half of its micro-batch.

    `mark` is that of the start. Raises LackOfMemoryError if a smaller micro-batch is impossible or would not help.
    """
    plan, loaded, size, has_begun = resolved.plan, resolved.loaded, resolved.plan.micro_batch, False
    recipe = loaded.recipe
    with suppress(OSError, ValueError, LookupError, TypeError):  # it did not come as far as the run folder
        has_begun = Path(run_folder.last_start(run_dir)["errors"]).name == mark
    if has_begun and size // 2 >= recipe.sections.group_size:
        smaller = BatchPlan.of(recipe, plan.data_ranks, processes_per_rank=plan.processes_per_rank, most=size // 2)
        return replace(resolved, plan=smaller)
    what = f"with {size} sample{'s' * (size > 1)} per forward pass" if has_begun else "before its first forward pass"
    raise LackOfMemoryError(
        f"train.max_micro_batch is auto ({loaded.origins['train.max_micro_batch']}), but the run is out of memory {what}. "
        f"{_remedy(resolved, on_cpu=on_cpu)}"
    )


def _remedy(resolved: Resolved, *, on_cpu: bool) -> str:
    """Return what to change in a run that is out of memory."""
    return resolved.preset.sharding(resolved.degrees).what_to_change(
        resolved.topology.world_size,
        micro_batch=1 if resolved.plan.is_auto else resolved.plan.micro_batch,
        checkpoint_activations=resolved.loaded.recipe.train.checkpoint_activations,
        on_cpu=on_cpu,
    )


def _may_restart(ending: Ending) -> bool:
    """Return True if it crashed by something that might not happen again."""
    # A run that found itself stuck made no mistake that the next start would repeat.
    mistakes = {error.exit_code for error in SamerunError.__subclasses__()} - {HangError.exit_code}
    return ending.exit_code not in {0, *mistakes} and not ending.signals


def _requeue(resolved: Resolved, what: object, ending: Ending, say: Callable[[str], None], *, is_wanted: bool = True) -> int:
    """Have the scheduler run the job again if that `is_wanted`, or report how to resume the run. `what` has happened to it."""
    job, max_requeues = resolved.job, resolved.options.max_requeues
    if not is_wanted:
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
            say(f"the run {what}; {requeued}, {job.requeues + 1} of at most {max_requeues} times")
            return 0
    say(f"the run {what}. {why_not}To resume it: {resolved.resume_command()}")
    return STOPPED


def doctor(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run `samerun doctor` with these arguments and return its exit code. Raises SamerunError."""
    parser = Parser("doctor", "Check this machine, or all nodes of the current Slurm or PBS job: connections between nodes, "
        "devices and their arithmetic, versions, bandwidth of all-reduce. The exit code is 0 if nothing is wrong.")  # fmt: skip
    add_processes(parser)
    parser.add_argument("--run-dir", default="runs", metavar="PATH", help="for `srun samerun doctor`: folder that all nodes "
        "can read, in which they find their token (default: runs)")  # fmt: skip
    parser.add_argument("--patience", type=above_zero, default=60.0, metavar="SECONDS", help="time limit of one phase; "
        "a rank that takes longer is reported as stuck (default: 60)")  # fmt: skip
    parser.take_accelerates_words()
    options = parser.parse_all(argv)
    set_processes(options, environment)
    allocation = detect.find(environment, processes=options.processes, processes_per_node=options.processes_per_node)
    topology = allocation.topology if allocation else detect.this_machine(environment, processes=options.processes)
    topology = with_port(topology, options.port)
    if allocation and allocation.start:
        added = [] if options.processes_per_node else ["--processes-per-node", str(topology.processes_per_node)]
        start = [word for word in allocation.start if word != "--label"]
        command = [*start, *program("launch.cli"), "doctor", *added, *argv]
        say(shlex.join(command))
        os.execvpe(command[0], command, {**environment, **new_token()})  # noqa: S606 - a shell would stand between
    signal.signal(signal.SIGTERM, _end_with_the_first)
    topology = _met(topology, options, environment, run_dir=options.run_dir, timeout_s=min(options.patience, PATIENCE_S))
    return _examine(topology, options, environment)


def _end_with_the_first(*_: object) -> None:
    """The first node that has found something wrong ends, and srun ends the others for it: for them it is the same."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def _examine(topology: Topology, options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    with tempfile.TemporaryDirectory(prefix="samerun-doctor-") as folder:
        exit_code_file = Path(folder) / "exit-code"
        arguments = ["--patience", str(options.patience), "--exit-code-file", str(exit_code_file)]
        chosen = default_preset(topology, environment)
        # Without names of hosts no line begins with one: labels would spoil the tables.
        topology, module = replace(topology, hosts=()), "app.checks.doctor"
        alone = one_process_argv(topology, chosen, arguments, environment, module=module)
        command = alone or accelerate_argv(topology, chosen, arguments, module=module)
        # What torchrun puts into TMPDIR it leaves there when it is ended, as for another node that failed.
        ended = supervise.run(command, {**without_token(environment), "TMPDIR": folder}).exit_code
        # From here to its end Python would die of it: another node may be a moment sooner, and srun end this one.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return 1 if ended else int(exit_code_file.read_text())
