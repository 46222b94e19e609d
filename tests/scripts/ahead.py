"""app.train, whose batches a thread brings on the CPU, too: `ahead.py ARGUMENTS OF app.train`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from app import building
from app.data.loader import TOGETHER_BYTES, Ahead, InProcess
from app.train import main

plain = building._rank_batches


def fed_ahead(*arguments: Any, **keys: Any) -> Ahead:
    fed = plain(*arguments, **keys)
    if isinstance(fed, InProcess):
        fed = replace(fed, together_bytes=TOGETHER_BYTES)
    return Ahead(fed, arguments[0].device)


building._rank_batches = fed_ahead
main(sys.argv[1:])
