"""The learner's training loop: batches in, policy versions out. Collectives happen only here, in the main thread."""

import logging
import threading
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Final

import numpy as np
import structlog
import torch

from gspo.adaptive import AdaptiveClip
from gspo_protocol.messages import BatchRequest, Checkpointed, EndOfRun, Resume, SkipBatch, Trained
from gspo_services.learner.batch_failures import BatchFailures
from gspo_services.learner.batch_run import Trackers
from gspo_services.learner.broker import Answer, AssembledBatch, BatchAnnounced, BrokerPort, Publication, assemble
from gspo_services.learner.checkpoints import (
    Background,
    CheckpointSaver,
    CheckpointState,
    Threads,
    Versions,
    require_own_directory,
    resume,
)
from gspo_services.learner.engine import LearnerDevice, LearnerEngine, OwnDevice
from gspo_services.learner.export import export_model
from gspo_services.learner.first_look import FirstLook
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.planned_batch import BatchSettings, plan_batch, rows_of_rank
from gspo_services.learner.profiling import NO_PROFILE, Phases
from gspo_services.learner.scheduled import scheduled_objective
from gspo_services.learner.share import share, stop_anywhere
from gspo_services.learner.token_dump import TokenDump
from gspo_services.learner.trainer import TrainBatch, train_batch
from gspo_services.learner.weights import DTYPES, VersionCopies, WeightCopy
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings import Settings

log = structlog.get_logger()

