"""How a run ended, from the file that it writes into its folder.

The exit code of its launcher does not tell a run that has stopped from one that failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from app.errors import TrainingError
from app.files import paths
from app.files.lines import parsed

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

    def of_success(self, exit_code: int) -> RunOutcome | None:
        """Return the outcome, if any. Raises TrainingError for a run without one whose processes succeeded all the same."""
        outcome = self.outcome()
        if exit_code == 0 and outcome is None:
            raise TrainingError(
                "the training process ended with exit code 0, but it neither finished the run nor stopped it "
                f"({self._file} was not written): something called os._exit, perhaps your task file or a library that it uses"
            )
        return outcome

    def outcome(self) -> RunOutcome | None:
        """Return the outcome that was written since, or None if there is none."""
        content = self._content()
        if content is None or content == self._before:
            return None
        try:
            said = parsed(content)
            return RunOutcome(**{name: said[name] for name in RunOutcome.__dataclass_fields__})
        except (ValueError, KeyError, TypeError):  # as little as a file that cannot be read
            return None

    def _content(self) -> bytes | None:
        try:
            return paths.read_regular(self._file)
        except OSError:  # a file that cannot be read tells as little as none; who writes into the folder says why
            return None
