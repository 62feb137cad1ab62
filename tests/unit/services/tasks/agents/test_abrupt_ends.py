"""What is left of agents when this side ends without a word."""

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from gspo_services.tasks.agents import AgentPool, AgentPoolOptions, UserOutput
from gspo_services.tasks.agents.worker import UserWorker
from tests.support.agent_pools import agent_task

PARENT = """
import asyncio, sys
from gspo_services.tasks.agents import AgentPool, AgentProgram
from tests.support.agent_pools import agent_task

async def main():
    async with asyncio.TaskGroup() as tasks:
        if sys.argv[1] == "program":
            code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
            await AgentProgram([sys.executable, "-c", code, sys.argv[2]]).solve(agent_task("any", deadline_s=600))
        else:
            async with AgentPool("tests.support.agents:act", tasks=tasks) as pool:
                await pool.solve(agent_task(sys.argv[1], fifo=sys.argv[2], deadline_s=600))

asyncio.run(main())
"""


@pytest.mark.parametrize("agent", ["say_where_and_spin", "program"])
async def test_agents_end_when_the_rollout_is_killed(agent: str, tmp_path: Path) -> None:
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    # Of its own folder: what a killed process leaves there is not what this test is about.
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, agent, str(fifo), env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    pid = int(await asyncio.to_thread(fifo.read_text))
    process = psutil.Process(pid)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, [process], timeout=30)
    assert [left for left in alive if left.status() != psutil.STATUS_ZOMBIE] == []


async def test_a_group_of_tasks_that_fails_takes_the_workers_with_it() -> None:
    before = set(psutil.Process().children(recursive=True))

    async def fail_beside_agents() -> None:
        async with asyncio.TaskGroup() as tasks:
            async with AgentPool("tests.support.agents:act", AgentPoolOptions(num_workers=2), tasks=tasks) as pool:
                await pool.solve(agent_task("answer", value=1))
                tasks.create_task(pool.solve(agent_task("wait_for_ever")), name="running")
                # This one starts a second worker.
                tasks.create_task(pool.solve(agent_task("wait_for_ever")), name="starting")
                await asyncio.sleep(0)
                raise ValueError("something else of the rollout failed")

    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(fail_beside_agents(), 60)
    assert caught.group_contains(ValueError)
    assert set(psutil.Process().children(recursive=True)) <= before


async def test_the_end_of_a_workers_life_is_told_to_its_episodes() -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        async with AgentPool("tests.support.agents:act", tasks=tasks) as pool:
            await pool.solve(agent_task("answer", value=1))
            solving = tasks.create_task(pool.solve(agent_task("wait_for_ever")), name="solving")
            await asyncio.sleep(0)
            life().cancel()
            assert (await solving).failure == "closed"


async def test_a_worker_whose_life_never_began_keeps_nobody_waiting() -> None:
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        pool = AgentPool("tests.support.agents:act", tasks=tasks)
        solving = tasks.create_task(pool.solve(agent_task("answer", value=1)), name="solving")
        await asyncio.sleep(0)
        life().cancel()
        assert (await solving).reward == 1.0, "another worker takes its episode"
        await pool.close()


def life() -> asyncio.Task[Any]:
    """The task of the only worker."""
    (found,) = [task for task in asyncio.all_tasks() if task.get_name() == "user-worker"]
    return found


async def test_a_worker_that_is_ended_before_its_connection_is_open_leaves_none() -> None:
    worker = UserWorker("tests.support.agents:act", AgentPoolOptions(), UserOutput(None), lambda: None)
    worker.end("closed", "nobody waits for it any more")
    async with asyncio.timeout(60):
        await worker.run()
    del worker
    # An open connection warns as it is collected, and a warning is an error here.
    gc.collect()
