"""Environment variables that several rooms read, and how a value is read. Pure: the environment is a mapping passed in."""

from __future__ import annotations

from collections.abc import Mapping

from app.errors import TopologyError

HOST_SUFFIX = "SAMERUN_HOST_SUFFIX"
"""Variable: what turns a host's name into its name in the fast network, where a site has names for that (JUWELS: `i`)."""

END_TIME = "SAMERUN_END_TIME"
"""Variable: when the job's time is over, in Unix seconds. The ranks save and stop before it. Where no scheduler says it, a
user may: `SAMERUN_END_TIME=$(date -d '+2 hours' +%s)`."""
SUBMIT_TIME, START_TIME = "SAMERUN_SUBMIT_TIME", "SAMERUN_START_TIME"
"""Variables: when the job was submitted, and when it was started this time, in Unix seconds."""

LAUNCHER = "SAMERUN_LAUNCHER"
"""Variable: the `samerun launch` that sees to a process on its machine, as the id of its process, a dash and a random word."""

ERRORS = "SAMERUN_ERRORS"
"""Variable: the folder in which the processes of a start record why they fail (app/runs/failure.py)."""

PRESET_FILE = "SAMERUN_PRESET_FILE"
"""Variable: the preset of a process that `samerun launch` starts itself, with no `accelerate launch --config_file` above it."""


def number(environment: Mapping[str, str], name: str, *, default: int = 0) -> int:
    """Return the whole number that a variable holds. Raises TopologyError for anything else."""
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise TopologyError(f"{name} is {text!r}: it must be a whole number")
    return int(text)


def said(environment: Mapping[str, str], *names: str) -> str:
    """Return the variables with their values, for messages: `SLURM_NODEID=1`."""
    return ", ".join(f"{name}={environment.get(name, '(not set)')}" for name in names)


def port_of_job(number: int, part: int = 0, *, apart: int = 97) -> int:
    """Return a TCP port, 12000 to 31999, that jobs on one head hardly share: below those that Linux deals out (32768 and up).

    Jobs meet only if their numbers differ by a multiple of 20000. `part` is the index of a task of an array, or of a step,
    whose ports lie so far `apart`, which has no factor in common with 20000: all of a job differ and, with 97, also from
    those of the jobs submitted after it for the next 96.
    """
    return 12000 + (number + apart * part) % 20000


def short(host: str) -> str:
    """Return the name of a host without its domain."""
    return host.partition(".")[0]


def with_suffix(host: str, environment: Mapping[str, str]) -> str:
    """Return the name of `host` in the fast network: `jwb0001.site` and SAMERUN_HOST_SUFFIX=i give `jwb0001i.site`."""
    name, dot, domain = host.partition(".")
    return f"{name}{environment.get(HOST_SUFFIX, '')}{dot}{domain}"
