"""A run without a standby passes through nothing that only a standby needs."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo_services.cli.operator import operator
from gspo_services.shared.runtime.lifecycle import until_stopped
from gspo_services.shared.settings import load_settings
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.processes.ports import free_ports

ROOM = re.compile(r"gspo_services\.broker\.standby(\.|$)")
NOTE = """
import atexit, os, pathlib, sys
noted = pathlib.Path(sys.argv.pop(1))
def note():
    noted.write_text("\\n".join(sys.modules))
def note_and_leave(status, leave=os._exit):
    note()
    leave(status)
os._exit = note_and_leave  # a learner ends without what is registered for its end
atexit.register(note)
"""
PROCESS = (
    NOTE
    + """
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
)


def loaded_rooms(noted: Path) -> set[str]:
    """The modules of a standby that a process has loaded."""
    return {name for name in noted.read_text(encoding="utf-8").split("\n") if ROOM.match(name)}


@contextmanager
def an_engine() -> Iterator[str]:
    """The URL of a server that says what it is, and makes no tokens."""
    info = {"version": "0", "device": "cpu", "dtype": "float32", "tp_size": 1, "model_path": "/m"}
    content = json.dumps(info | {"incremental_streaming_output": True, "enable_deterministic_inference": True}).encode()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_request(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def write_configuration(directory: Path, engine: str) -> Path:
    model = save_chat_model(directory / "model", chat_tokenizer(TINY_TEMPLATE, "<|end|>"))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=512, **sizes)).save_pretrained(model)
    work, batch = free_ports(2)
    path = directory / "run.toml"
    path.write_text(
        f'[run]\ndirectory = "{directory / "run"}"\n[model]\npath = "{model}"\ndtype = "float32"\n'
        f'[broker]\nmetrics_port = 0\nwork_endpoint = "tcp://127.0.0.1:{work}"\nbatch_endpoint = "tcp://127.0.0.1:{batch}"\n'
        '[learner]\nmetrics_port = 0\nweights_endpoint = "tcp://127.0.0.1:*"\ndtype = "float32"\n'
        f'[rollout]\nmetrics_port = 0\nserver_url = "{engine}"\n',
        encoding="utf-8",
    )
    return path


NAMES = ("broker", "rollout", "learner")


@contextmanager
def processes(directory: Path, config: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The processes of a run, with what each says in NAME.log and, at its end, the modules that it has loaded in NAME."""
    with ExitStack() as stack:
        started = {}
        for name in NAMES:
            command = [sys.executable, "-c", PROCESS, str(directory / name), f"gspo_services.{name}", str(config)]
            says = stack.enter_context((directory / f"{name}.log").open("wb"))
            started[name] = stack.enter_context(subprocess.Popen(command, stdout=says, stderr=says))
            stack.callback(started[name].kill)
        yield started


@pytest.mark.timeout(300)
async def test_no_process_of_a_run_without_a_standby_loads_what_one_needs(tmp_path: Path) -> None:
    def said_by(name: str) -> str:
        return (tmp_path / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    with an_engine() as engine:
        config = write_configuration(tmp_path, engine)
        with processes(tmp_path, config) as started:
            never = asyncio.Event()
            async with operator(load_settings(config)) as asked:
                while not ((status := await asked.status(120.0))["learner"] and status["rollouts"]):
                    await until_stopped(never, 0.2)
                    assert [said_by(name) for name, process in started.items() if process.poll() is not None] == []
            for name in reversed(NAMES):
                started[name].send_signal(signal.SIGTERM)
                assert started[name].wait(60) == 0, said_by(name)
    for name in NAMES:
        assert f"gspo_services.{name}" in (tmp_path / name).read_text(encoding="utf-8").split("\n")
    assert {name: found for name in NAMES if (found := loaded_rooms(tmp_path / name))} == {}
