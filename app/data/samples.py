"""The data loader's view of a split: whole batches by index, with randomness that depends on the sample number alone.

Nothing here knows what a sample is. A task says what its splits are beyond this.

A Dataset may be random by itself, as with random transforms: it draws from the generators that all of Python, NumPy and torch
share. These are seeded for each sample from its own draws, so that a sample is the same whoever makes it, and are put back
afterwards.

A mixture of sources (`mixture.py`) is samples, too; what is held out of it is held out of each source.

Which samples are held out for validation is a function of the size and a seed alone, computed where it is needed:
the same on any topology, and memory does not grow with the data.
"""

from __future__ import annotations

import hashlib
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, _ProtocolMeta

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from app.data.draws import HostDraws
from app.data.mixture import WINDOW_SAMPLES, Mixture
from app.data.order import permute
from app.errors import DataError, RecipeError

Batch = dict[str, Any]
"""Tensors [B, ...] by name: the fields of the samples, and `samples`, their numbers, int64 [B], -1 for padding. An array,
`numbers`, has these on the host as well."""
CHECK = "`samerun data check` lists all samples that cannot be read"
"""Added to errors about an unreadable sample."""


class _Makes(_ProtocolMeta):
    """Has `Samples.of` and `Samples.mix`, which what keeps to the protocol need not have."""

    def of(
        cls,  # noqa: N805  (of a metaclass)
        dataset: Any,
        *,
        names: Sequence[str | None] = (),
        collate: Callable[[list[Any]], Any] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> ArraySamples | DatasetSamples:
        """Return the samples of a data set that already exists.

            Samples.of({"x": x, "y": y})                  # arrays or tensors [N, ...]: looked up, the fastest
            Samples.of(dataset, names=("x", "y"))         # a Dataset of torch with items (x, y)
            Samples.of(dataset)                           # items are dicts, or it is one of the `datasets` library

        A Dataset may draw from the generators of `random`, `numpy.random` and `torch`, as random transforms do: they are seeded
        for each sample, and in an evaluation so that it is the same each time. Generators of its own it must not keep.

        Args:
            dataset: Has __len__ and __getitem__. A stream (IterableDataset) is refused: its order is no function of the step.
            names: Of the parts of an item, in their order, and None for a part that is left out; of items that are dicts, those
                that are kept (default: all).
            collate: Makes a batch of a list of items: a dict of tensors [B, ...], or a tuple of such, with `names`. Default:
                torch's default_collate for each field.
            facts: What the model must know of the samples, as JSON holds it; `model(facts)` is given it.

        Raises DataError for what cannot be samples.
        """
        kind = type(dataset)
        if isinstance(dataset, TensorDataset) and kind.__getitem__ is TensorDataset.__getitem__ and collate is None:
            dataset, names = _named(dataset.tensors, names, what="a TensorDataset"), ()
        if isinstance(dataset, Mapping):
            fields = _named(dataset, names, what="a mapping")
            return ArraySamples({name: _array(name, array) for name, array in fields.items()}, facts=facts or {})
        if isinstance(dataset, IterableDataset) or not (hasattr(kind, "__getitem__") and hasattr(kind, "__len__")):
            raise DataError(
                f"Samples.of was given an object of {kind.__qualname__}, which gives no samples by number. The samples of a "
                "step must depend only on the step; otherwise runs on other numbers of processes would differ, "
                "and none could resume where it stopped. Give a Dataset with __getitem__ and __len__, or write "
                "the stream to disk once"
            )
        return DatasetSamples(dataset, names=names, collate=collate, facts=facts or {})

    def mix(
        cls,  # noqa: N805
        sources: Sequence[Any] | Mapping[str, Any],
        weights: Sequence[float],
        *,
        window: int = WINDOW_SAMPLES,
        phases: Mapping[int, Sequence[float]] | None = None,
    ) -> Mixture:
        """Return a mixture of several samples for training; the length of the run is then `train.steps`.

            Samples.mix({"web": Samples.of(web), "code": Samples.of(code)}, [0.7, 0.3], phases={8000: [0.5, 0.5]})

        As validation or test split, a mixture is all samples of its sources.

        Args:
            sources: Samples with the same fields, by name, or in a list.
            weights: Share of each source in a batch, on average; they may have any sum.
            window: Number of samples in which the shares are exact.
            phases: Other weights, by the step (from 1) that they begin with.

        Raises DataError for weights and phases that are none.
        """
        named = (
            sources if isinstance(sources, Mapping) else {f"source {place}": it for place, it in enumerate(sources, start=1)}
        )
        return Mixture(sources=dict(named), weights=[*weights], window=window, phases=dict(phases or {}))


class Samples(Protocol, metaclass=_Makes):
    """One split of a data set, opened and checked. It may be pickled, or forked into the workers of a DataLoader.

    It neither shuffles nor knows of processes. Samples of an own task need `__len__` and `fetch` alone: `facts` are then {},
    `workers` and `is_array` False, and `fingerprint` is made of some of the samples. Optional for all: `count(indices)`, see
    `app.task.Task`.
    """

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts about the samples that a model needs, as JSON holds them: {"classes": 10}."""

    @property
    def fingerprint(self) -> str:
        """The same for the same data on every machine, and another for other data."""

    @property
    def workers(self) -> bool:
        """True if `fetch` makes samples one by one, so that worker processes help; False for a look-up."""

    @property
    def is_array(self) -> bool:
        """True if samples are rows of arrays: several batches can be fetched in one call, and split again."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:
        """Return the fields of a batch, each [B, ...]. What is returned depends on the arguments alone.

        `indices` are int64 [B], in 0 .. len - 1. `draw` gives random numbers for these samples; None: nothing is random, as in
        an evaluation. Raises DataError if a sample cannot be read; the text names the file, or the split and the index.
        """


class Splits(NamedTuple):
    """The splits of a task's data, opened: each `Samples`."""

    train: Any
    """None: there is none, and nothing is trained."""
    validation: Any | None
    """Scored during the run. None: nothing is."""
    test: Any | None
    """The final weights are scored on it, once. None: they are not."""
    others: Mapping[str, str] = {}
    """Digests, by name, of everything else that the task reads and that has an effect on the training."""

    @property
    def scored(self) -> dict[str, Any]:
        """The splits that weights are scored on, by name: those that there are."""
        both = {"validation": self.validation, "test": self.test}
        return {name: samples for name, samples in both.items() if samples is not None}

    @property
    def facts(self) -> dict[str, str]:
        """Sizes and fingerprints of the data, by name."""
        splits = {"training": self.train, **self.scored}
        found: dict[str, str] = {}
        for name, it in splits.items():
            own = {f"{name} data": f"{len(it)} samples, {it.fingerprint}"}
            found |= it.digests(name) if isinstance(it, Mixture) else own
        return {**found, **self.others}


class ArraySamples:
    """Samples that are the rows of arrays, which may be mapped from a file."""

    workers, is_array = False, True

    def __init__(self, arrays: Mapping[str, np.ndarray], *, facts: Mapping[str, Any]) -> None:
        """Each array is [N, ...]."""
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) != 1:
            raise DataError(f"the arrays of Samples.of must have the same length, one row per sample, but have: {sizes}")
        self._arrays, self.facts = arrays, dict(facts)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the rows at the indices, int64 [B]."""
        return {name: torch.from_numpy(array[indices]) for name, array in self._arrays.items()}


class DatasetSamples:
    """Samples that a Dataset makes one by one."""

    workers, is_array = True, False

    def __init__(
        self, dataset: Any, *, names: Sequence[str | None], collate: Callable[[list[Any]], Any] | None, facts: Mapping[str, Any]
    ) -> None:
        is_of_hub = type(dataset).__module__.partition(".")[0] == "datasets"
        kind = dataset.format["type"] if is_of_hub else None
        if is_of_hub and kind is None:  # plain lists, of which torch would not make one tensor
            dataset = dataset.with_format("torch")
        self._dataset, self._names, self._collate, self.facts = dataset, tuple(names), collate, dict(facts)
        self._is_looked_up = is_of_hub and kind != "custom"
        """True if it looks up many at once, and draws nothing."""

    def __len__(self) -> int:
        return len(self._dataset)

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:
        """Return the samples at the indices, int64 [B], collated. Raises DataError, which names a sample that fails."""
        if self._is_looked_up:
            items = self._dataset.__getitems__(indices.tolist())
        else:
            draws = draw or HostDraws(0, indices)  # in an evaluation a sample is the same each time, whatever the seed
            seeds = draws.integers("global generators", 2**32).tolist()
            states = random.getstate(), np.random.get_state()  # noqa: NPY002
            try:
                with torch.random.fork_rng(devices=[]):
                    items = list(map(self._item, indices.tolist(), seeds))
            finally:
                random.setstate(states[0])
                np.random.set_state(states[1])  # noqa: NPY002
        if self._collate is None:
            named = [_named(item, self._names, what="an item of the data set") for item in items]
            return {name: _stacked(name, named, indices) for name in named[0]}
        return _named(self._collate(items), self._names, what="what collate returns")

    def _item(self, index: int, seed: int) -> Any:
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  (the one that data sets draw from without a word)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the devices' as well
        try:
            return self._dataset[index]
        except DataError:
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[1:]  # without the one here; the text is all that a worker sends
            place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
            name, kind = type(self._dataset).__qualname__, type(error).__name__
            raise DataError(f"sample {index} of {name} cannot be loaded: {kind}: {error}{place}") from error


def _named(item: Any, names: Sequence[str | None], *, what: str) -> dict[str, Any]:
    """Return an item's fields by name. Raises DataError if the names do not fit."""
    if isinstance(item, Mapping):
        missing = [name for name in names if name is not None and name not in item]
        if missing:
            raise DataError(f"{what} has no field {missing[0]!r}: it has {', '.join(map(str, item))}")
        return {str(name): value for name, value in item.items() if not names or name in names}
    names = names or getattr(item, "_fields", ())
    parts = item if isinstance(item, (tuple, list)) else (item,)
    if len(parts) != len(names):
        raise DataError(
            f"{what} has {len(parts)} parts, and names={tuple(names)} has {len(names)}: give Samples.of(..., names=...) "
            "a name for each part, or None to drop a part"
        )
    return {name: part for name, part in zip(names, parts, strict=True) if name is not None}


