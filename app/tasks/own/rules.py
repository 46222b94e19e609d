"""The rules of a task that one process can check by itself, at every start: on a few samples, before anything is prepared.

The loss of a small batch and of its halves is computed in training mode. There dropout is off and batch normalization uses what
it has stored, so that a difference is the loss's own. Buffers and the model's device are restored afterwards. A pass costs what
a training pass over four samples does, without the backward pass.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import app
from app.data.draws import Draws
from app.data.loader import Fetching, batches_of
from app.data.samples import Batch
from app.distributed import numerics
from app.distributed.model_preparation import batchnorms
from app.distributed.runtime import Runtime
from app.distributed.sample_dropout import PassDraws
from app.environment.topology import listed
from app.errors import TrainingError
from app.init.model_tensors import is_sharded
from app.optim import parameter_groups
from app.recipe.schema import Recipe
from app.task import Form, Loss, Task
from app.tasks.own.own_samples import are_same, evenly, first_difference

_DRAW = "Take random numbers from `rng`, and nothing from torch's, NumPy's or Python's generators or from one of your own."
_EXACT, _ROUGH = 1e-5, 1e-2
"""Largest relative difference of two losses that are to be the same: float32 rounds the mean of some by less than 1e-6, bf16,
fp16 and TF32 by less than 1e-3, and a broken rule moves it by far more."""
_NOTHING = 1e-2
"""A loss of this or less is compared as if it were so large: what is 0 but for rounding differs each time."""
_SAME, _ROUNDING = 1e-6, 1e-4
"""Tolerances of a sample's field, as a share of its largest number: computed again, and in a batch of another size."""
_FEW = 2
"""Samples of a half, if groups and the sizes of batches allow it."""
_COPY_BYTES = 1e8
"""A smaller model is built whole where each rank has only shards of it: its weights are drawn in half a second."""


def _broken(rule: str, text: str) -> TrainingError:
    return TrainingError(f"the task breaks a rule ({rule}): {text}")


@dataclass
class _Pass:
    """Observations of a forward pass."""

    loss: Loss
    rows: Mapping[str, list[int]]
    """First dimensions of the inputs of dropout layers (`PassDraws.counted`)."""
    leaves: Mapping[int, Tensor]
    """Trainable tensors that the loss depends on, by `id`."""
    past: Sequence[str]
    """Parts of the model that were called outside its own call, by their names."""
    draws: bool
    """True if torch's generators were used."""


def has_room(runtime: Runtime, model: nn.Module, *, divided: bool) -> bool:
    """Return True if the rules can be checked: each rank has the whole model, or it is small, and it fits on the device.

    `divided`: the ranks hold, or will hold, shards; then a small model is built once more.
    """
    size = sum(it.numel() * it.element_size() for it in model.parameters())
    if divided:
        return size <= _COPY_BYTES
    return runtime.device.type != "cuda" or 2 * size <= torch.cuda.mem_get_info(runtime.device)[0]


