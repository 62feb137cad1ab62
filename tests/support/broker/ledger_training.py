"""A ledger from the learner's side: one rollout, a learner that has published version 1, an operator."""

from typing import Any

from gspo_services.broker.ledger.actions import Action, GrantLease, SessionKey
from tests.support.broker.ledger import LEARNER, LedgerHarness, config_with, delivered

R1 = SessionKey("r1", "a")
OPERATOR = SessionKey("operator", "a")


def harness(**changes: Any) -> LedgerHarness:
    """One rollout, a learner that has published version 1, an operator."""
    made = LedgerHarness(config_with(**changes))
    made.hello(LEARNER, "learner")
    made.hello(R1)
    made.hello(OPERATOR, "operator")
    made.publish(1, 0)
    return made


def generate(world: LedgerHarness, num_trajectories: int, version: int, reward: float = 1.0) -> list[GrantLease]:
    """``num_trajectories`` whole episodes."""
    leases = world.lease(R1, num_trajectories, version)
    for lease in leases:
        world.episode(R1, lease, version, reward)
    return leases


def train_one(world: LedgerHarness, index: int, version: int) -> list[Action]:
    """Request, train, publish: one step of the learner."""
    actions = world.request_batch(index, version)
    assert delivered(actions) == [index]
    world.trained(index, version)
    return world.publish(version + 1, index + 1)


def group_ids(world: LedgerHarness, index: int) -> tuple[int, ...]:
    """The groups of a recorded batch."""
    return world.store.batch(index)[0].group_ids
