"""A server in the place of a teacher's: what it answers, a test decides."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[list[int]], tuple[int, Any]]
"""Status and content for one sequence."""


def scores_of(ids: list[int]) -> list[float]:
    """The log-probs of all but the first."""
    return [-(place + ids[place] / 100) for place in range(1, len(ids))]


def sound(ids: list[int]) -> tuple[int, Any]:
    """As SGLang answers."""
    rows = [[None, ids[0], None], *([score, ids[place], None] for place, score in enumerate(scores_of(ids), start=1))]
    return 200, {"meta_info": {"input_token_logprobs": rows}}


class PlayedTeacher(ThreadingHTTPServer):
    """Answers /generate as ``answer`` says, and /v1/detokenize as ``text`` does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer: Answer = sound
        self.text: Callable[[int], str] = str
        self.asked: list[list[int]] = []
        """The sequences that were to be scored."""
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, PlayedTeacher)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, content = 200, {"text": [self.server.text(ids[0]) for ids in body.get("tokens", [])]}
        if self.path == "/generate":
            assert (body["return_logprob"], body["logprob_start_len"]) == (True, 0)
            self.server.asked.append(body["input_ids"])
            status, content = self.server.answer(body["input_ids"])
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def played_teacher() -> Iterator[PlayedTeacher]:
    """It listens inside the block."""
    server = PlayedTeacher()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
