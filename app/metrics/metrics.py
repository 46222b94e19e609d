"""The metrics of a run: loss, digests of samples and the task's own sums over whole global batches, and each rank's own.

Nothing here makes the device wait between two logs: losses, digests and verdicts stay tensors until they are logged, and one
collective each then covers all steps since the last log. Only the main process writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from app.distributed.runtime import Runtime
from app.errors import TrainingError
from app.metrics.clock import NOTHING, Clock, Communication, Spent
from app.metrics.trackers import Trackers
from app.optim.steps import Step
from app.recipe.schema import LogRecipe
from app.runs import ledger, run_folder
from app.runs.claim import Claim
from app.task import COUNT_RULE, SAMPLES, Later, Loss


class Losses:
    """This process's part of the summed loss, and of the task's own sums, since they were last taken."""

    _STEPS = 64  # Adding up many steps at once costs what adding up one does, and few enough are kept that it needs no memory.

    def __init__(self, device: torch.device, *, with_sums: bool = True) -> None:
        """`with_sums`: whether the task's own sums are wanted."""
        self._device, self._with_sums = device, with_sums
        self.names: tuple[str, ...] | None = None
        """Of the task's sums; known after the first pass."""
        self._taken = torch.zeros(2, dtype=torch.float64, device=device)
        self._means: list[Tensor] = []
        self._counts: list[int | Tensor] = []
        self._sums: list[Mapping[str, Later]] = []
        self._skipped: list[Tensor | bool] = []

    def add(self, loss: Loss) -> None:
        """Take in the loss of one forward pass."""
        sums = loss.sums if self._with_sums else {}
        if self.names is None:
            self.names = tuple(sums)
            self._taken = torch.zeros(2 + 2 * len(sums), dtype=torch.float64, device=self._device)
        elif self.names != tuple(sums):
            raise TrainingError(
                f"the task's loss reports {', '.join(sums) or 'nothing'}, but reported in its first pass "
                f"{', '.join(self.names) or 'nothing'}: Loss.sums must have the same names, in the same "
                "order, in every pass"
            )
        self._means.append(loss.mean.detach())
        self._counts.append(loss.count)
        self._sums.append(sums)

    def counted(self) -> Tensor:
        """Return what the passes of the first step were means over, together, a float64 scalar; called before its end."""
        return torch.stack([torch.as_tensor(count, device=self._device).double() for count in self._counts]).sum()

    def end_step(self, skipped: Tensor | bool) -> None:
        """Finish a step; what was skipped (as `Step.skipped`) has no part in the sums. All steps have equally many passes."""
        self._skipped.append(skipped)
        if len(self._skipped) >= self._STEPS:
            self._add_up()

    def take(self) -> Tensor:
        """Return the summed loss and its count, and those of each of `names`, float64 [2 + 2 * names]; begin new ones."""
        if self._skipped:
            self._add_up()
        taken, self._taken = self._taken, torch.zeros_like(self._taken)
        return taken

    def _add_up(self) -> None:
        spoilt = self._spoilt(len(self._means))
        added_up = [_summed(*self._losses(), spoilt)]
        for name in self.names or ():
            added_up.append(_summed(*self._of([sums[name] for sums in self._sums]), spoilt))
        self._taken = self._taken + torch.cat(added_up)
        self._means, self._counts, self._sums, self._skipped = [], [], [], []

    def _losses(self) -> tuple[Tensor, Tensor | float, float]:
        """The losses of the passes, their counts, and by what to multiply."""
        means, counts = torch.stack(self._means), self._counts
        if set(map(type, counts)) == {int} and len(set(counts)) == 1:
            return means, 1.0, float(counts[0])  # a product once, after the sum: as it always was, to the last bit
        each = torch.stack([torch.as_tensor(count, device=self._device) for count in counts]).double()
        return torch.where(each > 0, means.double() * each, 0.0), each, 1.0

    def _of(self, passes: Sequence[Later]) -> tuple[Tensor, Tensor | float, float]:
        stacked = map(torch.stack, zip(*[later.tensors for later in passes], strict=True))
        found, counts = passes[0].of(*stacked)
        return found, counts, 1.0

    def _spoilt(self, num_passes: int) -> Tensor | None:
        """Which passes are of skipped steps, bool [passes]; None where it is known on the host that there are none."""
        verdicts = [verdict for verdict in self._skipped if isinstance(verdict, Tensor)]
        if not verdicts and not any(self._skipped):
            return None
        told = torch.stack(verdicts).bool() if verdicts else torch.tensor(self._skipped)
        skipped = told.to(self._device, non_blocking=True)
        return skipped.repeat_interleave(num_passes // len(skipped))


def _summed(values: Tensor, counts: Tensor | float, factor: float, spoilt: Tensor | None) -> Tensor:
    """The sum of the values [P] and of the counts, that of each or [P], times the factor, float64 [2]; without the spoilt."""
    if spoilt is not None:
        values = values.masked_fill(spoilt, 0)
        counts = torch.where(spoilt, 0.0, counts)
    total = values.sum(dtype=torch.float64)
    counted = counts.sum(dtype=torch.float64) if isinstance(counts, Tensor) else torch.full_like(total, counts * len(values))
    return torch.stack([total, counted]) * factor


class Fed:
    """What this process was fed, as one number a step: made on the device, and nothing waits for it."""

    # Hashing many batches at once costs what hashing one of them does, and few enough are kept that it needs no memory.
    _BATCHES = 256

    def __init__(self) -> None:
        self._batches: list[torch.Tensor] = []
        self._steps = 0
        self._digests: list[torch.Tensor] = []

    def add(self, samples: torch.Tensor) -> None:
        """Take in the sample numbers, int64 [micro-batch], of one forward pass."""
        self._batches.append(samples)

    def end_step(self) -> None:
        """Finish a step; all steps have equally many forward passes."""
        self._steps += 1
        if len(self._batches) >= self._BATCHES:
            self._hash()

    def take(self) -> torch.Tensor:
        """Return the digests, int64 [steps], of all steps since the last call, of which there is at least one."""
        if self._batches:
            self._hash()
        digests, self._digests = torch.cat(self._digests), []
        return digests

    def _hash(self) -> None:
        self._digests.append(ledger.digest(torch.stack(self._batches).view(self._steps, -1)))
        self._batches, self._steps = [], 0


_RECORD_EVERY_S = 1.0
"""Least time between two lines of the ledger, of which nobody wants fifty a second; a kill leaves so much unrecorded."""


class Metrics:
    """Collects each step's loss and samples, and writes a line every so many steps."""

    def __init__(  # noqa: PLR0913  (keyword-only after the parts)
        self,
        runtime: Runtime,
        claim: Claim,
        gauges: Gauges,
        trackers: Trackers,
        *,
        global_batch_size: int,
        log: LogRecipe,
        unit: str = SAMPLES,
        first_step: int = 0,
    ) -> None:
        """`unit` is the task's."""
        self.clock = gauges.clock
        self.timed = gauges.communication.timed
        """The block in which the run trains: what ranks wait for one another is timed in it."""
        self._gauges, self.trackers = gauges, trackers
        self.skipped_in_row = 0
        """Consecutive skipped steps, up to the last log."""
        self._runtime, self._claim, self._global_batch_size = runtime, claim, global_batch_size
        self._record_samples = log.samples
        self._samples: list[int] = []
        self._losses = Losses(runtime.device, with_sums=log.train_scores)
        self.units = Units(unit)
        self._fed = Fed()
        self._unseen: list[Step] = []
        self._first_step = first_step
        self._seen_steps, self._ended_steps, self._grad_norm = first_step, first_step, math.nan
        # What the next line must say, and what the ledger's has to.
        self._skipped_to_log: list[int] = []
        self._skipped_to_record: list[int] = []
        self._written_s: float | None = None
        self._logged_steps, self._logged = first_step, NOTHING
        self._recorded_steps, self._recorded = first_step, NOTHING
        self._unrecorded_s = 0.0

    def add(self, loss: Loss, samples: torch.Tensor) -> None:
        """Take in one forward pass over B samples: its loss, and their numbers, int64 [B]."""
        self._losses.add(loss)
        self._fed.add(samples)
        if self._record_samples:
            self._samples += self._runtime.gather_rows(samples).tolist()

    def end_step(self, step: int, taken: Step, total: float | torch.Tensor) -> None:
        """Finish step `step` (1 is the first), of which a skipped one has no part in the loss; write its samples if wanted.

        `total` is what the `Loss.count` of all its passes on all ranks were to add up to; a tensor is a scalar.
        """
        if step == self._first_step + 1:  # later ones at the next log, so that no step waits
            self._check_counts(float(self._runtime.reduce(self._losses.counted())), float(total))
        self._fed.end_step()
        self._unseen.append(taken)
        self.units.end_step(total)
        self._ended_steps = step
        self._losses.end_step(taken.skipped)
        if self._record_samples:
            self._append(run_folder.SAMPLES, {"step": step, "samples": self._samples})
            self._samples = []

    def log(self, step: int, *, epoch: int, learning_rate: float) -> dict[str, Any]:
        """Write the line of step `step`, covering all steps since the last line, and return it. All ranks call it.

        Raises TrainingError, on all ranks, if the loss is not finite although the gradients were.
        """
        self._see_what_was_skipped()
        steps = step - self._logged_steps
        applied = steps - len(self._skipped_to_log)
        spent = self.clock.spent()
        since = spent - self._logged
        samples = steps * self._global_batch_size
        (loss_sum, counted, *sums), readings = self._gauges.read(self._losses.take(), since, samples=samples)
        counts = self.units.take()
        skipped = {at - self._logged_steps - 1 for at in self._skipped_to_log}
        self._check_counts(counted, sum(count for place, count in enumerate(counts) if place not in skipped))
        loss = loss_sum / max(counted, 1)
        self._unrecorded_s += samples / readings["samples_per_s"]  # the mean of the ranks, so that they agree
        if self._unrecorded_s >= _RECORD_EVERY_S or not math.isfinite(loss):
            self._record_steps()
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} in steps {self._logged_steps + 1} to {step} (learning rate "
                f"{learning_rate:g}): lower optim.lr, lengthen the warm-up, or set optim.clip_norm."
            )
        line = {
            "step": step,
            "samples_seen": step * self._global_batch_size,
            **self.units.seen,
            "epoch": epoch,
            "loss": loss if applied else None,
            **self._reported(sums),
            "learning_rate": learning_rate,
            "grad_norm": self._grad_norm if math.isfinite(self._grad_norm) else None,
            "skipped_steps": self._skipped_to_log,
            **readings,
            **self.units.rates(sum(counts), readings, samples=samples),
            "training_s": spent.training_s,
            "saving_share": since.held_s / (since.training_s + since.held_s),
            "saving_held_s": since.held_s,
            "saving_written_s": self._written_s,
        }
        self._skipped_to_log, self._written_s = [], None
        self._logged_steps, self._logged = step, spent
        self._write(run_folder.METRICS, line, shown=line)
        return line

    def _check_counts(self, counted: float, expected: float) -> None:
        """Raise TrainingError, on all ranks, if the losses since the last line were not means over as much as expected."""
        if counted != expected:
            raise TrainingError(
                f"the losses since step {self._logged_steps} are means over {counted:,.0f} in total, but the "
                f"gradients were weighted as means over {expected:,.0f}. {COUNT_RULE}"
            )

    def _reported(self, sums: Sequence[float]) -> dict[str, float | None]:
        """The means of the task's own sums by name, of sums and counts in turns; None where nothing was counted."""
        pairs = zip(self._losses.names or (), sums[::2], sums[1::2], strict=True)
        return {name: total / count if count else None for name, total, count in pairs}

    def flush(self) -> None:
        """Write every step that has ended into the ledger. All ranks call it.

        Comes before a checkpoint is begun and before the run ends early, so that what is done is always recorded.
        """
        self._record_steps()

    def record_saved(self, step: int, *, held_s: float, written_s: float) -> None:
        """Write down that the checkpoint after `step` steps is committed, and the seconds of ledger.Saved. In any thread."""
        self._written_s = written_s
        self._record(ledger.Saved(step=step, held_s=held_s, written_s=written_s))

    def record_evaluation(self, step: int, *, epoch: int, scores: Mapping[str, float], held_s: float) -> None:
        """Record the named scores of the weights after `step` steps, and how long training paused for them."""
        self._record(ledger.Evaluated(step=step, held_s=held_s))
        place = {"step": step, "samples_seen": step * self._global_batch_size, **self.units.seen, "epoch": epoch}
        self._write(run_folder.EVALUATIONS, {**place, **scores}, shown=scores)

    def record_texts(self, step: int, texts: Sequence[tuple[str, str]]) -> None:
        """Write down titles and texts that the weights after `step` steps have made."""
        for title, text in texts:
            self._append(run_folder.TEXTS, {"step": step, "title": title, "text": text, "time": round(time.time(), 3)})
            self.trackers.tell(title, text, step=step)

    def _record_steps(self) -> None:
        if self._recorded_steps == self._ended_steps:
            return
        self._see_what_was_skipped()
        digests = self._runtime.reduce(self._fed.take()).tolist()
        spent = self.clock.spent()
        since = spent - self._recorded
        steps = ledger.Steps(
            first=self._recorded_steps + 1,
            last=self._ended_steps,
            digests=tuple(map(ledger.as_text, digests)),
            skipped=tuple(self._skipped_to_record),
            training_s=since.training_s,
            waiting_s=since.phases_s["data_wait"],
        )
        self._record(steps)
        self._skipped_to_record, self._recorded_steps = [], self._ended_steps
        self._recorded, self._unrecorded_s = spent, 0.0

    def _see_what_was_skipped(self) -> None:
        for step, skipped in enumerate(_on_host([taken.skipped for taken in self._unseen]), start=self._seen_steps + 1):
            self.skipped_in_row = self.skipped_in_row + 1 if skipped else 0
            if skipped:
                self._skipped_to_log.append(step)
                self._skipped_to_record.append(step)
        if self._unseen:
            self._grad_norm = float(self._unseen[-1].grad_norm)
        self._unseen, self._seen_steps = [], self._ended_steps

    def _record(self, event: ledger.Event) -> None:
        if self._runtime.is_main:
            self._claim.append(run_folder.LEDGER, ledger.line(event))

    def _write(self, name: str, line: dict[str, Any], *, shown: Mapping[str, Any]) -> None:
        self._append(name, {**line, "time": round(time.time(), 3)})
        numbers = {key: value for key, value in shown.items() if isinstance(value, (int, float)) and key != "step"}
        self.trackers.log(name, numbers, step=line["step"])

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if self._runtime.is_main:
            self._claim.append(name, line)


