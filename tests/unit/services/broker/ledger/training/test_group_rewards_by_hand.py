"""From what a comparing function returned to the advantages that the loss takes, on numbers that are worked out by hand."""

import pytest

from gspo.advantages import group_advantages
from gspo_services.broker.rows import TrajectoryRow
from gspo_services.tasks.environments import score_of
from tests.unit.services.broker.ledger.training.test_group_rewards import R2, answer, comparing, ended_group, to_grade

FOUND = [{"rank": 1.0, "novel": 0.5}, {"rank": 0.25, "novel": 0.0}, {"rank": 0.0, "novel": 1.0}]
WEIGHTS = {"rank": 2.0, "novel": 0.5}


def test_a_groups_rewards_are_weighted_replace_those_alone_and_become_advantages() -> None:
    """2 * 1 + 0.5 * 0.5 = 2.25; 2 * 0.25 = 0.5; 0.5 * 1 = 0.5. Mean 13/12, deviations 7/6, -7/12, -7/12; their squares sum
    to 49/24, so s = sqrt(49/48), and the advantages are 7/6 / s = 2 / sqrt(3) and half of that below 0."""
    rewards = [score_of(components, WEIGHTS).reward for components in FOUND]
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
