"""The conclusions from the rows of a method: the scaling law that fits, and how many devices are worth using.

Devices are recommended up to the largest number that has at least the wanted efficiency: as measured where it was measured, and
as fitted in between and up to twice the largest size, which is as far as the fit was tried (`fit.py`). A size that was measured
and has less ends the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from app.scaling import fit as fitting
from app.scaling.figures import Interval, Method
from app.scaling.fit import Fit

_FORETOLD = (2, 4)
"""How far beyond the largest size to predict, as a factor."""


@dataclass(frozen=True)
class Foretold:
    """What the fit says of a number of devices."""

    devices: int
    seconds: Interval
    efficiency: Interval


@dataclass(frozen=True, kw_only=True)
class Advice:
    """All that is concluded for one method."""

    method: Method
    fit: Fit | None
    foretold: Sequence[Foretold]
    """The sizes that were measured, and beyond them; empty without a fit."""
    devices: int
    """The recommended number."""
    nodes: int | None
    """The same in nodes of the largest number of devices that was measured on one; None where nodes are not known."""
    units_per_s: float | None
    """What they do: of what the runs count, as measured or by the fit; None where only times are known."""
    why: str
    """A sentence with the figures."""


def advise(method: Method, *, wanted: float, is_legal: Callable[[int], bool]) -> Advice:
    """Return what follows for a method; `is_legal` says whether a number of devices can run at all."""
    pairs = [(row.devices, run.seconds) for row in method.rows for run in row.runs]
    fit = fitting.fit([devices for devices, _ in pairs], [seconds for _, seconds in pairs])
    sizes = sorted({row.devices for row in method.rows})
    beyond = [factor * sizes[-1] for factor in _FORETOLD]
    foretold = [_foretell(fit, devices, method.base.devices) for devices in [*sizes, *beyond]] if fit else []
    per_node = max(row.devices_per_node or 0 for row in method.rows)

    def is_possible(devices: int) -> bool:
        whole_nodes = not per_node or devices <= per_node or devices % per_node == 0
        return whole_nodes and is_legal(devices)

    devices, why = _recommend(method, fit, wanted=wanted, is_legal=is_possible)
    nodes = math.ceil(devices / per_node) if per_node else None
    rate = _rate(method, fit, devices)
    return Advice(method=method, fit=fit, foretold=foretold, devices=devices, nodes=nodes, units_per_s=rate, why=why)


def _rate(method: Method, fit: Fit | None, devices: int) -> float | None:
    """What so many devices do, on one node or several, whichever is better."""
    there = [row.mean("units_per_s") or 0.0 for row in method.rows if row.devices == devices]
    base = method.base.mean("units_per_s")
    if base is None or there or fit is None:
        return max(there, default=0.0) or None
    return base * method.base.seconds / float(fit.seconds(np.array(float(devices))))


def _foretell(fit: Fit, devices: int, base: int) -> Foretold:
    here = np.array(float(devices))
    low, high = fit.between(here)
    share, least, most = fit.efficiency(here, base=base)
    return Foretold(
        devices,
        Interval(float(fit.seconds(here)), float(low), float(high)),
        Interval(float(share), float(least), float(most)),
    )


def _recommend(method: Method, fit: Fit | None, *, wanted: float, is_legal: Callable[[int], bool]) -> tuple[int, str]:
    """The largest number of devices that is efficient enough, and why."""
    found: dict[int, Interval] = {}
    for row in method.rows:
        share = method.efficiency(row)
        if row.devices not in found or share.value > found[row.devices].value:
            found[row.devices] = share  # on one node or several, whichever is better
    largest = max(found)
    too_many = min((devices for devices, share in found.items() if share.value < wanted), default=None)
    enough = max(devices for devices in found if too_many is None or devices < too_many)
    between = range(too_many - 1 if too_many else 2 * largest, enough, -1)
    fitted = next((one for one in _fitted(fit, method, filter(is_legal, between)) if one[1].value >= wanted), None)
    why = f"{found[enough]} measured on {enough}"
    if fitted:
        why += f", and {fitted[1]} by the fit on {fitted[0]}"
    limit = f"{found[too_many]} measured on {too_many}" if too_many else _beyond(fit, method, largest, wanted)
    return (fitted[0] if fitted else enough), f"{why}; {limit}."


def _fitted(fit: Fit | None, method: Method, devices: Iterable[int]) -> Iterator[tuple[int, Interval]]:
    """Efficiency by the fit on each of these numbers of devices, in their order; nothing without a fit."""
    if fit is not None:
        yield from ((number, _foretell(fit, number, method.base.devices).efficiency) for number in devices)


def _beyond(fit: Fit | None, method: Method, largest: int, wanted: float) -> str:
    """What is said of more devices than were measured, if all that were measured are efficient enough."""
    if fit is None:
        return f"more than {largest} were not measured; predicting more needs {fitting.LEAST_SIZES} sizes"
    share = _foretell(fit, 2 * largest, method.base.devices).efficiency
    verdict = "still enough: measure more" if share.value >= wanted else "too little"
    return f"{share} by the fit on {2 * largest}, twice what was measured, which is {verdict}"
