"""How a run ended, from the file that it writes into its folder.

The exit code of its launcher does not tell a run that has stopped from one that failed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from app.files import regular

_FILE = "outcome.json"


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
    """That of a run folder, looked at before a run and after it: only what has changed is its outcome, whatever clocks say."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / _FILE
        self._before = self._content()

    def outcome(self) -> RunOutcome | None:
        """Return the outcome that was written since, or None if there is none."""
        content = self._content()
        if content is None or content == self._before:
            return None
        said = json.loads(content)
        return RunOutcome(**{name: said[name] for name in RunOutcome.__dataclass_fields__})

    def _content(self) -> bytes | None:
        try:
            return regular.content(self._file)
        except OSError:  # a file that cannot be read tells as little as none; who writes into the folder says why
            return None
