"""Saves checkpoints (``gspo_services.learner.checkpoints.format``) during training.

All ranks begin together: each copies its part, as far as it has room for copies. On every rank a separate
thread writes the copy to disk. When all are done, all ranks publish the checkpoint together, in a collective between two
batches. Training continues meanwhile.

Without a background everything is written at once, parameter by parameter, without a copy.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch

from gspo.files import (
    discard_directory,
    flush_file,
    make_partial_directory,
    partial_path,
    publish_directory,
    remove_leftovers,
    replace_file,
)
from gspo_services.learner.checkpoints.digests import write_digests
from gspo_services.learner.checkpoints.format import (
    ENGINE,
    LATEST,
    CheckpointEngine,
    CheckpointError,
    CheckpointState,
    StateCopy,
    checkpoint_of,
    complete_checkpoints,
    random_name,
    random_state,
    unwritten_error,
    write_metadata,
)
from gspo_services.learner.checkpoints.retention import worth_keeping
from gspo_services.learner.checkpoints.versions import Versions
from gspo_services.learner.lost_rank import means_lost_rank

_ELSEWHERE: Final = "another rank could not write its part; its log has the reason"
_MEET_S: Final = 1.0

Scores = Callable[[], Mapping[int, float | None]]
"""Scores of versions on the held-out tasks: see ``worth_keeping``."""


class Job(Protocol):
    """Work that runs in the background."""

    def ended(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the work; returns whether it has ended."""

    def result(self) -> str:
        """Return the result of ended work. Raises: what the work raised."""


class Background(Protocol):
    """Where checkpoints are written."""

    def start(self, work: Callable[[], str]) -> Job: ...


class ThreadJob:
    """Work in a thread. If training fails, the process still waits for the thread."""

    def __init__(self, work: Callable[[], str]) -> None:
        self._future: Future[str] = Future()
        threading.Thread(target=self._run, args=(work,), name="checkpoint-writer").start()

    def _run(self, work: Callable[[], str]) -> None:
        try:
            self._future.set_result(work())
        # Any error is raised in the training thread.
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
    """Makes a thread for each checkpoint."""

    def start(self, work: Callable[[], str]) -> Job:
        return ThreadJob(work)


@dataclass(frozen=True, kw_only=True)
class _Pending:
    state: CheckpointState
    destination: Path
    job: Job
    """Its result is the digest of the weights, on rank 0."""


