"""Saves checkpoints (``services.learner.checkpoints.format``) beside training.

All ranks begin together: each copies what it is to write. A thread of its own on every rank writes the copy, onto the disk.
When all have, all ranks publish it together, in a collective between two batches. In between training goes on.

Without a background everything is written where it is begun, parameter by parameter, and no copy is held.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch

from services.learner.checkpoints.format import (
    ENGINE,
    LATEST,
    METADATA,
    PREFIX,
    CheckpointEngine,
    CheckpointState,
    StateCopy,
    complete_checkpoints,
    random_name,
    random_state,
    reserved_version,
    taken_error,
    unwritten_error,
    write_metadata,
)
from services.learner.lost_rank import means_lost_rank
from services.runtime.durable import (
    discard_directory,
    flush_file,
    make_partial_directory,
    partial_path,
    publish_directory,
    remove_leftovers,
    replace_file,
)

_ELSEWHERE: Final = "another rank could not write its part; its log has the reason"
_MEET_S: Final = 1.0


class Job(Protocol):
    """Work that was begun in the background."""

    def ended(self, timeout_s: float) -> bool:
        """Whether it has; waits so long for it."""

    def result(self) -> str:
        """Of work that has ended. Raises what the work raised."""


class Background(Protocol):
    """Where checkpoints are written."""

    def start(self, work: Callable[[], str]) -> Job: ...


class ThreadJob:
    """Work in a thread, which outlives training that fails: the process ends when the thread does."""

    def __init__(self, work: Callable[[], str]) -> None:
        self._future: Future[str] = Future()
        threading.Thread(target=self._run, args=(work,), name="checkpoint-writer").start()

    def _run(self, work: Callable[[], str]) -> None:
        try:
            self._future.set_result(work())
        # Whatever it is, it is raised in the training thread.
        except BaseException as error:  # noqa: BLE001
            self._future.set_exception(error)

    def ended(self, timeout_s: float) -> bool:
        try:
            self._future.exception(timeout_s)
        except TimeoutError:
            return False
        return True

    def result(self) -> str:
        return self._future.result()


class Threads:
    """A thread for each checkpoint."""

    def start(self, work: Callable[[], str]) -> Job:
        return ThreadJob(work)


@dataclass(frozen=True, kw_only=True)
class _Pending:
    state: CheckpointState
    destination: Path
    job: Job
    """Gives the digest of the weights, on rank 0."""


class CheckpointSaver:
    """One rank's part of saving, one checkpoint at a time. Methods marked collective are called by all ranks alike."""

    def __init__(self, engine: CheckpointEngine, root: Path, *, keep: int, background: Background | None) -> None:
        """All but the newest ``keep`` checkpoints are removed. Raises: ValueError for ``keep`` below 1."""
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least the new checkpoint must stay")
        self._engine = engine
        self._root = root
        self._keep = keep
        self._background = background
        self._pending: _Pending | None = None

    @property
    def pending(self) -> CheckpointState | None:
        """What is being saved, or None; the same on every rank."""
        return None if self._pending is None else self._pending.state

    def find(self, state: CheckpointState) -> Path | None:
        """The checkpoint of this version and position, where there is one. Collective."""
        destination = self._destination(state)
        # Rank 0 alone looks, so that all ranks go the same way.
        return destination if self._anywhere(self._engine.rank == 0 and (destination / METADATA).is_file()) else None

    def begin(self, state: CheckpointState) -> None:
        """Save the present state. Collective; nothing else may be pending.

        Raises: CheckpointError, on all ranks, when it cannot be written, or another learner has published since.
        """
        assert self._pending is None, "one checkpoint at a time"
        destination = self._destination(state)
        partial = partial_path(destination)
        self._require_place(state.policy_version)
        failure: Exception | None = None
        try:
            if self._engine.rank == 0:
                remove_leftovers(self._root)
                make_partial_directory(destination)
        except OSError as error:
            failure = error
        self._agree(destination, failure)
        random_states = json.dumps(random_state())
        if self._background is None:
            job = self._write_now(destination, random_states)
        else:
            copy, rank = self._engine.copy_state(), self._engine.rank
            job = self._background.start(lambda: _write_copy(partial, rank, copy, random_states))
        self._pending = _Pending(state=state, destination=destination, job=job)

    def advance(self, *, newest_version: int, may_publish: bool = True, wait_s: float = 0.0) -> Path | None:
        """Publish what is pending if all ranks have written it; None when nothing is, or not yet. Collective.

        Args:
            newest_version: the newest that this learner has reserved.
            may_publish: whether this rank lets it be published.
            wait_s: how long to wait for this rank's thread.

        Raises: CheckpointError, on all ranks, where one cannot write: then nothing of it stays.
        """
        pending = self._pending
        if pending is None:
            return None
        ended = pending.job.ended(wait_s)
        failure = _failure(pending.job) if ended else None
        flags = torch.tensor([float(not (ended and may_publish)), float(failure is not None)])
        some_wait, some_failed = (bool(flag) for flag in self._engine.sum_over_ranks(flags).tolist())
        if some_failed:
            self._wait_for_all(pending.job)
            self._give_up(pending.destination, failure)
        if some_wait:
            return None
        self._publish(pending, newest_version)
        self._pending = None
        return pending.destination

    def discard(self) -> None:
        """Have what is pending never been begun. Collective."""
        if self._pending is not None:
            self._wait_for_all(self._pending.job)
            self._remove(self._pending.destination)
            self._pending = None

    def abandon(self) -> None:
        """Wait for this rank's thread; what it has written is removed by the next learner that saves."""
        while self._pending is not None and not self._pending.job.ended(_MEET_S):
            pass

    def _destination(self, state: CheckpointState) -> Path:
        return self._root / f"{PREFIX}{state.policy_version:010d}-batch-{state.batch_position:010d}"

    def _write_now(self, destination: Path, random_states: str) -> Job:
        """Collective."""
        failure: Exception | None = None
        partial = partial_path(destination)
        try:
            self._engine.save_state(partial / ENGINE)
            (partial / random_name(self._engine.rank)).write_text(random_states, encoding="utf-8")
        # torch's writer says RuntimeError where a disk is full.
        except (OSError, RuntimeError) as error:
            if means_lost_rank(error):
                # Nobody is left to agree with.
                shutil.rmtree(partial, ignore_errors=True)
                raise
            failure = error
        self._agree(destination, failure)
        return _Done(self._engine.weights_digest())

    def _publish(self, pending: _Pending, newest_version: int) -> None:
        """Collective."""
        self._require_place(newest_version)
        destination, failure = pending.destination, None
        layout = self._engine.layout()
        try:
            if self._engine.rank == 0:
                partial = partial_path(destination)
                write_metadata(partial, pending.state, layout, pending.job.result())
                publish_directory(partial, destination)
                replace_file(self._root / LATEST, destination.name + "\n")
                # The new one stays even where a run that was given up had got further.
                others = [path for path in complete_checkpoints(self._root) if path != destination]
                for old in others[: max(0, len(others) - (self._keep - 1))]:
                    discard_directory(old)
        except OSError as error:
            failure = error
        self._agree(destination, failure)

    def _require_place(self, newest_version: int) -> None:
        """What another learner has published since is not to be followed by this one's past. Collective."""
        # Rank 0 alone looks, so that all ranks go the same way.
        superseded = self._engine.rank == 0 and reserved_version(self._root) > newest_version
        if self._anywhere(superseded):
            raise taken_error(self._root, newest_version)

    def _agree(self, destination: Path, failure: Exception | None) -> None:
        """All ranks give up together: the others would wait for the one that cannot write. Collective."""
        if self._anywhere(failure is not None):
            self._give_up(destination, failure)

    def _give_up(self, destination: Path, failure: Exception | None) -> None:
        self._pending = None
        # What there is of it takes the room that the next attempt needs.
        self._remove(destination)
        raise unwritten_error(destination, failure or OSError(_ELSEWHERE)) from failure

    def _remove(self, destination: Path) -> None:
        shutil.rmtree(partial_path(destination), ignore_errors=True)

    def _wait_for_all(self, job: Job) -> None:
        """Until every rank's thread has ended. Collective."""
        while self._anywhere(not job.ended(_MEET_S)):
            pass

    def _anywhere(self, flag: bool) -> bool:
        return bool(self._engine.sum_over_ranks(torch.tensor([float(flag)])).item())


