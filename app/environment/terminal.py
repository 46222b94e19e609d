"""The terminal of a process, which may close while the process runs: SIGHUP says so, and every later write fails."""

from __future__ import annotations

import os
from collections.abc import Collection


def those_on_a_terminal() -> list[int]:
    """Return which of stdin, stdout and stderr are terminals. To be asked beforehand: a lost terminal does not tell."""
    return [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]


def let_go(descriptors: Collection[int]) -> None:
    """Have what is written there go nowhere, and nothing be read: an error for it would end what still has to save."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
