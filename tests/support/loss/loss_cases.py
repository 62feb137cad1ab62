"""Builders of loss inputs: random sequences and steps, and the flat tensors that the loss takes, packed or padded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from gspo.loss import LossOutput
from gspo.reference import ReferenceResult, ReferenceSequence, reference_loss
from gspo.settings import RatioUnit
from tests.support.loss.gspo_copies import GSPO, Gspo

EPS_LOW, EPS_HIGH = 3e-4, 4e-4


@dataclass(frozen=True)
class Flat:
    """Flat tensors of some sequences; ``logprobs_T`` is a leaf that collects the gradient."""

    logprobs_T: Tensor
    anchor_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    sequence_ids_T: Tensor
    turn_ids_T: Tensor
    lag_S: Tensor
    weights_S: Tensor

    def loss(
        self,
        num_sequences: int,
        *,
        ratio_unit: RatioUnit = "sequence",
        eps_low: float = EPS_LOW,
        eps_high: float = EPS_HIGH,
        clip_range_growth: float = 0.0,
        noise: float = 0.0,
        scale: float = 1.0,
        log_ratio_clamp: float = 10.0,
        gspo: Gspo = GSPO,
    ) -> LossOutput:
        clip_range = gspo.staleness.clip_range(
            self.lag_S,
            eps_low=eps_low,
            eps_high=eps_high,
            clip_range_growth=clip_range_growth,
            noise_z=1.0,
            sigma=noise,
            scale=scale,
        )
        output: LossOutput = gspo.loss.gspo_loss(
            self.logprobs_T,
            self.anchor_T,
            self.advantages_T,
            self.mask_T,
            self.sequence_ids_T,
            self.turn_ids_T,
            num_sequences=num_sequences,
            clip_range=clip_range,
            ratio_unit=ratio_unit,
            mismatch_weights_S=self.weights_S,
            log_ratio_clamp=log_ratio_clamp,
        )
        return output

    def gradient(self, output: LossOutput) -> Tensor:
        assert output.loss.requires_grad, "the loss has no graph"
        (gradient_T,) = torch.autograd.grad(output.loss, self.logprobs_T)
        return gradient_T


def one_sequence(
    delta: Sequence[float],
    advantage: float | Sequence[float],
    *,
    turns: Sequence[int] | None = None,
    lag: float = 0.0,
    weight: float = 1.0,
    anchor: float = 0.0,
) -> ReferenceSequence:
    """Return a sequence of action tokens only, ``delta`` above its anchor (0 keeps the deltas exact in float32)."""
    advantages = [advantage] * len(delta) if isinstance(advantage, float | int) else list(advantage)
    return ReferenceSequence(
        logprobs=[anchor + d for d in delta],
        anchor_logprobs=[anchor] * len(delta),
        advantages=advantages,
        mask=[True] * len(delta),
        turns=[0] * len(delta) if turns is None else turns,
        lag=lag,
        weight=weight,
    )


def random_sequence(
    generator: torch.Generator,
    mask: Sequence[bool],
    *,
    scale: float = 1e-3,
    lag: float = 0.0,
    weight: float = 1.0,
    per_token_advantages: bool = True,
    dtype: torch.dtype = torch.float32,
) -> ReferenceSequence:
    """Draw log-probs around -1.5, deltas of deviation ``scale`` per token and a common drift, turns of about 4 tokens."""
    length = len(mask)
    anchor = -3 * torch.rand(length, generator=generator, dtype=dtype)
    drift = scale * torch.randn(1, generator=generator, dtype=dtype)
    logprobs = anchor + drift + scale * torch.randn(length, generator=generator, dtype=dtype)
    advantages = torch.randn(length if per_token_advantages else 1, generator=generator, dtype=dtype).expand(length)
    turns = (torch.rand(length, generator=generator) < 0.25).long().cumsum(0)
    return ReferenceSequence(
        logprobs=logprobs.tolist(),
        anchor_logprobs=anchor.tolist(),
        advantages=advantages.tolist(),
        mask=mask,
        turns=turns.tolist(),
        lag=lag,
        weight=weight,
    )


def pack(sequences: Sequence[ReferenceSequence], dtype: torch.dtype = torch.float32) -> Flat:
    """Lay sequences end to end."""
    return _flat(sequences, [len(sequence.mask) for sequence in sequences], dtype)


def pad(sequences: Sequence[ReferenceSequence], dtype: torch.dtype = torch.float32) -> Flat:
    """Reshape a padded [S, L] layout; the padding holds NaN and impossible ids, which must not matter."""
    longest = max(len(sequence.mask) for sequence in sequences) + 3
    return _flat(sequences, [longest] * len(sequences), dtype)


def _flat(sequences: Sequence[ReferenceSequence], lengths: Sequence[int], dtype: torch.dtype) -> Flat:
    def column(rows: Sequence[Sequence[float]], fill: float) -> list[float]:
        return [x for row, length in zip(rows, lengths, strict=True) for x in [*row, *[fill] * (length - len(row))]]

    nan = float("nan")
    ids = [[i] * len(sequence.mask) for i, sequence in enumerate(sequences)]
    logprobs_T = torch.tensor(column([s.logprobs for s in sequences], nan), dtype=dtype)
    return Flat(
        logprobs_T=logprobs_T.requires_grad_(),
        anchor_T=torch.tensor(column([s.anchor_logprobs for s in sequences], nan), dtype=dtype),
        advantages_T=torch.tensor(column([s.advantages for s in sequences], nan), dtype=dtype),
        mask_T=torch.tensor(column([s.mask for s in sequences], False), dtype=torch.bool),
        sequence_ids_T=torch.tensor(column(ids, -7), dtype=torch.int64),
        turn_ids_T=torch.tensor(column([s.turns for s in sequences], -1), dtype=torch.int64),
        lag_S=torch.tensor([s.lag for s in sequences], dtype=dtype),
        weights_S=torch.tensor([s.weight for s in sequences], dtype=dtype),
    )


@dataclass(frozen=True)
class Step:
    """The sequences of one optimizer step and the arguments of the loss; N exceeds their number by ``spare``."""

    sequences: list[ReferenceSequence]
    """Their anchors are the engine's log-probs."""
    proximal: list[list[float]]
    versions: list[list[int]]
    """One per token; the values at observation tokens must not matter."""
    policy_version: int
    groups: list[int]
    rewards: list[float]
    clip_range_growth: float
    noise: float
    scale: float
    spare: int

    @property
    def num_sequences(self) -> int:
        return len(self.sequences) + self.spare

    def with_sequences(self, sequences: list[ReferenceSequence]) -> Step:
        return replace(self, sequences=sequences)

    def loss(self, flat: Flat, ratio_unit: RatioUnit, gspo: Gspo, **changed: float) -> LossOutput:
        """Return the loss of some of the step's sequences."""
        arguments = {"clip_range_growth": self.clip_range_growth, "noise": self.noise, "scale": self.scale, **changed}
        return flat.loss(self.num_sequences, ratio_unit=ratio_unit, gspo=gspo, **arguments)

    def reference(self, ratio_unit: RatioUnit, **changed: float) -> ReferenceResult:
        arguments = {
            "eps_low": EPS_LOW,
            "eps_high": EPS_HIGH,
            "clip_range_growth": self.clip_range_growth,
            "noise": self.noise,
        }
        arguments |= {"scale": self.scale, **changed}
        return reference_loss(self.sequences, num_sequences=self.num_sequences, ratio_unit=ratio_unit, **arguments)

    def with_paper_advantages(self) -> Step:
        """Give every token of a sequence the advantage of its first action token."""
        return self.with_sequences(
            [
                replace(s, advantages=[s.advantages[s.mask.index(True)] if any(s.mask) else 0.0] * len(s.mask), weight=1.0)
                for s in self.sequences
            ]
        )

    def stretched(self, factor: float) -> Step:
        """Make the log-ratios ``factor`` times as large."""
        return self.with_sequences(
            [
                replace(
                    s,
                    logprobs=[a + factor * (p - a) for p, a in zip(s.logprobs, s.anchor_logprobs, strict=True)],
                )
                for s in self.sequences
            ]
        )


