"""The contract of a task: what is special about images, text or your own problem, and all that the application asks.

A task is one process's view. It knows no rank, no device and no strategy: the application deals the samples, brings batches to
the device, distributes the model, and adds up over the ranks.

Your own task is a class in a file that ends with `task = MyTask`. It needs three methods, and no base class:

    class MyTask:
        def samples(self, split):
            x, y = read_my_data(split)
            return Samples.of({"x": x, "y": y})

        def model(self, metadata):
            return nn.Linear(4, 1)

        def loss(self, model, batch):
            return Loss(F.mse_loss(model(batch["x"]), batch["y"]))

Everything else is optional (`Task` has the defaults). Before the first step the application checks the rules, and names a
broken one in a sentence.

What keeps a run the same on any topology:

- Random choices come from `rng` alone. It is None where nothing is random, as in an evaluation.
- `loss` calls the model exactly once and touches none of its submodules, or FSDP2 and ZeRO break.
- A sample's loss does not depend on other samples of its pass, except for its group of `group_size`.
- The gradient of a step is that of the mean over its whole global batch: a pass weighs by its `Loss.count`.

For your own task, floating-point inputs are cast to the model's precision where the model is called. Targets stay unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from app.data.draws import Draws, HostDraws
from app.data.samples import Batch, Samples, Splits
from app.errors import RecipeError, TrainingError

Sums = Mapping[str, tuple[Tensor | float, Tensor | float]]
"""Sum and count by name, as numbers or scalars on the device."""


@dataclass(slots=True)
class Loss:
    """The loss of a pass over B samples."""

    mean: Tensor
    """Scalar with a gradient. Where `count` is 0 it must be finite, with a gradient of 0."""
    count: int | Tensor = None  # type: ignore[assignment]
    """Number of things that it is the mean of: samples, tokens, ... A tensor is a scalar on the device. Your own task may leave
    it out: the batch's number of samples."""
    sums: Sums = field(default_factory=dict)
    """Further values to report: the same names in every pass."""

    @classmethod
    def of(cls, total: Tensor, count: int | Tensor, sums: Sums | None = None) -> Loss:
        """Return the loss from a sum over `count` things; `count` may be 0."""
        at_least = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        return cls(total / at_least, count, sums or {})


@dataclass(frozen=True)
class Scores:
    """The scores of a model on B samples, without padding."""

    sums: Mapping[str, tuple[Tensor, Tensor]]
    """Sum and count by name, float64 and of one shape, added up over all batches and ranks. In your own task they may have
    any type, and a count may be a single number."""
    rows: Tensor | None = None
    """float64 [B, R]: values to keep for each sample, gathered in the order of the samples."""

    @classmethod
    def of(cls, values: Mapping[str, Tensor], valid: Tensor, *, rows: Tensor | None = None) -> Scores:
        """Return the scores from a value of each sample, [B] or [B, K], by name. Padding, where not `valid`, is left out."""
        sums = {}
        for name, value in values.items():
            if value.ndim == 0 or len(value) != len(valid):
                raise TrainingError(
                    f"Scores.of was given {name!r} as a tensor {list(value.shape)}: give one value for each of the "
                    f"{len(valid)} samples of the batch, [B] or [B, K]"
                )
            counted = valid.view(-1, *[1] * (value.ndim - 1)).expand_as(value)
            sums[name] = torch.where(counted, value.double(), 0.0).sum(0), counted.double().sum(0)
        return cls(sums, rows)


@dataclass(frozen=True)
class Form:
    """Precision and memory format of the model's floating-point inputs."""

    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    """Memory format of inputs [B, C, H, W]."""


class LowRank(NamedTuple):
    """A low-rank addition to a weight [outputs, inputs]: the product of two narrow matrices."""

    down: str
    """Name of the first [rank, inputs]."""
    up: str
    """Name of the second [outputs, rank]."""
    factor: float
    transposed: bool
    """True if the weight is [inputs, outputs]."""


