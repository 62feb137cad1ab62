"""How the free places of a rollout are shared among brokers."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gspo_services.rollout.broker import Ask, LeaseRequests
from gspo_services.rollout.broker.asking import REQUEST_TIMEOUT_S


def wanted(asks: Sequence[Ask]) -> dict[int, int]:
    return {ask.broker: ask.capacity for ask in asks}


def any_broker(_: int) -> bool:
    return True


def test_one_broker_is_asked_for_all_free_places_and_once_at_a_time() -> None:
    requests = LeaseRequests(1, 8)
    assert requests.ask(0.0, [3], any_broker) == [Ask(broker=0, request_id=1, capacity=5)]
    assert requests.ask(2.9, [3], any_broker) == []
    assert requests.ask(REQUEST_TIMEOUT_S, [3], any_broker) == [Ask(broker=0, request_id=2, capacity=5)]
    assert not requests.refused(0, 1, 9.0), "an answer to a request before"
    assert requests.ask(4.0, [3], any_broker) == []
    assert requests.refused(0, 2, 5.0)
    assert requests.pauses_until(4.0) == 5.0
    assert requests.ask(4.9, [3], any_broker) == []
    assert requests.ask(5.0, [3], any_broker) == [Ask(broker=0, request_id=3, capacity=5)]
    assert requests.pauses_until(5.0) is None


def test_free_places_are_spread_evenly_and_who_has_fewest_comes_first() -> None:
    assert wanted(LeaseRequests(3, 12).ask(0.0, [0, 0, 0], any_broker)) == {0: 4, 1: 4, 2: 4}
    assert list(wanted(LeaseRequests(3, 12).ask(0.0, [4, 1, 3], any_broker)).items()) == [(1, 3), (2, 1)]
    assert wanted(LeaseRequests(2, 20).ask(0.0, [2, 6], any_broker)) == {0: 8, 1: 4}


def test_what_was_asked_of_one_broker_is_not_asked_of_another() -> None:
    requests = LeaseRequests(2, 10)
    assert wanted(requests.ask(0.0, [0, 0], lambda broker: broker == 0)) == {0: 10}
    assert requests.ask(0.1, [0, 0], any_broker) == []
    for _ in range(4):
        requests.leased(0)
    assert requests.ask(0.2, [4, 0], any_broker) == []
    assert requests.refused(0, 1, 1.0)
    assert wanted(requests.ask(0.3, [4, 0], any_broker)) == {1: 6}


def test_a_broker_without_work_leaves_no_place_empty_and_gets_its_share_back_as_episodes_end() -> None:
    requests = LeaseRequests(2, 8)
    assert wanted(requests.ask(0.0, [0, 0], any_broker)) == {0: 4, 1: 4}
    for _ in range(4):
        requests.leased(0)
    assert requests.refused(1, 1, 1.0)
    assert wanted(requests.ask(0.1, [4, 0], any_broker)) == {0: 4}
    for _ in range(4):
        requests.leased(0)
    assert requests.ask(1.1, [8, 0], any_broker) == []
    assert wanted(requests.ask(1.2, [5, 0], any_broker)) == {1: 3}


def test_with_fewer_places_than_brokers_each_gets_its_turn() -> None:
    requests = LeaseRequests(3, 1)
    served = []
    for round_ in range(6):
        (ask,) = requests.ask(float(round_), [0, 0, 0], any_broker)
        requests.leased(ask.broker)
        served.append(ask.broker)
    assert served == [0, 1, 2, 0, 1, 2]


def test_a_handshake_and_a_pause_concern_the_requests_before_them() -> None:
    requests = LeaseRequests(2, 4)
    requests.ask(0.0, [0, 0], any_broker)
    requests.welcomed(1)
    assert wanted(requests.ask(0.1, [0, 0], any_broker)) == {1: 2}
    requests.welcomed(0)
    requests.welcomed(1)
    requests.pause(3.0)
    assert requests.ask(2.9, [0, 0], any_broker) == []
    requests.welcomed(0)
    assert wanted(requests.ask(2.9, [0, 0], any_broker)) == {0: 4}


class Sharing(RuleBasedStateMachine):
    """A rollout with brokers that come and go, have work or not, and answer when they like."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 7
        self.there = [True, True, True]
        self.work = [0, 0, 0]
        self.held = [0, 0, 0]
        self.under_way: list[list[int]] = [[0, 0, 0], [0, 0, 0]]
        """Of each broker: the capacity and the id of its request."""
        self.now = 0.0
        self.requests = LeaseRequests(3, self.most)

    @rule(broker=st.integers(0, 2), number=st.integers(1, 9))
    def more_work(self, broker: int, number: int) -> None:
        self.work[broker] += number

    @rule(broker=st.integers(0, 2))
    def goes_away(self, broker: int) -> None:
        self.there[broker] = False

    @rule(broker=st.integers(0, 2))
    def comes_back(self, broker: int) -> None:
        """Its former life granted nothing that is still to come."""
        if not self.there[broker]:
            self.there[broker] = True
            self.under_way[0][broker] = 0
            self.requests.welcomed(broker)

    @rule(broker=st.integers(0, 2))
    def an_episode_ends(self, broker: int) -> None:
        self.held[broker] -= self.held[broker] > 0

    @rule(seconds=st.sampled_from([0.1, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def ask(self) -> None:
        asks = self.requests.ask(self.now, self.held, lambda broker: self.there[broker])
        assert [self.held[ask.broker] for ask in asks] == sorted(self.held[ask.broker] for ask in asks)
        for ask in asks:
            assert self.there[ask.broker]
            self.under_way[0][ask.broker], self.under_way[1][ask.broker] = ask.capacity, ask.request_id
        if asks:
            loads = [self.held[ask.broker] + ask.capacity for ask in asks]
            alone = [self.held[ask.broker] for ask in asks]
            assert max(loads) - min(loads) <= max(1, max(alone) - min(loads)), "the places are spread evenly"

    @rule(broker=st.integers(0, 2))
    def answers(self, broker: int) -> None:
        """With what it has, and that there is no more."""
        capacity, request_id = self.under_way[0][broker], self.under_way[1][broker]
        if not capacity or not self.there[broker]:
            return
        given = min(capacity, self.work[broker])
        self.work[broker] -= given
        for _ in range(given):
            self.requests.leased(broker)
            self.held[broker] += 1
        if given < capacity:
            assert self.requests.refused(broker, request_id, self.now + 0.5)
        self.under_way[0][broker] = 0

    @invariant()
    def no_more_than_there_is_room_for(self) -> None:
        assert sum(self.held) <= self.most

    def teardown(self) -> None:
        """Whatever happened: soon all places are taken by those that have work, evenly as far as they end."""
        self.there = [True, True, True]
        self.work = [2 * self.most] * 3
        self.under_way[0] = [0, 0, 0]
        for broker in range(3):
            self.requests.welcomed(broker)
        self.settle()
        assert sum(self.held) == self.most
        for _ in range(2 * self.most):
            most = max(range(3), key=lambda broker: self.held[broker])
            self.held[most] -= 1
            self.settle()
        assert sorted(self.held) == [2, 2, 3], "each has its share"
        self.work = [0, 0, self.most]
        self.held[0] = self.held[1] = 0
        self.settle()
        assert self.held == [0, 0, self.most], "a place is empty while a broker has work"

    def settle(self) -> None:
        for _ in range(3):
            self.ask()
            for broker in range(3):
                self.answers(broker)
            self.now += 0.01
        self.now += 1.0


class TestSharing(Sharing.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("most", [1, 2, 5, 64])
def test_whatever_is_asked_fits(most: int) -> None:
    requests = LeaseRequests(4, most)
    assert sum(wanted(requests.ask(0.0, [0] * 4, any_broker)).values()) == most
