"""The model as a user's loss and score see it: something to call, whose weights may be elsewhere."""

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


class Called:
    """Calls the model, with real numbers in the precision it wants, and counts how often. Refuses all else."""

    def __init__(self, model: Any, form: Form, *, of: str, most: int | None) -> None:
        """`of` names who calls (`MyTask.loss`), at most so many times; None: as often as it likes."""
        self._model, self._form, self._of, self._most = model, form, of, most
        self.times = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        self.times += 1
        if self._most is not None and self.times > self._most:
            raise TrainingError(f"{self._of} called the model a second time for one batch: {_RULE}")
        if kwargs or any(type(arg) is not Tensor for arg in args):
            args, kwargs = pytree.tree_map(self._as_wanted, (args, kwargs))
            return self._model(*args, **kwargs)
        return self._model(*map(self._as_wanted, args))  # a tenth of the time

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name != "training":  # which has no weights, and says whether dropout is at work
            self._refuse(f"uses model.{name}")
        return self._model.training

    def __getitem__(self, index: Any) -> Any:
        self._refuse(f"uses model[{index!r}]")

    def check_called(self) -> None:
        """Raise TrainingError if the model was not called."""
        if self.times == 0:
            raise TrainingError(f"{self._of} did not call the model: {_RULE}")

    def _refuse(self, what: str) -> NoReturn:
        raise TrainingError(f"{self._of} {what}: {_RULE}")

    def _as_wanted(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            is_own = dataclasses.is_dataclass(value) and not isinstance(value, type)
            return self._each_field(value) if is_own else value
        order = self._form.memory_format
        if value.ndim == 4 and order != torch.contiguous_format and value.is_floating_point():
            return value.to(dtype=self._form.dtype, memory_format=order)
        return value.to(self._form.dtype) if value.is_floating_point() else value

    def _each_field(self, value: Any) -> Any:
        given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **pytree.tree_map(self._as_wanted, given))
