"""Zero-advantage groups are filtered out while a batch fills, up to a limit, and nothing about them is lost."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gspo_protocol.messages import Release
from gspo_services.broker.ledger import Note, SamplingRules
from gspo_services.broker.ledger.sampling import has_advantage as group_has_advantage
from gspo_services.broker.rows import GroupRow, TrajectoryRow
from tests.support.broker.ledger import LEARNER, LedgerHarness, delivered
from tests.support.broker.ledger_training import R1, generate, group_ids, harness, train_one


def sampled(world: LedgerHarness, *rewards: float, version: int = 1) -> int:
    """One more group whose trajectories have these rewards; returns its id."""
    leases = world.lease(R1, len(rewards), version)
    for lease, reward in zip(leases, rewards, strict=True):
        world.episode(R1, lease, version, reward)
    return leases[0].group_id


def dynamic(max_filtered: int = 4, **changes: Any) -> LedgerHarness:
    return harness(sampling=SamplingRules(max_filtered=max_filtered), **changes)


def status_of(world: LedgerHarness, group_id: int) -> str:
    (row,) = world.store.rows(GroupRow, "WHERE group_id = ?", (group_id,))
    return row.status


def members(*rewards: tuple[float, ...], num_tokens: int = 3) -> list[TrajectoryRow]:
    return [
        TrajectoryRow(trajectory_id=index, group_id=0, turn_rewards=each, num_tokens=num_tokens)
        for index, each in enumerate(rewards)
    ]


def has_advantage(rows: Sequence[TrajectoryRow], rules: SamplingRules) -> bool:
    return group_has_advantage(rows, rules, max_tokens=1024)


def test_a_group_has_a_signal_when_its_rewards_differ() -> None:
    rules = SamplingRules(max_filtered=1)
    assert not has_advantage(members((1.0,), (1.0,)), rules)
    assert has_advantage(members((1.0,), (0.5,)), rules)


def test_where_turns_get_advantages_rewards_of_equal_sum_are_a_signal() -> None:
    equal_sums = members((1.0, 0.0), (0.0, 1.0))
    assert not has_advantage(equal_sums, SamplingRules(max_filtered=1))
    assert has_advantage(equal_sums, SamplingRules(max_filtered=1, by_turn=True))
    assert not has_advantage(members((1.0, 0.0), (1.0, 0.0)), SamplingRules(max_filtered=1, by_turn=True))


def test_turns_are_judged_with_their_roles_and_without_those_of_an_attempt_that_began_again() -> None:
    by_turn = SamplingRules(max_filtered=1, by_turn=True)
    first, second = members((1.0, -1.0), (1.0, -1.0))
    assert not has_advantage([first, second], by_turn)
    assert has_advantage([replace(first, turn_roles=(0, 1)), replace(second, turn_roles=(1, 0))], by_turn)
    restarted, plain = members((0.0, 0.0, 1.0), (0.0, 1.0))
    assert has_advantage([restarted, plain], by_turn)
    assert not has_advantage([replace(restarted, discarded_turns=(0,)), plain], by_turn)
    assert has_advantage([replace(restarted, discarded_turns=(2,)), plain], by_turn)


def test_a_group_whose_rewards_the_learner_will_change_is_kept() -> None:
    """The limit is the group's own: a schedule may have made it larger or smaller since."""
    rules = SamplingRules(max_filtered=1, overlong_buffer_tokens=10)
    for limit in (20, 40):
        assert not group_has_advantage(members((1.0,), (1.0,), num_tokens=limit - 10), rules, limit)
        assert group_has_advantage(members((1.0,), (1.0,), num_tokens=limit - 9), rules, limit)


def test_a_batch_is_made_of_groups_with_a_signal_and_counts_the_others() -> None:
    world = dynamic()
    first = sampled(world, 0.0, 1.0)
    silent = sampled(world, 1.0, 1.0)
    assert not delivered(world.request_batch(0, 1)), "one group is missing"
    second = sampled(world, 1.0, 0.0)
    assert group_ids(world, 0) == (first, second)
    assert status_of(world, silent) == "filtered"
    world.trained(0, 1)
    filtered, batch = world.lines
    assert {name: filtered[name] for name in ("event", "reason", "group_id", "batch", "reward", "num_tokens")} == {
        "event": "filtered", "reason": "zero_advantage", "group_id": silent, "batch": 0, "reward": 1.0, "num_tokens": [3, 3],
    }  # fmt: skip
    assert (batch["num_filtered_groups"], batch["num_filtered_tokens"], batch["num_zero_advantage_groups"]) == (1, 6, 0)


def test_without_dynamic_sampling_every_group_is_trained() -> None:
    world = harness()
    generate(world, 4, 1, reward=1.0)
    train_one(world, 0, 1)
    (line,) = world.lines
    assert (line["num_filtered_groups"], line["num_zero_advantage_groups"]) == (0, 2)


