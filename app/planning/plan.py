"""The plan of a recipe: what each preset takes of each device, what fits, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from app.errors import RecipeError
from app.planning import traffic
from app.planning.case import Case, Memory
from app.planning.kept import Kept
from app.planning.traffic import Traffic
from app.recipe.batching import BatchPlan
from app.recipe.schema import Recipe

NONE, BLOCKS = "none", "blocks"
"""Values of train.checkpoint_activations."""
RECOMPUTED = 4 / 3
"""Arithmetic of a step that computes its blocks once more, beside one that does not: the backward pass is two forwards."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A preset on so many devices."""

    preset: str
    strategy: str
    devices: int
    nodes: int
    replicas: int = 1
    tensor_parallel: int = 1

    @property
    def devices_of_node(self) -> int:
        """Devices of each node, and so processes there."""
        return self.devices // self.nodes

    @property
    def data_ranks(self) -> int:
        """Processes that divide the global batch."""
        return self.devices // self.tensor_parallel


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one way takes with checkpointing or without."""

    way: Way
    checkpoint_activations: str
    fits: bool
    lacks_host: bool = False
    """Whether the host's memory is what does not suffice."""
    micro_batch: int = 0
    """The largest that fits, or else the smallest that there is; 0: the global batch cannot be divided so."""
    accumulation: int = 0
    memory: Memory | None = None
    traffic: Traffic = field(default_factory=Traffic)
    problem: str = ""
    """Why it cannot be at all; empty: it can, if it fits."""
    totals: tuple[tuple[int, int], ...] = ()
    """The micro-batches that were looked at, and their bytes."""

    @property
    def host(self) -> int:
        """Bytes of a node's host memory that its processes take for what is offloaded."""
        return self.memory.host * self.way.devices_of_node if self.memory else 0

    def kept(self, precision: str) -> Kept | None:
        """Return what the launcher is to know of it."""
        if self.memory is None:
            return None
        held = self.memory
        return Kept(
            strategy=self.way.strategy,
            data_ranks=self.way.data_ranks,
            replicas=self.way.replicas,
            tensor_parallel=self.way.tensor_parallel,
            precision=precision,
            checkpoint_activations=self.checkpoint_activations,
            preset=self.way.preset,
            always=held.weights + held.gradients + held.optimizer,
            totals=self.totals,
            host=held.host,
        )


@dataclass(frozen=True, kw_only=True)
class Given:
    """What is planned for, and with what."""

    recipe: Recipe
    usable: int
    """Bytes of each device that may be planned."""
    precision: str
    parameters: int
    """Those that are trained."""
    block_outputs: int
    """Numbers that all blocks give for one sample: tokens x width x blocks."""
    has_blocks: bool
    """Whether the model names blocks, which can be computed again."""
    peak: Callable[[Case], Memory]
    host: int | None = None
    """Bytes of a node's host memory that may be planned; None: not known, and so not judged."""


def rows(given: Given, ways: Sequence[Way]) -> Iterator[Row]:
    """Yield a row for each way, without checkpointing of activations and with it."""
    for way in ways:
        for activations in (NONE, BLOCKS) if given.has_blocks else (NONE,):
            yield _row(given, way, activations)


def cheapest(found: Sequence[Row], order: Sequence[str]) -> Row | None:
    """Return the first row in the order of strategies that fits; what computes blocks once more, or offloads, comes later."""
    fitting = [row for row in found if row.fits]

    def cost(row: Row) -> tuple[bool, bool, int]:
        strategy = row.way.strategy
        return strategy.endswith("offload"), row.checkpoint_activations == BLOCKS, order.index(strategy)

    return min(fitting, key=cost, default=None)


def micro_batches(recipe: Recipe, data_ranks: int) -> list[int]:
    """Return the micro-batches that so many processes can have, rising. Raises RecipeError if there is none."""
    neighbours = recipe.sections.neighbours
    most = BatchPlan.of(recipe, data_ranks)  # says why, where there is none
    share = recipe.train.global_batch_size // data_ranks
    return [size for size in range(neighbours, most.micro_batch + 1, neighbours) if share % size == 0]


