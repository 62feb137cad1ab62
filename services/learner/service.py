"""The learner's training loop: batches in, policy versions out. Collectives happen here, in the main thread, alone."""

import threading
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import structlog
import torch

from gspo.adaptive import AdaptiveClip
from gspo.model.packing import TrainGroup
from gspo.settings import Objective
from gspo.staleness import MismatchTracker
from protocol.messages import EndOfRun, Welcome
from services.learner.broker import BatchArrived, groups_of
from services.learner.checkpoints import (
    Background,
    CheckpointSaver,
    CheckpointState,
    Threads,
    find_latest,
    load_checkpoint,
    reserve_version,
    reserved_version,
)
from services.learner.engine import LearnerEngine
from services.learner.export import export_model
from services.learner.metrics import LearnerMetrics
from services.learner.profiling import NO_PROFILE, Phases
from services.learner.share import share, stop_anywhere
from services.learner.trainer import AdvantageSettings, BatchReport, train_batch
from services.learner.weights import WeightCopy, copy_weights
from services.runtime.clock import Clock
from services.runtime.errors import ServiceError
from services.runtime.settings import Settings, objective_of
from services.runtime.telemetry import Health

log = structlog.get_logger()

POLL_S: Final = 1.0
WAITING_LOG_S: Final = 15.0
FLUSH_S: Final = 10.0
NOT_YET: Final = -1
STOPPED: Final = -2
GIVEN_UP: Final = 1
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


