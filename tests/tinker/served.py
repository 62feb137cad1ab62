"""The service as a process, and clients as processes in their own Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-tinker/bin/python"
PATIENCE_S = 900.0


class Service:
    """``gspo serve`` on models/tiny. Killed, it starts again on the same port and directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None
        self.port = 0
        self.lines: list[str] = []
        """What it said since its last start."""
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        """Return once clients can connect."""
        config = self._directory / "serve.toml"
        config.write_text(
            f'run.directory = "{self._directory / "run"}"\nmodel.path = "{ROOT / "models/tiny"}"\nlora.rank = 16\n'
            f'serve.names = ["Qwen/Qwen3-8B-Base"]\nserve.port = {self.port}\nrollout.max_total_tokens = 16384\n'
        )
        command = [sys.executable, "-m", "gspo_services.serve", str(config)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        self.lines = []
        for line in self._process.stdout:
            self.lines.append(line)
            if '"serve_started"' in line:
                self.port = json.loads(line)["port"]
                break
        else:
            raise AssertionError("".join(self.lines[-30:]))
        self._reader = threading.Thread(target=self.lines.extend, args=(self._process.stdout,))
        self._reader.start()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it, with all that it started; returns its status."""
        if self._process is None:
            return 0
        self._process.send_signal(number)
        status = self._process.wait(PATIENCE_S)
        assert self._reader is not None
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        return status

    def client(self, *words: str) -> subprocess.Popen[str]:
        """Start a loop of ``client_loops.py``."""
        environment = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        } | {
            "TINKER_BASE_URL": f"http://127.0.0.1:{self.port}", "TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        script = str(Path(__file__).with_name("client_loops.py"))
        pipe = subprocess.PIPE
        return subprocess.Popen([str(PYTHON), script, *words], stdout=pipe, stderr=pipe, text=True, env=environment)

    def result(self, *words: str) -> Any:
        """Run a loop to its end; returns what it said last."""
        return said_by(self.client(*words))


def said_by(client: subprocess.Popen[str]) -> Any:
    """Wait for the end of a client; returns what it said last."""
    try:
        output, errors = client.communicate(timeout=PATIENCE_S)
    finally:
        client.kill()
    assert client.returncode == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])
