"""Levels rise and fall by the solve rate; a restart at any moment changes nothing about it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo.tasks.ladders import Ladder, Rungs
from gspo_protocol.messages import Finish
from gspo_services.broker.ledger import Ledger
from gspo_services.broker.ledger.actions import GrantLease
from gspo_services.broker.rows import LevelRow
from gspo_services.broker.store import Store, rewrite_ledger
from tests.support.broker.ledger import LEARNER, LedgerHarness, chunk, config_with
from tests.support.broker.ledger_training import R1, harness, train_one

SUMS = Ladder(name="sums", last_level=3, num_groups=2, raise_at=0.75, lower_at=0.25)
WORDS = Ladder(name="words", last_level=1, num_groups=1, weight=3.0)
Solve = Callable[[int, int], tuple[float, float]]
"""The rewards of a group's two attempts, by the number of its ladder and its level."""


def climbing(*ladders: Ladder, **changes: Any) -> LedgerHarness:
    return harness(ladders=ladders or (SUMS,), group_size=2, groups_per_batch=1, num_batches=200, **changes)


def sample(world: LedgerHarness, version: int, solve: Solve) -> tuple[int, int]:
    """One group. Returns its ladder and its level."""
    leases = world.lease(R1, 2, version)
    rung = Rungs(world.config.ladders).rung(leases[0].task_index)
    for lease, reward in zip(leases, solve(*rung), strict=True):
        world.episode(R1, lease, version, reward=reward)
    return rung


def play(world: LedgerHarness, number: int, solve: Solve, *, restart_each: bool = False, first: int = 0) -> list[int]:
    """The levels of ``number`` batches of one group each."""
    found = []
    for index in range(first, first + number):
        if restart_each:
            world.restart()
            world.hello(LEARNER, "learner")
            world.hello(R1)
        found.append(sample(world, index + 1, solve)[1])
        train_one(world, index, index + 1)
    return found


def up_to(level: int) -> Solve:
    """Solves levels below ``level``, and none of the others."""
    return lambda _, at: (1.0, 1.0) if at < level else (0.0, 0.0)


def test_a_level_rises_when_enough_of_its_groups_are_solved_and_ends_at_the_last() -> None:
    assert play(climbing(), 9, up_to(9)) == [0, 0, 1, 1, 2, 2, 3, 3, 3]


def test_it_falls_where_hardly_anything_is_solved_and_never_below_the_first() -> None:
    world = climbing(Ladder(name="sums", first_level=1, last_level=3, num_groups=2))
    assert play(world, 6, up_to(9)) == [1, 1, 2, 2, 3, 3]
    assert play(world, 8, up_to(0), first=6) == [3, 3, 2, 2, 1, 1, 1, 1]


def test_a_solve_rate_between_the_two_leaves_the_level_and_judges_anew() -> None:
    world = climbing()
    assert play(world, 4, lambda *_: (1.0, 0.0)) == [0] * 4
    # A half of four groups is solved so far, and all of the next two.
    assert play(world, 3, up_to(9), first=4) == [0, 0, 1]


@pytest.mark.parametrize(("reward", "level"), [(0.99, 0), (1.0, 1), (1.5, 1)])
def test_only_a_full_reward_counts_as_solved(reward: float, level: int) -> None:
    assert play(climbing(), 3, lambda *_: (reward, reward))[-1] == level


def test_a_broker_that_starts_again_for_each_batch_samples_the_same_tasks() -> None:
    once, often = climbing(SUMS, WORDS), climbing(SUMS, WORDS)
    assert play(once, 30, up_to(2)) == play(often, 30, up_to(2), restart_each=True)
    assert once.ledger.state.curriculum.levels() == often.ledger.state.curriculum.levels()
    assert once.store.contents().levels == often.store.contents().levels != ()


def test_ladders_rise_by_themselves_and_are_sampled_by_their_weights() -> None:
    world = climbing(SUMS, WORDS)
    rungs = []
    for index in range(60):
        rungs.append(sample(world, index + 1, lambda ladder, _: (1.0, 1.0) if ladder else (0.0, 0.0)))
        train_one(world, index, index + 1)
    assert world.ledger.state.curriculum.levels() == {"sums": 0, "words": 1}
    assert 36 <= sum(ladder == 1 for ladder, _ in rungs) <= 54, "three in four"


