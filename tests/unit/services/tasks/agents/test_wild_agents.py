"""Agents that fork, daemonise, stop and die: the attempt is counted, the next one works, and nothing of them is left."""

import os
import select
from pathlib import Path

import pytest

from tests.support.agent_pools import agent_pool, agent_task
from tests.support.processes.marked import left_of, outliving

AGENTS = {
    "twice_forked": None,
    "bomb": None,
    "with_a_held_lock": None,
    "forked_past_python": "crashed",
    "all_closed": "crashed",
    "stopped": "hung",
    "stopped_child": "crashed",
}


@pytest.mark.parametrize("do", AGENTS)
async def test_nothing_is_left_of_a_wild_agent_and_the_next_episode_works(do: str, tmp_path: Path) -> None:
    notes, held = tmp_path / "notes", tmp_path / "held"
    notes.touch()
    os.mkfifo(held)
    ours = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    # Only who must be found to hang is given up soon: a busy machine makes others wait, too.
    hang_s = 2.0 if AGENTS[do] == "hung" else 60.0
    async with agent_pool("tests.support.wild_agents:act", hang_s=hang_s) as pool:
        result = await pool.solve(agent_task(do, notes=str(notes), held=str(held)))
        assert (result.failure, result.reward) == ((None, 1.0) if AGENTS[do] is None else (AGENTS[do], None)), result.detail
        marks = {worker._process.mark for worker in pool._workers}
        assert (await pool.solve(agent_task("answers", notes=str(notes)))).reward == 2.0
        marks |= {worker._process.mark for worker in pool._workers}
    noted = [int(line) for line in notes.read_text().split()]
    assert noted
    assert os.getpid() not in noted
    assert outliving({*left_of(*marks), *noted}) == []
    # Also of those that were not noted: who holds a pipe keeps it open.
    ends = select.poll()
    ends.register(ours, 0)
    assert [event for _, event in ends.poll(10_000)] == [select.POLLHUP]
    os.close(ours)
