"""`samerun replay RUN --step K`: compute steps of a run again on this machine, and compare them with what the run recorded.

A replay is an attempt at the run's own recipe in a temporary run folder. `samerun launch` resumes it from the newest checkpoint
before these steps, or begins it with the initial weights, under any preset; it ends after the last of them
(`app.session.as_replay`). Evaluations, early stopping and saves are left out. Nothing is written into RUN.

Compared are the samples and the verdict (applied or skipped) of every step on the way, the learning rates, and of the wanted
steps the loss and the gradient norm: their own if the run has steps.jsonl (`log.each_step`), or else the values of the line
of metrics.jsonl that covers them. Kinds of devices and precisions that differ, and half precision, are compared with the noise
floor: the difference between two replays with different micro-batches.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from app.checkpoints import step_folders
from app.errors import STOPPED, RunFolderError, TrainingError, UsageError
from app.files.text_files import Lines, is_count, is_finite
from app.options import Parser, positive, precision, value_reader
from app.recipe import recipe_file
from app.reports import past_run
from app.reports.compare import ABSENT, Comparison, compare, digests, learning_rates, losses_by_steps, relative_difference
from app.reports.past_run import PastRun, print_text
from app.reports.runs import Row, write
from app.runs import ledger, run_folder
from launch.run_module import program
from launch.schedulers import detect
from launch.start import supervise

SAME = 1e-5
"""Largest relative difference of float32 runs on the same kind of device."""
FLOORS = 3
"""Largest difference, in noise floors, of the same run in half precision or on another kind of device."""
_ROUNDING = 1e-6
"""A smaller difference is rounding, whatever the noise floor is."""
_MOST_STEPS = 1000
"""More steps are computed only if the user agrees."""
_STATE = 1e-4
"""Largest difference of two states of a run, relative to a tensor's largest element, that rounding explains."""
_TAIL_LINES, _ROWS = 12, 20
"""Lines of the output of a failed replay, and rows of the table of samples."""
_VALUES = ("log.samples=false", "log.examples=0", "log.each_step=true", "checkpoint.every_steps=null", "profile.steps=null",
    "checkpoint.every_minutes=null", "checkpoint.keep_every=null", "checkpoint.keep_best=false")  # fmt: skip
"""Values of keys that do not affect training, in a replay. It logs at the same steps as the run."""

Span = tuple[int, int]
"""First and last step of a line."""
NO_CHANGE = ("preset", "strategy", "world_size", "micro_batch", "accumulation", "hosts", "starts", "total_steps", "commit")
"""Keys of `Comparison.machines` that a replay may change."""
Say = Callable[[str], None]


class Record(NamedTuple):
    """Recorded values of the steps of a run."""

    run: PastRun
    losses: Mapping[Span, float]
    """Mean loss of the steps of each line, without skipped ones."""
    norms: Mapping[int, float]
    """Gradient norm of the last step of each line."""
    digests: Mapping[int, str]
    """Digest of the samples of each step that counts."""
    skipped: Set[int]
    """Steps that were not applied, because of their gradients."""

    @classmethod
    def of(cls, folder: Path) -> Record:
        """Return the record in a run folder. Raises RunFolderError."""
        run, path = past_run.read(folder), folder / run_folder.STEPS
        if not run.starts:
            raise RunFolderError(" ".join([f"{folder} has no ledger that begins with an attempt of the run.", *run.complaints]))
        lines = [line for *_, line in Lines(path)] if path.exists() else []
        own = {line["step"]: line for line in lines if is_count(line.get("step")) and is_finite(line.get("loss"))}
        losses = {(step, step): float(line["loss"]) for step, line in own.items() if not line["skipped"]}
        pairs = [(line["step"], line.get("gradient_norm", line.get("grad_norm"))) for line in [*run.metrics, *own.values()]]
        norms = {step: norm for step, norm in pairs if norm is not None}
        skipped = {step for it in ledger.counting(run.events) if isinstance(it, ledger.StepSpan) for step in it.skipped}
        return cls(run, {**losses_by_steps(run), **losses}, norms, digests(run), skipped)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        spent = ledger.account(self.run.events)
        return (spent.compute_s + spent.data_wait_s) / max(1, len(self.digests))

    def span_of(self, step: int) -> Span:
        """Return the shortest line that covers a step; without one, the step alone."""
        covering = (span for span in self.losses if span[0] <= step <= span[1])
        return min(covering, key=lambda span: span[1] - span[0], default=(step, step))

    def origins(self, before: int) -> list[tuple[int, Path | None]]:
        """Return the steps from which the run can be computed again, those before this one, the last of them first.

        Each has its checkpoint; None: the initial weights.
        """
        found: dict[int, Path | None] = {int(path.name[5:]): path for path in step_folders.committed(self.run.folder)}
        first = min(self.run.starts, key=lambda start: start.from_step)
        place = Path(first.resumed_from or "")
        if first.from_step == 0 or step_folders.is_checkpoint(place):
            found[first.from_step] = place if first.from_step else None
        return [(step, found[step]) for step in sorted(found, reverse=True) if step < before]


