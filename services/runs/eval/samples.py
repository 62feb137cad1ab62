"""The samples of one model on one set, as a file: each is on the disk before the next step depends on it."""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgspec

from gspo_services.shared.runtime.errors import ConfigurationError

FORMAT: Final = 1


class ScoredSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of one task."""

    task: int
    """Index in its split."""
    sample: int
    """0 to samples - 1 of its set."""
    seed: int
    task_digest: str
    """Of the task's data: samples of a task that has changed are not counted together."""
    rating: float | None
    """The task's field ``rating``."""
    end: Literal["done", "length", "failed"]
    """failed: there is no reward, for a fault that is not the model's; it is tried again."""
    reward: float | None
    failure: str = ""
    components: dict[str, float] = {}
    answer: str | None = None
    """What it votes for."""
    turns: list[str] = []
    """The text of each turn of the model."""
    num_tokens: int = 0
    """All of the episode: prompts, observations and answers."""
    num_action_tokens: int = 0
    """Sampled ones."""
    seconds: float = 0.0
    engine_s: float = 0.0
    """Seconds in which the engine was at work since the line before: summed, what the samples of the file have cost."""


class SampleFile:
    """One file, open for its only writer. Use as a context manager."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """``header``: what was sampled and how, as plain data. Lines of a file with another header are not gone on from."""
        self._path = path
        self._header = json.loads(json.dumps({"format": FORMAT, **header}))
        self._descriptor = -1
        self.samples: dict[tuple[int, int], ScoredSample] = {}
        """The newest line of each (task, sample)."""
        self.engine_s = 0.0
        """Seconds of the engine for all lines."""

    def __enter__(self) -> Self:
        """Read what is there; a line that a kill left half written is removed.

        Raises: ConfigurationError for another header, a damaged line, and another process that writes; OSError.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigurationError(
                    f"{self._path}: another `gspo eval` writes there: let it end, or name another place with --out"
                ) from error
            self._read()
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._descriptor)

    def append(self, sample: ScoredSample) -> None:
        """Returns when the sample is on the disk. Raises: OSError."""
        self._write(msgspec.json.encode(sample))
        self._take(sample)

    def _write(self, line: bytes) -> None:
        rest = line + b"\n"
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        os.fsync(self._descriptor)

    def _take(self, sample: ScoredSample) -> None:
        self.samples[sample.task, sample.sample] = sample
        self.engine_s += sample.engine_s

    def _read(self) -> None:
        with open(self._descriptor, "rb", closefd=False) as file:
            content = file.read()
        whole = content.rfind(b"\n") + 1
        os.ftruncate(self._descriptor, whole)
        os.lseek(self._descriptor, whole, os.SEEK_SET)
        lines = content[:whole].splitlines()
        if not lines:
            self._write(json.dumps(self._header).encode())
            return
        self._require_header(lines[0])
        for number, line in enumerate(lines[1:], start=2):
            try:
                self._take(msgspec.json.decode(line, type=ScoredSample))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise ConfigurationError(
                    f"{self._path}, line {number}: damaged: {error}; remove the line, and its sample is taken again"
                ) from error

    def _require_header(self, line: bytes) -> None:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ConfigurationError(f"{self._path}: its first line is no header of samples: remove the file, or use --out")
        differing = [key for key in {**found, **self._header} if found.get(key) != self._header.get(key)]
        if differing:
            key = differing[0]
            before, now = (json.dumps(each.get(key))[:300] for each in (found, self._header))
            raise ConfigurationError(
                f"{self._path}: its samples are of another {key}: they were {before}, and now it is {now}; keep them apart "
                "with --out DIR, or remove the file"
            )
