"""A language whose entropy is known: a model learns all of it that can be known, and none that cannot.

The loss on held-out text comes down to what the source itself would lose there: its entropy rate, but for chance and the first
tokens of rows. Whoever gets below it has seen the answers: two tasks that show them, on purpose, are found by that.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from grammar import Grammar, write
from processes import SCRIPTS, read, run

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

LENGTH = 64
RECIPE = f"""
task: causal_lm
data: {{sequence_length: {LENGTH}}}
model: {{architecture: llama, hidden_size: 64, layers: 2, heads: 4, intermediate_size: 128}}
train: {{global_batch_size: 32, steps: 500, evaluate_every_epochs: 0}}
optim: {{name: adamw, lr: 0.005, betas: [0.9, 0.98], weight_decay: 0.0, clip_norm: 1.0, warmup_steps: 20}}
log: {{every_steps: 50}}
"""


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A token folder, and what its source loses a token on the test text."""
    grammar, folder = Grammar.drawn(), tmp_path_factory.mktemp("language") / "tokens"
    held_out = write(grammar, folder, train=1_000_000, test=100_000)
    least = grammar.nats(held_out, LENGTH)
    assert least == pytest.approx(grammar.entropy_rate(), rel=0.02)
    return folder, least


def share_of_entropy(language: tuple[Path, float], folder: Path, *command: str) -> float:
    """The test loss of a training, as a share of what the source itself loses there."""
    tokens, least = language
    (folder / "grammar.yaml").write_text(RECIPE)
    given = ("--recipe", str(folder / "grammar.yaml"), f"data.path={tokens}", "--run-dir", str(folder / "run"))
    run("cpu", 1, *command, *given, "--trackers", "none").check()
    return float(read(folder / "run" / "result.json")["test_loss"] / least)


def is_honest(share: float) -> bool:
    """A test text is finite: by chance a model may be 0.2 % better there than its source."""
    return share > 0.998


def test_the_loss_comes_down_to_the_entropy_and_not_below(language: tuple[Path, float], tmp_path: Path) -> None:
    found = share_of_entropy(language, tmp_path, "app.train")
    print(f"{found:.4f} of the entropy")
    assert is_honest(found)
    assert found < 1.015


@pytest.mark.parametrize("wrong", ["labels", "mask"])
def test_a_model_that_sees_its_answers_is_found_by_that(language: tuple[Path, float], tmp_path: Path, wrong: str) -> None:
    found = share_of_entropy(language, tmp_path, str(SCRIPTS / "sees_answer.py"), wrong, "train.steps=150")
    print(f"{wrong}: {found:.4f} of the entropy")
    assert not is_honest(found)
