"""Groups whose answers are compared: graded once, by one holder, before a batch can have them, whatever dies meanwhile."""

import pytest
from msgspec.structs import replace

from gspo.advantages import group_advantages
from gspo_protocol.messages import Ack, Finish, Graded, Journal, LeaseEnded, LeaseKey, Refused, Release, Segment, VersionRun
from gspo_protocol.messages.work import Heartbeat
from gspo_services.broker.ledger import GrantLease, SamplingRules, SessionKey
from gspo_services.broker.rows import GroupRow, TrajectoryRow
from gspo_services.tasks.environments import score_of
from tests.support.broker.ledger import LEARNER, LedgerHarness, chunk, delivered, replies
from tests.support.broker.ledger_training import R1, harness

R2 = SessionKey("r2", "first")


def comparing(**changes: object) -> LedgerHarness:
    """A run that grades groups, with two rollouts."""
    world = harness(grades_groups=True, **changes)
    world.hello(R2)
    return world


def ended_group(world: LedgerHarness, *alone: float, version: int = 1) -> int:
    """One more group whose episodes have ended, each worth this much alone. Returns its id."""
    leases = world.lease(R1, len(alone), version)
    assert not any(lease.members for lease in leases)
    for lease, reward in zip(leases, alone, strict=True):
        world.episode(R1, lease, version, reward)
    return leases[0].group_id


def to_grade(world: LedgerHarness, sender: SessionKey = R2, version: int = 1) -> GrantLease:
    """The next lease, which is for a group."""
    (lease,) = world.lease(sender, version=version)
    assert lease.members, "a group that waits comes before anything else"
    return lease


def answer(lease: GrantLease, *rewards: float, epoch: int | None = None, **components: float) -> Graded:
    return Graded(
        trajectory_id=lease.trajectory_id,
        epoch=lease.epoch if epoch is None else epoch,
        rewards=list(rewards),
        components=[components] * len(rewards),
    )


def group_of(world: LedgerHarness, group_id: int) -> tuple[str, list[tuple[str, float]]]:
    """On disk: its status, and status and reward of each member."""
    (group,) = world.store.rows(GroupRow, "WHERE group_id = ?", (group_id,))
    members = world.store.rows(TrajectoryRow, "WHERE group_id = ? ORDER BY trajectory_id", (group_id,))
    return group.status, [(row.status, row.reward) for row in members]


def test_a_group_is_complete_only_when_its_answers_were_compared() -> None:
    world = comparing(groups_per_batch=1)
    group_id = ended_group(world, 0.25, 0.5)
    assert group_of(world, group_id) == ("open", [("ended", 0.25), ("free", 0.5)])
    assert delivered(world.request_batch(0, 1)) == []
    lease = to_grade(world)
    assert (lease.group_id, lease.num_tokens, [row.reward for row in lease.members]) == (group_id, 0, [0.25, 0.5])
    actions = world.send(R2, answer(lease, 3.0, -2.0, beside=1.0))
    assert replies(actions, Ack)
    assert delivered(actions) == [0]
    assert group_of(world, group_id) == ("batched", [("finished", 3.0), ("finished", -2.0)])
    row, items = world.store.batch(0)
    assert row.stats.mean_reward == 0.5
    assert row.stats.components == {"beside": 1.0}
    assert [trajectory.turn_rewards for trajectory, _ in items] == [(3.0,), (-2.0,)]


def test_the_rewards_come_with_the_last_turn_that_is_kept() -> None:
    row = TrajectoryRow(trajectory_id=0, group_id=0, num_turns=4, discarded_turns=(3,))
    assert row.last_turn == 2


def test_the_reward_beside_the_others_replaces_that_of_all_turns() -> None:
    world = comparing(groups_per_batch=1)
    first, second = world.lease(R1, 2)
    world.episode(R1, first, 1, 0.5)
    turns = [Segment("observation", 0, 2), Segment("action", 0, 1), Segment("observation", 1, 1), Segment("action", 1, 2)]
    runs = [VersionRun(-1, 2), VersionRun(1, 1), VersionRun(-1, 1), VersionRun(1, 2)]
    both = replace(chunk(second, 0, 6, 1), segments=turns, version_runs=runs, turn_rewards=[0.25])
    world.send(R1, both)
    ids = {"trajectory_id": second.trajectory_id, "epoch": second.epoch}
    world.send(R1, Finish(**ids, num_tokens=6, reason="done", turn_rewards=[0.25, 0.125]))
    lease = to_grade(world)
    assert [member.reward for member in lease.members] == [0.5, 0.375]
    world.send(R2, answer(lease, 1.0, 3.0))
    rows = world.store.rows(TrajectoryRow, "ORDER BY trajectory_id")
    assert [row.turn_rewards for row in rows] == [(1.0,), (0.0, 3.0)]


