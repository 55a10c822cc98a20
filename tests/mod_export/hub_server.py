"""A server that answers like the Hugging Face hub, and the environment in which a process uses it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Answers for the repositories in `root`, each with the revisions main and v1.

    Attributes:
        root: holds ORG/NAME/FILES.
        sent: the files that were downloaded.
    """

    root: ClassVar[Path]
    sent: ClassVar[list[str]]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path.startswith("api/models/"):
            repo, _, rest = path.removeprefix("api/models/").partition("/revision/")
            if not rest:
                repo, _, rest = repo.partition("/tree/")
                return self.tree(repo) if rest else self.about(repo, "main")
            return self.about(repo, rest)
        repo, _, rest = path.partition("/resolve/")
        revision, _, name = rest.partition("/")
        file = self.root / repo / name
        if not self.known(repo, revision):
            return None
        if not file.is_file():
            return self.answer(404, b"", **{"X-Error-Code": "EntryNotFound"})
        if self.command == "GET":
            self.sent.append(name)
        data = file.read_bytes()
        return self.answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', **{"X-Repo-Commit": COMMIT})

    def known(self, repo: str, revision: str) -> bool:
        if repo == "org/gated":
            self.answer(403, b"{}", **{"X-Error-Code": "GatedRepo"})
        elif not (self.root / repo).is_dir():
            self.answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", "v1", COMMIT):
            self.answer(404, b"{}", **{"X-Error-Code": "RevisionNotFound"})
        else:
            return True
        return False

    def about(self, repo: str, revision: str) -> None:
        if self.known(repo, revision):
            self.answer(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": []}).encode())

    def tree(self, repo: str) -> None:
        folder = self.root / repo
        files = [
            {"type": "file", "path": path.relative_to(folder).as_posix(), "size": path.stat().st_size,
             "oid": hashlib.sha1(path.read_bytes()).hexdigest()}
            for path in folder.rglob("*") if path.is_file()
        ]  # fmt: skip
        self.answer(200, json.dumps(files).encode())

    def answer(self, code: int, data: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def serving_hub(root: Path) -> Iterator[str]:
    """Serves the repositories in a folder; yields the address."""
    Hub.root, Hub.sent = root, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def hub_environment(endpoint: str, cache: Path) -> dict[str, str]:
    """Environment for a process, because the hub's client reads it at import."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return environment | {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                          "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # fmt: skip
