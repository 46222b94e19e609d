"""Optimizer classes as users have them, for tests/optim/test_foreign.py: what they keep, and what they may not do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """Lion (arXiv:2302.06675, algorithm 2)."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], **group)

    def update(self, parameter: Tensor, state: dict[str, Any], *, lr: Any, **group: Any) -> None:
        momentum, (beta1, beta2) = state.setdefault("exp_avg", torch.zeros_like(parameter)), group["betas"]
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(momentum.lerp(parameter.grad, 1 - beta1).sign(), alpha=-lr)
        momentum.lerp_(parameter.grad, 1 - beta2)


class Blocks(Lion):
    """Momentum in 8 bits, by blocks, from 4,096 elements on."""

    def __init__(self, params: Any, lr: float, *, block: int = 128) -> None:
        Optimizer.__init__(self, params, {"lr": lr, "block": block})

    def update(self, parameter: Tensor, state: dict[str, Any], *, lr: Any, block: int, **group: Any) -> None:
        size = parameter.numel()
        rows = -(-size // block)
        codes = state.setdefault("codes", torch.zeros(rows, block, dtype=torch.int8 if size >= 4096 else parameter.dtype))
        scales = state.setdefault("scales", torch.ones(rows, 1))
        gradient = torch.nn.functional.pad(parameter.grad.flatten(), (0, rows * block - size))
        momentum = codes * scales * 0.9 + gradient.view(rows, block)
        scales.copy_(momentum.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127)
        codes.copy_((momentum / scales).round())
        parameter.sub_((codes * scales).flatten()[:size].view_as(parameter), alpha=lr)


class Rows(Lion):
    """The means of squares of rows and columns, as in Adafactor."""

    def update(self, parameter: Tensor, state: dict[str, Any], *, lr: Any, **group: Any) -> None:
        squares = parameter.grad.square().reshape(len(parameter), -1)
        for name, means in (("row", squares.mean(1)), ("column", squares.mean(0))):
            state.setdefault(name, torch.zeros_like(means)).lerp_(means, 0.1)
        scale = torch.outer(state["row"], state["column"]).view_as(parameter) / state["row"].mean()
        parameter.sub_(parameter.grad * (scale + 1e-12).rsqrt(), alpha=lr)


class Normed(Lion):
    """A gradient divided by its norm."""

    def update(self, parameter: Tensor, state: dict[str, Any], *, lr: Any, **group: Any) -> None:
        parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=lr)


class Random(Lion):
    def update(self, parameter: Tensor, state: dict[str, Any], *, lr: Any, **group: Any) -> None:
        parameter.sub_(parameter.grad + 1e-4 * torch.randn_like(parameter), alpha=lr)


class Forgetful(Lion):
    """A count that no checkpoint has."""

    steps = 0

    def update(self, parameter: Tensor, state: dict[str, Any], *, lr: Any, **group: Any) -> None:
        self.steps += 1
        parameter.sub_(parameter.grad, alpha=lr / self.steps)


class OwnRate(Lion):
    def update(self, parameter: Tensor, state: dict[str, Any], *, lr: Any, **group: Any) -> None:
        super().update(parameter, state, lr=1e-3, **{**group, "weight_decay": 0.0})


class Closure(Lion):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class ScheduleFree(Lion):
    """Schedule-free SGD (arXiv:2405.15682, equations 4 to 6): gradients are taken at y; x is what counts in the end."""

    def __init__(self, params: Any, lr: float = 0.1, *, beta: float = 0.9) -> None:
        Optimizer.__init__(self, params, {"lr": lr, "beta": beta, "steps": 0, "is_training": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert all(group["is_training"] for group in self.param_groups)
        for group in self.param_groups:
            group["steps"] += 1
        super().step()

    def update(self, parameter: Tensor, state: dict[str, Any], *, lr: Any, beta: float, steps: int, **group: Any) -> None:
        slow, fast = parameter, state.setdefault("z", parameter.clone())
        slow.lerp_(fast, 1 - 1 / beta)
        fast.sub_(parameter.grad, alpha=lr)
        slow.lerp_(fast, 1 / steps).lerp_(fast, 1 - beta)

    @torch.no_grad()
    def _exchange(self, *, is_training: bool) -> None:
        for group in self.param_groups:
            weight = 1 - group["beta"] if is_training else 1 - 1 / group["beta"]
            for parameter in group["params"] if group["is_training"] != is_training else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight)
            group["is_training"] = is_training

    def train(self) -> None:
        self._exchange(is_training=True)

    def eval(self) -> None:
        self._exchange(is_training=False)
