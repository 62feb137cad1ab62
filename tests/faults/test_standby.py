"""The leading broker and the primary database are killed at once, under load."""

from pathlib import Path

import pytest

from benchmarks.standby.kills import TAKEOVER_S, measure
from tests.support.postgres.server import programs

pytestmark = pytest.mark.faults


async def test_nothing_acknowledged_is_lost_when_the_leader_and_the_primary_database_are_killed(tmp_path: Path) -> None:
    if programs() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    outcome = await measure(tmp_path, 2)
    assert outcome.acknowledged > 600
    assert (outcome.lost, outcome.failed_attempts, outcome.batches_out_of_order) == (0, 0, 0)
    assert outcome.regenerated_tokens == 0, "rollouts that live keep what is not acknowledged, and send it again"
    assert all(kill.goes_on_s < TAKEOVER_S + 30 for kill in outcome.kills)