class Walk(NamedTuple):
    """The steps of a run that one replay computes."""

    wanted: Sequence[int]
    origin: int
    """Steps before the first that is computed."""
    checkpoint: Path | None
    """The state after these; None: the initial weights."""
    end: int
    """Last step: the end of the line that covers the last wanted one."""


def walks(record: Record, wanted: Iterable[int]) -> list[Walk]:
    """Return the replays that compute these steps, each step from the newest checkpoint before its line.

    Raises RunFolderError for a step that the run has not taken, and if no checkpoint is left before a step.
    """
    folder, groups = record.run.folder, dict[tuple[int, Path | None], list[int]]()
    for step in sorted(wanted):
        if step not in record.digests:
            last = max(record.digests, default=0)
            raise RunFolderError(f"step {step} is not in the ledger of {folder}, whose last step is {last}.")
        if not (places := record.origins(record.span_of(step)[0])):
            raise RunFolderError(f"{folder} has no checkpoint before step {step}, and its first steps were taken in another "
                "run, whose checkpoint is gone: choose a later step.")  # fmt: skip
        groups.setdefault(places[0], []).append(step)
    return [Walk(steps, *at, max(record.span_of(step)[1] for step in steps)) for at, steps in groups.items()]


class Value(NamedTuple):
    """A number that the run recorded, and the replay's."""

    name: str
    """`loss` or `gradient norm`."""
    span: Span
    recorded: float
    replayed: float
    difference: float
    """Relative difference."""

    @property
    def where(self) -> str:
        """`step 7`, or `steps 1-50` of a line that covers several."""
        first, last = self.span
        return f"steps {first}-{last}" if self.name == "loss" and first < last else f"step {last}"


def values(both: Sequence[Record], spans: Iterable[Span]) -> list[Value]:
    """Return the losses and norms of these lines that both records have, by step."""
    found = []
    for span in sorted(spans, key=lambda span: span[::-1]):
        pairs = {"loss": [it.losses.get(span) for it in both], "gradient norm": [it.norms.get(span[1]) for it in both]}
        found += [Value(name, span, one, other, relative_difference(one, other))
                  for name, (one, other) in pairs.items() if one is not None and other is not None]  # fmt: skip
    return found


def largest_difference(found: Iterable[Value]) -> float:
    """Return the largest relative difference of these numbers; 0 without one."""
    return max((it.difference for it in found), default=0.0)