def test_a_batch_counts_groups_without_signal_by_what_advantages_are_made_of() -> None:
    for by_turn, silent in ((False, 1), (True, 0)):
        world = harness(sampling=SamplingRules(by_turn=by_turn))
        sampled(world, 0.0, 1.0)
        for role, lease in enumerate(world.lease(R1, 2, 1)):
            world.grow(R1, lease, 3, 1)
            world.finish(R1, lease, 3, turn_roles=(role,))
        train_one(world, 0, 1)
        assert world.lines[-1]["num_zero_advantage_groups"] == silent


def test_a_batch_takes_groups_without_signal_once_it_has_filtered_out_as_many_as_it_may() -> None:
    world = dynamic(max_filtered=3)
    ids = [sampled(world, 1.0, 1.0) for _ in range(5)]
    assert group_ids_of_next(world) == tuple(ids[3:])
    events = [line["event"] for line in world.lines]
    assert events == ["filtered"] * 3 + ["filter_limit"], "named once"
    assert world.lines[-1]["num_groups"] == 3


def group_ids_of_next(world: LedgerHarness) -> tuple[int, ...]:
    assert delivered(world.request_batch(0, 1)) == [0]
    return group_ids(world, 0)


def test_the_buffer_ends_at_the_limit_that_the_group_was_sampled_with() -> None:
    """64 tokens; its trajectories have 3."""
    for buffer, status in ((61, "filtered"), (62, "complete")):
        world = harness(sampling=SamplingRules(max_filtered=1, overlong_buffer_tokens=buffer))
        assert status_of(world, sampled(world, 1.0, 1.0)) == status


def test_the_limit_is_said_as_a_warning() -> None:
    world = dynamic(max_filtered=1)
    first, second = world.lease(R1, 2, 1)
    world.episode(R1, first, 1, reward=0.0)
    world.grow(R1, second, 3, 1)
    notes = [action for action in world.finish(R1, second, 3, reward=0.0) if isinstance(action, Note)]
    assert [(note.event, note.level) for note in notes][-2:] == [("group_filtered", "info"), ("filter_limit", "warning")]


def test_each_batch_may_leave_out_as_many_again_and_a_restart_does_not_change_that() -> None:
    world = dynamic(max_filtered=2)
    sampled(world, 1.0, 1.0)
    world.restart()
    world.hello(R1)
    world.hello(LEARNER, "learner")
    assert world.ledger.state.run.filtered_groups == 1
    assert world.ledger.state.num_filtered_groups == 1
    sampled(world, 1.0, 1.0)
    kept = sampled(world, 0.0, 0.0)
    assert status_of(world, kept) == "complete"
    sampled(world, 0.0, 1.0)
    assert group_ids_of_next(world)[0] == kept
    assert world.ledger.state.run.filtered_groups == 0
    assert status_of(world, sampled(world, 1.0, 1.0)) == "filtered"


def test_held_out_groups_are_never_filtered_out() -> None:
    world = dynamic(evaluate_every_batches=1, num_eval_tasks=2)
    generate(world, 2, 1, reward=1.0)
    (line,) = world.lines
    assert (line["event"], line["num_finished"]) == ("eval", 2)


@settings(max_examples=60, deadline=None)
@given(
    signal=st.lists(st.booleans(), min_size=80, max_size=80),
    order=st.randoms(use_true_random=False),
    max_lag=st.integers(0, 2),
    max_filtered=st.integers(1, 5),
)
def test_every_run_ends_and_nothing_becomes_too_old(signal: list[bool], order: Any, max_lag: int, max_filtered: int) -> None:
    """Groups become complete in any order; a batch waits for no more groups than the limit and its own."""
    world = dynamic(max_filtered, max_lag=max_lag, num_batches=3)
    version = 1
    for index in range(3):
        world.request_batch(index, version)
        waiting = world.lease(R1, 64, version)
        for _ in range(200):
            if world.ledger.state.batches.num_assembled > index:
                break
            waiting += world.lease(R1, 64, version)
            lease = waiting.pop(order.randrange(len(waiting)))
            reward = float(lease.trajectory_id % 2) if signal[lease.group_id % len(signal)] else 0.0
            world.episode(R1, lease, version, reward)
        assert world.ledger.state.batches.num_assembled == index + 1, "the batch never fills"
        for lease in waiting:
            world.send(R1, Release(trajectory_id=lease.trajectory_id, epoch=lease.epoch, reason="", failed=False))
        world.trained(index, version)
        version += 1
        world.publish(version, index + 1)
    assert world.ledger.state.num_dropped == {}
    assert world.ledger.state.num_filtered_groups <= 3 * max_filtered
