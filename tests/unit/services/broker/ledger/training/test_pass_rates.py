"""How a batch's tasks did, by how they did the time before; also after a restart of the broker."""

import math

import pytest
from prometheus_client import CollectorRegistry

from gspo_services.broker.ledger.lengths import DIFFICULTIES, difficulty
from gspo_services.broker.metrics import BrokerMetrics
from tests.support.broker.ledger import LedgerHarness
from tests.support.broker.ledger_training import R1, harness, train_one

NUM_TASKS = 4


def train(world: LedgerHarness, index: int, solved: dict[int, int]) -> dict[str, float]:
    """Two groups of four; ``solved``: how many trajectories of each task pass, the others have no positive reward."""
    passed: dict[int, int] = {}
    for lease in world.lease(R1, 8, index + 1):
        passed[lease.task_index] = passed.get(lease.task_index, 0) + 1
        failed = (-0.5, 0.0)[lease.task_index % 2]
        world.episode(R1, lease, index + 1, 1.0 if passed[lease.task_index] <= solved[lease.task_index] else failed)
    train_one(world, index, index + 1)
    line = [each for each in world.lines if each["event"] == "batch"][-1]
    return {name: value for name, value in line.items() if name.startswith("pass_rate/")}


@pytest.fixture
def world() -> LedgerHarness:
    return harness(group_size=4, num_batches=9, num_train_tasks=NUM_TASKS, max_lag=0)


def test_tasks_are_new_at_first_and_then_as_hard_as_they_were_the_time_before(world: LedgerHarness) -> None:
    first = {0: 0, 1: 1, 2: 2, 3: 4}
    later = {0: 2, 1: 4, 2: 0, 3: 3}
    found = [train(world, index, first if index < 2 else later) for index in range(4)]
    assert [set(each) for each in found[:2]] == [{"pass_rate/new"}] * 2
    assert sum(each["pass_rate/new"] for each in found[:2]) == 7 / 8
    assert found[2] | found[3] == {
        "pass_rate/never": 0.5, "pass_rate/seldom": 1.0, "pass_rate/often": 0.0, "pass_rate/always": 0.75,
    }  # fmt: skip


def test_a_broker_that_restarts_knows_how_tasks_did(world: LedgerHarness) -> None:
    for index in range(3):
        train(world, index, {0: 0, 1: 1, 2: 2, 3: 4})
    known = world.ledger.state.task_passes
    assert known == {0: 0.0, 1: 0.25, 2: 0.5, 3: 1.0}
    assert world.restored().state.task_passes == known


def test_of_tasks_that_never_come_again_nothing_is_kept() -> None:
    world = harness(group_size=4, num_batches=9, max_lag=0)
    assert train(world, 0, {0: 1, 1: 3}) == {"pass_rate/new": 0.5}
    assert world.ledger.state.task_passes == world.restored().state.task_passes == {}


def test_a_difficulty_is_the_share_that_passed() -> None:
    shares = (None, 0.0, 0.01, 0.49, 0.5, 0.99, 1.0)
    assert [difficulty(share) for share in shares] == ["new", "never", "seldom", "seldom", "often", "often", "always"]


def test_the_last_batch_is_exported(world: LedgerHarness) -> None:
    registry = CollectorRegistry()
    metrics = BrokerMetrics(registry)
    names = [("pass_rate_ratio", {"difficulty": name}) for name in DIFFICULTIES]
    names += [("answer_tokens", {"statistic": name}) for name in ("mean", "p95", "longest")]
    names += [("answers_cut_off_ratio", {}), ("sampling_temperature", {}), ("sampling_limit_tokens", {"limit": "sequence"})]

    def exported() -> list[float | None]:
        return [registry.get_sample_value(f"gspo_broker_{name}", labels) for name, labels in names]

    assert all(value is not None and math.isnan(value) for value in exported())
    train(world, 0, dict.fromkeys(range(NUM_TASKS), 1))
    metrics.observe(world.ledger, 0, 0, world.now)
    values = exported()
    assert values[0] == 0.25
    assert all(value is not None and math.isnan(value) for value in values[1:5])
    assert values[5:8] == [2.0, 2.0, 2.0]
    assert values[8:] == [0.0, 1.0, 64.0]
