"""Agents in worker processes: whatever an agent does costs episodes of its own worker, and the next is served."""

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from gspo_services.tasks.agents import AgentResult, ProcessLimits
from tests.support.agent_pools import agent_pool, agent_task

HERE = "tests/support/agents.py"


@pytest.mark.parametrize(
    ("value", "reward", "components"),
    [(0.5, 0.5, {}), (True, 1.0, {}), (3, 3.0, {}), ({"a": 1, "b": 0.25}, 1.25, {"a": 1.0, "b": 0.25})],
)
async def test_what_an_agent_returns_is_its_reward(value: Any, reward: float, components: dict[str, float]) -> None:
    async with agent_pool() as pool:
        result = await pool.solve(agent_task("answer", value=value))
    assert result == AgentResult(reward=reward, components=components)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"turns": [0, True, 0.5]}, AgentResult(reward=1.5, turns=[0.0, 1.0, 0.5])),
        ({"turns": (1.0, 2.0), "short": 0.25}, AgentResult(reward=3.25, turns=[1.0, 2.25], components={"short": 0.25})),
        ({"turns": []}, AgentResult(reward=0.0, turns=[])),
        ({"turns": 3}, AgentResult(reward=3.0, components={"turns": 3.0})),
    ],
    ids=["alone", "with a component", "none", "a component of that name"],
)
async def test_an_agent_may_reward_each_turn(value: Any, expected: AgentResult) -> None:
    async with agent_pool() as pool:
        assert await pool.solve(agent_task("answer", value=value)) == expected


@pytest.mark.parametrize(
    ("turns", "detail"),
    [([0.0, "one"], "the reward of turn 1 is 'one' (str): expected a finite number"), ([0.0] * 4097, "4096 allowed")],
    ids=["no number", "too many"],
)
async def test_rewards_of_turns_that_are_none_are_refused_with_their_place(turns: Any, detail: str) -> None:
    async with agent_pool() as pool:
        result = await pool.solve(agent_task("answer", value={"turns": turns}))
    assert (result.failure, detail in result.detail) == ("not_finite", True), result


async def test_an_agent_knows_its_task_its_seed_its_policy_and_its_time() -> None:
    async with agent_pool() as pool:
        result = await pool.solve(agent_task("addresses", seed=11))
    assert result.components == {"seed": 11.0, "in_time": 1.0}


async def test_weights_say_what_components_count_and_which_must_be_there() -> None:
    async with agent_pool(weights={"right": 2.0, "short": -1.0}) as pool:
        good = await pool.solve(agent_task("answer", value={"right": 1.0, "short": 0.5, "note": 9.0}))
        lacking = await pool.solve(agent_task("answer", value={"right": 1.0}))
        single = await pool.solve(agent_task("answer", value=1.0))
    assert (good.reward, good.components) == (1.5, {"right": 1.0, "short": 0.5, "note": 9.0})
    assert lacking.failure == single.failure == "missing_component"
    assert '"short"' in lacking.detail


async def test_many_agents_that_wait_share_few_workers() -> None:
    async with agent_pool(num_workers=2, episodes_per_worker=100, hang_s=30.0) as pool:
        # Each waits for the 99 others of its worker: one after another they would meet their deadlines instead.
        results = await asyncio.gather(*(pool.solve(agent_task("meet", number=100)) for _ in range(200)))
    assert Counter(result.failure for result in results) == {None: 200}
    assert list(Counter(result.reward for result in results).values()) == [100, 100]


async def test_more_agents_than_places_wait_and_are_all_served() -> None:
    async with agent_pool(episodes_per_worker=2) as pool:
        results = await asyncio.gather(*(pool.solve(agent_task("answer", value=n)) for n in range(12)))
    assert [result.reward for result in results] == [float(n) for n in range(12)]


