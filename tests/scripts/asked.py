"""Two ranks take steps without a training and are asked for things; rank 0 prints what each was told in each case."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.distributed.control import Control
from app.distributed.runtime import Runtime
from app.environment.launched import read
from app.errors import SamerunError
from app.recipe.schema import BatchPlan
from app.runs import run_folder
from app.runs.claim import Claim, claim

ASKED_AT, SAVED_AFTER, SAVE_S = 5, 40, 0.01

launched = read(os.environ)
runtime = Runtime(launched, BatchPlan(global_batch_size=2, data_ranks=2, accumulation=1))
rank, run_dir = launched.rank, Path(sys.argv[1])


def send(*of_rank: tuple[signal.Signals, ...]) -> Callable[[], None]:
    def ask() -> None:
        for number in of_rank[rank]:
            signal.raise_signal(number)

    return ask


def touch(*names: str) -> Callable[[], None]:
    def ask() -> None:
        for name in names if rank == 0 else ():
            (run_dir / name).touch()

    return ask


def take_over() -> None:
    if rank == 0:
        claim(run_dir)


def files() -> list[str]:
    return sorted(path.name for path in run_dir.iterdir() if path.name != run_folder.STARTS)


def ask_nothing() -> None: ...


def told(ask: Callable[[], None], save_every_s: float | None, left_s: float | None) -> dict[str, Any]:
    """Step until all are told something, and on until a save is done; return what this rank was told, and when."""
    runtime.launched = replace(launched, end_time_s=None if left_s is None else time.time() + left_s)
    control = Control(runtime, ours or Claim(run_dir, Path()), total_steps=10**6, state_bytes=0, save_every_s=save_every_s)
    with control:
        step, request = 0, control.agreed(0)
        while not request.why:
            step += 1
            time.sleep(0.001 * (1 + rank))
            if step == ASKED_AT:
                ask()
            request = control.agreed(step)
        while_saving = [control.agreed(later).why for later in range(step + 1, step + SAVED_AFTER)] if not request.stop else []
        files_before = files()
        control.saved(SAVE_S)
        control.record_outcome(step, request)
    return {
        "step": step,
        "why": request.why,
        "stop": request.stop,
        "go_on": request.go_on,
        "while_saving": [why for why in while_saving if why],
        "files": (files_before, files()),
    }


CASES: dict[str, tuple[Callable[[], None], float | None, float | None]] = {
    "SIGTERM twice": (send((), (signal.SIGTERM, signal.SIGTERM)), None, None),
    "SIGTERM and SIGINT": (send((signal.SIGTERM,), (signal.SIGINT,)), None, None),
    "SAVE": (touch(run_folder.SAVE), None, None),
    "STOP and SAVE": (touch(run_folder.STOP, run_folder.SAVE), None, None),
    "minutes": (ask_nothing, 0.05, None),
    "end": (ask_nothing, None, 33.0),
    "end at once": (ask_nothing, None, 10.0),
    "SIGUSR1 after nohup": (send((signal.SIGHUP,), (signal.SIGUSR1,)), None, None),
    "taken over": (take_over, None, None),
}

for case, (ask, save_every_s, left_s) in CASES.items():
    ours = claim(run_dir) if rank == 0 else None
    runtime.accelerator.wait_for_everyone()
    answer: dict[str, Any]
    if "nohup" in case:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        answer = told(ask, save_every_s, left_s)
    except SamerunError as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    answers = runtime.gather(answer)
    if rank == 0:
        print(json.dumps({"case": case, "ranks": answers}), flush=True)

runtime.close()
