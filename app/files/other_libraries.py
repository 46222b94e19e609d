"""Loads what other programs wrote, through their libraries: models, tokenizers, data sets, arrays.

Every call that could run code of what it loads is in this module; tests/files/test_other_libraries.py finds calls elsewhere.
Code of a folder or a repository is refused without a question on the terminal, and a pickle may hold only tensors and plain
containers. The libraries are imported when they are needed.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.errors import DataError

NEEDS_CODE = (
    "it needs code that comes with it, and such code is never run: use a model or tokenizer whose class the installed "
    "transformers has, or convert a data set to Parquet files on a machine that may run its code"
)


@contextmanager
def _no_own_code() -> Iterator[None]:
    """Raise PermissionError, with a sentence, for a library's error that what it loads needs code of its own."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if "trust_remote_code" in str(error) or "scripts are no longer supported" in str(error):
            raise PermissionError(NEEDS_CODE) from error
        raise


def model(kind: Any, folder: Path, **options: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the model that a class of transformers loads from a folder, and which names it did not find or not take.

    Raises PermissionError if it needs code of its own.
    """
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # our callers report them
    with _no_own_code():
        found: tuple[Any, Mapping[str, Any]] = kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, weights_only=True, **options
        )
    return found


def untrained(kind: Any, config: Any, **options: Any) -> Any:
    """Return the model that an Auto class of transformers builds from a configuration, with drawn weights."""
    return kind.from_config(config, trust_remote_code=False, **options)


def tokenizer(name: str | Path, *, revision: str | None = None, download: bool = False) -> Any:
    """Return the tokenizer of a folder, or of a name on the hub. Raises PermissionError if it needs code of its own."""
    from huggingface_hub import model_info
    from transformers import AutoTokenizer

    if download:  # without a network one request fails immediately; transformers would retry each file, for a minute in all
        model_info(str(name), revision=revision, timeout=15)
    with _no_own_code():
        return AutoTokenizer.from_pretrained(name, revision=revision, local_files_only=not download, trust_remote_code=False)


def data_set(name: str, config: str | None = None, **options: Any) -> Any:
    """Return what the `datasets` library opens by a name, as `load_dataset`. Raises PermissionError for a loading script."""
    from datasets import load_dataset

    with _no_own_code():
        return load_dataset(name, config, **options)


def saved_data_set(folder: Path) -> Any:
    """Return the data set that `save_to_disk` wrote into a folder."""
    from datasets import load_from_disk

    return load_from_disk(str(folder))


def array(path: Path) -> Any:
    """Return the array of an .npy file, mapped into memory, or the arrays of an .npz file. Raises as `numpy.load`."""
    import numpy as np

    return np.load(path, mmap_mode="r", allow_pickle=False)


def lora_config(**settings: Any) -> Any:
    """Return peft's configuration of LoRA adapters. Raises ImportError without peft."""
    return importlib.import_module("peft").LoraConfig(**settings)


def add_lora(config: Any, adapted: Any, name: str) -> None:
    """Give a model new adapters, which peft draws; none are loaded. Raises ValueError for layers that cannot have them."""
    importlib.import_module("peft").inject_adapter_in_model(config, adapted, adapter_name=name)


@contextmanager
def extra(what: str) -> Iterator[None]:
    """Say what to install if an import in the block fails. Raises DataError."""
    try:
        yield
    except ImportError as error:
        raise DataError(f'{what} needs a library that is not installed ({error}): pip install -e ".[formats]"') from error


@contextmanager
def datasets_offline() -> Iterator[None]:
    """Keep `datasets` off the network, and from logging what our errors report.

    Its `DownloadConfig(local_files_only=True)` does not do it: version 5.2 still asks the hub, five times in 23 seconds. It
    heeds the environment variable HF_DATASETS_OFFLINE, but only when it is imported, into the setting changed here.
    """
    import datasets

    settings, messages = datasets.config, datasets.logging
    offline, verbosity = settings.HF_HUB_OFFLINE, messages.get_verbosity()
    settings.HF_HUB_OFFLINE = True
    messages.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE = offline
        messages.set_verbosity(verbosity)