class Adapters(NamedTuple):
    """Rule by which a model with adapters (small trained matrices next to frozen layers) is written as plain weights."""

    names: Mapping[str, str]
    """Names in the file of parameters that have another name in the model."""
    sums: Mapping[str, LowRank]
    """Additions to weights, by the weights' names in the file."""
    alone: Mapping[str, str]
    """The adapter matrices, and their names in a file with adapters only."""
    about: Mapping[str, Any]
    """JSON to write next to such a file."""


FileParts = Mapping[str, tuple[int, ...]]
"""Names and shapes in files of the consecutive parts of a flattened tensor, in order; or of the whole tensor."""


class NeedsData(Exception):  # noqa: N818  (no error: less is known of the model)
    """Raised by a task whose loss cannot be computed on tensors without data (torch's meta device)."""


COUNT_RULE = (
    "A step's gradient is that of the mean over its whole global batch, so Loss.count must be what `count` of the samples or "
    "of the task returns, or the number of samples if neither exists: add a method `def count(self, batch): return ...` to "
    "the task, with the number that its mean is over"
)
SAMPLES = "samples"
"""The unit of a task that has none of its own."""
Split = Literal["train", "validation", "test"]
Totals = Mapping[str, tuple[Tensor, Tensor]]
"""`Scores.sums`, added up over all samples, on the CPU."""
Table = dict[str, float | None]
"""A score for each of several named things, such as classes. None: there was nothing to score."""


