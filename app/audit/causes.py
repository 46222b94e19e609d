"""Recognize why the runs of a script differ, from their records and never from the script's text."""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from app.audit.runs import SCRATCH, AuditedRun, Event
from app.reports.compare import EARLY, relative_difference

_SAME, _UNSEEDED, _NEAR_FLOOR, _ROUNDING = 1e-6, 1e-3, 10, 10 * EARLY
"""Rounding grows faster in gradients than in losses, whose bound in the first steps is EARLY."""
CHANGES: dict[int, tuple[str, str]] = {
    0: ("Look for random numbers, positions, losses or layers that depend on the process or the micro-batch.", ""),
    1: ("Count the schedule in steps of one process: prepared, it steps once per process.", "accelerate #2926, #2318, #1398"),
    2: ("Scale the rate with the global batch (processes times the batch of each), or not at all.", "accelerate #1849, #2754"),
    3: ("Pass the DataLoader to accelerator.prepare.", "transformers #34365"),
    4: ("Pass the model to accelerator.prepare, and call the model that it returns.", "accelerate #2262, #3285"),
    5: ("Use `accelerate launch` with a configuration that fits the machine, and do not set RANK, WORLD_SIZE or ACCELERATE_* "
        "in the script.", "accelerate #2741, #707"),
    6: ("Build and change the model before accelerator.prepare, with one seed for all processes.", "pytorch-lightning #6013"),
    7: ("Use loss_sum * num_processes * accumulation / (count of the whole step); with a Trainer whose model ignores "
        "num_items_in_batch, model.accepts_loss_kwargs = False.", "transformers #34191, #35438, #47688"),
    8: ("Put forward, backward, step and zero_grad under `with accelerator.accumulate(model):`.", "accelerate #1817"),
    9: ("Clip after the last backward pass, under `if accelerator.sync_gradients:`.", "accelerate #641"),
    10: ("Read the prepared loader to its end; set drop_last=True, or a batch that divides the samples.", "accelerate #2316"),
    11: ("Set no seed in the epoch loop, and call set_epoch(epoch) on samplers and datasets that have it.", "pytorch #31771"),
    12: ("Prepare its DataLoader, and collect with gather_for_metrics in the loop.", "accelerate #226, #350, trl #7010"),
    13: ("Save and load model, optimizer, scheduler, random state (accelerator.save_state, load_state), and continue at the "
         "next batch: set_epoch, then skip_first_batches.", "accelerate #4071, #4233, transformers #40691, ms-swift #10050"),
    14: ("Write it on one process: `if accelerator.is_main_process:`, or accelerator.save.", "accelerate #1950"),
    16: ("Give each node its rank: srun bash -c '... --machine_rank $SLURM_NODEID', or `samerun launch`.", "accelerate #2816"),
}  # fmt: skip
"""Advice and public reports, by the number of the cause."""


@dataclass(frozen=True)
class Finding:
    """Something that a user should know about the script."""

    cause: int
    """Number in docs/audit.md; 0: unknown."""
    what: str
    since_step: int | None = None
    """First step that shows it, from 1."""
    is_fault: bool = True


@dataclass
class Evidence:
    """The runs of a script."""

    compared_steps: int
    reference: AuditedRun
    """One process."""
    again: AuditedRun
    """One process once more."""
    natural: AuditedRun
    """Two processes, nothing changed."""
    comparable: AuditedRun | None = None
    """One process in a fixed order, if the script's depends on the number of processes."""
    held: AuditedRun | None = None
    """Two processes with the global batch of one, and its learning rates."""
    accumulated: AuditedRun | None = None
    """One process with twice the accumulation, the same global batch and learning rates."""
    resumed: Sequence[AuditedRun] = ()
    """One process stopped after a checkpoint, and resumed."""
    remarks: list[str] = field(default_factory=list)
    """Parts that could not be judged, with reasons."""

    @property
    def runs(self) -> list[AuditedRun]:
        """All runs, in the order of their starts."""
        compared = filter(None, (self.comparable, self.accumulated, self.held))
        return [self.reference, self.again, self.natural, *compared, *self.resumed]

    @cached_property
    def noise(self) -> float:
        """Noise floor: the largest relative difference of the gradients of one process from its own."""
        count = min(len(self.reference.steps), len(self.again.steps), self.compared_steps)
        return max((gradient_difference(self.reference, self.again, index) for index in range(count)), default=math.inf)

    @cached_property
    def unseeded(self) -> str:
        """Reason why one process does not repeat itself; empty: it does."""
        one, other = self.reference, self.again
        if not other.steps or difference(*(run.steps[0][0].event["weights"] for run in (one, other))) > _SAME:
            return "the initial weights differ from run to run"
        if one.samples(0) != other.samples(0):
            return "the samples of step 1 differ from run to run"
        return "the gradients differ from run to run" if self.noise > _UNSEEDED else ""

    @property
    def are_copies(self) -> bool:
        """True if the processes do not know of each other."""
        return len(self.natural.ranks) < 2 or self.natural.accelerator["processes"] == 1