def fed_otherwise(both: Sequence[Record], found: Comparison, names: tuple[str, str]) -> list[tuple[int, str]]:
    """Return the first step with other samples and the first with another learning rate, each with a sentence."""
    texts: list[tuple[int, str]] = []
    if (step := found.samples_differ_at) is not None:
        one, other = (it.digests[step] for it in both)
        texts.append((step, f"the samples of step {step} differ: digest {one} {names[0]}, {other} {names[1]}"))
    if (step := found.rates_differ_at) is not None:
        rate, its = (learning_rates(it.run)[step] for it in both)
        texts.append((step, f"the learning rate of step {step} differs: {rate:.8g} {names[0]}, {its:.8g} {names[1]}"))
    return texts


class Replayer:
    """Starts replays of one run in a temporary folder, with the options of the command line."""

    def __init__(self, record: Record, given: argparse.Namespace, folder: Path, environment: Mapping[str, str]) -> None:
        self.record, self._given, self.folder, self._environment = record, given, folder, environment
        self._file, about = str(record.run.folder / run_folder.RECIPE), record.run.about
        micro_batch = f"train.max_micro_batch={about.get('micro_batch') or 'null'}"
        self._values = recipe_file.replaced([*_VALUES, micro_batch], given.overrides)
        self.recipe = recipe_file.load(self._file, self._values).recipe
        self.micro_batch = self.recipe.train.micro_batch_limit or self.recipe.train.global_batch_size
        self._precision = given.mixed_precision or about.get("mixed_precision") or "no"

    @property
    def other_micro_batch(self) -> int | None:
        """A smaller micro-batch for the noise floor, or else a larger one; None: there is only one."""
        size, group, whole = self.micro_batch, self.recipe.sections.group_size, self.recipe.train.global_batch_size
        smaller = [it for it in range(group, size, group) if size % it == 0]
        return next((it for it in [*smaller[::-1], *range(2 * size, whole + 1, size)] if whole % it == 0), None)

    def agree(self, count: int, say: Say) -> None:
        """Report how many steps are to be computed. Raises UsageError if these are many and the user does not want them."""
        say(f"{count:,} step{'s' * (count > 1)} to compute")
        is_asked = count > _MOST_STEPS and not self._given.yes
        if is_asked and not (sys.stdin.isatty() and input("Continue? [y/N] ").strip().lower() in ("y", "yes")):
            raise UsageError(f"{count:,} steps are to be computed: give --yes, or choose a step closer to a checkpoint")

    def start(self, name: str, checkpoint: Path | None, end: int, *values: str, options: Sequence[str] = ()) -> Record:
        """Replay the run from a checkpoint, or its beginning, to step `end`, and return the record.

        `name` is the replay's, `values` are recipe values, and `options` those of `samerun launch`. Raises TrainingError, with
        the end of its output, if it fails.
        """
        run_dir, log = self.folder / name, self.folder / f"{name}.log"
        count = "--processes-per-node" if detect.find(self._environment) else "--processes"
        command = [*program("launch.cli"), "launch", "--run-dir", str(run_dir), "--recipe", self._file, "--resume",
            str(checkpoint or "never"), "--replay-until", str(end), "--trackers", "none", "--changed-task",
            "--mixed-precision", self._precision, "--nodes", "1", count, str(self._given.processes), *options,
            *(["--preset", self._given.preset] if self._given.preset else []),
            *recipe_file.replaced(self._values, values)]  # fmt: skip
        with log.open("wb") as output:
            ending = supervise.run(command, self._environment, output=output)
        if ending.exit_code != STOPPED or ending.signals:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
            why = "was interrupted" if ending.signals else f"failed with exit code {ending.exit_code}"
            raise TrainingError(f"the replay of {self.record.run.folder} {why}, after these last lines:\n{tail}")
        return Record.of(run_dir)

    def computed(self, step: int) -> Path:
        """Compute the state after this step from the newest checkpoint before it, and return a checkpoint of it."""
        origin, checkpoint = self.record.origins(step)[0]
        name = f"from-{origin}-to-{step}"
        self.start(name, checkpoint, step, f"checkpoint.every_steps={step}")
        return step_folders.path_of(self.folder / name, step)

    def samples_of(self, step: int) -> dict[str, Any]:
        """Return loss and gradient norm of each sample of a step (`app.autopsy.examine`). Raises TrainingError."""
        (origin, checkpoint), file = self.record.origins(step)[0], self.folder / "samples.json"
        before = checkpoint if origin == step - 1 else self.computed(step - 1)
        micro_batch = f"train.max_micro_batch={self.recipe.sections.group_size}"
        self.start("samples", before, step, micro_batch, options=["--replay-samples", str(file)])
        return run_folder.read_json(file)


