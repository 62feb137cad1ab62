"""A Hugging Face hub on this machine: what huggingface_hub asks, answered from memory."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
TOKEN = "hf_the_right_one"


class Hub:
    """``repositories``: files by "models/owner/name" or "datasets/owner/name". ``gated`` ones ask for an agreement."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.url = ""
        self.asked: list[str] = []
        """The paths of all requests."""
        self.breaks_off = False
        """Files end in their middle."""

    def answer(self, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and content."""
        self.asked.append(path)
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        if parts[0] == "api":
            repository, rest = "/".join(parts[1:4]), parts[4:]
        else:
            kind = "datasets" if parts[0] == "datasets" else "models"
            rest = parts[1:] if kind == "datasets" else parts
            repository, rest = f"{kind}/{rest[0]}/{rest[1]}", rest[2:]
        files = self.repositories.get(repository)
        if files is None or (repository in self.private and token != TOKEN):
            return 401 if not token else 404, {"X-Error-Code": "RepoNotFound"}, b""
        if rest[:1] == ["revision"]:
            if rest[1] not in ("main", "v1", COMMIT):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            told = {"id": repository.partition("/")[2], "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return 200, {"Content-Type": "application/json"}, json.dumps(told).encode()
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        if repository in self.gated and token != TOKEN:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        name = "/".join(rest[2:])
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        etag = f'"{hashlib.sha1(files[name]).hexdigest()}"'
        return 200, {"ETag": etag, "X-Repo-Commit": COMMIT}, files[name]


@contextmanager
def hub() -> Iterator[Hub]:
    """Serve it; set HF_ENDPOINT to ``url`` before huggingface_hub is imported."""
    found = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_content=True)

        def do_HEAD(self) -> None:
            self._answer(with_content=False)

        def _answer(self, *, with_content: bool) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            status, headers, content = found.answer(self.path, token)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_content:
                if found.breaks_off and "resolve" in self.path:
                    self.wfile.write(content[: len(content) // 2])
                    self.close_connection = True
                else:
                    self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
