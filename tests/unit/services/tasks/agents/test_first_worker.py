"""The start of workers: what may pass is tried again, and what will not is said at once."""

import asyncio
from pathlib import Path

import pytest

from gspo_services.rollout.agents import open_solver
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError, flatten
from gspo_services.shared.settings.configuration import validated
from tests.support.agent_pools import agent_pool, agent_task

KILLED = "tests.support.killed_agent:solve"


@pytest.fixture
def kills(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Counts the workers that are still to be killed: two, or the parameter."""
    path = tmp_path / "kills"
    path.write_bytes(b"x" * getattr(request, "param", 2))
    return path


@pytest.mark.parametrize("kills", [1], indirect=True)
async def test_a_worker_that_is_killed_while_it_starts_is_started_again(kills: Path) -> None:
    async with agent_pool(KILLED, environment={"KILLS": str(kills)}) as pool:
        assert await pool.first_worker() is None
        assert (await pool.solve(agent_task("any"))).reward == 1.0


async def test_workers_that_are_killed_again_and_again_prove_nothing(kills: Path) -> None:
    async with agent_pool(KILLED, environment={"KILLS": str(kills)}) as pool:
        unusable = await pool.first_worker()
    assert unusable is not None
    assert ("SIGKILL" in unusable.detail, unusable.is_proven) == (True, False)


@pytest.mark.parametrize("is_alone", [False, True], ids=["shared", "alone"])
async def test_a_later_worker_that_is_killed_while_it_starts_costs_its_episodes_nothing(kills: Path, is_alone: bool) -> None:
    async with agent_pool(KILLED, environment={"KILLS": str(kills)}, num_workers=2) as pool:
        # All of the first two workers' episodes move on, and none of them is to blame.
        results = await asyncio.gather(*(pool.solve(agent_task("any"), is_alone=is_alone) for _ in range(3)))
    assert [(result.reward, result.detail) for result in results] == [(1.0, "")] * 3


@pytest.mark.parametrize("kills", [3], indirect=True)
async def test_an_episode_for_which_no_worker_starts_says_so(kills: Path) -> None:
    async with agent_pool(KILLED, environment={"KILLS": str(kills)}) as pool:
        result = await pool.solve(agent_task("any"))
        assert (result.failure, result.in_company, "SIGKILL" in result.detail) == ("no_worker", False, True), result.detail
        assert (await pool.solve(agent_task("any"))).reward == 1.0


async def test_a_function_that_two_workers_cannot_import_is_proven_to_be_unusable() -> None:
    async with agent_pool("tests.support.unimportable_agent:solve") as pool:
        unusable = await pool.first_worker()
    assert unusable is not None
    assert ("unimportable_agent.py:3" in unusable.detail, unusable.is_proven) == (True, True)


@pytest.mark.parametrize(
    ("function", "kind"), [(KILLED, ServiceError), ("tests.support.unimportable_agent:solve", ConfigurationError)]
)
async def test_only_what_is_proven_is_an_error_of_the_configuration(
    function: str, kind: type[Exception], kills: Path, tmp_path: Path
) -> None:
    agent = {"function": function, "workers": 1, "environment": {"KILLS": str(kills)}}
    settings = validated({"run": {"directory": str(tmp_path)}, "model": {"path": str(tmp_path)}, "agent": agent}, "test")
    with pytest.raises(ExceptionGroup) as caught:
        async with open_solver(settings, "rollout-0"):
            pass
    (error,) = flatten(caught.value)
    assert type(error) is kind
    assert str(error).startswith(f"agent.function is {function!r}: ")
