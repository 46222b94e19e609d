"""Context parallelism: networks whose rows are split over processes, and what cannot be split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import SCRIPTS, read, run
from test_lm_model import built
from torch import nn

from app.errors import PresetError
from app.init import filling
from app.tasks.causal_lm import context_parallel
from app.tasks.causal_lm.model import SPLIT


@pytest.mark.slow
@pytest.mark.multiproc
def test_every_family_has_the_loss_and_gradient_of_whole_rows(tmp_path: Path) -> None:
    """Also with sliding windows, with the tokens of each document alone, and where no labels are given."""
    run("fsdp2", 2, str(SCRIPTS / "context_parallel.py"), str(tmp_path / "found.json")).check()
    found = read(tmp_path / "found.json")
    wrong = found.pop("wrong")
    assert min(wrong["documents"], wrong["gradient"], wrong["each document alone"]) > 1e-7
    assert len(found) == len(SPLIT) + 3 >= 18
    print(max((difference, name, what) for name, each in found.items() for what, difference in each.items()))
    assert {name: each for name, each in found.items() if max(each.values()) > 1e-6} == {}


@pytest.mark.parametrize(("family", "words"), [("stablelm", "and the network is a stablelm"), ("granite", "is a granite: use")])
def test_other_families_are_refused(family: str, words: str) -> None:
    network: Any = built(family)
    with pytest.raises(PresetError, match=words):
        network.split_sequences(None)


def test_other_kinds_of_attention_and_other_models_are_refused() -> None:
    network: Any = built("llama")
    network.config._attn_implementation = "flex_attention"
    with pytest.raises(PresetError, match=r"and model\.attention is flex_attention: set it to sdpa"):
        context_parallel.register(network)
    network = built("llama")
    network.config.rope_parameters = {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}
    with pytest.raises(PresetError, match="positions of rope_type dynamic, which depend on the length"):
        context_parallel.register(network)
    with pytest.raises(PresetError, match=r"needs the task causal_lm, .* is a Linear: use fsdp2\.yaml"):
        filling.check_sequences(nn.Linear(2, 2, device="meta"), 2)
