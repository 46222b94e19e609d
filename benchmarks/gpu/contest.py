"""Programs that take turns on one device, and their lines of a table.

A program that fails leaves the contest, with its last words in the table, and the others go on: the first minutes on a new
machine are short.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.errors import TrainingError
from benchmarks import contestants
from benchmarks.figures import Spread

HAND, OURS = "hand-written on a device", "samerun"
"""Names of the programs as `benchmarks.bench_case` knows them."""


@dataclass(frozen=True)
class Goal:
    """What a figure is wanted to be; nothing, if neither is given."""

    least: float | None = None
    most: float | None = None

    def verdict(self, value: float) -> str:
        """Say it, and whether the figure is that: `>= 0.98: met`."""
        if self == Goal():
            return ""
        if self.least is not None:
            return f">= {self.least:g}: {'met' if value >= self.least else 'NOT MET'}"
        assert self.most is not None
        return f"<= {self.most:g}: {'met' if value <= self.most else 'NOT MET'}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A program that takes part."""

    task: Mapping[str, Any]
    """What the module of the contest takes: of `benchmarks.bench_case` a `benchmarks.work.Task`."""
    variables: Mapping[str, str]
    """Of its environment, as a preset sets them."""
    beside: Mapping[str, Goal] = field(default_factory=dict)
    """The entries of the same rounds that it is compared with, and what is wanted of that."""


@dataclass(frozen=True)
class Found:
    """What the rounds said: wall-clock microseconds a step by name, one for each round; and why others failed."""

    wall_us: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def pairs(self, name: str, beside: str) -> list[tuple[float, float]]:
        """Return the us a step of both, of the rounds that both were in."""
        return list(zip(self.wall_us.get(name, ()), self.wall_us.get(beside, ()), strict=False))


def compete(  # noqa: PLR0913  (keyword-only after the entries)
    entries: Mapping[str, Entry],
    *,
    steps: int,
    rounds: int,
    threads: int,
    folder: Path,
    end_s: float,
    case: str = "benchmarks.bench_case",
) -> Found:
    """Let them take turns for so many rounds of so many steps, or until `end_s` of the monotonic clock, but one round at least.

    Each is a process of the module `case` and writes its words to `folder`; each round goes to stderr as well, in case the rest
    is never reached.
    """
    found = Found()
    with ExitStack() as stack:
        running: dict[str, contestants.Contestant] = {}
        for number, (name, entry) in enumerate(entries.items()):
            log = folder / f"{number}.log"
            started = contestants.start(name, dict(entry.task), threads=threads, log=log, variables=entry.variables, case=case)
            running[name] = stack.enter_context(started)

        def each(what: Callable[[contestants.Contestant], float], names: Iterable[str]) -> dict[str, float]:
            done = {}
            for name in names:
                try:
                    done[name] = what(running[name])
                except TrainingError as error:
                    found.failures[name] = str(error)
                    del running[name]
            return done

        each(contestants.Contestant.take_first_step, list(running))
        each(lambda contestant: contestant.run(steps).wall_s, list(running))
        for number in range(rounds):
            if number and time.monotonic() > end_s:
                break
            measured = each(lambda contestant: contestant.run(steps).wall_us_per_step, sorted(running, reverse=number % 2 == 1))
            for name, wall_us in measured.items():
                found.wall_us.setdefault(name, []).append(wall_us)
            sys.stderr.write(f"round {number + 1}, us a step: {measured}\n")
    return found


def compared(name: str, entry: Entry, found: Found) -> tuple[str, str]:
    """Return its speed beside each of those that it is compared with, and what that says of the goals."""
    shares, verdicts = [], []
    for beside, goal in entry.beside.items():
        if pairs := found.pairs(name, beside):
            share = Spread.of([other / own for own, other in pairs])
            shares.append(f"{share.text('.3f')} of {beside}")
            verdicts.append(goal.verdict(share.median))
    return "; ".join(shares), "; ".join(filter(None, verdicts))


def say(text: str) -> None:
    """Print it now: what comes next may be killed."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def failed_line(name: str, words: str, *, columns: int) -> str:
    """Return the line of a table that tells why a program failed; all its words go to stderr."""
    sys.stderr.write(f"{name}: {words}\n")
    last = words.splitlines()[-1].replace("|", "\\|")
    return f"| {name} | FAILED: {last} |{' |' * (columns - 2)}"
