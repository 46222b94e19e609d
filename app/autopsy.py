"""Loss and gradient norm of each sample of a step, alone, with the weights before it: `samerun replay RUN --step K --samples`.

Runs in the process of a replay (`app/checks/replay.py`), in place of the loop: it takes the loop's own passes, in micro-batches
of one sample, or of one group where a task's samples depend on each other, and takes no step.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from app.data.samples import Batch, Samples
from app.distributed.control import REPLAYED
from app.loop import Ended, Training, take_pass
from app.optim import parameter_groups
from app.task import Task, overrides

_MOST_SHOWN = 8
"""Most samples to show."""
_MOST_NUMBERS = 24
"""Most values of a field to show of a sample that has neither an image nor a text."""


def examine(run: Training, samples: Samples, file: Path) -> Ended:
    """Write loss and gradient norm of each sample or group of the next step into a JSON file, the largest norm first.

    A number that is not finite becomes null, and comes first.
    """
    parameter_groups.set_training(run.model, mode=True)
    rows: list[dict[str, Any]] = []
    worst: list[tuple[dict[str, Any], Batch]] = []
    with run.feed:
        for batch, _ in run.feed.passes(run.first_step):
            found = {"loss": float(take_pass(run, batch, 1.0).mean), "gradient_norm": run.steps.take_norm()}
            finite = {name: it if math.isfinite(it) else None for name, it in found.items()}
            rows.append({"samples": [int(it) % len(samples) for it in batch["numbers"]], **finite})
            worst = sorted([*worst, (rows[-1], batch)], key=lambda pair: _order(pair[0]))[:_MOST_SHOWN]
    for row, batch in worst:
        row.update(_preview(run.task, samples, batch))
    file.write_text(json.dumps({"step": run.first_step + 1, "rows": sorted(rows, key=_order)}))
    return Ended(run.first_step, REPLAYED)


def _order(row: Mapping[str, Any]) -> float:
    return -math.inf if row["gradient_norm"] is None else -row["gradient_norm"]


def _preview(task: Task, samples: Samples, batch: Batch) -> dict[str, str]:
    """Return the names of these samples, if any, and their image (PNG in base64) or text, or their values as text."""
    name = getattr(samples, "name", None)
    found = {"name": ", ".join(name(int(it) % len(samples)) for it in batch["numbers"])} if name else {}
    if overrides(task, "preview"):
        shown, file = task.preview(batch, len(batch["samples"]))[1], io.BytesIO()
        if isinstance(shown, str):
            return {**found, "text": shown}
        Image.fromarray(shown).save(file, format="PNG")
        return {**found, "image": base64.b64encode(file.getvalue()).decode()}
    lines = []
    for field, values in batch.items():
        if isinstance(values, torch.Tensor) and field != "samples":
            first = " ".join(f"{number:.6g}" for number in values.flatten()[:_MOST_NUMBERS].tolist())
            lines.append(f"{field}: {first}{' ...' * (values.numel() > _MOST_NUMBERS)}")
    return {**found, "text": "\n".join(lines)}
