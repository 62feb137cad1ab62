"""Logs on a full disk."""

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
