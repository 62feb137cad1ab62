"""The options of the objective in a batch: what the trainer adds to the loss does not depend on how a step is split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch, TrainGroup
from gspo.options.ess_rate import ess_rate_scale
from gspo.settings import Objective, Surrogate
from gspo_services.learner import plan
from gspo_services.learner.advantages import AdvantageSettings, sequences_with_advantages
from gspo_services.learner.engine.gradients import NonFiniteLossError
from gspo_services.learner.plan import deal_groups
from gspo_services.learner.start import engine_settings_of
from gspo_services.shared.settings.sections import Settings
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.trained import WIDE, own_logprobs, train
from tests.support.loss.sequences import random_groups


@pytest.mark.parametrize(
    "options",
    [{"aggregation": "token"}, {"aggregation": "constant", "aggregation_tokens": 12}],
    ids=lambda x: x["aggregation"],
)
def test_an_on_policy_step_weighs_tokens_as_its_aggregation_says_whatever_the_size_of_micro_batches(
    options: dict[str, Any],
) -> None:
    objective: Objective = replace(WIDE, **options)
    groups = own_logprobs(BigramEngine(), random_groups(3, 4, seed=1))
    table = BigramEngine().table.detach().clone().requires_grad_()
    sequences, _ = sequences_with_advantages(groups, AdvantageSettings())
    num_tokens = sum(sequence.num_action_tokens for sequence in sequences)
    divisor = num_tokens if objective.aggregation == "token" else 12 * len(sequences)
    loss = torch.zeros(())
    for sequence in sequences:
        assert sequence.advantages is not None
        logprobs = torch.log_softmax(table, -1)[sequence.token_ids[:-1], sequence.token_ids[1:]]
        loss = loss - (logprobs * torch.from_numpy(sequence.advantages[1:])).sum() / divisor
    (expected,) = torch.autograd.grad(loss, table)
    for max_tokens_per_micro_batch in (50, 10_000):
        engine = BigramEngine(max_tokens_per_micro_batch=max_tokens_per_micro_batch)
        train(engine, groups, objective)
        torch.testing.assert_close(engine.gradients[0], expected, rtol=1e-4, atol=1e-6)


def half_still(groups: list[TrainGroup]) -> list[TrainGroup]:
    """Every second group has equal rewards."""
    return [replace(each, rewards=np.full(len(each.rewards), 0.3)) if at % 2 else each for at, each in enumerate(groups)]


FORMS: list[dict[str, Any]] = [
    {}, {"anchor": "proximal", "tis_mode": "truncate_tokens"}, {"aggregation": "token"}, {"dual_clip": 3.0},
    {"kl_coefficient": 0.1, "kl_in": "loss"}, {"kl_coefficient": 0.1, "kl_in": "reward"}, {"entropy_coefficient": 0.1},
    *({"surrogate": name, "ratio_unit": "token", "eps_low": 0.2, "eps_high": 0.27} for name in get_args(Surrogate)[1:]
      if name in ("gmpo", "m2po_clip")),
    *({"surrogate": name, "ratio_unit": "token"} for name in get_args(Surrogate)[1:] if name not in ("gmpo", "m2po_clip")),
]  # fmt: skip


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_what_has_no_gradient_gets_no_backward_pass_and_nothing_else_changes(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = Objective(**options)
    pulls = objective.surrogate == "m2po" or bool({"kl_coefficient", "entropy_coefficient"} & options.keys())
    found = []
    for least in (plan.LEAST_STILL_SHARE, 2.0):
        monkeypatch.setattr(plan, "LEAST_STILL_SHARE", least)
        engine = BigramEngine(max_tokens_per_micro_batch=50, entropy_gradient="entropy_coefficient" in options)
        groups = half_still(own_logprobs(BigramEngine(), random_groups(6, 4, seed=1), noise=0.05))
        found.append((train(engine, groups, objective, num_mini_batches=2).metrics, engine.gradients))
    (separate, own), (together, expected) = found
    still = sum(sequence.num_tokens for group in groups[1::2] for sequence in group.sequences)
    assert (separate.pop("forward_only_tokens"), together.pop("forward_only_tokens")) == (0.0 if pulls else still, 0.0)
    assert separate == pytest.approx(together, rel=1e-5, abs=1e-7, nan_ok=True)
    for ours, theirs in zip(own, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def kl_of(engine: BigramEngine, groups: list[TrainGroup]) -> Tensor:
    """k3 of every action token, laid end to end, with the gradient of the engine's present table."""
    logprobs, of_start = (
        torch.cat(
            [
                torch.log_softmax(table, -1)[member.token_ids[:-1], member.token_ids[1:]][member.action_mask[1:]]
                for group in groups
                for member in group.sequences
            ]
        )
        for table in (engine.table, BigramEngine().table.detach())
    )
    return torch.expm1(of_start - logprobs) - (of_start - logprobs)