POLL_S: Final = 1.0
WAITING_LOG_S: Final = 15.0
FLUSH_S: Final = 10.0
NOT_YET: Final = -1
STOPPED: Final = -2
GIVEN_UP: Final = 1
LEAST_PROBE: Final = 256
PROBE_SHARE: Final = 16
"""A batch has so many times the tokens of the probe behind it, which is only a forward pass."""
_SILENT: Final = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


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
        broker: BrokerPort,
        *,
        clock: Clock,
        health: Health,
        metrics: LearnerMetrics,
        stop: threading.Event,
        train: TrainBatch = train_batch,
        background: Background | None = None,
        profile: Phases = NO_PROFILE,
        life: str = "",
        device: LearnerDevice | None = None,
        first_look: FirstLook | None = None,
    ) -> None:
        """``broker`` is a ``NoBroker`` on all ranks but 0. ``train`` makes a batch's optimizer steps. ``background`` writes
        checkpoints if the settings want that; None: a thread. ``life`` names this life of the learner; empty: at random.
        ``device``: the engine's; None: it is the learner's alone. ``first_look``: None: any first batch is trained on."""
        self._device = OwnDevice() if device is None else device
        self._profile = profile
        self._train_batch = train
        self._settings = settings
        self._engine = engine
        self._broker = broker
        # One rank logs what all ranks see alike.
        self._log = log if engine.rank == 0 else _SILENT
        self._clock = clock
        self._health = health
        self._metrics = metrics
        self._stop = stop
        self._copies = VersionCopies(engine, settings, rank=engine.rank)
        self._next_batch = 0
        self._policy_version = 0
        """The weights' version; 0 while older batches are trained again, whose weights have none."""
        self._newest_trained = 0
        """The newest version's number of batches when this learner began."""
        self._root = settings.run.directory / "checkpoints"
        self._versions = Versions(self._root, life or uuid.uuid4().hex, broker.commit)
        if not settings.learner.checkpoint_in_background:
            background = None
        elif background is None:
            background = Threads()
        self._saver = CheckpointSaver(
            engine,
            self._root,
            keep=settings.learner.keep_checkpoints,
            background=background,
            versions=self._versions,
            scores=broker.scores if settings.learner.keep_best_checkpoint else dict,
        )
        self._failures = BatchFailures(broker, settings.run.directory, rank=engine.rank)
        self._has_published = False
        self._batch_tokens = 0
        """Of the last batch that was trained."""
        self._waited_s = 0.0
        """How long the last version waited until the one before it was announced."""
        self._saved_batch = 0
        """The batch position of the newest checkpoint, also while it is being saved."""
        self._saving_since = 0.0
        target = settings.objective.adaptive_clip_target
        self._trackers = Trackers(
            adaptive_clip=None if target is None else AdaptiveClip(target=target),
            first_look=first_look,
        )
        self._batch_settings = BatchSettings.of(settings)
        self._rows_of_rank = partial(rows_of_rank, engine, settings)

    def run(self) -> None:
        """Train until the run ends, or ``stop`` is set on any rank. Raises: ServiceError; what the engine raises."""
        try:
            self._run()
        finally:
            self._saver.abandon()

    def _run(self) -> None:
        self._failures.begin()
        self._newest_trained = self._wait_for_broker()
        with self._device.held():
            self._resume()
            self._publish()
        while True:
            with self._profile.phase("wait"):
                directive: Answer | AssembledBatch | None = self._next()
                if isinstance(directive, BatchAnnounced):
                    directive = assemble(
                        directive, self._rows_of_rank, self._arrival, self._failures.of, self._settings.lora.adapters
                    )
            if directive is None:
                log.info("stopping", next_batch=self._next_batch)
                with self._device.held():
                    self._checkpoint()
                self._finish_saving()
                self._flush()
                return
            if isinstance(directive, EndOfRun):
                self._finish(directive)
                return
            with self._device.held():
                if isinstance(directive, SkipBatch):
                    self._skip(directive)
                elif isinstance(directive, AssembledBatch):
                    self._train(directive)

    def _resume(self) -> None:
        # Only now: the learner that this one waited for may have saved another checkpoint meanwhile.
        resumed = resume(self._engine, self._root)
        if resumed is not None:
            state = resumed.state
            self._next_batch = self._saved_batch = state.batch_position
            trackers = self._trackers
            trackers.mismatch.load_state_dict(state.mismatch)
            if state.calibration:
                trackers.calibration.load_state_dict(state.calibration)
            if trackers.adaptive_clip is not None and state.adaptive_clip:
                trackers.adaptive_clip.load_state_dict(state.adaptive_clip)
            log.info("resumed", checkpoint=str(resumed.path), next_batch=self._next_batch)
        if self._next_batch < self._newest_trained:
            self._log.info("trains_again", first=self._next_batch, next_new=self._newest_trained)
        self._broker.tell(Resume(next_batch=self._next_batch))
        self._metrics.next_batch.set(self._next_batch)

    def _wait_for_broker(self) -> int:
        """Wait for the broker's Welcome. Returns how many batches its newest version was trained on. Collective.

        All ranks meet once a second, because a collective fails when one rank is half an hour late.
        Raises: ServiceError, on all ranks, when stopped.
        """
        while True:
            welcome = self._broker.wait_welcome(POLL_S)
            answer = NOT_YET if welcome is None else welcome.trained_batches
            if stop_anywhere(self._engine, self._stop.is_set()) and welcome is None:
                answer = STOPPED
            answer = int(self._engine.broadcast(torch.tensor([answer], dtype=torch.int64))[0])
            if answer == STOPPED:
                raise ServiceError("stopped before the broker answered")
            if answer != NOT_YET:
                if welcome is not None:
                    require_own_directory(self._root, welcome)
                    self._versions.begin(welcome)
                return answer
            self._health.not_ready(self._broker.reason_to_wait)

    def _next(self) -> Answer | None:
        """What the next batch consists of, or that it is to be skipped, or the end of the run, on every rank; None: stop."""
        self._broker.tell(BatchRequest(index=self._next_batch, policy_version=self._policy_version))
        return self._arrival()

    def _arrival(self) -> Answer | None:
        """Share rank 0's next answer with every rank; None: stop. Collective."""
        waited_until = last_log = self._clock.now()
        while True:
            arrived = self._broker.take(POLL_S)
            directive, stop = share(self._engine, arrived, self._stop.is_set())
            now = self._clock.now()
            self._metrics.wait_seconds.inc(now - waited_until)
            waited_until = now
            if stop or directive is not None:
                return None if stop else directive
            self._advance_saving()
            if now - last_log >= WAITING_LOG_S:
                self._log.info("waiting_for_batch", batch=self._next_batch, waiting_for=self._broker.reason_to_wait)
                last_log = now

    def _train(self, assembled: AssembledBatch) -> None:
        batch, groups = assembled.batch, assembled.groups
        begin = self._clock.now()
        with self._failures.of(batch.index):
            objective = scheduled_objective(self._engine, batch, self._settings)
            planned = plan_batch(self._engine, groups, batch.policy_version, objective, self._batch_settings)
            token_dump = TokenDump.wanted(self._settings, self._engine, batch, groups)
            report = self._train_batch(self._engine, planned, self._trackers, token_dump)
        trained = self._clock.now()
        self._next_batch, self._batch_tokens = batch.index + 1, batch.num_tokens
        self._publish()
        times = {"train_s": trained - begin, "publish_s": self._clock.now() - trained, "publish_wait_s": self._waited_s}
        metrics = {**report.metrics, **times}
        self._report(batch.index, metrics, num_tokens=batch.num_tokens, items=len(batch.items))
        with self._profile.phase("checkpoint"):
            self._save_if_due()
        self._profile.end_batch(batch.index, self._engine.sum_over_ranks)

    def _skip(self, skipped: SkipBatch) -> None:
        """The broker has quarantined the batch: the next version has the same weights."""
        self._next_batch = skipped.index + 1
        self._publish()
        self._metrics.next_batch.set(self._next_batch)
        self._log.warning("batch_skipped", batch=skipped.index, reason=skipped.reason)
        self._broker.tell(Trained(index=skipped.index, policy_version=self._policy_version, metrics={}, skipped=True))
        self._save_if_due()

    def _save_if_due(self) -> None:
        self._advance_saving()
        if self._next_batch - self._saved_batch >= self._settings.learner.checkpoint_every_batches:
            self._checkpoint()

    def _report(self, index: int, metrics: Mapping[str, float], *, num_tokens: int, items: int) -> None:
        self._health.progress()
        self._metrics.batches.inc()
        self._metrics.tokens.inc(num_tokens)
        self._metrics.trajectories.inc(items)
        self._metrics.next_batch.set(self._next_batch)
        self._metrics.train_seconds.observe(metrics["train_s"])
        self._metrics.publish_seconds.observe(metrics["publish_s"])
        self._metrics.set_diagnostics(metrics)
        self._broker.tell(Trained(index=index, policy_version=self._policy_version, metrics=dict(metrics)))
        train_s = round(metrics["train_s"], 3)
        self._log.info("batch_trained", batch=index, policy_version=self._policy_version, train_s=train_s)

    def _publish(self) -> None:
        """Copy the weights to publish them as a policy version, while training continues. Collective.

        Until this learner has trained as many batches as the newest version, it publishes nothing: engines serve that
        version meanwhile, and if training is deterministic, its own weights then are that version.
        The version is reserved before it is handed over, and so before anyone can ask for a batch of that version.
        """
        if self._next_batch < self._newest_trained:
            self._health.progress()
            return
        # Before the copy: at most one copy exists besides the served weights.
        begin = self._clock.now()
        with self._profile.phase("publish"):
            self._broker.wait_for_room()
        self._waited_s = self._clock.now() - begin
        self._metrics.publish_wait_seconds.inc(self._waited_s)
        with self._profile.phase("export"):
            copied = self._copies.copy(self._probe_tokens())
            self._has_published = True
        with self._profile.phase("publish"):
            digest = self._digest(copied)
            leads = self._engine.rank == 0
            number = self._versions.number(digest, self._next_batch) if leads else 0
            # Every rank uses it to name checkpoints.
            number = int(self._engine.broadcast(torch.tensor([number], dtype=torch.int64))[0])
            self._policy_version = number
            if leads:
                self._versions.reserve(number, self._next_batch)
            if copied is not None:
                self._broker.publish(
                    Publication(
                        policy_version=number,
                        weights=copied,
                        trained_batches=self._next_batch,
                        vocabulary=self._engine.vocabulary,
                        note_digest=partial(self._versions.note_digest, number),
                        experts=self._engine.model_experts,
                        is_part=self._copies.are_parts and self._engine.world_size > 1,
                        digest=digest,
                    )
                )
        self._health.progress()

    def _probe_tokens(self) -> int:
        """The tokens of the next version's probe: all of the longest sequence with this life's first version, whose
        engines are new, and later as many as cost little beside the batch."""
        longest = max(2, self._settings.longest_sequence - 1)
        return min(longest, max(LEAST_PROBE, self._batch_tokens // PROBE_SHARE)) if self._has_published else longest

    def _digest(self, copied: WeightCopy | None) -> str:
        """The version's digest on rank 0, if its number depends on it or the broker wants it; else empty. Collective."""
        wanted = self._broker.wants_digests or self._versions.needs_digest(self._next_batch)
        if copied is None or not self._copies.are_parts or self._engine.world_size == 1:
            return copied.digest() if wanted and copied is not None else ""
        if not int(self._engine.broadcast(torch.tensor([int(wanted)], dtype=torch.int64))[0]):
            return ""
        # Sums of ranks add up, and wrap.
        row = self._engine.sum_over_ranks(torch.from_numpy(copied.row().view(np.int64)))
        return copied.layout.digest(row.cpu().numpy().view(np.uint64)) if self._engine.rank == 0 else ""

    def _checkpoint(self) -> None:
        """Begin to save, after any checkpoint that is being saved. Training waits only for the copy. Collective."""
        if self._next_batch == self._saved_batch and self._next_batch > 0:
            return
        self._finish_saving()
        self._saving_since = self._clock.now()
        trackers = self._trackers
        state = CheckpointState(
            policy_version=self._policy_version,
            batch_position=self._next_batch,
            mismatch=dict(trackers.mismatch.state_dict()),
            adaptive_clip={} if trackers.adaptive_clip is None else trackers.adaptive_clip.state_dict(),
            calibration=trackers.calibration.state_dict(),
        )
        self._saver.begin(state)
        self._saved_batch = self._next_batch
        if not self._settings.learner.checkpoint_in_background:
            self._finish_saving()
        self._metrics.checkpoint_seconds.observe(self._clock.now() - self._saving_since)

    def _advance_saving(self, wait_s: float = 0.0) -> None:
        """Publish the checkpoint once every rank has written it and the broker has the reports of its batches; then tell
        the broker that these batches need not be delivered again. Collective.

        A batch that a checkpoint covers is never trained again: a report lost with this process would stay lost.
        """
        state = self._saver.pending
        if state is None:
            return
        acknowledged = self._broker.acknowledged(state.batch_position)
        path = self._saver.advance(may_publish=acknowledged, wait_s=wait_s)
        if path is not None:
            self._metrics.checkpoint_write_seconds.observe(self._clock.now() - self._saving_since)
            self._broker.tell(Checkpointed(next_batch=state.batch_position, policy_version=state.policy_version))
            self._log.info("checkpoint_saved", path=str(path), next_batch=state.batch_position)

    def _finish_saving(self) -> None:
        """Wait until no checkpoint is being saved. Collective.

        Without the broker there is nothing else to do, so waiting for it costs nothing. But if this learner is stopped
        and the broker is silent for FLUSH_S, it gives the checkpoint up: the batches since the previous one will be trained
        again.
        """
        patience_s = FLUSH_S
        last_log = self._clock.now()
        while self._saver.pending is not None:
            heard = self._broker.acknowledged(self._saved_batch) or self._broker.flush(POLL_S)
            self._advance_saving(wait_s=POLL_S)
            if self._saver.pending is None:
                return
            if stop_anywhere(self._engine, self._stop.is_set()) and not heard:
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
        destination, model = self._settings.run.directory / "export", self._settings.model
        with self._device.held():
            self._checkpoint()
            self._finish_saving()
            several = self._settings.lora.adapters
            # Merged weights would have one of several adapters: `gspo export --adapter` writes each.
            if not several:
                export_model(self._engine, destination, tokenizer_from=model.path, dtype=DTYPES[model.dtype])
        self._log.info("run_complete", reason=end.reason, export="" if several else str(destination))
        self._flush()
        self._serve_until_stopped()

    def _flush(self) -> None:
        """Wait for the broker once. It learns anything it misses from the next learner's Resume."""
        if not self._broker.flush(FLUSH_S):
            log.warning("broker_did_not_acknowledge", waited_s=FLUSH_S)

    def _serve_until_stopped(self) -> None:
        """Serve the last version to rollouts that join, or that still evaluate it. Collective.

        All ranks stay with rank 0: Kubernetes replaces ranks that have ended, and the new ones would find no peers.
        """
        # Not ``stop.wait``: the signal's handler calls ``set`` in this same thread, and both take the same lock.
        while not stop_anywhere(self._engine, self._stop.is_set()):
            self._health.progress()
            self._broker.take(POLL_S)
