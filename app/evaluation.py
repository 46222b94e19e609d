"""Exact evaluation: every sample counts exactly once, on any number of processes.

The ranks get equal shares because padding fills them up; padded samples have weight 0, and what is added up over the ranks
are counts and sums, never means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from app.data.loader import batches_of
from app.data.samples import Batch
from app.distributed.runtime import Runtime
from app.errors import DataError
from app.optim import parameter_groups
from app.task import Form, Table, Task


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on a split of a data set."""

    split: str
    """Its name, `validation` or `test`, as in `test_accuracy`."""
    samples: int
    """Samples counted."""
    scores: Mapping[str, float]
    """Scores by name."""
    tables: Mapping[str, Table]
    """Scores of several named things each, such as classes."""
    rows: Tensor | None = field(compare=False, repr=False)
    """The task's values for each sample, float64 [samples, R] on the CPU, in the order of the samples."""
    texts: Sequence[tuple[str, str]] = field(default=(), compare=False)
    """Titles and texts that the task made of a few samples."""

    def as_metrics(self) -> dict[str, float]:
        """Return the scores by the names they have in the run folder."""
        return {f"{self.split}_{name}": score for name, score in self.scores.items()}

    def in_words(self, *names: str) -> str:
        """Return some of the scores, those that there are, each once: `test accuracy 0.9806, test loss 0.0712`."""
        there = [name for name in dict.fromkeys(names) if name in self.scores]
        return ", ".join(f"{self.split} {name.replace('_', ' ')} {number(self.scores[name])}" for name in there)


def number(value: float) -> str:
    """Return a loss or score as a line shows it."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4e}"


@torch.no_grad()
def evaluate(
    runtime: Runtime,
    task: Task,
    model: torch.nn.Module,
    loader: Iterable[Batch | DataError],
    *,
    split: str,
    size: int,
    form: Form,
    shown: Batch | None = None,
    seed: int = 0,
) -> Evaluation:
    """Return the scores of `model` on the `size` samples of a prepared `loader`; all ranks call it and get the same.

    With the batch `shown` the task makes texts. torch's generators, seeded by `seed`, draw the same for them on every rank and
    each time, and continue afterwards where they were. Raises DataError if not every sample was counted exactly once.
    """
    was_training = model.training
    runtime.average_buffers(model)
    model.eval()
    totals: dict[str, tuple[Tensor, Tensor]] = {}
    numbers, rows = [], []
    for batch in batches_of(loader):
        runtime.alive()
        found = task.metrics(model, task.preprocess(batch, None, form=form), batch["samples"] >= 0)
        for name, (part, count) in found.sums.items():
            total = totals.setdefault(name, (torch.zeros_like(part), torch.zeros_like(count)))
            total[0].add_(part)
            total[1].add_(count)
        numbers.append(batch["samples"])
        if found.rows is not None:
            rows.append(found.rows)
    texts: Sequence[tuple[str, str]] = ()
    if shown is not None:
        with torch.random.fork_rng([runtime.device] if runtime.device.type == "cuda" else []):
            torch.manual_seed(seed)
            copied = {name: it.clone() if isinstance(it, Tensor) else it for name, it in shown.items()}
            texts = list(task.generate_samples(model, task.preprocess(copied, None, form=form)))
    parameter_groups.set_training(model, mode=was_training)
    counted = int(runtime.reduce((torch.cat(numbers) >= 0).sum()))
    if counted != size:
        raise DataError(f"the evaluation counted {counted} samples instead of {size}: the loader lost or repeated samples.")
    gathered = None
    if rows:
        numbered = runtime.gather_rows(torch.cat([torch.cat(numbers)[:, None].double(), torch.cat(rows).double()], dim=1)).cpu()
        numbered = numbered[numbered[:, 0] >= 0]
        gathered = numbered[numbered[:, 0].argsort(), 1:]
    if totals:  # else all is in the rows
        parts = [part for pair in totals.values() for part in pair]
        flat = runtime.reduce(torch.cat([part.double().flatten() for part in parts])).cpu()
        summed = iter(flat.split([part.numel() for part in parts]))
        totals = {name: (next(summed).view_as(one), next(summed).view_as(other)) for name, (one, other) in totals.items()}
    # From one rank for all: they decide by scores what they do next.
    scores, tables = runtime.from_main(task.reduce_metrics(totals, gathered))
    return Evaluation(split, counted, scores, tables, gathered, texts)
