"""How long answers are, as metrics.jsonl has it."""

import math

import pytest

from gspo_services.broker.ledger.lengths import length_stats, standard_error
from gspo_services.broker.rows import TrajectoryRow
from tests.support.broker.ledger_training import R1, harness, train_one


def a_row(number: int, num_action_tokens: int, reason: str = "done") -> TrajectoryRow:
    return TrajectoryRow(
        trajectory_id=number, group_id=0, num_tokens=num_action_tokens + 9, num_action_tokens=num_action_tokens,
        version_sum=num_action_tokens, min_version=1, turn_rewards=(1.0,),
        finish_reason="length" if reason == "length" else "done",
    )  # fmt: skip


def test_lengths_count_what_the_policy_sampled_and_not_the_prompt() -> None:
    stats = length_stats([a_row(number, number + 1) for number in range(20)])
    assert (stats.mean, stats.p95, stats.max, stats.cut_off) == (10.5, 19, 20, 0.0)


def test_the_95th_percentile_of_a_few_is_one_of_them() -> None:
    assert length_stats([a_row(0, 7)]).p95 == 7
    assert length_stats([a_row(0, 3), a_row(1, 8)]).p95 == 8


def test_the_share_cut_off_is_that_which_a_limit_ended() -> None:
    assert length_stats([a_row(0, 3), a_row(1, 8, "length"), a_row(2, 8, "length"), a_row(3, 1)]).cut_off == 0.5


def test_a_batchs_line_has_the_lengths_of_its_answers() -> None:
    world = harness(groups_per_batch=1)
    first, second = world.lease(R1, 2, 1)
    for lease, num_tokens in ((first, 4), (second, 6)):
        world.grow(R1, lease, num_tokens, 1)
        world.finish(R1, lease, num_tokens)
    (group,) = world.ledger.state.groups.of_split("train")
    sampled = sorted(row.num_action_tokens for row in world.ledger.state.groups.members(group.group_id))
    assert sampled[0] < sampled[1] < 6
    train_one(world, 0, 1)
    (line,) = world.lines
    assert line["length/mean"] == sum(sampled) / 2
    assert (line["length/max"], line["length/cut_off"]) == (sampled[-1], 0.0)


def test_the_standard_error_is_that_of_the_mean() -> None:
    assert standard_error([0.0, 1.0, 1.0, 0.0]) == pytest.approx(math.sqrt((1.0 / 3.0) / 4.0))
    assert standard_error([0.5]) is None
