"""What the ledger reports about a run: a batch's line for metrics.jsonl, lag, status."""

from gspo_protocol.limits import MAX_COMPONENTS
from gspo_protocol.messages import Heartbeat, Status, StatusRequest, Trained
from gspo_services.broker.ledger import batch_stats
from gspo_services.broker.rows import TrajectoryRow
from gspo_services.broker.sending import recorded_batch
from tests.support.broker.ledger import LEARNER, replies
from tests.support.broker.ledger_training import OPERATOR, R1, generate, harness, train_one


def test_a_batchs_line_has_the_learners_metrics_and_the_ledgers() -> None:
    world = harness(max_lag=1, num_batches=6)
    world.episode(R1, *(lease for lease in world.lease(R1, 1, 1)), 1, reward=1.0, num_tokens=4)
    for reward in (0.0, 0.5, 0.5):
        (lease,) = world.lease(R1, 1, 1)
        world.episode(R1, lease, 1, reward, num_tokens=2)
    world.request_batch(0, 1)
    metrics = {"loss": float("nan"), "grad_norm": 2.0}
    world.send(LEARNER, Trained(index=0, policy_version=1, metrics=metrics))
    (line,) = world.store.metrics_after(0)
    assert (line["event"], line["batch"], line["policy_version"], line["again"]) == ("batch", 0, 1, False)
    assert (line["train/reward"], line["num_tokens"], line["num_zero_advantage_groups"]) == (0.5, 10, 1)
    assert (line["lag/mean"], line["lag/max"], line["loss"], line["grad_norm"]) == (0.0, 0, None, 2.0)
    world.send(LEARNER, Trained(index=0, policy_version=1, metrics=metrics))
    assert len(world.lines) == 1, "delivered again"
    world.publish(2, 0)
    world.send(LEARNER, Trained(index=0, policy_version=2, metrics=metrics))
    assert [line["again"] for line in world.lines] == [False, True]


def test_lag_is_the_mean_over_action_tokens_and_then_over_trajectories() -> None:
    world = harness(max_lag=1, num_batches=6, groups_per_batch=1)
    leases = world.lease(R1, 4, 1)
    for lease in leases[:2]:
        world.episode(R1, lease, 1)
    world.grow(R1, leases[2], 6, 1)
    train_one(world, 0, 1)
    world.grow(R1, leases[2], 3, 2)
    world.finish(R1, leases[2], 9)
    world.episode(R1, leases[3], 2, num_tokens=2)
    world.request_batch(1, 2)
    stats = world.ledger.state.batches.batch(1).stats  # type: ignore[union-attr]
    assert (stats.mean_lag, stats.max_lag) == ((5 / 8 + 0) / 2, 1)


def test_status_says_how_the_run_stands() -> None:
    world = harness(num_batches=3)
    generate(world, 5, 1, reward=0.5)
    world.now += 7.0
    assert world.ledger.status(world.now)["quiet_s"] == 7.0
    train_one(world, 0, 1)
    world.send(R1, Heartbeat(policy_version=2, status="serving", leases=[]))
    world.now += 1.5
    (answer,) = replies(world.send(OPERATOR, StatusRequest()), Status)
    status = answer.status
    assert (status["batches_trained"], status["batches_assembled"], status["batches_total"]) == (1, 1, 3)
    assert (status["policy_version"], status["train_reward"], status["lag_mean"]) == (2, 0.5, 0.0)
    assert status["groups"] == {"open": 1, "complete": 0, "batched": 2, "dropped": 0, "filtered": 0, "quarantined": 0}
    (rollout,) = status["rollouts"]
    assert (rollout["peer"], rollout["status"], rollout["policy_version"], rollout["silent_s"]) == ("r1", "serving", 2, 1.5)
    assert status["waiting_for"].startswith("2 more complete groups")
    assert (status["finished"], status["error"], status["learner"]) == (False, "", "learner")
    assert status["quiet_s"] == 1.5


def test_the_mean_of_each_component_of_the_rewards_is_a_metric_of_the_batch() -> None:
    world = harness(groups_per_batch=1)
    first, second = world.lease(R1, 2, 1)
    for lease, components in ((first, {"right": 1.0, "format": 0.5}), (second, {"right": 0.0})):
        world.grow(R1, lease, 3, 1)
        world.finish(R1, lease, 3, components=components)
    train_one(world, 0, 1)
    (line,) = world.lines
    assert {name: line[name] for name in line if name.startswith("train/reward/")} == {
        "train/reward/format": 0.5,
        "train/reward/right": 0.5,
    }


def test_the_role_of_each_turn_is_kept_and_goes_with_the_batch() -> None:
    world = harness(groups_per_batch=1)
    for role, lease in enumerate(world.lease(R1, 2, 1)):
        world.grow(R1, lease, 3, 1)
        world.finish(R1, lease, 3, turn_roles=[role])
    world.request_batch(0, 1)
    world.restart()
    _, arrays = recorded_batch(world.store, 0, part_tokens=8).announcement()
    assert arrays["turn_roles"].tolist() == [0, 1]


def test_of_names_that_peers_invent_a_batch_keeps_those_that_most_trajectories_have() -> None:
    rows = [
        TrajectoryRow(
            trajectory_id=number, group_id=0, num_tokens=2, num_action_tokens=1, version_sum=1, min_version=1,
            turn_rewards=(1.0,),
            components={"right": 1.0, **{f"made-up-{number}-{index}": 0.0 for index in range(15)}},
        )
        for number in range(4)
    ]  # fmt: skip
    found = batch_stats(1, [rows]).components
    assert len(found) == MAX_COMPONENTS
    assert found["right"] == 1.0
