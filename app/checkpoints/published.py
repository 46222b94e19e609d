"""The weights that torchvision publishes, by the names of its enums: from torch.hub's cache, or downloaded into it."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from urllib.parse import urlparse

import torch

from app.errors import CheckpointError

_DENSENET = re.compile(r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\.(?:weight|bias|running_mean|running_var))")


def file_of(name: str, *, download: bool) -> Path:
    """Return the file of the weights `name`, such as ResNet50_Weights.IMAGENET1K_V2.

    Raises CheckpointError if torchvision has none of that name, and as `cached`.
    """
    from torchvision import models  # takes seconds

    try:
        url: str = models.get_weight(name).url
    except (ValueError, KeyError):
        known = [str(it) for weights in map(models.get_model_weights, models.list_models()) for it in weights]
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else "its documentation lists them"
        raise CheckpointError(
            f"train.init_from is torchvision:{name}: the installed torchvision has no such weights; {hint}"
        ) from None
    return cached(url, download=download)


def cached(url: str, *, download: bool) -> Path:
    """Return where torch.hub keeps the file of a URL (TORCH_HOME), after it is downloaded if it is not there and may be.

    What is downloaded has the SHA-256 that its name begins. What already exists is trusted, as torch.hub does.
    Raises CheckpointError if it is not there and may not be downloaded, or cannot be.
    """
    path = Path(torch.hub.get_dir(), "checkpoints", Path(urlparse(url).path).name)
    if path.exists():
        return path
    if not download:
        raise CheckpointError(
            f"{path}, the published weights of train.init_from, does not exist, and downloads are off: set "
            f"train.download=true, or save {url} there"
        )
    digest = torch.hub.HASH_REGEX.search(path.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), digest[1] if digest else None, progress=False)
    except (OSError, RuntimeError) as error:  # a RuntimeError is of the digest
        raise CheckpointError(f"{url} cannot be downloaded to {path}: {error}. Try again, or save the file there") from error
    return path


def name_here(name: str) -> str:
    """Return what torchvision calls a tensor of a published file today: those of densenets are older."""
    return "".join(found.groups()) if (found := _DENSENET.fullmatch(name)) else name
