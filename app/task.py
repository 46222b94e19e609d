"""The contract of a task: what is special about pictures, text or a problem of one's own, and all that the application asks.

A task is one process's view. It knows no rank, no device and no strategy: the application deals the samples, brings batches to
the device, distributes the model, and adds up over the ranks.

Your own task is a class in a file that ends with `task = MyTask`. It needs three methods, and no base class:

    class MyTask:
        def samples(self, split):
            x, y = read_my_data(split)
            return Samples.of({"x": x, "y": y})

        def model(self, facts):
            return nn.Linear(4, 1)

        def loss(self, model, batch):
            return Loss(F.mse_loss(model(batch["x"]), batch["y"]), len(batch["x"]))

Everything else is optional (`Task` says what happens without it). Before the first step the application checks the rules, and
names a broken one in a sentence.

What keeps a run the same on any topology:

- Random choices come from `draw` alone. It is None where nothing is random, as in an evaluation.
- `loss` calls the model exactly once and touches none of its submodules, or FSDP2 and ZeRO break.
- A sample's loss does not depend on other samples of its pass, except for its `neighbours`.
- The gradient of a step is that of the mean over its whole global batch: a pass weighs by its `Loss.count`.

For your own task, floating-point inputs are cast to the model's precision where the model is called. Targets stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from app.data.draws import Draws
from app.data.samples import Batch, Samples, Splits


class Later(NamedTuple):
    """A sum that is not needed before the next log. It is computed for many passes at once, at the cost of one."""

    of: Callable[..., tuple[Tensor, Tensor | float]]
    """Takes each of the tensors stacked, [P, ...]; returns the sums of P passes [P], and the counts [P] or that of each."""
    tensors: tuple[Tensor, ...]


@dataclass(slots=True)
class Loss:
    """The loss of a pass over B samples."""

    mean: Tensor
    """Scalar with a gradient. Where `count` is 0 it must be finite, with a gradient of 0."""
    count: int | Tensor
    """What it is the mean of: samples, tokens, ... A tensor is a scalar on the device."""
    sums: Mapping[str, Later] = field(default_factory=dict)
    """Further values to report, by name: the same names in every pass. Your own task may give the pair (sum, count) of the
    pass instead, as numbers or tensors."""

    @classmethod
    def of(cls, total: Tensor, count: int | Tensor, sums: Mapping[str, Later] | None = None) -> Loss:
        """Return the loss from a sum over `count` things; `count` may be 0."""
        at_least = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        return cls(total / at_least, count, sums or {})


@dataclass(frozen=True)
class Scores:
    """The scores of a model on B samples, without padding."""

    sums: Mapping[str, tuple[Tensor, Tensor]]
    """Sum and count by name, float64 and of one shape, added up over all batches and ranks. Those of your own task may have
    any type, and a count may be a single number."""
    rows: Tensor | None = None
    """float64 [B, R]: values to keep for each sample, gathered in the order of the samples."""


@dataclass(frozen=True)
class Form:
    """How the model wants its floating-point inputs."""

    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    """That of inputs [B, C, H, W]."""


class LowRank(NamedTuple):
    """A low-rank addition to a weight [outputs, inputs]: the product of two narrow matrices."""

    down: str
    """Name of the first [rank, inputs]."""
    up: str
    """Name of the second [outputs, rank]."""
    factor: float
    transposed: bool
    """Whether the weight is [inputs, outputs]."""


class Adapters(NamedTuple):
    """How a model with adapters (small trained matrices beside frozen layers) is written into files of plain weights."""

    names: Mapping[str, str]
    """Names in the file of parameters that have another name in the model."""
    sums: Mapping[str, LowRank]
    """Additions to weights, by the weights' names in the file."""
    alone: Mapping[str, str]
    """The adapter matrices, and their names in a file with adapters only."""
    about: Mapping[str, Any]
    """JSON to write beside such a file."""


