"""A start of a run that is stopped (SIGSTOP) before one of its operations on files, and goes on when its folder was taken over.

    python tests/scripts/stopped.py

For each line of its input, `KIND NUMBER FOLDER`, a fork claims the folder, writes what KIND says, and stops before so many
operations. It prints `stopped`, or `done` if there were not so many; a line `go` continues it, and its last words are printed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from app.checkpoints import step_folders
from app.distributed.watchdog import Watchdog
from app.errors import CheckpointError, SamerunError
from app.init.region import Piece, Region
from app.metrics.trackers import TensorBoard, tracked
from app.runs.claim import Claim, claim
from app.runs.run_folder import Recorder

APPENDS = "append"
WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", APPENDS)
"""Python says these before it does them (sys.addaudithook), and we that a line is appended."""


def lines(ours: Claim) -> None:
    for step in range(5, 9):
        for name in ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "ledger.jsonl"):
            sys.audit(APPENDS, str(ours.path))
            ours.append(name, {"step": step, "written_by": "the older start"})
        sys.audit(APPENDS, str(ours.path))
        ours.sync()


def start(ours: Claim) -> None:
    ours.remove("outcome.json")
    ours.go_on_after(2)
    for name in ("preset.yaml", "recipe.yaml", "run.json"):
        ours.write_text(name, "of the older start")


def result(ours: Claim) -> None:
    ours.write_json("result.json", {"of": "the older start"})
    ours.write_json("outcome.json", {"of": "the older start"})
    ours.remove("STOP")


def checkpoint(ours: Claim) -> None:
    for step in (3, 5):
        folder = step_folders.begin(ours, step)
        entry = step_folders.write_pieces(folder, 0, [Piece("weight", "w", (3,), Region.flat(0, 3), torch.zeros(3))])
        saved = step_folders.commit(ours, step, [entry], state={"step": step}, buffers={})
        step_folders.prune(ours, saved, keep_last=1)


def trackers(ours: Claim) -> None:
    run = tracked(ours, project="digits", first_step=2, logged={})
    TensorBoard(run, {"seed": 0}).log({"loss": 1.0}, step=5)


def stacks(ours: Claim) -> None:
    runtime: Any = SimpleNamespace(launched=SimpleNamespace(rank=0))
    Watchdog(runtime, ours, Recorder(None), timeout_s=0)._write_stacks("the older start stands still")


def profile(ours: Claim) -> None:
    made = ours.place / "profile"
    with ours.errors(made):
        made.mkdir()
        (made / "rank-0.json.gz").write_bytes(b"of the older start")
        ours.put(made, ours.path / "profile")


KINDS: dict[str, Callable[[Claim], None]] = {
    kind.__name__: kind for kind in (lines, start, result, checkpoint, trackers, stacks, profile)
}


def write(kind: str, number: int, folder: Path) -> str:
    """Do it all, and return what the user is told."""
    seen = -1

    def stop(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in WATCHED and any(str(folder) in str(path) for path in arguments[:2]):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGSTOP)

    if kind == "claim":
        sys.addaudithook(stop)
    ours = claim(folder)
    if kind == "claim":
        ours.check()
        return ""
    if kind != "start":
        ours.go_on_after(4)
    sys.addaudithook(stop)
    try:
        KINDS[kind](ours)
        return ""
    except CheckpointError:
        ours.check()
        raise


def main() -> None:
    for order in sys.stdin:
        kind, number, folder = order.split()
        reading, writing = os.pipe()
        writer = os.fork()
        if writer == 0:
            try:
                said = write(kind, int(number), Path(folder))
            except SamerunError as error:
                said = f"{type(error).__name__}: {error}"
            except OSError as error:
                said = f"unsaid: {error!r}"
            os.write(writing, said.encode())
            os._exit(0)
        os.close(writing)
        _, status = os.waitpid(writer, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            print("stopped", flush=True)
            sys.stdin.readline()
            os.kill(writer, signal.SIGCONT)
            os.waitpid(writer, 0)
        else:
            print("done", flush=True)
        with os.fdopen(reading) as pipe:
            print(pipe.read().replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
