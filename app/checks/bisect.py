"""`samerun bisect A B`: find the first step where two runs that should agree part, and what differs there.

Recipes, samples and learning rates are compared as recorded. If these are the same, the first line with another loss or
gradient norm is computed again for each run (`app.checks.replay`): a run that its replay contradicts was computed otherwise. Of
recipes that differ, each key is tried: run A, computed again with B's value, is compared with B.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.checks import replay
from app.checks.replay import SAME, Record, Replayer, Say, Span
from app.options import Parser
from app.recipe import recipe_file
from app.reports.compare import ABSENT, Comparison, Pair, compare
from app.reports.past_run import print_text
from app.runs import run_folder

_INPUTS = 1e-2
"""A loss that differs by more with the same weights comes from other inputs; less can be arithmetic in half precision."""


def main(argv: list[str], environment: Mapping[str, str], *, say: Say) -> int:
    """Bisect two runs from the command line; 0 only if they do not part. Raises SamerunError."""
    parser = Parser("bisect", "Find the first step where two runs part that should agree, and what differs there, by computing "
        "it again. The exit code is 0 if they agree.", usage="%(prog)s A B [options] [key=value ...]")  # fmt: skip
    for name in ("a", "b"):
        parser.add_argument(name, type=run_folder.existing, metavar=name.upper(), help="run folder")
    replay.add_options(parser)
    given = parser.parse_all(argv)
    records = [Record.of(folder) for folder in (given.a, given.b)]
    found = compare(records[0].run, records[1].run, tolerance=SAME)
    span, sentences = first_difference(records, found)
    pairs = {key: pair for key, pair in (found.recipe or {}).items() if key in (found.learnt or ()) and ABSENT not in pair}
    if span is not None and (pairs or found.is_fed_the_same):
        with tempfile.TemporaryDirectory(prefix="samerun-bisect-") as folder:
            replayers = [Replayer(record, given, Path(tempfile.mkdtemp(dir=folder)), environment) for record in records]
            sentences += _by_recipe(replayers, pairs, say) if pairs else _by_replay(replayers, found, span, say)
    if given.json:
        answer = {"runs": [str(given.a), str(given.b)], "parted": span is not None, "steps": span, "recipe_keys": [*pairs]}
        sys.stdout.write(json.dumps({**answer, "sentences": sentences}) + "\n")
    else:
        print_text("\n".join(sentences))
    return 0 if span is None else 1


def first_difference(records: Sequence[Record], found: Comparison) -> tuple[Span | None, list[str]]:
    """Return the first line where two runs part and what differs there first, or None and how far they agree."""
    places = [((step, step), text) for step, text in replay.fed_otherwise(records, found, ("in A", "in B"))]
    losses = [it for it in replay.values(records, records[0].losses) if it.name == "loss"]
    if it := next((it for it in losses if it.difference > SAME), None):
        text = f"the loss of {it.where} differs: {it.recorded:.8g} and {it.replayed:.8g}, by {it.difference:.1e}"
        places.append((it.span, text))
    if not places:
        return None, [f"the runs agree within {SAME:g} in all {len(losses)} lines that both have"]
    span, text = min(places, key=lambda place: place[0][1])
    return span, [f"the runs part: {text}"]


def _by_recipe(replayers: Sequence[Replayer], pairs: Mapping[str, Pair], say: Say) -> list[str]:
    """Return which recipe key explains that the runs part, by run A computed again with B's values from its first step on."""
    listed = [f"the recipes differ in {key}: {first} and {second}" for key, (first, second) in pairs.items()]
    (one, other), keys = (it.record for it in replayers), [key for key in pairs if key in recipe_file.flat(replayers[0].recipe)]
    beyond = [it for it in replay.values((one, other), one.losses) if it.name == "loss" and it.difference > SAME]
    if not beyond or not keys or (0, None) not in one.origins(1):
        return listed
    tried, end = [*([key] for key in keys), *([keys] if len(keys) > 1 else [])], beyond[0].span[1]
    replayers[0].agree(end * len(tried), say)
    for number, chosen in enumerate(tried):
        values = (f"{key}={json.dumps(pairs[key][1])}" for key in chosen)
        replayed = replayers[0].start(f"key-{number}", None, end, *values)
        losses = [it for it in replay.values((other, replayed), [beyond[0].span]) if it.name == "loss"]
        if losses and losses[0].difference <= SAME:
            return [*listed, f"{' and '.join(chosen)} explains it: with B's value A has B's loss, {losses[0].replayed:.8g}"]
    return [*listed, "no key that differs explains the loss of B"]


def _by_replay(replayers: Sequence[Replayer], found: Comparison, span: Span, say: Say) -> list[str]:
    """Return whether draws, arithmetic or the state before differ, by computing the line again for each run."""
    replays = [replay.replay_all(replayer, [span[1]], say=say)[0] for replayer in replayers]
    sizes = [replay.largest_difference(it.values) for it in replays]
    sentences = [f"{name} differs from its replay here: {'; '.join(it.causes)}" if it.causes else
                 f"{name} agrees with its replay here (largest relative difference {size:.1e})"
                 for name, it, size in zip("AB", replays, sizes, strict=True)]  # fmt: skip
    if not any(it.causes for it in replays):
        return [*sentences, "so the states from which these steps begin differ, by rounding that grew or by the data"]
    machines = {key: pair for key, pair in found.machines.items() if not key.startswith(replay.NO_CHANGE)}
    differ = "".join(f"; {key} is {first} and {second}" for key, (first, second) in machines.items())
    which = "random draws or other inputs" if max(sizes) > _INPUTS else "arithmetic"
    return [*sentences, f"by its size, {max(sizes):.1e}, the difference is {which}{differ}"]
