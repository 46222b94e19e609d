"""The model as a user's loss and metrics see it: something to call, whose weights may be elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from app.errors import TrainingError
from app.task import Form

_RULE = (
    "a loss must call model(...) exactly once and no submodule of it, because under FSDP2 and ZeRO their "
    "weights are sharded. Move everything that has weights, or needs several passes, into forward() of the "
    "module that model() returns"
)


class ModelProxy:
    """Calls the model, with floating-point inputs in the precision it wants, and counts how often. Refuses all else."""

    def __init__(self, model: Any, form: Form, *, caller: str, limit: int | None = None) -> None:
        """`caller` is the method's name (`MyTask.loss`), which may call the model `limit` times; None: as often as it likes."""
        self._model, self._form, self._caller, self._limit = model, form, caller, limit
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        self.calls += 1
        if self._limit is not None and self.calls > self._limit:
            raise TrainingError(f"{self._caller} called the model a second time for one batch: {_RULE}")
        if kwargs or any(type(arg) is not Tensor for arg in args):
            args, kwargs = pytree.tree_map(self._cast, (args, kwargs))
            return self._model(*args, **kwargs)
        return self._model(*map(self._cast, args))  # a tenth of the time

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name != "training":  # which has no weights, and tells whether dropout is at work
            self._refuse(f"uses model.{name}")
        return self._model.training

    def __getitem__(self, index: Any) -> Any:
        self._refuse(f"uses model[{index!r}]")

    def check_called(self) -> None:
        """Raise TrainingError if the model was not called."""
        if self.calls == 0:
            self._refuse("did not call the model")

    def _refuse(self, what: str) -> NoReturn:
        raise TrainingError(f"{self._caller} {what}: {_RULE}")

    def _cast(self, value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            return dataclasses.replace(value, **pytree.tree_map(self._cast, fields))
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        order = self._form.memory_format
        if value.ndim == 4 and order != torch.contiguous_format:
            return value.to(dtype=self._form.dtype, memory_format=order)
        return value.to(self._form.dtype)
