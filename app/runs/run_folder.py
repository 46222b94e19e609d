"""The run folder: everything that a run writes, by one process.

    recipe.yaml       the resolved recipe; `--recipe RUN/recipe.yaml` repeats the run
    preset.yaml       the preset it ran under, where the launcher's command line names one
    run.json          processes, hosts and devices, batch plan, versions, commit, command
    metrics.jsonl     one line per logged step
    evaluations.jsonl one line per evaluation: of the validation split on the way, of the test split at the end
    texts.jsonl       what the task shows after evaluations on the way: texts that the model wrote, each with its title
    samples.jsonl     with log.samples: the samples of each step
    steps.jsonl       with log.each_step: loss, gradient norm and learning rate of each step
    ledger.jsonl      over all starts: what was fed in each step, and where the time went (app/runs/ledger.py)
    checkpoints/      what the run can go on from (app/checkpoints/step_folders.py)
    frozen/           the parameters that are not trained, once for all checkpoints, which name them by their digest
    result.json       at the end: steps, samples, scores, throughput
    test_predictions/ at the end: what the task leaves of its predictions on the test split; validation_predictions/
                      where there is none
    model.safetensors, model.json   at the end: the weights, and what rebuilds the model around them
    config.json, ...  at the end of a language model's run: what makes the folder one that transformers loads
    outcome.json      at the end: finished or stopped, why, and whether the run is to be started again
    errors/           why a start failed: START/*.json, from each process that failed and each launcher that noticed
    starts/           which start of the run the folder belongs to, and what that is writing (app/runs/claim.py)
    profile/          with profile.steps: a trace of each rank, and how far its clock is ahead (app/metrics/profile.py)
    stacks/           after a hang: where each rank stood
    trackers.json     the run's names in its trackers
    tensorboard/, ... what trackers write
    STOP, SAVE        made by the user, who wants the run to stop or to save

Files appear whole or not at all. A run writes them by its claim; here is what they are called, and how they are read.

A process records its error before it ends. A launcher records exit codes, for what could not: SIGKILL, a crash in C++.
`first_failure` chooses. Each start has its own folder in errors/, named by its launcher (ERRORS) or, without `samerun launch`,
by the number of its claim; the place of the start names it, so the failure of another start is never taken for its own.
torch's own error files (TORCHELASTIC_ERROR_FILE) are in a folder of one node, in whole seconds, and only torchrun reads them.
Standard library only.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.errors import HangError, RunFolderError, SamerunError, did_you_mean, is_of_a_lost_peer, short_traceback
from app.files.atomic_files import disk_errors, file_made_whole, new_folder
from app.files.text_files import Lines, is_count, is_finite, opened, parsed

RECIPE, PRESET, RUN, RESULT = "recipe.yaml", "preset.yaml", "run.json", "result.json"
METRICS, EVALUATIONS, SAMPLES, LEDGER = "metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "ledger.jsonl"
TEXTS, STEPS = "texts.jsonl", "steps.jsonl"
PREDICTIONS = "predictions.json"
MODEL, MODEL_CONFIG, MODEL_INDEX = "model.safetensors", "model.json", "model.safetensors.index.json"
PROGRAMS = {"torch": "model.pt2", "onnx": "model.onnx"}
"""Beside exported weights: the model as a program, by its kind."""
OUTCOME, ERRORS, STARTS, STACKS, STOP, SAVE = "outcome.json", "errors", "starts", "stacks", "STOP", "SAVE"
START = "start.json"
"""In the place of a start: what it wrote about itself."""
TRACKERS, TENSORBOARD, PROFILE = "trackers.json", "tensorboard", "profile"


def predictions(split: str) -> str:
    """Return the folder of the predictions on a split."""
    return f"{split}_predictions"


UNIT = "samples"
"""Unit of a task that names none."""


def choose(run_dir: str | None, recipe_name: str, *, may_exist: bool) -> Path:
    """Return the run folder, which is then there: `run_dir`, or a new one `runs/<recipe>-<time>`.

    Raises RunFolderError if it cannot be made, or holds a run and must not (`may_exist`).
    """
    path = Path(run_dir) if run_dir else Path("runs") / f"{recipe_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        if run_dir and not may_exist and (path / RECIPE).exists():
            raise RunFolderError(f"{path} holds a run already: choose another --run-dir, or resume it with --resume auto.")
        if run_dir:
            path.mkdir(parents=True, exist_ok=True)
            return path
        return new_folder(path)
    except OSError as error:
        raise RunFolderError(
            f"the run folder {path} cannot be written: {error.strerror or error}. Choose another --run-dir."
        ) from error


def refuse_links(path: Path) -> None:
    """Raise RunFolderError for a symbolic link in a run folder: what a run writes and removes would be outside it."""
    for folder in (path, path / STARTS):
        for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
            if entry.is_symlink():
                raise RunFolderError(
                    f"{entry} is a symbolic link, and a run writes and removes only files within its run folder: replace it "
                    "by what it leads to. The run folder itself may be a link."
                )


def refuse_finished(path: Path) -> None:
    """Raise RunFolderError for a folder, without a checkpoint, of a run that was finished."""
    if (path / RESULT).exists():
        raise RunFolderError(f"{path} holds a finished run without a checkpoint to resume from: choose another --run-dir.")


def finished(run_dir: str | None, resume: str | None, recipe_digest: str) -> str | None:
    """Return a sentence if `resume` would continue a run that its last attempt has finished with this recipe, else None."""
    path = Path(run_dir or "")
    with suppress(RunFolderError):
        outcome = read_json(path / OUTCOME) if run_dir and resume == "auto" and (path / RESULT).exists() else {}
        if outcome.get("outcome") == "finished" and read_json(path / RUN).get("recipe_digest") == recipe_digest:
            return (
                f"{path} is finished after step {outcome.get('step')} ({outcome.get('reason')}), and nothing was changed. "
                f"To continue it, give more train.epochs or train.steps; to score it again: samerun evaluate {path}"
            )
    return None


def last_steps(path: Path) -> dict[str, int]:
    """Return the last step of metrics.jsonl and of evaluations.jsonl, by their names; of neither that has no line.

    Raises RunFolderError if one cannot be read.
    """
    found = {}
    for name in (METRICS, EVALUATIONS):
        lines = Lines(path / name) if (path / name).exists() else ()
        if steps := [values["step"] for *_, values in lines if is_count(values.get("step"))]:
            found[name] = max(steps)
    return found


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is never seen half-written, as tools do beside a run. Raises RunFolderError."""
    with disk_errors(path, "written", RunFolderError), file_made_whole(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write `values` as an indented JSON file, whole or not at all. Raises RunFolderError."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's object. Raises RunFolderError if it is missing or broken."""
    try:
        with opened(path) as file:
            values = parsed(file.read())
    except FileNotFoundError:
        which = "run" if path.name == RUN else "finished run"
        raise RunFolderError(f"{path} is missing: {path.parent} is not the folder of a {which}.") from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if not isinstance(values, dict):
        raise RunFolderError(f"{path} is broken: it holds {type(values).__name__}, not an object.")
    return values


def last_micro_batch(path: Path, **same: Any) -> int | None:
    """Return the micro-batch of a run's last start; None if there is none, or these values of run.json are not the `same`."""
    with suppress(RunFolderError):
        about = read_json(path / RUN)
        if is_count(about.get("micro_batch")) and all(about.get(key) == value for key, value in same.items()):
            return int(about["micro_batch"])
    return None


def existing(text: str) -> Path:
    """Return the folder of a run that the command line names. Raises RunFolderError if there is none."""
    path = Path(text)
    if not path.exists():
        runs = sorted(str(file.parent) for folder in {path.parent, Path("runs")} for file in folder.glob(f"*/{RUN}"))
        hint = did_you_mean(text, runs, otherwise=f"there are {', '.join(runs[:4])}{', ...' * (len(runs) > 4)}" if runs else "")
        raise RunFolderError(f"{text}: there is no such run{hint and '; '}{hint}")
    return path


def newest(runs: Path = Path("runs")) -> Path:
    """Return the run in a folder of runs, or of folders of runs, whose last start is the latest. Raises RunFolderError."""
    files = [*runs.glob(f"*/{RUN}"), *runs.glob(f"*/*/{RUN}")]
    if not files:
        raise RunFolderError(f"there is no run in {runs}/: give the folder of a run.")
    return max(files, key=lambda file: str(read_json(file).get("started"))).parent


def start_numbers(starts: Path) -> list[int]:
    """Return the numbers of the starts that have a place; none if the folder is gone."""
    with suppress(FileNotFoundError):
        return sorted(int(path.name) for path in starts.iterdir() if path.name.isdecimal())
    return []


def last_start(path: Path) -> Any:
    """Return what the newest start of a run wrote about itself into its place. Raises OSError and ValueError."""
    starts = path / STARTS
    return parsed((starts / str(max(start_numbers(starts))) / START).read_bytes())


@dataclass(frozen=True, kw_only=True)
class ProcessFailure:
    """A process that failed, or the launcher of a node."""

    exit_code: int
    """As Python has it: -9 after SIGKILL."""
    rank: int | None = None
    process: str = ""
    """Name of a process without a rank; empty for a node."""
    host: str = field(default_factory=socket.gethostname)
    """Empty where it is not known."""
    time: float = field(default_factory=time.time)
    """When it failed, in Unix seconds."""
    error: str = ""
    """`RecipeError: no such key`; empty if it recorded nothing itself."""
    traceback: str = ""
    """Empty for an error that the user can fix."""
    is_consequence: bool = False
    """True if it failed because another process failed or hangs: any other failure of the attempt is then the cause."""

    @property
    def name(self) -> str:
        """`rank 1 on node2`, `accelerate launch on node2`, or `node2`."""
        process = self.process if self.rank is None else f"rank {self.rank}"
        return " on ".join(filter(None, [process, self.host]))

    def __str__(self) -> str:
        """Return `rank 1 on node2 ended with exit code 3`."""
        number = self.exit_code - 128 if self.exit_code > 128 else -self.exit_code
        if number not in map(int, signal.Signals):
            return f"{self.name} ended with exit code {self.exit_code}"
        sent = signal.Signals(number).name
        return f"{self.name} was ended by {sent}" + (", possibly out of memory" if sent == "SIGKILL" else "")


def record_failure(folder: Path | None, failure: ProcessFailure, name: str = "") -> None:
    """Write a failure into the folder of its start, if there is one. Where it cannot be written, stderr alone has it.

    `name` of the file is by default the rank of the process that failed or the node of the launcher that noticed.
    """
    if folder is None:
        return
    by_itself = failure.error and failure.rank is not None
    name = name or (f"rank-{failure.rank:05d}" if by_itself else f"node-{failure.host}")
    with suppress(OSError, RunFolderError):
        folder.parent.mkdir(exist_ok=True)  # not the run folder: a user may have removed it
        folder.mkdir(exist_ok=True)
        write_json(folder / f"{name}.json", asdict(failure))


@dataclass
class Recorder:
    """Records the error that ends this process."""

    folder: Path | None
    """The attempt's folder of errors; None: not known."""

    def record(self, error: Exception, *, rank: int | None = None) -> None:
        """Record an error, while it is handled."""
        text, code, frames, is_consequence = f"{type(error).__name__}: {error}", 1, "", isinstance(error, HangError)
        if isinstance(error, SamerunError):
            code = error.exit_code
        else:
            frames, is_consequence = short_traceback(error), is_of_a_lost_peer(error)
            text = ". ".join([text, *getattr(error, "__notes__", ())])
        failure = ProcessFailure(exit_code=code, rank=rank, error=text, traceback=frames, is_consequence=is_consequence)
        record_failure(self.folder, failure)


def first_failure(folder: Path | None) -> ProcessFailure | None:
    """Return the failure that ended a start, from its folder: the earliest that is not a consequence of another."""
    found: list[ProcessFailure] = []
    for file in folder.glob("*.json") if folder else ():
        with suppress(OSError, ValueError, TypeError):  # damaged; the others may not be
            failure = ProcessFailure(**parsed(file.read_bytes()))
            if isinstance(failure.exit_code, int) and is_finite(failure.time) and is_count(failure.rank or 0):
                found.append(failure)
    known = {failure.rank for failure in found if failure.error}
    # A launcher knows less of a process than its own file.
    found = [failure for failure in found if failure.error or failure.rank not in known]
    # torch's times are whole seconds; all ranks may have the same error.
    return min(found, key=lambda failure: (failure.is_consequence, int(failure.time), failure.rank or 0), default=None)


def newest_failure(run_dir: Path) -> ProcessFailure | None:
    """Return the failure of the start that the run folder belongs to; None if it has not failed, as far as is known."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # it has no start, or one that is damaged
        return first_failure(run_dir / ERRORS / Path(last_start(run_dir)["errors"]).name)
    return None
