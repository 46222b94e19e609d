"""Checks that every trainable parameter gets a gradient in the first step; otherwise it is named and the run is refused.

One that gets none is never trained, and strategies treat it differently: under DDP the next forward pass fails, FSDP2 and ZeRO
say nothing. ZeRO takes gradients away as they come, so hooks see them. FSDP2 computes with other tensors than its parameters,
which have their gradients when the passes are over.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, nn

from app.errors import TrainingError

_MOST_NAMES = 8


class FirstGradients:
    """Looks at the gradients of this process's first step, in a new run or a resumed one."""

    def __init__(self, model: nn.Module, together: Callable[[], AbstractContextManager[None]]) -> None:
        """`model` is prepared, without what is wrapped around it; `together` agrees on an error with all ranks."""
        self._together = together
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._seen: set[str] = set()
        self._hooks = [parameter.register_hook(self._see(name)) for name, parameter in self._parameters.items()]

    def check(self) -> None:
        """Raise TrainingError, on all ranks, if a parameter got no gradient. Called once, after the step's backward passes."""
        for hook in self._hooks:
            hook.remove()
        without = [name for name, one in self._parameters.items() if name not in self._seen and one.grad is None]
        self._hooks, self._parameters = [], {}
        with self._together():
            if without:
                raise TrainingError(_refusal(without))

    def _see(self, name: str) -> Callable[[Tensor], None]:
        return lambda _gradient: self._seen.add(name)


def _refusal(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")
    has, it = ("has", "it") if len(names) == 1 else ("have", "them")
    return (
        f"{len(names)} trainable parameter{'s' if len(names) > 1 else ''} {has} no gradient after the first step's backward "
        f"passes: {shown}. The loss must depend on every parameter that is trained: use {it} in the model's forward pass, "
        f"freeze {it} (train.freeze), or take {it} out of the model."
    )
