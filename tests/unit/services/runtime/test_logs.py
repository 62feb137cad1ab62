"""Logs on a full disk, and logs of what peers say."""

import json
import os
import pty
import subprocess
import sys

PROGRAM = """
import structlog
from services.runtime.logs import configure_logging
configure_logging("broker")
for number in range(200):
    structlog.get_logger().error("commit_failed", number=number, padding="x" * 100)
print("alive")
"""


def test_a_full_disk_costs_lines_of_the_log_and_not_the_process() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=full, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "alive\n")


HOSTILE = """
import structlog
from services.runtime.logs import configure_logging
configure_logging("broker")
log = structlog.get_logger()
log.warning("refused", reason="\\x1b[2J\\nforged \\u202e", peer="[/INST]", short="\\x1b[3J", number=3)
try:
    raise ValueError("\\x1b[4J\\nforged")
except ValueError:
    log.exception("environment_failed")
log.error("stopped_by_error", error="first\\nforged\\x1b", huge="x" * 1_000_000)
"""


def test_what_peers_say_is_escaped_and_bounded_in_a_log_of_json() -> None:
    ended = subprocess.run([sys.executable, "-c", HOSTILE], stderr=subprocess.PIPE, text=True, check=True)
    refused, _, stopped = ended.stderr.splitlines()
    assert json.loads(refused)["reason"] == "\x1b[2J\nforged \u202e"
    assert refused.isprintable()
    assert len(stopped) < 10_000
    assert json.loads(stopped)["huge"].strip("x") == "... (1,000,000 characters) ..."


def test_what_peers_say_reaches_a_terminal_as_text() -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "wb") as terminal:
        subprocess.run([sys.executable, "-c", HOSTILE], stderr=terminal, check=True, env={**os.environ, "NO_COLOR": "1"})
    with open(ours, "rb", buffering=0) as terminal:
        text = os.read(terminal.fileno(), 65_536).decode()
    assert "\\x1b[2J\\nforged \\u202e" in text
    assert "\\x1b[4J" in text
    assert not [sequence for sequence in ("\x1b[2J", "\x1b[3J", "\x1b[4J") if sequence in text]
    assert "[/INST]" in text
    assert not any(line.startswith("forged") for line in text.splitlines())
