"""A name of the hub, where the hub cannot be reached: one sentence, and soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub.constants
import pytest

from app.errors import DataError
from app.files import other_libraries
from app.tasks.causal_lm import configuration
from app.tasks.causal_lm.data import texts, tokenizers
from app.tasks.causal_lm.sections import ModelRecipe
from app.tasks.image_classification.data.open import download_data
from app.tasks.image_classification.sections import DataRecipe, Sections

NAME = "someone/something"
PICTURES = Sections(data=DataRecipe(source="huggingface", path=NAME, download=True))
ASKED: dict[str, Callable[[], object]] = {
    "pictures": lambda: download_data(PICTURES),
    "texts": lambda: texts._dataset(NAME, texts.Asked(columns=("text",))),
    "a tokenizer": lambda: tokenizers.Transformers.load(NAME, None),
    "a network": lambda: configuration.download(ModelRecipe(path=NAME, revision="a" * 40, download=True)),
}


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return lambda url: monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)


@pytest.mark.parametrize("what", ASKED)
def test_what_only_the_hub_has_is_told_to_be_out_of_reach(endpoint: Callable[[str], None], what: str) -> None:
    import transformers  # noqa: F401 - here, or its import counts

    endpoint("http://localhost:1")
    started_s = time.monotonic()
    with pytest.raises(DataError, match=rf"{NAME}\b.*localhost cannot be reached from here: Connection refused") as caught:
        ASKED[what]()
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started_s < 15, "the libraries' own tries take 23 seconds or more"


def test_a_host_that_answers_is_not_refused_and_a_name_that_nobody_knows_is_said(endpoint: Callable[[str], None]) -> None:
    server = HTTPServer(("localhost", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.handle_request, daemon=True).start()
    endpoint(f"http://localhost:{server.server_port}")
    assert other_libraries.why_hub_unreachable() is None
    server.server_close()
    endpoint("https://no-such-host.invalid")
    assert (other_libraries.why_hub_unreachable() or "").startswith("no-such-host.invalid cannot be reached from here: ")
