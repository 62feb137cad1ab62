"""Batches become optimizer steps, on a table in place of a language model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import structlog.testing
import torch

from gspo.adaptive import AdaptiveClip
from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch, TrainGroup, pack
from gspo.moe.experts import ExpertShape
from gspo_services.learner.advantages import AdvantageSettings, sequences_with_advantages
from gspo_services.learner.batch_run import Trackers
from gspo_services.learner.plan import deal_groups
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.engines.moe_engine import MoeEngine
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, tiny_qwen3_moe
from tests.support.learner.trained import WIDE, own_logprobs, train
from tests.support.loss.sequences import random_groups


def test_the_gradient_of_an_on_policy_batch_is_that_of_the_weighted_log_likelihood() -> None:
    engine = BigramEngine(max_tokens_per_micro_batch=50)
    groups = own_logprobs(engine, random_groups(3, 4, seed=1))
    table = engine.table.detach().clone().requires_grad_()
    train(engine, groups)

    sequences, _ = sequences_with_advantages(groups, AdvantageSettings())
    objective = torch.zeros(())
    for sequence in sequences:
        assert sequence.advantages is not None
        logprobs = torch.log_softmax(table, -1)[sequence.token_ids[:-1], sequence.token_ids[1:]]
        weights = torch.from_numpy(sequence.advantages[1:])
        objective = objective + (logprobs * weights).sum() / sequence.num_action_tokens / 12
    (expected,) = torch.autograd.grad(-objective, table)
    torch.testing.assert_close(engine.gradients[0], expected, rtol=1e-4, atol=1e-6)


def test_the_step_does_not_depend_on_the_size_of_micro_batches() -> None:
    groups = own_logprobs(BigramEngine(), random_groups(4, 3, seed=2), noise=0.05)
    gradients = []
    for max_tokens_per_micro_batch in (10, 60, 10_000):
        engine = BigramEngine(max_tokens_per_micro_batch=max_tokens_per_micro_batch)
        train(engine, groups)
        gradients.append(engine.gradients[0])
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradients[1], gradients[2], rtol=1e-4, atol=1e-6)


def test_mini_batches_are_steps_on_whole_groups() -> None:
    together = BigramEngine()
    groups = own_logprobs(together, random_groups(4, 3, seed=4))
    report = train(together, groups, num_mini_batches=2)
    apart = BigramEngine()
    for chosen in deal_groups(groups, 0, 2):
        train(apart, [groups[index] for index in chosen])
    assert torch.equal(together.table, apart.table)
    assert report.metrics["optimizer_steps"] == 2
    assert report.metrics["sequences/all"] == 12
    assert report.metrics["groups/all"] == 4


def test_sigma_is_the_deviation_of_engine_noise_on_tokens_of_the_current_version() -> None:
    engine = BigramEngine()
    groups = own_logprobs(engine, random_groups(20, 4, seed=5), noise=0.05)
    assert train(engine, groups).metrics["mismatch_sigma"] == pytest.approx(0.05, rel=0.1)
    stale = own_logprobs(BigramEngine(), random_groups(4, 4, seed=5), noise=0.05)
    assert train(BigramEngine(), stale, policy_version=1).metrics["mismatch_sigma"] == 0


def test_a_proximal_anchor_costs_one_forward_pass_and_starts_every_ratio_at_one() -> None:
    engine = BigramEngine(max_tokens_per_micro_batch=10_000)
    groups = own_logprobs(engine, random_groups(4, 3, seed=6), noise=0.3)
    report = train(engine, groups, replace(WIDE, anchor="proximal"))
    assert engine.num_forward_passes == 1
    assert report.metrics["ratio_max/all"] == 1
    assert report.metrics["ratio_min/all"] == 1
    assert report.metrics["mismatch_sigma"] == pytest.approx(0.3, rel=0.3)
    behaviour = train(BigramEngine(max_tokens_per_micro_batch=10_000), groups)
    assert behaviour.metrics["ratio_max/all"] > 1.001


def test_a_proximal_pass_measures_all_micro_batches() -> None:
    groups = own_logprobs(BigramEngine(), random_groups(4, 3, seed=6), noise=0.3)
    proximal = replace(WIDE, anchor="proximal")
    one, many = (train(BigramEngine(max_tokens_per_micro_batch=budget), groups, proximal) for budget in (10_000, 40))
    assert many.metrics["mismatch_sigma"] == pytest.approx(one.metrics["mismatch_sigma"], rel=1e-5)


def test_a_proximal_anchor_stays_at_the_start_of_the_batch_over_its_mini_batches() -> None:
    engine = BigramEngine(learning_rate=1.0)
    groups = own_logprobs(engine, random_groups(4, 3, seed=6))
    report = train(engine, groups, replace(WIDE, anchor="proximal"), num_mini_batches=2)
    assert report.metrics["ratio_max/all"] > 1.0001


def test_lags_are_counted_from_the_version_before_the_batch() -> None:
    groups = random_groups(2, 3, seed=7, versions=(3, 3))
    report = train(BigramEngine(), groups, policy_version=5)
    assert report.metrics["lag/all"] == 2
    assert report.metrics["sequences/lag_2"] == 6


def test_turn_credit_gives_every_token_the_advantage_of_its_turn() -> None:
    (group,) = random_groups(1, 3, seed=8)
    settings = AdvantageSettings(advantage="turn", normalise_by_std=False)
    sequences, _ = sequences_with_advantages([group], settings)
    assert group.turn_rewards is not None
    first_turn = np.mean([rewards.sum() for rewards in group.turn_rewards])
    for sequence, rewards in zip(sequences, group.turn_rewards, strict=True):
        assert sequence.advantages is not None
        np.testing.assert_allclose(sequence.advantages[sequence.turn_ids == 0], rewards.sum() - first_turn, rtol=1e-5)
        assert not sequence.advantages[~sequence.action_mask].any()


def test_turn_credit_without_turn_rewards_is_refused() -> None:
    (group,) = random_groups(1, 2, seed=9)
    settings = AdvantageSettings(advantage="turn")
    with pytest.raises(ValueError, match="group-0 has no turn_rewards"):
        sequences_with_advantages([replace(group, turn_rewards=None)], settings)
    with pytest.raises(ValueError, match="turns and 0 turn rewards"):
        sequences_with_advantages([replace(group, turn_rewards=(np.zeros(0), np.zeros(9)))], settings)


def test_groups_with_equal_rewards_are_counted_and_train_nothing() -> None:
    engine = BigramEngine()
    groups = [replace(group, rewards=np.full(3, 0.7)) for group in own_logprobs(engine, random_groups(2, 3, seed=10))]
    report = train(engine, groups)
    assert report.metrics["zero_advantage_groups/all"] == report.metrics["groups/all"] == 2
    assert not engine.gradients[0].any()


def test_a_sequence_without_actions_only_counts_in_the_number_of_sequences() -> None:
    engine = BigramEngine()
    (group,) = own_logprobs(engine, random_groups(1, 2, seed=11))
    first = group.sequences[0]
    nothing = np.full(first.num_tokens, -1)
    empty = replace(
        first,
        action_mask=np.zeros(first.num_tokens, dtype=np.bool_),
        versions=nothing,
        turn_ids=nothing.astype(np.int32),
    )
    report = train(engine, [replace(group, sequences=(empty, group.sequences[1]))])
    assert report.metrics["sequences_empty/all"] == 1
    alone = replace(group.sequences[1], advantages=None)
    sequences, _ = sequences_with_advantages([replace(group, sequences=(empty, alone))], AdvantageSettings())
    advantage = float(np.abs(sequences[1].advantages[alone.action_mask]).max())  # type: ignore[index]
    assert abs(report.metrics["loss"]) == pytest.approx(advantage / 2, rel=1e-4)


def next_expert(model: Any) -> None:
    """Every layer after the first chooses expert e + 1 wherever it chose e."""
    for layer in model.model.layers[1:]:
        layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.roll(1, dims=0))


def nothing(model: Any) -> None:
    """The weights stay."""


@pytest.mark.parametrize("num_mini_batches", [1, 2, 4])
def test_experts_changed_is_counted_after_the_first_mini_batch_against_the_start_of_the_batch(
    num_mini_batches: int,
) -> None:
    groups = random_groups(4, 3, seed=12, vocab_size=TINY_VOCAB_SIZE, versions=(0, 1))
    changes = {}
    for update in (nothing, next_expert):
        engine = MoeEngine(tiny_qwen3_moe(), update=update)
        report = train(engine, groups, replace(WIDE, anchor="proximal"), policy_version=1, num_mini_batches=num_mini_batches)
        assert 1 < report.metrics["expert_load_max_over_mean/all"] < 4
        changes[update] = {name: value for name, value in report.metrics.items() if name.startswith("experts_changed")}
    if num_mini_batches == 1:
        assert changes == {nothing: {}, next_expert: {}}
        return
    assert set(changes[nothing]) == {"experts_changed/all", "experts_changed/lag_1"}
    assert set(changes[nothing].values()) == {0.0}
    assert changes[next_expert]["experts_changed/all"] == pytest.approx(
        shifted_share(groups, 1, num_mini_batches), abs=1e-12
    )


def shifted_share(groups: list[TrainGroup], policy_version: int, num_mini_batches: int) -> float:
    """The share of changed picks when ``next_expert`` follows every mini-batch, from the untouched model's logits."""
    model = tiny_qwen3_moe()
    changed, total = 0, 0
    for index, chosen in enumerate(deal_groups(groups, policy_version, num_mini_batches)):
        for sequence in (member for g in chosen for member in groups[g].sequences):
            with torch.no_grad():
                ids = torch.from_numpy(sequence.token_ids)[None]
                logits = model(input_ids=ids, output_router_logits=True).router_logits[1]
            for row in logits[:-1][torch.from_numpy(sequence.action_mask[1:])].numpy() if index else ():
                before = set(np.argsort(row)[-2:].tolist())
                changed += len({(expert + index) % 4 for expert in before} - before)
                total += 2 * 2  # Two picks in each of two layers.
    return changed / total


