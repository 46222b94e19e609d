"""A user's task with what it may leave out."""

from __future__ import annotations

from typing import Any


class Complete:
    """A user's task in the full form of `app.task.Task`."""

    def __init__(self, task: Any, *, name: str) -> None:
        self._task, self._name = task, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def prepare(self) -> None:
        """Let the task bring its data to this machine; the other processes of the node wait."""
        if hasattr(self._task, "prepare"):
            self._task.prepare()