class Replay(NamedTuple):
    """A walk, computed again and compared."""

    walk: Walk
    changes: list[str]
    """Changes since the run: recipe keys, the task's files, data, versions, devices."""
    values: list[Value]
    """Values of the lines with the wanted steps."""
    is_exact: bool
    """True if the same kind of device computes in float32 as in the run."""
    floor: float | None
    """Noise floor: largest relative difference of two replays with different micro-batches; None: not measured."""
    limit: float
    """Largest relative difference of values that are the same."""
    causes: list[str]
    """Differences; empty if the replay is the same."""
    step_s: float
    """Seconds of a step of the replay."""
    run_step_s: float
    """Seconds of a step of the run."""

    def __str__(self) -> str:
        """The verdict as sentences."""
        times = f"{self.step_s:.3g} s a step here, {self.run_step_s:.3g} s in the run"
        if self.causes:
            return "\n".join([f"Not the same ({times}):", *(f"- {cause}" for cause in self.causes)])
        same = f"The same samples, learning rates and skipped steps in steps {self.walk.origin + 1} to {self.walk.end}"
        if not self.values:
            return f"{same}; the run logged no loss of the wanted steps."
        limit = f"{SAME:g}" if self.limit == SAME else f"{FLOORS} noise floors, {self.limit:.1e}"
        kind = "" if self.is_exact else " (half precision, or another kind of device)"
        why = "rounding" if self.floor is None else f"noise floor {self.floor:.1e}"
        largest = f"largest difference {largest_difference(self.values):.1e} ({why}; {times})"
        return f"{same}; the same losses and gradient norms within {limit}{kind}: {largest}"

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        rows = [{**it._asdict(), "difference": it.difference if is_finite(it.difference) else None} for it in self.values]
        checkpoint = self.walk.checkpoint and str(self.walk.checkpoint)
        own = {**self._asdict(), **self.walk._asdict(), "checkpoint": checkpoint, "values": rows}
        return {"same": not self.causes, **{key: value for key, value in own.items() if key != "walk"}}


