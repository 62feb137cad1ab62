"""A server's output: bounded, whole, and complete when the server's end is reported."""

import subprocess
import sys
from pathlib import Path

from gspo_services.rollout.sglang.output import ServerOutput
from gspo_services.shared.runtime.log_files import LogFile, LogLimits

SPEAKER = """
import sys
for number in range({lines}): print(f"{{number:099}}")
sys.stdout.flush()
sys.stderr.write("last words\\n")
"""


def speak(log: LogFile, lines: int) -> None:
    """A process that prints ``lines`` and ends; returns once the log should have it all."""
    output = ServerOutput(log)
    command = [sys.executable, "-c", SPEAKER.format(lines=lines)]
    with subprocess.Popen(command, stdout=output.sink, stderr=output.sink) as process:
        output.close_sink()
        process.wait()
    output.drain()


def test_output_is_rotated_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    log = LogFile(path=tmp_path / "rollout-0-sglang.log", limits=LogLimits(max_bytes=2**16, most_files=9))
    speak(log, 3000)
    files = sorted(tmp_path.iterdir(), reverse=True)
    assert len(files) >= 2
    assert [path.name for path in files][-1] == "rollout-0-sglang.log"
    assert max(path.stat().st_size for path in files) <= 2 * 2**16
    lines = "".join(path.read_text() for path in files).splitlines()
    assert lines == [f"{number:099}" for number in range(3000)] + ["last words"]


def test_a_later_server_appends_to_the_log_of_the_former(tmp_path: Path) -> None:
    log = LogFile(path=tmp_path / "log", limits=LogLimits(max_bytes=2**16, most_files=2))
    speak(log, 1)
    speak(log, 2)
    assert log.path.read_text().count("last words\n") == 2


def test_an_orphan_of_the_server_that_holds_the_pipe_delays_its_end_only_briefly(tmp_path: Path) -> None:
    output = ServerOutput(LogFile(path=tmp_path / "log", limits=LogLimits()))
    with subprocess.Popen(["sleep", "600"], stdout=output.sink) as orphan:
        subprocess.run(["echo", "last words"], stdout=output.sink, check=True)
        output.close_sink()
        output.drain()
        assert (tmp_path / "log").read_text() == "last words\n"
        orphan.kill()
