"""A real headless browser, spoken to over the pipe of its DevTools protocol: no driver, no library, no network.

https://chromedevtools.github.io/devtools-protocol/: messages are JSON, each ended by a zero byte, on the descriptors 3 (in)
and 4 (out) of the browser.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Seen:
    """What the browser made of a page."""

    complaints: list[str]
    """Errors and warnings of its console, exceptions, failed requests."""
    requests: list[str]
    """Addresses that it asked for, besides the page and what is written in it."""
    found: Any
    """What the expression returned."""


class Browser:
    """One browser with one page, at a time of one width."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self._profile = tempfile.TemporaryDirectory(prefix="samerun-browser-")
        to_browser, from_us = os.pipe()
        from_browser, to_us = os.pipe()
        # The shell moves the descriptors to where the browser looks for them; that of Debian's `sh` takes one digit only.
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{to_us}'
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
        quiet = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-extensions")
        profile = f"--user-data-dir={self._profile.name}"
        self._process = subprocess.Popen(
            ["bash", "-c", command, PROGRAM, *options, *quiet, profile, "--remote-debugging-pipe", "about:blank"],
            pass_fds=(to_browser, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(to_us)
        self._in, self._out = from_us, from_browser
        self._number, self._unread, self._events = 0, b"", list[dict[str, Any]]()
        self._session: dict[str, str] = {}
        page = next(target for target in self._ask("Target.getTargets")["targetInfos"] if target["type"] == "page")
        attached = self._ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def look(self, page: Path, expression: str, *, width: int = 390, scripts: bool = True) -> Seen:
        """Load a file into a window so wide, and return what `expression` is there."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 600)
        self._ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        self._events.clear()
        self._ask("Page.navigate", url=page.resolve().as_uri())
        self._await("Page.loadEventFired")
        found = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        told = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed"}
        asked = [event["params"]["request"]["url"] for event in self._events if event["method"] == "Network.requestWillBeSent"]
        return Seen(
            complaints=[json.dumps(event) for event in self._events if event["method"] in told],
            requests=[url for url in asked if not url.startswith("data:") and url != page.resolve().as_uri()],
            found=found["result"].get("value"),
        )

    def close(self) -> None:
        self._send("Browser.close", {})
        self._process.wait(timeout=TIMEOUT_S)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = self._send(method, parameters)
        while True:
            message = self._receive()
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def _await(self, method: str) -> None:
        while not any(event["method"] == method for event in self._events):
            self._receive()

    def _send(self, method: str, parameters: dict[str, Any]) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        if method.startswith(("Target.", "Browser.")):
            message.pop("sessionId", None)
        os.write(self._in, json.dumps(message).encode() + b"\0")
        return self._number

    def _receive(self) -> dict[str, Any]:
        """The next message; events are kept."""
        end_s = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._out], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, f"the browser says nothing for {TIMEOUT_S} s"
            part = os.read(self._out, 1 << 20)
            assert part, f"the browser has gone with {self._process.wait()}"
            self._unread += part
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message)
        return message
