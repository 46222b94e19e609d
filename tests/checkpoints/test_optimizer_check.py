"""The optimizer that steps in the end is compared with the recipe's: under each preset, with each thing wrong on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import SCRIPTS, read, run, train

from app.checkpoints.sharded_state import Shards, check_optimizer
from app.distributed.runtime import Runtime
from app.environment import launched
from app.errors import PresetError
from app.optim import parameter_groups
from app.recipe.schema import BatchPlan, OptimRecipe

PLAN = BatchPlan(global_batch_size=2, data_ranks=1, accumulation=1)
ASKED = {"adamw": "AdamW", "sgd": "SGD"}
SAID = {
    "class": "would be used",
    "decay": "weight_decay of 1.bias is 0.5, not 0.0",
    "rate": "lr of 0.weight is 0.2, not 0.1",
    "betas": "betas of 1.bias is (0.5, 0.999), not (0.9, 0.999)",
    "momentum": "momentum of 1.bias is 0.0, not 0.9",
    "nesterov": "nesterov of 1.bias is True, not False",
}


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("preset", "processes"), [("cpu", 1), ("multi_gpu", 2), ("deepspeed_zero2", 2), ("deepspeed_zero3", 2), ("fsdp2", 2)]
)
def test_another_optimizer_on_one_rank_is_refused_by_all(preset: str, processes: int, tmp_path: Path) -> None:
    run(preset, processes, str(SCRIPTS / "other_optimizer.py"), str(tmp_path)).check()
    reports = [read(tmp_path / f"{rank}.json") for rank in range(processes)]
    assert all(report == reports[0] for report in reports)
    assert reports[0].keys() == ASKED.keys()
    where = f"rank {processes - 1} of {processes}" if processes > 1 else ""
    for optimizer, said in reports[0].items():
        assert said.pop("nothing") is None
        for case, sentence in said.items():
            assert SAID[case] in sentence, (optimizer, case)
            assert sentence.startswith(where)
        assert f"the recipe's optimizer is torch's {ASKED[optimizer]} (optim.name), but torch's Adam" in said["class"]


def test_other_precisions_groups_and_missing_parameters_are_refused() -> None:
    runtime, recipe = Runtime(launched.Launched(use_cpu=True), PLAN), OptimRecipe(name="sgd", weight_decay=0.1)
    layer = torch.nn.Linear(3, 2)
    rule = parameter_groups.Rule.of(recipe, layer)
    model, optimizer = runtime.prepare(layer, parameter_groups.build_optimizer(recipe, layer))

    def refusal(used: Any) -> str:
        with pytest.raises(PresetError) as refused:
            check_optimizer(runtime, rule, used, Shards(runtime.accelerator, model, used), dtype=torch.float32)
        return str(refused.value)

    copies = [dict(group) for group in optimizer.param_groups]
    aside = SimpleNamespace(optimizer=optimizer.optimizer, param_groups=copies)
    assert "learning rates are set on parameter groups that would not be used" in refusal(aside)
    model.weight.data = model.weight.data.bfloat16()
    assert "the weights of weight are torch.bfloat16, not torch.float32" in refusal(optimizer)
    model.weight.data = model.weight.data.float()
    optimizer.state[model.bias]["momentum_buffer"] = torch.zeros(2, dtype=torch.float16)
    assert "momentum_buffer of bias are torch.float16, not torch.float32" in refusal(optimizer)
    del optimizer.param_groups[1]
    assert "no optimizer updates bias" in refusal(optimizer)


@pytest.mark.multiproc
def test_what_each_process_would_step_on_by_itself_is_refused(tmp_path: Path) -> None:
    """FSDP2 leaves these modules whole on each rank, and does not add up their gradients."""
    arguments = ("--recipe", "digits", "train.steps=3")
    finished = train("fsdp2", tmp_path / "run", *arguments, processes=2, env={"FSDP_IGNORED_MODULES": "head"})
    assert finished.returncode == PresetError.exit_code
    assert "would not update each parameter once: together they update 2560 elements of head.weight" in finished.output


def test_a_config_file_of_deepspeed_is_held_to_the_rule_of_presets_in_each_process(tmp_path: Path) -> None:
    """`accelerate launch` alone reads no such file."""
    config = tmp_path / "zero.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}))
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": ""}
    with pytest.raises(PresetError, match=r"gradient_clipping: 1\.0: clipping belongs to the recipe: set optim\.clip_norm"):
        launched.read(variables | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config)})
