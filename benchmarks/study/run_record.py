"""The record of a run on disk: one file of JSON lines, complete or absent."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from benchmarks.study.config import RunConfig

RESULTS = Path(__file__).parent / "results"
RUNS_FILE = "runs.jsonl"
STARTS_FILE = "starts.json"


@dataclass(frozen=True)
class RunRecord:
    """A finished run as it was written: a line for each batch, one for the evaluation after the last, one of digests."""

    run_id: str
    config: dict[str, Any]
    batches: list[dict[str, float]]
    digests: dict[str, str] = field(default_factory=dict)
    """Of the weights at the "start" and the "end", and the processor that they were made "on", of which older records say
    nothing (an AMD EPYC); no digests in records of before 2026-11-26."""


def record_path(directory: Path, config: RunConfig) -> Path:
    """Return the path of a finished run's record."""
    return directory / "records" / f"{config.run_id}.jsonl"


def read_record(path: Path) -> RunRecord:
    """Read a record. Raises: ValueError for a file that is no record."""
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    if "config" not in head:
        raise ValueError(f"{path} does not start with a configuration: remove it and run again")
    digests = lines.pop() if lines and "end" in lines[-1] else {}
    return RunRecord(head["run"], head["config"], lines, digests)


def weights_digest(weights: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits of the names, shapes and bytes of CPU tensors."""
    digest = blake2b(digest_size=8)
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def processor() -> str:
    """Return the name of this machine's processor: the last bits of roots and exponentials depend on it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def known_starts() -> dict[str, str]:
    """Return the digests of start models that are kept with the code, by name."""
    return _digests(RESULTS / STARTS_FILE)


def made_starts(directory: Path) -> dict[str, str]:
    """Return the digests of the start models that were made in ``directory``, by name."""
    return _digests(directory / STARTS_FILE)


def note_starts(directory: Path, made: Mapping[str, str]) -> list[str]:
    """Keep the digests of start models in ``directory``; return the names of those that came out otherwise before."""
    path, known = directory / STARTS_FILE, known_starts()
    path.write_text(json.dumps(made_starts(directory) | made, indent=0, sort_keys=True) + "\n")
    return [name for name, digest in made.items() if known.get(name, digest) != digest]


def _digests(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def condensed_runs() -> set[str]:
    """Return the ids of the runs whose condensed results are kept with the code."""
    return {json.loads(line)["run_id"] for line in (RESULTS / RUNS_FILE).read_text().splitlines()}


def kept_digests(run_id: str) -> dict[str, str]:
    """Return the digests of a run's weights that are kept with the code; nothing where there are none."""
    lines = map(json.loads, (RESULTS / RUNS_FILE).read_text().splitlines())
    return next((line.get("digests", {}) for line in lines if line["run_id"] == run_id), {})
