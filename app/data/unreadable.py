"""Which samples of a split cannot be read: each is fetched once, as a training or an evaluation would."""

from __future__ import annotations

from typing import Any

import numpy as np

from app.data.draws import HostDraws
from app.data.many import in_order
from app.data.progress import progress
from app.errors import DataError

_PIECE = 16


def unreadable(samples: Any, *, split: str, seed: int, processes: int) -> list[tuple[int, str]]:
    """Return the numbers of the samples that cannot be fetched, ascending, and what each one's error says.

    `samples` are `Samples`; those of the training split get the draws of the first epoch. Processes other than this one help
    where `samples` say that workers do.
    """

    def fetch(numbers: np.ndarray) -> str | None:
        try:
            samples.fetch(numbers, HostDraws(seed, numbers) if split == "train" else None)
        except DataError as error:
            return str(error)
        return None

    def look(piece: range) -> list[tuple[int, str]]:
        numbers = np.arange(piece.start, piece.stop)
        together = fetch(numbers)
        if together is None:
            return []
        alone = [(number, fetch(np.array([number]))) for number in piece]
        return [(number, why) for number, why in alone if why is not None] or [(piece.start, together)]

    found = []
    with progress(f"reading {split}", len(samples), "samples") as advance:
        for some in in_order(look, len(samples), piece=_PIECE, processes=processes if samples.workers else 1):
            found += some
            advance(_PIECE)
    return found