def test_with_the_behaviour_anchor_the_experts_load_is_measured_and_no_pass_is_made_for_their_changes() -> None:
    groups = random_groups(2, 3, seed=13, vocab_size=TINY_VOCAB_SIZE)
    report = train(MoeEngine(tiny_qwen3_moe(), update=next_expert), groups, num_mini_batches=2)
    names = {name for name in report.metrics if name.startswith("expert")}
    assert names == {"expert_load_max_over_mean/all", "expert_load_unused/all"}
    assert not any(name.startswith("expert") for name in train(BigramEngine(), random_groups(2, 3, seed=13)).metrics)


@pytest.mark.parametrize("anchor", ["proximal", "behaviour"])
def test_with_routing_replay_no_expert_changes_and_the_routers_still_learn(anchor: Any) -> None:
    groups = random_groups(4, 3, seed=12, vocab_size=TINY_VOCAB_SIZE)
    changed, ratios = {}, {}
    for replays_routing in (False, True):
        engine = MoeEngine(tiny_qwen3_moe(), update=next_expert, replays_routing=replays_routing)
        report = train(engine, groups, replace(WIDE, anchor=anchor), num_mini_batches=4)
        changed[replays_routing] = report.metrics.get("experts_changed/all")
        ratios[replays_routing] = report.metrics["ratio_mean/all"]
        assert all(bool(layer.mlp.gate.weight.grad.any()) for layer in engine.model.model.layers)
    # Only the proximal anchor already has a pass to compare with.
    assert changed[False] == (pytest.approx(shifted_share(groups, 0, 4)) if anchor == "proximal" else None)
    assert changed[True] == 0
    assert ratios[True] != ratios[False]


