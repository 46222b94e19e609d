"""A trained model on disk: `model.safetensors` with plain parameter names, and `model.json`, which says what it is.

The weights load into the plain torchvision or torch model of that name; nothing of this package is needed for that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from app import models
from app.checkpoints import tensor_file
from app.data.source import Source
from app.errors import RunFolderError
from app.recipe.schema import Recipe
from app.record import run_folder
from app.record.claim import Claim
from app.tasks.image_classification.sections import ModelRecipe


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What rebuilds a model and feeds it."""

    model: ModelRecipe
    dtype: str
    """Type of the weights, by its name in torch."""
    channels: int
    """Channels of the input image."""
    image_size: tuple[int, int]
    """Height and width of the input image in pixels."""
    resize_size: int | None
    """Length in pixels the shorter side gets before the centre crop to image_size; None: image_size."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of the outputs."""
    mean: tuple[float, ...]
    """Mean that is subtracted from pixels scaled to 0..1, per channel or one for all."""
    std: tuple[float, ...]
    """Standard deviation that pixels are divided by after that, per channel or one for all."""

    @classmethod
    def of(cls, recipe: Recipe, source: Source) -> ModelConfig:
        """Return the config of the model that a recipe trains on `source`."""
        return cls(
            model=recipe.model,
            dtype=recipe.train.dtype,
            channels=source.channels,
            image_size=source.image_size,
            resize_size=recipe.data.resize_size,
            classes=source.classes,
            mean=recipe.data.mean,
            std=recipe.data.std,
        )

    def build(self) -> torch.nn.Module:
        """Return the model, with new weights."""
        model = models.build(self.model, channels=self.channels, image_size=self.image_size, num_classes=len(self.classes))
        return model.to(getattr(torch, self.dtype))


def save(claim: Claim, config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
    """Write the weights (name -> tensor) and the config into the run folder, each whole or not at all.

    Raises CheckpointError or RunFolderError if the disk refuses.
    """
    with claim.staged(run_folder.MODEL) as path:
        tensor_file.write_tensors(path, list(weights.items()), tensor_file.OF_TORCH)
    claim.write_json(run_folder.MODEL_CONFIG, asdict(config))


def load(run_dir: Path) -> tuple[torch.nn.Module, ModelConfig]:
    """Return the trained model of a finished run, in evaluation mode on the CPU, and its config.

    Raises RunFolderError if the run is not finished or a file of it is broken.
    """
    config = _config(run_dir / run_folder.MODEL_CONFIG)
    model = config.build()
    path = run_dir / run_folder.MODEL
    try:
        model.load_state_dict(load_file(path))
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing: {run_dir} is not the folder of a finished run.") from None
    except (OSError, SafetensorError, RuntimeError) as error:
        raise RunFolderError(f"{path} does not hold the weights of {config.model.name}: {error}") from error
    return model.eval(), config


def _config(path: Path) -> ModelConfig:
    values: dict[str, Any] = run_folder.read_json(path)
    try:
        return ModelConfig(model=ModelRecipe(**_with_tuples(values.pop("model"))), **_with_tuples(values))
    except (KeyError, TypeError) as error:
        raise RunFolderError(f"{path} is not a model's config: {error}.") from error


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
