"""Parameters that are not trained: which ones patterns mean, what becomes of their norms, and what they save."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from app.distributed import model_preparation
from app.errors import RecipeError
from app.optim import parameter_groups


class Net(nn.Module):
    """[B, 10] to [B, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Dropout(0.5))
        self.middle, self.norm, self.head = nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.norm(self.middle(self.encoder(inputs))))
        return output


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_patterns_freeze_what_they_match_and_norms_keep_their_statistics() -> None:
    model = Net()
    parameter_groups.freeze(model, ["encoder.*", "norm.weight", "?iddle.bias"])
    assert trained(model) == ["middle.weight", "norm.bias", "head.weight", "head.bias"]
    parameter_groups.set_training(model, mode=False)
    parameter_groups.set_training(model, mode=True)
    assert [name for name, layer in model.named_modules() if not layer.training] == ["encoder.1"]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.randn(8, 10) + 3)
    changed = {name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}
    assert changed == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    (of_batches,) = model_preparation.topology_dependence(model)
    assert of_batches.startswith("1 batch normalization layer (norm)")


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (
            ["encoder.*", "encodr.*"],
            "has 'encodr.*', which matches no parameter: did you mean encoder.* or encoder.1.*",
        ),
        (["*"], "all 10 parameters of the model, a Net, are frozen (train.freeze is *), so there is nothing to train"),
    ],
)
def test_what_matches_nothing_or_everything_is_refused(patterns: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)):
        parameter_groups.freeze(Net(), patterns)
