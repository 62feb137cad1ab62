"""Logs on a full disk, and logs of what peers say."""

import json
import os
import pty
import subprocess
import sys

import structlog
from structlog.testing import capture_logs

from gspo_services.shared.runtime.logs import EventLimit, OccasionalLog
from tests.support.clocks import VirtualClock

PROGRAM = """
import structlog
from gspo_services.shared.runtime.logs import configure_logging
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
from gspo_services.shared.runtime.logs import configure_logging
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


def test_a_flood_of_one_event_is_bounded_counted_and_hides_no_other() -> None:
    clock = VirtualClock()
    limit = EventLimit(burst=5, per_s=2, now=clock.now)

    def logged(event: str, **fields: object) -> dict[str, object] | None:
        try:
            return dict(limit(None, "warning", {"event": event, **fields}))
        except structlog.DropEvent:
            return None

    flood = [logged("hello_refused") for _ in range(1000)]
    assert [line for line in flood if line] == [{"event": "hello_refused"}] * 5
    assert logged("commit_failed") == {"event": "commit_failed"}
    clock.advance(0.5)
    assert logged("hello_refused", left_out=3) == {"event": "hello_refused", "left_out": 998}
    assert logged("hello_refused") is None
    clock.advance(3600.0)
    assert [logged("hello_refused") is not None for _ in range(6)] == [True] * 5 + [False]


FLOOD = """
import structlog
from gspo_services.shared.runtime.logs import BURST, configure_logging
configure_logging("broker")
for number in range(100_000):
    structlog.get_logger().warning("hello_refused", reason="r" * 1000)
"""


def test_a_process_that_is_flooded_writes_a_bounded_log() -> None:
    ended = subprocess.run([sys.executable, "-c", FLOOD], stderr=subprocess.PIPE, check=True)
    assert 1_000_000 < len(ended.stderr) < 4_000_000


def test_a_peer_gets_a_bounded_number_of_lines_and_the_next_says_how_many_were_left_out() -> None:
    clock = VirtualClock()
    with capture_logs() as lines:
        occasional = OccasionalLog(structlog.get_logger(), clock, burst=3)
        for _ in range(100):
            occasional.log("hello", ("hello", "a"), "info", peer="a")
        occasional.log("hello", ("hello", "b"), "info", peer="b")
        assert [line["peer"] for line in lines] == ["a", "a", "a", "b"]
        clock.advance(10.0)
        occasional.log("hello", ("hello", "a"), "info", peer="a")
        assert lines[-1]["left_out"] == 97


def test_new_names_do_not_get_new_lines_without_end() -> None:
    clock = VirtualClock()
    with capture_logs() as lines:
        occasional = OccasionalLog(structlog.get_logger(), clock, max_keys=10)
        for number in range(100_000):
            occasional.log("hello", ("hello", number), "info", peer=number)
        assert len(lines) == 11, "and one for all the others"
        clock.advance(10.0)
        occasional.log("hello", ("hello", "late"), "info", peer="late")
        assert [(line["event"], line.get("left_out")) for line in lines[11:]] == [
            ("lines_left_out", 99_989),
            ("hello", None),
        ]
        assert len(occasional._said) <= 11


def test_lines_go_to_standard_error_as_it_is_then_so_that_a_live_table_can_show_them_above() -> None:
    program = (
        "import io, sys, structlog; from gspo_services.shared.runtime.logs import configure_logging; "
        "configure_logging('x'); "
        "log = structlog.get_logger(); log.info('before'); "
        "own = sys.stderr; sys.stderr = io.StringIO(); log.info('during'); "
        "shown, sys.stderr = sys.stderr.getvalue(), own; log.info('after'); print('during' in shown)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["before", "after"]


LEVELS_PROGRAM = """
import structlog
from gspo_services.shared.runtime.logs import configure_logging
configure_logging("run", usual_level="warning")
structlog.get_logger().info("connected")
structlog.get_logger().warning("silent")
"""


def test_a_command_for_people_shows_warnings_alone_unless_more_is_asked_for() -> None:
    def shown(**variables: str) -> list[str]:
        environment = {name: value for name, value in os.environ.items() if name != "GSPO_LOG_LEVEL"} | variables
        done = subprocess.run(
            [sys.executable, "-c", LEVELS_PROGRAM], capture_output=True, text=True, check=True, env=environment
        )
        return [json.loads(line)["event"] for line in done.stderr.splitlines()]

    assert shown() == ["silent"]
    assert shown(GSPO_LOG_LEVEL="info") == ["connected", "silent"]
