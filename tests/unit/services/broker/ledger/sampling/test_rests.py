"""Tasks that are always or never solved rest, and come back; a restart changes nothing about it."""

from typing import Any

from gspo_services.broker.ledger import SamplingRules
from gspo_services.broker.ledger.sampling import Rests
from gspo_services.broker.rows import GroupRow, TaskRow
from tests.support.broker.ledger import LEARNER, LedgerHarness
from tests.support.broker.ledger_training import R1, harness, train_one


def resting(after: int = 2, batches: int = 2, max_filtered: int = 0, **changes: Any) -> LedgerHarness:
    rules = SamplingRules(max_filtered=max_filtered, rest_after_groups=after, rest_batches=batches)
    return harness(sampling=rules, num_train_tasks=3, group_size=2, groups_per_batch=1, num_batches=60, **changes)


def sample(world: LedgerHarness, version: int, solved: set[int]) -> int:
    """One group; the tasks in ``solved`` have zero advantage. Returns its task."""
    leases = world.lease(R1, 2, version)
    for place, lease in enumerate(leases):
        world.episode(R1, lease, version, reward=1.0 if lease.task_index in solved else float(place))
    return leases[0].task_index


def play(world: LedgerHarness, first: int, number: int, solved: set[int], *, restart_each: bool = False) -> list[int]:
    """The tasks of batches ``first`` and those after it."""
    found = []
    for index in range(first, first + number):
        if restart_each:
            world.restart()
            world.hello(LEARNER, "learner")
            world.hello(R1)
        found.append(sample(world, index + 1, solved))
        train_one(world, index, index + 1)
    return found


def test_a_task_rests_after_groups_without_signal_in_a_row_and_comes_back() -> None:
    rests = Rests((), after_groups=2, num_batches=3)
    assert rests.judge(7, 0, has_advantage=False) == [TaskRow(task_index=7, num_zero_advantage=1)]
    assert rests.judge(7, 4, has_advantage=True) == [TaskRow(task_index=7)], "not in a row"
    rests.judge(7, 5, has_advantage=False)
    assert rests.judge(7, 6, has_advantage=False) == [TaskRow(task_index=7, rests_until=9)]
    assert [rests.num_resting(batch) for batch in (8, 9)] == [1, 0]
    assert rests.judge(8, 6, has_advantage=True) == [], "nothing is kept of tasks that are as they should be"


def test_without_the_setting_nothing_rests_and_nothing_is_kept() -> None:
    rests = Rests([TaskRow(task_index=1, rests_until=99)], after_groups=0, num_batches=3)
    assert (rests.judge(1, 0, has_advantage=False), rests.rests_until(1), rests.num_resting(0)) == ([], 0, 0)


def test_a_task_that_rests_is_passed_over_until_enough_batches_are_assembled() -> None:
    world = resting(after=1, batches=4)
    tasks = play(world, 0, 12, solved={1})
    first = tasks.index(1)
    assert 1 not in tasks[first + 1 : first + 5]
    assert 1 in tasks[first + 5 :], "it comes back"
    assert set(tasks[first + 1 : first + 5]) == {0, 2}
    assert world.ledger.state.run.num_passed_over > 0
    prompts = [row.prompt for row in world.store.rows(GroupRow, "ORDER BY group_id")]
    assert prompts == list(range(12)), "prompts stay dense"


def test_a_broker_that_starts_again_for_each_batch_samples_the_same_tasks() -> None:
    once, often = resting(after=2, batches=3), resting(after=2, batches=3)
    assert play(once, 0, 20, {0, 1}) == play(often, 0, 20, {0, 1}, restart_each=True)


def test_when_all_tasks_rest_the_one_that_is_back_first_is_sampled() -> None:
    world = resting(after=1, batches=50)
    tasks = play(world, 0, 6, solved={0, 1, 2})
    assert sorted(tasks[:3]) == [0, 1, 2]
    assert tasks[3] == tasks[0]
    assert tasks[4] == tasks[1]


def test_what_dynamic_sampling_leaves_out_rests_too() -> None:
    world = resting(after=1, batches=5, max_filtered=1)
    silent = sample(world, 1, solved={0, 1, 2})
    assert world.ledger.state.num_filtered_groups == 1
    assert silent not in [sample(world, 1, solved=set()) for _ in range(1)]
    train_one(world, 0, 1)
    assert world.lines[-1]["num_resting_tasks"] == 1
