"""In place of `accelerate launch` and its training, which take ten seconds to start: a process that counts steps.

With this folder first on the PYTHONPATH, all else is real: samerun, the scheduler, the signals. The steps done are kept in the
run folder. IN_PLACE says what happens at which step; `always` at every start, all else once.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from app.environment.launched import errors_folder
from app.errors import DataError, leave_with
from app.runs.run_folder import Recorder

STEPS = 100


def train(run_dir: Path, happens: str, at: int) -> int:
    (run_dir / "outcome.json").unlink(missing_ok=True)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, _: asked.append(number))
    (run_dir / "recipe.yaml").touch()
    done = run_dir / "steps"
    first = int(done.read_text()) if done.exists() else 0
    until, resume = os.environ.get("SAMERUN_END_TIME"), sys.argv[sys.argv.index("--resume") + 1]
    print(f"from step {first}, until {until}, process {os.getpid()}, --resume {resume}", flush=True)
    for step in range(first, STEPS):
        done.with_name("steps.new").write_text(str(step))
        done.with_name("steps.new").replace(done)  # it may be killed at any moment
        if happens == "always" or (step == at and first < at):
            happen(happens, asked)
        if asked:
            time.sleep(1.0 if happens == "slow" else 0.0)
            return end(run_dir, "stopped", go_on=signal.SIGINT not in asked, step=step)
        time.sleep(0.05)
    return end(run_dir, "finished", go_on=False, step=STEPS)


def happen(what: str, asked: list[int]) -> None:
    if what == "stop":  # as at the end of the job's time
        asked.append(signal.SIGUSR1)
    elif what in ("always", "killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "orphan":
        os.kill(os.getppid(), signal.SIGKILL)
    elif what == "mistake":
        error = DataError("not there")
        Recorder(errors_folder(os.environ)).record(error, rank=0)
        leave_with(error, rank=0)


def end(run_dir: Path, outcome: str, *, go_on: bool, step: int) -> int:
    said = {"outcome": outcome, "reason": "so", "go_on": go_on, "step": step, "total_steps": STEPS, "time": time.time()}
    (run_dir / "outcome.json").write_text(json.dumps(said))
    return 0


if __name__ == "__main__":
    folder = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    if "IN_PLACE_RANK" in os.environ:
        what, step = os.environ.get("IN_PLACE", "nothing 1").split()
        sys.exit(train(folder, what, int(step)))
    rank = subprocess.run([sys.executable, *sys.argv], env=os.environ | {"IN_PLACE_RANK": "1"}, check=False)
    rank.check_returncode()  # as accelerate launch does
