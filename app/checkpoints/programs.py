"""A trained model as one file that needs none of our code: a program of `torch.export`, or ONNX.

    model.pt2       torch.export.load("model.pt2").module()(inputs)
    model.onnx      onnxruntime.InferenceSession("model.onnx").run(None, {"inputs": inputs})

The number of samples is free. Each file is read again and run on batches of two sizes. Its outputs are the model's, or there
is no file.
"""

from __future__ import annotations

import copy
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
"""How far outputs may be from the model's, as a share of its largest."""
_SIZES = (1, 5)
"""Samples in the batches that are tried."""
_ONNX_BYTES = 2 * 10**9
"""The most that one file of ONNX holds (protobuf's limit)."""


@dataclass(frozen=True)
class Call:
    """How a task calls its model for a batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    """What the batch calls each tensor in them, or its place."""

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in order."""
        return [it for it in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(it, Tensor)]

    def of_size(self, size: int) -> Call:
        """Return the call for so many samples: random real numbers, and the whole numbers that are there."""
        generator = torch.Generator().manual_seed(size)

        def made(tensor: Tensor) -> Tensor:
            shape = (size, *tensor.shape[1:])
            if tensor.is_floating_point():
                return torch.randn(shape, generator=generator).to(tensor.dtype)
            return tensor[:1].expand(shape).clone()

        args, kwargs = pytree.tree_map_only(Tensor, made, (self.args, self.kwargs))
        return Call(args, kwargs, self.names)


@dataclass(frozen=True)
class Written:
    """A program that was written, and tried."""

    to: str
    inputs: tuple[str, ...]
    furthest: float
    """The largest difference of an output from the model's, as a share of the largest output."""

    def __str__(self) -> str:
        sizes = " and ".join(map(str, _SIZES))
        return (
            f"its inputs are {', '.join(self.inputs)}. For {sizes} samples its outputs differ from the "
            f"model's by at most {self.furthest:.1e} of the largest ({_TOLERANCE[self.to]:g} is allowed)"
        )

    @property
    def use(self) -> str:
        """How it is loaded, as Markdown."""
        file = f"THIS_FOLDER/{PROGRAMS[self.to]}"
        if self.to == "torch":
            load = f'import torch\n\nprogram = torch.export.load("{file}").module()'
            takes, call = "tensors", f"program({', '.join(self.inputs)})"
        else:
            load = f'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{file}")'
            named = ", ".join(f'"{name}": {name}' for name in self.inputs)
            takes, call = "NumPy arrays", f"session.run(None, {{{named}}})"
        about = f"`{PROGRAMS[self.to]}` needs no Samerun. It takes {takes}, for any number of samples:"
        return f"{about}\n\n```python\n{load}\noutputs = {call}\n```\n"


def write(task: Task, model: nn.Module, facts: Mapping[str, Any], path: Path, *, to: str) -> Written:
    """Write the model (evaluation mode, CPU) to `path`, which appears when it is right.

    Raises RunFolderError if it cannot be exported, or computes something else than the model; no file is left then.
    """
    _check_installed(to)
    dtype = next(model.parameters()).dtype
    call = call_of(task, model, facts, Form(dtype))
    temporary = path.with_name(f".{path.name}")
    try:
        with torch.no_grad():
            run = _WRITERS[to](model, call, temporary)
            furthest = max(_compare(model, run, call.of_size(size), to=to) for size in _SIZES)
        temporary.replace(path)
    except SamerunError:
        raise
    except Exception as error:  # what exporters raise has no common base
        raise RunFolderError(f"the model cannot be exported to {to}: {_first_lines(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return Written(to, call.names, furthest)


def call_of(task: Task, model: nn.Module, facts: Mapping[str, Any], form: Form) -> Call:
    """Return how the task calls its model for its example batch, or for two training samples, whose data is opened then.

    Raises RunFolderError if the task's loss fails for both.
    """
    try:
        example = task.example(facts, form)
        whole = pytree.tree_map_only(Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), example)
        args, kwargs = _called(task, model, whole)
    except Exception:  # NeedsData, or zeros are no batch of the task: samples of length 0, a class that is not there
        try:
            samples = task.samples("train")
            assert samples is not None  # the model was trained on them
            whole = two_samples(task, samples, form)
            args, kwargs = _called(task, model, whole)
        except SamerunError:
            raise
        except Exception as error:  # the task's own code, which may raise anything
            raise RunFolderError(
                f"the model cannot be exported: the task's loss fails for two training samples: {_first_lines(error)}"
            ) from error
    tensors = [it for it in pytree.tree_leaves((args, kwargs)) if isinstance(it, Tensor)]
    if not tensors or any(tensor.ndim == 0 or len(tensor) != len(whole["samples"]) for tensor in tensors):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "none"
        raise RunFolderError(
            f"the model is called with tensors of the shapes {shapes} for {len(whole['samples'])} samples. "
            "Only a model whose inputs are all [B, ...] can be exported for any batch size: leave --to out"
        )
    fields = {id(field): name for name, field in whole.items()}
    return Call(args, kwargs, tuple(fields.get(id(tensor), f"input_{at}") for at, tensor in enumerate(tensors)))


def _called(task: Task, model: nn.Module, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the task's loss gives the model for the batch."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return model(*args, **kwargs)

    called.training = False  # type: ignore[attr-defined]  # a user's loss may ask
    with torch.no_grad():
        task.loss(called, batch)
    return seen[0]


def _torch(model: nn.Module, call: Call, path: Path) -> Callable[[Call], Any]:
    torch.export.save(_exported(model, call), path)
    with path.open("rb") as file:
        program = torch.export.load(file).module()
    return lambda other: program(*other.args, **other.kwargs)


def _onnx(model: nn.Module, call: Call, path: Path) -> Callable[[Call], Any]:
    size_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    if size_bytes > _ONNX_BYTES:
        raise RunFolderError(f"the model has {size_bytes / 1e9:.1f} GB, and an ONNX file holds at most 2: use --to torch")
    import onnxruntime

    made = torch.onnx.export(_exported(model, call), dynamo=True, input_names=list(call.names), verbose=False)
    assert made is not None
    made.save(path, external_data=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [it.name for it in session.get_inputs()]

    def run(other: Call) -> Any:
        given = dict(zip(call.names, other.tensors, strict=True))
        return [torch.from_numpy(it) for it in session.run(None, {name: given[name].numpy() for name in names})]

    return run


_WRITERS = {"torch": _torch, "onnx": _onnx}


def _exported(model: nn.Module, call: Call) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    shapes = pytree.tree_map(lambda it: {0: batch} if isinstance(it, Tensor) else None, (call.args, call.kwargs))
    given = call.of_size(2)
    by_name = _by_name(model, *shapes)
    return torch.export.export(copy.deepcopy(model), given.args, given.kwargs, dynamic_shapes=by_name, strict=False)


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dynamic shapes as torch.export takes them: of all arguments in their order, or by name if some have one."""
    if not kwargs:
        return args
    import inspect

    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    return dict(bound.arguments)


def _compare(model: nn.Module, run: Callable[[Call], Any], call: Call, *, to: str) -> float:
    """Return how far the program's outputs are from the model's, as a share of its largest. Raises RunFolderError."""
    expected, found = (
        [it for it in pytree.tree_leaves(outputs) if isinstance(it, Tensor)]
        for outputs in (model(*call.args, **call.kwargs), run(call))
    )
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


def _check_installed(to: str) -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None] if to == "onnx" else []
    if missing:
        raise RunFolderError(f'--to onnx needs {" and ".join(missing)}: pip install "samerun[onnx]"')


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:400]}"
