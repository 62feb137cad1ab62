"""The learner's training loop: batches in, policy versions out. Collectives happen here, in the main thread, alone."""

import threading
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import structlog
import torch

from gspo.adaptive import AdaptiveClip
from gspo.packing import TrainGroup
from gspo.settings import Objective
from gspo.staleness import MismatchTracker
from protocol.messages import EndOfRun, Welcome
from services.learner.batches import groups_of
from services.learner.checkpoint import (
    CheckpointState,
    find_latest,
    load_checkpoint,
    reserve_version,
    reserved_version,
    save_checkpoint,
)
from services.learner.conversation import BatchArrived
from services.learner.engine import LearnerEngine
from services.learner.export import export_model
from services.learner.metrics import LearnerMetrics
from services.learner.profile import NO_PROFILE, Phases
from services.learner.share import share, stop_anywhere
from services.learner.snapshot import Snapshot, build_snapshot
from services.learner.trainer import AdvantageSettings, BatchReport, train_batch
from services.runtime.clock import Clock
from services.runtime.lifecycle import ServiceError
from services.runtime.objective import objective_of
from services.runtime.settings import Settings
from services.runtime.telemetry import Health

log = structlog.get_logger()

POLL_S: Final = 1.0
WAITING_LOG_S: Final = 15.0
FLUSH_S: Final = 10.0
NOT_YET: Final = -1
STOPPED: Final = -2
ACKNOWLEDGED: Final = 0
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TrainBatch(Protocol):
    """`services.learner.trainer.train_batch`, or what stands in for it where there is no model."""

    def __call__(
        self,
        engine: LearnerEngine,
        groups: Sequence[TrainGroup],
        *,
        objective: Objective,
        policy_version: int,
        num_mini_batches: int,
        mismatch: MismatchTracker,
        adaptive_clip: AdaptiveClip | None = None,
        max_lag: int | None = None,
        advantages: AdvantageSettings | None = None,
    ) -> BatchReport: ...


class BatchLink(Protocol):
    """`services.learner.link.Link`, or what stands in for it where batches are recorded ones."""

    @property
    def waiting_for(self) -> str: ...
    @property
    def refused(self) -> str: ...
    def wait_welcome(self, timeout_s: float) -> Welcome | None: ...
    def resume(self, next_batch: int) -> None: ...
    def request(self, index: int, policy_version: int) -> None: ...
    def take(self, timeout_s: float) -> BatchArrived | EndOfRun | None: ...
    def publish(self, snapshot: Snapshot, trained_batches: int) -> None: ...
    def trained(self, index: int, policy_version: int, metrics: dict[str, float | None]) -> None: ...
    def checkpointed(self, next_batch: int, policy_version: int) -> None: ...
    def flush(self, timeout_s: float) -> bool: ...


