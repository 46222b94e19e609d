"""Spans of time: sorted lists of (begin, end) that do not overlap, in whole nanoseconds. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int]
Spans = list[Span]


def union(spans: Iterable[Span]) -> Spans:
    """Return the time in any of these, which may overlap and come in any order."""
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif begin < end:
            joined.append((begin, end))
    return joined


def both(one: Sequence[Span], other: Sequence[Span]) -> Spans:
    """Return the time in both."""
    shared: Spans = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            shared.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return shared


def without(one: Sequence[Span], other: Sequence[Span]) -> Spans:
    """Return the time in `one` and not in `other`."""
    if not one:
        return []
    edges = [one[0][0], *(edge for span in other for edge in span), one[-1][1]]
    between = [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]
    return both(one, between)


def length(spans: Iterable[Span]) -> int:
    """Return how long they are together, in nanoseconds."""
    return sum(end - begin for begin, end in spans)
