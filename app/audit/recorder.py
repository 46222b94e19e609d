"""Run a script unchanged and record what passes through Accelerate: `python -m app.audit.recorder ORDERS SCRIPT [arguments]`.

`samerun audit` starts this in child processes, and nothing else does. Public methods of Accelerate, DataLoaders and optimizers
are wrapped before the script begins; each rank writes its events as JSON lines. Loaders read without workers, which changes no
sample. ORDERS is a JSON object, all but the first of whose keys are optional:

- `record`: beginning of the names of the records; `module`: the script is the name of a module;
- `divide`: factor by which batch sizes are divided, by the place where the script builds a DataLoader;
- `accumulation`: factor of gradient_accumulation_steps; `rates`: learning rates of the parameter groups at each step;
- `fixed_order`: RandomSampler permutes by the number of the epoch, not by the state of torch's generator;
- `resume`: checkpoint that a transformers Trainer resumes from; `crash_after`: end two steps after this one.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import json
import math
import os
import runpy
import shutil
import signal
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import accelerate
import numpy as np
import safetensors.torch
import torch
from accelerate import Accelerator, data_loader
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, dataloader

from app.audit.runs import CRASHED

_LIBRARIES = ("accelerate", "contextlib", "datasets", "functools", "torch", "transformers", "trl")
"""Packages whose frames are not the place where a script does something."""
_NORMS = nn.modules.batchnorm._BatchNorm
_NO_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout", "worker_init_fn")
Method = Callable[..., Any]


def wrap(owner: Any, *names: str) -> Callable[[Method], Method]:
    """Replace methods by the decorated function, which gets the original one as its first argument."""

    def replace(function: Method) -> Method:
        for name in names:
            method = getattr(owner, name)
            call = functools.wraps(method)(lambda *args, _original=method, **kwargs: function(_original, *args, **kwargs))
            setattr(owner, name, call)
        return function

    return replace


def place() -> str:
    """Return file and line of the innermost frame that is the script's own."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "").partition(".")[0]
        if file != __file__ and not file.startswith("<") and module not in _LIBRARIES:
            return f"{Path(file).name}:{line}"
    return "unknown"


def is_synchronized() -> bool | None:
    """Return True in the last micro-batch of a step, by Accelerate's count; None before an Accelerator exists."""
    state = accelerate.state.GradientState
    return bool(state().sync_gradients) if state._shared_state else None


def random_state() -> int:
    """Return a digest of the state of torch's generator."""
    return zlib.crc32(torch.get_rng_state().numpy().tobytes())


def sums(tensors: Any) -> list[float]:
    """Return the norm of tensors and the sum of their values, in float64: equal tensors have equal sums."""
    values = [it.detach().double() for it in tensors if isinstance(it, Tensor) and it.is_floating_point()]
    return [sum(float(it.square().sum()) for it in values) ** 0.5, sum(float(it.sum()) for it in values)]


