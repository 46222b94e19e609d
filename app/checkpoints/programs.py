"""A trained model as one file that needs none of our code: a program of `torch.export`, or ONNX.

    model.pt2       torch.export.load("model.pt2").module()(inputs)
    model.onnx      onnxruntime.InferenceSession("model.onnx").run(None, {"inputs": inputs})

The number of samples is free. Each file is read again and run on batches of two sizes; unless its outputs are the model's, no
file is written.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from app.data.samples import Batch
from app.errors import RunFolderError, SamerunError
from app.runs.run_folder import PROGRAMS
from app.task import Form, Task, two_samples

_TOLERANCE = {"torch": 1e-6, "onnx": 1e-4}
"""Largest allowed difference of outputs from the model's, as a share of its largest output."""
_SIZES = (1, 5)
"""Samples in the batches that are compared."""
_ONNX_BYTES = 2 * 10**9
"""Limit of one ONNX file (protobuf's)."""


@dataclass(frozen=True)
class Call:
    """The arguments with which a task calls its model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in order."""
        return _tensors((self.args, self.kwargs))

    def of_size(self, size: int) -> Call:
        """Return the call for `size` samples: random real numbers, and the integers of the first sample."""
        generator = torch.Generator().manual_seed(size)

        def made(tensor: Tensor) -> Tensor:
            shape = (size, *tensor.shape[1:])
            if tensor.is_floating_point():
                return torch.randn(shape, generator=generator).to(tensor.dtype)
            return tensor[:1].expand(shape).clone()

        return Call(*pytree.tree_map_only(Tensor, made, (self.args, self.kwargs)))


@dataclass(frozen=True)
class Written:
    """A program that was written and compared with the model."""

    to: str
    inputs: tuple[str, ...]
    difference: float
    """The largest difference of an output from the model's, as a share of its largest."""

    def __str__(self) -> str:
        sizes = " and ".join(map(str, _SIZES))
        return (
            f"its inputs are {', '.join(self.inputs)}. For {sizes} samples its outputs differ from the "
            f"model's by at most {self.difference:.1e} of the largest ({_TOLERANCE[self.to]:g} is allowed)"
        )

    @property
    def use(self) -> str:
        """How to load it, as Markdown."""
        file = f"THIS_FOLDER/{PROGRAMS[self.to]}"
        if self.to == "torch":
            load, takes = f'import torch\n\nprogram = torch.export.load("{file}").module()', "tensors"
            call = f"program({', '.join(self.inputs)})"
        else:
            load, takes = f'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{file}")', "NumPy arrays"
            named = ", ".join(f'"{name}": {name}' for name in self.inputs)
            call = f"session.run(None, {{{named}}})"
        about = f"`{PROGRAMS[self.to]}` needs no Samerun. It takes {takes}, for any number of samples:"
        return f"{about}\n\n```python\n{load}\noutputs = {call}\n```\n"


def write(task: Task, model: nn.Module, facts: Mapping[str, Any], path: Path, *, to: str) -> Written:
    """Write the model (evaluation mode, CPU) to `path`.

    Raises RunFolderError if it cannot be exported, or if the program's outputs are not the model's; no file is left then.
    """
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None] if to == "onnx" else []
    if missing:
        raise RunFolderError(f'--to onnx needs {" and ".join(missing)}: pip install "samerun[onnx]"')
    call, inputs = _model_call(task, model, facts)
    temporary = path.with_name(f".{path.name}")
    try:
        with torch.no_grad():
            run = (_write_torch if to == "torch" else _write_onnx)(model, call, inputs, temporary)
            difference = max(_compare(model, run, call.of_size(size), to=to) for size in _SIZES)
        temporary.replace(path)
    except SamerunError:
        raise
    except Exception as error:  # what exporters raise has no common base
        raise RunFolderError(f"the model cannot be exported to {to}: {_first_lines(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return Written(to, inputs, difference)


def _model_call(task: Task, model: nn.Module, facts: Mapping[str, Any]) -> tuple[Call, tuple[str, ...]]:
    """Return the task's call of its model for its example batch, or else for two training samples, and the inputs' names.

    An input has the name of its field in the batch, or its number. Raises RunFolderError if the task's loss fails for both.
    """
    form = Form(next(model.parameters()).dtype)
    try:
        example = task.example(facts, form)
        batch = pytree.tree_map_only(Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), example)
        call = _called(task, model, batch)
    except Exception:  # NeedsData, or zeros are not a batch of the task: samples of length 0, a class that does not exist
        try:
            samples = task.samples("train")
            assert samples is not None  # the model was trained on them
            batch = two_samples(task, samples, form)
            call = _called(task, model, batch)
        except SamerunError:
            raise
        except Exception as error:  # the task's own code, which may raise anything
            raise RunFolderError(
                f"the model cannot be exported: the task's loss fails for two training samples: {_first_lines(error)}"
            ) from error
    size = len(batch["samples"])
    if not call.tensors or any(tensor.ndim == 0 or len(tensor) != size for tensor in call.tensors):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in call.tensors) or "none"
        raise RunFolderError(
            f"the model is called with tensors of the shapes {shapes} for {size} samples. "
            "Only a model whose inputs are all [B, ...] can be exported for any batch size: leave --to out"
        )
    fields = {id(field): name for name, field in batch.items()}
    return call, tuple(fields.get(id(tensor), f"input_{at}") for at, tensor in enumerate(call.tensors))


