"""What the ledger does for one message does not grow with the fleet: counted in steps of the interpreter, not in seconds."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from gspo_protocol.messages import Goodbye, Heartbeat, LeaseKey
from gspo_services.broker.ledger import GrantLease, SessionKey
from tests.support.broker.ledger import LEARNER, LedgerHarness, config_with

FEW, MANY = 8, 64
EPISODES = 4
GROUP_SIZE = 2


class SmallFleet:
    """Rollouts with EPISODES leases each, and a learner that waits for a batch."""

    def __init__(self, rollouts: int) -> None:
        groups = rollouts * EPISODES // GROUP_SIZE + 4
        self.world = LedgerHarness(config_with(group_size=GROUP_SIZE, groups_per_batch=groups, max_lag=1, num_batches=100))
        self.world.hello(LEARNER, "learner")
        self.world.publish(1, 0)
        self.leases: dict[SessionKey, list[GrantLease]] = {}
        for number in range(rollouts):
            sender = SessionKey(f"rollout-{number}", "s")
            self.world.hello(sender)
            self.leases[sender] = self.world.lease(sender, EPISODES)
            assert len(self.leases[sender]) == EPISODES
        self.world.request_batch(0, 1)

    def says_hello(self) -> None:
        self.world.hello(SessionKey("rollout-0", "s"))

    def comes_back(self) -> None:
        self.world.hello(SessionKey("rollout-0", "another life"))

    def joins_and_asks(self) -> None:
        self.world.hello(SessionKey("new", "s"))
        assert len(self.world.lease(SessionKey("new", "s"), 1)) == 1

    def before_asks_when_all_is_free(self) -> None:
        for sender in self.leases:
            self.world.send(sender, Goodbye())
        self.world.hello(SessionKey("new", "s"))

    def asks_when_all_is_free(self) -> None:
        assert len(self.world.lease(SessionKey("new", "s"), 1)) == 1

    def beats(self) -> None:
        sender, leases = next(iter(self.leases.items()))
        keys = [LeaseKey(each.trajectory_id, each.epoch) for each in leases]
        self.world.send(sender, Heartbeat(policy_version=1, status="serving", leases=keys))

    def waits(self) -> None:
        self.world.tick(0.25)

    def finishes(self) -> None:
        sender, leases = next(iter(self.leases.items()))
        self.world.episode(sender, leases[0], 1)

    def leaves(self) -> None:
        self.world.send(SessionKey("rollout-0", "s"), Goodbye())


def steps_of(action: Callable[[], Any]) -> int:
    """Instructions of the interpreter in ``action``, apart from those of built-in functions."""
    number = 0

    def tracer(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal number
        # From 3.13 on only a frame that has a tracer can ask for its instructions.
        frame.f_trace = tracer
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        number += event == "opcode"
        return tracer

    former = sys.gettrace()
    # 3.12 tells of instructions only if a frame has asked for them before.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(tracer)
    try:
        action()
    finally:
        sys.settrace(former)
    return number


def steps_in_a_fleet(rollouts: int, name: str) -> int:
    """Steps of one action, after what comes before it."""
    fleet = SmallFleet(rollouts)
    getattr(fleet, f"before_{name}", lambda: None)()
    return steps_of(getattr(fleet, name))


@pytest.mark.parametrize(
    "name",
    ["says_hello", "comes_back", "joins_and_asks", "asks_when_all_is_free", "beats", "waits", "finishes", "leaves"],
)
def test_what_one_rollout_does_costs_about_the_same_in_a_fleet_eight_times_as_large(name: str) -> None:
    few, many = (steps_in_a_fleet(rollouts, name) for rollouts in (FEW, MANY))
    assert many < 1.6 * few, f"{few} steps with {FEW} rollouts, {many} with {MANY}"
