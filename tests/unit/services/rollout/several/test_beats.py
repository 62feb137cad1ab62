"""Each of several brokers hears a rollout often enough, and no more often than that."""

from collections import Counter

import pytest

from gspo_services.rollout.several import BeatsInTurn


@pytest.mark.parametrize(
    ("num_brokers", "lease_s", "interval_s"),
    [
        (2, 15.0, 2.0),
        (3, 15.0, 3.0),
        (4, 15.0, 3.0),
        (64, 60.0, 3.0),
        (4, 10.0, 2.0),
        (4, 4.0, 1.0),
        (4, 1.0, 1.0),
    ],
    ids=str,
)
def test_each_broker_hears_a_beat_within_the_interval(num_brokers: int, lease_s: float, interval_s: float) -> None:
    beats = BeatsInTurn(num_brokers, lease_s=lease_s)
    assert beats.interval_s == interval_s
    rounds = [beats.next() for _ in range(12)]
    for first in range(12 - int(interval_s) + 1):
        heard = Counter(broker for due in rounds[first : first + int(interval_s)] for broker in due)
        assert heard == dict.fromkeys(range(num_brokers), 1)


def test_a_beat_goes_to_no_more_brokers_than_their_share() -> None:
    beats = BeatsInTurn(6, lease_s=15.0)
    assert [len(beats.next()) for _ in range(9)] == [2] * 9


def test_the_interval_is_whole_beats() -> None:
    assert BeatsInTurn(4, lease_s=15.0, heartbeat_s=0.9).interval_s == pytest.approx(2.7)
