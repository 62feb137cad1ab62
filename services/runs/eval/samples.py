"""Stores the samples of one model on one set in a file: each is on the disk before the next step depends on it."""

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
    """The task's index in its split."""
    sample: int
    """0 to samples - 1 of its set."""
    seed: int
    task_digest: str
    """The digest of the task's data: samples of a task that has changed are not counted together."""
    rating: float | None
    """The task's field ``rating``."""
    end: Literal["done", "length", "failed"]
    """failed: there is no reward, for a fault that is not the model's; the sample is tried again."""
    reward: float | None
    failure: str = ""
    components: dict[str, float] = {}
    answer: str | None = None
    """The answer that it votes for."""
    turns: list[str] = []
    """The text of each turn of the model."""
    num_tokens: int = 0
    """All tokens of the episode: prompts, observations and answers."""
    num_action_tokens: int = 0
    """Sampled tokens."""
    seconds: float = 0.0
    engine_s: float = 0.0
    """Seconds in which the engine worked since the line before: their sum is the cost of the file's samples."""


class SampleFile:
    """One file, open for its only writer. Use as a context manager."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """``header``: what was sampled and how, as plain data. A file with another header is not continued."""
        self._path = path
        self._header = json.loads(json.dumps({"format": FORMAT, **header}))
        self._descriptor = -1
        self.samples: dict[tuple[int, int], ScoredSample] = {}
        """The newest line of each (task, sample)."""
        self.engine_s = 0.0
        """The engine's seconds for all lines."""

    def __enter__(self) -> Self:
        """Read the existing lines; a line that a kill left half written is removed.

        Raises: ConfigurationError for another header, a damaged line, and another process that writes; OSError.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigurationError(
                    f"{self._path}: another `gspo eval` is writing there: let it end, or name another directory with --out"
                ) from error
            self._read()
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._descriptor)

    def append(self, sample: ScoredSample) -> None:
        """Append, and return when the sample is on the disk. Raises: OSError."""
        self._write(msgspec.json.encode(sample))
        self._take(sample)

    def _write(self, line: bytes) -> None:
        """Write a line, whole or not at all: another sample may find room where this one did not."""
        end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        rest = line + b"\n"
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, end)
            os.lseek(self._descriptor, end, os.SEEK_SET)
            raise

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
            raise ConfigurationError(f"{self._path}: its first line is not a sample header: remove the file, or use --out")
        differing = [key for key in {**found, **self._header} if found.get(key) != self._header.get(key)]
        if differing:
            key = differing[0]
            before, now = (json.dumps(each.get(key))[:300] for each in (found, self._header))
            raise ConfigurationError(
                f"{self._path}: its samples have another {key}: it was {before}, and now it is {now}; keep them apart "
                "with --out DIR, or remove the file"
            )
