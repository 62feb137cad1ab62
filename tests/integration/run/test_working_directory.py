"""The working directory is a user's project, and its files are named like Python's modules and ours."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_services.cli.run.supervisor import ProcessSpec, Supervisor
from gspo_services.shared.runtime.clock import MonotonicClock
from tests.support.broker.process import eventually
from tests.support.processes.ports import free_ports

COMMAND = (
    sys.executable,
    "-P",
    "-m",
    "gspo_services.cli.main",
)  # like the installed ``gspo``: no directory is added to the path
SHADOWS = ("random.py", "msgspec.py", "gspo.py", "services/__init__.py", "protocol/__init__.py", "gspo_services.py")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, whose modules raise when they are imported."""
    for name in SHADOWS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'raise RuntimeError("{name} of the working directory was imported")\n')
    work, batch = free_ports(2)
    (tmp_path / "run.toml").write_text(
        f'[run]\ndirectory = "out"\n[broker]\nmetrics_port = 0\nwork_endpoint = "tcp://127.0.0.1:{work}"\n'
        f'batch_endpoint = "tcp://127.0.0.1:{batch}"\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("words", [["check", "run.toml", "--settings"], ["environments"]])
def test_a_command_imports_no_module_of_the_working_directory(words: list[str]) -> None:
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


async def test_the_broker_starts_as_the_command_becomes_it(project: Path) -> None:
    broker = await asyncio.create_subprocess_exec(*COMMAND, "broker", "run.toml", stderr=asyncio.subprocess.PIPE)
    assert broker.stderr is not None
    try:
        async with asyncio.timeout(60):
            events = []
            while "broker_started" not in events:
                line = await broker.stderr.readline()
                assert line.startswith(b"{"), line + await broker.stderr.read()
                events.append(json.loads(line)["event"])
    finally:
        broker.terminate()
        await broker.communicate()


async def test_the_broker_starts_under_the_supervisor(project: Path) -> None:
    spec = ProcessSpec(name="broker", module="gspo_services.broker", arguments=("run.toml",), stop_order=0, grace_s=20.0)
    supervisor = Supervisor([spec], project / "logs", MonotonicClock(), max_restarts=0)
    log = project / "logs" / "broker.log"
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run())
        await eventually(lambda: log.is_file() and '"broker_started"' in log.read_text())
        await supervisor.stop()
