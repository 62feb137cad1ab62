"""Agents that are programs: variables in, a file with the reward out, and nothing left of them."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from gspo_services.tasks.agents import AgentProgram, ProcessLimits, UserOutput, UserProcessOptions
from tests.support.agent_pools import agent_task

WRITE = "import os, json; write = lambda text: open(os.environ['GSPO_RESULT'], 'w').write(text); "


def program(code: str, output: Path | None = None, **options: Any) -> AgentProgram:
    """A program of one line of Python, which may ``write`` its result."""
    return AgentProgram([sys.executable, "-c", WRITE + code], UserProcessOptions(**options), output=UserOutput(output))


async def test_a_program_gets_its_task_its_policy_and_no_variable_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = (
        "e = os.environ; task = json.load(open(e['GSPO_TASK'])); "
        "right = [e['OPENAI_BASE_URL'], e['OPENAI_API_KEY'], e['GSPO_MODEL']] == "
        "['http://127.0.0.1:9/v1', 'episode-key', 'policy']; "
        "write(json.dumps({'task': task['number'], 'seed': int(e['GSPO_SEED']), 'right': right, 'ours': 'HF_TOKEN' in e, "
        "'more': e['MORE'] == 'yes'}))"
    )
    result = await program(code, environment={"MORE": "yes"}).solve(agent_task("any", number=5))
    assert result.components == {"task": 5.0, "seed": 7.0, "right": 1.0, "ours": 0.0, "more": 1.0}, result.detail


@pytest.mark.parametrize("text", ["0.5", '{"reward": 0.5}', '{"reward": {"a": 0.25, "b": 0.25}}', ' {"a": 0.5}\\n'])
async def test_a_reward_is_a_number_or_a_map(text: str) -> None:
    assert (await program(f"write('{text}')").solve(agent_task("any"))).reward == 0.5


@pytest.mark.parametrize(
    ("code", "reason", "detail"),
    [
        ("pass", "no_result", "No such file"),
        ("write('NaN')", "not_finite", "NaN"),
        ("write('\"one\"')", "not_finite", "'one'"),
        ("write('one')", "no_result", "not JSON"),
        ("write('[' * 60000)", "no_result", "not JSON"),
        ("write('1' * 70000)", "too_large", "65536"),
        ("write('{}')", "missing_component", "no components"),
        ("os.symlink('/etc/hostname', os.environ['GSPO_RESULT'])", "no_result", "symbolic link"),
        ("os.mkfifo(os.environ['GSPO_RESULT'])", "no_result", "regular"),
        ("raise KeyError('mine')", "crashed", "KeyError: 'mine'"),
        ("os.kill(os.getpid(), 9)", "crashed", "SIGKILL"),
        ("bytearray(10**12)", "crashed", "MemoryError"),
    ],
)
async def test_a_program_that_fails_is_a_result_with_its_reason(code: str, reason: str, detail: str) -> None:
    result = await program(code).solve(agent_task("any"))
    assert (result.reward, result.failure, detail in result.detail) == (None, reason, True), result


async def test_a_program_that_is_not_there_is_named() -> None:
    result = await AgentProgram(["/no/such/agent"]).solve(agent_task("any"))
    assert (result.failure, "/no/such/agent: No such file" in result.detail) == ("not_started", True)


async def test_limits_hold_for_a_program() -> None:
    limits = ProcessLimits(cpu_s=1, file_bytes=10)
    assert "SIGXCPU" in (await program("sum(iter(int, 1))", limits=limits).solve(agent_task("any"))).detail
    code = "file = open(os.environ['GSPO_RESULT'], 'wb', buffering=0); file.write(b'1' * 10); file.write(b'1')"
    assert "File too large" in (await program(code, limits=limits).solve(agent_task("any"))).detail


async def test_a_program_over_its_deadline_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import subprocess, time; "
        "children = [subprocess.Popen(['sleep', '3600'], start_new_session=new) for new in (True, False)]; "
        f"open('{pids}', 'w').write(' '.join(str(child.pid) for child in children)); "
        "print('waiting', flush=True); time.sleep(60)"
    )
    result = await program(code).solve(agent_task("any", deadline_s=1.5))
    assert (result.failure, "waiting" in result.detail) == ("deadline", True)
    assert [pid for pid in pids.read_text().split() if is_running(int(pid))] == []


async def test_a_cancelled_call_ends_its_program_and_frees_its_place(tmp_path: Path) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    agent = program(f"import time; open('{started}', 'w').write(str(os.getpid())); time.sleep(60)")
    async with asyncio.TaskGroup() as tasks:
        solving = tasks.create_task(agent.solve(agent_task("any")), name="solving")
        pid = int(await asyncio.to_thread(started.read_text))
        solving.cancel()
    assert solving.cancelled()
    assert not is_running(pid)


async def test_episodes_beyond_the_number_of_processes_wait(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    code = f"os.mkdir('{lock}'); os.rmdir('{lock}'); write('1')"
    agent = AgentProgram([sys.executable, "-c", WRITE + code], num_processes=1)
    results = await asyncio.gather(*(agent.solve(agent_task("any")) for _ in range(3)))
    assert [result.reward for result in results] == [1.0] * 3


async def test_what_a_program_prints_is_kept_within_bounds(tmp_path: Path) -> None:
    agent = program("import sys; print('begins'); sys.stdout.write('x' * 50_000_000); write('1')", tmp_path / "agents.log")
    assert (await agent.solve(agent_task("any"))).reward == 1.0
    text = (tmp_path / "agents.log").read_text()
    assert ": begins\n" in text
    assert len(text) < 2_000_000


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