def _on_host(verdicts: Sequence[torch.Tensor | bool]) -> list[bool]:
    """Return the verdicts (as `Step.skipped`); a device is asked once for all: each time takes some 20 us (an estimate)."""
    asked = [verdict for verdict in verdicts if isinstance(verdict, torch.Tensor)]
    answers = iter(torch.stack(asked).bool().tolist() if asked else [])
    return [next(answers) if isinstance(verdict, torch.Tensor) else verdict for verdict in verdicts]


class Gauges:
    """The readings of all ranks, in one collective."""

    def __init__(
        self,
        runtime: Runtime,
        model: torch.nn.Module,
        *,
        flops_per_sample: float,
        peak_flops_per_s: float | None,
    ) -> None:
        """`model` is as `prepare` returned it.

        `flops_per_sample` is that of a forward and backward pass, 0 if not known; `peak_flops_per_s` is what one device can
        do, if known.
        """
        self._runtime, self.clock = runtime, Clock(runtime.device)
        self.communication = Communication(model, self.clock, runtime.device)
        self._flops_per_sample, self._peak_flops_per_s = flops_per_sample, peak_flops_per_s
        self._process = psutil.Process()

    def read(self, sums: torch.Tensor, spent: Spent, *, samples: int) -> tuple[list[float], dict[str, Any]]:
        """Return the data-parallel ranks' `sums` (float64 [n]) added up, and the readings by name, of so many samples.

        All ranks call it.
        Shares are of the time that was spent training, the mean of the ranks; memory is that of the rank with most. What is
        not known is None: communication where there is no process group, utilization where the device's peak or the
        arithmetic of a sample is not known.
        """
        phases_s = spent.phases_s
        times_s = [phases_s["data_wait"], phases_s["forward_backward"], phases_s["optimizer"], phases_s["communication"]]
        own = [spent.training_s, *times_s, float(self._memory_bytes())]
        readings = torch.cat([sums, torch.tensor(own, dtype=torch.float64).to(sums.device)])
        # In plain numbers from here on: each operation on a small tensor takes as long as all of them.
        ranks: list[list[float]] = self._runtime.accelerator.gather(readings[None]).tolist()
        *totals, _ = (sum(column) for column in zip(*ranks, strict=True))
        training_s, *parts_s = totals[len(sums) :]
        of_data = ranks[:: self._runtime.launched.tensor_parallel]  # the others of a group have the same sums
        added_up = [sum(column) for column in zip(*(rank[: len(sums)] for rank in of_data), strict=True)]
        data_wait, forward_backward, optimizer, communication = (part_s / training_s for part_s in parts_s)
        samples_per_s = samples / (training_s / len(ranks))
        flops_per_s = samples_per_s * self._flops_per_sample if self._flops_per_sample else None
        peak = self._peak_flops_per_s
        return added_up, {
            "samples_per_s": samples_per_s,
            "samples_per_s_per_device": samples_per_s / len(ranks),
            "data_wait_share": data_wait,
            "forward_backward_share": forward_backward,
            "communication_share": communication if self.communication.is_timed else None,
            "optimizer_share": optimizer,
            "flops_per_s": flops_per_s,
            "mfu": None if peak is None or flops_per_s is None else flops_per_s / (peak * len(ranks)),
            "memory_bytes": int(max(rank[-1] for rank in ranks)),
        }

    def _memory_bytes(self) -> int:
        """The most that the GPU's tensors held since the last time; on a CPU, what the process holds now."""
        device = self._runtime.device
        if device.type != "cuda":
            held_bytes: int = self._process.memory_info().rss
            return held_bytes
        peak_bytes: int = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak_bytes