def judge(evidence: Evidence) -> list[Finding]:
    """Return faults and notes, faults first, each cause once."""
    one, natural, accumulated = evidence.reference, evidence.natural, evidence.accumulated
    found: dict[tuple[int, bool], Finding] = {}

    def collect(*checks: Iterator[Finding]) -> set[int]:
        for finding in itertools.chain(*checks):
            found.setdefault((finding.cause, finding.is_fault), finding)
        return {cause for cause, is_fault in found if is_fault}

    collect(*(check(run) for run in (one, accumulated) if run for check in (_accumulation, _clipping)))
    faults = collect(_same_order(one), _schedule_end(one))
    if evidence.are_copies:
        what = "2 processes started, and each has accelerator.num_processes == 1: each trains a model on all data."
        collect(iter([Finding(5, what if natural.ranks[1:] else "2 processes were requested and 1 started.")]))
    else:
        faults = collect(_not_prepared(natural), _exchange(natural), _initial_weights(natural), _same_order(natural),
            _metrics(one, natural), _shared_files(natural), _rates(one, natural))  # fmt: skip
        if 3 not in faults:  # else every process reads all samples
            faults = collect(_epoch_ends(one, natural))
    if evidence.held and not faults & {3, 4, 6, 8, 9}:
        collect(_differences(evidence, evidence.held, "on 2 processes", is_cut=10 in faults))
    if accumulated and not faults & {8, 9}:
        collect(_differences(evidence, accumulated, "with accumulation 2", is_cut=10 in faults))
    if evidence.resumed:
        collect(_resume(one, *evidence.resumed))
    return sorted(found.values(), key=lambda it: (not it.is_fault, it.cause))


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the relative difference of two values of `recorder.sums`: of the norms, or of the sums as a part of the norm."""
    return max(relative_difference(one[0], other[0]), abs(one[1] - other[1]) / (one[0] or 1.0))


def gradient_difference(one: AuditedRun, other: AuditedRun, index: int) -> float:
    """Return how the gradients of a step differ, before and after clipping."""
    first, second = one.steps[index][0], other.steps[index][0]
    return max(relative_difference(first.norm, second.norm), difference(first.event["gradient"], second.event["gradient"]))


def _same_samples(one: AuditedRun, other: AuditedRun, index: int, there: int) -> bool:
    """Return True if two steps have the same samples, by their contents or by their positions in the dataset."""
    return any((first := one.samples(index, key)) and first == other.samples(there, key) for key in ("rows", "indices"))


def _not_prepared(run: AuditedRun) -> Iterator[Finding]:
    for first, second in run.passes(training=True)[:1]:
        shared, count = (Counter(first.rows) & Counter(second.rows)).total(), len(first.rows)
        if not first.is_prepared and shared > count / 2:
            text = f"The DataLoader built at {first.loader} is not prepared"
            yield Finding(3, f"{text}: both processes train on {shared} of {count} samples.", 1)


def _exchange(run: AuditedRun) -> Iterator[Finding]:
    """Find replicas that do not exchange gradients, and gradients that are clipped before the exchange."""
    is_prepared = bool(run.first.all("model"))
    why = "the forward pass goes around the prepared model, or no_sync is always on" if is_prepared else "it is not prepared"
    for index, (first, second) in enumerate(run.steps, 1):
        if first.event["sync"] is False:
            return
        parted = difference(first.event["gradient"], second.event["gradient"]) > _SAME
        if parted or not (is_prepared or first.samples("rows") != second.samples("rows")):
            yield Finding(4, f"The replicas of the model do not exchange gradients: {why}.", index)
        elif first.clips and second.clips and relative_difference(first.norm, second.norm) > _SAME:
            yield Finding(9, f"Gradients are clipped at {first.clips[-1][1]['place']} before the processes exchange them "
                          f"(norms {first.norm:.6g} and {second.norm:.6g}).", index)  # fmt: skip


def _initial_weights(run: AuditedRun) -> Iterator[Finding]:
    first, second = (step.event["weights"] for step in run.steps[0])
    prepared = [rank.all("model") for rank in run.ranks]
    if difference(first, second) > _SAME:
        yield Finding(6, f"The weights of the processes differ before step 1 (norms {first[0]:.6g} and {second[0]:.6g}).", 1)
    elif all(prepared) and difference(*(events[0]["weights"] for events in prepared)) > _SAME:
        yield Finding(6, "Each process draws its own weights; prepare replaces them by those of process 0.", is_fault=False)


def _accumulation(run: AuditedRun) -> Iterator[Finding]:
    steps, accumulation = run.first.steps, run.accelerator["accumulation"]
    sizes = [len(step.batches) for step in steps]
    if accumulation > 1 and statistics.median(sizes) == 1 and all(step.event["sync"] is not False for step in steps):
        yield Finding(8, f"Each micro-batch is a step, gradients divided by {accumulation} (gradient_accumulation_steps).", 1)
    for index, step in enumerate(steps, 1):
        if step.event["sync"] is False:
            yield Finding(8, f"The optimizer steps after {len(step.batches)} of {accumulation} micro-batches.", index)
        if step.dropped and len({one.event["optimizer"] for one in steps}) == 1:
            yield Finding(8, f"Gradients of {step.dropped} micro-batches are set to zero before they are used.", index)
    ends = {one.from_step for one in run.first.passes if one.is_training} | {len(steps)}
    inner = {index: size for index, size in enumerate(sizes) if index + 1 not in ends}
    usual = statistics.mode(inner.values()) if inner else 0
    for index in [index for index, size in inner.items() if size != usual][:1]:
        yield Finding(8, f"The optimizer steps after {sizes[index]} micro-batches instead of {usual}.", index + 1)


def _clipping(run: AuditedRun) -> Iterator[Finding]:
    for index, step in enumerate(run.first.steps):
        for seen, event in step.clips:
            if step.batches and seen != len(step.batches):
                yield Finding(9, f"Gradients are clipped at {event['place']} after {seen} of {len(step.batches)} backward "
                              "passes: the limit applies to a part of the gradient.", index + 1)  # fmt: skip


def _epoch_ends(one: AuditedRun, natural: AuditedRun) -> Iterator[Finding]:
    for run in (one, natural):
        for ranks, _ in itertools.pairwise(run.passes(training=True)):
            if not run.is_whole(ranks):
                yield Finding(10, f"The loop leaves the loader built at {ranks[0].loader} in each epoch after "
                    f"{sum(len(it.rows) for it in ranks)} samples, before its end.", ranks[0].from_step + 1)  # fmt: skip
                return
    for alone, ranks in zip(one.passes(training=True), natural.passes(training=True), strict=False):
        loaders = [run.loader(it[0].loader) for run, it in ((one, alone), (natural, ranks))]
        if not (one.is_whole(alone) and natural.is_whole(ranks)):
            return
        key = "indices" if alone[0].indices and loaders[0]["samples"] == loaders[1]["samples"] else "rows"
        seen, there = (Counter(sample for it in each for sample in getattr(it, key)) for each in (alone, ranks))
        missing, step = (seen - there).total(), ranks[0].from_step + 1
        if there.total() > seen.total():
            yield Finding(10, f"{there.total() - seen.total()} of {seen.total()} samples are trained on twice in each epoch "
                          "on 2 processes: Accelerate fills the last batches with the first (even_batches).", step)  # fmt: skip
        elif missing:
            text, is_asked = f"{missing} of {seen.total()} samples are not trained on in an epoch", loaders[0]["drop_last"]
            yield Finding(10, f"{text} on 2 processes{' (drop_last)' * is_asked}.", step, not is_asked)


def _same_order(run: AuditedRun) -> Iterator[Finding]:
    whole = [ranks[0] for ranks in run.passes(training=True) if run.is_whole(ranks)]
    for first, second in itertools.pairwise(whole):
        orders = [one.indices or one.rows for one in (first, second)]
        if first.loader == second.loader and orders[0] == orders[1] and len(orders[0]) > 2:
            is_stored = run.loader(first.loader)["sampler"] == "SequentialSampler"
            why = "it is not shuffled" if is_stored else "it begins from the same state"
            text = f"The loader built at {first.loader} has the same order in each epoch: {why}."
            yield Finding(11, text, second.from_step + 1, not is_stored)


def _metrics(one: AuditedRun, natural: AuditedRun) -> Iterator[Finding]:
    for alone, ranks in zip(one.passes(training=False), natural.passes(training=False), strict=False):
        total = one.loader(alone[0].loader)["samples"] or len(alone[0].rows)
        count, gathers = sum(len(it.rows) for it in ranks), ranks[0].gathers
        if ranks[0].is_prepared:
            # After the loop gather_for_metrics no longer knows of the repeated samples.
            is_wrong = all(it["by"] != "gather_for_metrics" or (it["is_late"] and it["given"]) for it in gathers)
            why = "repeated samples fill the last batches"
        else:
            is_wrong, why = any(it["given"] for it in gathers if it["by"] != "reduce"), "each process reads all samples"
        if gathers and is_wrong and count > total and natural.is_whole(ranks):
            yield Finding(12, f"An evaluation of {total} samples counts {count} on 2 processes ({gathers[0]['place']}): {why}.",
                          ranks[0].from_step or None)  # fmt: skip


def _shared_files(run: AuditedRun) -> Iterator[Finding]:
    first, second = ({event["path"] for event in rank.all("write")} for rank in run.ranks)
    outputs = {it for it in first & second if SCRATCH in it or not it.startswith(tempfile.gettempdir())}
    names = sorted(Path(it).name for it in outputs if not (it.endswith(".lock") or "/.cache/" in it))
    if names:
        yield Finding(14, f"Both processes write {', '.join(names[:3])}{', ...' * (len(names) > 3)}.")


def schedule(run: AuditedRun) -> tuple[float, list[float]]:
    """Return the base learning rate of the first parameter group, and its rates at all steps as parts of it."""
    base = run.first.steps[0].event["initial"][0] or 1.0
    return base, [step.event["rates"][0] / base for step in run.first.steps]


def follows(shape: Sequence[float], other: Sequence[float], speed: float) -> bool:
    """Return True if the second run's rates are the first's at `speed` times the step, to one step."""
    if (len(shape) - 1) / speed < 1:
        return False
    return all(_is_near(shape, index * speed, value) for index, value in enumerate(other) if index * speed <= len(shape) - 1)


def _end_alike(shape: Sequence[float], other: Sequence[float], growth: float) -> bool:
    """Return True if both schedules come to the same end with the training, though they begin apart, as by a fixed warm-up."""
    step = max(abs(one - next_one) for each in (shape, other) for one, next_one in itertools.pairwise(each[-2:]))
    return abs(shape[-1] - other[-1]) <= growth * step and max(other[-2:]) > 1e-9


def _is_near(shape: Sequence[float], at: float, value: float) -> bool:
    near = shape[max(0, math.floor(at) - 1) : math.ceil(at) + 2]
    return not near or min(near) - 1e-9 <= value <= max(near) + 1e-9


def _rates(one: AuditedRun, natural: AuditedRun) -> Iterator[Finding]:
    growth, (base, shape), (other_base, other) = natural.batch / one.batch, schedule(one), schedule(natural)
    scale, count = other_base / base, len(other)
    if not any(math.isclose(scale, allowed, rel_tol=1e-6) for allowed in (1.0, growth, math.sqrt(growth))):
        yield Finding(2, f"On 2 processes the base learning rate is {scale:.4g} times as high ({base:.4g} to "
                      f"{other_base:.4g}), and the global batch {growth:.4g} times as large.", 1)  # fmt: skip
    both_end = one.has_ended and natural.has_ended
    is_by_progress = both_end and (follows(shape, other, len(shape) / count) or _end_alike(shape, other, growth))
    if is_by_progress or (max(shape) - min(shape) < 1e-12 and max(other) - min(other) < 1e-12):
        return
    times = statistics.median(step.scheduler_steps for step in natural.first.steps)
    stepped = f"the scheduler is stepped {times:g} {'time' if times == 1 else 'times'} per optimizer step"
    if follows(shape, other, growth):
        if both_end and count * growth > 1.2 * len(shape):
            yield Finding(1, f"The schedule ends at step {len(shape) / growth:.0f} of {count} on 2 processes: {stepped}.",
                          int(len(shape) / growth) + 1)  # fmt: skip
    elif follows(shape, other, 1.0):
        if both_end and count < len(shape):
            yield Finding(1, f"On 2 processes the schedule of {len(shape)} steps does not end: the training has {count}.", 1)
    else:
        fast = next((speed for speed in (2.0, 4.0, 0.5, 0.25) if follows(shape, other, speed * growth)), None)
        parted = next(index for index, value in enumerate(other) if not _is_near(shape, index * growth, value))
        how = f"{fast:g} times as fast as" if fast else "otherwise than"
        yield Finding(1, f"On 2 processes the schedule runs {how} on one, over the same samples: {stepped}.", parted + 1)


def _schedule_end(run: AuditedRun) -> Iterator[Finding]:
    """Find a schedule that is over before the training on one process: its rate stays 0, or rises again."""
    _, shape = schedule(run)
    end = max(len(shape) - max(2, len(shape) // 10), 0)
    lowest = min(range(len(shape)), key=shape.__getitem__)
    is_stepped_often = statistics.median(step.scheduler_steps for step in run.first.steps) > 1
    rises = is_stepped_often and 0 < lowest < 0.75 * len(shape) and shape[lowest] < 0.05 and shape[-1] > shape[lowest] + 0.1
    if run.has_ended and max(shape) > 0 and (max(shape[end:]) < 1e-9 or rises):
        yield Finding(1, f"The schedule ends at step {lowest + 1} of {len(shape)} on 1 process.", lowest + 1)


def _differences(evidence: Evidence, run: AuditedRun, how: str, *, is_cut: bool) -> Iterator[Finding]:
    """Compare a run with the same global batch, order and rates: causes 7 and 15, or none that is known.

    Samples of steps are expected to differ where an epoch is cut (cause 10).
    """
    base, allowed = evidence.comparable or evidence.reference, max(_ROUNDING, _NEAR_FLOOR * evidence.noise)
    for index in range(min(len(base.steps), len(run.steps), evidence.compared_steps)):
        if not _same_samples(base, run, index, index):
            # Other counts are an epoch's end, or an accumulation that the script sets elsewhere.
            if base.samples(index).total() == run.samples(index).total() and not is_cut:
                yield Finding(0, f"Step {index + 1} has other samples {how}, with the same global batch.", index + 1)
            return
        if (found := gradient_difference(base, run, index)) > allowed:
            yield _explained(base, run, index, f"the gradient of step {index + 1} differs {how} by {found:.1e}")
            return


def _explained(base: AuditedRun, run: AuditedRun, index: int, size: str) -> Finding:
    """Return why a step with the same samples and weights has another gradient."""
    ranks, other_ranks = ([step.batches for step in it.steps[index]] for it in (base, run))
    one, other = (list(itertools.chain(*it)) for it in (ranks, other_ranks))
    ratio, parts = run.steps[index][0].norm / (base.steps[index][0].norm or 1.0), len(other) / len(one)
    pieces: dict[str, Any] = {
        "micro-batches": ([[it] for it in one], [[it] for it in other]),
        "processes": (ranks, other_ranks),
    }
    for kind, (here, there) in pieces.items():
        if key := _uneven(here, there):
            counts = ", ".join(str(sum(it["counts"][key[0]][key[1]] for it in each)) for each in there)
            return Finding(7, f"Means over uneven counts are averaged: {size}. The {kind} have {counts} entries of `{key[0]}` "
                           "that count, and the same weight.", index + 1)  # fmt: skip
    if any(math.isclose(ratio, factor, rel_tol=1e-3) for factor in (parts, 1 / parts)):
        return Finding(7, f"A mean over the micro-batch is scaled as a part of a sum: the gradient of step {index + 1} is "
                       f"{ratio:.3g} times as large in {len(other)} micro-batches as in {len(one)}.", index + 1)  # fmt: skip
    norms = {name for event in base.first.all("model") for name in event["norms"]}
    reasons = [f"{name} computes statistics of the micro-batch" for name in sorted(norms)]
    if any(it["draws"] for it in (*one, *other)):
        reasons.append("the forward pass draws random numbers (dropout), others on each process")
    if base.samples(index) != run.samples(index):
        reasons.append("samples are augmented with random numbers that depend on the process")
    if reasons:
        return Finding(15, f"It cannot agree: {'; '.join(reasons)} ({size}).", index + 1, is_fault=False)
    return Finding(0, f"Not the same run: {size}, with the same samples and weights.", index + 1)


def _uneven(*pieces: Sequence[Sequence[Event]]) -> tuple[str, int] | None:
    """Return the counts by which the losses of pieces of a batch add up to one mean in both runs, though they are uneven."""
    losses = [[statistics.fmean(it["loss"] for it in batches) for batches in each] for each in pieces]
    for name, which in itertools.product(pieces[1][0][0]["counts"], (0, 1)):
        weights = [[sum(it["counts"].get(name, [0, 0])[which] for it in batches) for batches in each] for each in pieces]
        is_uneven = len(set(weights[1])) > 1 and all(map(sum, weights))
        if is_uneven and relative_difference(*map(statistics.fmean, losses, weights)) < 1e-4:
            return name, which
    return None


def _resume(reference: AuditedRun, stopped: AuditedRun, resumed: AuditedRun) -> Iterator[Finding]:
    """Compare the first steps of a resumed run with those of the undisturbed run after the checkpoint."""
    saves = [event for event in stopped.first.all("save") if event["step"]]
    loads = {str(event["path"]) for event in resumed.first.all("load")}
    end = len(stopped.steps) - 2  # it crashed two steps after the checkpoint
    at = next((it for it in saves if it["path"] in loads or (not loads and it["step"] == end)), saves[-1])["step"]
    if not resumed.steps or at >= len(reference.steps):
        left = len(reference.steps) - at
        yield Finding(13, f"A run resumed after step {at} takes {len(resumed.steps)} steps instead of {left}.", at)
        return
    expected, found = reference.steps[at][0], resumed.steps[0][0]
    wrong = [f"{name} not restored" for name, key in (("the weights are", "weights"), ("the optimizer's state is", "state"))
             if difference(expected.event[key], found.event[key]) > _SAME]  # fmt: skip
    rates = [[step.event["rates"][0] for step in steps] for steps in (reference.first.steps[at:], resumed.first.steps)]
    pairs = enumerate(zip(*rates, strict=False), 1)
    wrong += [f"the learning rate of its step {index} is {other:.4g} instead of {rate:.4g} (scheduler)"
              for index, (rate, other) in pairs if relative_difference(rate, other) > 1e-9][:1]  # fmt: skip
    steps = range(min(3, len(reference.steps) - at, len(resumed.steps)))
    parted = next((index for index in steps if not _same_samples(reference, resumed, at + index, index)), None)
    if parted is not None:
        start = max(one.from_step for one in reference.first.passes if one.is_training and one.from_step <= at)
        before: Counter[int] = sum((reference.samples(index) for index in range(start, at)), Counter())
        rows = resumed.samples(parted)
        text = "the order of epoch 1 begins again" if rows == reference.samples(parted) else "some are skipped, or reordered"
        if again := (rows & before).total():
            text = f"{again} of {rows.total()} were trained on before in this epoch"
        wrong.append(f"the samples of its step {parted + 1} are not those of the undisturbed run: {text}")
    elif not wrong and relative_difference(*(sum(it["loss"] for it in step.batches) for step in (expected, found))) > EARLY:
        wrong.append("the random state is not restored: the loss differs with the same weights and samples")
    if wrong:
        yield Finding(13, f"A run resumed after step {at} is not the undisturbed run: {'; '.join(wrong)}.", at + 1)
