"""Runs the worker process that opens the user's code, and reads its report."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gspo_services.prepare.check.situation import Situation
from gspo_services.shared.runtime.lifecycle import module_command
from gspo_services.shared.runtime.log_files import read_end
from gspo_services.shared.runtime.plain_text import one_line
from gspo_services.tasks.supervised import BadMessage, BlockingProcess

READING: Final = "reading"
"""The part that says how far a long file is read."""
MOST_REPORT_BYTES: Final = 4 * 2**20
MOST_SAID: Final = 2000
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
        self._said = self._folder / "said"
        with self._said.open("wb") as said:
            self._process = BlockingProcess(
                module_command("gspo_services.prepare.check.worker"), {**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                output=said.fileno(),
            )  # fmt: skip
        with suppress(ConnectionError, TimeoutError):  # ``finish`` says how it has ended.
            self._process.send(json.dumps({"folder": str(episode), "settings": plain}).encode(), START_S)

    def finish(self, silence_s: float) -> CodeReport:
        """Wait for its end. After ``silence_s`` without a report it is killed with everything that it has started."""
        parts: list[Mapping[str, Any]] = []
        num_bytes, patience_s = 0, max(START_S, silence_s)
        try:
            while True:
                body = self._process.receive(patience_s)
                patience_s, num_bytes = silence_s, num_bytes + len(body)
                if num_bytes <= MOST_REPORT_BYTES:
                    self._take(parts, _part(body))
        except TimeoutError:
            end = f"not done after {patience_s:g} s"
        except BadMessage as error:
            end = f"its process sent {error}"
        except ConnectionError:
            status = self._process.status(silence_s)
            how = f"not done after {silence_s:g} s" if status is None else f"its process ended with status {status}"
            end = "" if status == 0 else how
        self._process.close()
        begun = [str(part["what"]) for part in parts if part.get("part") == "begins"]
        text = read_end(self._said, MOST_SAID).strip()
        return CodeReport(parts=parts, end=f"{begun[-1]}: {end}" if end and begun else end, said=text)

    def _take(self, parts: list[Mapping[str, Any]], part: Mapping[str, Any]) -> None:
        if part.get("part") != READING:
            parts.append(part)
            return
        sys.stderr.write(one_line(f"reading {part.get('path')}: {part.get('num_rows')} rows so far") + "\n")

    def close(self) -> None:
        """End it, and whatever it has started and written. A second call does nothing."""
        self._process.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _part(body: bytes) -> Mapping[str, Any]:
    """Raises: BadMessage."""
    try:
        part = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"what is no report: {error}") from error
    if not isinstance(part, dict):
        raise BadMessage("what is no report")
    return part
