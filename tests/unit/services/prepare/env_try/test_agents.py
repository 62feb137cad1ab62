"""Agents that are tried: functions, programs and services; each error once."""

import json
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.trying.commands import AGENT, Try


def test_an_agents_conversations_are_its_sequences(tries: Try) -> None:
    status, out, err = tries("--echo", "--tasks", "1", **AGENT)
    assert (status, err) == (0, "")
    assert "printed   the agent does well\n" in out
    assert "turn 2 begins another conversation\nuser\n    beside\nassistant (turn 2" in out
    shown = out[out.index("tokens  ") :].splitlines()
    assert shown[0].endswith(" 0 discarded; 2 sequences")
    assert shown[1:8] == [
        "  sequence 0",
        "  context   <|user|>train0<|end|><|assistant|>",
        "  trained   train0<|end|>",
        "  context   <|user|>Sure?<|end|><|assistant|>",
        "  trained   Sure?<|end|>",
        "  sequence 1",
        "  context   <|user|>beside<|end|><|assistant|>",
    ]
    assert "reward    1.5; by turn 0, 0, 1.5; from right 1, short 0.5\n" in out


def test_a_stop_string_ends_an_answer_where_the_agent_gets_it(tries: Try) -> None:
    (episode,) = tries("--echo", "--json", "--tasks", "1", do="stop", **AGENT).episodes
    assert [turn["end"] for turn in episode["turns"]] == ["stop", "stop string", "stop"]
    assert episode["sequences"][0][-1]["text"] == "Sur"


@pytest.mark.parametrize(
    ("do", "said", "has_place"),
    [
        ("no field", "agent: raised: KeyError: 'wrod'", True),
        ("nan", "agent: not_finite: the reward is nan", False),
        ("silent", "the agent has made no call: there are no sampled tokens to train on", False),
        ("wait", "agent: deadline: not done after 1.0 s", True),
    ],
)
def test_an_error_of_an_agent_is_shown_with_its_place(tries: Try, do: str, said: str, has_place: bool) -> None:
    deadline = {"agent.deadline_s": 1.0 if do == "wait" else 60.0}
    tried = tries("--echo", "--json", "--tasks", "1", do=do, **AGENT, **deadline)
    (episode,) = tried.episodes
    assert (tried.status, episode["end"]) == (1, "failed")
    assert episode["failure"].startswith(said)
    assert bool(re.search(r"tests/support/trying/tried\.py:\d+ in agent", episode["failure"])) == has_place
    assert episode["printed"] == [f"the agent does {do}"]


def test_an_agent_hears_why_the_template_refuses(tries: Try, strict_model: Path) -> None:
    status, out, _ = tries("--echo", "--tasks", "1", "--model", str(strict_model), do="refused", **AGENT)
    assert status == 1
    assert "the model's chat format refuses this" in out
    assert "roles must alternate user/assistant" in out


def test_a_function_that_is_not_there_ends_the_command(tries: Try) -> None:
    status, _, err = tries("--echo", **{**AGENT, "agent.function": "tests.support.trying.tried:no_such"})
    assert status == 2
    assert "gspo env try: agent.function is 'tests.support.trying.tried:no_such': " in err


def test_what_is_beside_the_configuration_is_found_from_elsewhere(
    tries: Try, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    monkeypatch.syspath_prepend("/")  # What is appended below goes with it.
    mine = "from tests.support.trying.tried import TriedEnvironment as Mine\nfrom tests.support.trying.tried import agent\n"
    (tmp_path / "mine_beside.py").write_text(mine)
    keys = {"environment.name": "mine_beside:Mine", "agent.function": "mine_beside:agent"}
    assert tries("--echo", "--tasks", "1", **keys).status == 0
    (tmp_path / "program.sh").write_text(f"#!/bin/sh\n'{sys.executable}' agent.py\n")
    (tmp_path / "program.sh").chmod(0o700)
    (tmp_path / "agent.py").write_text(PROGRAM)
    assert tries("--echo", "--tasks", "1", **{"agent.command": ["./program.sh"]}).status == 0


def test_a_program_is_an_agent(tries: Try, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "agent.py")]
    tried = tries("--echo", "--json", "--tasks", "1", **{"agent.command": command})
    (episode,) = tried.episodes
    assert (tried.status, episode["reward"], episode["printed"]) == (0, 6.0, ["the program prints"])
    assert episode["turns"][0]["messages"] == [{"role": "user", "content": "train0"}]


PROGRAM = """\
import json, os, urllib.request

task = json.load(open(os.environ["GSPO_TASK"]))
call = {"model": os.environ["GSPO_MODEL"], "messages": [{"role": "user", "content": task["word"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(call).encode(), headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("the program prints")
json.dump(len(answer), open(os.environ["GSPO_RESULT"], "w"))
"""


@pytest.fixture
def service() -> Iterator[str]:
    """An agent behind a URL: one call of the model, and the length of its answer is the reward."""

    class Solve(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            episode = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            call = {"model": episode["model"], "messages": [{"role": "user", "content": episode["task"]["word"]}]}
            headers = {"Authorization": f"Bearer {episode['api_key']}", "Content-Type": "application/json"}
            asked = urllib.request.Request(f"{episode['base_url']}/chat/completions", json.dumps(call).encode(), headers)
            with urllib.request.urlopen(asked) as response:
                answer = json.load(response)["choices"][0]["message"]["content"]
            body = json.dumps({"reward": {"length": len(answer)}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Solve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/solve"
        server.shutdown()


def test_a_service_is_an_agent(tries: Try, service: str) -> None:
    tried = tries("--echo", "--json", "--tasks", "2", **{"agent.url": service})
    assert tried.status == 0
    assert [episode["components"] for episode in tried.episodes] == [{"length": 6.0}, {"length": 6.0}]