def _called(task: Task, model: nn.Module, batch: Batch) -> Call:
    """Return the arguments with which the task's loss calls the model for the batch."""
    calls: list[Call] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(Call(args, kwargs))
        return model(*args, **kwargs)

    called.training = False  # type: ignore[attr-defined]  # a user's loss may ask
    with torch.no_grad():
        task.loss(called, batch)
    return calls[0]


def _write_torch(model: nn.Module, call: Call, _inputs: tuple[str, ...], path: Path) -> Callable[[Call], Any]:
    torch.export.save(_exported(model, call), path)
    with path.open("rb") as file:
        program = torch.export.load(file).module()
    return lambda other: program(*other.args, **other.kwargs)


def _write_onnx(model: nn.Module, call: Call, inputs: tuple[str, ...], path: Path) -> Callable[[Call], Any]:
    size_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    if size_bytes > _ONNX_BYTES:
        raise RunFolderError(f"the model has {size_bytes / 1e9:.1f} GB, and an ONNX file holds at most 2: use --to torch")
    import onnxruntime

    program = torch.onnx.export(_exported(model, call), dynamo=True, input_names=list(inputs), verbose=False)
    assert program is not None
    program.save(path, external_data=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    used = {it.name for it in session.get_inputs()}

    def run(other: Call) -> Any:
        arrays = {name: it.numpy() for name, it in zip(inputs, other.tensors, strict=True) if name in used}
        return [torch.from_numpy(it) for it in session.run(None, arrays)]

    return run


def _exported(model: nn.Module, call: Call) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    args, kwargs = pytree.tree_map(lambda it: {0: batch} if isinstance(it, Tensor) else None, (call.args, call.kwargs))
    # torch takes the shapes of all arguments in their order, or by name if some are passed by name.
    shapes = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments) if kwargs else args
    two = call.of_size(2)
    return torch.export.export(copy.deepcopy(model), two.args, two.kwargs, dynamic_shapes=shapes, strict=False)


def _compare(model: nn.Module, run: Callable[[Call], Any], call: Call, *, to: str) -> float:
    """Return the program's largest difference from the model's outputs, as a share of its largest. Raises RunFolderError."""
    expected, found = _tensors(model(*call.args, **call.kwargs)), _tensors(run(call))
    size = len(call.tensors[0])
    if [it.shape for it in expected] != [it.shape for it in found]:
        shapes = " and ".join(str([list(it.shape) for it in part]) for part in (expected, found))
        raise RunFolderError(f"exported to {to}, the model returns other shapes for {size} samples: {shapes}")
    worst = 0.0
    for ours, theirs in zip(expected, found, strict=True):
        scale = ours.double().abs().max().clamp(min=1e-12)
        worst = max(worst, ((theirs.double() - ours.double()).abs().max() / scale).nan_to_num(nan=torch.inf).item())
    if worst > _TOLERANCE[to]:
        raise RunFolderError(
            f"exported to {to}, the model computes other values: for {size} samples its outputs differ by "
            f"{worst:.1e} of the largest, and {_TOLERANCE[to]:g} is allowed. Nothing was written"
        )
    return worst


def _tensors(values: Any) -> list[Tensor]:
    return [it for it in pytree.tree_leaves(values) if isinstance(it, Tensor)]


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:400]}"
