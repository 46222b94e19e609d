"""What is asked of a plan, and its answer: a recipe under a preset, and bytes by kind."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from app.recipe.recipe_file import LoadedRecipe
from app.recipe.schema import Recipe

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp2", "hsdp", "tensor_parallel")


@dataclass(frozen=True)
class Case:
    """A recipe under a preset, on so many devices."""

    recipe: Recipe | LoadedRecipe
    strategy: str = "single"
    """One of STRATEGIES."""
    data_ranks: int = 1
    """Ranks that the global batch is divided among."""
    replicas: int = 1
    """Copies of the model (hsdp): each is divided among data_ranks / replicas ranks."""
    tensor_parallel: int = 1
    """Ranks that each layer is divided among."""
    micro_batch: int = 1
    """Samples of a pass on one rank."""
    precision: str = "no"
    """Accelerate's word: no, bf16 or fp16."""
    checkpoint_activations: str = "none"
    """none or blocks."""
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"the strategy is {self.strategy}: it must be one of {', '.join(STRATEGIES)}")
        if self.data_ranks % self.replicas:
            raise ValueError(f"{self.data_ranks} data-parallel ranks cannot hold {self.replicas} copies of the model")

    @property
    def plain_recipe(self) -> Recipe:
        """The recipe without its origins."""
        return self.recipe.recipe if isinstance(self.recipe, LoadedRecipe) else self.recipe

    @property
    def accumulation(self) -> int:
        """Passes of a step."""
        return max(self.plain_recipe.train.global_batch_size // (self.micro_batch * self.data_ranks), 1)

    @property
    def shards(self) -> int:
        """Number of ranks over which a copy of the model is sharded."""
        return self.data_ranks // self.replicas


@dataclass(frozen=True)
class Memory:
    """Bytes of one device at the worst moment of a step, by kind."""

    weights: int = 0
    """What the device keeps of them, and what it gathers for a pass."""
    gradients: int = 0
    """With the buffers that they are added up in."""
    optimizer: int = 0
    """Its states, the float32 weights that it steps on, where the others are in half precision, and an average of the weights
    (`train.ema_decay`)."""
    activations: int = 0
    """What layers keep for the backward pass, and what they work with."""
    loss: int = 0
    """The same of the last layer and the loss: logits."""
    buffers: int = 0
    """Of the model, such as running statistics."""
    libraries: int = 0
    """Not known without a GPU: 0."""
    host: int = field(default=0, compare=False)
    """In the memory of the machine, for this rank; no part of `total`."""
    moment: str = field(default="", compare=False)
    """When it is: a phase of the step."""

    @property
    def total(self) -> int:
        """Bytes of the device."""
        return sum(self.by_kind.values())

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of the device by the name of their kind."""
        kinds = ("weights", "gradients", "optimizer", "activations", "loss", "buffers", "libraries")
        return {kind: getattr(self, kind) for kind in kinds}

    def plus(self, **more: int) -> Memory:
        """Return it with more bytes of some kinds."""
        return replace(self, **{kind: getattr(self, kind) + count for kind, count in more.items()})
