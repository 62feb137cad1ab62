"""What a command takes: CPU seconds and memory of it and all that it starts."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

from gspo_services.shared.runtime.clock import MonotonicClock
from tests.support.processes.ports import free_port

COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "doctor": ("doctor", "{run}"),
    "audit": ("audit", "{run}"),
    "plot": ("plot", "{run}"),
}
"""By name, the words of the commands that a user of a long run types."""
MOST_S: Final = 600.0


def gspo(*words: str) -> list[str]:
    """The command line of ``gspo``."""
    return [sys.executable, "-P", "-m", "gspo_services.cli.main", *words]


def command_costs(name: str, run: Path) -> dict[str, Any]:
    """Run one of COMMANDS on a run. Raises: RuntimeError when it cannot."""
    words = [word.format(run=run) for word in COMMANDS[name]]
    with (run.parent / f"{name}.out").open("w") as output:
        process = subprocess.Popen(gspo(*words), stdout=output, stderr=subprocess.STDOUT)
        taken = _reaped(process)
    if taken["status"] not in (0, 1):  # 1: doctor's advice about a learner that trains nothing
        raise RuntimeError(f"gspo {' '.join(words)} ended with status {taken['status']}: see {run.parent / f'{name}.out'}")
    return taken


def view_costs(run: Path) -> dict[str, Any]:
    """Start ``gspo view`` and ask for the overview, as a browser does first; then end it."""
    port, clock = free_port(), MonotonicClock()
    began = clock.now()
    with (run.parent / "view.out").open("w") as output:
        words = gspo("view", str(run), "--port", str(port), "--cache", str(run.parent / "cache"))
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        try:
            (first, *_) = _asked(process, f"http://127.0.0.1:{port}/api/runs", began + MOST_S)
            _asked(process, f"http://127.0.0.1:{port}/api/runs/{first['name']}/overview", began + MOST_S)
            seen_s = clock.now() - began
        finally:
            process.send_signal(signal.SIGINT)
            taken = _reaped(process)
    return {**taken, "seconds": seen_s}


def _asked(process: "subprocess.Popen[bytes]", url: str, until: float) -> Any:
    """What a server answers that may still be starting. Raises: RuntimeError when it ends or takes too long."""
    clock = MonotonicClock()
    while clock.now() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=MOST_S) as answer:
                return json.load(answer)
        except urllib.error.URLError:
            continue
    raise RuntimeError(f"{url} does not answer")


def _reaped(process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """Wait for a process, and say what it took. Its children count once it has waited for them."""
    clock = MonotonicClock()
    began = clock.now()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "status": process.returncode,
        "seconds": clock.now() - began,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "mib": usage.ru_maxrss / 1024,
    }
