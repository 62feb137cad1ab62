"""Runs that are finished, on disk: a comparison that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import msgspec

from benchmarks.against_trl.curve import Run
from benchmarks.against_trl.settings import say


def kept(directory: Path, made_of: dict[str, object], make: Callable[[], Run]) -> Run:
    """Return the run of ``made_of``, everything that decides it: as it was kept, or made now and then kept.

    Raises: msgspec.ValidationError for a file that holds no run.
    """
    key = json.dumps(made_of, sort_keys=True, default=str)
    path = directory / f"{made_of['system']}-{made_of['seed']}-{blake2b(key.encode(), digest_size=6).hexdigest()}.json"
    if path.is_file():
        run = msgspec.json.decode(path.read_bytes(), type=Run)
        say(f"  kept in {path}: {run}")
        return run
    run = make()
    say(f"  {run}")
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(run), indent=1) + "\n")
    unfinished.rename(path)
    return run
