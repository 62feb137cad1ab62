"""A sandbox for programs that are scored."""

from collections.abc import AsyncIterator

import pytest

from gspo_services.tasks.environments import RewardPool
from gspo_services.tasks.sandbox import LocalOptions, LocalSandbox
from tests.sandbox.programs.scoring import Scoring


@pytest.fixture
async def scoring() -> AsyncIterator[Scoring]:
    async with LocalSandbox(LocalOptions(places=2, spare=0)).opened() as sandbox, RewardPool(sandbox=sandbox) as pool:
        yield Scoring(pool)
