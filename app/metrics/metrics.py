"""The metrics of a run: loss, digests of samples and the task's own sums over whole global batches, and each rank's own.

Nothing here makes the device wait between two logs: losses, digests and verdicts stay tensors until they are logged, and one
collective each then covers all steps since the last log. Only the main process writes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from app.data.mixture import Mixture
from app.distributed.runtime import Runtime
from app.errors import TrainingError
from app.metrics.clock import NOTHING, Clock, Phase, Spent
from app.metrics.trackers import Trackers
from app.optim.steps import Step
from app.recipe.schema import LogRecipe
from app.runs import ledger, run_folder
from app.runs.claim import Claim
from app.task import COUNT_RULE, SAMPLES, Loss

_AT_ONCE = 64
"""Passes, or steps, that are added up together: it takes as long as one of them, and few enough are kept in memory."""


class Losses:
    """This process's part of the summed loss, and of the task's own sums, since they were last taken."""

    def __init__(self, device: torch.device, *, with_sums: bool = True, step_passes: int | None = None) -> None:
        """`with_sums`: whether the task's own sums are wanted; `step_passes`: passes of a step, if `take_steps` is called."""
        self._device, self._with_sums = device, with_sums
        self.names: tuple[str, ...] | None = None
        """Names of the task's sums; known after the first pass."""
        self._taken = torch.zeros(2, dtype=torch.float64, device=device)
        self._passes: list[tuple[float | Tensor, ...]] = []
        """Mean loss and its count of each pass that is not added up yet, and both numbers of each of the task's sums."""
        self._skipped: list[Tensor | bool] = []
        """For each of these passes, whether its step was skipped."""
        self._step_passes, self._steps = step_passes, [torch.zeros(2, 0, dtype=torch.float64, device=device)]

    def add(self, loss: Loss) -> None:
        """Add the loss of one forward pass."""
        sums = loss.sums if self._with_sums else {}
        if self.names is None:
            self.names = tuple(sums)
            self._taken = torch.zeros(2 + 2 * len(sums), dtype=torch.float64, device=self._device)
        elif self.names != tuple(sums):
            raise TrainingError(
                f"the task's loss reports {', '.join(sums) or 'nothing'}, but reported in its first pass "
                f"{', '.join(self.names) or 'nothing'}: Loss.sums must have the same names, in order, in every pass"
            )
        self._passes.append((loss.mean.detach(), loss.count, *(part for pair in sums.values() for part in pair)))

    def end_step(self, skipped: Tensor | bool) -> None:
        """Finish a step; a skipped one (as `Step.skipped`) has no part in the sums."""
        self._skipped += [skipped] * (len(self._passes) - len(self._skipped))
        if len(self._passes) >= _AT_ONCE:
            self._add_up()

    def take(self) -> Tensor:
        """Return the summed loss and its count, and sum and count of each of `names`, float64 [2 + 2 * names]; begin new
        ones."""
        if self._passes:
            self._add_up()
        taken, self._taken = self._taken, torch.zeros_like(self._taken)
        return taken

    def take_steps(self) -> Tensor:
        """Return the summed loss and its count of each computed step since the last call, skipped or not, float64 [2, S]."""
        if self._passes:
            self._add_up()
        taken, self._steps = torch.cat(self._steps, 1), self._steps[:1]
        return taken

    def _add_up(self) -> None:
        means, counts, *sums = (self._stacked(column) for column in zip(*self._passes, strict=True))
        table = torch.stack([torch.where(counts > 0, means * counts, 0.0), counts, *sums])
        if self._step_passes:
            self._steps.append(table[:2].view(2, -1, self._step_passes).sum(2))
        if any(skipped is not False for skipped in self._skipped):
            table = table.masked_fill(self._stacked(self._skipped).bool(), 0.0)
        self._taken = self._taken + table.sum(1)
        self._passes, self._skipped = [], []

    def _stacked(self, numbers: Sequence[float | Tensor]) -> Tensor:
        """Return numbers of P passes, float64 [P]."""
        if not any(isinstance(number, Tensor) for number in numbers):
            return torch.tensor(numbers, dtype=torch.float64).to(self._device, non_blocking=True)
        scalars = [
            number
            if isinstance(number, Tensor) and number.ndim == 0
            else torch.as_tensor(number, dtype=torch.float64, device=self._device).sum()
            for number in numbers
        ]
        return torch.stack(scalars).to(self._device, torch.float64, non_blocking=True)


