"""Merges adapters (small matrices beside a weight) into the weights, for files of plain weights.

A weight passes through memory in chunks, as everywhere; only the two matrices that are added to it are there whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from app.checkpoints import tensor_file
from app.checkpoints.stored_weights import Stored
from app.checkpoints.tensor_file import Content
from app.task import Adapters, LowRank, Task


def adapters_of(task: Task, model: torch.nn.Module) -> Adapters | None:
    """Return how the weights of a task's model go into files; None: as they are."""
    return task.adapters(model) if hasattr(task, "adapters") else None


def merged(contents: Mapping[str, Content], adapters: Adapters | None) -> dict[str, Content]:
    """Return the weights of a model as a plain one has them. Each of the given contents may be taken once."""
    if adapters is None:
        return dict(contents)
    found = {}
    for name, content in contents.items():
        plain, low = adapters.names.get(name, name), adapters.sums.get(adapters.names.get(name, name))
        if name not in adapters.alone:
            added = content if low is None else _added(content, contents[low.down], contents[low.up], low)
            found[plain] = added
    return found


def as_here(stored: Stored, adapters: Adapters | None) -> Stored:
    """Return stored weights by the names that the model has for them; those of a run with such matrices have these."""
    if adapters is None:
        return stored
    here = {there: name for name, there in adapters.names.items()}
    return stored.renamed({here.get(name, name): name for name in stored.shapes})


def _added(base: Content, down: Content, up: Content, low: LowRank) -> Content:
    return Content(base.dtype, base.shape, _sums(base, down, up, low))


def _sums(base: Content, down: Content, up: Content, low: LowRank) -> Iterator[bytes]:
    """Yield the chunks of the weight with the product added, in float64 until they are rounded to the weight's type."""
    columns, dtype = base.shape[1], tensor_file.dtype_in_torch(base.dtype)
    assert isinstance(dtype, torch.dtype)
    left, right = (_tensor(up), _tensor(down)) if not low.transposed else (_tensor(down).T, _tensor(up).T)
    at = 0
    for chunk in base.chunks:
        values = torch.frombuffer(bytearray(chunk), dtype=dtype)
        first, end = at // columns, -(-(at + len(values)) // columns)
        product = (left[first:end] @ right).flatten()[at - first * columns :][: len(values)]
        yield _bytes((values.double() + low.factor * product).to(dtype))
        at += len(values)


def _tensor(content: Content) -> torch.Tensor:
    dtype = tensor_file.dtype_in_torch(content.dtype)
    assert isinstance(dtype, torch.dtype)
    return torch.frombuffer(bytearray(_joined(content.chunks)), dtype=dtype).view(content.shape).double()


def _joined(chunks: Iterable[bytes | bytearray | memoryview]) -> bytes:
    return b"".join(bytes(chunk) for chunk in chunks)


def _bytes(values: torch.Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()
