"""Tokens a second of both halves of a run, and how long a batch takes.

Nothing in this project was measured on a GPU: the shares below are those that others report for similar work, and the
spans are wide. On a CPU the constants come from docs/evidence/performance.md; another core may be twice as fast or slow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from gspo_services.shared.estimates.amounts import BYTES, Span, at_most
from gspo_services.shared.estimates.hardware import Hardware
from gspo_services.shared.estimates.shape import ModelShape
from gspo_services.shared.settings import Settings

MFU_DENSE: Final = Span(0.20, 0.45)
"""Share of a GPU's peak in training: packed sequences, ZeRO, no custom kernels."""
MFU_EXPERTS: Final = Span(0.06, 0.25)
"""The same for a mixture of experts: small matrices, and gathers of whole layers."""
DECODE_SHARE: Final = Span(0.30, 0.70)
"""Share of the memory's bandwidth, or of the peak, that decoding reaches."""
STEP_S: Final = Span(0.002, 0.010)
"""Seconds of a decode step, at least: kernel starts and the scheduler."""
CORE_FLOPS: Final = Span(0.08e12, 0.25e12)
"""Of one core in float32: the learner's 1,082 tokens/s of 25.7 M parameters are 0.17e12."""
TRAINED_TOKEN_S: Final = Span(2e-5, 9e-5)
"""On one core, whatever the model's size: a learner of 0.26 M parameters trains 19,002 tokens/s."""
SAMPLED_TOKEN_S: Final = Span(3e-4, 14e-4)
"""On one core likewise: SGLang samples 1,394 tokens/s of 3.6 M parameters, with 64 requests under way."""
SEQUENCE_S: Final = Span(2e-3, 9e-3)
"""On one core, for each answer: its request, prompt, reward and messages. The demo of docs/evidence/results.md, whose
answers have four tokens, needs some 2 s for 256 of them on two cores."""
BATCH_S: Final = {True: Span(0.5, 4.0), False: Span(0.2, 1.2)}
"""Seconds of the learner for any batch, with or without a GPU: statistics, copies of the weights, reports."""
PREFILL_SHARE: Final = Span(0.2, 0.5)
"""Share of a GPU's peak while it reads prompts."""
MEAN_SHARE: Final = 0.5
"""The assumed mean length of an answer, as a share of sampling.max_turn_tokens."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The content of a batch."""

    sequences: int
    prompt_tokens: float
    """Of all groups: the members of one share theirs in the engine's cache."""
    action_tokens: float
    """Sampled tokens."""
    all_tokens: float
    """Tokens that the learner reads, including prompts."""
    sequence_tokens: float
    """Mean length of a sequence."""
    turn_tokens: float
    """Mean length of an answer."""
    teacher_parameters: int = 0
    """Of the frozen model that scores every token: those that multiply it."""


@dataclass(frozen=True, kw_only=True)
class RunPace:
    """The speed of both halves."""

    sampled: Span
    """Action tokens a second, of all rollouts together."""
    trained: Span
    """Tokens a second, of all ranks together; prompts count."""
    generation_s: Span
    """Seconds of a batch if nothing else delayed it."""
    training_s: Span
    episode_s: Span
    """The longest answer, from its first token to its last."""

    @property
    def batch_s(self) -> Span:
        """Both halves work at the same time."""
        return at_most(self.generation_s, self.training_s)


def work_of(settings: Settings, prompt_tokens: float, teacher_parameters: int = 0) -> Work:
    """One batch, with answers of MEAN_SHARE of their limit and one turn. ``prompt_tokens``: the mean prompt."""
    sequences = settings.batch.groups_per_batch * settings.batch.group_size
    turn = max(1.0, MEAN_SHARE * settings.sampling.max_turn_tokens)
    length = min(float(settings.sampling.max_tokens), prompt_tokens + turn)
    return Work(
        sequences=sequences,
        prompt_tokens=settings.batch.groups_per_batch * prompt_tokens,
        action_tokens=sequences * turn,
        all_tokens=sequences * length,
        sequence_tokens=length,
        turn_tokens=turn,
        teacher_parameters=teacher_parameters,
    )


def pace_of(
    shape: ModelShape, settings: Settings, hardware: Hardware, work: Work, num_rollouts: int, most_running: float = math.inf
) -> RunPace | None:
    """None when the device's bandwidth or peak is not known. ``most_running``: sequences for which a server has room."""
    if hardware.device is None:
        sampled, step = _sampled_by_cores(shape, settings, hardware, work, num_rollouts)
        trained = _trained_by_cores(shape, settings, hardware, work)
    elif hardware.device.peak is None or hardware.device.bandwidth is None:
        return None
    else:
        sampled, step = _sampled_by_devices(shape, settings, hardware, work, num_rollouts, most_running)
        ranks = settings.learner.num_ranks * settings.learner.num_nodes
        mfu = MFU_EXPERTS if shape.experts else MFU_DENSE
        trained = mfu * (ranks * hardware.device.peak / flops_per_trained_token(shape, settings, work))
    return RunPace(
        sampled=sampled,
        trained=trained,
        generation_s=Span(work.action_tokens, work.action_tokens).divided_by(sampled),
        training_s=Span(work.all_tokens, work.all_tokens).divided_by(trained) + BATCH_S[hardware.device is not None],
        episode_s=step * settings.sampling.max_turn_tokens,
    )