def moved_engine(**settings: Any) -> BigramEngine:
    """An engine whose table is no longer its start table."""
    engine = BigramEngine(**settings)
    with torch.no_grad():
        engine.table += torch.randn(engine.table.shape, generator=torch.Generator().manual_seed(7))
    return engine


@pytest.mark.parametrize("max_tokens_per_micro_batch", [50, 10_000])
def test_a_kl_in_the_loss_pulls_towards_the_start_weights(max_tokens_per_micro_batch: int) -> None:
    objective = replace(WIDE, kl_coefficient=0.5, aggregation="token")
    groups = own_logprobs(moved_engine(), random_groups(3, 4, seed=1))
    engine, without = (
        moved_engine(max_tokens_per_micro_batch=max_tokens_per_micro_batch),
        moved_engine(max_tokens_per_micro_batch=max_tokens_per_micro_batch),
    )
    kl_T = kl_of(engine, groups)
    (expected,) = torch.autograd.grad(0.5 * kl_T.mean(), engine.table)
    report = train(engine, groups, objective)
    train(without, groups, replace(objective, kl_coefficient=0.0))
    torch.testing.assert_close(engine.gradients[0] - without.gradients[0], expected, rtol=1e-3, atol=1e-6)
    lengths = [member.num_action_tokens for group in groups for member in group.sequences]
    by_sequence = torch.stack([part.mean() for part in kl_T.detach().split(lengths)])
    assert report.metrics["reference_kl/all"] == pytest.approx(by_sequence.mean().item(), rel=1e-4)


@pytest.mark.parametrize("max_tokens_per_micro_batch", [50, 10_000])
def test_a_kl_in_the_reward_is_taken_from_it_before_the_advantages(max_tokens_per_micro_batch: int) -> None:
    """The step is that of rewards which were lower from the start; the metrics keep the rewards as they came."""
    groups = own_logprobs(moved_engine(), random_groups(3, 4, seed=1))
    objective = replace(WIDE, kl_coefficient=0.5, kl_in="reward")
    engine, by_hand = (
        moved_engine(max_tokens_per_micro_batch=max_tokens_per_micro_batch),
        moved_engine(max_tokens_per_micro_batch=max_tokens_per_micro_batch),
    )
    lengths = [member.num_action_tokens for group in groups for member in group.sequences]
    sums = [part.sum().item() for part in kl_of(engine, groups).detach().split(lengths)]
    lower = [
        replace(group, rewards=group.rewards - 0.5 * np.array(sums[4 * index : 4 * index + 4]))
        for index, group in enumerate(groups)
    ]
    report = train(engine, groups, objective)
    train(by_hand, lower)
    torch.testing.assert_close(engine.gradients[0], by_hand.gradients[0], rtol=1e-4, atol=1e-6)
    assert report.metrics["kl_penalty"] == pytest.approx(0.5 * sum(sums) / len(sums), rel=1e-4)
    assert report.metrics["reward_mean"] == pytest.approx(np.concatenate([group.rewards for group in groups]).mean())


def test_a_reference_that_is_not_finite_stops_the_step_before_it_is_made() -> None:
    groups = own_logprobs(BigramEngine(), random_groups(2, 3, seed=1))
    engine = BigramEngine()
    with torch.no_grad():
        engine._start_table[:] = torch.nan
    with pytest.raises(NonFiniteLossError, match="or of the reference are not finite; no step was made"):
        train(engine, groups, replace(WIDE, kl_coefficient=0.5, kl_in="reward"))
    assert engine.gradients == []


