"""Trains one planned batch: its optimizer steps, and what they say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from gspo.calibration import LagCalibration, measured_sequences
from gspo.diagnostics import signal_clip_fraction, summarise
from gspo.settings import Objective
from gspo_services.learner.batch_run import BatchRun, Trackers, TrainingEngine
from gspo_services.learner.engine import LearnerEngine
from gspo_services.learner.plan import MINI_BATCH_ORDER
from gspo_services.learner.planned_batch import PlannedBatch
from gspo_services.learner.token_dump import TokenDump

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """The metrics of one trained batch; the same on every rank."""

    metrics: dict[str, float]
    """By name; those of ``gspo.diagnostics.summarise`` and ``gspo.moe.experts`` by "name/bucket"."""


class TrainBatch(Protocol):
    """``train_batch``, or what stands in for it where there is no model."""

    def __call__(
        self, engine: LearnerEngine, batch: PlannedBatch, trackers: Trackers, token_dump: TokenDump | None = None
    ) -> BatchReport: ...


def train_batch(
    engine: TrainingEngine, batch: PlannedBatch, trackers: Trackers, token_dump: TokenDump | None = None
) -> BatchReport:
    """Make the optimizer steps of the batch. Collective.

    With an engine that replays routing, every forward pass of the batch uses the experts chosen at its start, or those
    that the inference engine chose.

    Args:
        batch: planned for this engine.
        trackers: read for the batch, and updated from it.
        token_dump: told what the loss made of each token, and written; None: that is not kept.

    Raises: ValueError when the batch cannot be trained on; GradientError (see the engine) when a step was not made.
    """
    clip_scale = trackers.clip_scale
    run = BatchRun(engine, batch, trackers, token_dump)
    work = batch.work(sequence_parallel=engine.sequence_parallel, first_pass=run.needs_first_pass)
    engine.profile.planned(work)
    with engine.profile.phase("first_pass"):
        run.begin()
    steps = [run.step(mini_batch) for mini_batch in batch.mini_batches]
    rewards = batch.rows.rewards
    metrics = {
        "loss": sum(step.loss for step in steps) / len(steps),
        "grad_norm": sum(step.grad_norm for step in steps) / len(steps),
        "grad_norm_max": max(step.grad_norm for step in steps),
        "learning_rate": steps[-1].learning_rate,
        "packed_tokens": float(sum(step.num_tokens for step in steps)),
        "computed_tokens": float(sum(step.num_computed_tokens for step in steps)),
        "forward_only_tokens": float(sum(work.still_lengths)),
        "optimizer_steps": float(len(steps)),
        "mini_batch_order": float(MINI_BATCH_ORDER),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "mismatch_sigma": trackers.mismatch.sigma,
        **({} if trackers.first_look is None else {"mismatch_far": trackers.first_look.far}),
        "clip_scale": clip_scale,
        **({} if batch.kl_penalty is None else {"kl_penalty": batch.kl_penalty}),
        **run.rate_metrics(),
    }
    with engine.profile.phase("diagnostics"):
        return BatchReport(metrics=metrics | _diagnosed(batch, run, trackers, token_dump))


def _diagnosed(batch: PlannedBatch, run: BatchRun, trackers: Trackers, token_dump: TokenDump | None) -> dict[str, float]:
    """Gather the statistics of all ranks, update the trackers from them, and return what they say. Collective."""
    stats = run.gathered_stats()
    if token_dump is not None:
        token_dump.write()
    summary = summarise(stats)
    # With the proximal anchor every sequence was seen under the starting weights, else those of the first step.
    seen = batch.mini_batches if batch.objective.needs_proximal_logprobs else batch.mini_batches[:1]
    calibration = trackers.calibration
    calibration.update(measured_sequences(stats, [row for mini_batch in seen for row in mini_batch.plan.rows]))
    fraction = signal_clip_fraction(summary)
    if trackers.adaptive_clip is not None and fraction is not None:
        trackers.adaptive_clip.update(fraction)
    experts = run.expert_metrics()
    if experts.get("experts_replayed/all") == 0:
        log.warning(
            "no_experts_reported", policy_version=batch.policy_version,
            remedy='give broker and rollouts objective.routing_replay_from = "engine" too; older groups have none',
        )  # fmt: skip
    biases = _biases(batch.objective, calibration, summary)
    return summary | calibration.metrics() | biases | experts | run.auxiliary_metrics()


def _biases(objective: Objective, calibration: LagCalibration, summary: Mapping[str, float]) -> dict[str, float]:
    """``calibration_bias`` by lag: the location of what engine and drift add to the log-ratios, over the clip range's bound
    on that side. Above 1, more than half of the sequences of that lag lie beyond it before anything is learned."""
    if objective.anchor != "behaviour":
        return {}
    found = {}
    for key, location in calibration.metrics().items():
        name, _, bucket = key.partition("/")
        bound = summary.get(f"clip_range_{'low' if location < 0 else 'high'}/{bucket}", 0.0)
        if name == "calibration_location" and bound:
            found[f"calibration_bias/{bucket}"] = location / bound
    return found
