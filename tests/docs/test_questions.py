"""Questions of newcomers: each is answered within two clicks of the README, by a section whose commands are accepted."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import test_docs
from processes import REPOSITORY

ELSEWHERE = ("README", *test_docs.CLUSTER_PAGES)  # test_docs.py tests their commands
SEVEN_BILLION = "docs/faq.md#can-i-train-7-billion-parameters-on-four-40-gb-gpus"
ANSWERS = {
    "How do I install it?": "README.md#install",
    "Does it run on a Mac, on AMD or on Windows?": "docs/faq.md#which-machines-and-python-versions",
    "Has it been tested on GPUs?": "docs/faq.md#was-it-tested-on-gpus",
    "How do I call it from a notebook?": "docs/faq.md#can-i-use-it-in-a-notebook",
    "How do I set a breakpoint?": "docs/faq.md#how-do-i-use-a-debugger",
    "How do I run it in Apptainer?": "docs/containers.md#containers",
    "Which rules must my task keep?": "docs/your-own-task.md#rules",
    "Can I train a GAN?": "docs/your-own-task.md#what-does-not-fit",
    "My model takes two inputs and returns a dict": "docs/faq.md#my-model-has-two-inputs-or-returns-a-dict",
    "How do I train on my folder of images?": "docs/faq.md#my-images-are-in-class-folders",
    "Can I use a timm model?": "docs/faq.md#can-i-use-a-timm-model-on-my-image-folder",
    "How do I fine-tune on chats?": "docs/tokens.md#prompts-and-answers",
    "How do I use LoRA?": "docs/language-models.md#lora",
    "Can I use my own optimizer?": "docs/faq.md#can-i-use-my-own-optimizer-or-schedule",
    "Is there fp8?": "docs/faq.md#can-i-use-mixed-precision-or-fp8",
    "My loss is NaN": "docs/faq.md#my-loss-is-nan",
    "CUDA is out of memory": "docs/faq.md#cuda-is-out-of-memory",
    "Can I train 7 B on four GPUs of 40 GB?": SEVEN_BILLION,
    "My job hit its time limit": "docs/slurm.md#time-limits-and-requeue",
    "What does exit code 75 mean?": "docs/troubleshooting.md#exit-codes",
    "Can I resume with another learning rate?": "docs/faq.md#can-i-resume-with-another-learning-rate",
    "What may I change on a resume?": "docs/checkpoints.md#what-may-change-on-a-resume",
    "How do I log to wandb?": "docs/runs.md#trackers",
    "My own Accelerate script differs on two GPUs": "docs/audit.md#causes",
    "Are these two runs the same?": "docs/runs.md#comparing-two-runs",
    "How do I push a model to the hub?": "docs/faq.md#how-do-i-share-a-run-or-a-model",
}


def links(page: Path) -> set[Path]:
    return {(page.parent / target).resolve() for target in re.findall(r"\]\(([\w./-]+\.md)\b", page.read_text())}


def section(answer: str) -> str:
    page, _, heading = answer.partition("#")
    parts = re.split(r"^(?=#+ )", (REPOSITORY / page).read_text(), flags=re.MULTILINE)
    return next((part for part in parts if heading in test_docs.anchors(part.partition("\n")[0])), "")


def test_each_answer_is_within_two_clicks_of_the_readme() -> None:
    first = links(REPOSITORY / "README.md")
    reached = first.union([REPOSITORY / "README.md"], *map(links, first))
    assert [it for it in ANSWERS.values() if REPOSITORY / it.partition("#")[0] not in reached or not section(it)] == []


def commands(text: str) -> list[list[str]]:
    """Return the words after `samerun` of each whole command in a text, in code spans and bash blocks, with existing paths."""
    spans = re.findall(r"`!?([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    lines = [*spans, *"\n".join(test_docs.blocks(text, "bash")).replace("\\\n", " ").splitlines()]
    found = [re.match(r"(?:\w+=\S+ )*samerun (.+)", re.sub(r"(path|init_from)=\S+", r"\1=.", line)) for line in lines]
    return [shlex.split(it[1].replace("RECIPE", "digits"), comments=True) for it in found if it and "..." not in it[1]]


@pytest.mark.parametrize("answer", [it for it in ANSWERS.values() if not re.search("|".join(ELSEWHERE), it)])
def test_the_commands_of_an_answer_are_accepted(answer: str, tmp_path: Path) -> None:
    for name, *words in commands(section(answer)):
        if name == "launch":
            test_docs.accepted(["launch.cli", name, "--dry-run", *words], tmp_path)
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options - test_docs.options_of(f"data {words[0]}" if name == "data" else name) == set()


def test_the_plan_for_7_billion_parameters_is_quoted() -> None:
    (command,), (quoted,) = (test_docs.blocks(section(SEVEN_BILLION), language) for language in ("bash", ""))
    words = [sys.executable, "-m", "launch.cli", *shlex.split(command)[1:]]
    plan = subprocess.check_output(words, env={**os.environ, "COLUMNS": "200"}, cwd=REPOSITORY, text=True)
    assert [line for line in [*quoted.splitlines(), "35.3 "] if line not in plan] == []
