"""The HPA's algorithm against cases computed by hand from Kubernetes' documentation."""

import pytest

from benchmarks.autoscaling.hpa import Autoscaler, Behavior, Policy, Rules, deployed

AT_ONCE = Rules(stabilization_s=0, policies=(Policy(kind="Percent", value=1000, period_s=15),))
ALL_AT_ONCE = Rules(stabilization_s=0, policies=(Policy(kind="Percent", value=100, period_s=15),))
FREE = Behavior(max_replicas=1000, out=AT_ONCE, back=ALL_AT_ONCE)


def syncs(
    behavior: Behavior, replicas: int, metrics: list[float | None], every_s: float = 15.0, target: float = 1.0
) -> list[int]:
    """The number of replicas after each sync."""
    autoscaler = Autoscaler(behavior)
    after = []
    for index, metric in enumerate(metrics):
        replicas = autoscaler.sync(index * every_s, metric, replicas, target)
        after.append(replicas)
    return after


def test_twice_the_target_doubles_and_half_of_it_halves_the_replicas() -> None:
    # "if the current metric value is 200m, and the desired value is 100m, the number of replicas will be doubled": over ten
    # pods that is a total of 2.0, and half of the target one of 0.5.
    assert syncs(FREE, 10, [2.0], target=0.1) == [20]
    assert syncs(FREE, 10, [0.5], target=0.1) == [5]


@pytest.mark.parametrize(
    ("metric", "replicas"), [(11.0, 10), (9.0, 10), (11.01, 12), (8.99, 9), (10.5, 10), (21.5, 22), (4.2, 5)]
)
def test_within_a_tenth_nothing_happens_and_beyond_it_is_rounded_up(metric: float, replicas: int) -> None:
    assert syncs(FREE, 10, [metric]) == [replicas]


def test_of_80_replicas_the_documentations_policies_remove_8_then_8_and_below_40_4_at_a_time() -> None:
    rules = Rules(
        stabilization_s=0,
        policies=(Policy(kind="Pods", value=4, period_s=60), Policy(kind="Percent", value=10, period_s=60)),
    )
    after = syncs(Behavior(max_replicas=100, back=rules), 80, [10.0] * 14, every_s=60.0)
    # 72 - 7.2 is rounded towards removing: 8; then 10 % of 64, 57, 51, 45, 40 are 7 (6.4), 6 (5.7), 6 (5.1), 5 (4.5), 4.
    assert after == [72, 64, 57, 51, 45, 40, 36, 32, 28, 24, 20, 16, 12, 10]


def test_a_percentage_is_rounded_up_on_the_way_out() -> None:
    rules = Rules(stabilization_s=0, policies=(Policy(kind="Percent", value=10, period_s=60),))
    assert syncs(Behavior(max_replicas=100, out=rules), 25, [90.0, 90.0], every_s=60.0) == [28, 31]


def test_select_min_takes_the_policy_that_allows_less() -> None:
    policies = (Policy(kind="Percent", value=10, period_s=60), Policy(kind="Pods", value=5, period_s=60))
    rules = Rules(stabilization_s=0, policies=policies, select="Min")
    assert syncs(Behavior(max_replicas=100, back=rules), 100, [1.0, 1.0], every_s=60.0) == [95, 90]
    out = Behavior(max_replicas=1000, out=rules)
    assert syncs(out, 100, [900.0, 900.0], every_s=60.0) == [105, 110]


def test_a_disabled_direction_does_nothing() -> None:
    off = Rules(stabilization_s=0, policies=(Policy(kind="Percent", value=100, period_s=15),), select="Disabled")
    assert syncs(Behavior(max_replicas=100, back=off), 50, [5.0] * 3) == [50, 50, 50]
    assert syncs(Behavior(max_replicas=100, out=off), 50, [90.0] * 3) == [50, 50, 50]


def test_by_default_it_adds_4_or_100_per_cent_every_15_seconds() -> None:
    assert syncs(Behavior(max_replicas=100), 1, [100.0] * 6) == [5, 10, 20, 40, 80, 100]


def test_a_policys_period_counts_what_was_done_within_it() -> None:
    rules = Rules(stabilization_s=0, policies=(Policy(kind="Percent", value=100, period_s=60),))
    # Doubled at 0 s; the change leaves the period at 60 s, and not before.
    assert syncs(Behavior(max_replicas=100, out=rules), 4, [100.0] * 9) == [8, 8, 8, 8, 16, 16, 16, 16, 32]


def test_what_was_removed_may_come_back_within_the_period() -> None:
    rules = Rules(stabilization_s=0, policies=(Policy(kind="Pods", value=2, period_s=60),))
    behavior = Behavior(max_replicas=100, out=rules, back=ALL_AT_ONCE)
    # 10 -> 4 at once; the period began with 10, so up to 12 is allowed.
    assert syncs(behavior, 10, [4.0, 50.0]) == [4, 12]


def test_it_goes_in_to_the_most_that_was_wanted_in_the_window() -> None:
    rules = Rules(stabilization_s=60, policies=(Policy(kind="Percent", value=100, period_s=15),))
    behavior = Behavior(max_replicas=100, out=AT_ONCE, back=rules)
    # 8 was wanted at 15 s and counts until 75 s; the 10 replicas of the beginning count until 60 s.
    assert syncs(behavior, 10, [5.0, 8.0, 5.0, 5.0, 5.0, 5.0, 5.0]) == [10, 10, 10, 10, 8, 5, 5]


def test_it_goes_out_to_the_least_that_was_wanted_in_the_window() -> None:
    rules = Rules(stabilization_s=45, policies=(Policy(kind="Percent", value=1000, period_s=15),))
    behavior = Behavior(max_replicas=100, out=rules, back=ALL_AT_ONCE)
    assert syncs(behavior, 10, [30.0, 20.0, 30.0, 30.0, 30.0]) == [10, 10, 10, 20, 30]


def test_the_bounds_are_kept_and_come_back_to() -> None:
    behavior = Behavior(min_replicas=3, max_replicas=12, out=AT_ONCE, back=ALL_AT_ONCE)
    assert syncs(behavior, 10, [40.0, 1.0]) == [12, 3]
    assert syncs(behavior, 2, [2.0]) == [3]
    assert syncs(behavior, 20, [20.0]) == [12]


def test_a_metric_that_cannot_be_read_changes_nothing_and_is_not_remembered() -> None:
    rules = Rules(stabilization_s=60, policies=(Policy(kind="Percent", value=100, period_s=15),))
    behavior = Behavior(max_replicas=100, out=AT_ONCE, back=rules)
    assert syncs(behavior, 10, [5.0, None, None, None, 5.0]) == [10, 10, 10, 10, 5]
    assert syncs(FREE, 10, [None, None, 5.0]) == [10, 10, 5]


def test_no_replicas_mean_that_autoscaling_is_off() -> None:
    with pytest.raises(ValueError, match="replicas is 0"):
        Autoscaler(FREE).sync(0.0, 1.0, 0)


def test_the_manifest_is_read_as_it_stands() -> None:
    behavior = deployed(100)
    assert (behavior.min_replicas, behavior.max_replicas) == (1, 100)
    assert behavior.out.select == behavior.back.select == "Max"
    assert behavior.back.stabilization_s > behavior.out.stabilization_s
    assert {policy.kind for policy in behavior.out.policies} == {"Percent", "Pods"}
