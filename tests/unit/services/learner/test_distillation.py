"""A teacher in the training of a batch: what it adds to each token's advantage, what is measured, and what it is for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gspo.model.packing import TrainGroup, TrainSequence
from gspo_services.learner.advantages import AdvantageSettings, sequences_with_advantages
from gspo_services.learner.engine.gradients import NonFiniteLossError
from gspo_services.learner.start import engine_settings_of
from gspo_services.shared.settings.sections import Settings
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.trained import WIDE, own_logprobs, train
from tests.support.loss.sequences import random_groups

MIXED = AdvantageSettings(teacher_coefficient=0.7)


def logprobs_of(table: Tensor, sequence: TrainSequence) -> Tensor:
    return torch.log_softmax(table, -1)[sequence.token_ids[:-1], sequence.token_ids[1:]][sequence.action_mask[1:]]


@pytest.mark.parametrize("max_tokens_per_micro_batch", [50, 10_000])
@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("filters", [False, True])
def test_each_token_of_an_on_policy_step_counts_as_reward_and_teacher_say(
    only: bool, max_tokens_per_micro_batch: int, filters: bool
) -> None:
    """But for what the overlong filter takes out: there the teacher's judgement does not count either."""
    groups = own_logprobs(BigramEngine(), random_groups(3, 4, seed=1))
    engine = BigramEngine(max_tokens_per_micro_batch=max_tokens_per_micro_batch)
    table = engine.table.detach().clone().requires_grad_()
    lengths = sorted({sequence.num_tokens for group in groups for sequence in group.sequences})
    limit = lengths[len(lengths) // 2] if filters else None
    sequences, _ = sequences_with_advantages(groups, AdvantageSettings(max_tokens=lengths[-1], overlong_filter_tokens=limit))
    loss, kls = torch.zeros(()), []
    for sequence in sequences:
        assert sequence.advantages is not None
        own, teacher = logprobs_of(table, sequence), logprobs_of(engine.teacher_table, sequence)
        d = teacher - own.detach()
        kls.append(-d.mean().item())
        if limit is not None and sequence.num_tokens >= limit:
            continue
        of_rewards = torch.from_numpy(sequence.advantages[sequence.action_mask])
        loss = loss - (own * (0.7 * d if only else of_rewards + 0.7 * d)).mean() / len(sequences)
    (expected,) = torch.autograd.grad(loss, table)
    chosen = replace(MIXED, teacher_only=only, max_tokens=lengths[-1], overlong_filter_tokens=limit)
    report = train(engine, groups, advantages=chosen)
    torch.testing.assert_close(engine.gradients[0], expected, rtol=1e-4, atol=1e-6)
    assert report.metrics["teacher_kl/all"] == pytest.approx(np.mean(kls), rel=1e-4)
    assert "teacher_kl/all" not in train(BigramEngine(), groups).metrics


def test_groups_with_equal_rewards_have_a_signal_and_no_token_counts_more_than_the_clamp() -> None:
    groups = [replace(g, rewards=np.ones(4)) for g in own_logprobs(BigramEngine(), random_groups(2, 4, seed=1))]
    alone, bounded = BigramEngine(), BigramEngine()
    metrics = train(alone, groups, advantages=MIXED).metrics
    assert metrics["signal_sequences/all"] == 8
    train(bounded, groups, replace(WIDE, log_ratio_clamp=1e-3), advantages=MIXED)
    assert 0 < bounded.gradients[0].abs().max() < 1e-2 * alone.gradients[0].abs().max()


def test_a_teacher_that_answers_nothing_finite_stops_the_step_by_name() -> None:
    groups = own_logprobs(BigramEngine(), random_groups(2, 3, seed=1))
    engine = BigramEngine()
    before = engine.table.detach().clone()
    engine.teacher_table[:] = torch.nan
    number = sum(sequence.num_action_tokens for group in groups for sequence in group.sequences)
    with pytest.raises(NonFiniteLossError, match=f"teacher's log-probs of {number} action tokens .* no step was made"):
        train(engine, groups, advantages=MIXED)
    assert torch.equal(engine.table, before)
    engine = BigramEngine()
    with torch.no_grad():
        engine.table[:] = torch.nan
    with pytest.raises(NonFiniteLossError, match=r"^the loss over all ranks"):
        train(engine, groups, advantages=MIXED)


def sampled(engine: BigramEngine, random: np.random.Generator) -> list[TrainGroup]:
    """Four groups of eight answers from the engine's own policy; an even last token is worth 1."""
    logp = torch.log_softmax(engine.table.detach(), -1).numpy()
    edges = np.exp(logp).cumsum(-1)
    ids = np.repeat(random.integers(0, 16, 4), 8)[:, None]
    while ids.shape[1] < 7:
        drawn = (edges[ids[:, -1]] < random.random(32)[:, None]).sum(-1).clip(max=15)
        ids = np.concatenate([ids, drawn[:, None]], axis=1)
    mask = np.arange(7) > 0
    members = [
        TrainSequence(
            token_ids=row, action_mask=mask, behaviour_logprobs=np.append(np.float32(0), logp[row[:-1], row[1:]]),
            versions=np.where(mask, 0, -1), turn_ids=np.where(mask, 0, -1).astype(np.int32), temperature=1.0,
        )
        for row in ids
    ]  # fmt: skip
    rewards = (ids[:, -1] % 2 == 0).astype(float)
    return [
        TrainGroup(group_id=str(index), sequences=tuple(members[index : index + 8]), rewards=rewards[index : index + 8])
        for index in range(0, 32, 8)
    ]


def test_the_distance_from_the_teacher_falls_where_the_reward_alone_leaves_it() -> None:
    """Of the exact KL(pi || teacher), over all contexts; and what a batch measures of it falls along with it."""
    left, measured = {}, []
    for name, settings in {"reward": AdvantageSettings(), "both": MIXED, "only": replace(MIXED, teacher_only=True)}.items():
        engine, random = BigramEngine(learning_rate=40.0, max_tokens_per_micro_batch=1000), np.random.default_rng(0)
        distances = []
        for _ in range(12):
            policy, teacher = (torch.log_softmax(t.detach(), -1) for t in (engine.table, engine.teacher_table))
            distances.append(float((policy.exp() * (policy - teacher)).sum(-1).mean()))
            metrics = train(engine, sampled(engine, random), advantages=settings).metrics
            if name == "only":
                measured.append(metrics["teacher_kl/all"])
        left[name] = distances[-1] / distances[0]
    assert left["reward"] > 1 > 0.5 > left["both"] > left["only"]
    assert measured[-1] < 0.3 * measured[0]


def test_the_engine_of_a_run_has_its_teacher() -> None:
    assert engine_settings_of(Settings(), "cpu").teacher is None
    given = Settings.model_validate({"distillation": {"teacher": "/models/large", "coefficient": 0.5, "only": True}})
    assert engine_settings_of(given, "cpu").teacher == Path("/models/large")
    chosen = AdvantageSettings.of(given)
    assert (chosen.teacher_coefficient, chosen.teacher_only) == (0.5, True)
    assert AdvantageSettings.of(Settings()).teacher_coefficient == 0
