"""A trained model as one file that needs none of our code: a program of `torch.export`, or ONNX.

    model.pt2       torch.export.load("model.pt2").module()(inputs)
    model.onnx      onnxruntime.InferenceSession("model.onnx").run(None, {"inputs": inputs})

The number of samples is free. Each file is read again and run on batches of two sizes; unless its outputs are the model's, no
file is written.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from app.errors import RunFolderError, SamerunError
from app.runs.run_folder import PROGRAMS
from app.task import Form, Task, two_samples

_TOLERANCE = {"torch": 1e-6, "onnx": 1e-4}
"""Largest allowed difference of outputs from the model's, as a share of its largest output."""
_SIZES = (1, 5)
"""Samples in the batches that are compared."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments with which a task calls its model, by position and by name."""


def write(task: Task, model: nn.Module, facts: Mapping[str, Any], path: Path, *, to: str) -> tuple[str, str]:
    """Write the model (evaluation mode, CPU) to `path`, and return a sentence about its inputs, and its use, as Markdown.

    Raises RunFolderError if it cannot be exported, or if the program's outputs are not the model's; no file is left then.
    """
    temporary = path.with_name(f".{path.name}")
    try:
        with torch.no_grad():
            call, inputs = _model_call(task, model, facts)
            run = (_write_torch if to == "torch" else _write_onnx)(model, call, inputs, temporary)
            difference = max(_difference(model, run, _resized(call, size)) for size in _SIZES)
        if difference > _TOLERANCE[to]:
            raise RunFolderError(
                f"exported to {to}, the model computes other values: for {' or '.join(map(str, _SIZES))} samples its outputs "
                f"differ by {difference:.1e} of the largest, and {_TOLERANCE[to]:g} is allowed. Nothing was written"
            )
        temporary.replace(path)
    except SamerunError:
        raise
    except Exception as error:  # neither what exporters nor what a task's code raises has a common base
        needed = ': pip install -e ".[onnx]"' if to == "onnx" and isinstance(error, ImportError) else ""
        lines = " ".join(str(error).split("\n")[:3])[:400]
        raise RunFolderError(f"the model cannot be exported to {to}: {type(error).__name__}: {lines}{needed}") from error
    finally:
        temporary.unlink(missing_ok=True)
    sentence = (
        f"its inputs are {', '.join(inputs)}. For {' and '.join(map(str, _SIZES))} samples its outputs differ from the "
        f"model's by at most {difference:.1e} of the largest ({_TOLERANCE[to]:g} is allowed)"
    )
    return sentence, _usage(to, inputs)


def _usage(to: str, inputs: Sequence[str]) -> str:
    file = f"THIS_FOLDER/{PROGRAMS[to]}"
    if to == "torch":
        load, takes = f'import torch\n\nprogram = torch.export.load("{file}").module()', "tensors"
        call = f"program({', '.join(inputs)})"
    else:
        load, takes = f'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{file}")', "NumPy arrays"
        named = ", ".join(f'"{name}": {name}' for name in inputs)
        call = f"session.run(None, {{{named}}})"
    about = f"`{PROGRAMS[to]}` needs no Samerun. It takes {takes}, for any number of samples:"
    return f"{about}\n\n```python\n{load}\noutputs = {call}\n```\n"


def _model_call(task: Task, model: nn.Module, facts: Mapping[str, Any]) -> tuple[Call, tuple[str, ...]]:
    """Return the task's call of its model for its example batch, or else for two training samples, and the inputs' names.

    An input has the name of its field in the batch, or its number. Raises what the task's loss raises for training samples.
    """
    form = Form(next(model.parameters()).dtype)
    calls: list[Call] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return model(*args, **kwargs)

    called.training = False  # type: ignore[attr-defined]  # a user's loss may ask
    try:
        example = task.example(facts, form)
        batch = pytree.tree_map_only(Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), example)
        task.loss(called, batch)
    except Exception:  # NeedsData, or zeros are not a batch of the task: samples of length 0, a class that does not exist
        calls.clear()
        samples = task.samples("train")
        assert samples is not None  # the model was trained on them
        batch = two_samples(task, samples, form)
        task.loss(called, batch)
    size, tensors = len(batch["samples"]), _tensors(calls[0])
    if not tensors or any(tensor.ndim == 0 or len(tensor) != size for tensor in tensors):
        raise RunFolderError(
            f"the model is called with tensors of the shapes {[list(tensor.shape) for tensor in tensors]} for {size} samples. "
            "Only a model whose inputs are all [B, ...] can be exported for any batch size: leave --to out"
        )
    fields = {id(field): name for name, field in batch.items()}
    return calls[0], tuple(fields.get(id(tensor), f"input_{at}") for at, tensor in enumerate(tensors))


def _resized(call: Call, size: int) -> Call:
    """Return the call for `size` samples: random real numbers, and the integers of the first sample."""
    generator = torch.Generator().manual_seed(size)

    def resized(tensor: Tensor) -> Tensor:
        shape = (size, *tensor.shape[1:])
        if tensor.is_floating_point():
            return torch.randn(shape, generator=generator).to(tensor.dtype)
        return tensor[:1].expand(shape).clone()

    found: Call = pytree.tree_map_only(Tensor, resized, call)
    return found


def _write_torch(model: nn.Module, call: Call, _inputs: tuple[str, ...], path: Path) -> Callable[[Call], Any]:
    torch.export.save(_exported(model, call), path)
    with path.open("rb") as file:
        program = torch.export.load(file).module()
    return lambda other: program(*other[0], **other[1])


def _write_onnx(model: nn.Module, call: Call, inputs: tuple[str, ...], path: Path) -> Callable[[Call], Any]:
    import onnxruntime

    program = torch.onnx.export(_exported(model, call), dynamo=True, input_names=list(inputs), verbose=False)
    assert program is not None
    program.save(path, external_data=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    used = {it.name for it in session.get_inputs()}

    def run(other: Call) -> Any:
        arrays = {name: it.numpy() for name, it in zip(inputs, _tensors(other), strict=True) if name in used}
        return [torch.from_numpy(it) for it in session.run(None, arrays)]

    return run


def _exported(model: nn.Module, call: Call) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    args, kwargs = pytree.tree_map(lambda it: {0: batch} if isinstance(it, Tensor) else None, call)
    # torch takes the shapes of all arguments in their order, or by name if some are passed by name.
    shapes = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments) if kwargs else args
    args, kwargs = _resized(call, 2)
    return torch.export.export(copy.deepcopy(model), args, kwargs, dynamic_shapes=shapes, strict=False)


def _difference(model: nn.Module, run: Callable[[Call], Any], call: Call) -> float:
    """Return the program's largest difference from the model's outputs, as a share of its largest; inf for other shapes."""
    expected, found = _tensors(model(*call[0], **call[1])), _tensors(run(call))
    if [it.shape for it in expected] != [it.shape for it in found]:
        return torch.inf
    worst = 0.0
    for ours, theirs in zip(expected, found, strict=True):
        scale = ours.double().abs().max().clamp(min=1e-12)
        worst = max(worst, ((theirs.double() - ours.double()).abs().max() / scale).nan_to_num(nan=torch.inf).item())
    return worst


def _tensors(values: Any) -> list[Tensor]:
    return [it for it in pytree.tree_leaves(values) if isinstance(it, Tensor)]