def test_with_routing_replay_the_ratios_of_unchanged_weights_are_exactly_one() -> None:
    groups = random_groups(4, 3, seed=12, vocab_size=TINY_VOCAB_SIZE)
    engine = MoeEngine(tiny_qwen3_moe(), update=nothing, replays_routing=True)
    report = train(engine, groups, replace(WIDE, anchor="proximal", ratio_unit="token"), num_mini_batches=4)
    assert report.metrics["ratio_min/all"] == report.metrics["ratio_max/all"] == 1


def test_experts_to_replay_are_kept_until_their_micro_batch_is_trained() -> None:
    """A micro-batch of a later mini-batch has the experts of the batch's start, however the routers have changed."""
    groups = random_groups(2, 3, seed=14, vocab_size=TINY_VOCAB_SIZE)
    seen: list[torch.Tensor] = []

    class Watched(MoeEngine):
        def _forward(self, packed: PackedBatch, with_entropy: bool) -> TokenLogProbs:
            result = super()._forward(packed, with_entropy)
            assert result.experts is not None
            seen.append(result.experts.indices_LTK)
            return result

    engine = Watched(tiny_qwen3_moe(), update=next_expert, replays_routing=True, max_tokens_per_micro_batch=40)
    train(engine, groups, num_mini_batches=2)
    half = len(seen) // 2
    assert half > 2
    assert all(torch.equal(at_start, trained) for at_start, trained in zip(seen[:half], seen[half:], strict=True))


