"""The elements of a tensor that a rank has: one index range of the flattened tensor, or columns (many ranges of one length).

A rank of a group that shards columns, as tensor parallelism does, has some elements of every row. Only functions that take
tensors import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from app.errors import PresetError

if TYPE_CHECKING:
    import torch


WEIGHT, AVERAGE, BUFFER = "weight", "average", "buffer"
"""Keys of full-precision weights, of their moving average, and of buffers."""


@dataclass(frozen=True, order=True, slots=True)
class Region:
    """Runs of consecutive elements of a flattened tensor, each as long as the others, at even distances."""

    start: int
    """Index of the first element."""
    count: int
    """Elements in all runs together."""
    run: int
    """Elements in a run: `count`, where there is one run."""
    stride: int
    """Distance between the starts of two runs; `run`, where there is one run."""

    @classmethod
    def flat(cls, start: int, count: int) -> Region:
        """Return consecutive elements."""
        return cls(start, count, count, count)

    @classmethod
    def made(cls, start: int, count: int, run: int, stride: int) -> Region:
        """Return the region, flat if its runs are adjacent or only one."""
        return cls.flat(start, count) if run in (stride, count) else cls(start, count, run, stride)

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str = "a parameter") -> Region:
        """Return the elements of `tensor` that this process has: all of a plain tensor, or its part of a DTensor.

        Raises PresetError, with `name`, if they are neither rows nor columns.
        """
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return cls.flat(0, tensor.numel())
        shape, mesh, placements = tuple(tensor.shape), tuple(tensor.device_mesh.shape), tensor.placements
        coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
        dims = {getattr(placement, "dim", 0) for placement in placements}
        if len(coordinate) != len(mesh) or any(placement.is_partial() for placement in placements) or not dims <= {0, 1}:
            raise _unsupported(tensor, name)
        rows, columns, *rest = (*shape, 1, 1)
        bounds = []
        for dim, length in enumerate((rows, columns)):
            axes = [at for at, placement in enumerate(placements) if getattr(placement, "dim", None) == dim]
            order = _order(axes, mesh, placements)
            if order is None:
                raise _unsupported(tensor, name)
            first, count = 0, length
            for at in order:
                share = -(-count // mesh[at])  # as torch.chunk splits
                before = min(coordinate[at] * share, count)
                first, count = first + before, min(share, count - before)
            bounds.append((first, count))
        (top, height), (left, width) = bounds
        size, stride = prod(rest), columns * prod(rest)
        if height * width * size != tensor.to_local().numel():
            raise _unsupported(tensor, name)
        if 0 in (height, width, size):
            return cls.flat(0, 0)
        return cls.made(top * stride + left * size, height * width * size, width * size, stride)

    @property
    def end(self) -> int:
        """Index after the last element."""
        return self.start + (self.runs - 1) * self.stride + self.run if self.count else self.start

    @property
    def runs(self) -> int:
        """Number of runs."""
        return self.count // self.run if self.count else 0

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the elements of a contiguous tensor, of any shape, as a view [runs, run] of it."""
        flat = whole.view(-1)
        assert self.end <= flat.numel(), (self, flat.numel())
        return flat.as_strided((self.runs, self.run), (self.stride, 1), flat.storage_offset() + self.start)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the elements of a contiguous tensor, of any shape, 1-D in order; a view of it if they are one run."""
        return self.rows(whole).reshape(-1).contiguous()  # single elements of rows are a view otherwise

    def part(self, first: int, stop: int) -> Region:
        """Return the elements first .. stop - 1 of this region; of many runs, only whole ones."""
        if self.runs <= 1:
            return Region.flat(self.start + first, stop - first)
        assert first % self.run == stop % self.run == 0, (self, first, stop)
        return Region.made(self.start + first // self.run * self.stride, stop - first, self.run, self.stride)

    def share(self, count: int, index: int) -> tuple[int, int]:
        """Return `first` and `stop` for `part` of one of `count` shares that are as even as possible."""
        unit, units = (self.run, self.runs) if self.runs > 1 else (1, self.count)
        return units * index // count * unit, units * (index + 1) // count * unit

    def overlaps(self, other: Region) -> Iterator[Region]:
        """Yield the elements that both have, each once."""
        if 0 in (self.count, other.count) or self.start >= other.end or other.start >= self.end:
            return
        few, many = sorted((self, other), key=lambda it: it.runs)
        if few.runs > 1 and (both := _common_columns(few, many)) is not None:
            yield from [both] if both.count else []
            return
        for start in range(few.start, few.end, few.stride):
            yield from _within(start, start + few.run, many)

    def inside(self, part: Region) -> Region:
        """Return the position of a part of this region, as `overlaps` yields it, among its elements in order: as many runs."""
        if self.runs <= 1:
            return Region(part.start - self.start, part.count, part.run, part.stride)
        number, first = divmod(part.start - self.start, self.stride)
        stride = self.run if part.runs > 1 and part.stride == self.stride else part.stride
        return Region(number * self.run + first, part.count, part.run, stride)

    def pieces(self, most: int) -> Iterator[Region]:
        """Yield the region in parts that span at most `most` elements: runs, or parts of long runs."""
        if self.run > most:
            for begin in range(self.start, self.end, self.stride):
                yield from (Region.flat(at, min(most, begin + self.run - at)) for at in range(begin, begin + self.run, most))
            return
        together = (most - self.run) // self.stride + 1 if self.count else 1
        for number in range(0, self.runs, together):
            runs = min(together, self.runs - number)
            yield Region.made(self.start + number * self.stride, runs * self.run, self.run, self.stride)


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements of one tensor, addressed by its name and a region, never by a rank."""

    key: str
    """WEIGHT, AVERAGE, BUFFER, or the optimizer's own name of a state tensor ("exp_avg", "momentum_buffer", ...)."""
    name: str
    """Plain name of the parameter or buffer, as in model.safetensors."""
    shape: tuple[int, ...]
    """Shape of the whole tensor: the parameter's, but for states of optimizers that step on whole parameters only."""
    region: Region
    values: torch.Tensor
    """The elements, 1-D, on any device; a view of live memory where it is read into."""
    copies: tuple[int, int] = (1, 0)
    """Number of ranks that hold the same elements, and which of them this one is."""

    def share(self) -> Piece:
        """Return the even share of it that this rank writes."""
        first, stop = self.region.share(*self.copies)
        return replace(self, region=self.region.part(first, stop), values=self.values[first:stop], copies=(1, 0))