def test_a_group_of_which_an_episode_failed_for_good_is_dropped_and_not_graded() -> None:
    world = comparing(max_attempts=1)
    first, second = world.lease(R1, 2)
    world.episode(R1, first, 1)
    world.fail(R1, second)
    assert group_of(world, first.group_id)[0] == "dropped"
    assert not any(lease.members for lease in world.lease(R2, 4))


def test_a_run_without_a_group_reward_completes_its_groups_at_once() -> None:
    world = harness(groups_per_batch=1)
    group_id = ended_group(world, 0.25, 0.5)
    assert group_of(world, group_id)[0] == "complete"


def test_dynamic_sampling_judges_the_rewards_of_the_group() -> None:
    world = comparing(sampling=SamplingRules(max_filtered=4))
    alike = ended_group(world, 0.0, 1.0)
    world.send(R2, answer(to_grade(world), 0.5, 0.5))
    apart = ended_group(world, 1.0, 1.0)
    world.send(R2, answer(to_grade(world), 0.0, 1.0))
    assert group_of(world, alike)[0] == "filtered", "they differed alone, and not beside each other"
    assert group_of(world, apart)[0] == "complete"


def test_a_grade_outlives_the_broker_at_every_moment() -> None:
    world = comparing(groups_per_batch=1)
    group_id = ended_group(world, 0.0, 0.0)
    for _ in range(2):
        world.restart()
        for each in (R1, R2):
            world.hello(each)
        lease = to_grade(world)  # The former one ends with its session's next life, or is handed back.
        world.send(R2, Release(trajectory_id=lease.trajectory_id, epoch=lease.epoch, reason="draining", failed=False))
    lease = to_grade(world)
    world.send(R2, answer(lease, 1.0, 2.0))
    world.restart()
    world.hello(R2)
    # Delivered again after a restart, and even with other values, it changes nothing.
    for rewards in ((1.0, 2.0), (9.0, 9.0)):
        assert replies(world.send(R2, answer(lease, *rewards)), LeaseEnded) == []
        assert group_of(world, group_id) == ("complete", [("finished", 1.0), ("finished", 2.0)])
    assert world.restored().state.groups.num_complete == 1


def test_a_finish_that_is_delivered_again_does_not_end_the_grade() -> None:
    world = comparing()
    first, second = world.lease(R1, 2)
    world.episode(R1, first, 1)
    world.episode(R1, second, 1)
    world.restart()
    for each in (R1, R2):
        world.hello(each)
    assert replies(world.finish(R1, second, 3), LeaseEnded | Refused) == []
    lease = to_grade(world)
    world.finish(R1, second, 3)
    world.send(R1, chunk(second, 0, 3, 1))
    assert replies(world.send(R2, answer(lease, 1.0, 2.0)), LeaseEnded) == []
    assert group_of(world, lease.group_id)[0] == "complete"


def test_a_grade_whose_holder_is_silent_goes_to_another_and_the_first_is_told() -> None:
    world = comparing(groups_per_batch=1)
    group_id = ended_group(world, 0.0, 0.0)
    lost = to_grade(world)
    world.tick(world.config.lease_s + 1)
    lease = to_grade(world, R1)
    assert (lease.trajectory_id, lease.epoch) == (lost.trajectory_id, lost.epoch + 1)
    (ended,) = replies(world.send(R2, answer(lost, 9.0, 9.0)), LeaseEnded)
    assert ended.epoch == lost.epoch
    assert group_of(world, group_id)[0] == "open"
    world.send(R1, answer(lease, 1.0, 2.0))
    assert group_of(world, group_id)[1] == [("finished", 1.0), ("finished", 2.0)]
    (ended,) = replies(world.send(R2, answer(lost, 9.0, 9.0)), LeaseEnded)
    assert ended.epoch == lost.epoch, "told again"
    assert group_of(world, group_id)[1] == [("finished", 1.0), ("finished", 2.0)], "a late result changes nothing"


def test_a_grade_comes_before_episodes_that_are_older() -> None:
    world = comparing()
    first, _, *second = world.lease(R1, 4)
    world.grow(R1, first, 3, 1)
    for lease in second:
        world.episode(R1, lease, 1)
    world.send(R1, Release(trajectory_id=first.trajectory_id, epoch=first.epoch, reason="draining", failed=False))
    grade, resumed = world.lease(R2, 2)
    assert (grade.group_id, bool(grade.members)) == (second[0].group_id, True)
    assert resumed.trajectory_id == first.trajectory_id