def tensors_of(value: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch with at least one dimension, by name."""
    if isinstance(value, Tensor) and value.ndim:
        yield name, value.detach()
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, one in items:
        yield from tensors_of(one, f"{name}[{key}]" if isinstance(key, int) else str(key))


def rows_of(batch: Any) -> tuple[list[int], dict[str, list[int]]]:
    """Return a digest of each row of a batch, and by tensor how many entries are neither -100 nor NaN, and not 0.

    Padding depends on the other rows of the batch, and is left out: by a mask of the batch, and as 0 and -100 at a row's end.
    """
    tensors = dict(tensors_of(batch))
    digests = [0] * max(map(len, tensors.values()), default=0)
    masks = [it for it in tensors.values() if it.ndim == 2 and ((it == 0) | (it == 1)).all() and (it.int().diff() <= 0).all()]
    for tensor in tensors.values():
        values = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        for row in range(len(digests)) if len(tensor) == len(digests) else ():
            one = values[row]
            if one.ndim == 1 and one.dtype.kind in "iub":
                end = int(masks[0][row].sum()) if masks and masks[0].shape == tensor.shape else None
                one = np.trim_zeros(np.where(one[:end] == -100, 0, one[:end]), "b")
            digests[row] = zlib.crc32(np.ascontiguousarray(one).tobytes(), digests[row])
    return digests, {name: [int(((it != -100) & ~it.isnan()).sum()), int((it != 0).sum())] for name, it in tensors.items()}


class Recorder:
    """The events of one rank."""

    def __init__(self, orders: Mapping[str, Any]) -> None:
        """Open the record of this rank, and wrap what is recorded."""
        self.orders, record = orders, Path(f"{orders['record']}-{os.environ.get('RANK', '0')}.jsonl")
        self.file: TextIO = record.open("w", buffering=1)
        # depth: backward passes that are running, as Accelerator.backward calls Tensor.backward.
        self.step = self.depth = 0
        self.loaders: dict[str, int] = {}
        """DataLoaders by place, and how many were built there."""
        self._files()
        self._data()
        self._accelerator()
        self._steps()

    def write(self, event: str, **values: Any) -> None:
        """Append an event."""
        self.file.write(json.dumps({"event": event, "step": self.step, **values}, default=str) + "\n")

    def watch(self, event: str, owner: Any, name: str, values: Method = lambda *_, **__: {}) -> None:
        """Write an event at each call of a method, with the values that a function finds in its arguments."""

        @wrap(owner, name)
        def call(original: Method, *args: Any, **kwargs: Any) -> Any:
            self.write(event, by=name, place=place(), **values(*args, **kwargs))
            return original(*args, **kwargs)

    def run(self, words: Sequence[str]) -> NoReturn:
        """Run a script as Python would, and end this process."""
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of prctl(2): end with the audit
        os.environ.pop("PYTHONSAFEPATH", None)  # for the start of this process only
        torch.set_num_threads(1)  # the same sums in every process
        sys.argv, is_module, code = [*words], self.orders["module"], 0
        sys.path.insert(0, str(Path.cwd() if is_module else Path(words[0]).resolve().parent))
        for name in [name for name in sys.modules if name.partition(".")[0] == "app"]:
            del sys.modules[name]  # a script can have a package of this name
        try:
            start = functools.partial(runpy.run_module, alter_sys=True) if is_module else runpy.run_path
            start(words[0], run_name="__main__")
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            sys.stderr.write(f"{error.code}\n" * isinstance(error.code, str))
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
        os._exit(code)  # gloo can abort when an interpreter ends with a group

    def _files(self) -> None:
        def opened(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and isinstance(args[0], str | bytes):
                path, mode, flags = args
                if any(letter in mode for letter in "wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR):
                    self.written(os.fsdecode(path), keeps="w" not in (mode or "w"))

        sys.addaudithook(opened)

        # These open files in C++ and Rust, where audit hooks do not see it. All copies of save_file's name call serialize_file.
        @wrap(torch, "save")
        @wrap(safetensors.torch, "serialize_file")
        def save(original: Method, *args: Any, **kwargs: Any) -> Any:
            target = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            if isinstance(target, str | os.PathLike):
                self.written(os.fspath(target))
                self.write("save", path=str(Path.cwd() / target), by="torch.save")
            return original(*args, **kwargs)

    def written(self, path: str, *, keeps: bool = False) -> None:
        """Record that a file is opened for writing. A link to a file of the user becomes a file of its own first."""
        if path.startswith(("/dev/", "/proc/")) or "__pycache__" in path:
            return
        if Path(path).is_symlink():
            target = Path(path).resolve()
            Path(path).unlink()
            if keeps and target.exists():
                shutil.copyfile(target, path)
        self.write("write", path=str(Path.cwd() / path))

    def _data(self) -> None:
        signature = inspect.signature(DataLoader.__init__)

        @wrap(DataLoader, "__init__")
        def init(original: Method, *args: Any, **kwargs: Any) -> None:
            given = {key: it for key, it in signature.bind(*args, **kwargs).arguments.items() if key not in _NO_WORKERS}
            own, sampler = given.pop("self"), given.get("batch_sampler")
            frames = (sys._getframe(depth).f_globals.get("__name__") for depth in range(1, 7))
            if "accelerate.data_loader" in frames:  # of a loader that is already recorded
                original(own, **given)
                return
            key = place()
            self.loaders[key] = number = self.loaders.get(key, -1) + 1
            own.audit_key = key = f"{key}#{number}" if number else key
            parts = self.orders.get("divide", {}).get(key, 1)
            if isinstance(sampler, BatchSampler):
                given["batch_sampler"] = BatchSampler(sampler.sampler, sampler.batch_size // parts, sampler.drop_last)
            elif parts > 1:
                given["batch_size"] //= parts
            original(own, **given)
            self.write("loader", loader=key, batch_size=own.batch_size or getattr(own.batch_sampler, "batch_size", None),
                samples=len(own.dataset) if hasattr(own.dataset, "__len__") else None, drop_last=own.drop_last,
                sampler=type(getattr(own.batch_sampler, "sampler", own.sampler)).__name__)  # fmt: skip

        @wrap(DataLoader, "__iter__")
        def base_iter(original: Method, loader: Any) -> Iterator[Any]:
            iterator = original(loader)
            iterator.audit_indices = loader.audit_indices = []
            return self.recorded(iterator, loader) if hasattr(loader, "audit_key") else iterator

        @wrap(dataloader._BaseDataLoaderIter, "_next_index")  # private: the indices that a batch is read from
        def next_index(original: Method, iterator: Any) -> Any:
            index = original(iterator)
            getattr(iterator, "audit_indices", []).append(index)
            return index

        for kind in (data_loader.DataLoaderShard, data_loader.DataLoaderDispatcher, data_loader.SkipDataLoader):
            wrap(kind, "__iter__")(lambda original, loader: self.recorded(original(loader), loader, is_prepared=True))

        @wrap(Accelerator, "prepare_data_loader")
        @wrap(data_loader, "skip_first_batches")
        @wrap(accelerate.accelerator, "skip_first_batches")
        @wrap(accelerate, "skip_first_batches")
        def derived(original: Method, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            result.audit_key = next((it.audit_key for it in (*args, *kwargs.values()) if hasattr(it, "audit_key")), "unknown")
            return result

        @wrap(RandomSampler, "__iter__")
        def fixed(original: Method, sampler: Any) -> Iterator[int]:
            if self.orders.get("fixed_order") and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
                sampler.audit_epoch = getattr(sampler, "audit_epoch", -1) + 1
                sampler.generator = torch.Generator().manual_seed(sampler.audit_epoch)
            return original(sampler)  # type: ignore[no-any-return]

    def recorded(self, batches: Iterator[Any], loader: Any, *, is_prepared: bool = False) -> Iterator[Any]:
        """Yield the batches of one pass over a loader, each recorded as the script receives it."""
        key = loader.audit_key
        self.write("epoch", loader=key, prepared=is_prepared)
        for number, batch in enumerate(batches, getattr(loader, "skip_batches", 0) if is_prepared else 0):
            indices = getattr(getattr(loader, "base_dataloader", loader), "audit_indices", [])
            read = indices[number] if number < len(indices) else None
            positions = [one for one in read if isinstance(one, int)] if isinstance(read, list) else []
            rows, counts = rows_of(batch)
            self.write("batch", loader=key, indices=positions, rows=rows, counts=counts, rng=random_state())
            yield batch
        self.write("epoch_end", loader=key)

    def _accelerator(self) -> None:
        signature = inspect.signature(Accelerator.__init__)

        @wrap(Accelerator, "__init__")
        def init(original: Method, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            own, extra, factor = given.pop("self"), given.pop("kwargs", {}), self.orders.get("accumulation", 1)
            if trainer := self._trainer():
                trainer.args.gradient_accumulation_steps *= factor
            elif plugin := given.get("gradient_accumulation_plugin"):
                plugin.num_steps *= factor
            else:
                given["gradient_accumulation_steps"] = given.get("gradient_accumulation_steps", 1) * factor
            original(own, **given, **extra)
            self.write("accelerator", processes=own.num_processes, accumulation=own.gradient_accumulation_steps,
                seedable=own.use_seedable_sampler, trainer=bool(trainer))  # fmt: skip

        @wrap(Accelerator, "backward")
        @wrap(Tensor, "backward")
        def backward(original: Method, *args: Any, **kwargs: Any) -> None:
            loss = next(it for it in (*args, *kwargs.values()) if isinstance(it, Tensor))
            value, rng = float(loss.detach().float().mean()), random_state()
            self.depth += 1
            try:
                original(*args, **kwargs)
            finally:
                self.depth -= 1
            if not self.depth:
                self.write("backward", loss=value, rng=rng)

        for name in ("gather", "gather_for_metrics", "reduce"):
            self.watch("gather", Accelerator, name, lambda *given, **more: {"given": any(tensors_of([*given, *more.values()]))})

        @wrap(Accelerator, "save_state")
        def save_state(original: Method, *args: Any, **kwargs: Any) -> Any:
            path = original(*args, **kwargs)
            self.write("save", path=str(Path.cwd() / path), by="save_state")
            return path

        self.watch("model", Accelerator, "prepare_model", lambda _, model, *__, **___: {"weights": sums(model.parameters()),
            "norms": [type(it).__name__ for it in model.modules() if isinstance(it, _NORMS)]})  # fmt: skip
        self.watch("load", Accelerator, "load_state", lambda _, input_dir="", *__, **___: {
            "path": Path(input_dir or "").resolve()})  # fmt: skip

    def _trainer(self) -> Any:
        """Return the transformers Trainer that is being built, if any, after wrapping what it saves and how it resumes."""
        kind, recorder = getattr(sys.modules.get("transformers.trainer"), "Trainer", ()), self
        owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(sys._getframe(1)))
        trainer: Any = next((it for it in owners if isinstance(it, kind)), None)
        if trainer is None:
            return None
        from transformers import TrainerCallback

        class Saved(TrainerCallback):
            def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
                path = Path.cwd() / args.output_dir / f"checkpoint-{state.global_step}"
                recorder.write("save", path=str(path), by="Trainer")

        @wrap(trainer, "train")
        def train(original: Method, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            trainer.add_callback(Saved())
            if resume := self.orders.get("resume") or resume_from_checkpoint:
                self.write("load", path=str(resume))
            return original(resume, *args, **kwargs)

        return trainer

    def _steps(self) -> None:
        def before(optimizer: Optimizer, *_: Any) -> None:
            if self.step - 2 >= self.orders.get("crash_after", math.inf):
                os._exit(CRASHED)
            groups, rates = optimizer.param_groups, self.orders.get("rates", [])
            parameters = [one for group in groups for one in group["params"]]
            self.write("optimizer_step", rates=[float(group["lr"]) for group in groups], optimizer=id(optimizer),
                initial=[float(group.get("initial_lr", group["lr"])) for group in groups], sync=is_synchronized(),
                gradient=sums(one.grad for one in parameters), weights=sums(parameters),
                state=sums(it for one in parameters for it in optimizer.state.get(one, {}).values()))  # fmt: skip
            for group, rate in zip(groups, rates[self.step] if self.step < len(rates) else (), strict=False):
                group["audit_lr"], group["lr"] = group["lr"], rate

        def after(optimizer: Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = group.pop("audit_lr", group["lr"])
            self.step += 1

        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)

        @wrap(nn.utils, "clip_grad_norm_", "clip_grad_value_")
        @wrap(nn.utils.clip_grad, "clip_grad_norm_", "clip_grad_value_")
        def clip(original: Method, parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self.write("clip", norm=sums(one.grad for one in parameters)[0], place=place())
            return original(parameters, *args, **kwargs)

        self.watch("accumulate", Accelerator, "accumulate")
        self.watch("zero_grad", Optimizer, "zero_grad")
        self.watch("zero_grad", nn.Module, "zero_grad")
        self.watch("scheduler_step", torch.optim.lr_scheduler.LRScheduler, "step")


if __name__ == "__main__":
    Recorder(json.loads(sys.argv[1])).run(sys.argv[2:])