class Metrics:
    """Collects each step's loss and samples, and writes a line for each log."""

    def __init__(
        self,
        runtime: Runtime,
        claim: Claim,
        trackers: Trackers,
        *,
        global_batch_size: int,
        flops_per_sample: float,
        peak_flops_per_s: float | None,
        log: LogRecipe,
        unit: str = SAMPLES,
        mixture: Mixture | None = None,
        first_step: int = 0,
    ) -> None:
        """`flops_per_sample` covers a forward and backward pass, 0 if not known; `peak_flops_per_s` is what one device can
        do, if known; `unit` is the task's.
        """
        self.clock, self.trackers = Clock(runtime.device), trackers
        self._flops_per_sample, self._peak_flops_per_s = flops_per_sample, peak_flops_per_s
        self._process = psutil.Process()
        self.skipped_in_row = 0
        """Consecutive skipped steps, up to the last log, without those that the recipe skips."""
        self._runtime, self._claim, self._global_batch_size = runtime, claim, global_batch_size
        self._record_samples, self._record_steps = log.samples, log.each_step
        self._samples: list[int] = []
        step_passes = runtime.plan.accumulation if log.each_step else None
        self._losses = Losses(runtime.device, with_sums=log.train_scores, step_passes=step_passes)
        self.units = UnitCounts(unit)
        self._mixture = mixture
        self.sources = SourceCounts(mixture, global_batch_size, unit)
        # Numbers of the samples that this process was fed, on the device: of this step, and of steps that have no digest yet.
        self._batches: list[Tensor] = []
        self._fed: list[Tensor] = []
        self._digests: list[Tensor] = []
        self._unrecorded: list[Step] = []
        """Steps that the ledger does not have yet."""
        self._grad_norm = math.nan
        self._skipped: list[int] = []
        """Skipped steps since the last line, without those that the recipe skips."""
        self._by_recipe: list[int] = []
        """Steps since the last line that the recipe skips."""
        self._written_s: float | None = None
        self._logged_steps, self._logged = first_step, NOTHING
        self._recorded_steps, self._recorded = first_step, NOTHING

    def add(self, loss: Loss | None, samples: torch.Tensor) -> None:
        """Take in one forward pass over B samples: its loss (None: it is not computed), and their numbers, int64 [B]."""
        if loss is not None:
            self._losses.add(loss)
        self._batches.append(samples)
        if self._record_samples:
            self._samples += self._runtime.gather_rows(samples).tolist()

    def end_step(self, step: int, taken: Step, total: float | torch.Tensor) -> None:
        """Finish step `step` (1 is the first), of which a skipped one has no part in the loss; write its samples if wanted.

        `total` is what the `Loss.count` of all its passes on all ranks were to add up to; a tensor is a scalar.
        """
        self._fed.append(torch.cat(self._batches) if len(self._batches) > 1 else self._batches[0])
        self._batches = []
        if len(self._fed) == _AT_ONCE:
            self._digest()
        self._unrecorded.append(taken)
        self.units.end_step(total)
        self._losses.end_step(taken.skipped)
        if self._record_samples:
            rows = {"rows": self._mixture.places(np.array(self._samples))} if self._mixture else {}
            self._append(run_folder.SAMPLES, {"step": step, "samples": self._samples, **rows})
            self._samples = []

    def log(self, step: int, *, epoch: int, learning_rate: float) -> dict[str, Any]:
        """Write the line of step `step`, covering all steps since the last line, and return it. All ranks call it.

        Raises TrainingError, on all ranks, if the loss is not finite although the gradients were, or if the losses were not
        means over as much as the gradients were weighted for.
        """
        self.flush()
        steps = step - self._logged_steps
        spent = self.clock.spent()
        since = spent - self._logged
        samples = steps * self._global_batch_size
        (loss_sum, counted, *sums), readings = self._read(self._losses.take(), since, samples=samples)
        counts = self.units.take()
        without = {*self._skipped, *self._by_recipe}
        expected = sum(count for at, count in enumerate(counts, start=self._logged_steps + 1) if at not in without)
        if counted != expected:
            raise TrainingError(
                f"the losses since step {self._logged_steps} are means over {counted:,.0f} in total, but the "
                f"gradients were weighted as means over {expected:,.0f}. {COUNT_RULE}"
            )
        loss = loss_sum / max(counted, 1)
        pairs = zip(self._losses.names or (), sums[::2], sums[1::2], strict=True)  # the task's own sums, and their counts
        scores = {name: total / count if count else None for name, total, count in pairs}
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} in steps {self._logged_steps + 1} to {step} (learning rate "
                f"{learning_rate:g}): lower optim.lr, lengthen the warm-up, or set optim.clip_norm."
            )
        rates = ("per_s", "per_s_per_device")
        line = {
            "step": step,
            "samples_seen": step * self._global_batch_size,
            **self.units.seen,
            **self.sources.take(),
            "epoch": epoch,
            "loss": loss if len(without) < steps else None,
            **scores,
            "learning_rate": learning_rate,
            "grad_norm": self._grad_norm if math.isfinite(self._grad_norm) else None,
            "skipped_steps": self._skipped,
            **readings,
            **self.units.named(**{rate: sum(counts) / samples * readings[f"samples_{rate}"] for rate in rates}),
            "training_s": spent.training_s,
            "saving_share": since.held_s / (since.training_s + since.held_s),
            "saving_held_s": since.held_s,
            "saving_written_s": self._written_s,
        }
        self._skipped, self._by_recipe, self._written_s = [], [], None
        self._logged_steps, self._logged = step, spent
        self._write(run_folder.METRICS, line, shown=line)
        return line

    def _read(self, sums: Tensor, spent: Spent, *, samples: int) -> tuple[list[float], dict[str, Any]]:
        """Return the data-parallel ranks' `sums` (float64 [n]) added up, and the readings by name, of these samples.

        All ranks call it. Shares are of the time that was spent training, the mean of the ranks; memory is the value of the
        rank with most. The slowest rank is the one whose own work (data, passes, optimizer) takes the most time, without waits
        for others. What is not known is None: communication and slowest rank of one process, utilization where the device's
        peak or the arithmetic of a sample is not known.
        """
        phases: tuple[Phase, ...] = ("data_wait", "forward_backward", "optimizer", "communication")
        times_s = [spent.training_s, *(spent.phases_s[phase] for phase in phases)]
        own = torch.tensor([*times_s, float(self._memory_bytes())], dtype=torch.float64).to(sums.device)
        # In plain numbers from here on: each operation on a small tensor takes as long as all of them.
        ranks: list[list[float]] = self._runtime.accelerator.gather(torch.cat([sums, own])[None]).tolist()
        of_data = ranks[:: self._runtime.launched.processes_per_rank]  # the others of a group have the same sums
        added_up = [sum(column) for column in zip(*(rank[: len(sums)] for rank in of_data), strict=True)]
        training_s, *parts_s, _ = (sum(column) for column in zip(*(rank[len(sums) :] for rank in ranks), strict=True))
        data_wait, forward_backward, optimizer, communication = (part_s / training_s for part_s in parts_s)
        worked_s = [sum(rank[len(sums) + 1 : len(sums) + 4]) for rank in ranks]
        slowest, median_s = max(range(len(ranks)), key=worked_s.__getitem__), statistics.median(worked_s)
        samples_per_s = samples / (training_s / len(ranks))
        flops_per_s = samples_per_s * self._flops_per_sample if self._flops_per_sample else None
        peak = self._peak_flops_per_s
        return added_up, {
            "samples_per_s": samples_per_s,
            "samples_per_s_per_device": samples_per_s / len(ranks),
            "data_wait_share": data_wait,
            "forward_backward_share": forward_backward,
            "communication_share": communication if len(ranks) > 1 else None,
            "optimizer_share": optimizer,
            "slowest_rank": slowest if len(ranks) > 1 else None,
            "slowest_rank_ratio": worked_s[slowest] / median_s if len(ranks) > 1 and median_s else None,
            "flops_per_s": flops_per_s,
            "mfu": None if peak is None or flops_per_s is None else flops_per_s / (peak * len(ranks)),
            "memory_bytes": int(max(rank[-1] for rank in ranks)),
        }

    def _memory_bytes(self) -> int:
        """Return the most that the GPU's tensors took since the last time; on a CPU, what the process takes now."""
        device = self._runtime.device
        if device.type != "cuda":
            return int(self._process.memory_info().rss)
        peak_bytes = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return int(peak_bytes)

    def flush(self) -> None:
        """Write every step that has ended into the ledger. All ranks call it.

        Comes before a checkpoint is begun and before the run ends early, so that what is done is always recorded.
        """
        if not self._unrecorded:
            return
        first, device = self._recorded_steps + 1, self._runtime.device
        verdicts = [torch.as_tensor(taken.skipped, dtype=torch.float32, device=device) for taken in self._unrecorded]
        skipped: list[int] = []
        by_recipe = [step for step, taken in enumerate(self._unrecorded, start=first) if taken.by_recipe]
        for step, is_skipped in enumerate(torch.stack(verdicts).tolist(), start=first):
            if step not in by_recipe:
                self.skipped_in_row = self.skipped_in_row + 1 if is_skipped else 0
                skipped += [step] if is_skipped else []
        self._skipped += skipped
        self._by_recipe += by_recipe
        if self._record_steps:
            self._write_steps(first, {*skipped, *by_recipe})
        self._grad_norm = float(self._unrecorded[-1].grad_norm)
        if self._fed:
            self._digest()
        digests = self._runtime.reduce(torch.cat(self._digests)).tolist()
        spent = self.clock.spent()
        since = spent - self._recorded
        steps = ledger.StepSpan(
            first=first,
            last=self._recorded_steps + len(digests),
            digests=tuple(map(ledger.as_text, digests)),
            skipped=tuple(skipped),
            skipped_by_recipe=tuple(by_recipe),
            sources=self.sources.add(first, first + len(digests) - 1) if self._runtime.is_main else {},
            training_s=since.training_s,
            waiting_s=since.phases_s["data_wait"],
        )
        self._append(run_folder.LEDGER, ledger.line(steps))
        self._unrecorded, self._digests = [], []
        self._recorded_steps, self._recorded = steps.last, spent

    def _write_steps(self, first: int, skipped: Collection[int]) -> None:
        """Write a line of steps.jsonl for each step that has ended, from step `first` on. All ranks call it."""
        sums = self._losses.take_steps()
        norms = [torch.as_tensor(taken.grad_norm, dtype=torch.float64, device=sums.device) for taken in self._unrecorded]
        computed = iter((self._runtime.reduce(sums) if sums.numel() else sums).T.tolist())
        for step, (taken, norm) in enumerate(zip(self._unrecorded, torch.stack(norms).tolist(), strict=True), start=first):
            loss_sum, count = (math.nan, 1.0) if taken.by_recipe else next(computed)
            found = {"loss": loss_sum / max(count, 1.0), "gradient_norm": norm}
            known = {name: value if math.isfinite(value) else None for name, value in found.items()}
            line = {"step": step, **known, "learning_rate": taken.learning_rate, "skipped": step in skipped}
            self._append(run_folder.STEPS, line)

    def _digest(self) -> None:
        self._digests.append(ledger.digest(torch.stack(self._fed)))
        self._fed = []

    def record_saved(self, step: int, *, held_s: float, written_s: float) -> None:
        """Write down that the checkpoint after `step` steps is committed, and the seconds of ledger.Saved. In any thread."""
        self._written_s = written_s
        self._append(run_folder.LEDGER, ledger.line(ledger.Saved(step=step, held_s=held_s, written_s=written_s)))

    def record_evaluation(self, step: int, *, epoch: int, scores: Mapping[str, float], held_s: float) -> None:
        """Record the named scores of the weights after `step` steps, and how long training paused for them."""
        self._append(run_folder.LEDGER, ledger.line(ledger.Evaluated(step=step, held_s=held_s)))
        place = {"step": step, "samples_seen": step * self._global_batch_size, **self.units.seen, "epoch": epoch}
        self._write(run_folder.EVALUATIONS, {**place, **scores}, shown=scores)

    def record_texts(self, step: int, texts: Sequence[tuple[str, str]]) -> None:
        """Write down titles and texts that the weights after `step` steps have made."""
        for title, text in texts:
            self._append(run_folder.TEXTS, {"step": step, "title": title, "text": text, "time": round(time.time(), 3)})
            self.trackers.log_text(title, text, step=step)

    def _write(self, name: str, line: dict[str, Any], *, shown: Mapping[str, Any]) -> None:
        self._append(name, {**line, "time": round(time.time(), 3)})
        numbers = {key: value for key, value in shown.items() if isinstance(value, (int, float)) and key != "step"}
        self.trackers.log(name, numbers, step=line["step"])

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if self._runtime.is_main:
            self._claim.append(name, line)