def check(
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
    device, plan, each = runtime.device, runtime.plan, runtime.launched.processes_per_rank
    home, dtype = (first := next(model.parameters())).device, first.dtype
    size, half = _sizes(recipe, plan.micro_batch)
    numbers = np.resize(evenly(len(samples), size), size)
    halves = [numbers[:half], numbers[half:]] if half else []
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(runtime.launched.mixed_precision)
    # On GPUs there are layers that compute in half precision alone. On a CPU float32 is exact, and faster on many.
    on_gpu = device.type != "cpu"
    tolerance = _ROUGH if on_gpu and (precision is not None or recipe.train.tf32) else _EXACT
    autocast = torch.autocast(device.type, precision, enabled=precision is not None and on_gpu)
    # What a task has compiled would be compiled again for each size.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()

    def ready(numbers: np.ndarray) -> Batch:
        """Return the preprocessed batch of these samples, in memory of its own. The model is not prepared: nothing is cast."""
        (fetched,) = batches_of([Fetching(samples, seed=recipe.seed).__getitems__(numbers)])
        batch: Batch = {name: it.to(device) if isinstance(it, Tensor) else it for name, it in fetched.items()}
        draw = Draws(recipe.seed, batch["samples"], batch["numbers"])
        made = task.preprocess(batch, draw, form=Form(dtype, form.memory_format))
        return {name: it.clone() if isinstance(it, Tensor) else it for name, it in made.items()}

    def forward(numbers: np.ndarray) -> _Pass:
        batch = ready(numbers)
        with autocast:
            return _forward(task, model, batch, dropout)

    whole = ready(numbers)
    _compare_batches(whole, ready(numbers), 0, "the same batch ready again", _SAME)
    for place, part in enumerate(halves):
        _compare_batches(whole, ready(part), place * half, "half of the batch ready", _ROUNDING)
    original = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    parameter_groups.set_training(model.to(device), mode=True)
    stored = [layer.eval() for layer in batchnorms(model).values() if layer.training]
    with eager:
        first_pass = forward(numbers)
        if first_pass.past:
            parts = listed(list(dict.fromkeys(first_pass.past)), 4)
            raise _broken(
                "one call",
                f"`loss` calls {parts} of the model directly: it must call model(...) exactly once, and none of its parts. "
                "Outside that call FSDP2 and ZeRO have only shards of the weights, and DDP sees no other call. Do everything "
                "that needs weights in `forward`.",
            )
        fields = {name: it for name, it in whole.items() if isinstance(it, Tensor) and it.is_floating_point()}
        if first_pass.loss.mean.isnan() and (bad := [name for name, it in fields.items() if it.isnan().any()]):
            raise TrainingError(
                f"the first loss is nan, and so are numbers in {' and '.join(bad)} of its batch (samples "
                f"{listed(whole['samples'].tolist())}): correct the data, or replace what is missing in `preprocess`"
            )
        found = [forward(part) for part in reversed(halves)][::-1]
        before = found[0] if found else first_pass
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        again = forward(halves[0] if halves else numbers)
    _check_leaves(model, first_pass, again, vars(getattr(task, "of_user", task)))
    _check_state(model, buffers, before.loss, again.loss, tolerance=tolerance)
    if first_pass.draws:
        batch = ready(numbers)
        with eager, autocast, _FirstDraw(model, batch, dropout):
            _forward(task, model, batch, dropout)
    if first_pass.draws and plan.passes * each > 1:  # else a note reports it
        raise TrainingError(dropout.said_of_others(plan, parts=each))
    dropout.compare(first_pass.rows, [one.rows for one in found])
    # A batch normalization without running statistics uses the pass's own: a note reports it.
    if found and not first_pass.draws and all(layer.running_mean is not None for layer in stored):
        check_halves(first_pass.loss, *(one.loss for one in found), tolerance=tolerance)
    parameter_groups.set_training(model.to(home), mode=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in original and buffer.shape == original[name].shape:
                buffer.copy_(original[name])


def _sizes(recipe: Recipe, micro_batch: int) -> tuple[int, int]:
    """Return the samples of the batch that is tried, and of its halves; 0: all passes of the recipe have the same size."""
    together, of_step = int(recipe.sections.group_size), recipe.train.global_batch_size
    most = min(of_step, recipe.train.micro_batch_limit or of_step)
    few = together * max(1, _FEW // together) if micro_batch >= 2 * together else together
    half = min(few, most // 2 // together * together)
    return 2 * half or most, half


def _compare_batches(whole: Batch, other: Batch, first_row: int, what: str, rounding: float) -> None:
    """Raise TrainingError if a sample differs between another batch and the whole one, from `first_row` on."""
    by_sample = {name: it for name, it in whole.items() if isinstance(it, Tensor) and it.shape[:1] == whole["samples"].shape}
    if found := first_difference(by_sample, other, range(first_row, first_row + len(other["samples"])), rounding):
        name, row = found
        raise _broken(
            "ready",
            f"{name} of sample {int(whole['samples'][row])} changes when the same process makes {what}: `preprocess` depends "
            "on something other than its arguments, such as random state, earlier calls or the other samples of its batch. "
            f"{_DRAW}",
        )


def _forward(task: Task, model: nn.Module, batch: Batch, dropout: PassDraws) -> _Pass:
    """Compute the loss of a batch, and note what is called and drawn."""
    torch.manual_seed(0)
    past, inside = list[str](), list[bool]()

    def note(name: str) -> Any:
        return lambda *_: None if inside else past.append(name)

    hooks = [
        model.register_forward_pre_hook(lambda *_: inside.append(True)),
        model.register_forward_hook(lambda *_: inside.clear()),
        *(part.register_forward_pre_hook(note(name)) for name, part in model.named_modules() if name and [*part.parameters()]),
    ]
    before = _generators(batch)
    with dropout.counted() as rows:
        loss = task.loss(model, batch)
    for hook in hooks:
        hook.remove()
    draws = not all(map(torch.equal, before, _generators(batch)))
    return _Pass(Loss(loss.mean.detach(), loss.count), rows, _leaves(loss.mean), past, draws)


def _generators(batch: Batch) -> list[Tensor]:
    """Return the states of torch's generators that a pass over the batch may draw from."""
    device, host = batch["samples"].device, torch.get_rng_state()
    return [host] if device.type == "cpu" else [host, torch.get_device_module(device).get_rng_state(device)]


class _FirstDraw(TorchDispatchMode):
    """Finds the line and the layer in which a pass first draws from torch's generators, and reports them to `dropout`."""

    def __init__(self, model: nn.Module, batch: Batch, dropout: PassDraws) -> None:
        super().__init__()
        self._model, self._batch, self._dropout = model, batch, dropout

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation."""
        may_draw = torch.Tag.nondeterministic_seeded in func.tags and not self._dropout.drawn
        before = _generators(self._batch) if may_draw else []
        found = func(*args, **(kwargs or {}))
        if may_draw and not all(map(torch.equal, before, _generators(self._batch))):
            self._explain([frame for frame, _ in traceback.walk_stack(None)])
        return found

    def _explain(self, frames: Sequence[FrameType]) -> None:
        libraries = tuple(str(Path(str(it.__file__)).parent) for it in (torch, app))
        caller = next(frame for frame in frames if not frame.f_code.co_filename.startswith(libraries))
        file, line = caller.f_code.co_filename, caller.f_lineno
        self._dropout.drawn = f"`{linecache.getline(file, line).strip()}` in line {line} of {file}"
        if layer := numerics.layer_in(frames, self._model):
            name, module = layer
            self._dropout.drawn += f", in {name and 'the layer '}{name or 'the model'}, a {type(module).__name__}"
            of_model = getattr(getattr(module, "config", None), "__dict__", {})  # of transformers: other layers' dropout, too
            settings = {**{key: it for key, it in of_model.items() if "att" in key}, **vars(module)}.items()
            on = [f"{key} (now {it:g})" for key, it in settings if "drop" in key and isinstance(it, float) and it > 0]
            self._dropout.remedy = " and ".join(on)


def _leaves(loss: Tensor) -> dict[int, Tensor]:
    """Return the tensors in which the loss's graph ends, by `id`."""
    ahead, seen = [loss.grad_fn], set[Any]()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [before for before, _ in node.next_functions]
    leaves = [node.variable for node in seen if hasattr(node, "variable")]
    return {id(leaf): leaf for leaf in leaves}


def _check_leaves(model: nn.Module, first: _Pass, again: _Pass, attributes: Mapping[str, Any]) -> None:
    """Raise TrainingError for weights outside the model; `attributes` are the task's. What is new in each pass is none."""
    ours = {id(parameter) for parameter in model.parameters()}
    found = [it for key, it in first.leaves.items() if key not in ours and again.leaves.get(key) is it]
    if found:
        shapes = listed(sorted(list(it.shape) for it in found), 4)
        tensors = {key: it.parameters() if isinstance(it, nn.Module) else (it,) for key, it in attributes.items()}
        names = [f"self.{key}" for key, own in tensors.items() if any(it is other for it in own for other in found)]
        shapes += f" ({listed(names, 4)})" * bool(names)
        raise _broken(
            "weights",
            f"the loss depends on trainable tensors outside the model, of the shapes {shapes}: no optimizer trains them, each "
            "process has its own, and no checkpoint has them. Put them into the module that model() returns, or freeze them "
            "with requires_grad_(False)",
        )


def _check_state(model: nn.Module, buffers: Mapping[str, Tensor], first: Loss, second: Loss, *, tolerance: float) -> None:
    """Raise TrainingError if a second pass over the same batch changed buffers, or its loss differs."""
    changed = [
        name
        for name, buffer in model.named_buffers()
        if name in buffers and not are_same(buffers[name], buffer, 0.0 if buffer.is_cpu else _EXACT)
    ]
    if changed:
        raise _broken(
            "loss",
            f"the model changes its buffers ({listed(changed, 4)}) in each forward pass. Each process has passes over other "
            "samples, and each its own buffers, so the run depends on the number of processes. Let `forward` change nothing "
            "that the next pass reads",
        )
    if _far(float(first.mean), float(second.mean), tolerance=tolerance):
        raise _broken(
            "loss",
            f"the loss of the same batch is {float(first.mean):.7g}, and the second time {float(second.mean):.7g}: `loss` or "
            f"the model draws random numbers, or keeps state between passes. {_DRAW}",
        )


def check_halves(whole: Loss, *halves: Loss, tolerance: float = _EXACT) -> None:
    """Raise TrainingError if a batch's loss differs from its halves' together."""
    counts, count = [float(half.count) for half in halves], float(whole.count)
    if _far(count, sum(counts), tolerance=tolerance):
        raise _broken(
            "count",
            f"Loss.count of a batch is {count:g}, and those of its halves add up to {sum(counts):g}: it must be what the mean "
            "is over, such as a number of samples or tokens",
        )
    if any(0 < counted < 1 for counted in counts):
        return  # of weights, say: Loss.of divides by 1 at least, and a pass of the run counts more than these few samples
    means, mean = [float(half.mean) for half in halves], float(whole.mean)
    together = sum(one * counted for one, counted in zip(means, counts, strict=True)) / max(count, 1)
    if _far(mean, together, size=max(map(abs, means)), tolerance=tolerance):
        raise _broken(
            "loss",
            f"the loss of a batch is {mean:.7g}, and the mean of its halves, weighed by Loss.count, {together:.7g}. Either "
            f"Loss.mean is a sum, or no mean over {count:g} things, as Loss.count says: return Loss.of(sum, count), with the "
            "sum of all losses and their number. Or the loss of a sample depends on other samples of its pass (beyond "
            "its `group_size`), and those change with the number of processes. A loss over the batch, such as a contrastive "
            "one, cannot give the same run",
        )


def _far(one: float, other: float, *, tolerance: float, size: float = 0.0) -> bool:
    """Return True if two numbers differ. What is not finite is reported elsewhere."""
    return abs(one - other) > tolerance * max(abs(one), abs(other), size, _NOTHING)
