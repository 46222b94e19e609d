"""The names that `model.name` may be, known without torch: a login node refuses a misspelt one before the queue.

torchvision_models.txt is what `torchvision.models.list_models` says; a test holds it against the library.
"""

from __future__ import annotations

import functools
from pathlib import Path

from app.errors import did_you_mean

CONVNET = "convnet"
_LIST = Path(__file__).with_name("torchvision_models.txt")


@functools.cache
def known() -> tuple[str, ...]:
    """Return all names, our own first."""
    return CONVNET, *_LIST.read_text().split()


def problem(name: str) -> str | None:
    """Return what is wrong with a name, with the nearest that there are, or None."""
    if name in known():
        return None
    hint = did_you_mean(name, known(), otherwise=f"there are {', '.join(known())}")
    return f"model.name is {name!r}: no such model; {hint}"
