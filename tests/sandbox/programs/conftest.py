"""A sandbox for programs that are scored."""

from collections.abc import AsyncIterator

import pytest

from gspo_services.tasks.environments import RewardPool
from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes
from tests.sandbox.programs.scoring import Scoring


@pytest.fixture
async def scoring() -> AsyncIterator[Scoring]:
    async with (
        LocalSandboxes(LocalOptions(max_sandboxes=2, warm=0)).opened() as sandboxes,
        RewardPool(sandboxes=sandboxes) as pool,
    ):
        yield Scoring(pool)
