"""The contract of a task: what is special about pictures, text or a problem of one's own, and all that the application asks.

A task is one process's view. It knows no rank, no device and no strategy: the application deals the samples, brings batches to
the device, distributes the model, and adds up over the ranks.

A task of one's own is a class in a file that ends with `task = MyTask`. It needs three methods, and no base class:

    class MyTask:
        def samples(self, split):
            x, y = read_my_data(split)
            return Samples.of({"x": x, "y": y})

        def model(self, facts):
            return nn.Linear(4, 1)

        def loss(self, model, batch):
            return Loss(F.mse_loss(model(batch["x"]), batch["y"]), len(batch["x"]))

All else is optional for it (`Task` says what is done without). Before the first step the application looks whether it keeps the
rules, and says in a sentence which one it breaks.

What keeps a run the same on any topology:

- Random choices come from `draw` alone; None: there are none, as in an evaluation.
- `loss` calls the model exactly once and touches none of its submodules, or FSDP2 and ZeRO break.
- A sample's loss does not depend on other samples of its pass, but for its `neighbours`.
- The gradient of a step is that of the mean over its whole global batch: a pass weighs by its `Loss.count`.

For tasks of one's own, real numbers get the model's precision where the model is called. Targets stay as they are.
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
    """A sum that nobody wants before the next log: worked out for many passes at once, which costs what one does."""

    of: Callable[..., tuple[Tensor, Tensor | float]]
    """Takes each of the tensors stacked, [P, ...]; returns the sums of P passes [P], and the counts [P] or that of each."""
    tensors: tuple[Tensor, ...]


@dataclass(slots=True)
class Loss:
    """What a pass over B samples costs."""

    mean: Tensor
    """Scalar, to be differentiated. Finite, and 0 in its gradient, where `count` is 0."""
    count: int | Tensor
    """What it is the mean of: samples, tokens, ... A tensor is a scalar on the device."""
    sums: Mapping[str, Later] = field(default_factory=dict)
    """More to report of the training, by name: the same names in every pass. A task of one's own may give the pair (sum, count)
    of the pass instead, numbers or tensors."""

    @classmethod
    def of(cls, total: Tensor, count: int | Tensor, sums: Mapping[str, Later] | None = None) -> Loss:
        """Return the loss of a sum over `count` things, which may be none."""
        at_least = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        return cls(total / at_least, count, sums or {})


@dataclass(frozen=True)
class Scores:
    """What a model scores on B samples; padding has no part in it."""

    sums: Mapping[str, tuple[Tensor, Tensor]]
    """Sum and count by name, float64 and of one shape: they are added up over all batches and ranks. Those of a task of one's
    own may be of any type, and a count a single number."""
    rows: Tensor | None = None
    """float64 [B, R]: what is to be kept of each sample, gathered in the order of the samples."""


@dataclass(frozen=True)
class Form:
    """How the model wants its floating-point inputs."""

    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    """That of inputs [B, C, H, W]."""


class LowRank(NamedTuple):
    """What is added to a weight [outputs, inputs]: the product of two narrow matrices."""

    down: str
    """Name of the first [rank, inputs]."""
    up: str
    """Name of the second [outputs, rank]."""
    factor: float
    transposed: bool
    """Whether the weight is [inputs, outputs]."""


class Adapters(NamedTuple):
    """How a model that trains small matrices beside frozen layers stands in files of weights, which have no such matrices."""

    names: Mapping[str, str]
    """The names there of parameters that have another one here."""
    sums: Mapping[str, LowRank]
    """What is added to weights, by their names there."""
    alone: Mapping[str, str]
    """The matrices, and their names in a file of adapters alone."""
    about: Mapping[str, Any]
    """What is written beside such a file, as JSON holds it."""


class NeedsData(Exception):  # noqa: N818  (no error: less is known of the model)
    """Raised by a task whose loss cannot be computed on tensors without data (torch's meta device)."""


SAMPLES = "samples"
"""The unit of a task that has none of its own."""
Split = Literal["train", "validation", "test"]
Totals = Mapping[str, tuple[Tensor, Tensor]]
"""`Scores.sums`, added up over all samples, on the CPU."""
Table = dict[str, float | None]
"""A score of each of several named things, such as classes; None: there was nothing to score."""


class Task(Protocol):
    """What is learnt, and how, seen from one process. Built from the recipe's sections of its own.

    A task that comes with the package has all of this. One of a user's own has `samples`, `model` and `loss`, and what it likes
    of the rest. Its `ready` is not given `form`, and its `finish` may return the scores alone.

    Samples may weigh differently, as texts do by their tokens. Then either the samples have `count(indices) -> int64 [B]`,
    which says beforehand what each counts, or the task has `count(batch)`, which says it of a ready batch, as a scalar on its
    device; all batches of a step are in memory then before its first pass. With neither, each sample counts 1.
    """

    @property
    def monitor(self) -> tuple[str, Literal["max", "min"]]:
        """The score by which the best checkpoint is chosen, and which end of it is good. Optional: ("loss", "min")."""

    @property
    def unit(self) -> str:
        """What a `Loss.count` is the number of, in the plural, as a key may be called: "tokens".

        The run then tells `tokens_seen` and `tokens_per_s`. Optional: "samples".
        """

    @property
    def channels_last(self) -> bool:
        """Whether the network is faster on any device with inputs in that memory order (`train.channels_last: null`).

        Optional: False.
        """

    def prepare(self) -> Task | None:
        """Bring the data to this machine; return the task that all processes of it then use, or None: each has its own.

        One process of each node calls it while the others wait. What it returns is pickled; of a user's task all that
        the others see is the files that it left. Optional. Raises DataError and RecipeError.
        """

    def samples(self, split: Split) -> Samples | None:
        """Open a split, without touching the network; None: there is no such validation or test split.

        Raises DataError, and RecipeError for a key that is missing.
        """

    def reads(self) -> Mapping[str, str]:
        """Return a digest of each thing beside the samples that is read and decides what is learnt, by what it is called.

        All ranks must have it alike, and a run that goes on. Optional: there is none.
        """

    def model(self, facts: Mapping[str, Any]) -> nn.Module:
        """Return the network for samples with these facts, on the CPU, in training mode, in float32.

        Its weights are drawn from torch's global generator. What requires no gradient is not trained, as with
        `train.freeze`. Raises RecipeError if the samples do not suit it.
        """

    def init(self, model: nn.Module, name: str, unit: nn.Module) -> None:
        """Fill every parameter and buffer of one unit of the model, on the CPU, without gradients.

        Random numbers are those of torch's global generator, which the seed and the unit's name have set: so a unit gets the
        same wherever it is drawn, and no process needs the whole model. `model` is to be asked (its config); it has no numbers.
        `unit` is a block, or a remaining module with parameters or buffers of its own, of which these are to be filled and not
        those of modules inside it. Blocks are the modules of the classes that `blocks` names, an optional attribute of the
        task, such as ("DecoderLayer",); without, those that the model names in `_no_split_modules`, as transformers' do.

        Optional: without, `model` returns the whole network with its weights. With it, `model` is
        called under torch.device("meta"), where nothing has numbers. What is tied by the model's `tie_weights` stays tied.
        """

    def ready(self, batch: Batch, draw: Draws | None, form: Form) -> Batch:
        """Return a batch as `loss` and `score` take it, on the batch's device. None: nothing is random.

        The place for random changes of whole batches: `draw.uniform("noise")` is float32 [B], on the device, and the same for a
        sample wherever it is. Optional: the batch as `fetch` gave it.
        """

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the loss of a pass over the batch. Calls `model` once and uses nothing else of it."""

    def score(self, model: Callable[..., Any], batch: Batch, valid: Tensor) -> Scores:
        """Return the scores of the batch's samples; `valid` is bool [B], False for padding, which must not count.

        It calls `model` equally often for every batch. Optional: `loss` is the score, and what else its `sums` report; padding
        is cut off then before `ready`, and of a batch of nothing else the sums are 0.
        """

    def finish(self, totals: Totals, rows: Tensor | None) -> tuple[dict[str, float], dict[str, Table]]:
        """Return the scores by name, and tables of scores, of a whole split; `rows` are those of all samples, on the CPU.

        Optional: of each sum its mean; of one with several numbers a table of them, by their places.
        """

    def example(self, facts: Mapping[str, Any], form: Form) -> Batch:
        """Return a batch of 2 as `ready` returns it, without data (torch's meta device): to count FLOPs with, for instance.

        Optional: the shapes of two training samples. A loss that cannot do without numbers (`.item()`) leaves FLOPs unknown.
        """

    def notes(self, data: Splits) -> list[str]:
        """Return what a person would want to read of the data before a run, a sentence each. Optional: nothing."""

    def head(self, model: nn.Module) -> str:
        """Return the name of the layer that other samples may want of another shape, which fine-tuning leaves new.

        Optional: the last one that has parameters.
        """

    def matched(self, samples: Any, facts: Mapping[str, Any]) -> Samples:
        """Return other samples as a model with these facts takes them. Raises DataError if it cannot.

        Optional: the samples, if their facts are the same.
        """

    def look(self, batch: Batch, most: int, title: str) -> tuple[str, Any]:
        """Return a name and a picture, uint8 [H, W, 3] (an array), of at most so many samples of a ready training batch.

        Optional: trackers show none.
        """

    def show(self, model: Callable[..., Any], batch: Batch) -> Sequence[tuple[str, str]]:
        """Return short texts that show what the model does, each with a title, such as a prompt and how it goes on.

        Called after an evaluation on the way, on all ranks, with the same few samples of its split, ready as for `score`. Every
        rank calls `model` equally often; torch's generators draw the same on all. Optional: nothing is shown.
        """

    def leave(self, folder: Path, samples: Any, rows: Tensor) -> None:
        """Write into `folder`, new and empty, what a person would want to see of the samples that were scored at the end.

        Optional: there is no such folder. Raises DataError.
        """

    def beside(self, facts: Mapping[str, Any], told: Mapping[str, Any]) -> Mapping[str, bytes]:
        """Return the files that a library wants beside `model.safetensors` to load it without Samerun, by their names.

        `told` is what a reader is to know of the weights: `recipe` (its keys and values), `steps`, and `scores` by name.
        Optional: none. Raises DataError if something of them is not there any more.
        """

    def adapters(self, model: nn.Module) -> Adapters | None:
        """Return how the weights of this model, prepared or not, go into files; None: as they are.

        Optional: None. The sections' keys that say so, their `not_left`, do not describe what a run leaves.
        """

    def of_folder(self, folder: Path, facts: Mapping[str, Any]) -> nn.Module:
        """Return the trained network of a folder that a library wrote, on the CPU, for samples with these facts.

        Optional: only what Samerun left is scored. Raises RunFolderError if it cannot be read, DataError if they do not fit.
        """

    def predict(self, model: nn.Module, inputs: Sequence[Path], *, top: int) -> list[tuple[str, dict[str, Any]]]:
        """Return what the model makes of each input, in words and as JSON holds it: the `top` most likely of several answers.

        Optional: `app.predict` says that there is none. Raises DataError if an input cannot be read.
        """
