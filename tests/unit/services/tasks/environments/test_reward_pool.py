"""Rewards in killable processes: whatever a job does, the pool answers and the next job is served."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from gspo.tasks.environments import Plain, RewardJob
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError, UnprovenError
from gspo_services.tasks.environments.reward_pool import RewardPool, RewardPoolOptions
from gspo_services.tasks.worker.frames import MAX_MESSAGE_BYTES

OPTIONS = RewardPoolOptions(num_workers=1, memory_bytes=1024**3, cpu_s=1)


def job(name: str, deadline_s: float = 30.0, **arguments: Plain) -> RewardJob:
    return RewardJob(function=f"tests.support.reward_functions:{name}", arguments=arguments, deadline_s=deadline_s)


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[RewardPool]:
    async with RewardPool(OPTIONS) as pool:
        yield pool


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_reward_comes_back_although_the_function_prints(pool: RewardPool) -> None:
    result = await pool.grade(job("length", text="four"))
    assert (result.reward, result.failure) == (4.0, None)


async def test_one_worker_serves_one_job_after_another(pool: RewardPool) -> None:
    first = await pool.grade(job("process_id"))
    second = await pool.grade(job("process_id"))
    assert first.reward == second.reward
    assert first.reward != os.getpid()


@pytest.mark.parametrize(
    ("name", "reason", "detail"),
    [
        ("refuse", "raised", "KeyError: 'x'"),
        ("not_a_number", "not_finite", "nan"),
        ("infinite", "not_finite", "inf"),
        ("words", "not_finite", "'one'"),
        ("missing", "unknown_function", "missing"),
        ("refuse", "raised", "reward_functions.py:"),
        ("crash", "crashed", "ended during the job: exit status 3"),
        ("leave", "raised", "SystemExit: 1"),
        ("leave_as_in_a_shell", "raised", "SystemExit: 3"),
        ("leave_later", "raised", "SystemExit: 2"),
        ("cancel_itself", "raised", "CancelledError"),
        ("close_the_pipe", "crashed", "ended during the job"),
        ("be_killed", "crashed", "ended during the job: SIGKILL"),
    ],
)
async def test_a_failed_job_is_an_answer_with_its_reason_and_the_next_is_served(
    pool: RewardPool, name: str, reason: str, detail: str
) -> None:
    result = await pool.grade(job(name, text="x") if name == "refuse" else job(name))
    assert (result.reward, result.failure) == (None, reason)
    assert detail in result.detail
    assert (await pool.grade(job("length", text="ab"))).reward == 2.0


async def test_stdin_is_empty_also_after_a_job_that_closes_it(pool: RewardPool) -> None:
    for name in ("characters_of_stdin", "leave_as_in_a_shell", "characters_of_stdin"):
        result = await pool.grade(job(name))
    assert (result.reward, result.failure) == (0.0, None), result


async def test_a_failure_names_the_lines_of_the_user_and_none_of_ours(pool: RewardPool) -> None:
    for name in ("refuse", "fail_later"):
        result = await pool.grade(job(name, text="x") if name == "refuse" else job(name))
        said, *places = result.detail.splitlines()
        assert (said.startswith("KeyError: "), len(places)) == (True, 1), result.detail
        assert places[0].endswith(f" in {name}")


async def test_a_module_that_raises_is_no_crash_and_says_where(pool: RewardPool) -> None:
    result = await pool.grade(RewardJob(function="tests.support.rewards.unimportable:f", arguments={}))
    assert result.failure == "unknown_function"
    assert "RuntimeError: no key is set" in result.detail
    assert "unimportable.py:3 in <module>" in result.detail
    assert (await pool.grade(job("length", text="ab"))).reward == 2.0


@pytest.mark.parametrize(
    "path", ["", "length", "tests.support.reward_functions", ":length", "tests.support.reward_functions:"]
)
async def test_a_path_of_another_form_is_an_unknown_function(pool: RewardPool, path: str) -> None:
    if path == "":
        with pytest.raises(ValueError, match="needs exactly one of function, url and grader"):
            RewardJob(function=path, arguments={})
        return
    result = await pool.grade(RewardJob(function=path, arguments={}))
    assert result.failure == "unknown_function"
    assert f'"{path}" is not of the form "package.module:function"' in result.detail


async def test_arguments_that_are_no_plain_data_are_a_failure(pool: RewardPool) -> None:
    for bad in ({1, 2}, 10**30, object()):
        result = await pool.grade(RewardJob(function="tests.support.reward_functions:length", arguments={"text": bad}))  # type: ignore[dict-item]
        assert (result.reward, result.failure) == (None, "bad_job"), result


async def test_a_pool_opens_only_with_its_functions_there() -> None:
    good = "tests.support.reward_functions:process_id"
    async with RewardPool(RewardPoolOptions(num_workers=2), functions=[good]) as pool:
        ready = {process.pid for process in psutil.Process().children()}
        assert (await pool.grade(job("process_id"))).reward in ready
    for bad, said in (
        ("tests.support.reward_functions:gone", 'no function called "gone"'),
        ("nowhere:f", "no module nowhere"),
    ):
        pool = RewardPool(OPTIONS, functions=[good, bad])
        with pytest.raises(ConfigurationError, match=said):
            async with pool:
                raise AssertionError("the pool has opened")
        assert (await pool.grade(job("process_id"))).failure == "closed"


@pytest.mark.parametrize(("end", "kind", "said"), [("9", ServiceError, "SIGKILL"), ("", UnprovenError, "exit status 3")])
async def test_a_worker_that_ends_while_it_imports_is_no_proof(end: str, kind: type[Exception], said: str) -> None:
    options = RewardPoolOptions(num_workers=1, environment={"END": end})
    with pytest.raises((ServiceError, ConfigurationError), match=f"imported the function: {said}") as caught:
        async with RewardPool(options, functions=["tests.support.rewards.ending:score"]):
            raise AssertionError("the pool has opened")
    assert type(caught.value) is kind


async def test_a_pool_that_starts_too_slowly_may_be_started_again() -> None:
    with pytest.raises(ServiceError, match=r"not ready within 0\.001 s"):
        async with RewardPool(RewardPoolOptions(start_timeout_s=0.001), functions=["tests.support.reward_functions:length"]):
            raise AssertionError("the pool has opened")


async def test_async_jobs_share_a_loop_and_leave_nothing_in_it(pool: RewardPool) -> None:
    assert (await pool.grade(job("loops"))).components == {"before": 0.0, "left": 0.0, "ended": 0.0}
    assert (await pool.grade(job("loops"))).components == {"before": 1.0, "left": 0.0, "ended": 1.0}


async def test_a_job_gets_the_variables_that_it_is_given_and_its_mark_stays() -> None:
    options = RewardPoolOptions(num_workers=1, environment={"JUDGE_NUMBER": "7", "GSPO_USER_PROCESS": "5"})
    async with RewardPool(options) as pool:
        assert (await pool.grade(job("environment_value", variable="JUDGE_NUMBER"))).reward == 7.0
        assert (await pool.grade(job("environment_value", variable="GSPO_USER_PROCESS"))).failure == "raised"


async def test_a_missing_module_is_named(pool: RewardPool) -> None:
    result = await pool.grade(RewardJob(function="no_such_package.rewards:f", arguments={}))
    assert result.failure == "unknown_function"
    assert "no_such_package" in result.detail


async def test_a_job_over_its_deadline_is_killed_with_its_worker(pool: RewardPool) -> None:
    worker = (await pool.grade(job("process_id"))).reward
    assert worker is not None
    started = time.monotonic()
    result = await pool.grade(job("hang", deadline_s=0.2))
    assert result.failure == "deadline"
    assert time.monotonic() - started < 60
    assert not is_running(int(worker))
    assert (await pool.grade(job("process_id"))).reward != worker


async def test_a_job_that_burns_cpu_time_is_ended_by_its_limit(pool: RewardPool) -> None:
    result = await pool.grade(job("burn", deadline_s=60))
    assert (result.failure, result.detail) == ("cpu_time", "the job used more than 1 s of CPU time")


async def test_a_job_that_wants_too_much_memory_fails_and_a_smaller_one_does_not(pool: RewardPool) -> None:
    assert (await pool.grade(job("allocate", num_bytes=2 * 1024**3))).failure == "memory"
    assert (await pool.grade(job("allocate", num_bytes=1024))).reward == 1024.0


async def test_a_job_too_large_for_the_pipe_is_refused(pool: RewardPool) -> None:
    result = await pool.grade(job("length", text="x" * (MAX_MESSAGE_BYTES + 1)))
    assert result.failure == "too_large"


async def test_more_jobs_than_workers_wait_and_are_all_served(pool: RewardPool) -> None:
    results = await asyncio.gather(*(pool.grade(job("length", text="x" * n)) for n in range(20)))
    assert [result.reward for result in results] == [float(n) for n in range(20)]


async def test_the_time_of_each_part_of_a_reward_is_told() -> None:
    told: list[tuple[str, float]] = []
    async with RewardPool(OPTIONS, took=lambda part, seconds: told.append((part, seconds))) as pool:
        await asyncio.gather(*(pool.grade(job("nap", seconds=0.2)) for _ in range(2)))
    assert sorted(part for part, _ in told) == ["wait", "wait", "work", "work"]
    assert [part for part, _ in told][:2] == ["wait", "work"], "the second waits for the first"
    at_once, work, wait, _ = (seconds for _, seconds in told)
    assert at_once < 0.2 <= min(work, wait)


async def test_a_cancelled_job_frees_its_worker_for_the_next(pool: RewardPool) -> None:
    await pool.grade(job("length", text=""))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await pool.grade(job("hang", deadline_s=600))
    assert (await pool.grade(job("length", text="abc"))).reward == 3.0


async def test_closing_ends_running_and_waiting_jobs_and_leaves_no_process() -> None:
    pool = RewardPool(OPTIONS)
    worker = (await pool.grade(job("process_id"))).reward
    assert worker is not None
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pool.grade(job("hang", deadline_s=600)), name="running")
        waiting = group.create_task(pool.grade(job("hang", deadline_s=600)), name="waiting")
        await asyncio.sleep(0)
        await pool.close()
    assert (running.result().failure, waiting.result().failure) == ("closed", "closed")
    assert not is_running(int(worker))


async def test_a_worker_is_replaced_after_so_many_jobs() -> None:
    async with RewardPool(RewardPoolOptions(num_workers=1, max_jobs_per_worker=2)) as pool:
        workers = [(await pool.grade(job("process_id"))).reward for _ in range(3)]
    assert workers[0] == workers[1] != workers[2]


# --- what a job must not do --------------------------------------------------------------------------------------------


async def test_a_job_reaches_no_network_and_not_even_this_host(pool: RewardPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = await pool.grade(job("connect", host="127.0.0.1", port=server.getsockname()[1]))
    refused = what_the_kernel_refuses()
    if refused:
        pytest.skip(f"reward workers keep the network here: {refused}")
    assert (result.reward, result.failure) == (None, "raised")
    assert "Network is unreachable" in result.detail


async def test_a_job_writes_no_file(pool: RewardPool) -> None:
    assert (await pool.grade(job("write", num_bytes=0))).reward == 0.0
    result = await pool.grade(job("write", num_bytes=1))
    assert (result.reward, result.failure) == (None, "raised")
    assert "File too large" in result.detail


async def test_a_job_sees_none_of_our_variables_and_files_and_gains_no_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as ours, tempfile.TemporaryFile() as file:
        os.set_inheritable(ours.fileno(), True)
        os.set_inheritable(file.fileno(), True)
        async with RewardPool(OPTIONS) as pool:
            assert (await pool.grade(job("environment", variable="HF_TOKEN"))).reward == 0.0
            assert (await pool.grade(job("environment", variable="PATH"))).reward == 1.0
            assert (await pool.grade(job("open_files"))).reward == 0.0
            assert (await pool.grade(job("new_privileges"))).reward == 1.0


async def test_a_job_that_sleeps_uses_only_wall_clock_time_and_is_served(pool: RewardPool) -> None:
    assert (await pool.grade(job("nap", seconds=0.01))).reward == 0.01


def what_the_kernel_refuses() -> str:
    code = "from gspo_services.tasks.reward_worker.isolation import isolate; print(isolate(2**40))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_refusal_of_the_kernel_is_reported() -> None:
    threaded = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    code = f"{threaded}; from gspo_services.tasks.reward_worker.isolation import isolate; print(isolate(2**40))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("unshare: "), "a process with two threads cannot leave its user namespace"