def _row(given: Given, way: Way, activations: str) -> Row:
    seen: dict[int, Memory] = {}

    def fits(size: int) -> bool:
        seen[size] = given.peak(case(given, way, activations, size))
        return seen[size].total <= given.usable

    try:
        sizes = micro_batches(given.recipe, way.data_ranks)
        fits(sizes[0])
    except RecipeError as error:  # no such division, or the model cannot be divided in this way
        return Row(way=way, checkpoint_activations=activations, fits=False, problem=str(error))
    size = sizes[0]
    if seen[size].total <= given.usable and len(sizes) > 1:
        size = max(_largest(sizes, fits, seen, given.usable), sizes[0])
    accumulation = given.recipe.train.global_batch_size // (way.data_ranks * size)
    lacks_host = given.host is not None and seen[size].host * way.devices_of_node > given.host
    return Row(
        way=way,
        checkpoint_activations=activations,
        fits=seen[size].total <= given.usable and not lacks_host,
        lacks_host=lacks_host,
        micro_batch=size,
        accumulation=accumulation,
        memory=seen[size],
        traffic=traffic.of_step(
            way.strategy,
            parameters=given.parameters,
            data_ranks=way.data_ranks,
            replicas=way.replicas,
            tensor_parallel=way.tensor_parallel,
            accumulation=accumulation,
            precision=given.precision,
            block_outputs=given.block_outputs * size,
            recomputed=activations == BLOCKS,
        ),
        totals=tuple((number, seen[number].total) for number in sorted(seen)),
    )


def _largest(sizes: Sequence[int], fits: Callable[[int], bool], seen: Mapping[int, Memory], limit: int) -> int:
    """Return the largest of the sizes that fits; the first does.

    The peak rises with the size along straight lines, steeper ones later: two peaks tell
    how far it may be to the limit, at most.
    """
    low, high, guess = 0, len(sizes), 1  # the size at `low` fits, that at `high` does not
    while high - low > 1:
        if fits(sizes[guess]):
            low = guess
        else:
            high = guess
        near, far = sorted(seen)[-2:] if high == len(sizes) else (sizes[low], sizes[high])
        slope = (seen[far].total - seen[near].total) / (far - near)
        ahead = sizes[low] + (limit - seen[sizes[low]].total) / slope if slope > 0 else sizes[-1]
        reached = [place for place in range(low + 1, high) if sizes[place] <= ahead]
        guess = reached[-1] if reached else low + 1
        if not reached and high < len(sizes):
            break  # on the line between one that fits and one that does not, none is left below the limit
    return sizes[low]


def case(given: Given, way: Way, activations: str, micro_batch: int, *, precision: str | None = None) -> Case:
    """Return what `peak` is asked of a way; `precision`: another than what is planned for."""
    return Case(
        recipe=given.recipe,
        strategy=way.strategy,
        data_ranks=way.data_ranks,
        replicas=way.replicas,
        tensor_parallel=way.tensor_parallel,
        micro_batch=micro_batch,
        precision=precision or given.precision,
        checkpoint_activations=activations,
    )


@dataclass(frozen=True, kw_only=True)
class Duration:
    """How long a training takes, by an assumption."""

    flops: float
    """Floating-point operations of a step, without what is computed once more."""
    peak: float
    """The maker's FLOP/s of one device."""
    utilization: float
    """The share of it that is assumed."""
    steps: int | None

    def step_s(self, row: Row) -> float:
        """Return the seconds of a step."""
        again = RECOMPUTED if row.checkpoint_activations == BLOCKS else 1.0
        return again * self.flops / (row.way.devices * self.peak * self.utilization)

    def total_s(self, row: Row) -> float | None:
        """Return the seconds of all steps, or None where the recipe does not say how many there are."""
        return None if self.steps is None else self.steps * self.step_s(row)
