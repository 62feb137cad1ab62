"""A teacher's log-ratio as the advantage of each token, against GSPO-token written anew in plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import gspo
from gspo.inputs.validation import trusted_values
from gspo.options.distillation import teacher_kl
from gspo.settings import Objective

EPS = 0.01
CLAMP = 2.0
COEFFICIENT = 0.7


@dataclass
class Turns:
    """One sequence: a prompt, and turns of the policy with observations between them. NaN off the actions."""

    policy: list[float]
    engine: list[float]
    teacher: list[float]
    turns: list[int]
    """-1 off the actions."""
    advantage: float

    @property
    def actions(self) -> list[int]:
        return [t for t, turn in enumerate(self.turns) if turn >= 0]

    def distilled(self, t: int, *, only: bool) -> float:
        log_ratio = max(-CLAMP, min(CLAMP, self.teacher[t] - self.engine[t]))
        return COEFFICIENT * log_ratio + (0.0 if only else self.advantage)


def random_turns(random: Random) -> Turns:
    turns = [-1] * random.randint(1, 3)
    for turn in range(random.randint(1, 3)):
        turns += [turn] * random.randint(1, 4) + [-1] * random.randint(0, 2)
    drift = random.gauss(0, 2 * EPS)
    engine = [-3 * random.random() if turn >= 0 else math.nan for turn in turns]
    return Turns(
        policy=[mu + drift + random.gauss(0, EPS) for mu in engine],
        engine=engine,
        teacher=[mu + random.gauss(0, 1.5) for mu in engine],
        turns=turns,
        advantage=random.gauss(0, 1),
    )


def oracle(sequences: list[Turns], unit: str, *, only: bool) -> tuple[float, list[list[float]], set[tuple[int, bool]]]:
    """-J, its gradient by each log-prob of the policy, and which sequences have clipped tokens and which have free ones."""
    terms, gradients, kinds = [], [], set()
    for i, y in enumerate(sequences):
        gradient = [0.0] * len(y.turns)
        for t in y.actions:
            together = [u for u in y.actions if unit == "sequence" or y.turns[u] == y.turns[t]]
            s = math.exp(math.fsum(y.policy[u] - y.engine[u] for u in together) / len(together))
            A = y.distilled(t, only=only)
            share = 1 / len(sequences) / len(y.actions)
            is_clipped = s > 1 + EPS if A > 0 else s < 1 - EPS
            terms.append(share * A * ((1 + EPS if A > 0 else 1 - EPS) if is_clipped else s))
            gradient[t] = 0.0 if is_clipped else -share * A * s
            kinds.add((i, is_clipped))
        gradients.append(gradient)
    return -math.fsum(terms), gradients, kinds


def flat(sequences: list[Turns], name: str, length: int = 0, fill: float = math.nan) -> Tensor:
    rows = [getattr(y, name) + [fill] * (length - len(y.turns) if length else 0) for y in sequences]
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("unit", ["sequence", "turn"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_tokens_of_one_clipped_sequence_are_weighed_apart(layout: str, unit: Any, only: bool) -> None:
    """To 1e-12, the gradient too. One ratio clips those that it would move further, and leaves the others free."""
    both_kinds = 0
    for seed in range(20):
        random = Random(seed)
        sequences = [random_turns(random) for _ in range(4)]
        length = max(len(y.turns) for y in sequences) if layout == "padded" else 0
        loss, gradients, kinds = oracle(sequences, unit, only=only)
        both_kinds += sum((i, True) in kinds and (i, False) in kinds for i in range(4))
        turns_T = flat(sequences, "turns", length, fill=-1).long()
        rows = (4, length) if length else (-1,)
        policy, engine, teacher, turns = (
            x.reshape(rows) for x in (*(flat(sequences, name, length) for name in ("policy", "engine", "teacher")), turns_T)
        )
        policy, mask = policy.requires_grad_(), turns >= 0
        of_rewards_T = [0.0 if only else y.advantage for y in sequences for _ in range(length or len(y.turns))]
        advantages = torch.tensor(of_rewards_T, dtype=torch.float64).reshape(rows)
        advantages = advantages + COEFFICIENT * gspo.teacher_advantages(teacher, engine, mask, clamp=CLAMP)
        objective = Objective(ratio_unit=unit, eps_low=EPS, eps_high=EPS, clip_calibration="off", noise_z=0.0)
        arguments: Any = {"num_sequences": 4, "lag_S": torch.zeros(4, dtype=torch.float64)}
        if length:
            output = gspo.padded_loss(objective, policy, engine, advantages, mask, turns, **arguments)
        else:
            ids_T = torch.tensor([i for i, y in enumerate(sequences) for _ in y.turns])
            output = gspo.objective_loss(objective, policy, engine, advantages, mask, ids_T, turns, **arguments)
        (found,) = torch.autograd.grad(output.loss, policy)
        expected = flat([Turns(g, g, g, y.turns, 0) for g, y in zip(gradients, sequences, strict=True)], "policy", length, 0)
        assert output.loss.item() == pytest.approx(loss, abs=1e-12)
        torch.testing.assert_close(found.flatten(), expected, rtol=0, atol=1e-12)
    assert both_kinds > 10


def test_the_distance_from_the_teacher_is_the_mean_over_a_sequences_actions_without_the_clamp() -> None:
    sequences = [random_turns(Random(seed)) for seed in range(3)]
    turns_T = flat(sequences, "turns").long()
    ids_T = torch.tensor([i for i, y in enumerate(sequences) for _ in y.turns])
    found_S = teacher_kl(flat(sequences, "teacher"), flat(sequences, "engine"), turns_T >= 0, ids_T, 3)
    expected = [math.fsum(y.engine[t] - y.teacher[t] for t in y.actions) / len(y.actions) for y in sequences]
    assert found_S.tolist() == pytest.approx(expected, abs=1e-12)


def test_on_average_the_advantage_lowers_the_reverse_kl() -> None:
    """The gradient of the exact KL(pi || teacher), by logits, is minus the mean of A_t grad log pi(y_t) over y_t from pi."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher_V = (torch.randn(5, dtype=torch.float64, generator=generator) for _ in range(2))
    teacher_V = teacher_V.log_softmax(0)
    logits.requires_grad_()
    policy_V = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((policy_V.exp() * (policy_V - teacher_V)).sum(), logits, retain_graph=True)
    A_V = gspo.teacher_advantages(teacher_V, policy_V, torch.ones(5, dtype=torch.bool))
    (found,) = torch.autograd.grad(-(policy_V.detach().exp() * A_V * policy_V).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_what_a_teacher_cannot_mean_is_refused_with_its_place() -> None:
    mask, sound = torch.tensor([False, True, True]), torch.tensor([math.nan, -1.0, -2.0])
    broken = torch.tensor([0.0, -1.0, -math.inf])
    with pytest.raises(ValueError, match=r"^teacher_logprobs\[2\] is -inf; give finite numbers"):
        gspo.teacher_advantages(broken, sound, mask)
    with pytest.raises(ValueError, match=r"^teacher_logprobs has shape \(2,\), mask \(3,\); give one value per token"):
        gspo.teacher_advantages(broken[1:], sound, mask)
    with pytest.raises(ValueError, match=r"^teacher_logprobs is torch.bfloat16"):
        gspo.teacher_advantages(sound.bfloat16(), sound, mask)
    with trusted_values():
        assert gspo.teacher_advantages(broken, sound, mask).isnan().tolist() == [False, False, True]