class UnitCounts:
    """The counts of all steps of a run, exact over all its starts; of samples, which each line has anyway, nothing is written.

    A skipped step counts too: it was read and computed like the others.
    """

    def __init__(self, name: str) -> None:
        """`name` is the unit, in the plural."""
        self._name = name
        self._before, self._total = 0.0, 0.0
        self._untaken: list[float | torch.Tensor] = []

    def end_step(self, total: float | torch.Tensor) -> None:
        """Add what the passes of a step counted on all ranks; a tensor is a scalar, which nothing waits for yet."""
        self._untaken.append(total)

    def take(self) -> list[float]:
        """Return what each step since the last call counted."""
        counts, self._untaken = [float(total) for total in self._untaken], []
        self._total += sum(counts)
        return counts

    @property
    def seen(self) -> dict[str, float]:
        """Total so far, by its name in a line."""
        return self.named(seen=self.state())

    def result(self, training_s: float, *, steps: int) -> dict[str, float | None]:
        """Return what the result reports of a start that took this many steps in this time."""
        rate = (self.state() - self._before) / training_s if steps else None
        return self.named(seen=self.state(), per_s=rate)

    def state(self) -> float:
        """Return what `load` takes, as JSON holds it: an int where it is one, exact up to 2**53."""
        total = self._total + sum(map(float, self._untaken))
        return int(total) if total.is_integer() else total

    def load(self, state: float) -> None:
        """Continue from what a checkpoint has."""
        self._before = self._total = float(state)

    def named(self, **values: Any) -> dict[str, Any]:
        """Return the values by their names in a line."""
        return {} if self._name == SAMPLES else {f"{self._name}_{what}": value for what, value in values.items()}


