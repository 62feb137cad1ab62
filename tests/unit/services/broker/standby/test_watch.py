"""When a standby takes over, in time that a test makes."""

from gspo_services.broker.standby import LeaderWatch


def looks(watch: LeaderWatch, seconds: list[float], renewals: int, released: bool = False) -> list[bool]:
    return [watch.may_take(1, renewals, released, now) for now in seconds]


def test_a_leader_that_renews_is_left_alone_and_one_that_does_not_is_replaced_after_its_time() -> None:
    watch = LeaderWatch(3.0)
    assert [watch.may_take(1, renewals, False, 100.0 + renewals) for renewals in range(20)] == [False] * 20
    assert looks(watch, [119.5, 120.5, 121.5, 122.0, 122.5], 19) == [False, False, False, True, True]


def test_one_that_renewed_at_the_last_moment_has_all_its_time_again() -> None:
    watch = LeaderWatch(3.0)
    assert looks(watch, [100.0, 101.0, 102.0], 4) == [False] * 3
    assert looks(watch, [102.5, 103.5, 104.5, 105.5], 5) == [False, False, False, True]


def test_another_leader_with_as_many_renewals_is_another_one() -> None:
    watch = LeaderWatch(2.0)
    assert [watch.may_take(1, 7, False, now) for now in (0.0, 1.0)] == [False, False]
    assert [watch.may_take(2, 7, False, now) for now in (2.0, 3.0, 4.0)] == [False, False, True]


def test_a_place_that_was_given_up_is_free_at_once() -> None:
    assert looks(LeaderWatch(600.0), [5.0], 3, released=True) == [True]


def test_a_database_that_was_away_counts_as_one_look() -> None:
    """The leader could not renew then either."""
    watch = LeaderWatch(3.0)
    assert looks(watch, [100.0, 160.0, 161.0, 161.5, 162.0], 1) == [False, False, False, False, True]
