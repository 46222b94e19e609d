"""The part of a run's page that its task renders, such as pictures with their predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from app.reports.past_run import PastRun

_PAGES: Mapping[str, str] = {"image_classification": "app.tasks.image_classification.page"}
"""By the task of run.json, what to import; only then, since what a page draws with takes a while to import."""


class Own(Protocol):
    """What the template of a task shows."""

    @property
    def complaints(self) -> Sequence[str]:
        """A sentence for each thing that is missing."""


class TaskPage(Protocol):
    """The module that a task brings."""

    TEMPLATE: Path
    """Extends page.html.jinja and fills its blocks `style` and `task` from `own`, which is what `read` returned."""

    def read(self, folder: Path) -> Own | None:
        """Return what the run in `folder` left of its task; None if it left nothing. Raises RunFolderError for broken files."""


def page_of(run: PastRun) -> TaskPage | None:
    """Return what shows the task of a run; None if that brings nothing."""
    module = _PAGES.get(str(run.about.get("task")))
    return cast(TaskPage, import_module(module)) if module else None