class SourceCounts:
    """What each source of a mixture has contributed to the run, on the main process; nothing of samples without sources."""

    def __init__(self, mixture: Mixture | None, global_batch_size: int, unit: str) -> None:
        """`unit` is what the samples' own counts count, in the plural."""
        self._mixture, self._global_batch_size = mixture, global_batch_size
        self._unit = unit if mixture and mixture.count else SAMPLES
        self.seen: dict[str, float] = {}
        """Counts of the whole run by source, over all its starts."""
        self._since: dict[str, float] = {}
        """Counts since the last line."""

    def add(self, first: int, last: int) -> dict[str, list[float]]:
        """Add these steps (from 1), and return what each source contributes to each of them."""
        if self._mixture is None:
            return {}
        samples = np.arange((first - 1) * self._global_batch_size, last * self._global_batch_size)
        added = self._mixture.by_source(samples.reshape(-1, self._global_batch_size))
        for name, counts in added.items():
            for total in (self.seen, self._since):
                total[name] = total.get(name, 0) + sum(counts)
        return added

    def take(self) -> dict[str, dict[str, float]]:
        """Return the counts since the last call and those of the whole run, by their names in a line."""
        since, self._since = self._since, {}
        return {f"{self._unit}_by_source": since, **self.result()} if self._mixture else {}

    def result(self) -> dict[str, dict[str, float]]:
        """Return the counts of the whole run, by their name."""
        return {f"{self._unit}_seen_by_source": dict(self.seen)} if self._mixture else {}

    def load(self, seen: Mapping[str, float]) -> None:
        """Continue from what a checkpoint has."""
        self.seen = dict(seen)
