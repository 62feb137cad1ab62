"""When a rollout may end its turn."""

import asyncio
from collections.abc import Callable

from gspo_services.rollout.turns import TurnTaker
from tests.support.wire.zmq_ends import PATIENCE_S, in_background


class Device:
    """A weight sync that says what it is asked to do."""

    def __init__(self) -> None:
        self.policy_version = 3
        self.loading = False
        self.has_device = True
        self.may_generate = asyncio.Event()
        self.may_generate.set()
        self.asked: list[str] = []
        self.heard = asyncio.Event()

    async def give_up(self, may: Callable[[], bool]) -> None:
        if may():
            self.has_device = False
            self.may_generate.clear()
            self._say("give up")

    async def bring_back(self) -> None:
        self.has_device = True
        self.may_generate.set()
        self._say("bring back")

    def _say(self, what: str) -> None:
        self.asked.append(what)
        self.heard.set()

    async def next(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            await self.heard.wait()
        self.heard.clear()
        return self.asked[-1]


def a_taker(device: Device) -> TurnTaker:
    return TurnTaker(device, look_s=0.001)  # type: ignore[arg-type]


def test_a_turn_ends_when_the_broker_has_nothing_for_a_rollout_without_leases() -> None:
    device = Device()
    taker = a_taker(device)
    assert not taker.may_end(0)
    taker.asked(3, 0)
    assert not taker.may_end(0)
    taker.refused()
    assert taker.may_end(0)
    assert not taker.may_end(1)


def test_a_turn_ends_when_every_broker_that_is_there_has_nothing_for_the_served_version() -> None:
    device, there = Device(), [0, 1]
    taker = TurnTaker(device, look_s=0.001, asks_of=lambda: there)  # type: ignore[arg-type]
    taker.asked(3, 0, 0)
    taker.asked(3, 0, 1)
    taker.refused(1)
    assert not taker.may_end(0)
    there.remove(0)
    assert taker.may_end(0), "broker 0 is away: nobody waits for its word"
    there.append(0)
    taker.refused(0)
    assert taker.may_end(0)
    taker.leased()
    taker.refused(0)
    assert not taker.may_end(0)
    there.clear()
    assert not taker.may_end(0), "nobody has said anything"


def test_a_refusal_with_leases_in_hand_does_not_count_because_they_may_lead_to_more() -> None:
    device = Device()
    taker = a_taker(device)
    taker.asked(3, 1)
    taker.refused()
    assert not taker.may_end(0)


def test_a_refusal_counts_for_the_version_that_asked_and_until_a_lease_comes() -> None:
    device = Device()
    taker = a_taker(device)
    taker.asked(3, 0)
    device.policy_version = 4  # Loaded while the broker answered.
    taker.refused()
    assert not taker.may_end(0)
    taker.asked(4, 0)
    taker.refused()
    taker.leased()
    assert not taker.may_end(0)


def test_an_engine_that_serves_nothing_ends_its_turn_whatever_leases_wait_but_not_while_it_loads() -> None:
    device = Device()
    taker = a_taker(device)
    device.may_generate.clear()
    assert taker.may_end(5)
    device.loading = True
    assert not taker.may_end(5)


def test_an_answer_with_fewer_leases_than_were_asked_for_is_no_refusal() -> None:
    device = Device()
    taker = a_taker(device)
    taker.asked(3, 0)
    taker.leased()
    taker.refused()
    assert not taker.may_end(0)
    taker.asked(3, 0)
    taker.refused()
    assert taker.may_end(0)


async def test_the_turn_is_given_up_and_taken_again_for_a_lease() -> None:
    device = Device()
    taker, running = a_taker(device), [0]
    async with in_background(taker.run(lambda: running[0])):
        taker.asked(3, 0)
        taker.refused()
        assert await device.next() == "give up"
        assert taker.waits
        running[0] = 1
        taker.leased()
        assert await device.next() == "bring back"
        assert not taker.waits
    assert device.asked == ["give up", "bring back"]