def _stacked(name: str, items: Sequence[Mapping[str, Any]], indices: np.ndarray) -> Tensor:
    """Return a field of all items as torch's `default_collate` puts it together, [B, ...]."""
    try:
        field = default_collate([item[name] for item in items])
        if not isinstance(field, Tensor):
            raise TypeError(f"{type(items[0][name]).__name__} becomes a {type(field).__name__}")
    except Exception as error:
        raise DataError(
            f"field {name!r} of the samples {indices.tolist()} cannot be stacked into a tensor ({type(error).__name__}: "
            f"{error}): return tensors of one shape from the data set, drop the field (None in names=), or give "
            "Samples.of(..., collate=...), which pads them or returns a dict of tensors"
        ) from error
    return field


def _array(name: str, given: Any) -> np.ndarray:
    """Return the field as an array [N, ...] that torch can share memory with."""
    try:
        array = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asanyarray(given)
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")) if array.ndim else array
        torch.from_numpy(array[:0])
    except (TypeError, ValueError, IndexError) as error:
        kind = type(given).__name__
        raise DataError(f"Samples.of expects arrays or tensors [N, ...], and {name!r} is a {kind}: {error}") from error
    return array


# Samples held out for validation ----------------------------------------------------------------------------------------


@dataclass
class SamplePart:
    """The samples at `start` .. `stop` - 1 of a random order of `whole`."""

    whole: Any
    seed: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        self.facts, self.workers, self.is_array = self.whole.facts, self.whole.workers, self.whole.is_array

    @property
    def fingerprint(self) -> str:
        """The same for the same samples of the same data."""
        key = [self.whole.fingerprint, len(self.whole), self.seed, self.start, self.stop]
        return hashlib.sha256(repr(key).encode()).hexdigest()

    def __len__(self) -> int:
        return self.stop - self.start

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> Any:
        """Return the fields of a batch, as `Samples.fetch` describes."""
        return self.whole.fetch(self._places(indices), draw)

    def _places(self, indices: np.ndarray) -> np.ndarray:
        """Return where in `whole` the samples at `indices`, int64 [B], are."""
        return permute(indices + self.start, size=len(self.whole), seed=self.seed, epoch=0, purpose="validation")

    @property
    def name(self) -> Callable[[int], str] | None:
        """Returns the name of a sample by its index; None if `whole` has no names."""
        name = getattr(self.whole, "name", None)
        return None if name is None else lambda index: str(name(int(self._places(np.array([index]))[0])))

    @property
    def count(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Returns the counts of samples by their indices, as `app.task.Task` describes; None if `whole` has none."""
        count = getattr(self.whole, "count", None)
        return None if count is None else lambda indices: count(self._places(indices))


def hold_out(data: Splits, fraction: float | None, *, seed: int, source: str = "") -> Splits:
    """Return the splits, with this share of the training samples as validation split; None, or without any: unchanged.

    `source` says in errors whose samples these are, as in " of web".
    Raises RecipeError if there is a validation split already, and DataError if the share or the rest is no sample.
    """
    if fraction is None or data.train is None:
        return data
    if data.validation is not None:
        raise RecipeError(f"train.validation_fraction is {fraction:g}, but the data has a validation split: set it to null")
    if isinstance(data.train, Mixture):
        opened = {name: Splits(it, None, None) for name, it in data.train.sources.items()}
        parts = {name: hold_out(it, fraction, seed=seed, source=f" of {name}") for name, it in opened.items()}
        train, validation = ({name: getattr(it, split) for name, it in parts.items()} for split in ("train", "validation"))
        return data._replace(train=replace(data.train, sources=train), validation=replace(data.train, sources=validation))
    size = len(data.train)
    count = round(fraction * size)
    if not 0 < count < size:
        of = f"{count} of {size} training samples{source}"
        raise DataError(f"train.validation_fraction is {fraction:g}, {of}: both splits need one")
    return data._replace(validation=SamplePart(data.train, seed, 0, count), train=SamplePart(data.train, seed, count, size))


def first_of(samples: Any, most: int | None, *, seed: int) -> Any:
    """Return at most `most` samples, always the same of a random order; None: all."""
    if most is None or most >= len(samples):
        return samples
    if isinstance(samples, SamplePart):  # in random order already
        return replace(samples, stop=samples.start + most)
    return SamplePart(samples, seed, 0, most)


def without_hold_out(data: Splits) -> Splits:
    """Return the splits as the task gave them, before samples were held out."""
    train = data.train
    sources = [*train.sources.values()] if isinstance(train, Mixture) else [train]
    if not all(isinstance(it, SamplePart) for it in sources):
        return data
    whole = train.mapped(lambda it: it.whole) if isinstance(train, Mixture) else train.whole
    return data._replace(train=whole, validation=None)


def mapped(samples: Any, change: Callable[[Any], Any]) -> Any:
    """Return the samples with what the task opened changed; of a part the same part, and of a mixture each source."""
    if isinstance(samples, Mixture):
        return samples.mapped(lambda it: mapped(it, change))
    return replace(samples, whole=mapped(samples.whole, change)) if isinstance(samples, SamplePart) else change(samples)
