"""Where answers come from: a model in this process, a server, a person; and what is missing for them."""

import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gspo_services.rollout.tokenizer import ChatTokenizer
from tests.support.engines.scripted_sglang import INFO, event
from tests.support.trying.commands import Try


def test_a_model_in_this_process_shows_its_log_probs(tries: Try, random_model: Path) -> None:
    keys = {"sampling.max_turn_tokens": 4}
    tried = tries("--model", str(random_model), "--json", "--tasks", "1", **keys)
    (episode,) = tried.episodes
    sampled = next(run for run in episode["sequences"][0] if run["use"] == "trained")
    assert tried.status == 0
    assert all(-30 < logprob < 0 for logprob in sampled["logprobs"])
    (again,) = tries("--model", str(random_model), "--json", "--tasks", "1", **keys).episodes
    assert again["sequences"] == episode["sequences"], "the same seed"
    _, out, _ = tries("--tokens", "--tasks", "1", **keys, **{"model.path": str(random_model)})
    mean = sum(sampled["logprobs"]) / len(sampled["logprobs"])
    assert f"mean log-prob {mean:.3f})" in out
    assert f"    {sampled['token_ids'][0]:>8}  {sampled['logprobs'][0]:>9.4f}  " in out


def test_a_person_may_type_the_answers(tries: Try, monkeypatch: pytest.MonkeyPatch) -> None:
    def typing(content: bytes) -> None:
        reading, writing = os.pipe()
        os.write(writing, content)
        os.close(writing)
        monkeypatch.setattr(sys, "stdin", os.fdopen(reading))

    typing(b"one\\\nmore\ntwo\n")
    tried = tries("--type", "--json", "--tasks", "1")
    (episode,) = tried.episodes
    assert [turn["content"] for turn in episode["turns"]] == ["one\nmore", "two"]
    assert (tried.status, tried.err) == (0, "the environment prints\n")
    sys.stdin.close()
    typing(b"one\n")
    status, _, err = tries("--type", "--tasks", "1")
    assert status == 1
    assert err == "gspo env try: standard input has ended: --type needs a line for each answer\n"
    sys.stdin.close()


def test_what_is_missing_for_answers_is_said_with_the_way_out(tries: Try, chat_model: Path, tmp_path: Path) -> None:
    for words, said in (
        (["--model", str(tmp_path / "nowhere"), "--echo"], r"nowhere is no model directory: .*gspo model tiny"),
        ([], r"has no weights \(\*\.safetensors; pickles are not read\): give another directory with --model, .* or --echo"),
        (["--url", "http://127.0.0.1:9"], r"--url http://127.0.0.1:9: no SGLang server answers there: "),
    ):
        status, out, err = tries(*words)
        assert (status, out) == (2, "")
        assert re.search(said, err), err
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in chat_model.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "model.safetensors").write_bytes(b"none")
    status, _, err = tries("--model", str(broken))
    assert status == 2
    assert "broken cannot be loaded: " in err


def test_a_large_model_is_loaded_only_by_name(tries: Try, chat_model: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.mkdir()
    for path in chat_model.iterdir():
        (large / path.name).write_bytes(path.read_bytes())
    with (large / "model.safetensors").open("wb") as file:
        file.truncate(5 * 2**30)  # a hole, which takes no room
    status, _, err = tries(**{"model.path": str(large)})
    assert status == 2
    assert "with 5 GiB of weights: --model" in err
    status, _, err = tries("--model", str(large))
    assert "cannot be loaded" in err, "it was tried"


@contextmanager
def sglang(chat_model: Path, version: str = "7", status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers "fine" to whatever it is asked; gives its URL and what it was asked."""
    tokenizer = ChatTokenizer(chat_model)
    ids = [*tokenizer.encode("fine"), *tokenizer.encode("<|end|>")]
    asked: list[Any] = []

    class Serve(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(INFO if self.path == "/server_info" else {"weight_version": version})

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if status != 200:
                self.answer({"error": {"message": "broken"}})
                return
            self.send_response(200)
            self.end_headers()
            for number, token in enumerate(ids, 1):
                finish = "stop" if number == len(ids) else None
                self.wfile.write(b"data: " + json.dumps(event([token], number, finish, version)).encode() + b"\n\n")

        def answer(self, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(200 if body == INFO or "weight_version" in body else status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


def test_a_server_is_asked_whatever_version_it_serves(tries: Try, chat_model: Path) -> None:
    with sglang(chat_model) as (url, asked):
        tried = tries("--url", url, "--json", "--tasks", "1")
    (episode,) = tried.episodes
    assert tried.status == 0
    assert [turn["content"] for turn in episode["turns"]] == ["fine", "fine"]
    assert set(episode["sequences"][0][1]["logprobs"]) == {-1.0}
    assert len(asked) == 2
    assert f"note: the server serves /m, and the tokenizer is that of {chat_model}\n" in tried.err


def test_a_server_that_cannot_be_used_or_fails_is_said(tries: Try, chat_model: Path) -> None:
    with sglang(chat_model, version="default") as (url, asked):
        status, _, err = tries("--url", url, "--tasks", "1")
    assert (status, asked) == (2, [])
    assert "start this server with --weight-version 1" in err
    with sglang(chat_model, status=500) as (url, _):
        status, out, err = tries("--url", url, "--tasks", "3")
    assert status == 1
    assert re.search(r"gspo env try: .*/generate.*500", err), err
    assert out.count("episode ") == 1, "no other episode would fare better"
