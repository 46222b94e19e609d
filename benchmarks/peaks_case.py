"""One rank of `python -m benchmarks.peaks`: a training, or an evaluation, and the most memory of its own in each part of it.

    python -m benchmarks.peaks_case FOLDER train|evaluate WORDS...

writes FOLDER/PROCESS.json: MiB of anonymous memory by the name of the part, less what the process had when it began.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.memory import status_bytes

_EVERY_S = 0.005


class Peaks(threading.Thread):
    """The most anonymous memory in each part so far."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.part = ""
        self.mib: dict[str, float] = {}
        self._before = 0.0
        self._over = threading.Event()

    def begin(self) -> None:
        """Count from what the process has now."""
        self._before = _own_mib()
        self.start()

    def run(self) -> None:
        """Look until `end`."""
        while not self._over.wait(_EVERY_S):
            self.mib[self.part] = max(self.mib.get(self.part, 0.0), _own_mib() - self._before)

    def end(self, file: Path) -> None:
        """Write what was seen."""
        self._over.set()
        self.join()
        file.write_text(json.dumps(self.mib))


def main(folder: Path, what: str, words: list[str]) -> None:
    """Run the training or the evaluation in parts that are told apart."""
    import torch
    from transformers import LlamaForCausalLM  # noqa: F401  (50 MiB of code)

    from app import ending, evaluate, loop, session, train
    from app.checkpoints.checkpoint import Checkpoints
    from app.ranks import runtime  # noqa: F401  (before anything is counted, as is what the next lines import)

    torch.ones(2, 2) @ torch.ones(2, 2)
    peaks = Peaks()

    def named(owner: Any, name: str, part: str, *, first: Callable[[], None] = lambda: None) -> None:
        plain = getattr(owner, name)

        def called(*given: Any, **more: Any) -> Any:
            peaks.part = part
            first()
            return plain(*given, **more)

        setattr(owner, name, called)

    if what == "evaluate":
        peaks.part = "evaluating"
        peaks.begin()
    else:
        named(session, "agree", "building", first=peaks.begin)
        named(session, "prepare", "preparing")
        named(Checkpoints, "restore", "resuming")
        named(loop, "train", "training")
        named(Checkpoints, "save", "saving")
        named(ending, "finish", "ending")
    try:
        (train if what == "train" else evaluate).main(words)
    finally:
        peaks.end(folder / f"{os.getpid()}.json")


def _own_mib() -> float:
    return status_bytes("RssAnon") / 2**20


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
