"""What the data loader needs from a split: whole batches by index, with randomness that depends on the sample number alone.

Nothing here knows what a sample is. A task says what its splits are beyond this.

A Dataset may be random by itself, as with random transforms: it draws from the generators that all of Python, NumPy and torch
share. These are seeded for each sample from its own draws, so that a sample is the same whoever makes it, and are put back
afterwards.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, _ProtocolMeta, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from app.data.draws import HostDraws
from app.errors import DataError

Batch = dict[str, Any]
"""Tensors [B, ...] by name: what the samples have, and `samples`, their numbers, int64 [B], -1 for padding. An array,
`numbers`, has these on the host as well."""
CHECK = "`samerun data check` lists all samples that cannot be read"
"""Added to errors about an unreadable sample."""
Layout = Mapping[str, tuple[tuple[int, ...], np.dtype]]
"""Shape and type of each field of a batch."""


class _Makes(_ProtocolMeta):
    """Has `Samples.of`, which what keeps to the protocol need not have."""

    def of(
        cls,  # noqa: N805  (of a metaclass)
        dataset: Any,
        *,
        names: Sequence[str | None] = (),
        collate: Callable[[list[Any]], Any] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Any:
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
        return wrap_dataset(dataset, names=names, collate=collate, facts=facts or {})


class Samples(Protocol, metaclass=_Makes):
    """One split of a data set, opened and checked. It may be pickled, or forked into the workers of a DataLoader.

    It neither shuffles nor knows of processes. Samples of an own task need `__len__` and `fetch` alone: `facts` are then {},
    `workers` False, and `fingerprint` is made of some of the samples. Optional for all: `remedy`, a text that says what else
    helps where training waits for these samples ("make the pictures smaller"), and `count(indices)`, see `app.task.Task`.
    """

    @property
    def facts(self) -> Mapping[str, Any]:
        """What a model must know of the samples, as JSON holds it: {"classes": 10}."""

    @property
    def fingerprint(self) -> str:
        """The same for the same data on every machine, and another for other data."""

    @property
    def workers(self) -> bool:
        """Whether `fetch` makes samples one by one, so that worker processes help; False for a look-up."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:
        """Return the fields of a batch, each [B, ...]. What is returned depends on the arguments alone.

        `indices` are int64 [B], in 0 .. len - 1. `draw` gives random numbers for these samples; None: nothing is random, as in
        an evaluation. Raises DataError if a sample cannot be read; the text names the file, or the split and the index.
        """


@runtime_checkable
class LooksUp(Protocol):
    """What `Samples` that are arrays have besides: batches are written where their memory is, a device's for instance."""

    @property
    def layout(self) -> Layout:
        """Shape, without the batch, and type of each field."""

    def fetch_into(self, indices: np.ndarray, memory: Mapping[str, np.ndarray]) -> None:
        """Write what `fetch` returns for int64 [B] into the field's arrays, each [B, ...]."""


class Splits(NamedTuple):
    """The splits of a task's data, opened: each `Samples`."""

    train: Any
    """None: there is none, and nothing is trained."""
    validation: Any | None
    """What a run looks at before its end. None: nothing is looked at."""
    test: Any | None
    """What the final weights are scored on, once. None: there is no such score."""
    others: Mapping[str, str] = {}
    """What else the task reads that decides what is learnt: a digest of each, by name."""

    @property
    def scored(self) -> dict[str, Any]:
        """The splits that weights are scored on, by name: those that there are."""
        both = {"validation": self.validation, "test": self.test}
        return {name: samples for name, samples in both.items() if samples is not None}

    @property
    def facts(self) -> dict[str, str]:
        """What tells these data from any other, by name."""
        named = {"training": self.train, **self.scored}
        found = {f"{name} data": f"{len(samples)} samples, {samples.fingerprint}" for name, samples in named.items()}
        return {**found, **self.others}


Collate = Callable[[list[Any]], Any]


def wrap_dataset(
    dataset: Any, *, names: Sequence[str | None], collate: Collate | None, facts: Mapping[str, Any]
) -> OfArrays | OfDataset:
    """Return samples of a data set; see `Samples.of`. Raises DataError for what cannot be samples."""
    kind = type(dataset)
    if isinstance(dataset, TensorDataset) and kind.__getitem__ is TensorDataset.__getitem__ and collate is None:
        dataset = _named(dataset.tensors, names, what="a TensorDataset")
        names = ()
    if isinstance(dataset, Mapping):
        kept = dataset if not names else _named(dataset, names, what="a mapping")
        return OfArrays({name: _array(name, array) for name, array in kept.items()}, facts=facts)
    if isinstance(dataset, DataLoader):
        raise DataError("Samples.of was given a DataLoader, and uses only its data set: the application makes the batches")
    if isinstance(dataset, IterableDataset) or not (hasattr(kind, "__getitem__") and hasattr(kind, "__len__")):
        raise DataError(
            f"Samples.of was given {_class_name(dataset)}, which gives no samples by number. The samples of a "
            "step must depend only on the step; otherwise runs on other numbers of processes would differ, "
            "and none could resume where it stopped. Give a Dataset with __getitem__ and __len__, or write "
            "the stream to disk once"
        )
    return OfDataset(dataset, names=names, collate=collate, facts=facts)