def replay(replayer: Replayer, walk: Walk) -> Replay:
    """Compute a walk again and compare it."""
    name, record, about = f"from-{walk.origin}", replayer.record, replayer.record.run.about
    replayed = replayer.start(name, walk.checkpoint, walk.end)
    both, found = (record, replayed), compare(record.run, replayed.run)
    targets = values(both, {record.span_of(step) for step in walk.wanted})
    largest, floor = largest_difference(targets), None
    changed = found.machines.keys() & {"devices", "mixed_precision"}
    is_exact = about.get("mixed_precision") == "no" and not about.get("tf32") and not changed
    if largest > (SAME if is_exact else _ROUNDING) and (other := replayer.other_micro_batch):
        second = replayer.start(f"{name}-floor", walk.checkpoint, walk.end, f"train.max_micro_batch={other}")
        steps = {(step, step) for it in targets for step in range(it.span[0], it.span[1] + 1)}
        floor = largest_difference(values((replayed, second), steps))
    limit = SAME if is_exact or floor is None else max(SAME, FLOORS * floor)
    causes = [text for _, text in fed_otherwise(both, found, ("in the run", "by the recipe"))]
    if others := sorted((record.skipped ^ replayed.skipped) & replayed.digests.keys()):
        here, there = ("applied", "skipped") if others[0] in record.skipped else ("skipped", "applied")
        causes.append(f"step {others[0]} was {there} in the run and is {here} here")
    if largest > limit:
        spans = {it.span for it in targets} | {it for it in record.losses if walk.origin < it[0] and it[1] <= walk.end}
        first = next(it for it in values(both, spans) if it.difference > limit)
        causes.append(f"the {first.name} of {first.where} is the first that differs: {first.recorded:.8g} in the run, "
            f"{first.replayed:.8g} here, a relative difference of {first.difference:.1e}")  # fmt: skip
    if causes and floor is not None and largest <= FLOORS * floor and found.is_fed_the_same:
        causes.append(f"{FLOORS} noise floors explain it: rounding grows from step to step (noise floor {floor:.1e})")
    elif causes and is_exact and found.is_fed_the_same and walk.checkpoint and record.origins(walk.origin):
        causes.append(_state_checked(replayer, walk.checkpoint, walk.origin))
    return Replay(walk=walk, changes=_changes(*both, found), values=targets, is_exact=is_exact, floor=floor, limit=limit,
                  causes=causes, step_s=replayed.step_s, run_step_s=record.step_s)  # fmt: skip


def _changes(record: Record, replayed: Record, found: Comparison) -> list[str]:
    """Return what has changed since the run that could change its steps, a sentence each."""
    pairs = {**{key: (found.recipe or {})[key] for key in found.learnt or ()}, **found.machines}
    pairs = {key: pair for key, pair in pairs.items() if not key.startswith(NO_CHANGE) and ABSENT not in pair}
    before, now = (it.run.about.get("data") or {} for it in (record, replayed))
    pairs |= {key: (before.get(key), now.get(key)) for key in {**before, **now} if before and before.get(key) != now.get(key)}
    return [f"{key} was {then} and is {present}" for key, (then, present) in pairs.items()]


def _state_checked(replayer: Replayer, checkpoint: Path, step: int) -> str:
    """Return how a checkpoint differs from the state after its step, computed again from an earlier one."""
    from app.checkpoints.stored_weights import tensor_of  # not at the top: the command checks its arguments first

    origin, found = replayer.record.origins(step)[0][0], []
    readers = [step_folders.Reader(path) for path in (checkpoint, replayer.computed(step))]
    for key in readers[0].keys():  # noqa: SIM118  (no dict)
        contents = [reader.contents(key) for reader in readers]
        for name in readers[0].tensors(key):
            saved, computed = (tensor_of(it[name]) for it in contents)
            difference = (saved - computed).abs().max() / saved.abs().max().clamp(min=1e-30)
            found.append((float(difference), f"{key} of {name}"))
    largest, name = max(found)
    again = f"computed again from {f'step {origin}' if origin else 'the initial weights'}"
    if largest < _STATE:
        return f"the state in {checkpoint} is right: {again}, it differs by at most {largest:.1e} ({name})"
    return f"{checkpoint} is not the state of the run: {again}, {name} differs by {largest:.1e}"


# The command -----------------------------------------------------------------------------------------------------------------


def _span(text: str) -> Span:
    first, _, last = text.partition(":")
    return int(first), int(last or first)


_steps = value_reader(_span, lambda span: 1 <= span[0] <= span[1], "a step, such as 120, or first and last, as in 120:130")


