"""The rules of a task that one process can check by itself, at every start: on a few samples, before anything is prepared.

The loss of a small batch and of its halves is computed in training mode. There dropout is off and batch normalization uses what
it has stored, so that a difference is the loss's own. Buffers, random states, modes and the model's device are as before
afterwards. A pass costs what a training pass over four samples does, without the backward pass.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from app.data.draws import Draws
from app.data.loader import Failure, Fetching
from app.data.samples import Batch
from app.distributed.model_preparation import batchnorms
from app.distributed.runtime import Runtime
from app.distributed.sample_dropout import PassDraws
from app.errors import DataError, TrainingError
from app.init.model_tensors import is_sharded
from app.optim import parameter_groups
from app.recipe import task_file
from app.recipe.schema import Recipe
from app.task import COUNT_RULE, Form, Loss, Task, overrides, own_part
from app.tasks.own.own_samples import are_same, evenly

READY, CALLS, LOSS, COUNT, WEIGHTS = "ready", "one call", "loss", "count", "weights"
DRAW = "Take random numbers from `rng`, and nothing from torch's, NumPy's or Python's generators or from one of your own."

_EXACT, _ROUGH = 1e-5, 1e-2
"""Largest relative difference of two losses that are to be the same: float32 rounds the mean of some by less than 1e-6, bf16,
fp16 and TF32 by less than 1e-3, and a broken rule moves it by far more."""
_NOTHING = 1e-2
"""A loss of this or less is compared as if it were so large: what is 0 but for rounding differs each time."""
_SAME, _ROUNDING = 1e-6, 1e-4
"""Of a field of a sample, as a share of its largest number: where it is computed again, and in a batch of another size."""
_FEW = 2
"""Samples of a half, if groups and the sizes of batches allow it."""
_MOST_NAMED = 4
_MOST_ITEMS = 1000
"""A longer list or dict on a task is data."""
_COPY_BYTES = 1e8
"""A smaller model is built whole where each rank has only shards of it: its weights are drawn in half a second."""


class Broken(Exception):  # noqa: N818  (no error that a user meets)
    """A rule that a task breaks; becomes a TrainingError that names the task."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(text)
        self.rule = rule


@dataclass
class _Pass:
    """What a forward pass showed."""

    loss: Loss
    rows: Mapping[str, list[int]]
    """First dimensions of the inputs of dropout layers (`PassDraws.counted`)."""
    leaves: Mapping[int, Tensor]
    """Trainable tensors that the loss depends on, by `id`."""
    calls: Sequence[str] = field(default_factory=list)
    """Of the model, "", and of its parts past it, by their names."""
    draws: set[str] = field(default_factory=set)
    """Whether torch's generators were used: in the "loss", in the "model"."""


def has_room(runtime: Runtime, model: nn.Module, *, divided: bool) -> bool:
    """Whether the rules can be checked: each rank may have the whole model, on its device, which is not too large for that.

    `divided`: the ranks hold, or will hold, shards; then a small model is built once more.
    """
    size = sum(it.numel() * it.element_size() for it in model.parameters())
    if divided:
        return size <= _COPY_BYTES
    return runtime.device.type != "cuda" or 2 * size <= torch.cuda.mem_get_info(runtime.device)[0]


def check_kept(recipe: Recipe, task: Any, model: nn.Module) -> None:
    """Raise TrainingError, with their names, for trainable weights that the task keeps outside the model."""
    ours = {id(parameter) for parameter in model.parameters()}
    kept = {name: it for name, it in _kept(task).items() if isinstance(it, nn.Parameter) and id(it) not in ours}
    if kept:
        raise TrainingError(_text(recipe, WEIGHTS, _of_weights([f"{name} {list(it.shape)}" for name, it in kept.items()])))


def check(  # noqa: PLR0913  (keyword-only after the parts)
    runtime: Runtime,
    recipe: Recipe,
    task: Task,
    samples: Any,
    model: nn.Module,
    *,
    dropout: PassDraws,
    form: Form,
) -> None:
    """Raise TrainingError for a rule that a few training samples show to be broken, and see what dropout layers drop.

    `model` is whole, with weights, not prepared. Raises DataError if a sample cannot be read.
    """
    assert not is_sharded(model)
    size, half = _sizes(recipe, runtime.plan.micro_batch)
    numbers = np.resize(evenly(len(samples), size), size)
    first = next(model.parameters())
    form = Form(first.dtype, form.memory_format)  # nothing is cast before the model is prepared
    looks = _Looks(runtime, recipe, task, samples, model=model, dropout=dropout, form=form)
    # What a task has compiled would be compiled again for each size.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with _kept_states(model, runtime.device, home=first.device), eager:
        parameter_groups.set_training(model, mode=True)
        stored = [layer.eval() for layer in batchnorms(model).values() if layer.training]
        try:
            looks.all_of(
                numbers,
                [numbers[:half], numbers[half:]] if half else [],
                # Without running statistics a layer computes those of the pass: a note says so.
                compares=all(layer.running_mean is not None for layer in stored),
            )
        except Broken as error:
            raise TrainingError(_text(recipe, error.rule, str(error))) from None


