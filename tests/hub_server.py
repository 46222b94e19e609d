"""A server on loopback that answers what huggingface_hub asks of the Hugging Face hub: models, their files, and uploads."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

_FIRST = "0" * 40
"""The first commit of a new model, which has no files."""


class Hub:
    """What the server has, and what it was asked."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.folders: dict[str, dict[str, Path]] = {}
        """Folder of each commit of a model, by OWNER/NAME. The last one is the branch main."""
        self.gated: set[str] = set()
        """Models whose files are not for everyone."""
        self.private: dict[str, bool] = {}
        """Whether the models that were created are private."""
        self.requests: list[str] = []
        """Method and path of each request."""
        self.uploaded: dict[str, dict[str, bytes]] = {}
        """Files of the last upload to a model, by their paths."""

    def push(self, name: str, folder: Path) -> str:
        """Make a folder the newest commit of a model, and return the commit."""
        commit = hashlib.sha1(str(folder).encode()).hexdigest()
        self.folders.setdefault(name, {})[commit] = folder
        return commit

    def environment(self, home: Path) -> dict[str, str]:
        """Variables with which a process uses this server, and a cache of its own."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}

    def get(self, path: list[str]) -> tuple[Any, dict[str, str]]:
        """Return the body and the headers of the answer to a request for a model, or for a file of it."""
        is_file = path[0] != "api"
        owner, name, what, revision, *file = path if is_file else [*path[2:], "", "main", "", ""]
        model = f"{owner}/{name}"
        commits = self.folders.get(model, {})
        commit = [*commits][-1] if commits and revision == "main" else revision
        if commit not in commits:
            return {}, {"X-Error-Code": "RevisionNotFound" if commits else "RepoNotFound"}
        folder = commits[commit]
        if is_file and model in self.gated:
            return {}, {"X-Error-Code": "GatedRepo"}
        if is_file:
            content = folder.joinpath(*file).read_bytes()
            return content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
        files = [it.relative_to(folder).as_posix() for it in folder.rglob("*") if it.is_file()]
        if what == "tree":
            return [{"type": "file", "path": it, "size": 1, "oid": _FIRST} for it in files], {}
        about = {"id": model, "sha": commit, "private": self.private.get(model, False)}
        return {**about, "siblings": [{"rfilename": it} for it in files]}, {}

    def post(self, path: list[str], body: bytes) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the body and the headers of the answer to a part of an upload."""
        if path[1] == "repos":
            values = json.loads(body)
            name = f"{values['organization']}/{values['name']}"
            self.private.setdefault(name, values["visibility"] == "private")
            self.folders.setdefault(name, {_FIRST: Path(os.devnull)})
            return {"url": f"{self.endpoint}/{name}"}, {}
        if path[-2] == "preupload":
            names = [it["path"] for it in json.loads(body)["files"]]
            return {"files": [{"path": it, "uploadMode": "regular", "shouldIgnore": False} for it in names]}, {}
        if path[-2] == "commit":
            values = [it["value"] for it in map(json.loads, body.splitlines()) if it["key"] == "file"]
            self.uploaded["/".join(path[2:4])] = {it["path"]: base64.b64decode(it["content"]) for it in values}
        url = f"{self.endpoint}/o/n/commit/{_FIRST}"
        return {"commitOid": _FIRST, "commitUrl": url, "hookOutput": "", "errors": [], "warnings": []}, {}


@contextmanager
def serving() -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/").split("/")
            hub.requests.append(f"{self.command} {'/'.join(path)}")
            is_post = self.command == "POST"
            body, headers = hub.post(path, self.rfile.read(int(self.headers["Content-Length"]))) if is_post else hub.get(path)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(404 if "X-Error-Code" in headers else 200)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content if self.command != "HEAD" else b"")

        do_HEAD = do_GET = do_POST = answer  # noqa: N815 - http.server's names

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
