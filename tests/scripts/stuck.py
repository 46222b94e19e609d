"""A training in which the data source of one rank stops to answer: `stuck.py RANK sleep|lock ARGUMENTS OF app.train`."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

from app.tasks.image_classification.data.arrays import ArrayImages
from app.train import main

BATCHES = 10
stuck_rank, how = int(sys.argv[1]), sys.argv[2]
fetch, fetched = ArrayImages.fetch, 0


def fetch_or_hang(source: ArrayImages, *arguments: Any) -> Any:
    global fetched  # noqa: PLW0603 - one process, one counter
    fetched += 1
    if fetched > BATCHES and int(os.environ.get("RANK", "0")) == stuck_rank:
        if how == "lock":
            ctypes.PyDLL(None).sleep(3600)  # a PyDLL keeps Python's lock
        time.sleep(3600)
    return fetch(source, *arguments)


ArrayImages.fetch = fetch_or_hang  # type: ignore[method-assign]
main(sys.argv[3:])
