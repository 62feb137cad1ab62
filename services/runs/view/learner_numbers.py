"""What the learner computed per token: recorded by the run, or else by a replay of the batch in another process."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gspo_services.runs.reading import OpenRun
from gspo_services.runs.view.watched_run import WatchedRun
from gspo_services.shared.runtime.lifecycle import module_command
from gspo_services.shared.token_dump import TOKEN_DIRECTORY, TokenPart, read_parts

CACHED_BATCHES: Final = 8
TAIL_BYTES: Final = 4000
WORK: Final = "replay"
RESULT_FILE: Final = "replay.json"
DIFFERENT: Final = "different"
"""Written by gspo_services.runs.replay, which imports torch."""


@dataclass
class ReplayJob:
    """A replay that was started for a batch."""

    batch: int
    first: int
    process: subprocess.Popen[bytes]
    output: Path


@dataclass(frozen=True)
class LearnedBatch:
    """All parts of one batch, by trajectory."""

    source: str
    """recorded, replayed, or "differs": replayed, and other weights came out."""
    parts: tuple[TokenPart, ...]
    places: Mapping[int, list[tuple[int, int]]]
    """For each trajectory: the part and the index in it of each of its sequences, in order."""


class LearnerNumbers:
    """The learner's numbers of every run on the page. Replays write into ``cache``, never into a run."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._jobs: dict[str, ReplayJob] = {}
        self._read: OrderedDict[tuple[str, int, int], LearnedBatch] = OrderedDict()

    # --- numbers ------------------------------------------------------------------------------------------------------

    def of_batch(self, run: WatchedRun, opened: OpenRun, batch: int) -> dict[int, dict[str, Any]]:
        """Each trajectory's sequences, summed up; empty if nothing was recorded or replayed. Raises: ValueError for a
        damaged token dump."""
        found = self._learned(run, batch)
        return {} if found is None else {trajectory: _summed(found, trajectory) for trajectory in found.places}

    def tokens(self, run: WatchedRun, batch: int, trajectory_id: int) -> list[dict[str, Any]]:
        """Return one trajectory's sequences: the numbers of each trained token, in order. Raises: ValueError."""
        found = self._learned(run, batch)
        if found is None:
            return []
        plain = []
        for part_index, at in found.places.get(trajectory_id, []):
            part = found.parts[part_index]
            begin = int(part.counts_S[:at].sum())
            tokens = slice(begin, begin + int(part.counts_S[at]))
            names = ("learner_T", "start_T", "ratio_T", "entropy_T", "advantage_T", "clip_T")
            plain.append({name[:-2]: getattr(part, name)[tokens].tolist() for name in names})
        return plain

    def _learned(self, run: WatchedRun, batch: int) -> LearnedBatch | None:
        place = self._place(run)
        for directory in (run.directory, place / WORK, place):
            newest = max((_modified(path) for path in directory.glob(f"{TOKEN_DIRECTORY}/batch-{batch:09d}-*")), default=0)
            if not newest:
                continue
            key = (run.name, batch, newest)
            if key not in self._read:
                parts = tuple(read_parts(directory, batch))
                source = "recorded" if directory == run.directory else "replayed" if _same(directory, batch) else "differs"
                self._read[key] = LearnedBatch(source, parts, _places(parts))
                while len(self._read) > CACHED_BATCHES:
                    self._read.popitem(last=False)
            self._read.move_to_end(key)
            return self._read[key]
        return None

    # --- replays ------------------------------------------------------------------------------------------------------

    def state(self, run: WatchedRun, batch: int) -> dict[str, Any]:
        """recorded, replayed, replaying (with lines of its output) or missing; and why the last replay failed."""
        found = self._learned(run, batch)
        job = self._jobs.get(run.name)
        plain: dict[str, Any] = {"batch": batch, "state": "missing" if found is None else found.source, "error": ""}
        if job is not None:
            status = job.process.poll()
            if status is None:
                done = _trained(job.output)
                plain |= {"replaying": job.batch, "done": max(0, done + 1 - job.first), "wanted": job.batch + 1 - job.first}
                if found is None:
                    plain["state"] = "replaying"
            elif found is None and job.batch == batch:
                plain["error"] = _tail(job.output) or f"gspo replay ended with status {status}"
        return plain

    def start(self, run: WatchedRun, batch: int) -> None:
        """Train the batches up to ``batch`` again, from the checkpoint before it; nothing while a replay is under way.

        Raises: OSError.
        """
        job = self._jobs.get(run.name)
        if job is not None and job.process.poll() is None:
            return
        place = self._place(run)
        work = place / WORK
        place.mkdir(parents=True, exist_ok=True)
        _clear(work, place)
        first = max((each for each in _checkpoints(run.directory) if each <= batch), default=0)
        # Only the tokens of the last batch are wanted, but those before it come for free.
        words = [str(run.directory.resolve()), "--out", str(work), "--batches", str(batch + 1 - first)]
        words += ["--set", "learner.dump_tokens=true", *(["--from-checkpoint", str(first)] if first else [])]
        output = place / "replay.log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                module_command("gspo_services.runs.replay", *words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            )
        self._jobs[run.name] = ReplayJob(batch=batch, first=first, process=process, output=output)

    def close(self) -> None:
        """End the replays that are under way."""
        for job in self._jobs.values():
            if job.process.poll() is None:
                os.killpg(job.process.pid, signal.SIGTERM)
                try:
                    job.process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(job.process.pid, signal.SIGKILL)
                    job.process.wait()

    def _place(self, run: WatchedRun) -> Path:
        path = str(run.directory.resolve())
        return self._cache / f"{run.name}-{hashlib.sha256(path.encode()).hexdigest()[:12]}"


