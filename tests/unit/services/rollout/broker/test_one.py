"""The only broker of a run, as a rollout sees it."""

from gspo_services.rollout.broker.one import EveryBeat, NewestVersion


def test_what_the_broker_says_last_counts_whatever_is_served() -> None:
    versions = NewestVersion()
    assert versions.common == (0, "")
    versions.announced(0, 4, "tcp://a:1")
    assert versions.common == (4, "tcp://a:1")
    versions.announced(0, 3, "tcp://b:1")
    assert versions.common == (3, "tcp://b:1")
    assert versions.may_have(0, 9)
    assert versions.waits == ""


def test_the_broker_hears_every_beat() -> None:
    beats = EveryBeat(0.5)
    assert [beats.next() for _ in range(3)] == [[0], [0], [0]]
    assert beats.heartbeat_s == 0.5