def main(argv: list[str], environment: Mapping[str, str], *, say: Say) -> int:
    """Replay steps from the command line; 0 only if they are the same. Raises SamerunError."""
    parser = Parser("replay", "Compute steps of a run again here and compare them with the record of RUN, where nothing is "
        "written. Exit code 0: the same.", usage="%(prog)s RUN --step K [options] [key=value ...]")  # fmt: skip
    add = parser.add_argument
    add("run", type=run_folder.existing, metavar="RUN", help="run folder")
    add("--step", "--steps", type=_steps, required=True, metavar="K|K:L", help="step, or first and last step")
    add("--samples", action="store_true", help="also compute each sample of step K alone, and show the largest gradients")
    add("--out", type=Path, metavar="PATH", help="with --samples: also write them as an HTML page")
    add_options(parser)
    given = parser.parse_all(argv)
    first, last = given.step
    if given.samples and (first != last or given.processes > 1 or given.preset not in (None, "cpu", "single_gpu")):
        raise UsageError("--samples computes the samples of one step in one process: give --step K, no --preset or --processes")
    if given.out and not given.samples:
        raise UsageError(f"--out {given.out} is for --samples: add it or leave out --out")
    with tempfile.TemporaryDirectory(prefix="samerun-replay-") as folder:
        replayer = Replayer(Record.of(given.run), given, Path(folder), environment)
        found = replay_all(replayer, range(first, last + 1), say=say)
        examined = {"samples": replayer.samples_of(first)} if given.samples else {}
    if given.json:
        sys.stdout.write(json.dumps({"run": str(given.run), "replays": [it.as_json() for it in found], **examined}) + "\n")
    else:
        for it in found:
            show(it)
        if examined:
            show_samples(examined["samples"], given.out)
    return int(any(it.causes for it in found))


def add_options(parser: Parser) -> None:
    """Add --json, and the options that say how steps are computed again."""
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead of text")
    add("--preset", metavar="NAME|PATH", help="preset of the replay (default: chosen for these processes)")
    add("--processes", type=positive, default=1, metavar="N", help="processes on this machine (default: 1)")
    add("--mixed-precision", type=precision, help="precision (default: the run's)")
    add("--yes", action="store_true", help=f"do not ask before more than {_MOST_STEPS:,} steps are computed")
    add("overrides", nargs="*", metavar="key=value", help="recipe values, such as data.path=PATH or train.max_micro_batch=8")


def replay_all(replayer: Replayer, wanted: Iterable[int], *, say: Say) -> list[Replay]:
    """Replay these steps, each from the newest checkpoint before it. Raises UsageError if the user does not want to wait."""
    planned = walks(replayer.record, wanted)
    replayer.agree(sum(walk.end - walk.origin for walk in planned), say)
    return [replay(replayer, walk) for walk in planned]


def show(found: Replay) -> None:
    """Print a replay: what has changed, the numbers, and the verdict."""
    for change in found.changes:
        print_text(f"changed since the run: {change}")
    if rows := [{"": f"{it.name}, {it.where}", "run": it.recorded, "replay": it.replayed,
                 "relative difference": f"{it.difference:.1e}"} for it in found.values]:  # fmt: skip
        write(rows)
    print_text(str(found))


def show_samples(examined: Mapping[str, Any], page: Path | None) -> None:
    """Print the samples with the largest gradients, and write the page if one is wanted. Raises RunFolderError."""
    rows, step = examined["rows"], examined["step"]
    numbers, names = ("loss", "gradient_norm"), ["name"] if "name" in rows[0] else []
    table: list[Row] = [{"sample": ", ".join(map(str, row["samples"])),
                         **{key: "not finite" if row[key] is None else f"{row[key]:.4g}" for key in numbers},
                         **{key: row.get(key) for key in names}} for row in rows]  # fmt: skip
    print_text(f"step {step}: each sample computed alone, the largest gradient first")
    write(table[:_ROWS])
    if len(rows) > _ROWS:
        print_text(f"{len(rows) - _ROWS} more: --json prints all")
    if "text" in rows[0]:
        print_text(f"sample {table[0]['sample']}\n{rows[0]['text']}")
    if page is not None:
        import jinja2

        environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(past_run.__file__).parent), autoescape=True)
        run_folder.write_text(page, environment.get_template("samples.html.jinja").render(step=step, rows=rows, table=table))
        print_text(str(page))