class NeedsData(Exception):  # noqa: N818  (no error: less is known of the model)
    """Raised by a task whose loss cannot be computed on tensors without data (torch's meta device)."""


SAMPLES = "samples"
"""The unit of a task that has none of its own."""
Split = Literal["train", "validation", "test"]
Totals = Mapping[str, tuple[Tensor, Tensor]]
"""`Scores.sums`, added up over all samples, on the CPU."""
Table = dict[str, float | None]
"""A score for each of several named things, such as classes. None: there was nothing to score."""


class Task(Protocol):
    """What is learnt, and how, seen from one process. It is built from its own sections of the recipe.

    A shipped task has all of these methods. Your own task needs `samples`, `model` and `loss`; the rest is optional. Its
    `ready` does not get `form`, and its `finish` may return only the scores.

    Samples may weigh differently, as texts do by their number of tokens. Then either the samples have `count(indices) -> int64
    [B]`, which gives the weights before the data is read, or the task has `count(batch)`, which returns the weight of a ready
    batch as a scalar on its device. In the second case all batches of a step are in memory before its first pass. With
    neither, each sample counts 1.
    """

    @property
    def monitor(self) -> tuple[str, Literal["max", "min"]]:
        """The score that chooses the best checkpoint, and whether "max" or "min" is better. Optional: ("loss", "min")."""

    @property
    def unit(self) -> str:
        """What `Loss.count` counts, in the plural, usable in a key: "tokens".

        The run then logs `tokens_seen` and `tokens_per_s`. Optional: "samples".
        """

    @property
    def channels_last(self) -> bool:
        """Whether the network is faster in channels-last memory order on every device (for `train.channels_last: null`).

        Optional: False.
        """

    def prepare(self) -> Task | None:
        """Bring the data to this machine. Return the task that all its processes then use, or None: each uses its own.

        One process of each node calls it while the others wait. What it returns is pickled. With a user's task, the other
        processes see only the files that it left. Optional. Raises DataError and RecipeError.
        """

    def samples(self, split: Split) -> Samples | None:
        """Open a split, without touching the network; None: there is no such validation or test split.

        Raises DataError, and RecipeError for a key that is missing.
        """

    def reads(self) -> Mapping[str, str]:
        """Return a digest, by name, of each further input that affects training, beside the samples.

        It must be the same on all ranks and after a resume. Optional: there is none.
        """

    def model(self, facts: Mapping[str, Any]) -> nn.Module:
        """Return the network for samples with these facts, on the CPU, in training mode, in float32.

        Its weights are drawn from torch's global generator. Parameters with requires_grad=False are not trained, as with
        `train.freeze`. Raises RecipeError if the samples do not fit the network.
        """

    def init(self, model: nn.Module, name: str, unit: nn.Module) -> None:
        """Fill every parameter and buffer of one unit of the model, on the CPU, without gradients.

        Random numbers come from torch's global generator, which is seeded by the seed and the unit's name. So a unit gets the
        same weights wherever it is drawn, and no process needs the whole model. `model` is for reading settings (its config);
        it has no data. `unit` is a block, or a remaining module with its own parameters or buffers; fill those, not the ones
        of modules inside it. Blocks are the modules of the classes in `blocks`, an optional attribute of the task, such as
        ("DecoderLayer",). Without it they are those that the model names in `_no_split_modules`, as transformers' models do.

        Optional. Without it, `model` returns the whole network with its weights. With it, `model` is called under
        torch.device("meta"), where tensors have no data. Weights tied by the model's `tie_weights` stay tied.
        """

    def ready(self, batch: Batch, draw: Draws | None, form: Form) -> Batch:
        """Return a batch as `loss` and `score` take it, on the batch's device. `draw` is None where nothing is random.

        Make random changes of whole batches here: `draw.uniform("noise")` is float32 [B], on the device, and gives a sample
        the same number on any rank. Optional: the batch as `fetch` returned it.
        """

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the loss of a pass over the batch. Calls `model` once and uses nothing else of it."""

    def score(self, model: Callable[..., Any], batch: Batch, valid: Tensor) -> Scores:
        """Return the scores of the batch's samples; `valid` is bool [B], False for padding, which must not count.

        It calls `model` equally often for every batch. Optional: the scores are then `loss` and its `sums`. In that case
        padding is cut off before `ready`, and a batch of padding only gives sums of 0.
        """

    def finish(self, totals: Totals, rows: Tensor | None) -> tuple[dict[str, float], dict[str, Table]]:
        """Return the scores of a whole split by name, and tables of scores. `rows` are those of all samples, on the CPU.

        Optional: the mean of each sum; a sum with several numbers becomes a table, indexed by position.
        """

    def example(self, facts: Mapping[str, Any], form: Form) -> Batch:
        """Return a batch of 2 as `ready` returns it, without data (torch's meta device), for example to count FLOPs.

        Optional: the shapes of two training samples. A loss that cannot do without numbers (`.item()`) leaves FLOPs unknown.
        """

    def notes(self, data: Splits) -> list[str]:
        """Return notes on the data for people to read before a run, one sentence each. Optional: none."""

    def head(self, model: nn.Module) -> str:
        """Return the name of the layer whose shape depends on the samples (such as the classes). Fine-tuning leaves it new.

        Optional: the last one that has parameters.
        """

    def matched(self, samples: Any, facts: Mapping[str, Any]) -> Samples:
        """Return other samples in the form that a model with these facts takes. Raises DataError if that is impossible.

        Optional: the samples, if their facts are the same.
        """

    def look(self, batch: Batch, most: int, title: str) -> tuple[str, Any]:
        """Return a name and a picture, uint8 [H, W, 3] (an array), of at most `most` samples of a ready training batch.

        Optional: trackers show none.
        """

    def show(self, model: Callable[..., Any], batch: Batch) -> Sequence[tuple[str, str]]:
        """Return short texts that show what the model does, each with a title, such as a prompt and its continuation.

        Called on all ranks after an evaluation during training, with the same few samples of its split, ready as for `score`.
        Every rank must call `model` equally often. torch's generators draw the same numbers on all ranks. Optional: nothing is
        shown.
        """

    def leave(self, folder: Path, samples: Any, rows: Tensor) -> None:
        """Write what people want to see of the samples that were scored at the end into `folder`, which is new and empty.

        Optional: there is no such folder. Raises DataError.
        """

    def beside(self, facts: Mapping[str, Any], told: Mapping[str, Any]) -> Mapping[str, bytes]:
        """Return, by name, the files that a library needs beside `model.safetensors` to load it without Samerun.

        `told` describes the weights: `recipe` (its keys and values), `steps`, and `scores` by name. Optional: none. Raises
        DataError if one of the files no longer exists.
        """

    def adapters(self, model: nn.Module) -> Adapters | None:
        """Return how the weights of this model, prepared or not, are written into files. None: unchanged.

        Optional: None. Keys listed in a section's `not_left` do not apply to the exported model.
        """

    def of_folder(self, folder: Path, facts: Mapping[str, Any]) -> nn.Module:
        """Return the trained network from a folder that another library wrote, on the CPU, for samples with these facts.

        Optional, as `check_folder`: without them only Samerun's own folders can be evaluated. Raises RunFolderError if the
        folder cannot be read.
        """

    def check_folder(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Raise DataError if samples with these facts do not fit the network of such a folder."""

    def predict(self, model: nn.Module, inputs: Sequence[Path], *, top: int) -> list[tuple[str, dict[str, Any]]]:
        """Return the model's prediction for each input, as text and as JSON: the `top` most likely answers, if there are
        several.

        Optional: without it `samerun predict` reports an error. Raises DataError if an input cannot be read.
        """