def random_step(choices: Random) -> Step:
    """Return a step of any structure; ``choices`` may come from hypothesis, and it draws the seed of the numbers."""
    numbers = Random(choices.randrange(2**31))
    policy_version = choices.choice([0, 3, 2**40])
    sequences, proximal, versions = [], [], []
    for _ in range(choices.randint(1, 6)):
        length = choices.randint(0, 12)
        kinds = [choices.choice(["observation", "action", "action", "turn"]) for _ in range(length)]
        mask = [kind != "observation" for kind in kinds]
        turns = [sum(kind == "turn" for kind in kinds[: t + 1]) for t in range(length)]
        oldest = choices.randint(0, min(policy_version, 4))
        versions.append(
            [policy_version - choices.randint(0, oldest) if action else choices.choice([-1, 2**41]) for action in mask]
        )
        lags = [policy_version - v for v, action in zip(versions[-1], mask, strict=True) if action]
        credit = choices.choice(["token", "turn", "sequence", "zero"])
        by_turn = [numbers.gauss(0, 1) for _ in range(length + 1)]
        advantages = {
            "token": [numbers.gauss(0, 1) for _ in range(length)],
            "turn": [by_turn[turn] for turn in turns],
            "sequence": [by_turn[0]] * length,
            "zero": [0.0] * length,
        }
        anchor = [-3 * numbers.random() for _ in range(length)]
        drift = numbers.gauss(0, 1e-3)
        away = numbers.gauss(0, 0.08)
        proximal.append(_in_float32([a + away + numbers.gauss(0, 1e-3) for a in anchor]))
        sequences.append(
            ReferenceSequence(
                logprobs=_in_float32([a + drift + numbers.gauss(0, 1e-3) for a in anchor]),
                anchor_logprobs=_in_float32(anchor),
                advantages=_in_float32(advantages[credit]),
                mask=mask,
                turns=turns,
                lag=sum(lags) / max(len(lags), 1),
                weight=choices.choice([0.0, 0.75, 1.0, 1.0625]),
            )
        )
    return Step(
        sequences=sequences,
        proximal=proximal,
        versions=versions,
        policy_version=policy_version,
        groups=[choices.randint(0, 2) for _ in sequences],
        rewards=[choices.choice([0.0, 0.1, 0.1, 1.0]) for _ in sequences],
        clip_range_growth=choices.choice([0.0, 1.5, -0.75]),
        noise=choices.choice([0.0, 1e-3]),
        scale=choices.choice([1.0, 0.5, 3.0]),
        spare=choices.randint(0, 3),
    )


def _in_float32(values: Sequence[float]) -> list[float]:
    """Round to values that both dtypes hold exactly, so that only the arithmetic differs."""
    rounded: list[float] = torch.tensor(values, dtype=torch.float32).tolist()
    return rounded


def distance_to_a_bound(step: Step) -> float:
    """Return the smallest distance, in nats, of any unit's log-ratio from its bounds: float32 decisions need some."""
    smallest = math.inf
    for sequence in step.sequences:
        growth = (1 + abs(step.clip_range_growth) * sequence.lag) ** (1 if step.clip_range_growth >= 0 else -1)
        actions = [t for t, action in enumerate(sequence.mask) if action]
        turns = {sequence.turns[t] for t in actions}
        units = [actions, *([t] for t in actions), *([t for t in actions if sequence.turns[t] == k] for k in turns)]
        for unit in units if actions else ():
            mean = math.fsum(sequence.logprobs[t] - sequence.anchor_logprobs[t] for t in unit) / len(unit)
            for log_eps in (math.log(1 - EPS_LOW), math.log(1 + EPS_HIGH)):
                bound = step.scale * growth * log_eps + math.copysign(step.noise / math.sqrt(len(unit)), log_eps)
                smallest = min(smallest, abs(mean - bound))
    return smallest