class OfArrays:
    """Samples that are the rows of arrays, which may be mapped from a file."""

    workers = False

    def __init__(self, arrays: Mapping[str, np.ndarray], *, facts: Mapping[str, Any]) -> None:
        """Each array is [N, ...]."""
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) != 1:
            told = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise DataError(
                f"the arrays of Samples.of must have the same length, one row per sample, but have: {told or 'none'}"
            )
        self._arrays, self.facts = arrays, dict(facts)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    @property
    def layout(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape, without the batch, and type of each field."""
        return {name: (array.shape[1:], array.dtype) for name, array in self._arrays.items()}

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the rows at the indices, int64 [B]."""
        return {name: torch.from_numpy(array[indices]) for name, array in self._arrays.items()}

    def fetch_into(self, indices: np.ndarray, memory: Mapping[str, np.ndarray]) -> None:
        """Write the rows at the indices, int64 [B], into the fields' memory, each [B, ...]."""
        for name, array in self._arrays.items():
            np.take(array, indices, axis=0, out=memory[name], mode="clip")  # which writes without a copy in between


class OfDataset:
    """Samples that a Dataset makes one by one."""

    workers = True

    def __init__(self, dataset: Any, *, names: Sequence[str | None], collate: Collate | None, facts: Mapping[str, Any]) -> None:
        is_of_hub = type(dataset).__module__.partition(".")[0] == "datasets"
        kind = dataset.format["type"] if is_of_hub else None
        if is_of_hub and kind is None:  # plain lists, of which torch would not make one tensor
            dataset = dataset.with_format("torch")
        self._dataset, self._names, self._collate, self.facts = dataset, tuple(names), collate, dict(facts)
        self._together = is_of_hub and kind != "custom"
        """Whether it looks up many at once, and draws nothing."""

    def __len__(self) -> int:
        return len(self._dataset)

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:
        """Return the samples at the indices, int64 [B], collated. Raises DataError, which names a sample that fails."""
        if self._together:
            items = self._dataset.__getitems__(indices.tolist())
        else:
            draws = draw or HostDraws(0, indices)  # in an evaluation a sample is the same each time, whatever the seed
            seeds = draws.integers("global generators", 2**32).tolist()
            with _own_generators() as seed:
                items = [self._item(index, seed, by) for index, by in zip(indices.tolist(), seeds, strict=True)]
        if self._collate is None:
            named = [_named(item, self._names, what="an item of the data set") for item in items]
            return {name: _stacked(name, named, indices) for name in named[0]}
        try:
            batch = self._collate(items)
        except Exception as error:
            raise DataError(f"collate failed on the samples {_few(indices)}: {_error_text(error)}") from error
        return _named(batch, self._names, what="what collate returns")

    def _item(self, index: int, seed: Callable[[int], None], by: int) -> Any:
        seed(by)
        try:
            return self._dataset[index]
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"sample {index} of {_class_name(self._dataset)} cannot be loaded: {_error_text(error)}") from error


@contextmanager
def _own_generators() -> Iterator[Callable[[int], None]]:
    """Give what seeds the generators that all share on the CPU, from 0 .. 2**32 - 1; put them back afterwards."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
    try:
        yield _seed
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.default_generator.set_state(states[2])


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (the one that data sets draw from without a word)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the devices' as well


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
        given = f"names={tuple(names)} has {len(names)}" if names else "they have no names yet"
        example = tuple("xyz"[at] if at < 3 else f"field{at}" for at in range(len(parts)))
        raise DataError(
            f"{what} has {len(parts)} part{'s' if len(parts) != 1 else ''} "
            f"({', '.join(map(_shape_of, parts))}), and {given}: give Samples.of(..., names={example}), a "
            "name for each part, or None to drop a part"
        )
    return {name: part for name, part in zip(names, parts, strict=True) if name is not None}


def _stacked(name: str, items: Sequence[Mapping[str, Any]], indices: np.ndarray) -> Tensor:
    """Return a field of all items as torch's `default_collate` puts it together, [B, ...]."""
    other = next((at for at, item in enumerate(items) if name not in item), None)
    if other is not None:
        raise DataError(f"sample {indices[other]} has no field {name!r}, but sample {indices[0]} has it")
    values = [item[name] for item in items]
    try:
        found = default_collate(values)
    except Exception as error:
        kinds = ", ".join(dict.fromkeys(map(_shape_of, values)))
        raise DataError(
            f"field {name!r} of the samples {_few(indices)} cannot be stacked into a tensor: they have "
            f"{kinds}. Return tensors of one shape from the data set, or give Samples.of(..., collate=...), "
            f"which pads them ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(found, Tensor):
        raise DataError(
            f"field {name!r} is {_shape_of(values[0])}, which torch collates to a {type(found).__name__}, not "
            "a tensor: set its name in names= to None, or give Samples.of(..., collate=...), which returns a "
            "dict of tensors"
        )
    return found


def _array(name: str, given: Any) -> np.ndarray:
    """Return the field as an array [N, ...] that torch can share memory with."""
    try:
        array = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asanyarray(given)
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")) if array.ndim else array
        torch.from_numpy(array[:0])
    except (TypeError, ValueError, IndexError) as error:
        raise DataError(
            f"Samples.of was given {_shape_of(given)} as {name!r}, but expects arrays or tensors of numbers [N, ...]: {error}"
        ) from error
    return array


def _shape_of(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is None:
        return type(value).__name__
    return f"{type(value).__name__} {list(shape)} of {str(getattr(value, 'dtype', '?')).removeprefix('torch.')}"


def _class_name(value: Any) -> str:
    name = type(value).__qualname__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _few(indices: np.ndarray) -> str:
    return ", ".join(map(str, indices[:4].tolist())) + (", ..." if len(indices) > 4 else "")


def _error_text(error: BaseException) -> str:
    """The error, and the line that raised it: the text is all that a worker process sends."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without the one here
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