def save_checkpoint(engine: CheckpointEngine, root: Path, state: CheckpointState, *, keep: int = 3) -> Path:
    """Write a checkpoint below ``root``, make it the latest and remove all but the newest ``keep``. Collective.

    Returns when it is durable; at once where this version and position are saved already.
    Raises: ValueError for ``keep`` below 1, CheckpointError when it cannot be written: those before it stay as they are.
    """
    saver = CheckpointSaver(engine, root, keep=keep, background=None)
    saved = saver.find(state)
    if saved is not None:
        return saved
    saver.begin(state)
    path = saver.advance(newest_version=state.policy_version)
    assert path is not None, "nothing was left for later"
    return path


class _Done:
    """A job without a background."""

    def __init__(self, result: str) -> None:
        self._result = result

    def ended(self, timeout_s: float) -> bool:
        return True

    def result(self) -> str:
        return self._result


def _write_copy(partial: Path, rank: int, copy: StateCopy, random_states: str) -> str:
    """A rank's part, onto the disk; returns the digest of the weights."""
    copy.write(partial / ENGINE)
    random_file = partial / random_name(rank)
    random_file.write_text(random_states, encoding="utf-8")
    flush_file(random_file)
    return copy.weights_digest()


def _failure(job: Job) -> Exception | None:
    try:
        job.result()
    # torch's writer says RuntimeError where a disk is full.
    except (OSError, RuntimeError) as error:
        return error
    return None
