"""What `samerun doctor` concludes from what it measured. Pure: an examination in, problems out.

The rule for "slow", the same for every figure: worse than a third of the median of the others' (`OUTLIER`). It needs no
knowledge of the hardware, works for two, and is not moved by the culprit's own figure. What all share is not a culprit, so
nothing is said of machines that are slow alike.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

OUTLIER = 3.0
"""How many times worse than the median of the others is reported. Noise on a shared machine stays below; a throttled device, a
link that fell back to a slower speed, or a full disk exceeds it."""
CLOCK_MS = 1000.0
"""Largest difference of two clocks. Beyond it, files on a shared folder come from the future and logs cannot be ordered."""
LEAST_FREE_DISK_BYTES = 2**30
"""Free space that a run folder needs at least."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Node:
    """What was measured once on a node, by its first rank."""

    clock_ms: float = 0.0
    """Its clock minus rank 0's."""
    clock_error_ms: float = 0.0
    """How far that may be off."""
    link_to: str = ""
    """The next node in the ring of all; empty where there is one node."""
    link_gb_per_s: float | None = None
    """Bytes sent there and acknowledged, by time, in 1e9 bytes per second."""
    folder: str = ""
    """Where files were written: the run folder, or what is there above it."""
    folder_error: str = ""
    """Why nothing can be written there."""
    write_mb_per_s: float | None = None
    """Bytes written and synchronized with the disk, by time, in 1e6 bytes per second."""
    free_disk_bytes: int | None = None
    """Free space there, for this user."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What one process found out about itself."""

    rank: int
    host: str
    address: str
    """IP address by which it goes to rank 0's machine."""
    device: str
    """As torch has it: `cuda:0`."""
    device_name: str
    """Model of the device; `cpu` for any CPU."""
    free_bytes: int | None
    """Free memory of the device, or of the machine where that is its CPU. None: unknown."""
    total_bytes: int | None
    """All of that memory."""
    versions: Mapping[str, str]
    """Of packages, Python and driver, by name."""
    numbers_per_s: float
    """Random numbers that its device draws in a second: how fast it works."""
    node: Node | None = None
    """What was measured once on its node, in the node's first rank."""
    arithmetic_s: float = 0.0
    """Seconds of the arithmetic check, in all precisions."""
    wrong_answers: Sequence[str] = ()
    """What it computed of them, with what is right."""


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """A sum over all ranks of a buffer of one size, repeated."""

    size_bytes: int
    gb_per_s: Sequence[float]
    """Algorithm bandwidth of each repeat, size_bytes / time of the slowest rank, in 1e9 bytes per second."""
    wrong_ranks: Sequence[int] = ()
    """Ranks that got a wrong sum."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All that was measured."""

    ranks: Sequence[Rank]
    """In the order of the ranks."""
    all_reduces: Sequence[AllReduce] = ()
    """Empty for one process."""
    notes: Sequence[str] = ()
    """What few runs meet, and what could not be tried."""

    @property
    def hosts(self) -> list[str]:
        """Where each rank is."""
        return [rank.host for rank in self.ranks]

    @property
    def nodes(self) -> dict[str, Node]:
        """What was measured once on a node, by host."""
        return {rank.host: rank.node for rank in self.ranks if rank.node is not None}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is wrong."""

    text: str
    """What, with the figure and what it should be."""
    host: str | None = None
    """The node to leave out; None where none can be blamed."""
    rank: int | None = None
    """The process, where it is one alone."""

    def __str__(self) -> str:
        where = [f"rank {self.rank}"] if self.rank is not None else []
        where += [f"on {self.host}" if where else self.host] if self.host is not None else []
        return f"{' '.join(where)}: {self.text}" if where else self.text


def diagnose(examination: Examination) -> list[Problem]:
    """Return everything that is wrong with `examination`, the gravest first: results, then what differs, then what is slow."""
    return [
        *(Problem(text=text, host=rank.host, rank=rank.rank) for rank in examination.ranks for text in rank.wrong_answers),
        *_wrong_sums(examination),
        *_differences(examination.ranks),
        *_wrong_clocks(examination.nodes),
        *_bad_folders(examination.nodes),
        *_slow_ranks(examination.ranks),
        *_slow_nodes(examination.nodes),
    ]


def exclude_option(hosts: Sequence[str], problems: Sequence[Problem]) -> str | None:
    """Return the option of Slurm that leaves out the nodes with problems; None if there are none, or no others."""
    blamed = {problem.host for problem in problems}
    left_out = [host for host in dict.fromkeys(hosts) if host in blamed]
    return f"--exclude={','.join(left_out)}" if 0 < len(left_out) < len(set(hosts)) else None


def far_below(values: Mapping[Key, float]) -> dict[Key, float]:
    """Return, for every key whose value is below a third of the median of the others', that median.

    `values` are rates: more is better. A single one has no others.
    """
    found = {}
    for key, value in values.items():
        others = [other for other_key, other in values.items() if other_key != key]
        if others and value * OUTLIER < (median := statistics.median(others)):
            found[key] = median
    return found


def _wrong_sums(examination: Examination) -> list[Problem]:
    return [
        Problem(
            text=f"the all-reduce of {all_reduce.size_bytes} bytes gave it a wrong sum", host=examination.hosts[rank], rank=rank
        )
        for all_reduce in examination.all_reduces
        for rank in all_reduce.wrong_ranks
    ]


def _differences(ranks: Sequence[Rank]) -> list[Problem]:
    """What is not as on most ranks; where there is no majority, not as on rank 0."""
    facts = [(rank.host, {"device": rank.device_name, **rank.versions}) for rank in ranks]
    problems = []
    for what in dict.fromkeys(name for _, found in facts for name in found):
        values = [(host, found.get(what, "none")) for host, found in facts]
        usual, count = Counter(value for _, value in values).most_common(1)[0]
        for host, value in dict.fromkeys(values):
            if value != usual:
                problems.append(Problem(text=f"{what} is {value}; {count} of {len(ranks)} ranks have {usual}", host=host))
    return problems


def _wrong_clocks(nodes: Mapping[str, Node]) -> list[Problem]:
    # Of two, rank 0's counts as right; of more, the one in the middle, so that a wrong clock of rank 0 is found too.
    right_ms = statistics.median_low([node.clock_ms for node in nodes.values()]) if len(nodes) > 2 else 0.0
    return [
        Problem(
            text=f"its clock is {abs(off_ms):.0f} ms {'ahead' if off_ms > 0 else 'behind'}: check its time service", host=host
        )
        for host, node in nodes.items()
        if abs(off_ms := node.clock_ms - right_ms) - node.clock_error_ms > CLOCK_MS
    ]


def _bad_folders(nodes: Mapping[str, Node]) -> list[Problem]:
    problems = []
    for host, node in nodes.items():
        if node.folder_error:
            problems.append(Problem(text=f"{node.folder} cannot be written: {node.folder_error}", host=host))
        elif node.free_disk_bytes is not None and node.free_disk_bytes < LEAST_FREE_DISK_BYTES:
            text = f"{node.folder} has {node.free_disk_bytes / 2**30:.2f} GiB free: a run needs at least 1 GiB"
            problems.append(Problem(text=text, host=host))
    return problems


def _slow_ranks(ranks: Sequence[Rank]) -> list[Problem]:
    rates = {rank.rank: rank.numbers_per_s for rank in ranks}
    # The memory of a CPU is its machine's: one rank of it speaks for all.
    owners = [rank for rank in ranks if rank.device != "cpu" or rank.node is not None]
    free = {rank.rank: float(rank.free_bytes) for rank in owners if rank.free_bytes is not None}
    problems = [
        Problem(
            text=f"{ranks[rank].device} draws {rates[rank] / 1e6:.1f} million numbers/s, the others {usual / 1e6:.1f}",
            host=ranks[rank].host,
            rank=rank,
        )
        for rank, usual in far_below(rates).items()
    ]
    return problems + [
        Problem(
            text=f"{ranks[rank].device} has {free[rank] / 2**30:.1f} GiB of free memory, the others {usual / 2**30:.1f}",
            host=ranks[rank].host,
            rank=rank,
        )
        for rank, usual in far_below(free).items()
    ]


def _slow_nodes(nodes: Mapping[str, Node]) -> list[Problem]:
    writes = {host: node.write_mb_per_s for host, node in nodes.items() if node.write_mb_per_s is not None}
    links = _best_links(nodes)
    return [
        *(
            Problem(text=f"its best link has {links[host]:.2f} GB/s, the others' {usual:.2f}", host=host)
            for host, usual in far_below(links).items()
        ),
        *(
            Problem(text=f"writes {nodes[host].folder} with {writes[host]:.1f} MB/s, the others with {usual:.1f}", host=host)
            for host, usual in far_below(writes).items()
        ),
    ]


def _best_links(nodes: Mapping[str, Node]) -> dict[str, float]:
    """The faster of a node's two links in the ring, in GB/s: both are slow on a slow node, one is on its neighbours."""
    best: dict[str, float] = {}
    for host, node in nodes.items():
        if node.link_gb_per_s is not None:
            for end in (host, node.link_to):
                best[end] = max(best.get(end, 0.0), node.link_gb_per_s)
    return best
