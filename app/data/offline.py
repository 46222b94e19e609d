"""Whether the hub of Hugging Face can be reached from here.

Its libraries try for half a minute and more before they say that it cannot. One look takes no longer than one of their tries.
"""

from __future__ import annotations

import logging
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


def why() -> str | None:
    """Return why the hub cannot be reached now, as a clause; None: it may be there."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if urllib.request.getproxies().keys() & {"https", "all"}:  # a proxy may know names that nobody here does
        return None
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=constants.HF_HUB_ETAG_TIMEOUT):
            return None
    except OSError as error:
        return f"{address.hostname} cannot be reached from here: {error.strerror or error}"


@contextmanager
def datasets_offline() -> Iterator[None]:
    """Keep `datasets` off the network, and from logging what our errors say.

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
