"""Models of the Hugging Face hub as sources of weights (`hub:OWNER/NAME@REVISION`) and as the place of an export."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hub_server
import numpy as np
import pytest
import torch
from hub_server import Hub
from languages import save_network, write_tokens
from processes import ONE_THREAD, Finished, Started, launch, read, read_lines
from safetensors.torch import load_file
from saved import save_split

from app.recipe import recipe_file
from app.recipe.schema import Recipe

ASK = """
import json, sys, time
from app.errors import DataError
from app.files import hub
for function, place, keys, _ in json.loads(sys.argv[1]):
    start_s = time.monotonic()
    try:
        answer = getattr(hub, function)("train.init_from", place, **keys)
    except DataError as error:
        answer = error
    print(json.dumps([str(answer), time.monotonic() - start_s]))
"""
RECIPE = """
task: causal_lm
data: {path: $TEXT, sequence_length: 32}
model: {path: "hub:o/n"}
train: {init_from: "hub:o/n", download: true, global_batch_size: 2, evaluate_every_epochs: 0, max_validation_samples: 2}
optim: {lr: 0}
checkpoint: {every_steps: 1}
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server.serving() as served:
        yield served


def check(environment: dict[str, str], *expected: tuple[str, str, dict[str, bool], str]) -> None:
    """Call functions of `app.files.hub` in a process. Each answer or error has some words, and takes at most 5 s."""
    done = Started([sys.executable, "-c", ASK, json.dumps(expected)], env=environment).wait().check()
    answers = [json.loads(line) for line in done.output.splitlines() if line.startswith("[")]
    for (_, place, _, words), (answer, elapsed_s) in zip(expected, answers, strict=True):
        assert words in answer, place
        assert elapsed_s < 5, place


