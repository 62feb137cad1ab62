"""When a rollout asks for leases, and for how many."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gspo_services.rollout.broker import Ask, LeaseRequests
from gspo_services.rollout.broker.asking import REQUEST_TIMEOUT_S


def test_the_broker_is_asked_for_all_free_places_and_once_at_a_time() -> None:
    requests = LeaseRequests(8)
    assert requests.ask(0.0, 8) is None
    assert requests.ask(0.0, 3) == Ask(request_id=1, capacity=5)
    assert requests.ask(2.9, 3) is None
    assert requests.ask(REQUEST_TIMEOUT_S, 3) == Ask(request_id=2, capacity=5)
    assert not requests.refused(1, 9.0), "an answer to a request before"
    assert requests.ask(4.0, 3) is None
    assert requests.refused(2, 5.0)
    assert requests.pauses_until(4.0) == 5.0
    assert requests.ask(4.9, 3) is None
    assert requests.ask(5.0, 3) == Ask(request_id=3, capacity=5)
    assert requests.pauses_until(5.0) is None


def test_once_all_leases_have_come_free_places_are_asked_for_at_once() -> None:
    requests = LeaseRequests(2)
    requests.ask(0.0, 0)
    requests.leased()
    assert requests.ask(0.1, 1) is None, "one lease is still to come"
    requests.leased()
    assert requests.ask(0.1, 1) == Ask(request_id=2, capacity=1)


def test_a_handshake_and_a_pause_concern_the_requests_before_them() -> None:
    requests = LeaseRequests(4)
    requests.ask(0.0, 0)
    requests.welcomed()
    assert requests.ask(0.1, 0) == Ask(request_id=2, capacity=4)
    requests.welcomed()
    requests.pause(3.0)
    assert requests.ask(2.9, 0) is None
    requests.welcomed()
    assert requests.ask(2.9, 0) == Ask(request_id=3, capacity=4)


class Asking(RuleBasedStateMachine):
    """A broker that comes and goes, has work or not, and answers when it likes, within the time that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 7
        self.is_there = True
        self.work = self.held = 0
        self.under_way: Ask | None = None
        self.now = self.asked_at = 0.0
        self.requests = LeaseRequests(self.most)

    @rule(number=st.integers(1, 9))
    def more_work(self, number: int) -> None:
        self.work += number

    @rule()
    def goes_away(self) -> None:
        self.is_there = False

    @rule()
    def comes_back(self) -> None:
        """Its former life granted nothing that is still to come."""
        if not self.is_there:
            self.is_there, self.under_way = True, None
            self.requests.welcomed()

    @rule()
    def an_episode_ends(self) -> None:
        self.held -= self.held > 0

    @rule(seconds=st.sampled_from([0.1, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def ask(self) -> None:
        if not self.is_there:
            return
        ask = self.requests.ask(self.now, self.held)
        if ask is not None:
            assert self.under_way is None or self.now - self.asked_at >= REQUEST_TIMEOUT_S
            self.under_way, self.asked_at = ask, self.now

    @rule()
    def answers(self) -> None:
        """With what it has, and that there is no more."""
        ask = self.under_way
        if ask is None or not self.is_there:
            return
        given = min(ask.capacity, self.work)
        self.work -= given
        for _ in range(given):
            self.requests.leased()
            self.held += 1
        if given < ask.capacity:
            assert self.requests.refused(ask.request_id, self.now + 0.5)
        self.under_way = None

    @invariant()
    def no_more_than_there_is_room_for(self) -> None:
        assert self.held <= self.most

    def teardown(self) -> None:
        """Whatever happened: soon no place is empty while the broker has work."""
        self.is_there, self.under_way, self.work = True, None, 2 * self.most
        self.requests.welcomed()
        self.ask()
        self.answers()
        assert self.held == self.most


class TestAsking(Asking.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
