"""Runs one of our modules, or Accelerate's launcher, unaffected by files in the working folder.

    python /PATH/OF/launch/run_module.py MODULE ARGUMENTS...

is `python -m MODULE ARGUMENTS...`, which looks for MODULE and all that it imports in the working folder first: a user may have
an `app.py`, a `launch/` or a `datasets/` there. `python -P` does that as well, from Python 3.11 on.

The end of `accelerate launch` is corrected: the exit code is the first failed process's, where Accelerate gives 1,
and that process is recorded (app/runs/run_folder.py). The tracebacks of the launchers are left out, and torchrun's
summary where `samerun launch` repeats the first error.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

ACCELERATE = "accelerate.commands.launch"
_FILE = Path(__file__).absolute()


def program(module: str) -> list[str]:
    """Return the command that runs `module`, without its arguments."""
    return [sys.executable, str(_FILE), module]


def main() -> None:
    """Run the module that the first argument names, with the others."""
    here, root = _FILE.resolve().parent, str(_FILE.parent.parent)
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]  # Python put it there, as a script's folder
    sys.path.insert(0, root)
    import launch  # noqa: F401 - found now, it is found for good

    sys.path.pop(0)
    if root not in sys.path:  # a checkout that is not installed; last, as nothing of ours is looked for there any more
        sys.path.append(root)
    module = sys.argv.pop(1)
    if module == ACCELERATE:
        _launch_processes()
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _launch_processes() -> None:
    # DeepSpeed, which it imports, warns where there is no GPU; the ranks say that better, on their first line.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ended while it starts, it would say where, in its imports
    from app.environment.host import imports_explained
    from app.errors import SamerunError, leave_with

    try:
        with imports_explained():
            runpy.run_module(ACCELERATE, run_name="__main__", alter_sys=True)
    except SamerunError as error:
        leave_with(error, rank=0)
    except subprocess.CalledProcessError as error:  # one process
        sys.exit(as_shells_say(error.returncode))
    except Exception as error:
        from app.environment.topology import ERRORS
        from app.runs.run_folder import ProcessFailure, record_failure

        if (kind := type(error).__name__) not in ("ChildFailedError", "SignalException"):
            raise
        folder, torchruns = os.environ.get(ERRORS), cast(Any, error)
        if not folder or kind == "SignalException":  # else `samerun launch` repeats the error
            sys.stderr.write(f"{kind}: {error}\n")
        if kind == "SignalException":
            sys.exit(as_shells_say(-torchruns.sigval))
        rank, failure = torchruns.get_first_failure()
        if folder:
            record_failure(Path(folder), ProcessFailure(exit_code=failure.exitcode, rank=rank, time=failure.timestamp))
        sys.exit(as_shells_say(failure.exitcode))


def as_shells_say(code: int) -> int:
    """Return an exit code as Python has it, -9 after SIGKILL, as shells do: 137."""
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    main()