class LearnerService:
    """One rank of the learner.

    produces:     policy versions; a Trained report per batch; checkpoints; at the end an export
    waits for:    batches
    unblocked by: a batch, the end of the run, ``stop``
    """

    def __init__(
        self,
        settings: Settings,
        engine: LearnerEngine,
        link: BatchLink | None,
        *,
        clock: Clock,
        health: Health,
        metrics: LearnerMetrics,
        stop: threading.Event,
        train: TrainBatch = train_batch,
        profile: Phases = NO_PROFILE,
    ) -> None:
        """``link`` is rank 0's; None on the others. ``train`` makes a batch's optimizer steps."""
        self._profile = profile
        self._train_batch = train
        self._settings = settings
        self._engine = engine
        self._link = link
        self._clock = clock
        self._health = health
        self._metrics = metrics
        self._stop = stop
        self._mismatch = MismatchTracker()
        self._next_batch = 0
        self._policy_version = 0
        self._checkpointed_batch = 0
        self._root = settings.run.directory / "checkpoints"
        self._objective = objective_of(settings.objective)
        target = self._objective.adaptive_clip_target
        self._adaptive_clip = None if target is None else AdaptiveClip(target=target)
        self._advantages = AdvantageSettings(
            credit="sequence" if settings.objective.advantage == "sequence" else "return_to_go",
            normalise_std=settings.objective.normalise_by_std,
        )

    def run(self) -> None:
        """Train until the run ends or ``stop`` is set, on any rank. Raises: ServiceError; what the engine raises."""
        self._resume()
        self._publish()
        while True:
            with self._profile.phase("wait"):
                directive = self._next()
            if directive is None:
                log.info("stopping", next_batch=self._next_batch)
                self._checkpoint()
                self._flush()
                return
            if isinstance(directive, EndOfRun):
                self._finish(directive)
                return
            self._train(directive)

    def _resume(self) -> None:
        find_latest(self._root)  # What is not there is said at once.
        broker_version = self._newest_version()
        saved_version = 0
        # Now that it is this learner's turn: the one that it waited for may have saved another one meanwhile.
        latest = find_latest(self._root)
        if latest is not None:
            state = load_checkpoint(self._engine, latest)
            self._next_batch = self._checkpointed_batch = state.batch_position
            self._mismatch.load_state_dict(state.mismatch)
            if self._adaptive_clip is not None and state.adaptive_clip:
                self._adaptive_clip.load_state_dict(state.adaptive_clip)
            log.info("resumed", checkpoint=str(latest), next_batch=self._next_batch)
            saved_version = state.policy_version
        # Versions are never reused: what this learner publishes comes after everything published before, also when the
        # broker's ledger was lost, or had not yet heard of what an engine has loaded.
        own_version = max(saved_version, reserved_version(self._root)) if self._link is not None else 0
        version = self._engine.broadcast(torch.tensor([max(own_version, broker_version)], dtype=torch.int64))
        self._policy_version = int(version[0])
        if self._link is not None:
            self._link.resume(self._next_batch)
        self._metrics.next_batch.set(self._next_batch)

    def _newest_version(self) -> int:
        """The broker's newest version, waited for; the same on every rank. Collective.

        All ranks meet once a second, because a collective that one rank is late for by half an hour fails.
        Raises: ServiceError, on all ranks, when stopped.
        """
        while True:
            welcome = self._link.wait_welcome(POLL_S) if self._link is not None else None
            answer = NOT_YET if welcome is None else welcome.policy_version
            if stop_anywhere(self._engine, self._stop.is_set()) and welcome is None:
                answer = STOPPED
            answer = int(self._engine.broadcast(torch.tensor([answer], dtype=torch.int64))[0])
            if answer == STOPPED:
                raise ServiceError("stopped before the broker answered")
            if answer != NOT_YET:
                return answer
            refused = "" if self._link is None else self._link.refused
            self._health.not_ready(refused or f"no answer from the broker at {self._settings.broker.batch_endpoint}")

    def _next(self) -> BatchArrived | EndOfRun | None:
        """The next thing to do, on every rank; None: stop."""
        if self._link is not None:
            self._link.request(self._next_batch, self._policy_version)
        waited_until = last_log = self._clock.now()
        while True:
            arrived = self._link.take(POLL_S) if self._link is not None else None
            directive, stop = share(self._engine, arrived, self._stop.is_set())
            now = self._clock.now()
            self._metrics.wait_seconds.inc(now - waited_until)
            waited_until = now
            if stop or directive is not None:
                return None if stop else directive
            if self._link is not None and now - last_log >= WAITING_LOG_S:
                log.info("waiting_for_batch", batch=self._next_batch, waiting_for=self._link.waiting_for)
                last_log = now

    def _train(self, arrived: BatchArrived) -> None:
        batch = arrived.batch
        begin = self._clock.now()
        with self._profile.phase("prepare"):
            groups = groups_of(batch, arrived.arrays)
        report = self._train_batch(
            self._engine,
            groups,
            objective=self._objective,
            policy_version=batch.policy_version,
            num_mini_batches=self._settings.batch.mini_batches,
            mismatch=self._mismatch,
            adaptive_clip=self._adaptive_clip,
            max_lag=self._settings.batch.max_lag,
            advantages=self._advantages,
        )
        trained = self._clock.now()
        self._next_batch = batch.index + 1
        self._publish()
        metrics = {**report.metrics, "train_s": trained - begin, "publish_s": self._clock.now() - trained}
        self._report(batch.index, metrics, num_tokens=int(arrived.arrays["token_ids"].shape[0]), items=len(batch.items))
        if self._next_batch - self._checkpointed_batch >= self._settings.learner.checkpoint_every_batches:
            with self._profile.phase("checkpoint"):
                self._checkpoint()
        self._profile.end_batch(batch.index, self._engine.sum_over_ranks)

    def _report(self, index: int, metrics: Mapping[str, float], *, num_tokens: int, items: int) -> None:
        if self._link is None:
            return
        self._metrics.batches.inc()
        self._metrics.tokens.inc(num_tokens)
        self._metrics.trajectories.inc(items)
        self._metrics.next_batch.set(self._next_batch)
        self._metrics.train_seconds.observe(metrics["train_s"])
        self._metrics.publish_seconds.observe(metrics["publish_s"])
        self._metrics.set_diagnostics(metrics)
        self._health.progress()
        self._link.trained(index, self._policy_version, dict(metrics))
        log.info("batch_trained", batch=index, policy_version=self._policy_version, train_s=round(metrics["train_s"], 3))

    def _publish(self) -> None:
        """Export the weights as the next policy version. Collective."""
        dtype = DTYPES[self._settings.model.dtype]
        self._policy_version += 1
        weights = self._engine.serving_weights(dtype)
        with self._profile.phase("export"):
            if self._link is None:
                for _ in weights:
                    pass
                return
            snapshot = build_snapshot(self._policy_version, weights)
        with self._profile.phase("publish"):
            reserve_version(self._root, self._policy_version)
            self._link.publish(snapshot, self._next_batch)
        self._health.progress()
        log.info("published", policy_version=self._policy_version, num_bytes=snapshot.manifest.num_bytes)

    def _checkpoint(self) -> None:
        """Save, then tell the broker that these batches need not be delivered again. Collective."""
        if self._next_batch == self._checkpointed_batch and self._next_batch > 0:
            return
        if not self._is_acknowledged():
            log.warning(
                "checkpoint_not_saved", next_batch=self._next_batch, reason="the broker did not acknowledge its batches"
            )
            return
        begin = self._clock.now()
        state = CheckpointState(
            policy_version=self._policy_version,
            batch_position=self._next_batch,
            mismatch=dict(self._mismatch.state_dict()),
            adaptive_clip={} if self._adaptive_clip is None else self._adaptive_clip.state_dict(),
        )
        path = save_checkpoint(self._engine, self._root, state, keep=self._settings.learner.keep_checkpoints)
        self._checkpointed_batch = self._next_batch
        if self._link is not None:
            self._metrics.checkpoint_seconds.observe(self._clock.now() - begin)
            self._link.checkpointed(self._next_batch, self._policy_version)
            log.info("checkpoint_saved", path=str(path), next_batch=self._next_batch)

    def _is_acknowledged(self) -> bool:
        """Whether the broker has all that was published and reported; waited for. Collective.

        A batch that a checkpoint covers is not delivered again: if its report were lost with this process, nobody would
        ever make it up. Without the broker there is nothing else to do, so waiting costs nothing. False: stopped, and the
        broker did not answer within FLUSH_S; the batches since the last checkpoint will be trained again.
        """
        patience_s = FLUSH_S
        last_log = self._clock.now()
        while True:
            answer = ACKNOWLEDGED if self._link is None or self._link.flush(POLL_S) else NOT_YET
            if stop_anywhere(self._engine, self._stop.is_set()) and answer == NOT_YET:
                patience_s -= POLL_S
                answer = STOPPED if patience_s <= 0 else NOT_YET
            answer = int(self._engine.broadcast(torch.tensor([answer], dtype=torch.int64))[0])
            if answer != NOT_YET:
                return answer == ACKNOWLEDGED
            if self._clock.now() - last_log >= WAITING_LOG_S:
                log.info("waiting_for_acknowledgement", next_batch=self._next_batch)
                last_log = self._clock.now()

    def _finish(self, end: EndOfRun) -> None:
        self._checkpoint()
        destination = self._settings.run.directory / "export"
        export_model(
            self._engine, destination, tokenizer_from=self._settings.model.path, dtype=DTYPES[self._settings.model.dtype]
        )
        if self._link is None:
            return
        log.info("run_complete", reason=end.reason, export=str(destination))
        self._flush()
        self._serve_until_stopped()

    def _flush(self) -> None:
        """What the broker does not get now it learns from the next learner's Resume."""
        if self._link is not None and not self._link.flush(FLUSH_S):
            log.warning("broker_did_not_acknowledge", waited_s=FLUSH_S)

    def _serve_until_stopped(self) -> None:
        """Rollouts that join, or still evaluate the last version, must be able to fetch it."""
        assert self._link is not None
        # Not `stop.wait`: its lock and that of `set`, called by the signal's handler in this very thread, are one.
        while not self._stop.is_set():
            self._health.progress()
            self._link.take(POLL_S)