def test_groups_that_began_at_another_level_are_not_counted() -> None:
    world = climbing(Ladder(name="sums", last_level=3, num_groups=1), max_lag=4)
    early, late = world.lease(R1, 2, 1), world.lease(R1, 2, 1)
    for lease in early:
        world.episode(R1, lease, 1, reward=1.0)
    for lease in world.lease(R1, 2, 1):
        world.episode(R1, lease, 1, reward=1.0)
    assert world.ledger.state.curriculum.levels() == {"sums": 2}
    for lease in late:
        world.episode(R1, lease, 1, reward=1.0)
    assert world.store.contents().levels == (LevelRow(ladder=0, level=2),), "it began at level 0"


@pytest.mark.parametrize("restarts", [False, True])
def test_a_group_that_is_delivered_again_is_counted_once(restarts: bool) -> None:
    world = climbing()
    messages = [each for lease in world.lease(R1, 2, 1) for each in (chunk(lease, 0, 3, 1), finish(lease))]
    for seq, message in enumerate(messages):
        world.send(R1, message, seq)
    counted = world.store.contents().levels
    assert counted == (LevelRow(ladder=0, level=0, num_groups=1, solved=1.0),)
    if restarts:
        world.restart()
        world.hello(LEARNER, "learner")
        world.hello(R1)
    for seq, message in enumerate(messages):
        world.send(R1, message, seq)
    for seq, message in enumerate(messages, len(messages)):
        world.send(R1, message, seq)
    assert world.store.contents().levels == counted


def finish(lease: GrantLease) -> Finish:
    return Finish(
        trajectory_id=lease.trajectory_id, epoch=lease.epoch, num_tokens=3, reason="done", turn_rewards=[1.0], components={}
    )


def test_metrics_say_when_a_level_changes_and_what_it_is() -> None:
    world = climbing()
    play(world, 3, up_to(9))
    (change,) = [line for line in world.lines if line["event"] == "level"]
    assert change == {
        "event": "level", "ladder": "sums", "number": 0, "level": 1, "solve_rate": 1.0, "num_groups": 2, "prompt": 2,
        "batch": 1,
    }  # fmt: skip
    assert [line["level/sums"] for line in world.lines if line["event"] == "batch"] == [0, 1, 1]


def test_a_row_of_a_level_that_the_ladder_has_no_more_is_left_out() -> None:
    world = climbing()
    play(world, 7, up_to(9))
    assert world.ledger.state.curriculum.levels() == {"sums": 3}
    world.config = climbing(Ladder(name="sums", last_level=1)).config
    assert world.restored().state.curriculum.levels() == {"sums": 0}


def test_without_ladders_nothing_is_kept() -> None:
    world = harness(group_size=2, groups_per_batch=1, num_batches=9)
    world_tasks = [lease.task_index for lease in world.lease(R1, 2, 1)]
    assert (world_tasks, world.ledger.state.curriculum.levels()) == ([0, 0], {})


def test_a_run_that_is_restored_to_a_batch_has_the_levels_of_that_time(tmp_path: Path) -> None:
    rules = config_with(ladders=(SUMS, WORDS), group_size=2, groups_per_batch=1, num_batches=200)
    world = LedgerHarness(rules, path=tmp_path / "ledger.sqlite3")
    world.hello(LEARNER, "learner")
    world.hello(R1)
    world.publish(1, 0)
    play(world, 4, up_to(9))
    then = world.ledger.state.curriculum.levels()
    play(world, 20, up_to(9), first=4)
    assert then == {"sums": 1, "words": 1} != world.ledger.state.curriculum.levels()
    world.store.close()
    rewrite_ledger(world.path, run_id="restored", rewind_to=(4, 5))
    with Store(world.path, fingerprint="f", run_id="") as store:
        assert Ledger(rules, store.contents(), 0.0).state.curriculum.levels() == then