def test_what_cannot_be_had_is_refused_in_a_sentence(hub: Hub, tmp_path: Path) -> None:
    """Also by a hub that takes connections and never answers. Files in the cache need no network."""
    online, weights = {"download": True}, {"weights": True}
    for name, file in (("pickled", "pytorch_model.bin"), ("n", "model.safetensors")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_bytes(b"weights")
        commit = hub.push(f"o/{name}", tmp_path / name)
    hub.push("o/gated", tmp_path / "n")
    hub.gated.add("o/gated")
    environment, there = hub.environment(tmp_path / "home"), ("resolved", "hub:o/n", online, f"hub:o/n@main:{commit}")
    check(
        environment,
        ("resolved", "hub:o/n", {"download": False}, "which is not in this machine's cache"),
        ("folder", "hub:o/n", weights, "downloads are off: set train.download=true, or run `hf download o/n"),
        ("resolved", "hub:o/unknown", online, "is hub:o/unknown, which does not exist on the hub, or is private: correct the"),
        ("resolved", "hub:o/n@v9", online, "which has no branch, tag or commit v9: correct the text after @"),
        (
            "folder",
            "hub:o/gated",
            weights | online,
            f"which is gated: accept its terms at {hub.endpoint}/o/gated",
        ),
        ("folder", "hub:o/pickled", weights | online, "has no model.safetensors, only pytorch_model.bin: pickled"),
        there,
        ("folder", f"hub:o/n@main:{commit}", weights | online, f"snapshots/{commit}"),
    )
    new = ("resolved", "hub:o/new", online)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment["HF_ENDPOINT"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        check(environment, (*new, "cannot be reached (no answer within 3.5 s): run `hf download o/new --revision main`"))
    check({**environment, "HF_HUB_OFFLINE": "1"}, (*new, "cannot be reached (HF_HUB_OFFLINE is set)"), there)


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_run_has_the_commit_with_which_it_began(hub: Hub, tmp_path: Path) -> None:
    """Two ranks download it once. It resumes with that commit, without a network, after the branch has moved."""
    network = save_network(tmp_path / "net")
    commit = hub.push("o/n", network)
    text = write_tokens(tmp_path / "text", np.arange(1000) % 250, 257)
    environment = {**hub.environment(tmp_path / "home"), **ONE_THREAD, "TEXT": str(text)}
    recipe, run_dir = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE)
    words = ("--recipe", str(recipe), "--resume", "auto")
    begun = launch("fsdp2", run_dir, *words, "train.steps=1", processes=2, env=environment).check()
    place = f"hub:o/n@main:{commit}"
    assert f"initial weights from {place}: 21 tensors taken\n" in begun.output
    downloads = Counter(request for request in hub.requests if request.startswith("GET o/n/resolve"))
    files = ("config.json", "generation_config.json", "model.safetensors")
    assert downloads == {f"GET o/n/resolve/{commit}/{name}": 1 for name in files}
    values = recipe_file.flat(recipe_file.load(str(run_dir / "recipe.yaml")).recipe)
    assert (values["model.path"], values["train.init_from"], read(run_dir / "run.json")["init_from"]) == (place,) * 3
    for name, tensor in load_file(run_dir / "model.safetensors").items():
        assert torch.equal(tensor, load_file(network / "model.safetensors")[name]), name

    hub.push("o/n", save_network(tmp_path / "moved", rms_norm_eps=1e-3))
    count, environment["HF_HUB_OFFLINE"] = len(hub.requests), "1"
    alone = [sys.executable, "-m", "app.train", "--run-dir", str(run_dir), *words, "train.steps=2"]
    Started(alone, env=environment).wait().check()
    assert len(hub.requests) == count
    assert [line["step"] for line in read_lines(run_dir / "metrics.jsonl")] == [1, 2]
    assert f"{run_dir} is finished after step 2" in Started(alone, env=environment).wait().check().output

    pushing(hub, tmp_path / "home", run_dir, "--push", "me/lm", "--yes").check()
    assert hub.uploaded["me/lm"].keys() >= {*files, "model.json"}
    assert b"base_model: o/n\n" in hub.uploaded["me/lm"]["README.md"]


def pushing(hub: Hub, home: Path, run_dir: Path, *words: str, stdin: int = subprocess.DEVNULL, **variables: str) -> Finished:
    command = [sys.executable, "-m", "launch.cli", "export", str(run_dir), "--out", str(run_dir / "out"), "--force", *words]
    return Started(command, env={**hub.environment(home), **variables}, stdin=stdin).wait()


def test_an_export_is_uploaded_after_a_question(hub: Hub, tmp_path: Path) -> None:
    """Of the folder only what was exported. A new model is private, and a public one needs --public."""
    model = {"recipe": {"task": "image_classification"}, "facts": {"classes": ["a"], "channels": 1, "image_size": [8, 8]}}
    state = {"step": 2, "recipe": recipe_file.flat(Recipe()), "model": model, "best": None}
    save_split(tmp_path, 2, {"weight": {"a": torch.arange(9.0)}}, state=state)
    push = functools.partial(pushing, hub, tmp_path / "home", tmp_path, "--push", "me/images")
    assert "stdin is not a terminal: give --yes" in push().output
    assert "this is a rank of several" in push("--yes", RANK="0").output
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret.txt").write_text("not of the export")
    ours, theirs = os.openpty()
    os.write(ours, b"no\nyes\n")
    assert "nothing was uploaded" in push(stdin=theirs).output
    assert not hub.private
    done = push(stdin=theirs).check().output
    os.close(ours)
    os.close(theirs)
    assert "upload these 6 files to me/images, a new private model\n" in done
    assert f"{hub.endpoint}/me/images\n" in done
    assert hub.private["me/images"]
    files = ["README.md", "config.json", "model.json", "model.safetensors", "preprocessor_config.json", "recipe.yaml"]
    assert hub.uploaded["me/images"] == {name: (tmp_path / "out" / name).read_bytes() for name in files}
    hub.private["me/images"] = False
    assert "--push me/images is a public model: give --public, or another name" in push("--yes").output
