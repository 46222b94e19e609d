"""Paths as users write them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from app.errors import RecipeError


def filled_in(key: str, text: str) -> str:
    """Return the path of a recipe's key with `~` and variables replaced. Raises RecipeError for a variable that is not set."""
    filled = os.path.expandvars(Path(text).expanduser())
    missing = re.search(r"\$\{?(\w+)", filled)
    if missing:
        raise RecipeError(
            f"{key} is {text}, and the environment variable {missing[1]} is not set: set it, or write the path itself"
        )
    return filled
