"""What Accelerate would derive of a model for DeepSpeed, and the model does not tell."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DeepSpeedPlugin

from app.ranks import deepspeed_settings

SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


@pytest.mark.parametrize(
    ("config", "told"), [(None, False), ({}, False), ({"hidden_size": 8}, True), ({"hidden_sizes": [8]}, True)]
)
def test_sizes_that_are_auto_are_deepspeeds_own_where_the_model_tells_none(
    config: dict[str, object] | None, told: bool
) -> None:
    zero = {"stage": 3, **dict.fromkeys(SIZES[:2], "auto"), SIZES[2]: 100}
    plugin = DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
    model = torch.nn.Linear(2, 2)
    if config is not None:
        model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    deepspeed_settings.fit(plugin, model)
    assert [plugin.is_auto(f"zero_optimization.{key}") for key in SIZES] == [told, told, False]
    assert plugin.get_value(f"zero_optimization.{SIZES[2]}") == 100
