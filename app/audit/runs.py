"""Runs of the audited script: start its processes in a scratch copy of the working folder, and read their records.

A run is stopped some seconds after its last compared step, so a long training does not have to end. Files up to 1 MiB are
copied into the scratch folder; larger ones are links, which become files of their own when the script writes to them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from app.errors import UsageError

Event = Mapping[str, Any]
CRASHED = 86
"""Exit code of a process that ended itself after a checkpoint, as a crash would."""
SCRATCH = "samerun-audit-"
"""Beginning of the names of scratch folders."""
_COPIED_BYTES, _MOST_FILES = 2**20, 20_000
_SKIPPED = {".git", ".venv", "venv", "__pycache__", "node_modules", ".mypy_cache", ".ruff_cache"}
_TAIL_LINES, _POLL_S = 30, 0.1
_NETWORK = "Max retries|not known|name resolution|unreachable|OfflineMode|LocalEntryNotFound|couldn't connect|ConnectionError"
_REASONS = {
    "the following arguments are required": "it needs arguments: give them after its name",
    _NETWORK: "it needs the network: give it local data and weights",
    "CUDA|NVIDIA|nccl": "it needs a GPU, and an audit runs on CPU: leave the device to accelerator.device",
    "": "its own error is above",
}
_NO_BATCH: Event = {"rows": [], "indices": [], "counts": {}, "rng": None}
_PLACES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_ON_CPU = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1",
           "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}  # fmt: skip


@dataclass(frozen=True)
class Script:
    """The audited script, and how it is started."""

    name: str
    """Path of a script, or name of a module."""
    arguments: Sequence[str]
    module: bool
    steps: int
    """Steps that are compared."""
    tail_s: float
    """Seconds that a run has after these steps, to reach the end of its training."""
    timeout_s: float
    """Seconds until these steps must have been taken."""
    config_file: Path | None = None
    """Accelerate configuration that starts the processes of the run with two."""


@dataclass
class Step:
    """An optimizer step of one rank."""

    batches: Sequence[Event]
    """Micro-batches, each with the `loss` of its backward pass. `draws`: torch's generator was used between reading the batch
    and this pass, by dropout, for example."""
    event: Event
    clips: list[tuple[int, Event]]
    """Calls that clip gradients, each with the number of backward passes before it."""
    dropped: int
    """Backward passes whose gradients were set to zero before this step used them."""
    scheduler_steps: int = 0
    """Scheduler steps between this step and the next."""

    @property
    def norm(self) -> float:
        """Norm of the gradient before clipping."""
        return float(self.clips[-1][1]["norm"] if self.clips else self.event["gradient"][0])

    def samples(self, key: str) -> Counter[int]:
        """Count the samples, by `rows` (digests of their contents) or `indices` (positions in the dataset, if known)."""
        return Counter(one for it in self.batches for one in it[key])


@dataclass
class Pass:
    """One pass over a loader by one rank."""

    loader: str
    is_prepared: bool
    from_step: int
    rows: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    gathers: list[Event] = field(default_factory=list)
    is_training: bool = False
    is_ended: bool = False
    """The loader was read to its end."""


class Rank:
    """Record of one process."""

    def __init__(self, file: Path) -> None:
        """Read a record, and find its optimizer steps and its passes over loaders, both in order."""
        lines = file.read_text().splitlines(keepends=True)
        self.events: list[Event] = [json.loads(line) for line in lines if line.endswith("\n")]  # the last line can be cut
        self.steps: list[Step] = []
        self.passes: list[Pass] = []
        current, last = dict[str, Pass](), Pass("", False, 0)
        fetched: list[Event] = []  # batches of one loader since the last step: a script can read all before a backward pass
        backwards: list[tuple[int, Event]] = []  # backward passes since then, each with the number of batches before it
        clips, dropped = list[tuple[int, Event]](), 0
        for event in self.events:
            match event["event"]:
                case "epoch":
                    current[event["loader"]] = Pass(event["loader"], event["prepared"], event["step"])
                    self.passes.append(current[event["loader"]])
                case "batch":
                    last = current[event["loader"]]
                    last.rows += event["rows"]
                    last.indices += event["indices"]
                    if fetched and fetched[-1]["loader"] != event["loader"]:
                        fetched, backwards = [], []
                    fetched.append(event)
                case "epoch_end":
                    current[event["loader"]].is_ended = True
                case "gather":
                    last.gathers.append({**event, "is_late": last.is_ended})
                case "backward":
                    last.is_training = True
                    backwards.append((len(fetched), event))
                case "clip":
                    clips.append((len(backwards), event))
                case "zero_grad":
                    dropped += len(backwards)
                    fetched, backwards = fetched[backwards[-1][0] :] if backwards else fetched, []
                case "optimizer_step":
                    used = [fetched[count - 1] if count else _NO_BATCH for count, _ in backwards]
                    if len({count for count, _ in backwards}) < len(backwards) <= len(fetched):
                        used = fetched[-len(backwards) :]
                    batches = [{**batch, "loss": it["loss"], "draws": batch["rng"] not in (None, it["rng"])}
                               for batch, (_, it) in zip(used, backwards, strict=True)]  # fmt: skip
                    self.steps.append(Step(batches, event, clips, dropped))
                    fetched, backwards, clips, dropped = [], [], [], 0
                case "scheduler_step" if self.steps:
                    self.steps[-1].scheduler_steps += 1

    def all(self, kind: str) -> list[Event]:
        """Return the events of a kind."""
        return [event for event in self.events if event["event"] == kind]


@dataclass
class AuditedRun:
    """One run of the script."""

    name: str
    ranks: list[Rank]
    """Processes that recorded something."""
    has_ended: bool

    @property
    def first(self) -> Rank:
        """The first process."""
        return self.ranks[0]

    @property
    def accelerator(self) -> Event:
        """The Accelerator of the first process."""
        return self.first.all("accelerator")[0]

    @cached_property
    def steps(self) -> list[list[Step]]:
        """Steps that all ranks took, each by rank."""
        return list(map(list, zip(*(rank.steps for rank in self.ranks), strict=False)))

    def samples(self, index: int, key: str = "rows") -> Counter[int]:
        """Count the samples of a step over all ranks."""
        return sum((step.samples(key) for step in self.steps[index]), Counter())

    def passes(self, *, training: bool) -> list[list[Pass]]:
        """Return the passes over loaders that all ranks made, each by rank."""
        ranked = [[one for one in rank.passes if one.is_training == training] for rank in self.ranks]
        return list(map(list, zip(*ranked, strict=False)))

    def loader(self, key: str) -> Event:
        """Return how a loader was built."""
        return next(event for event in self.first.all("loader") if event["loader"] == key)

    def is_whole(self, ranks: Sequence[Pass]) -> bool:
        """Return True if a pass went to the end of its loader, or read as many samples as the dataset has."""
        samples = self.loader(ranks[0].loader)["samples"]
        return all(one.is_ended for one in ranks) or (samples is not None and samples <= sum(len(one.rows) for one in ranks))

    @property
    def batch(self) -> float:
        """Samples of a step, over all ranks; samples that all ranks have count once."""

        def size(steps: list[Step]) -> int:
            rows = [step.samples("rows") for step in steps]
            counts = [step.samples("indices").total() or one.total() for step, one in zip(steps, rows, strict=True)]
            return counts[0] if rows[1:] == rows[:-1] else sum(counts)

        return statistics.median(map(size, self.steps))


def scratch_copy(source: Path, folder: Path) -> None:
    """Copy a working folder: small files, and links to large ones. Raises UsageError if it has too many files."""
    count = itertools.count(1)

    def copy(file: str, place: str) -> None:
        if next(count) > _MOST_FILES:
            raise UsageError(f"{source} has over {_MOST_FILES:,} files, and each run copies it: start in the script's folder")
        if Path(file).is_file():
            (shutil.copy2 if Path(file).stat().st_size <= _COPIED_BYTES else os.symlink)(Path(file).resolve(), place)

    ignored = shutil.ignore_patterns(*_SKIPPED)
    shutil.copytree(source, folder, ignore=ignored, copy_function=copy, ignore_dangling_symlinks=True)


class Running:
    """Processes of a run."""

    def __init__(self, script: Script, name: str, processes: int, folder: Path, environment: Mapping[str, str], *,
                 work: Path | None = None, **orders: Any) -> None:  # fmt: skip
        """Start a run in a new folder. `work`: its working folder (default: a copy of this one); `orders`: the recorder's."""
        self.script, self.name, self.folder, self.start_s = script, name, folder, time.monotonic()
        here = work or folder / "work"
        folder.mkdir(parents=True)
        if work is None:
            scratch_copy(Path.cwd(), here)
        # A script in this folder is started from its copy. A path outside is absolute, and replaces `here`.
        file = here / str(Path(script.name).resolve()).removeprefix(f"{Path.cwd()}/")
        orders |= {"record": str(folder / "record"), "module": script.module}
        words = ["-m", "app.audit.recorder", json.dumps(orders), script.name if script.module else str(file), *script.arguments]
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = str(unused.getsockname()[1])
        own = {key: value for key, value in environment.items() if key not in _PLACES} | _ON_CPU
        if script.config_file and processes > 1:
            words = ["-m", "accelerate.commands.launch", "--config_file", str(script.config_file.resolve()),
                     "--main_process_port", port, *words]  # fmt: skip
            processes = int(bool(own.pop("ACCELERATE_USE_CPU")))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
                 "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}  # fmt: skip
        null, self.processes = subprocess.DEVNULL, list[subprocess.Popen[bytes]]()
        with (folder / "stderr").open("ab") as errors:
            for rank in map(str, range(processes)):
                place = {**group, "RANK": rank, "LOCAL_RANK": rank} if processes > 1 else {}
                self.processes.append(subprocess.Popen([sys.executable, *words], cwd=here, env={**own, **place}, stdin=null,
                    stdout=null, stderr=errors, process_group=0))  # fmt: skip

    def wait(self) -> AuditedRun:
        """Wait for the run's end, or for the time after its last compared step, and end what still runs.

        Raises UsageError if it is too slow, or fails: then after its own error.
        """
        script, enough_s = self.script, 0.0
        while None in (codes := [process.poll() for process in self.processes]) and not any(codes):
            files = self.folder.glob("record-0.jsonl")
            now, steps = time.monotonic(), sum(file.read_text().count('"event": "optimizer_step"') for file in files)
            enough_s = enough_s or (now if steps > script.steps else 0.0)
            if enough_s and now - enough_s > script.tail_s:
                break
            if not enough_s and now - self.start_s > script.timeout_s:
                raise UsageError(f"{self.name}: {steps} of {script.steps} steps in {script.timeout_s:.0f} s: let the script "
                                 "train a smaller model or on less data, or give --timeout SECONDS")  # fmt: skip
            time.sleep(_POLL_S)
        if any(codes):
            time.sleep(1.0)  # the others may print their own error
        self.end()
        if (code := next(filter(None, codes), 0)) not in (0, CRASHED):
            errors = "\n".join((self.folder / "stderr").read_text(errors="replace").splitlines()[-_TAIL_LINES:])
            sys.stderr.write(f"{errors}\n")
            reason = next(text for pattern, text in _REASONS.items() if re.search(pattern, errors))
            raise UsageError(f"{script.name} failed on {self.name} (exit code {code}): {reason}")
        ranks = [Rank(file) for file in sorted(self.folder.glob("record-*.jsonl"))]
        return AuditedRun(self.name, ranks, has_ended=any(codes) or None not in codes)

    def end(self) -> None:
        """End what still runs, with everything it started."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