def flops_per_trained_token(shape: ModelShape, settings: Settings, work: Work) -> float:
    """forward = 2 N_active + 2 L heads head_dim layers for each of the L tokens (``gspo_services.learner.profiling.flops``);
    training is 3 of them, checkpointed activations cost one more, and so do the first pass and the reference.
    A teacher adds its own forward pass."""
    forward = 2.0 * shape.active_parameters + 2.0 * work.sequence_tokens * shape.attention_width
    objective = settings.objective
    passes = 3 + settings.learner.activation_checkpointing
    passes += objective.anchor == "proximal" or (objective.routing_replay and objective.routing_replay_from == "learner")
    passes += objective.kl_coefficient > 0
    return forward * passes + 2.0 * work.teacher_parameters


def _sampled_by_devices(
    shape: ModelShape, settings: Settings, hardware: Hardware, work: Work, num_rollouts: int, most_running: float
) -> tuple[Span, Span]:
    """Tokens a second of all rollouts, and seconds of a step.

    A decode step reads the weights that its B tokens need once, and the cache of B sequences:
    max(bytes / bandwidth, 2 N_active B / peak). Of E experts B tokens touch E (1 - (1 - k / E)^B). A server's ranks do this
    side by side; what they say to each other is not counted.
    """
    device = hardware.device
    assert device is not None
    assert device.bandwidth is not None
    assert device.peak is not None
    size = BYTES[settings.model.dtype]
    running = max(1.0, min(most_running, _running(settings, work, num_rollouts)))
    untouched = (1 - shape.experts_per_token / shape.experts) ** running if shape.experts else 0.0
    weights = size * (shape.other_parameters + (1 - untouched) * shape.expert_parameters)
    cache = running * (work.sequence_tokens - work.turn_tokens / 2) * shape.kv_bytes(size)
    ranks = settings.rollout.ranks_per_server
    ideal = max((weights + cache) / device.bandwidth, 2.0 * shape.active_parameters * running / device.peak) / ranks
    step = Span(ideal / DECODE_SHARE.high, ideal / DECODE_SHARE.low) + STEP_S
    decode = Span(work.action_tokens, work.action_tokens).divided_by(Span(running, running).divided_by(step) * num_rollouts)
    prefill = 2.0 * shape.active_parameters * work.prompt_tokens / device.peak / num_rollouts / ranks
    batch = decode + Span(prefill / PREFILL_SHARE.high, prefill / PREFILL_SHARE.low)
    return Span(work.action_tokens, work.action_tokens).divided_by(batch), step


def _running(settings: Settings, work: Work, num_rollouts: int) -> float:
    """Return the requests under way at a server: its own limit, or its share of what admission allows."""
    admitted = (settings.batch.max_lag + 1) * work.sequences
    return max(1.0, min(float(settings.rollout.max_running), admitted / max(1, num_rollouts)))


def _cores_of(hardware: Hardware, processes: int) -> float:
    """Return the cores for each of so many busy processes."""
    return min(1.0, hardware.cores / max(1, processes))


def _sampled_by_cores(
    shape: ModelShape, settings: Settings, hardware: Hardware, work: Work, num_rollouts: int
) -> tuple[Span, Span]:
    """Each server uses one thread. The learner's ranks take cores, too."""
    share = _cores_of(hardware, num_rollouts + settings.learner.num_ranks)
    token = SAMPLED_TOKEN_S + Span(2.0 * shape.active_parameters, 2.0 * shape.active_parameters).divided_by(CORE_FLOPS)
    rate = Span(share, share).divided_by(token + SEQUENCE_S * (1 / work.turn_tokens)) * num_rollouts
    running = float(settings.rollout.max_running)
    return rate, token * (running / share)


def _trained_by_cores(shape: ModelShape, settings: Settings, hardware: Hardware, work: Work) -> Span:
    ranks = settings.learner.num_ranks
    share = _cores_of(hardware, settings.rollout.num_servers + ranks)
    flops = flops_per_trained_token(shape, settings, work)
    token = TRAINED_TOKEN_S + Span(flops, flops).divided_by(CORE_FLOPS)
    return Span(share, share).divided_by(token) * ranks * settings.learner.num_nodes
