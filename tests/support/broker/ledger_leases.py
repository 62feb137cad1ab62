"""A ledger from the rollouts' side: two rollouts, and a learner that has published."""

from typing import Any

from gspo_services.broker.ledger.actions import SessionKey
from tests.support.broker.ledger import LEARNER, LedgerHarness, config_with

R1 = SessionKey("r1", "a")
R2 = SessionKey("r2", "a")


def harness(version: int = 1, **changes: Any) -> LedgerHarness:
    """Two rollouts and a learner that has published ``version``."""
    made = LedgerHarness(config_with(**changes))
    made.hello(LEARNER, "learner")
    made.hello(R1)
    made.hello(R2)
    for number in range(1, version + 1):
        made.publish(number, 0)
    return made


def tokens_at(world: LedgerHarness, trajectory_id: int) -> list[int]:
    """What is on disk of a trajectory."""
    return [int(token) for token in world.store.payload(trajectory_id).token_ids]