def test_routing_replay_of_a_model_whose_experts_cannot_be_recorded_is_refused_before_a_step() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    dense = Qwen3ForCausalLM(Qwen3Config(vocab_size=TINY_VOCAB_SIZE, hidden_size=32, num_hidden_layers=1, head_dim=8))
    steps: list[Any] = []
    engine = MoeEngine(dense, update=steps.append, replays_routing=True)
    with pytest.raises(ValueError, match="choices cannot be recorded, so they cannot be replayed"):
        train(engine, random_groups(2, 3, seed=13, vocab_size=TINY_VOCAB_SIZE))
    assert steps == []


def with_experts(groups: list[TrainGroup], unknown: int = 4) -> list[TrainGroup]:
    """The groups as an engine of two layers of four experts sampled them; of each ``unknown``-th token it reported none."""
    generator = np.random.default_rng(8)
    changed = []
    for group in groups:
        members = []
        for each in group.sequences:
            experts = generator.random((each.num_action_tokens, 2, 4)).argsort(-1)[..., :2].astype(np.int16)
            experts[::unknown] = -1
            members.append(replace(each, experts=experts))
        changed.append(replace(group, sequences=tuple(members)))
    return changed


@pytest.mark.parametrize("anchor", ["proximal", "behaviour"])
def test_every_pass_of_a_batch_has_the_experts_of_the_engine_and_the_routers_still_learn(anchor: Any) -> None:
    """Each mini-batch moves every router's choice on; only tokens whose experts are not known follow."""
    groups = with_experts(random_groups(4, 3, seed=12, vocab_size=TINY_VOCAB_SIZE))
    seen: list[tuple[PackedBatch, TokenLogProbs]] = []

    class Watched(MoeEngine):
        def _forward(self, packed: PackedBatch, with_entropy: bool) -> TokenLogProbs:
            seen.append((packed, super()._forward(packed, with_entropy)))
            return seen[-1][1]

    engine = Watched(tiny_qwen3_moe(), update=next_expert, engine_experts=ExpertShape(2, 2, 4))
    metrics = train(engine, groups, replace(WIDE, anchor=anchor), num_mini_batches=4).metrics
    assert all(bool(layer.mlp.gate.weight.grad.any()) for layer in engine.model.model.layers)
    num_passes = {"proximal": 2, "behaviour": 1}[anchor]
    counts = np.zeros(4)
    for number, (packed, result) in enumerate(seen):
        reported, own, used = packed.experts_TLK, result.own_experts, result.experts
        assert reported is not None
        assert own is not None
        assert used is not None
        known_T = reported[:, 0, 0] >= 0
        assert not known_T[~packed.mask_T].any()
        assert torch.equal(used.indices_LTK[:, known_T], reported.transpose(0, 1)[:, known_T].to(used.indices_LTK.dtype))
        assert torch.equal(used.indices_LTK[:, ~known_T].long(), own.indices_LTK[:, ~known_T].long())
        if number == len(seen) * (num_passes - 1) // num_passes:
            # The first mini-batch's training pass, under the weights of the batch's start.
            both = own.indices_LTK[:, known_T].long(), reported[known_T].transpose(0, 1).long()
            differ = (both[0].sort().values != both[1].sort().values).any(-1)
            counts[:2] += [int(differ.sum()), differ.numel()]
            counts[2:] += [int(known_T.sum()), int(packed.mask_T.sum())]
    assert len(seen) == 4 * num_passes
    assert 0.5 < counts[0] / counts[1] < 1
    assert metrics["experts_differ/all"] == pytest.approx(counts[0] / counts[1])
    assert metrics["experts_replayed/all"] == pytest.approx(counts[2] / counts[3])
    assert "experts_changed/all" not in metrics