def _summed(found: LearnedBatch, trajectory: int) -> dict[str, Any]:
    """Sum up one trajectory's sequences as the loss saw them; its own numbers are means over its trained tokens."""
    sequences = []
    for part_index, at in found.places[trajectory]:
        part = found.parts[part_index]
        row = dict(zip(part.columns, part.stats_SC[at].tolist(), strict=True))
        sequences.append(
            {
                "n": int(row["num_tokens_S"]),
                "log_s": row["log_ratio_S"],
                "lag": row["lag_S"],
                "low": row["clip_low_S"],
                "high": row["clip_high_S"],
                "clipped_high": row["clipped_high_S"],
                "clipped_low": row["clipped_low_S"],
                "advantage": row["advantage_S"],
                "weight": row["weight_S"],
                "entropy": row["entropy_S"],
                "mismatch": row["mismatch_S"],
                "step": int(part.steps_S[at]),
            }
        )
    weights: NDArray[np.float64] = np.array([max(each["n"], 0) for each in sequences], np.float64)

    def mean(*names: str) -> float | None:
        values = np.array([sum(each[name] for name in names) for each in sequences], np.float64)
        return float((values * weights).sum() / weights.sum()) if weights.sum() else None

    return {
        "source": found.source,
        "sequences": sequences,
        "clipped": mean("clipped_high", "clipped_low"),
        "log_s": mean("log_s"),
        "advantage": mean("advantage"),
    }


def _places(parts: tuple[TokenPart, ...]) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int, int]]] = {}
    for index, part in enumerate(parts):
        for at, (trajectory, place) in enumerate(zip(part.trajectories_S.tolist(), part.places_S.tolist(), strict=True)):
            found.setdefault(trajectory, []).append((place, index, at))
    return {trajectory: [(index, at) for _, index, at in sorted(rows)] for trajectory, rows in found.items()}


def _clear(work: Path, place: Path) -> None:
    """Keep only the numbers of an earlier replay: its checkpoints are as large as the run's."""
    kept = place / TOKEN_DIRECTORY
    kept.mkdir(exist_ok=True)
    for path in (work / TOKEN_DIRECTORY).glob("batch-*.npz"):
        if _same(work, int(path.name.split("-")[1])):
            os.replace(path, kept / path.name)
    if work.exists():
        shutil.rmtree(work)


def _same(directory: Path, batch: int) -> bool:
    """Return whether a replay reached the run's weights, as far as known; true while it runs without a difference."""
    try:
        weights = json.loads((directory / RESULT_FILE).read_text(encoding="utf-8"))["weights"]
        return bool(weights.get(str(batch + 1)) != DIFFERENT)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True


def _checkpoints(directory: Path) -> list[int]:
    names = (path.parent.name.rpartition("-")[2] for path in directory.glob("checkpoints/version-*-batch-*/checkpoint.json"))
    return [int(name) for name in names if name.isdigit()]


def _trained(output: Path) -> int:
    """Return the last batch that a replay says it has trained; -1 before the first."""
    words = [line.split() for line in _tail(output).splitlines() if line.startswith("batch ")]
    return max((int(each[1]) for each in words if len(each) > 1 and each[1].isdigit()), default=-1)


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
