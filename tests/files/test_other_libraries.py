"""Code that comes with a model, a tokenizer or a data set: no command runs it, whatever is answered on the terminal."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import pty
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import REPOSITORY, Started, train
from small_tokenizer import write_tokenizer

from app.errors import CheckpointError, DataError, RecipeError, RunFolderError
from launch import cli

ROOM = REPOSITORY / "app" / "files" / "other_libraries.py"
LOADERS = {
    *("from_pretrained", "from_config", "load_dataset", "load_dataset_builder", "load_from_disk"),
    *("load_adapter", "inject_adapter_in_model", "LoraConfig", "read_pickle", "unsafe_load", "full_load"),
}
"""Functions that may run what they load, or read what a folder names."""
OWNERS = {"torch", "np", "numpy", "yaml", "hub", "jit", "pickle", "joblib", "dill", "marshal", "shelve"}
"""Modules whose `load` may do so."""
UNPICKLERS = {"pickle", "joblib", "dill", "cloudpickle", "marshal", "shelve", "peft"}
SAFE = {"trust_remote_code": False, "weights_only": True, "allow_pickle": False}
"""The only value of each keyword."""


def loading(tree: ast.AST) -> Iterator[str]:
    """What of a file loads something in a way that may run it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            *owner, name = ast.unparse(node.func).split(".")
            if name in LOADERS or (name in ("load", "loads") and OWNERS & set(owner[-1:])):
                yield ast.unparse(node.func)
            if name == "import_module":
                yield from UNPICKLERS & {getattr(argument, "value", None) for argument in node.args}
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in UNPICKLERS)
        elif isinstance(node, ast.ImportFrom) and node.module:
            top = node.module.split(".")[0]
            yield from (name.name for name in node.names if name.name in LOADERS or (name.name == "load" and top in OWNERS))
            yield from {top} & UNPICKLERS


def tree_uses(tree: ast.AST, module: str) -> set[str]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == module]
    return {ast.unparse(node) for node in found}


def test_every_call_that_may_run_what_it_loads_is_in_one_module() -> None:
    folders = ("app", "launch", "benchmarks", "examples")
    files = [file for folder in folders for file in sorted((REPOSITORY / folder).rglob("*.py"))]
    assert len(files) > 150
    assert len(list(loading(ast.parse(ROOM.read_text())))) >= 8
    for file in files:
        tree, where = ast.parse(file.read_text()), file.relative_to(REPOSITORY)
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg in SAFE:
                assert ast.unparse(node.value) == str(SAFE[node.arg]), f"{where}:{node.value.lineno}"
        # Scripts that stand alone read our own digits: by default NumPy unpickles nothing.
        allowed = {"np.load"} if where.parts[0] in ("benchmarks", "examples") else set()
        if where.name == "foreign_weights.py":  # its unpickler makes placeholders of everything that could be called
            allowed = {"pickle"}
            assert tree_uses(tree, "pickle") == {"pickle.Unpickler"}
        assert file == ROOM or set(loading(tree)) <= allowed, where


class Marking:
    """What a pickle runs that makes this file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file that code of a folder would write."""
    return tmp_path / "ran"


@pytest.fixture
def hostile(tmp_path: Path, marker: Path) -> Path:
    """A folder whose model and tokenizer are of classes of its own, and whose weights are a pickle that runs something."""
    folder = Path(write_tokenizer(tmp_path / "hostile"))
    (folder / "own.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
        "from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast\n"
        "class Config(GPT2Config):\n    model_type = 'own'\n"
        "class Model(GPT2LMHeadModel):\n    config_class = Config\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": [None, "own.OwnTokenizer"]}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "architectures": ["Model"], "auto_map": names}))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Marking(marker)}))
    return folder


def test_a_yes_on_the_terminal_runs_no_code_of_a_folder(hostile: Path, marker: Path) -> None:
    typist, terminal = pty.openpty()
    os.write(typist, b"y\n" * 20)
    finished = Started([sys.executable, "-m", "launch.cli", "generate", str(hostile), "Call me"], stdin=terminal).wait()
    os.close(terminal)
    os.close(typist)
    assert finished.returncode == RunFolderError.exit_code, finished.output
    assert "such code is never run" in finished.output, finished.output
    assert "[y/N]" not in finished.output
    assert not marker.exists()


@pytest.mark.parametrize("what", ["tokenizer", "loading script"])
def test_nor_does_a_yes_that_is_piped(
    what: str, hostile: Path, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    (tmp_path / "text.txt").write_text("Call me Ishmael.")
    commands = {
        "tokenizer": ["tokenize", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), "--tokenizer", str(hostile)],
        "loading script": ["inspect", "data.source=huggingface", f"data.path={tmp_path / 'scripted'}", "--recipe", "digits"],
    }
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").write_bytes((hostile / "own.py").read_bytes())
    assert cli.main(["data", *commands[what]]) == DataError.exit_code
    assert "such code is never run" in capfd.readouterr().err
    assert not marker.exists()


def test_a_training_refuses_a_model_with_code_and_weights_that_run_some(hostile: Path, marker: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"task: causal_lm\nmodel:\n  path: {hostile}\n")
    refused = train("cpu", tmp_path / "run", "--recipe", str(recipe))
    assert refused.returncode == RecipeError.exit_code, refused.output
    assert "such code is never run" in refused.output
    refused = train("cpu", tmp_path / "run", "train.steps=1", f"train.init_from={hostile}")
    assert refused.returncode == CheckpointError.exit_code, refused.output
    assert "pytorch_model.bin is damaged, or has no weights that can be read (torch.save did not write it)" in refused.output
    assert not marker.exists()