def _common_columns(one: Region, other: Region) -> Region | None:
    """Return the common elements of two regions of columns of the same matrix, or None if one of them is something else."""
    width, left, right = one.stride, one.start % one.stride, other.start % one.stride
    if other.stride != width or left + one.run > width or right + other.run > width:
        return None
    first, stop = max(left, right), min(left + one.run, right + other.run)
    top = max(one.start // width, other.start // width)
    rows = min(one.start // width + one.runs, other.start // width + other.runs) - top
    run = stop - first if rows > 0 else 0
    return Region.made(top * width + first, rows * run, run, width) if run > 0 else Region.flat(0, 0)


def _within(start: int, stop: int, runs: Region) -> Iterator[Region]:
    """Yield the elements start .. stop - 1 that a region has."""
    number = max(0, (start - runs.start) // runs.stride)
    begin = runs.start + number * runs.stride
    if begin < start:  # in this run, or behind it
        if start < begin + runs.run and number < runs.runs:
            yield Region.flat(start, min(stop, begin + runs.run) - start)
        number, begin = number + 1, begin + runs.stride
    complete = min(runs.runs, max(number, (stop - runs.start - runs.run) // runs.stride + 1))
    if complete > number:
        yield Region.made(begin, (complete - number) * runs.run, runs.run, runs.stride)
    begin = runs.start + complete * runs.stride
    if complete < runs.runs and begin < stop:
        yield Region.flat(begin, min(stop - begin, runs.run))


# ---- DTensors: the elements of each process for placements over a mesh ---------------------------------------------------


def copies(tensor: torch.Tensor, name: str = "a parameter") -> tuple[int, int]:
    """Return the number of processes that have the same elements of `tensor` as this one, and this one's index among them.

    Every process has a plain tensor whole. Raises PresetError, with `name`, if they cannot be counted.
    """
    from torch import distributed
    from torch.distributed.tensor import DTensor

    ranks, rank = (distributed.get_world_size(), distributed.get_rank()) if distributed.is_initialized() else (1, 0)
    if not isinstance(tensor, DTensor):
        return ranks, rank
    mesh = tensor.device_mesh
    root: Any = mesh._get_root_mesh()  # torch 2.15 has no public name for the mesh that others are parts of
    names, root_names = (it.mesh_dim_names or tuple(map(str, range(it.ndim))) for it in (mesh, root))
    sharded = {key for key, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate()}
    number, index, parts = 1, 0, 1
    for key, size, at in zip(root_names, root.shape, root.get_coordinate(), strict=True):
        if key in sharded:
            parts *= size
        else:
            number, index = number * size, index * size + at
    if number * parts != ranks or not sharded <= set(root_names):
        raise _unsupported(tensor, name)
    return number, index


def _unsupported(tensor: Any, name: str) -> PresetError:
    return PresetError(
        f"{name}, {tuple(tensor.shape)}, is sharded as {tensor.placements} over {tensor.device_mesh}: a process has neither "
        "rows nor columns of it, or others do not have the same ones. Use an unchanged preset of accelerate_configs/."
    )


def _order(axes: list[int], mesh: tuple[int, ...], placements: Sequence[Any]) -> list[int] | None:
    """Return the order in which axes of the mesh have split a dimension of a tensor, each the parts of the one before.

    FSDP2 splits the parts of tensor parallelism, is the first axis of the mesh, and marks that by a strided shard, whose
    split factor is the number of parts before (torch 2.15, _fsdp_param.py). None: a strided shard with another meaning.
    """
    if not axes:
        return []
    first, later = axes[0], _order(axes[1:], mesh, placements)
    factor = getattr(placements[first], "split_factor", 1)
    if later is None or factor not in (1, prod(mesh[at] for at in later)):
        return None
    return [first, *later] if factor == 1 else [*later, first]
