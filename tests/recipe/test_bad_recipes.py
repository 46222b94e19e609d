"""Recipe files and values of the command line that cannot be right: each is one sentence, with its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from refusals import Refused, put

FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "bad.yaml: the file is empty"),
    "comments": (b"# nothing\n", "bad.yaml: the file is empty"),
    "no lines in braces": (b"{}", "bad.yaml: the file is empty"),
    "a list": (b"- a\n- b\n", "bad.yaml:1: the file is [a, b]: expected lines of `key: value`"),
    "a word": (b"hello\n", "bad.yaml:1: the file is hello: expected lines"),
    "latin-1": (b"seed: 1\n# caf\xe9\n", "bad.yaml:2: it is not UTF-8 (byte 0xe9): save it as UTF-8"),
    "utf-16": ("seed: 1\n".encode("utf-16"), "bad.yaml:1: it is not UTF-8"),
    "a zero byte": (b"seed: 1\n\x00\n", "bad.yaml:2: it is not YAML: it contains the invalid character '\\x00'"),
    "a tab for a section": (b"optim:\n\tlr: 0.1\n", "bad.yaml:2: YAML does not allow tabs"),
    "a tab for a key": (b"optim:\n  lr: 0.1\n\tname: sgd\n", "bad.yaml:3: YAML does not allow tabs"),
    "two documents": (b"seed: 1\n---\nseed: 2\n", "bad.yaml:2: a second document begins here (---): keep one"),
    "a key twice": (b"seed: 1\nseed: 2\n", "seed is given twice (bad.yaml:1 and bad.yaml:2): keep one of them"),
    "a key twice in braces": (b"optim: {lr: 1, lr: 2}\n", "optim.lr is given twice (bad.yaml:1"),
    "a key in both spellings": (b"optim:\n  lr: 1\noptim.lr: 2\n", "optim.lr is given twice (bad.yaml:2 and bad.yaml:3)"),
    "a section twice": (b"optim: {lr: 1}\noptim: {eps: 1}\n", "optim is given twice (bad.yaml:1 and bad.yaml:2)"),
    "a merge key": (b"optim:\n  <<: {lr: 1}\n", "bad.yaml:2: << merges another mapping, which recipes do not support"),
    "an anchor's own key": (b"base: &b\n  lr: 1\noptim: *b\n", "base (bad.yaml:1): there is no such key"),
    "an alias of nothing": (b"optim: *nothing\n", "bad.yaml:1: it is not YAML: found undefined alias 'nothing'"),
    "an unknown section": (b"optm:\n  lr: 1\n", "optm (bad.yaml:1): there is no such key; did you mean optim?"),
    "an unknown key": (b"optim:\n  momentun: 1\n", "optim.momentun (bad.yaml:2): there is no such key; did you mean"),
    "an unknown key in quotes": (b"'optim':\n  'lrr': 1\n", "optim.lrr (bad.yaml:2): there is no such key; did"),
    "a list as key": (b"[a, b]: 1\n", "bad.yaml:1: a key is [a, b]: expected one word before the colon"),
    "a word as section": (b"optim: fast\n", "bad.yaml:1: section optim is fast: expected lines of `key: value`"),
    "a list as section": (b"optim: [1]\n", "bad.yaml:1: section optim is [1]: expected lines"),
    "an open brace": (b"model: {name: convnet\n", "bad.yaml:2: it is not YAML: expected ',' or '}'"),
    "two colons": (b"seed: 1: 2\n", "bad.yaml:1: it is not YAML: mapping values are not allowed here"),
    "a number in quotes": (b"optim:\n  lr: '0.1'\n", "optim.lr is '0.1' (bad.yaml:2): expected a number, without quotes"),
    "true for a number": (b"seed: true\n", "seed is true (bad.yaml:1): expected a whole number"),
    "no number": (b"optim: {lr: .nan}\n", "optim.lr is .nan (bad.yaml:1): expected a number"),
    "infinity": (b"optim: {lr: inf}\n", "optim.lr is inf (bad.yaml:1): expected a number"),
    "a date": (b"seed: 2024-01-01\n", "seed is 2024-01-01 (bad.yaml:1): expected a whole number"),
    "a mapping for a number": (b"seed: {a: 1}\n", "seed is a mapping (bad.yaml:1): expected a whole number"),
    "a tag of Python": (b"seed: !!python/object/apply:os.system [ls]\n", "seed is [ls] (bad.yaml:1): expected a whole number"),
    "a list that holds itself": (b"seed: &a [*a]\n", "seed is [...] (bad.yaml:1): expected a whole number"),
    "lists without end": (b"seed: " + b"[" * 3000, "are nested too deeply"),
    "an unknown task": (b"task: language\n", "task is 'language': there is no such task; there is image_class"),
    "a list as task": (b"task: [a]\n", "task is [a] (bad.yaml:1): expected text"),
    "no task": (b"task:\n", "task is empty (bad.yaml:1): expected text"),
    "null for a word": (b"optim: {name: null}\n", "optim.name is null (bad.yaml:1): expected text"),
    "a number below its range": (b"seed: -1\n", "seed is -1: it must be at least 0"),
    "a number above its range": (b"seed: 99999999999999999999\n", "seed is 99999999999999999999: it must be at least 0"),
    "an unknown source": (b"data: {source: cifar}\n", "data.source is cifar (bad.yaml:1): expected one of digits, mnist"),
    "a list of another length": (b"model: {channels: [1,2,3]}\n", "model.channels is [1, 2, 3] (bad.yaml:1): expected a list"),
    "two durations": (b"train: {epochs: 1, steps: 2}\n", "train.epochs is 1 and train.steps is 2: give one of them"),
    "unlike lists": (b"data: {mean: [1,2], std: [1,2,3]}\n", "data.mean has 2 values and data.std 3"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "sentence"), FILES.values(), ids=FILES)
def test_a_file(content: bytes, sentence: str, refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "bad.yaml", content)
    refused(["samerun", "launch", "--dry-run", "--recipe", "bad.yaml"], sentence, 3)


@pytest.mark.parametrize(
    ("name", "sentence", "code"),
    [
        ("fifo", "fifo: it is not a text file", 3),
        ("folder", "recipe folder: that is a folder; give a YAML file", 3),
        ("none.yaml", "recipe none.yaml: there is no such file", 3),
        ("digts", "there is no recipe and no file of that name; did you mean digits?", 3),
        ("/dev/null", "/dev/null: it is not a text file", 3),
        ("", "--recipe is empty", 2),
    ],
)
@pytest.mark.parametrize("command", [["samerun", "launch", "--dry-run"], ["app.train"]], ids=["launch", "train"])
def test_what_is_no_file(command: list[str], name: str, sentence: str, code: int, refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "folder", None)
    os.mkfifo("fifo")
    refused([*command, "--recipe", name], sentence, code)


WORDS: dict[str, str] = {
    "optim.lr": "'optim.lr' (command line): expected key=value, as in optim.lr=0.1",
    "=0.1": "(command line)",
    "lr=0.1": "lr (command line): there is no such key; did you mean optim.lr?",
    "optim.lrr=0.1": "did you mean optim.lr",
    "optim=0.1": "optim is a section; give its keys one by one",
    "optim.lr=": "optim.lr is empty (command line): expected a number",
    "optim.lr=fast": "optim.lr is fast (command line): expected a number",
    "optim.lr=-0.1": "optim.lr is -0.1: it must be",
    "optim.lr=0,1": "optim.lr is 0,1 (command line): expected a number",
    "optim.lr:0.1": "'optim.lr:0.1' (command line): expected key=value",
    "optim.lr = 0.1": "contains spaces: write optim.lr=0.1",
    "optim.lr= 0.1": "contains spaces: write optim.lr=0.1",
    "seed=1 seed=2": "seed is given twice (command line: 1 and 2): keep one of them",
    "seed=1.5": "seed is 1.5 (command line): expected a whole number",
    "train.global_batch_size=0": "train.global_batch_size is 0: it must be",
    "train.global_batch_size=1e3": "train.global_batch_size is 1e3 (command line): expected a whole number",
    "model.name=resnet-18": "model.name is 'resnet-18': no such model; did you mean resnet18",
    "model.name=": "expected text",
    "model.channels=[1,2": "model.channels is [1,2 (command line): expected a list of 2 whole numbers",
    "data.mean=[]": "data.mean is [] (command line): expected a list of numbers",
    "augment.mixup=0.2 train.max_micro_batch=1": "mix pairs of neighbouring samples: set train.max_micro_batch to 2 or more",
    "augment.mixup=0.2 train.global_batch_size=63": "it must be a multiple of 2, because augment.mixup and augment.cutmix",
    "optim.nesterov=true optim.momentum=0": "optim.nesterov needs optim.momentum greater than 0",
    "profile.steps=20:10": "profile.steps is '20:10': it must be the first and the last step to record",
    "task=language": "task is 'language': there is no such task; there is image_classification, causal_lm, or a file",
    "task=": "task is empty (command line): expected text",
    "data.download=yes": "data.download is yes (command line): expected true or false",
}


@pytest.mark.parametrize(("words", "sentence"), WORDS.items(), ids=WORDS)
@pytest.mark.parametrize("command", [["samerun", "launch", "--dry-run"], ["app.train"]], ids=["launch", "train"])
def test_values_of_the_command_line(command: list[str], words: str, sentence: str, refused: Refused) -> None:
    refused([*command, *words.split()], sentence, 3)