@pytest.mark.parametrize(
    ("do", "reason", "details"),
    [
        ("fail_in_a_library", "raised", ["ZeroDivisionError", "in fail_in_a_library", "in library_call"]),
        ("fail", "raised", ['KeyError: "the user\'s own mistake"', f"{HERE}:", "in fail_deeper"]),
        ("leave", "raised", ["SystemExit: 3", f"{HERE}:", "in leave"]),
        ("missing", "raised", ["KeyError: 'missing'"]),
        ("allocate", "memory", ["MemoryError", "in allocate"]),
        ("crash", "crashed", ["exit status 7"]),
        ("crash_in_c", "crashed", ["SIGSEGV", "Segmentation fault", "in crash_in_c"]),
        ("spin", "hung", [f"{HERE}:", "in spin"]),
        ("block", "hung", [f"{HERE}:", "in block"]),
        ("spin_in_c", "hung", ["not been heard"]),
        ("write_garbage", "bad_message", ["4294967295 bytes"]),
    ],
)
async def test_an_agent_that_fails_is_a_result_with_its_reason_and_the_next_is_served(
    do: str, reason: str, details: list[str]
) -> None:
    async with agent_pool() as pool:
        result = await pool.solve(agent_task(do))
        assert (result.reward, result.failure) == (None, reason), result.detail
        assert [text for text in details if text not in result.detail] == []
        assert "user_worker" not in result.detail, "a traceback begins in the user's files"
        assert (await pool.solve(agent_task("answer", value=2))).reward == 2.0


async def test_an_import_is_no_hang() -> None:
    async with agent_pool(hang_s=0.5) as pool:
        assert (await pool.solve(agent_task("import_slowly"))).reward == 1.0
        assert (await pool.solve(agent_task("block"))).failure == "hung"


async def test_a_hung_agent_costs_the_episodes_of_its_own_worker_alone() -> None:
    async with agent_pool(num_workers=2) as pool, asyncio.TaskGroup() as tasks:
        # Each goes to the worker with the fewest episodes: 0 and 2 to one, 1 and 3 to the other.
        napping = [tasks.create_task(pool.solve(agent_task("wait_for_ever")), name=str(n)) for n in range(3)]
        await asyncio.sleep(0)
        hung = await pool.solve(agent_task("spin"))
        neighbour = await napping[1]
        assert [task.done() for task in napping] == [False, True, False]
        for task in napping:
            task.cancel()
    assert (hung.failure, neighbour.failure) == ("hung", "crashed")
    assert (hung.in_company, neighbour.in_company) == (False, True), "it is known who has hung"
    assert "another episode" in neighbour.detail
    assert "in spin" in neighbour.detail


@pytest.mark.parametrize("do", ["crash", "spin_in_c", "write_garbage"])
async def test_a_worker_that_ends_with_several_episodes_blames_none_and_one_alone_is_to_blame(do: str) -> None:
    async with agent_pool() as pool, asyncio.TaskGroup() as tasks:
        neighbour = tasks.create_task(pool.solve(agent_task("wait_for_ever")))
        await asyncio.sleep(0)
        shared = await pool.solve(agent_task(do))
        assert (shared.in_company, (await neighbour).in_company) == (True, True)
        neighbour = tasks.create_task(pool.solve(agent_task("wait_for_ever")))
        await asyncio.sleep(0)
        alone = await pool.solve(agent_task(do), is_alone=True)
        assert (alone.failure, alone.in_company, neighbour.done()) == (shared.failure, False, False)
        neighbour.cancel()


async def test_at_most_as_many_episodes_have_workers_of_their_own_as_there_are_others() -> None:
    async with agent_pool(num_workers=2) as pool:
        pids = await asyncio.gather(*(pool.solve(agent_task("process_id"), is_alone=True) for _ in range(6)))
        assert len({each.reward for each in pids}) == 6
        assert (await pool.solve(agent_task("answer", value=2))).reward == 2.0


async def test_a_deadline_cancels_the_agent_where_it_is_and_its_worker_lives_on() -> None:
    async with agent_pool() as pool:
        worker = (await pool.solve(agent_task("process_id"))).reward
        result = await pool.solve(agent_task("wait_for_ever", deadline_s=0.2))
        assert (result.failure, "in wait_for_ever" in result.detail) == ("deadline", True)
        assert (await pool.solve(agent_task("process_id"))).reward == worker