class BrokerPort(Protocol):
    """`services.learner.broker.client.Link`, or what stands in for it where batches are recorded ones."""

    @property
    def waiting_for(self) -> str: ...
    @property
    def refused(self) -> str: ...
    @property
    def encoding(self) -> bool: ...
    def wait_welcome(self, timeout_s: float) -> Welcome | None: ...
    def resume(self, next_batch: int) -> None: ...
    def request(self, index: int, policy_version: int) -> None: ...
    def take(self, timeout_s: float) -> BatchArrived | EndOfRun | None: ...
    def wait_announced(self) -> None: ...
    def publish(self, policy_version: int, weights: WeightCopy, trained_batches: int) -> None: ...
    def trained(self, index: int, policy_version: int, metrics: dict[str, float | None]) -> None: ...
    def mark(self) -> int: ...
    def acknowledged(self, mark: int) -> bool: ...
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
        link: BrokerPort | None,
        *,
        clock: Clock,
        health: Health,
        metrics: LearnerMetrics,
        stop: threading.Event,
        train: TrainBatch = train_batch,
        background: Background | None = None,
        profile: Phases = NO_PROFILE,
    ) -> None:
        """``link`` is rank 0's; None on the others. ``train`` makes a batch's optimizer steps. ``background`` is where
        checkpoints are written, where the settings want that; None: a thread."""
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
        self._root = settings.run.directory / "checkpoints"
        if not settings.learner.checkpoint_in_background:
            background = None
        elif background is None:
            background = Threads()
        self._saver = CheckpointSaver(engine, self._root, keep=settings.learner.keep_checkpoints, background=background)
        self._saved_batch = 0
        """Of the newest checkpoint, also while it is being saved."""
        self._saving_mark = 0
        self._saving_since = 0.0
        self._objective = objective_of(settings.objective)
        target = self._objective.adaptive_clip_target
        self._adaptive_clip = None if target is None else AdaptiveClip(target=target)
        self._advantages = AdvantageSettings(
            credit="sequence" if settings.objective.advantage == "sequence" else "return_to_go",
            normalise_std=settings.objective.normalise_by_std,
        )

    def run(self) -> None:
        """Train until the run ends or ``stop`` is set, on any rank. Raises: ServiceError; what the engine raises."""
        try:
            self._run()
        finally:
            self._saver.abandon()

    def _run(self) -> None:
        self._resume()
        self._publish()
        while True:
            with self._profile.phase("wait"):
                directive = self._next()
            if directive is None:
                log.info("stopping", next_batch=self._next_batch)
                self._checkpoint()
                self._finish_saving()
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
            self._next_batch = self._saved_batch = state.batch_position
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
            self._go_on_saving()
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
        with self._profile.phase("checkpoint"):
            self._go_on_saving()
            if self._next_batch - self._saved_batch >= self._settings.learner.checkpoint_every_batches:
                self._checkpoint()
        self._profile.end_batch(batch.index, self._engine.sum_over_ranks)

    def _report(self, index: int, metrics: Mapping[str, float], *, num_tokens: int, items: int) -> None:
        self._health.progress()
        if self._link is None:
            return
        self._metrics.batches.inc()
        self._metrics.tokens.inc(num_tokens)
        self._metrics.trajectories.inc(items)
        self._metrics.next_batch.set(self._next_batch)
        self._metrics.train_seconds.observe(metrics["train_s"])
        self._metrics.publish_seconds.observe(metrics["publish_s"])
        self._metrics.set_diagnostics(metrics)
        self._link.trained(index, self._policy_version, dict(metrics))
        log.info("batch_trained", batch=index, policy_version=self._policy_version, train_s=round(metrics["train_s"], 3))

    def _publish(self) -> None:
        """Copy the weights, to be the next policy version: training goes on while it is made and announced. Collective.

        The version is reserved before it is handed over, and so before a batch can be asked for that is assembled for it.
        """
        dtype = DTYPES[self._settings.model.dtype]
        self._policy_version += 1
        if self._link is not None:
            # Before the copy is made: there is never more than one beside what is served.
            with self._profile.phase("publish"):
                self._link.wait_announced()
        weights = self._engine.serving_weights(dtype)
        with self._profile.phase("export"):
            if self._link is None:
                for _ in weights:
                    pass
                self._health.progress()
                return
            copied = copy_weights(weights)
        with self._profile.phase("publish"):
            reserve_version(self._root, self._policy_version)
            self._link.publish(self._policy_version, copied, self._next_batch)
        self._health.progress()

    def _checkpoint(self) -> None:
        """Begin to save, behind the checkpoint that is being saved: training waits for the copy alone. Collective."""
        if self._next_batch == self._saved_batch and self._next_batch > 0:
            return
        self._finish_saving()
        self._saving_since = self._clock.now()
        state = CheckpointState(
            policy_version=self._policy_version,
            batch_position=self._next_batch,
            mismatch=dict(self._mismatch.state_dict()),
            adaptive_clip={} if self._adaptive_clip is None else self._adaptive_clip.state_dict(),
        )
        if self._link is not None:
            self._saving_mark = self._link.mark()
        self._saver.begin(state)
        self._saved_batch = self._next_batch
        if not self._settings.learner.checkpoint_in_background:
            self._finish_saving()
        if self._link is not None:
            self._metrics.checkpoint_seconds.observe(self._clock.now() - self._saving_since)

    def _go_on_saving(self, wait_s: float = 0.0) -> None:
        """Publish the checkpoint if every rank has written it and the broker has what it covers; then tell the broker that
        these batches need not be delivered again. Collective.

        A batch that a checkpoint covers is not delivered again: if its report were lost with this process, nobody would
        ever make it up.
        """
        state = self._saver.pending
        if state is None:
            return
        acknowledged = self._link is None or self._link.acknowledged(self._saving_mark)
        path = self._saver.advance(newest_version=self._policy_version, may_publish=acknowledged, wait_s=wait_s)
        if path is not None and self._link is not None:
            self._metrics.checkpoint_write_seconds.observe(self._clock.now() - self._saving_since)
            self._link.checkpointed(state.batch_position, state.policy_version)
            log.info("checkpoint_saved", path=str(path), next_batch=state.batch_position)

    def _finish_saving(self) -> None:
        """Return when no checkpoint is being saved. Collective.

        Without the broker there is nothing else to do, so waiting for it costs nothing. But when stopped, and the broker
        does not answer within FLUSH_S, it is given up: the batches since the checkpoint before will be trained again.
        """
        patience_s = FLUSH_S
        last_log = self._clock.now()
        while self._saver.pending is not None:
            heard = self._link is None or self._link.acknowledged(self._saving_mark) or self._link.flush(POLL_S)
            self._go_on_saving(wait_s=POLL_S)
            if self._saver.pending is None:
                return
            # Digests and a delta take their time, whatever the broker does.
            busy = heard or (self._link is not None and self._link.encoding)
            if stop_anywhere(self._engine, self._stop.is_set()) and not busy:
                patience_s -= POLL_S
            answer = torch.tensor([GIVEN_UP if patience_s <= 0 else NOT_YET], dtype=torch.int64)
            if int(self._engine.broadcast(answer)[0]) == GIVEN_UP:
                reason = "the broker did not acknowledge its batches"
                log.warning("checkpoint_not_saved", next_batch=self._saved_batch, reason=reason)
                self._saver.discard()
            elif self._clock.now() - last_log >= WAITING_LOG_S:
                log.info("waiting_for_checkpoint", next_batch=self._saved_batch, acknowledged=heard)
                last_log = self._clock.now()

    def _finish(self, end: EndOfRun) -> None:
        self._checkpoint()
        self._finish_saving()
        destination = self._settings.run.directory / "export"
        export_model(
            self._engine, destination, tokenizer_from=self._settings.model.path, dtype=DTYPES[self._settings.model.dtype]
        )
        if self._link is not None:
            log.info("run_complete", reason=end.reason, export=str(destination))
        self._flush()
        self._serve_until_stopped()

    def _flush(self) -> None:
        """What the broker does not get now it learns from the next learner's Resume."""
        if self._link is not None and not self._link.flush(FLUSH_S):
            log.warning("broker_did_not_acknowledge", waited_s=FLUSH_S)

    def _serve_until_stopped(self) -> None:
        """Rollouts that join, or still evaluate the last version, must be able to fetch it. Collective.

        All ranks stay with rank 0: of a machine whose ranks have ended Kubernetes starts others, which would meet nobody.
        """
        # Not `stop.wait`: its lock and that of `set`, called by the signal's handler in this very thread, are one.
        while not stop_anywhere(self._engine, self._stop.is_set()):
            self._health.progress()
            if self._link is not None:
                self._link.take(POLL_S)
