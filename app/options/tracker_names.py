"""The names that --trackers may hold, known without Accelerate; a test holds them against the library."""

from __future__ import annotations

import difflib
import importlib.util

from app.errors import TrackerError

# Modules of which Accelerate wants one (accelerate 1.15, utils/imports.py), and what pip calls the package.
_WANTED = {
    "aim": ("aim",), "clearml": ("clearml",), "comet_ml": ("comet_ml",), "dvclive": ("dvclive",), "mlflow": ("mlflow",),
    "swanlab": ("swanlab",), "tensorboard": ("tensorboard", "tensorboardX"), "trackio": ("trackio",), "wandb": ("wandb",),
}  # fmt: skip
NAMES = tuple(_WANTED)


def chosen(text: str) -> list[str]:
    """Return the names in the value of --trackers, each once; `none` is no tracker.

    Raises TrackerError for a name that is unknown, or whose library is not installed here.
    """
    names = list(dict.fromkeys(name for name in map(str.strip, text.split(",")) if name and name != "none"))
    for name in names:
        if name not in NAMES:
            close = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise TrackerError(f"--trackers has {name!r}: unknown tracker; {hint}Known are {', '.join(NAMES)}; or none")
        if not any(map(importlib.util.find_spec, _WANTED[name])):
            raise TrackerError(f"--trackers has {name}, which is not installed here: pip install {name.replace('_', '-')}")
    return names
