"""Answers of a judge on disk, one file for each request. Any number of processes may read, write and delete them."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def digest_of(request: Mapping[str, Any]) -> str:
    """Return a request's digest: 32 hexadecimal characters. Raises: ValueError when it is not JSON."""
    try:
        canonical = json.dumps(request, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a request to a judge must be JSON: {error}") from error
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


class AnswerFiles:
    """Answers by the digest of their request. Delete any of the files at any time to have it asked again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, digest: str) -> dict[str, Any] | None:
        """Return the answer; None when it is missing or its file is damaged. Raises: OSError."""
        try:
            answer = json.loads(self._path(digest).read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None

    def put(self, digest: str, answer: Mapping[str, Any]) -> None:
        """Keep an answer: whole, or not at all if the process is killed. Raises: OSError."""
        path = self._path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            partial.write_text(json.dumps(answer), encoding="utf-8")
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def _path(self, digest: str) -> Path:
        # 256 folders: a million files in one would be slow to list.
        return self._folder / digest[:2] / f"{digest}.json"