async def test_an_agent_that_refuses_to_end_at_its_deadline_is_killed_with_its_worker() -> None:
    async with agent_pool() as pool:
        worker = (await pool.solve(agent_task("process_id"))).reward
        result = await pool.solve(agent_task("wait_and_refuse_to_end", deadline_s=0.2))
        assert result.failure == "deadline"
        assert (await pool.solve(agent_task("process_id"))).reward != worker


@pytest.mark.parametrize(("do", "same_worker"), [("wait_for_ever", True), ("wait_and_refuse_to_end", False)])
async def test_a_cancelled_call_cancels_its_agent_and_frees_its_place(do: str, same_worker: bool) -> None:
    async with agent_pool(episodes_per_worker=1) as pool:
        worker = (await pool.solve(agent_task("process_id"))).reward
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await pool.solve(agent_task(do))
        # The only place is free when the agent has really ended.
        assert ((await pool.solve(agent_task("process_id"))).reward == worker) is same_worker


async def test_a_call_that_is_cancelled_while_its_worker_starts_leaves_no_episode() -> None:
    async with agent_pool(episodes_per_worker=1) as pool:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await pool.solve(agent_task("wait_for_ever"))
        assert (await pool.solve(agent_task("answer", value=1))).reward == 1.0


async def test_closing_ends_running_and_waiting_episodes() -> None:
    async with agent_pool(episodes_per_worker=1) as pool, asyncio.TaskGroup() as tasks:
        worker = (await pool.solve(agent_task("process_id"))).reward
        assert worker is not None
        running = tasks.create_task(pool.solve(agent_task("wait_for_ever")), name="running")
        waiting = tasks.create_task(pool.solve(agent_task("wait_for_ever")), name="waiting")
        await asyncio.sleep(0)
        await pool.close()
    assert (running.result().failure, waiting.result().failure) == ("closed", "closed")
    assert not psutil.pid_exists(int(worker))


async def test_a_worker_is_replaced_after_so_many_episodes() -> None:
    async with agent_pool(max_episodes_per_worker=2) as pool:
        workers = [(await pool.solve(agent_task("process_id"))).reward for _ in range(3)]
    assert workers[0] == workers[1] != workers[2]


async def test_tasks_that_an_agent_leaves_are_cancelled_with_it() -> None:
    async with agent_pool() as pool:
        numbers = [(await pool.solve(agent_task("leave_tasks"))).reward for _ in range(3)]
    assert numbers[0] == numbers[1] == numbers[2]


@pytest.mark.parametrize(
    ("function", "detail"),
    [
        ("no_such_package.agents:solve", "no_such_package"),
        ("tests.support.agents:missing", 'no function called "missing"'),
        ("tests.support.agents:not_a_function", "no function"),
        ("tests.support.agents:", "no function"),
        ("tests.support.unimportable_agent:solve", "unimportable_agent.py:3"),
    ],
)
async def test_an_agent_that_cannot_be_imported_is_named(function: str, detail: str) -> None:
    async with agent_pool(function) as pool:
        result = await pool.solve(agent_task("answer"))
    assert (result.failure, detail in result.detail) == ("unknown_function", True), result.detail


async def test_an_interpreter_that_is_not_there_is_named() -> None:
    async with agent_pool(python="/no/such/python") as pool:
        result = await pool.solve(agent_task("answer"))
    assert (result.failure, "/no/such/python" in result.detail) == ("no_worker", True)


async def test_a_worker_that_does_not_start_in_time_is_killed() -> None:
    async with agent_pool("tests.support.slow_import_agent:solve", start_timeout_s=0.3) as pool:
        result = await pool.solve(agent_task("answer"))
    assert (result.failure, "not ready within 0.3 s" in result.detail) == ("no_worker", True)