def test_experts_that_equal_the_learners_own_give_the_step_without_replay() -> None:
    groups = random_groups(2, 3, seed=14, vocab_size=TINY_VOCAB_SIZE)
    members = []
    free = MoeEngine(tiny_qwen3_moe(), update=nothing)
    for each in groups[0].sequences:
        packed = pack([each.with_advantages(np.zeros(each.num_tokens, np.float32))], policy_version=0)
        picks = free.logprobs(packed).experts
        assert picks is not None
        experts = picks.indices_LTK.transpose(0, 1)[packed.mask_T].numpy().astype(np.int16)
        members.append(replace(each, experts=experts))
    reported = [replace(groups[0], sequences=tuple(members))]
    replaying = MoeEngine(tiny_qwen3_moe(), update=nothing, engine_experts=ExpertShape(2, 2, 4))
    metrics = [train(engine, given).metrics for engine, given in ((free, groups[:1]), (replaying, reported))]
    assert metrics[1]["experts_differ/all"] == 0
    assert metrics[1]["experts_replayed/all"] == 1
    assert all(metrics[1][name] == value for name, value in metrics[0].items())


def test_a_batch_without_experts_is_trained_with_the_learners_own_and_says_so() -> None:
    groups = random_groups(2, 3, seed=14, vocab_size=TINY_VOCAB_SIZE)
    engine = MoeEngine(tiny_qwen3_moe(), update=nothing, engine_experts=ExpertShape(2, 2, 4))
    with structlog.testing.capture_logs() as logs:
        metrics = train(engine, groups).metrics
    assert metrics["experts_replayed/all"] == 0
    assert [each["event"] for each in logs] == ["no_experts_reported"]


def test_experts_of_another_model_are_refused_before_a_step() -> None:
    steps: list[Any] = []
    engine = MoeEngine(tiny_qwen3_moe(), update=steps.append, engine_experts=ExpertShape(2, 2, 3))
    with pytest.raises(ValueError, match="an engine reported expert 3, and the learner's model has 0 to 2"):
        train(engine, with_experts(random_groups(2, 3, seed=13, vocab_size=TINY_VOCAB_SIZE)))
    assert steps == []


