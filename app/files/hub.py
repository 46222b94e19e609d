"""Models of the Hugging Face hub, written `hub:OWNER/NAME@REVISION`, in huggingface_hub's cache on this machine.

A run resolves the revision, a branch, tag or commit, once: its recipe then has `hub:OWNER/NAME@REVISION:COMMIT`. One process of
each node downloads that commit; everything else reads the cache and needs no network. HF_HOME, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE are huggingface_hub's, which is imported when it is needed.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from app.errors import DataError

PREFIX = "hub:"
EXPECTED = "expected hub:OWNER/NAME or hub:OWNER/NAME@REVISION, where REVISION is a branch, a tag or a commit"
_PLACE = re.compile(r"hub:([\w-][\w.-]*/[\w-][\w.-]*)(?:@([^\s:]+)(?::([0-9a-f]{40}))?)?")
_COMMIT = re.compile("[0-9a-f]{40}")
_ANSWER_S = 3.5
"""Longest time to wait for the hub's first answer. Without a network, a name server or a dropped packet can take minutes."""
_SMALL = ["*.json", "*.jinja", "*.txt", "*.model"]
"""Configuration and tokenizer, as transformers saves them."""
_WEIGHTS = ["model.safetensors", "model-*.safetensors"]
_FIRST_OF_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


class HubModel(NamedTuple):
    """A model of the hub."""

    name: str
    """OWNER/NAME."""
    revision: str
    commit: str | None
    """The commit that the revision was resolved to; None: not resolved yet."""


def parsed(place: str | None) -> HubModel | None:
    """Return the model that a place names; None for any other text."""
    if not (found := _PLACE.fullmatch(place or "")):
        return None
    name, revision, commit = found.groups()
    return HubModel(name, revision or "main", commit or (revision if _COMMIT.fullmatch(revision or "") else None))


def revision(place: str) -> str:
    """Return a place `hub:...` without the commit that its revision was resolved to."""
    model = _model(place)
    return f"{PREFIX}{model.name}@{model.revision}"


def differ(one: str | None, other: str | None) -> bool:
    """Return True if two places name models of the hub of different commits."""
    first, second = parsed(one), parsed(other)
    return first is not None and second is not None and first.commit != second.commit


def is_malformed(place: str | None) -> bool:
    """Return True for a place that begins with `hub:` and names no model."""
    return (place or "").startswith(PREFIX) and parsed(place) is None


def resolved(key: str, place: str, *, download: bool) -> str:
    """Return the place `hub:...` of a recipe's key with the commit of its revision.

    The hub has the answer if `download` is set and it can be reached, else this machine's cache. Raises DataError.
    """
    from huggingface_hub import HfApi, errors

    model = _model(place)
    if model.commit is not None:
        return place

    def commit(*, here: bool) -> str:
        return HfApi().resolve_revision(model.name, revision=model.revision, local_files_only=here).resolved

    refusal = _not_cached(key, place)
    if download:
        try:
            return f"{revision(place)}:{_answer(key, place, lambda: commit(here=False))}"
        except DataError as error:
            refusal = str(error)
    try:
        found = commit(here=True)
    except errors.RevisionResolutionError as error:
        raise DataError(refusal) from error
    if download:
        sys.stderr.write(f"note: {refusal}. The commit in the cache is used, {found}\n")
    return f"{revision(place)}:{found}"


def folder(key: str, place: str, *, weights: bool, download: bool = False) -> Path:
    """Return the folder in this machine's cache with the files of the model `hub:...` that a recipe's key names.

    They are its configuration and tokenizer, and with `weights` its safetensors files. Missing files are downloaded if
    `download` is set, for which one process of each node calls this first. Raises DataError if files are missing, within 5
    seconds if the hub cannot be reached, or if the model has no weights as safetensors.
    """
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    model = _model(place)
    wanted = model.commit or model.revision
    patterns = [*_SMALL, *(_WEIGHTS if weights else ())]

    def fetched(*, here: bool) -> Path:
        return Path(snapshot_download(model.name, revision=wanted, allow_patterns=patterns, local_files_only=here))

    with suppress(errors.LocalEntryNotFoundError):
        found = fetched(here=True)  # without a check of its files if another program has downloaded it
        if any((found / name).exists() for name in (*_FIRST_OF_WEIGHTS, *(() if weights else ("config.json",)))):
            return found
    if not download:
        raise DataError(_not_cached(key, place))
    about = _answer(key, place, lambda: HfApi().model_info(model.name, revision=wanted))
    names = {file.rfilename for file in about.siblings or ()}
    if weights and names.isdisjoint(_FIRST_OF_WEIGHTS):
        others = ", ".join(sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))))
        raise DataError(
            f"{key} is {place}, which has no model.safetensors{others and f', only {others}'}: pickled weights are not loaded "
            "from the hub. Choose a revision with safetensors, or convert the weights and give their folder"
        )
    sys.stderr.write(f"downloading {place} into {constants.HF_HUB_CACHE}\n")
    remedy = "start again, which keeps complete files, or set HF_HOME to a disk with more space"
    with _explained(key, place, f"it cannot be downloaded into {constants.HF_HUB_CACHE}", remedy):
        return fetched(here=False)