async def test_a_task_too_large_for_a_message_is_refused() -> None:
    async with agent_pool() as pool:
        result = await pool.solve(agent_task("answer", value="x" * (64 * 1024 * 1024)))
    assert result.failure == "too_large"


# --- agents that are plain functions -----------------------------------------------------------------------------------


async def test_plain_functions_run_in_threads_at_the_same_time() -> None:
    async with agent_pool("act_in_thread", hang_s=30.0) as pool:
        results = await asyncio.gather(*(pool.solve(agent_task("meet_in_thread")) for _ in range(100)))
    # Each waits for the 99 others.
    assert [result.reward for result in results] == [1.0] * 100


async def test_a_plain_function_may_call_exit() -> None:
    async with agent_pool("act_in_thread") as pool:
        result = await pool.solve(agent_task("leave_from_thread"))
        assert (result.failure, "SystemExit: 4" in result.detail) == ("raised", True)


async def test_a_thread_that_does_not_end_is_left_behind_with_its_worker() -> None:
    async with agent_pool("act_in_thread") as pool, asyncio.TaskGroup() as tasks:
        worker = (await pool.solve(agent_task("process_id_in_thread"))).reward
        other = tasks.create_task(pool.solve(agent_task("nap_in_thread")), name="other")
        await asyncio.sleep(0)
        result = await pool.solve(agent_task("hang_in_thread", deadline_s=0.1))
        assert result.failure == "deadline"
        assert (await pool.solve(agent_task("process_id_in_thread"))).reward != worker
    assert other.result().reward == 1.0, "what else ran in that worker went on to its end"


async def test_an_agent_may_be_an_object() -> None:
    async with agent_pool("solver") as pool:
        assert (await pool.solve(agent_task("any"))).reward == 0.5


# --- what an agent may use ---------------------------------------------------------------------------------------------


async def test_limits_on_files_memory_descriptors_and_processor_time_hold() -> None:
    limits = ProcessLimits(memory_bytes=4 * 1024**3, file_bytes=1000, open_files=200, cpu_s=1)
    async with agent_pool(limits=limits, hang_s=60.0) as pool:
        assert (await pool.solve(agent_task("write_file", num_bytes=1000))).reward == 1000.0
        assert (await pool.solve(agent_task("write_file", num_bytes=1001))).reward == 1000.0, "the rest was not written"
        files = await pool.solve(agent_task("open_many"))
        assert "Too many open files" in files.detail
        assert (await pool.solve(agent_task("burn_in_thread"))).detail.count("SIGXCPU: its limit on CPU time") == 1


async def test_the_scratch_folder_is_there_for_the_worker_and_gone_after_it(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path))
        async with agent_pool() as pool:
            assert (await pool.solve(agent_task("write_file", num_bytes=5))).reward == 5.0
            assert sizes_below(tmp_path) == {"gspo-written-by-an-agent": 5}
        assert os.listdir(tmp_path) == []


def sizes_below(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


async def test_without_a_scratch_folder_no_file_can_be_written(tmp_path: Path) -> None:
    async with agent_pool(scratch=False) as pool:
        result = await pool.solve(agent_task("write_file", num_bytes=1, folder=str(tmp_path)))
    assert (result.failure, "File too large" in result.detail) == ("raised", True)


async def test_a_daemon_ends_with_the_worker_that_started_it() -> None:
    async with agent_pool() as pool:
        daemon = (await pool.solve(agent_task("daemonise"))).reward
        assert daemon is not None
        assert psutil.pid_exists(int(daemon))
    _, alive = psutil.wait_procs([process for process in psutil.process_iter() if process.pid == int(daemon)], timeout=30)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


async def test_a_fork_of_the_worker_does_not_speak_for_it() -> None:
    async with agent_pool() as pool:
        worker = (await pool.solve(agent_task("process_id"))).reward
        ended_with_1 = 1 << 8
        assert (await pool.solve(agent_task("fork_and_return"))).reward == 1.0 + ended_with_1
        assert (await pool.solve(agent_task("process_id"))).reward == worker