@pytest.mark.parametrize("max_tokens_per_micro_batch", [50, 10_000])
def test_an_entropy_bonus_adds_the_gradient_of_the_entropy(max_tokens_per_micro_batch: int) -> None:
    objective = replace(WIDE, entropy_coefficient=0.2, aggregation="token")
    groups = own_logprobs(BigramEngine(), random_groups(3, 4, seed=1))
    engine = BigramEngine(max_tokens_per_micro_batch=max_tokens_per_micro_batch, entropy_gradient=True)
    without = BigramEngine(max_tokens_per_micro_batch=max_tokens_per_micro_batch)
    members = [member for group in groups for member in group.sequences]
    contexts = torch.cat([torch.from_numpy(m.token_ids[:-1][m.action_mask[1:]]) for m in members])
    logp = torch.log_softmax(engine.table[contexts], -1)
    (expected,) = torch.autograd.grad(0.2 * (logp.exp() * logp).sum(-1).mean(), engine.table)
    train(engine, groups, objective)
    train(without, groups, replace(objective, entropy_coefficient=0.0))
    torch.testing.assert_close(engine.gradients[0] - without.gradients[0], expected, rtol=1e-3, atol=1e-6)


def test_an_entropy_bonus_without_a_gradient_is_refused() -> None:
    groups = random_groups(2, 3, seed=1)
    with pytest.raises(ValueError, match=r"^entropy_T carries no gradient .* so the bonus would do nothing"):
        train(BigramEngine(), groups, replace(WIDE, entropy_coefficient=0.2))


class BalancingRank(BigramEngine):
    """One of two ranks, with a balance loss of 1 in each of its micro-batches."""

    balances_load = True
    world_size = 2

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def _forward(self, packed: PackedBatch, with_entropy: bool) -> TokenLogProbs:
        return super()._forward(packed, with_entropy)._replace(balance_loss=torch.ones(()))


def test_the_balance_losses_of_all_ranks_micro_batches_are_a_mean_over_the_steps_tokens() -> None:
    """A loss of 1 everywhere is 1 for the step, however its tokens are spread over ranks."""
    groups = own_logprobs(BigramEngine(), random_groups(5, 4, seed=5))
    plain = BigramEngine()
    shares = [train(BalancingRank(rank), groups).metrics["load_balancing_loss"] for rank in (0, 1)]
    assert sum(shares) == pytest.approx(1)
    assert min(shares) > 0.2
    assert "load_balancing_loss" not in train(plain, groups).metrics


def test_the_engine_of_a_run_has_what_its_objective_needs() -> None:
    plain = engine_settings_of(Settings(), "cpu")
    assert (plain.keeps_reference, plain.entropy_gradient, plain.load_balance_coefficient) == (False, False, 0.0)
    assert plain.expert_bias_rate == 0.0
    penalties = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01, "load_balance_coefficient": 0.001}
    objective = penalties | {"expert_bias_rate": 0.002}
    every = engine_settings_of(Settings.model_validate({"objective": objective}), "cpu")
    assert (every.keeps_reference, every.entropy_gradient, every.load_balance_coefficient) == (True, True, 0.001)
    assert every.expert_bias_rate == 0.002


@pytest.mark.parametrize("max_tokens_per_micro_batch", [50, 10_000])
def test_the_learning_rate_falls_with_the_root_of_the_effective_sample_size(max_tokens_per_micro_batch: int) -> None:
    """Of the products of each sequence's ratios, over all sequences of the step, however it is packed."""
    groups = own_logprobs(BigramEngine(), random_groups(3, 4, seed=1), noise=0.2)
    log_weights = []
    for member in (member for group in groups for member in group.sequences):
        logprobs = torch.log_softmax(BigramEngine().table.detach(), -1)[member.token_ids[:-1], member.token_ids[1:]]
        moved = logprobs.numpy() - member.behaviour_logprobs[1:]
        log_weights.append(moved[member.action_mask[1:]].sum())
    w = np.exp(log_weights)
    rho = w.sum() ** 2 / len(w) / (w**2).sum()
    plain, scaled = (BigramEngine(max_tokens_per_micro_batch=max_tokens_per_micro_batch) for _ in range(2))
    start = plain.table.detach().clone()
    assert "learning_rate_scale" not in train(plain, groups).metrics
    metrics = train(scaled, groups, replace(WIDE, learning_rate_by_ess=True)).metrics
    assert 0.2 < rho < 0.9
    assert metrics["learning_rate_scale"] == pytest.approx(rho**0.5, rel=1e-4)
    assert metrics["learning_rate"] == pytest.approx(0.1 * rho**0.5, rel=1e-4)
    torch.testing.assert_close(scaled.table - start, (plain.table - start) * rho**0.5, rtol=1e-3, atol=1e-6)


