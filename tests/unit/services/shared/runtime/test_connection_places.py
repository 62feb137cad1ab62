"""Which connection makes room for a new one."""

from gspo_services.shared.runtime.connection_places import ConnectionPlaces, source_of


def test_the_connection_that_waits_longest_makes_room_and_none_that_is_worked_for() -> None:
    places = ConnectionPlaces[int](2)
    assert [places.come(1, "a"), places.come(2, "a")] == [None, None]
    places.work(1)
    assert places.come(3, "a") == 2
    places.wait(1)
    assert [places.come(4, "a"), places.come(5, "a")] == [3, 1]
    places.work(4)
    places.work(5)
    assert places.come(6, "a") == 6, "all are worked for: the new one has no place"
    places.gone(4)
    assert places.come(7, "a") is None


def test_a_source_with_many_closes_its_own() -> None:
    places = ConnectionPlaces[int](3)
    places.come(1, "honest")
    assert [places.come(each, "loud") for each in (2, 3, 4, 5)] == [None, None, 2, 3]
    assert places.come(6, "other") == 4
    places.wait(99)
    places.gone(99)


def test_a_host_with_a_network_of_its_own_is_one_source() -> None:
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:1") != source_of("2001:db8:0:1::1")
    assert source_of("fe80::1%eth0") == source_of("fe80::2%eth0")
    assert source_of("10.0.0.1") != source_of("10.0.0.2")
    assert source_of("") == ""
