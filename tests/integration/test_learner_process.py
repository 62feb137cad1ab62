"""The learner's processes as the operating system sees them."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

PATIENCE_MS = 20_000
START = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True).wait()"


def test_a_rank_does_not_outlive_the_launcher_that_was_killed(tmp_path: Path) -> None:
    """A named pipe is its configuration: it opens when the rank reads it, and breaks when the rank is gone."""
    pipe = tmp_path / "run.toml"
    os.mkfifo(pipe)
    rank = [sys.executable, "-m", "services.learner", str(pipe)]
    environment = {**os.environ, "RANK": "1", "TORCHELASTIC_RUN_ID": "test"}
    with subprocess.Popen([sys.executable, "-c", START, *rank], env=environment) as launcher:
        end = os.open(pipe, os.O_WRONLY)
        try:
            watch = select.poll()
            watch.register(end, 0)
            assert watch.poll(0) == []
            launcher.send_signal(signal.SIGKILL)
            assert watch.poll(PATIENCE_MS) == [(end, select.POLLERR)]
        finally:
            os.close(end)
