"""Standard streams on a full disk, or that nobody reads, do not change how a process ends."""

import subprocess
import sys
from typing import Final

import pytest

PROGRAM: Final = """
import sys, warnings
import structlog
from gspo_services.shared.runtime.errors import OccupiedError, exit_status
from gspo_services.shared.runtime.logs import configure_logging

def run():
    structlog.get_logger().info("x", padding="x" * 20_000)
    print("a library prints")
    sys.stderr.write("a library writes" * 1000)
    warnings.warn("a library warns")
    STATEMENT

configure_logging("learner")
sys.exit(exit_status(run))
"""
ENDS = {
    "return 0": 0,
    "raise OccupiedError('session a has this run')": 4,
    "sys.exit(3)": 3,
    "raise KeyError('x')": 1,
    "import os; os.abort()": -6,
}


@pytest.mark.parametrize("statement", ENDS)
@pytest.mark.parametrize("place", ["/dev/null", "/dev/full"])
def test_a_process_that_cannot_write_its_log_ends_with_its_own_status(statement: str, place: str) -> None:
    with open(place, "w") as output:
        program = PROGRAM.replace("STATEMENT", statement)
        ended = subprocess.run([sys.executable, "-c", program], stdout=output, stderr=output, check=False)
    assert ended.returncode == ENDS[statement]


RESULT: Final = """
import sys
from gspo_services.shared.runtime.output import protect_result
protect_result()
for number in range(100_000):
    print(number)
sys.exit(1)
"""


def test_a_reader_who_has_seen_enough_does_not_change_the_status() -> None:
    with subprocess.Popen([sys.executable, "-c", RESULT], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


@pytest.mark.parametrize(
    "words",
    [
        ("environments",),
        ("check", "examples/arithmetic.toml", "--settings"),
        ("check", "examples/arithmetic.toml", "--no-code"),
        ("--version",),
    ],
)
def test_a_result_without_room_is_one_sentence_and_status_2(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "gspo_services.cli.main", *words]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "standard output cannot be written: No space left on device" in ended.stderr
