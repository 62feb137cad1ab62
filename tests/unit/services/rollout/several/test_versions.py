"""Which version a rollout may move to, when each broker says what it knows."""

from gspo_services.rollout.several import AnnouncedVersions
from gspo_services.rollout.several.versions import KEPT


def test_a_version_counts_when_every_broker_that_has_spoken_knows_it() -> None:
    versions = AnnouncedVersions(3)
    versions.announced(0, 5, "tcp://a:5")
    assert versions.common == (5, "tcp://a:5")
    versions.announced(2, 4, "tcp://a:4")
    assert versions.common == (0, ""), "broker 0 need not know 4"
    assert versions.waits == "no version that all brokers know yet: broker 0 has 5, broker 2 has 4"
    versions.announced(2, 5, "tcp://a:5")
    assert versions.common == (5, "tcp://a:5")
    assert versions.waits == ""
    versions.announced(0, 6, "tcp://a:6")
    assert versions.common == (5, "tcp://a:5"), "broker 2 is silent, and has not heard of 6"
    versions.announced(2, 6, "tcp://a:6")
    assert versions.common == (6, "tcp://a:6")
    versions.announced(1, 0, "")
    assert versions.common == (0, ""), "broker 1 knows none yet"
    assert versions.waits.endswith("broker 0 has 6, broker 1 has none, broker 2 has 6")


def test_a_version_in_whose_place_another_was_made_is_no_version_of_the_broker_that_knows_only_the_other() -> None:
    versions = AnnouncedVersions(2)
    for broker, version in ((0, 5), (1, 5), (1, 6), (0, 7)):
        versions.announced(broker, version, f"tcp://a:{version}")
    assert versions.common == (5, "tcp://a:5"), "broker 0 has never heard of 6"
    assert [versions.may_have(broker, 6) for broker in (0, 1)] == [False, True]
    versions.announced(1, 7, "tcp://a:7")
    assert versions.common == (7, "tcp://a:7")


def test_what_is_remembered_of_a_broker_is_bounded_and_is_the_newest() -> None:
    versions = AnnouncedVersions(2)
    for version in range(1, 2 * KEPT):
        versions.announced(0, version, "tcp://a:1")
    assert [versions.may_have(0, version) for version in (KEPT - 1, KEPT, 2 * KEPT - 1)] == [False, True, True]


def test_a_broker_that_is_behind_takes_nothing_of_a_newer_version() -> None:
    versions = AnnouncedVersions(2)
    versions.announced(0, 5, "tcp://a:5")
    assert (versions.may_have(0, 5), versions.may_have(0, 6), versions.may_have(1, 1)) == (True, False, False)
    versions.announced(1, 4, "tcp://a:4")
    assert (versions.may_have(1, 4), versions.may_have(1, 5)) == (True, False)
    versions.announced(1, 5, "tcp://a:5")
    assert versions.may_have(1, 5)


def test_where_brokers_name_several_places_for_a_version_the_latest_news_count_and_repeating_is_no_news() -> None:
    versions = AnnouncedVersions(2)
    versions.announced(0, 5, "tcp://before:5")
    versions.announced(1, 5, "tcp://before:5")
    versions.announced(1, 5, "tcp://moved:5")
    versions.announced(0, 5, "tcp://before:5")
    assert versions.common == (5, "tcp://moved:5")
    versions.announced(0, 5, "tcp://moved:5")
    assert versions.common == (5, "tcp://moved:5")
