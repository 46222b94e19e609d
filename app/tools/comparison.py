"""Finds the broken rule by comparing what several topologies saw of the same steps. The first topology is one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from app.tools.own_rules import CALLS, COUNT, DRAW, FETCH, LOSS, READY, first_difference
from app.tools.seen import ROUNDING, Prints, Seen

_LOSSES, _NORMS = 1e-4, 1e-3
"""Largest relative differences. float32 alone gives some 1e-7, and what breaks a rule 1e-2 and more."""
_ORDER = (FETCH, READY, CALLS, LOSS, COUNT)


def broken(seen: Mapping[str, Seen]) -> tuple[str, str] | None:
    """Return the first rule that is broken, and a sentence that says by what and what to change; None: none is."""
    (_, alone), *_ = seen.items()
    there = {name: one for name, one in seen.items() if one.passes}
    found = list(alone.broken)
    found += [
        (FETCH, _of_prints("fetch", {name: one.fetch for name, one in there.items()})),
        (READY, _of_prints("ready", {name: one.ready for name, one in there.items()})),
        (COUNT, _of_counts(there)),
        (LOSS, "" if any(one.depends for one in there.values()) else _of_steps(there)),
    ]
    return min((one for one in found if one[1]), key=lambda one: _ORDER.index(one[0]), default=None)


def _of_prints(function: str, prints: Mapping[str, Prints]) -> str:
    (first, reference), *others = prints.items() or [("", {})]
    for name, other in others:
        if difference := first_difference(reference, other):
            what, number = difference
            cause = (
                "the rank or process, or a random state that differs in each"
                if "processes" in name
                else "the other samples of its batch, or earlier calls"
            )
            return (
                f"{what} of sample {number} after `{function}` differs between {first} and {name}: `{function}` depends on "
                f"something other than its arguments ({cause}). {DRAW}"
            )
    return ""


def _of_counts(seen: Mapping[str, Seen]) -> str:
    for name, one in seen.items():
        for step, weighed in enumerate(one.weighed):
            counted = sum(done.counted for done in one.passes if done.step == step)
            if _far(counted, weighed, ROUNDING):
                return (
                    f"Loss.count of step {step + 1} adds up to {counted:g} on {name}, and its gradient is weighed as over "
                    f"{weighed:g}: a step's gradient is that of the mean over all that its global batch counts. Let Loss.count "
                    "be what the samples' `count(indices)` or the task's `count(batch)` says, or the number of samples where "
                    "there is neither"
                )
    return ""


def _of_steps(seen: Mapping[str, Seen]) -> str:
    (first, alone), *others = seen.items() or [("", Seen(Path()))]
    for step in range(len(alone.norms)):
        for name, other in others:
            one, two = (_loss(seen, step) for seen in (alone, other))
            if _far(one, two, _LOSSES):
                return (
                    f"the loss of step {step + 1} is {one:.7g} on {first} and {two:.7g} on {name}, from the same batches: in "
                    "training mode the loss of a sample depends on the other samples of its pass, on earlier passes, or on "
                    "random numbers of torch's own (use nn.Dropout, not F.dropout)"
                )
            one, two = alone.norms[step], other.norms[step]
            if _far(one, two, _NORMS):
                return (
                    f"the gradient norm of step {step + 1} is {one:.7g} on {first} and {two:.7g} on {name}, "
                    "though batches and losses are the same: something with weights is called outside "
                    "model(...), or changes gradients itself"
                )
    return ""


def table(seen: Mapping[str, Seen]) -> str:
    """Return a line for each thing that is the same on all of them."""
    alone = next(iter(seen.values()))
    fields = {name for prints in (alone.fetch, alone.ready) for fields in prints.values() for name in fields}
    losses = [max(_relative(_loss(alone, step), _loss(one, step)) for one in seen.values()) for step in range(len(alone.norms))]
    norms = [_relative(a, b) for one in seen.values() for a, b in zip(alone.norms, one.norms, strict=True)]
    rows = {
        "after fetch and ready": f"the same: {', '.join(sorted(fields))} of {len(alone.fetch)} samples",
        "model": "called once",
        "a batch and its halves": "the same loss",
        "losses": f"the same within {max(losses):.1e}",
        "gradient norms": f"the same within {max(norms):.1e}",
    }
    if alone.depends:
        rows |= dict.fromkeys(("losses", "gradient norms"), f"not compared: {'; '.join(alone.depends)}")
    width = max(map(len, rows))
    return "\n".join(f"  {name:{width}}  {said}" for name, said in rows.items())


def _loss(one: Seen, step: int) -> float:
    passes = [done for done in one.passes if done.step == step]
    return sum(done.total for done in passes) / max(sum(done.counted for done in passes), 1.0)


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-30)


def _far(one: float, other: float, most: float) -> bool:
    return not _relative(one, other) <= most