def _sizes(recipe: Recipe, micro_batch: int) -> tuple[int, int]:
    """Samples of the batch that is looked at, and of its halves; 0: all passes of the recipe have the same size."""
    together, of_step = int(recipe.sections.group_size), recipe.train.global_batch_size
    most = min(of_step, recipe.train.max_micro_batch or of_step)
    few = together * max(1, _FEW // together) if micro_batch >= 2 * together else together
    half = min(few, most // 2 // together * together)
    return 2 * half or most, half


class _Looks:
    """The looks at a task: its batches, and its passes over them."""

    def __init__(  # noqa: PLR0913  (keyword-only after the parts)
        self,
        runtime: Runtime,
        recipe: Recipe,
        task: Task,
        samples: Any,
        *,
        model: nn.Module,
        dropout: PassDraws,
        form: Form,
    ) -> None:
        self._runtime, self._recipe, self._task, self._samples = runtime, recipe, task, samples
        self._model, self._dropout, self._form = model, dropout, form
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(runtime.launched.mixed_precision)
        # On GPUs there are layers that compute in half precision alone. On a CPU float32 is exact, and faster on many.
        on_gpu = runtime.device.type != "cpu"
        self._autocast = torch.autocast(runtime.device.type, half, enabled=half is not None and on_gpu)
        self._tolerance = _ROUGH if on_gpu and (half is not None or recipe.train.tf32) else _EXACT

    def all_of(self, numbers: np.ndarray, parts: Sequence[np.ndarray], *, compares: bool) -> None:
        """Look at a batch of these sample numbers, and at its parts. Raises Broken for the first broken rule.

        `compares`: the loss of the batch is to be that of its parts.
        """
        fetched = self._fetched(numbers)
        whole = self._ready(fetched)
        self._compare_fields(whole, self._ready(fetched), slice(None), again=True)
        halves = [self._ready(self._fetched(part)) for part in parts]
        for place, batch in enumerate(halves):
            self._compare_fields(whole, batch, slice(place * len(parts[0]), (place + 1) * len(parts[0])), again=False)
        self._model.to(self._runtime.device)
        first = self._pass(self._copied(whole))
        if first.calls != [""]:
            raise Broken(CALLS, _of_calls(first.calls))
        if "loss" in first.draws:
            raise Broken(LOSS, f"`loss` draws random numbers outside model(...). {DRAW}")
        self._check_count(whole, first.loss)
        found = [self._pass(self._copied(batch)) for batch in reversed(halves)][::-1]
        before = found[0] if found else first
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        again = self._pass(self._copied(halves[0] if halves else whole))
        self._check_leaves(first, again)
        self._check_state(buffers, before.loss, again.loss)
        if "model" in first.draws:  # which a note says, if it is not refused
            plan, divided = self._runtime.plan, self._runtime.launched.tensor_parallel
            if plan.passes * divided > 1:
                raise TrainingError(self._dropout.said_of_others(plan, parts=divided))
            compares = False
        self._dropout.compare(first.rows, [one.rows for one in found])
        if found and compares:
            check_halves(first.loss, *(one.loss for one in found), tolerance=self._tolerance)

    def _fetched(self, numbers: np.ndarray) -> Batch:
        batch = Fetching(self._samples, seed=self._recipe.seed).__getitems__(numbers)
        if isinstance(batch, Failure):
            raise DataError(batch.text)
        return batch

    def _ready(self, fetched: Batch) -> Batch:
        device = self._runtime.device
        copied: Batch = {name: it.to(device) if isinstance(it, Tensor) else it for name, it in self._copied(fetched).items()}
        draw = Draws(self._recipe.seed, copied["samples"], copied["numbers"])
        return self._copied(self._task.preprocess(copied, draw, form=self._form))  # whose memory it may use again

    def _copied(self, batch: Batch) -> Batch:
        return {name: it.clone() if isinstance(it, Tensor) else it for name, it in batch.items()}

    def _compare_fields(self, whole: Batch, other: Batch, rows: slice, *, again: bool) -> None:
        size, of_other = len(whole["samples"]), len(other["samples"])
        for name, value in whole.items():
            theirs = other.get(name)
            if name == "samples" or not (isinstance(value, Tensor) and isinstance(theirs, Tensor)):
                continue
            if value.ndim == 0 or theirs.ndim == 0 or (len(value), len(theirs)) != (size, of_other):
                continue  # no row for each sample
            for number, mine, its in zip(whole["samples"][rows].tolist(), value[rows], theirs, strict=True):
                if not are_same(mine.detach(), its.detach(), _SAME if again else _ROUNDING):
                    said = f"{name} of sample {number} changes when the same process makes "
                    said += "the same batch ready again" if again else "half of the batch ready"
                    why = "global random state, its own generator, earlier calls" if again else "the other samples of its batch"
                    raise Broken(READY, f"{said}: `preprocess` depends on something other than its arguments ({why}). {DRAW}")

    def _pass(self, batch: Batch) -> _Pass:
        torch.manual_seed(0)
        device, draws = self._runtime.device, set()
        states = [_generators(device)]

        def drawn_by(who: str) -> None:
            states.append(_generators(device))
            if not all(map(torch.equal, states[-2], states[-1])):
                draws.add(who)

        with self._dropout.counted() as rows, calls_of(self._model, drawn_by) as calls, self._autocast:
            loss = self._task.loss(self._model, batch)
            drawn_by("loss")
        leaves = _leaves(loss.mean)
        return _Pass(Loss(loss.mean.detach(), loss.count), rows, leaves, calls, draws)

    def _check_leaves(self, first: _Pass, again: _Pass) -> None:
        """What is new in each pass, such as inputs that the loss is differentiated by, is no weight."""
        ours = {id(parameter) for parameter in self._model.parameters()}
        found = [it for key, it in first.leaves.items() if key not in ours and again.leaves.get(key) is it]
        if found:
            names = {id(it): name for name, it in _kept(self._task).items()}
            shown = [f"{names.get(id(it), 'a tensor of a global variable or another object')} {list(it.shape)}" for it in found]
            raise Broken(WEIGHTS, _of_weights(shown))

    def _check_state(self, buffers: Mapping[str, Tensor], first: Loss, second: Loss) -> None:
        changed = [
            name
            for name, buffer in self._model.named_buffers()
            if name in buffers and not are_same(buffers[name], buffer, 0.0 if buffer.is_cpu else _EXACT)
        ]
        if changed:
            raise Broken(
                LOSS,
                f"the model changes its buffer{'s' if len(changed) > 1 else ''} {_listed(changed)} in each forward pass. Each "
                "process has passes over other samples, and each its own buffers, so the run depends on the number of "
                "processes. Let `forward` change nothing that the next pass reads",
            )
        if self._far(float(first.mean), float(second.mean)):
            said = f"the loss of the same batch is {float(first.mean):.7g}, and the second time {float(second.mean):.7g}"
            raise Broken(LOSS, f"{said}: `loss` or the model draws random numbers, or keeps state between passes. {DRAW}")

    def _check_count(self, batch: Batch, loss: Loss) -> None:
        """Compare with what the gradient is weighed by (`app.feed`)."""
        if own_part(self._samples, "count") is not None:
            weight = float(np.sum(self._samples.count(batch["numbers"] % len(self._samples))))
        else:
            weight = float(self._task.count(batch)) if overrides(self._task, "count") else float(len(batch["samples"]))
        if self._far(float(loss.count), weight):
            said = f"Loss.count of {len(batch['samples'])} samples is {float(loss.count):g}"
            raise Broken(COUNT, f"{said}, and their gradient is weighed as that of a mean over {weight:g}. {COUNT_RULE}")

    def _far(self, one: float, other: float) -> bool:
        return _far(one, other, tolerance=self._tolerance)


def check_halves(whole: Loss, *parts: Loss, tolerance: float = _EXACT) -> None:
    """Raise Broken if a batch's loss is not that of its parts together."""
    counts, count = [float(part.count) for part in parts], float(whole.count)
    if _far(count, sum(counts), tolerance=tolerance):
        said = f"Loss.count of a batch is {count:g}, and those of its halves add up to {sum(counts):g}"
        raise Broken(COUNT, f"{said}: it must be what the mean is over, such as a number of samples or tokens")
    if any(0 < counted < 1 for counted in counts):
        return  # of weights, say: Loss.of divides by 1 at least, and a pass of the run counts more than these few samples
    means, mean = [float(part.mean) for part in parts], float(whole.mean)
    if any(counted == 0 and not np.isfinite(one) for one, counted in zip(means, counts, strict=True)):
        raise Broken(LOSS, "the loss of samples that count nothing is not finite: return Loss.of(sum, count)")
    together = sum(one * counted for one, counted in zip(means, counts, strict=True)) / max(count, 1)
    if not _far(mean, together, size=max(map(abs, means)), tolerance=tolerance):
        return
    said = f"the loss of a batch is {mean:.7g}, and the mean of its halves, weighed by Loss.count, {together:.7g}"
    room = tolerance * max(map(abs, means))
    is_between = min(means) - room <= mean <= max(means) + room
    if not _far(mean, sum(means), tolerance=tolerance):
        why = f"the mean is a sum: return Loss.of(sum, count), of the sum of all losses and of how many they are ({count:g})"
    elif is_between and len(set(counts)) > 1:
        why = (
            f"Loss.mean is not the mean over what Loss.count says ({count:g}): it is a mean of means, or a mean over something "
            "else. Return Loss.of(sum, count), of the sum of all losses and of how many they are"
        )
    else:
        why = (
            "the loss of a sample depends on other samples of its pass (beyond its `group_size`), and those change with the "
            "number of processes. A loss over the batch, such as a contrastive one, cannot give the same run"
        )
        if is_between:
            why += f". Or Loss.mean is a mean over something else than {count:g} things: return Loss.of(sum, count)"
    raise Broken(LOSS, f"{said}: {why}")


def _far(one: float, other: float, *, tolerance: float, size: float = 0.0) -> bool:
    """What is not finite is for others to tell."""
    return abs(one - other) > tolerance * max(abs(one), abs(other), size, _NOTHING)


@contextmanager
def calls_of(model: nn.Module, drawn_by: Callable[[str], None]) -> Iterator[list[str]]:
    """Return the block in which calls of the model are noted by "", and those of its parts past it by their names.

    `drawn_by` is called where the "loss" calls the model, and where the "model" returns.
    """
    noted: list[str] = []
    inside: list[nn.Module] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: None if inside else noted.append(name)

    def enter(*_: Any) -> None:
        inside.append(model)
        drawn_by("loss")

    def leave(*_: Any) -> None:
        inside.clear()
        drawn_by("model")

    hooks = [
        part.register_forward_pre_hook(note(name))
        for name, part in model.named_modules()
        if not name or next(part.parameters(), None) is not None
    ]
    hooks += [model.register_forward_pre_hook(enter), model.register_forward_hook(leave)]
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _kept_states(model: nn.Module, device: torch.device, *, home: torch.device) -> Iterator[None]:
    """Put buffers, modes and random states back after the block, and the model to the device where it was."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    modes = [(module, module.training) for module in model.modules()]
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (the generators that tasks may draw from)
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        model.to(home)
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffer.shape == buffers[name].shape:
                    buffer.copy_(buffers[name])


def _generators(device: torch.device) -> list[Tensor]:
    """The states of torch's generators that a pass may draw from."""
    host = torch.get_rng_state()
    return [host] if device.type == "cpu" else [host, torch.get_device_module(device).get_rng_state(device)]


def _leaves(loss: Tensor) -> dict[int, Tensor]:
    """The tensors in which the loss's graph ends, by `id`."""
    found: dict[int, Tensor] = {}
    ahead: list[Any] = [loss.grad_fn]
    seen = set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found[id(leaf)] = leaf
        ahead += [before for before, _ in node.next_functions]
    return found


def _kept(task: Any) -> dict[str, Tensor]:
    """What can be trained and is an attribute of the user's task, or in modules, lists and dicts that are, by name."""
    of_user = task if task.of_user is None else task.of_user
    found: dict[str, Tensor] = {}

    def look(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, nn.Module):
            found.update({f"{name}.{key}": parameter for key, parameter in value.named_parameters()})
        elif isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_ITEMS:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                look(f"{name}[{key!r}]", item)

    for name, value in vars(of_user).items():
        look(f"{type(of_user).__name__}.{name}", value)
    return {name: it for name, it in found.items() if it.requires_grad}


def _of_weights(found: Sequence[str]) -> str:
    is_, it = ("is a weight", "it") if len(found) == 1 else ("are weights", "them")
    return (
        f"{_listed(found)} {is_} outside the model: no optimizer trains {it}, each process has its own, and no checkpoint "
        f"has {it}. Put {it} into the module that model() returns, or freeze {it} with requires_grad_(False)"
    )


def _of_calls(called: Sequence[str]) -> str:
    parts = _listed(list(dict.fromkeys(filter(None, called))))
    what = f"calls {parts} of the model directly" if parts else f"calls the model {len(called)} times"
    return (
        f"`loss` {what}: it must call model(...) exactly once, and none of its parts. Outside that call FSDP2 and ZeRO "
        "have only shards of the weights, and DDP sees no other call. Do everything that needs weights in `forward`."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")


def _text(recipe: Recipe, rule: str, text: str) -> str:
    return f"{task_file.name_of(recipe.task)} breaks a rule ({rule}): {text}"
