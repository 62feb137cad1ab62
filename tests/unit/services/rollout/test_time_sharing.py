"""When a rollout may give its device back."""

import asyncio
from collections.abc import Callable

from gspo_services.rollout.colocate import TimeSharing
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


def a_sharing(device: Device) -> TimeSharing:
    return TimeSharing(device, look_s=0.001)  # type: ignore[arg-type]


def test_the_device_is_given_back_when_the_broker_has_nothing_for_a_rollout_without_leases() -> None:
    device = Device()
    sharing = a_sharing(device)
    assert not sharing.may_end(0)
    sharing.asked(3, 0)
    assert not sharing.may_end(0)
    sharing.refused()
    assert sharing.may_end(0)
    assert not sharing.may_end(1)


def test_a_refusal_with_leases_in_hand_does_not_count_because_they_may_lead_to_more() -> None:
    device = Device()
    sharing = a_sharing(device)
    sharing.asked(3, 1)
    sharing.refused()
    assert not sharing.may_end(0)


def test_a_refusal_counts_for_the_version_that_asked_and_until_a_lease_comes() -> None:
    device = Device()
    sharing = a_sharing(device)
    sharing.asked(3, 0)
    device.policy_version = 4  # Loaded while the broker answered.
    sharing.refused()
    assert not sharing.may_end(0)
    sharing.asked(4, 0)
    sharing.refused()
    sharing.leased()
    assert not sharing.may_end(0)


def test_an_engine_that_serves_nothing_gives_its_device_back_whatever_leases_wait_but_not_while_it_loads() -> None:
    device = Device()
    sharing = a_sharing(device)
    device.may_generate.clear()
    assert sharing.may_end(5)
    device.loading = True
    assert not sharing.may_end(5)


def test_an_answer_with_fewer_leases_than_were_asked_for_is_no_refusal() -> None:
    device = Device()
    sharing = a_sharing(device)
    sharing.asked(3, 0)
    sharing.leased()
    sharing.refused()
    assert not sharing.may_end(0)
    sharing.asked(3, 0)
    sharing.refused()
    assert sharing.may_end(0)


async def test_the_device_is_given_up_and_taken_again_for_a_lease() -> None:
    device = Device()
    sharing, running = a_sharing(device), [0]
    async with in_background(sharing.run(lambda: running[0])):
        sharing.asked(3, 0)
        sharing.refused()
        assert await device.next() == "give up"
        assert sharing.waits
        running[0] = 1
        sharing.leased()
        assert await device.next() == "bring back"
        assert not sharing.waits
    assert device.asked == ["give up", "bring back"]