def test_nobody_grades_a_group_that_another_has() -> None:
    world = comparing(groups_per_batch=1)
    group_id = ended_group(world, 0.0, 0.0)
    lease = to_grade(world, R1)
    for epoch in (lease.epoch, lease.epoch + 1, lease.epoch - 1):
        assert replies(world.send(R2, answer(lease, 9.0, 9.0, epoch=epoch)), LeaseEnded)
    other = Graded(trajectory_id=10**6, epoch=1, rewards=[9.0, 9.0], components=[{}, {}])
    assert replies(world.send(R2, other), LeaseEnded)
    assert group_of(world, group_id) == ("open", [("ended", 0.0), ("leased", 0.0)])
    world.send(R1, answer(lease, 1.0, 2.0))
    assert group_of(world, group_id)[0] == "complete"


def test_a_grade_of_a_group_that_was_dropped_changes_nothing() -> None:
    world = comparing(groups_per_batch=1)
    group_id = ended_group(world, 0.0, 0.0)
    lease = to_grade(world)
    actions = world.publish(5, 0)
    assert [ended.epoch for ended in replies(actions, LeaseEnded)] == [lease.epoch]
    assert group_of(world, group_id)[0] == "dropped"
    assert replies(world.send(R2, answer(lease, 1.0, 2.0)), LeaseEnded)
    assert group_of(world, group_id) == ("dropped", [("ended", 0.0), ("leased", 0.0)])


def test_a_grade_is_renewed_by_heartbeats() -> None:
    world = comparing()
    ended_group(world, 0.0, 0.0)
    lease = to_grade(world)
    for _ in range(4):
        world.tick(world.config.lease_s / 2)
        beat = Heartbeat(policy_version=1, status="serving", leases=[LeaseKey(lease.trajectory_id, lease.epoch)])
        assert replies(world.send(R2, beat), LeaseEnded) == []
    assert replies(world.send(R2, answer(lease, 1.0, 2.0)), LeaseEnded) == []


def test_an_idle_grade_ends_as_a_failed_attempt() -> None:
    world = comparing(idle_lease_s=30.0, max_attempts=1)
    group_id = ended_group(world, 0.0, 0.0)
    lease = to_grade(world)
    for _ in range(8):
        world.tick(5.0)
        beat = Heartbeat(policy_version=1, status="serving", leases=[LeaseKey(lease.trajectory_id, lease.epoch)])
        world.send(R2, beat)
    assert group_of(world, group_id)[0] == "dropped"


@pytest.mark.parametrize(
    ("rewards", "text"),
    [((1.0,), "1 rewards for the 2 trajectories"), ((1.0, 2.0, 3.0), "3 rewards for the 2 trajectories")],
)
def test_rewards_of_another_number_are_a_failed_attempt(rewards: tuple[float, ...], text: str) -> None:
    world = comparing(max_attempts=2)
    group_id = ended_group(world, 0.0, 0.0)
    (refused,) = replies(world.send(R2, answer(to_grade(world), *rewards)), Refused)
    assert text in refused.reason
    assert group_of(world, group_id)[0] == "open", "it is given again"
    world.send(R2, answer(to_grade(world), *rewards))
    assert group_of(world, group_id)[0] == "dropped"
    (line,) = world.lines
    assert (line["event"], line["reason"], line["finished"]) == ("dropped", "failed", [False, False])


def test_components_of_another_number_are_refused() -> None:
    world = comparing()
    ended_group(world, 0.0, 0.0)
    lease = to_grade(world)
    message = Graded(trajectory_id=lease.trajectory_id, epoch=lease.epoch, rewards=[1.0, 2.0], components=[{}])
    (refused,) = replies(world.send(R2, message), Refused)
    assert "1 components for the 2 trajectories" in refused.reason


def test_attempts_of_the_episode_do_not_count_for_the_grade() -> None:
    world = comparing(max_attempts=2)
    first, second = world.lease(R1, 2)
    world.episode(R1, first, 1)
    world.fail(R1, second)
    (again,) = world.lease(R1)
    world.episode(R1, again, 1)
    world.fail(R2, to_grade(world))
    assert group_of(world, first.group_id)[0] == "open"
    world.fail(R2, to_grade(world))
    assert group_of(world, first.group_id)[0] == "dropped"


def test_a_group_reward_that_always_fails_stops_the_run_with_its_reason() -> None:
    world = comparing(max_attempts=1, failure_budget=2, groups_per_batch=8)
    for sender in (R1, R2):  # A rollout alone would be at fault itself.
        ended_group(world, 0.0, 0.0)
        world.fail(sender, to_grade(world, sender))
    assert "2 groups in a row failed (broker.failure_budget)" in world.ledger.state.run.error


def test_nobody_grades_a_group_whose_episodes_are_under_way() -> None:
    world = comparing()
    first, second = world.lease(R1, 2)
    world.episode(R1, first, 1)
    world.grow(R1, second, 3, 1)
    (refused,) = replies(world.send(R1, answer(second, 1.0, 2.0)), Refused)
    assert f"trajectory {second.trajectory_id} of its group has not ended" in refused.reason
    assert group_of(world, first.group_id)[0] == "open"