def name(text: str) -> str:
    """Return OWNER/NAME, the value of an option. Raises ArgumentTypeError for another text."""
    if (model := parsed(PREFIX + text)) is None or model.name != text:
        raise ArgumentTypeError(f"{text} is not OWNER/NAME")
    return text


def is_private(name: str) -> bool | None:
    """Return whether a model of the hub is private; None: it does not exist. Raises DataError without a token or an answer."""
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise DataError("an upload to the hub needs a token: run `hf auth login`, or set HF_TOKEN to one with write permission")

    def ask() -> bool | None:
        return HfApi().model_info(name).private if HfApi().repo_exists(name) else None

    found: bool | None = _answer("--push", PREFIX + name, ask, "run this command where there is a network")
    return found


def push(folder: Path, files: Sequence[str], name: str, *, private: bool, message: str) -> str:
    """Upload files of a folder as one commit, which replaces all weights of the model, and return the address of its page.

    Makes the model if it does not exist. Raises DataError.
    """
    from huggingface_hub import HfApi

    older = ["*.safetensors", "*.safetensors.index.json"]  # which would be taken for the model
    where: dict[str, Any] = {"repo_id": name, "folder_path": folder, "allow_patterns": [*files], "delete_patterns": older}
    try:
        address = HfApi().create_repo(name, private=private, exist_ok=True)
        HfApi().upload_folder(**where, commit_message=message)
    except Exception as error:  # of the network, the disk or huggingface_hub
        why = str(error).partition("\n")[0]
        raise DataError(
            f"{folder} cannot be uploaded to {name} ({why}): correct that, for example by a token with write permission, then "
            f"`hf upload {name} {folder}`"
        ) from error
    return str(address)


def _model(place: str) -> HubModel:
    model = parsed(place)
    assert model is not None, f"{place} is not checked"
    return model


def _command(place: str) -> str:
    model = _model(place)
    return f"`hf download {model.name} --revision {model.commit or model.revision}`"


def _not_cached(key: str, place: str) -> str:
    from huggingface_hub import constants

    return (
        f"{key} is {place}, which is not in this machine's cache ({constants.HF_HUB_CACHE}), and downloads are off: set "
        f"train.download=true, or run {_command(place)} here"
    )


def _answer(key: str, place: str, ask: Callable[[], Any], remedy: str = "") -> Any:
    """Return what the hub answers to a request. Raises DataError, within 5 seconds if it cannot be reached."""
    from multiprocessing.pool import ThreadPool

    from huggingface_hub import constants

    remedy = remedy or f"run {_command(place)} on a machine with a network and the same HF_HOME, or give a folder"
    with _explained(key, place, f"{constants.ENDPOINT} cannot be reached", remedy), closing(ThreadPool(1)) as threads:
        return threads.apply_async(ask).get(_ANSWER_S)  # a thread that still waits keeps no process alive


@contextmanager
def _explained(key: str, place: str, problem: str, remedy: str) -> Iterator[None]:
    """Raise DataError for what huggingface_hub raises in the block; `problem` and `remedy` are for unknown errors."""
    from huggingface_hub import constants, errors

    model = _model(place)
    try:
        yield
        return
    except errors.GatedRepoError:
        why = f"is gated: accept its terms at {constants.ENDPOINT}/{model.name}, and set HF_TOKEN or run `hf auth login`"
    except errors.RevisionNotFoundError:
        why = f"has no branch, tag or commit {model.commit or model.revision}: correct the text after @"
    except errors.RepositoryNotFoundError:
        why = "does not exist on the hub, or is private: correct the name, or set HF_TOKEN or run `hf auth login`"
    except Exception as error:
        reason = str(error.__cause__ or error).partition("\n")[0] or f"no answer within {_ANSWER_S:g} s"
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else reason
        raise DataError(f"{key} is {place}, and {problem} ({reason}): {remedy}") from error
    raise DataError(f"{key} is {place}, which {why}")