def test_an_adaptive_clip_scales_the_next_batch_by_what_this_one_clipped() -> None:
    narrow = replace(WIDE, eps_low=0.01, eps_high=0.01, noise_z=0.0)
    groups = own_logprobs(BigramEngine(), random_groups(6, 4, seed=15), noise=0.1)
    adaptive, expected = AdaptiveClip(target=0.05), AdaptiveClip(target=0.05)
    fractions = []
    for _ in range(3):
        metrics = train(BigramEngine(), groups, narrow, trackers=Trackers(adaptive_clip=adaptive)).metrics
        assert metrics["clip_scale"] == expected.scale
        expected.update(metrics["clip_fraction/all"])
        fractions.append(metrics["clip_fraction/all"])
    assert expected.scale > 1.5
    assert fractions[0] > fractions[1] > fractions[2] > 0.05
    assert train(BigramEngine(), groups, narrow).metrics["clip_fraction/all"] == fractions[0]


def test_zero_advantage_groups_neither_open_nor_close_an_adaptive_clip() -> None:
    narrow = replace(WIDE, eps_low=0.01, eps_high=0.01, noise_z=0.0)
    groups = own_logprobs(BigramEngine(), random_groups(6, 4, seed=15), noise=0.1)
    zero_advantage = [replace(group, rewards=np.ones(4)) for group in groups]
    alone, mixed, unmoved = (AdaptiveClip(target=0.3) for _ in range(3))
    share, diluted, _ = (
        train(BigramEngine(), each, narrow, trackers=Trackers(adaptive_clip=clip)).metrics["clip_fraction/all"]
        for each, clip in ((groups, alone), (groups + zero_advantage, mixed), (zero_advantage, unmoved))
    )
    assert share > 0.3 > diluted
    assert mixed.scale == pytest.approx(alone.scale, abs=1e-9)
    assert mixed.scale > 1
    assert unmoved.scale == 1


def test_rejected_sequences_neither_open_nor_close_an_adaptive_clip() -> None:
    """They have an advantage and are never clipped: no signal."""
    start = BigramEngine(learning_rate=3.0)
    groups = own_logprobs(start, random_groups(6, 4, seed=15, versions=(1, 1)))
    # Of an older version, so that as many of them come to each mini-batch, beside the same other groups.
    foreign = [
        replace(
            g,
            sequences=tuple(
                replace(s, behaviour_logprobs=s.behaviour_logprobs - 2, versions=s.versions - s.action_mask)
                for s in g.sequences
            ),
        )
        for g in groups
    ]
    objective = replace(WIDE, anchor="proximal", tis_mode="reject", eps_low=0.01, eps_high=0.01)
    alone, mixed, unmoved = (AdaptiveClip(target=0.1) for _ in range(3))
    step = partial(train, objective=objective, policy_version=1, num_mini_batches=2)
    ordinary = step(BigramEngine(learning_rate=3.0), groups, trackers=Trackers(adaptive_clip=alone)).metrics
    # They count in N, so that a step is half as long.
    half = step(BigramEngine(learning_rate=6.0), groups + foreign, trackers=Trackers(adaptive_clip=mixed)).metrics
    none = step(BigramEngine(learning_rate=3.0), foreign, trackers=Trackers(adaptive_clip=unmoved)).metrics
    assert half["rejected_sequences/all"] == half["signal_sequences/all"] == ordinary["sequences/all"]
    assert mixed.scale == pytest.approx(alone.scale, abs=1e-9)
    assert mixed.scale != 1
    assert none["signal_sequences/all"] == 0
    assert unmoved.scale == 1


def test_a_token_older_than_max_lag_refuses_the_batch_before_a_step() -> None:
    engine = BigramEngine()
    groups = random_groups(2, 3, seed=7, versions=(3, 5))
    train(BigramEngine(), groups, policy_version=5, max_lag=2)
    with pytest.raises(
        ValueError, match=r"group group-0: sequence \d has a token of version 3, which is 2 versions old, and max_lag is 1"
    ):
        train(engine, groups, policy_version=5, max_lag=1)
    assert engine.gradients == []