def test_the_effective_sample_size_of_long_sequences_is_finite() -> None:
    """The sum of a long sequence's log-ratios has no exponential in float64, and rho needs none."""
    assert ess_rate_scale(torch.tensor([900.0, 900.0, 0.0])) == pytest.approx((2 / 3) ** 0.5)
    assert ess_rate_scale(torch.tensor([-5000.0, -5000.0])) == ess_rate_scale(torch.zeros(0)) == 1.0


def test_each_step_has_the_effective_sample_size_of_its_own_sequences() -> None:
    groups = own_logprobs(BigramEngine(), random_groups(4, 3, seed=2), noise=0.2)
    scaled = replace(WIDE, learning_rate_by_ess=True)
    # So slow that the second step sees the weights of the first.
    dealt = [[groups[index] for index in chosen] for chosen in deal_groups(groups, 0, 2)]
    halves = [train(BigramEngine(learning_rate=1e-12), half, scaled).metrics for half in dealt]
    whole = train(BigramEngine(learning_rate=1e-12), groups, scaled, num_mini_batches=2).metrics
    first, second = (half["learning_rate_scale"] for half in halves)
    assert abs(first - second) > 0.01
    assert whole["learning_rate_scale"] == pytest.approx((first + second) / 2, rel=1e-5)
    assert whole["learning_rate"] == pytest.approx(1e-12 * second, rel=1e-5)


@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
def test_the_effective_sample_size_sees_what_the_steps_of_the_batch_moved(anchor: Literal["behaviour", "proximal"]) -> None:
    """The ratios are to the sampler's policy: what the batch's start differs by, and what its steps add."""
    groups = own_logprobs(BigramEngine(), random_groups(4, 3, seed=2), noise=0.2)
    by_ess = replace(WIDE, learning_rate_by_ess=True, anchor=anchor)
    first, second = [[groups[index] for index in chosen] for chosen in deal_groups(groups, 0, 2)]
    moved, still = BigramEngine(learning_rate=3.0), BigramEngine(learning_rate=1e-12)
    scale = train(moved, first, by_ess).metrics["learning_rate_scale"]
    unmoved = train(still, groups, by_ess, num_mini_batches=2).metrics["learning_rate_scale"]
    log_weights = [
        (
            torch.log_softmax(moved.table.detach(), -1)[each.token_ids[:-1], each.token_ids[1:]].numpy()
            - each.behaviour_logprobs[1:]
        )[each.action_mask[1:]].sum()
        for group in second
        for each in group.sequences
    ]
    w = np.exp(log_weights)
    expected = (scale + (w.sum() ** 2 / len(w) / (w**2).sum()) ** 0.5) / 2
    found = train(BigramEngine(learning_rate=3.0), groups, by_ess, num_mini_batches=2).metrics["learning_rate_scale"]
    assert found == pytest.approx(expected, rel=1e-4)
    assert abs(found - unmoved) > 1e-3


RIVALS = [
    Objective.cispo(),
    Objective.sapo(),
    Objective.dppo(aggregation_tokens=12),
    Objective.m2po(),
    Objective.m2po_clip(),
    Objective.vespo(),
    Objective.gmpo(),
    Objective.icepop(),
    Objective.luspo(),
]


@pytest.mark.parametrize(
    "objective", RIVALS, ids=["cispo", "sapo", "dppo", "m2po", "m2po_clip", "vespo", "gmpo", "icepop", "luspo"]
)
def test_a_rival_of_the_clip_trains_a_batch_and_says_what_it_took(objective: Objective) -> None:
    groups = own_logprobs(BigramEngine(), random_groups(4, 4, seed=1), noise=1.5)
    metrics = train(BigramEngine(), groups, objective, num_mini_batches=2).metrics
    assert ("clip_range_high/all" in metrics) is objective.has_clip_range
    masks = objective.weight_mode == "reject_tokens"
    assert (metrics["mask_fraction/all"] > 0) is masks
    # IcePop's clip sees the batch's own steps alone.
    assert masks or metrics["clip_fraction/all"] > 0
    assert all(np.isfinite(value) for value in metrics.values())