class Task:
    """A task seen from one process: its data, model, loss and scores. Here are the defaults of what a task may leave out.

    A shipped task inherits from it and is built from its own sections of the recipe. Your own task needs no base class: it has
    `samples`, `model` and `loss`, and what it likes of the rest. Its `preprocess` does not get `form`, and its `reduce_metrics`
    may return only the scores.

    Methods that raise NotImplementedError here have no default: the three above are required, and the application asks
    `overrides` before it calls another. Its docstring describes what happens without it.

    Samples may weigh differently, as texts do by their number of tokens. Then either the samples have `count(indices) -> int64
    [B]`, which gives the weights before the data is read, or the task has `count(batch)`. With neither, each sample counts 1.
    """

    monitor: tuple[str, Literal["max", "min"]] = ("loss", "min")
    """The score that chooses the best checkpoint, and whether "max" or "min" is better."""
    count_unit: str = SAMPLES
    """Unit of `Loss.count`, in the plural, usable in a key: with "tokens" a run logs `tokens_seen` and `tokens_per_s`."""
    group_size: int = 1
    """Number of samples, next to each other in the order, whose losses may depend on each other."""
    channels_last: bool = False
    """True if the network is faster in channels-last memory order on every device (for `train.channels_last: null`)."""
    blocks: Sequence[str] | None = None
    """Class names of the model's repeated layers, such as ("DecoderLayer",). None: those that the model names in
    `_no_split_modules`, as transformers' models do."""
    of_user: Any = None
    """The user's object, if this task wraps one."""

    def prepare_data(self) -> Task | None:
        """Bring the data to this machine. Return the task that all its processes then use, or None: each uses its own.

        One process of each node calls it while the others wait. What it returns is pickled. With a user's task, the other
        processes see only the files that it wrote. Raises DataError and RecipeError.
        """

    def check_training(self) -> None:
        """Raise RecipeError for a model that cannot be trained, before data is opened."""

    def samples(self, split: Split) -> Samples | None:
        """Open a split, without touching the network; None: there is no such validation or test split.

        Raises DataError, and RecipeError for a key that is missing.
        """
        raise NotImplementedError

    def data_digests(self) -> Mapping[str, str]:
        """Return a digest, by name, of each further input that affects training, next to the samples.

        It must be the same on all ranks and after a resume.
        """
        return {}

    def metadata_without_data(self) -> Mapping[str, Any] | None:
        """Return the samples' metadata that the recipe alone defines, to plan with. None: none of it. Raises DataError."""

    def model(self, metadata: Mapping[str, Any]) -> nn.Module:
        """Return the network for samples with this metadata, on the CPU, in training mode, in float32.

        Its weights are drawn from torch's global generator. Parameters with requires_grad=False are not trained, as with
        `train.freeze`. Raises RecipeError if the samples do not fit the network.
        """
        raise NotImplementedError

    def init_module(self, model: nn.Module, name: str, module: nn.Module) -> None:
        """Fill every parameter and buffer of one unit of the model, on the CPU, without gradients.

        Random numbers come from torch's global generator, which is seeded by the seed and the unit's name. So a unit gets the
        same weights wherever it is drawn, and no process needs the whole model. `model` is for reading settings (its config);
        it has no data. `module` is a block (see `blocks`), or a remaining module with its own parameters or buffers; fill
        those, not the ones of modules inside it.

        Without it, `model` returns the whole network with its weights. With it, `model` is called under torch.device("meta"),
        where tensors have no data. Weights tied by the model's `tie_weights` stay tied.
        """
        raise NotImplementedError

    def preprocess(self, batch: Batch, rng: Draws | None, *, form: Form) -> Batch:  # noqa: ARG002
        """Return a batch as `loss` and `metrics` take it, on the batch's device. `rng` is None where nothing is random.

        Make random changes of whole batches here: `rng.uniform("shift")` is float32 [B], on the device, `rng.normal("noise",
        (8, 8))` [B, 8, 8]. A sample gets the same numbers on any rank.
        """
        return batch

    def count(self, batch: Batch) -> int | float | Tensor:
        """Return the weight of a preprocessed batch, such as its number of tokens; a tensor is a scalar.

        With it, all batches of a step are in memory before its first pass.
        """
        raise NotImplementedError

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the loss of a pass over the batch. Calls `model` once and uses nothing else of it."""
        raise NotImplementedError

    def metrics(self, model: Callable[..., Any], batch: Batch, valid: Tensor) -> Scores:
        """Return the scores of the batch's samples; `valid` is bool [B], False for padding, which must not count.

        It calls `model` equally often for every batch. Without it, the scores of a user's task are `loss` and its `sums`. In
        that case padding is cut off before `preprocess`, and a batch of padding only gives sums of 0.
        """
        raise NotImplementedError

    def reduce_metrics(self, sums: Totals, rows: Tensor | None) -> tuple[dict[str, float], dict[str, Table]]:  # noqa: ARG002
        """Return the scores of a whole split by name, and tables of scores. `rows` are the rows of all samples, on the CPU.

        Default: the mean of each sum; a sum with several numbers becomes a table, indexed by position.
        """
        means = {name: total / count for name, (total, count) in sums.items()}
        scores = {name: mean.item() for name, mean in means.items() if mean.ndim == 0}
        tables = {name: mean.tolist() for name, mean in means.items() if mean.ndim == 1}
        return scores, {name: {str(at): None if isnan(it) else it for at, it in enumerate(of)} for name, of in tables.items()}

    def example(self, metadata: Mapping[str, Any], form: Form) -> Batch:  # noqa: ARG002
        """Return a batch of 2 as `preprocess` returns it, without data (torch's meta device), for example to count FLOPs.

        A user's task takes the shapes of two training samples. A loss that needs numbers (`.item()`) leaves FLOPs unknown.
        """
        raise NeedsData

    def notes(self, data: Splits) -> list[str]:  # noqa: ARG002
        """Return notes on the data for people to read before a run, one sentence each."""
        return []

    def head(self, model: nn.Module) -> str:
        """Return the name of the layer whose shape depends on the samples (such as the classes). Fine-tuning leaves it new.

        Default: the last one that has parameters.
        """
        layers = model.named_modules()
        names: list[str] = [name for name, layer in layers if next(layer.parameters(recurse=False), None) is not None]
        return names[-1]

    def adapt_samples(self, samples: Any, metadata: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """Return other samples in the form that a model with this metadata takes. Raises DataError if that is impossible.

        A user's task refuses samples with other metadata.
        """
        return samples

    def preview(self, batch: Batch, limit: int) -> tuple[str, Any]:
        """Return a name, and an image (array, uint8 [H, W, 3]) or a text, of at most `limit` samples of a preprocessed batch.

        Trackers show images of training batches; `samerun replay --samples` shows images and texts.
        """
        raise NotImplementedError

    def generate_samples(self, model: Callable[..., Any], batch: Batch) -> Sequence[tuple[str, str]]:
        """Return short texts that show what the model does, each with a title, such as a prompt and its continuation.

        Called on all ranks after an evaluation during training, with the same few samples of its split, ready as for `metrics`.
        Every rank must call `model` equally often. torch's generators draw the same numbers on all ranks.
        """
        raise NotImplementedError

    def write_outputs(self, folder: Path, samples: Any, rows: Tensor) -> None:
        """Write what people want to see of the samples that were scored at the end into `folder`, which is new and empty.

        Without it, there is no such folder. Raises DataError.
        """
        raise NotImplementedError

    def export_files(self, metadata: Mapping[str, Any], info: Mapping[str, Any]) -> Mapping[str, bytes]:
        """Return, by name, the files that a library needs next to `model.safetensors` to load it without Samerun.

        `info` describes the weights: `recipe` (its keys and values), `steps`, and `scores` by name. Raises DataError if one of
        the files no longer exists.
        """
        raise NotImplementedError

    def file_names(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, FileParts]:  # noqa: ARG002
        """Return the parts in files of tensors that files store under other names than the model, or in several parts.

        `shapes` has the whole tensors of the model, without adapters, by name. The model can be prepared.
        """
        return {}

    def adapters(self, model: nn.Module) -> Adapters | None:  # noqa: ARG002
        """Return how the weights of this model, prepared or not, are written into files. None: unchanged.

        Keys listed in a section's `not_left` do not apply to the exported model.
        """
        return None

    def predict(self, model: nn.Module, inputs: Sequence[Path], *, top: int) -> list[tuple[str, dict[str, Any]]]:  # noqa: ARG002
        """Return the model's prediction for each input, as text and as JSON: the `top` most likely answers, if there are
        several.

        Raises DataError if an input cannot be read.
        """
        raise RecipeError(
            "the task cannot predict from a file: give it a method predict(self, model, inputs, *, top), which returns a text "
            "and a dict for each path in inputs"
        )


def overrides(task: Task, name: str) -> bool:
    """Return True if a task, or the user's object that it wraps, has its own version of an optional part of `Task`."""
    return own_part(task if task.of_user is None else task.of_user, name) is not None


def own_part(given: Any, name: str, default: Any = None) -> Any:
    """Return an optional attribute of a task or of samples, or the default.

    What their classes inherit from Python, such as `count` of `list`, or from `Task` and `Samples`, is not their own.
    """
    holder = next((kind for kind in type(given).__mro__ if name in vars(kind)), None)
    if holder is None or name in getattr(given, "__dict__", ()):
        return getattr(given, name, default)
    is_inherited = holder in (Task, Samples) or holder.__module__.partition(".")[0] in sys.stdlib_module_names
    return default if is_inherited else getattr(given, name, default)


def two_samples(task: Task, samples: Samples, form: Form) -> Batch:
    """Return the first and the last training sample, ready as for `loss`, on the CPU."""
    numbers = np.array([0, len(samples) - 1])
    fetched = samples.fetch(numbers, HostDraws(0, numbers))
    batch: Batch = {**fetched, "samples": torch.from_numpy(numbers), "numbers": numbers}
    return task.preprocess(batch, Draws(0, batch["samples"], numbers), form=form)
