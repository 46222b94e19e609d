"""app.train, whose batches a thread brings on the CPU, too: `ahead.py ARGUMENTS OF app.train`."""

from __future__ import annotations

import functools
import sys
from typing import Any

from app import building
from app.data import loader
from app.data.loader import Ahead
from app.train import main

plain = building._fed


def fed_ahead(*arguments: Any, **keys: Any) -> Ahead:
    fed = plain(*arguments, **keys)
    unwritten = fed.unwritten if isinstance(fed, loader.InProcess) else functools.partial(loader.unwritten, fed)
    return Ahead(unwritten, arguments[0].device)


building._fed = fed_ahead
main(sys.argv[1:])