class Units:
    """The counts of all steps of a run, exact over all its starts; of samples, which each line has anyway, nothing is said.

    Of a step that was skipped too: it was read and computed like the others.
    """

    def __init__(self, name: str) -> None:
        """`name` is the unit, in the plural."""
        self._name = name
        self._before, self._taken = 0.0, 0.0
        self._untaken: list[float | torch.Tensor] = []

    def end_step(self, total: float | torch.Tensor) -> None:
        """Take in what the passes of a step counted on all ranks; a tensor is a scalar, which nothing waits for yet."""
        self._untaken.append(total)

    def take(self) -> list[float]:
        """Return what each step since the last call counted."""
        counts = [float(total) for total in self._untaken]
        self._untaken = []
        self._taken += sum(counts)
        return counts

    @property
    def seen(self) -> dict[str, float]:
        """What the run has seen so far, by its name in a line."""
        return self._named(seen=_whole(self._total()))

    def rates(self, counted: float, readings: Mapping[str, Any], *, samples: int) -> dict[str, float]:
        """Return the rates of so many units, which came in so many samples, from the `readings` of these."""
        each = counted / samples
        of_samples, of_one = (readings[f"{SAMPLES}_per_s{of}"] for of in ("", "_per_device"))
        return self._named(per_s=each * of_samples, per_s_per_device=each * of_one)

    def result(self, training_s: float, *, steps: int) -> dict[str, float | None]:
        """Return what the result says of a start that took so many steps in this time."""
        rate = (self._total() - self._before) / training_s if steps else None
        return {**self.seen, **self._named(per_s=rate)}

    def state(self) -> float:
        """Return what `load` takes, as JSON holds it."""
        return _whole(self._total())

    def load(self, state: float) -> None:
        """Go on from what a checkpoint has."""
        self._before = self._taken = float(state)

    def _total(self) -> float:
        return self._taken + sum(float(total) for total in self._untaken)

    def _named(self, **values: Any) -> dict[str, Any]:
        return {} if self._name == SAMPLES else {f"{self._name}_{what}": value for what, value in values.items()}


def _whole(value: float) -> float:
    """The value as an int where it is one: counts of up to 2**53 are exact, and look like counts."""
    return int(value) if value.is_integer() else value
