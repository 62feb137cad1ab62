"""Runs the worker process that opens the user's code, and reads its report."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, Final

from gspo_services.prepare.check.situation import Situation
from gspo_services.shared.runtime.lifecycle import module_command
from gspo_services.shared.runtime.log_files import read_end

MOST_REPORT_BYTES: Final = 4 * 2**20
MOST_SAID: Final = 2000
LEFT_BEHIND_S: Final = 2.0
START_S: Final = 60.0
"""Until the worker's first report: it imports this project, on a machine that may be busy."""


@dataclass(frozen=True, kw_only=True)
class CodeReport:
    """What the worker has told."""

    parts: Sequence[Mapping[str, Any]]
    end: str = ""
    """Why it did not come to its end, and where; empty when it did."""
    said: str = ""
    """The end of what it wrote to standard error."""

    def part(self, name: str, **fields: Any) -> Mapping[str, Any] | None:
        """The first part of this name with these fields."""
        wanted = {"part": name, **fields}.items()
        return next((part for part in self.parts if wanted <= part.items()), None)


class CodeWorker:
    """The worker of one check. It is started at once, so that the other checks are made beside it."""

    def __init__(self, situation: Situation) -> None:
        settings = situation.settings
        model = settings.model.model_copy(update={"path": situation.model_path})
        plain = settings.model_copy(update={"model": model}).model_dump(mode="json")
        self._folder = Path(tempfile.mkdtemp(prefix="gspo-check-"))
        episode = self._folder / "episode"
        episode.mkdir()
        request = self._folder / "request"
        request.write_text(json.dumps({"folder": str(episode), "settings": plain}), encoding="utf-8")
        self._said = self._folder / "said"
        receiving, sending = os.pipe()
        try:
            with request.open("rb") as given, self._said.open("wb") as said:
                # A session of its own: whatever the user's code starts can be ended with it.
                self._process = subprocess.Popen(
                    module_command("gspo_services.prepare.check.worker", str(sending)),
                    stdin=given, stdout=said, stderr=subprocess.STDOUT, pass_fds=(sending,), start_new_session=True,
                    env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                )  # fmt: skip
        finally:
            os.close(sending)
        self._news: Queue[bytes] = Queue()
        self._reading = Thread(target=self._read, args=(receiving,), name="check-report", daemon=True)
        self._reading.start()

    def finish(self, silence_s: float) -> CodeReport:
        """Wait for its end. After ``silence_s`` without a report it is killed with everything that it has started."""
        report = bytearray()
        end, patience_s = "", max(START_S, silence_s)
        try:
            while piece := self._news.get(timeout=patience_s):
                patience_s = silence_s
                if len(report) < MOST_REPORT_BYTES:
                    report += piece
            status = self._process.wait(silence_s)
            end = f"its process ended with status {status}" if status else ""
        except (Empty, subprocess.TimeoutExpired):
            end = f"not done after {patience_s:g} s"
        self._kill()
        parts = [part for line in report.decode(errors="replace").splitlines() if (part := _part(line)) is not None]
        begun = [str(part["what"]) for part in parts if part.get("part") == "begins"]
        text = read_end(self._said, MOST_SAID).strip()
        return CodeReport(parts=parts, end=f"{begun[-1]}: {end}" if end and begun else end, said=text)

    def close(self) -> None:
        """End it, and whatever it has started and written. A second call does nothing."""
        self._kill()
        self._process.wait()
        # A process that left the session may keep the pipe for ever.
        self._reading.join(LEFT_BEHIND_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, receiving: int) -> None:
        """Pass on what is reported, and b"" at its end: when every process that has the pipe is gone."""
        try:
            while piece := os.read(receiving, 2**16):
                self._news.put(piece)
        finally:
            self._news.put(b"")
            os.close(receiving)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _part(line: str) -> Mapping[str, Any] | None:
    try:
        part = json.loads(line)
    except ValueError:
        return None  # a line that was cut off by the end of the process
    return part if isinstance(part, dict) else None
