"""Several named sets at once: when each is evaluated, what its lines say, what the learner hears, its share of leases."""

import pytest
from msgspec import structs

from gspo_protocol.messages import Evaluated, GroupSampling, VersionScore
from gspo_services.broker.ledger import GrantLease, SetTerms
from tests.support.broker.ledger import replies
from tests.support.broker.ledger_training import R1, generate, harness, train_one

SMALL = SetTerms(
    name="small", every_batches=1, num_tasks=2, samples=2, metrics=("reward", "avg@2", "pass@2", "elo"),
    ratings=(1000.0, 2000.0), best_by="pass@2",
)  # fmt: skip
RARE = SetTerms(name="rare", every_batches=2, num_tasks=1, metrics=("reward",))


def test_each_set_has_its_tasks_its_samples_and_its_interval() -> None:
    world = harness(evaluation_sets=(SMALL, RARE), num_batches=3)
    version = 1
    for index in range(3):
        wanted = [("eval/small", 0)] * 2 + [("eval/small", 1)] * 2 + ([("eval/rare", 0)] if index in (0, 2) else [])
        held_out = world.lease(R1, len(wanted), version)
        assert [(lease.source, lease.task_index) for lease in held_out] == wanted
        assert len({lease.seed for lease in held_out}) == len(held_out)
        for lease in held_out:
            world.episode(R1, lease, version)
        generate(world, 4, version)
        train_one(world, index, version)
        version += 1
    # The run waits for the last evaluation of every set.
    assert not world.ledger.state.finished
    *of_small, of_rare = world.lease(R1, 9, version)
    for lease in of_small:
        world.episode(R1, lease, version)
    assert not world.ledger.state.finished
    world.episode(R1, of_rare, version)
    assert world.ledger.state.finished
    evaluated = [(line["set"], line["batch"]) for line in world.lines if line["event"] == "evaluation"]
    assert sorted(evaluated) == [("rare", 0), ("rare", 2), ("rare", 3), *(("small", batch) for batch in range(4))]
    # The curve of the held-out reward is of one set.
    assert [line["set"] for line in world.lines if line["event"] == "eval"] == ["small"] * 4


def test_a_sets_line_has_its_metrics_with_intervals_and_its_cost_and_the_learner_hears_the_chosen_one() -> None:
    world = harness(evaluation_sets=(SMALL,), max_attempts=1)
    leases = [lease for lease in world.lease(R1, 4, 1) if lease.split == "eval"]
    for lease, reward in zip(leases[:3], (1.0, 0.0, 0.0), strict=True):
        world.episode(R1, lease, 1, reward=reward)
    ended = world.fail(R1, leases[3])
    first, second = world.lines
    assert first["event"] == "evaluation"
    # Task 1 has one sample left, too few for pass@2 and avg@2.
    assert (first["eval/small/pass@2"], first["eval/small/avg@2"], first["eval/small/reward"]) == (1.0, 0.5, 0.25)
    assert first["eval/small/pass@2_low"] == pytest.approx(0.2065, abs=1e-3)
    assert 990 < first["eval/small/elo"] < 1000
    assert (first["num_finished"], first["num_failed"], first["num_tasks"]) == (3, 1, 2)
    assert first["eval/small/num_tokens"] > first["eval/small/num_action_tokens"] > 0
    assert first["eval/small/versions_newer"] == 0.0
    assert (second["event"], second["metric"], second["eval/score"]) == ("eval", "pass@2", 1.0)
    assert second["eval/reward"] == pytest.approx(1 / 3)
    # Over tasks (0.5 and 0), not over samples.
    assert second["eval/reward_error"] == pytest.approx(0.25)
    assert replies(ended, Evaluated) == [Evaluated(scores=[VersionScore(1, False, 1.0)])]


def test_the_learner_hears_nothing_of_a_set_that_does_not_decide() -> None:
    world = harness(evaluation_sets=(RARE,), max_attempts=1)
    (lease,) = (lease for lease in world.lease(R1, 1, 1) if lease.split == "eval")
    world.grow(R1, lease, 3, 1)
    assert replies(world.finish(R1, lease, 3, 0.5), Evaluated) == []
    assert [line["event"] for line in world.lines] == ["evaluation"]


def test_solving_everything_counts_as_the_rating_it_shows_at_least() -> None:
    by_elo = SetTerms(
        name="contest", every_batches=1, num_tasks=2, metrics=("elo",), ratings=(1500.0, 1700.0), best_by="elo"
    )
    world = harness(evaluation_sets=(by_elo,))
    for lease in world.lease(R1, 2, 1):
        world.episode(R1, lease, 1, reward=1.0)
    line = world.lines[0]
    assert (line["eval/contest/elo"], line["eval/contest/elo_high"]) == (None, None)
    assert world.ledger.state.evaluations.scores() == [VersionScore(1, False, line["eval/contest/elo_low"])]


def test_evaluations_get_their_share_of_the_leases_and_what_training_leaves() -> None:
    many = SetTerms(name="many", every_batches=1, num_tasks=40, metrics=("reward",))
    world = harness(evaluation_sets=(many,), evaluation_share=0.25)
    first = world.lease(R1, 8, 1)
    assert [lease.split for lease in first].count("eval") == 2
    assert [lease.split for lease in first].count("train") == 6
    # They hold their share: one more lease goes to training, as long as its window has room.
    splits: list[str] = []
    while "eval" not in splits[-1:]:
        splits += [lease.split for lease in world.lease(R1, 1, 1)]
    num_leased = len(first) + len(splits)
    assert splits.count("eval") + 2 <= -(-num_leased // 4)
    # The window is full at last, and everything else is theirs.
    rest = [lease.split for lease in world.lease(R1, 60, 1)]
    assert rest.count("eval") == 40 - 2 - splits.count("eval")


def test_a_set_has_its_own_sampling() -> None:
    own = GroupSampling(0.6, 4000, 5000, 5000, top_p=0.9)
    world = harness(evaluation_sets=(SetTerms(name="long", every_batches=1, num_tasks=1, sampling=own),))
    held_out, training = world.lease(R1, 2, 1)
    assert isinstance(held_out, GrantLease)
    assert isinstance(training, GrantLease)
    assert held_out.sampling == own
    assert training.sampling == world.config.schedules.sampling_at(0) != own


def test_a_sets_tasks_have_their_own_adapters() -> None:
    own = GroupSampling(0.6, 4000, 5000, 5000, top_p=0.9)
    sets = (SetTerms(name="long", every_batches=1, num_tasks=2, sampling=own),)
    world = harness(evaluation_sets=sets, adapter_of=lambda source, index: f"{source}-{index}")
    found = [lease.sampling for lease in world.lease(R1, 2, 1)]
    assert found == [structs.replace(own, adapter=f"eval/long-{index}") for index in range(2)]


def test_an_open_evaluation_survives_a_restart_in_which_its_set_is_gone() -> None:
    world = harness(evaluation_sets=(SMALL,), max_attempts=1)
    leases = world.lease(R1, 4, 1)
    assert all(isinstance(lease, GrantLease) for lease in leases)
    state = world.ledger.state
    state.evaluations._all.clear()
    state.evaluations._sets.clear()
    for lease in leases:
        world.episode(R1, lease, 1)
    assert [row.status for row in state.evaluations.open] == []
    assert state.evaluations.scores() == []