class CheckpointSaver:
    """One rank's part of saving, one checkpoint at a time. All ranks call the methods marked collective alike."""

    def __init__(
        self,
        engine: CheckpointEngine,
        root: Path,
        *,
        keep: int,
        background: Background | None,
        versions: Versions | None = None,
        scores: Scores = dict,
    ) -> None:
        """Saving removes all but the newest ``keep`` checkpoints and, on rank 0, what ``worth_keeping`` names by ``scores``.
        With ``versions``, rank 0 saves nothing any more once another learner has begun there.

        Raises: ValueError when ``keep`` is below 1."""
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least the new checkpoint must stay")
        self._engine = engine
        self._root = root
        self._keep = keep
        self._background = background
        self._versions = versions
        self._scores = scores
        self._pending: _Pending | None = None

    @property
    def pending(self) -> CheckpointState | None:
        """The state that is being saved, or None; the same on every rank."""
        return None if self._pending is None else self._pending.state

    def begin(self, state: CheckpointState) -> None:
        """Begin to save the current state; nothing else may be pending. Collective.

        Raises: CheckpointError, on all ranks, when it cannot be written or another learner has published since.
        """
        assert self._pending is None, "one checkpoint at a time"
        destination = self._destination(state)
        partial = partial_path(destination)
        self._require_place()
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
            copy, rank = self._engine.copy_state(partial / ENGINE), self._engine.rank
            job = self._background.start(lambda: _write_copy(partial, rank, copy, random_states))
        self._pending = _Pending(state=state, destination=destination, job=job)

    def advance(self, *, may_publish: bool = True, wait_s: float = 0.0) -> Path | None:
        """Publish the pending checkpoint if all ranks have written it; None when there is none, or not yet. Collective.

        Args:
            may_publish: whether this rank allows the publication.
            wait_s: how long to wait for this rank's thread.

        Raises: CheckpointError, on all ranks, when one cannot write: then nothing of the checkpoint stays.
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
        self._publish(pending)
        self._pending = None
        return pending.destination

    def discard(self) -> None:
        """Drop the pending checkpoint, as if it had never begun. Collective."""
        if self._pending is not None:
            self._wait_for_all(self._pending.job)
            self._remove(self._pending.destination)
            self._pending = None

    def abandon(self) -> None:
        """Wait for this rank's thread. The next learner that saves removes what it has written."""
        while self._pending is not None and not self._pending.job.ended(_MEET_S):
            pass

    def _destination(self, state: CheckpointState) -> Path:
        return self._root / checkpoint_of(state.policy_version, state.batch_position)

    def _write_now(self, destination: Path, random_states: str) -> Job:
        """Collective."""
        failure: Exception | None = None
        partial = partial_path(destination)
        try:
            written = list(self._engine.save_state(partial / ENGINE))
            random_file = partial / random_name(self._engine.rank)
            random_file.write_text(random_states, encoding="utf-8")
            write_digests(partial, self._engine.rank, [*written, random_file])
        # torch's writer raises RuntimeError when a disk is full.
        except (OSError, RuntimeError) as error:
            if means_lost_rank(error):
                # No rank is left to agree with.
                shutil.rmtree(partial, ignore_errors=True)
                raise
            failure = error
        self._agree(destination, failure)
        return _Done(self._engine.weights_digest())

    def _publish(self, pending: _Pending) -> None:
        """Collective."""
        self._require_place()
        destination, failure = pending.destination, None
        layout = self._engine.layout()
        try:
            if self._engine.rank == 0:
                partial = partial_path(destination)
                if self._versions is not None:
                    self._versions.note_commit()
                write_metadata(partial, pending.state, layout, pending.job.result())
                publish_directory(partial, destination)
                replace_file(self._root / LATEST, destination.name + "\n")
                # The new one stays even if an abandoned run had trained more.
                others = [path for path in complete_checkpoints(self._root) if path != destination]
                kept = worth_keeping([*others, destination], self._scores())
                for old in others[: max(0, len(others) - (self._keep - 1))]:
                    if old not in kept:
                        discard_directory(old)
        except (OSError, CheckpointError) as error:
            failure = error
        self._agree(destination, failure)

    def _require_place(self) -> None:
        """Refuse to save after another learner has begun here. Collective."""
        # Only rank 0 looks, so that all ranks decide alike.
        failure: CheckpointError | None = None
        try:
            if self._engine.rank == 0 and self._versions is not None:
                self._versions.require_mine()
        except CheckpointError as error:
            failure = error
        if self._anywhere(failure is not None):
            raise failure or CheckpointError(
                f"{self._root}: another learner uses this run.directory; rank 0's log says more"
            )

    def _agree(self, destination: Path, failure: Exception | None) -> None:
        """Give up on all ranks together: they would wait for the one that cannot write. Collective."""
        if self._anywhere(failure is not None):
            self._give_up(destination, failure)

    def _give_up(self, destination: Path, failure: Exception | None) -> None:
        self._pending = None
        # The next attempt needs the room.
        self._remove(destination)
        raise unwritten_error(destination, failure or OSError(_ELSEWHERE)) from failure

    def _remove(self, destination: Path) -> None:
        shutil.rmtree(partial_path(destination), ignore_errors=True)

    def _wait_for_all(self, job: Job) -> None:
        """Wait until every rank's thread has ended. Collective."""
        while self._anywhere(not job.ended(_MEET_S)):
            pass

    def _anywhere(self, flag: bool) -> bool:
        return bool(self._engine.sum_over_ranks(torch.tensor([float(flag)])).item())


class _Done:
    """A job that ended when it began."""

    def __init__(self, result: str) -> None:
        self._result = result

    def ended(self, timeout_s: float) -> bool:
        return True

    def result(self) -> str:
        return self._result


def _write_copy(partial: Path, rank: int, copy: StateCopy, random_states: str) -> str:
    """Write a rank's part to disk. Returns the digest of the weights."""
    written = copy.write(partial / ENGINE)
    random_file = partial / random_name(rank)
    random_file.write_text(random_states, encoding="utf-8")
    flush_file(random_file)
    write_digests(partial, rank, [*written, random_file])
    return copy.weights_digest()


def _failure(job: Job) -> Exception | None:
    try:
        job.result()
    # torch's writer raises RuntimeError when a disk is full.
    except (OSError, RuntimeError) as error:
        return error
    return None