def test_who_grades_a_group_adds_nothing_to_its_episodes() -> None:
    world = comparing(max_attempts=9)
    ended_group(world, 0.0, 0.0)
    for kind in ("chunk", "chunks", "journal", "finish"):
        lease = to_grade(world)
        more = chunk(lease, 3, 2, 1)
        if kind == "chunk":
            actions = world.send(R2, more)
        elif kind == "chunks":
            actions = world.send_chunks(R2, [replace(more, state=None)])  # A usual one, which is counted in columns.
        elif kind == "journal":
            entry = Journal(trajectory_id=lease.trajectory_id, epoch=lease.epoch, place=0, entry={})
            actions = world.send(R2, entry)
        else:
            actions = world.finish(R2, lease, 3)
        (refused,) = replies(actions, Refused)
        assert "its episode has ended" in refused.reason, kind
    assert world.store.payload(lease.trajectory_id).num_tokens == 3


def test_an_engine_of_an_older_version_grades_and_the_group_stays_as_fresh() -> None:
    world = comparing(max_lag=1, groups_per_batch=1)
    world.request_batch(0, 1)
    for index, version in ((0, 1), (1, 2)):
        ended_group(world, 0.0, 1.0, version=version)
        world.send(R2, answer(to_grade(world, version=1), 0.0, 1.0))
        world.trained(index, version)
        world.publish(version + 1, index + 1)
        world.request_batch(index + 1, version + 1)
    group_id = ended_group(world, 0.0, 1.0, version=3)
    lease = to_grade(world, version=1)
    assert world.ledger.state.groups.oldest_version(group_id) == 3
    assert delivered(world.send(R2, answer(lease, 0.0, 1.0))) == [2]


def test_evaluations_are_not_graded_together() -> None:
    world = comparing(evaluate_every_batches=1, num_eval_tasks=1)
    world.tick(1)
    leases = [lease for lease in world.lease(R1, 4) if lease.split == "eval"]
    for lease in leases:
        world.episode(R1, lease, 1, 0.75)
    world.tick(1)
    (line,) = [line for line in world.lines if line["event"] == "eval"]
    assert line["eval/reward"] == 0.75


def test_a_rollout_that_starts_again_gives_its_grade_back() -> None:
    world = comparing()
    ended_group(world, 0.0, 0.0)
    lost = to_grade(world)
    world.hello(SessionKey(R2.peer, "second"))
    assert to_grade(world, R1).epoch == lost.epoch + 1


def test_the_learner_hears_nothing_of_a_group_before_its_grade() -> None:
    world = comparing(groups_per_batch=1)
    ended_group(world, 0.0, 0.0)
    assert delivered(world.request_batch(0, 1, LEARNER)) == []
    assert "0 of 1 are ready" in str(world.ledger.status(world.now))


BY_HAND = [{"rank": 1.0, "novel": 0.5}, {"rank": 0.25, "novel": 0.0}, {"rank": 0.0, "novel": 1.0}]
WEIGHTS = {"rank": 2.0, "novel": 0.5}


def test_a_groups_rewards_are_weighted_replace_those_alone_and_become_advantages() -> None:
    """2 * 1 + 0.5 * 0.5 = 2.25; 2 * 0.25 = 0.5; 0.5 * 1 = 0.5. Mean 13/12, deviations 7/6, -7/12, -7/12; their squares sum
    to 49/24, so s = sqrt(49/48), and the advantages are 7/6 / s = 2 / sqrt(3) and half of that below 0."""
    rewards = [score_of(components, WEIGHTS).reward for components in BY_HAND]
    assert rewards == [2.25, 0.5, 0.5]
    world = comparing(groups_per_batch=1, group_size=3)
    # Alone the second answer was the best: nothing of that is left.
    ended_group(world, 0.0, 1.0, 0.0)
    world.send(R2, answer(to_grade(world), *rewards))
    rows = world.store.rows(TrajectoryRow, "ORDER BY trajectory_id")
    trained = [sum(row.turn_rewards) for row in rows]
    assert trained == rewards
    advantages = group_advantages(trained, [0, 0, 0]).advantages_M
    assert advantages.tolist() == pytest.approx([2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5], rel=2e-6)


def test_an_order_alone_has_the_advantages_of_ranks() -> None:
    """Ranks 0 to 3 have the mean 3/2 and s = sqrt(5/3): -1.5, -0.5, 0.5 and 1.5, each times sqrt(3/5)."""
    ranks = [score_of(rank, None).reward for rank in (3, 0, 2, 1)]
    advantages = group_advantages(ranks, ["one"] * 4).advantages_M
    assert advantages.tolist() == pytest.approx([each * 0.6**0.5 for each in (1.5, -1.5, 0.5, -0.5)], rel=2e-6)
