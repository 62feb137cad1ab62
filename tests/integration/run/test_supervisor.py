"""The supervisor with real processes and real signals. Each process reports through a named pipe what it does."""

import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gspo_services.cli.run.supervisor import MAX_RESTARTS, RESTART_WINDOW_S, ROOM_BYTES, ProcessSpec, Supervisor
from gspo_services.shared.placement import ProcessPlace
from gspo_services.shared.runtime.errors import EXIT_NO_ROOM, EXIT_OCCUPIED, EXIT_REPLACED, ServiceError, flatten
from gspo_services.shared.runtime.log_files import LogLimits
from tests.support.broker.process import BrokerProcess
from tests.support.clocks import VirtualClock
from tests.support.processes.supervised import PATIENCE_S, Pipe, pipe, spec, supervised

__all__ = ["pipe"]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the end of a process sets no Event
        await asyncio.sleep(0.01)


async def ended(supervisor: Supervisor) -> BaseException | None:
    """The error that ends a supervisor by itself. Everything is stopped then."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await supervisor.run()
    except ExceptionGroup as group:
        (error,) = flatten(group)
        return error
    finally:
        await supervisor.stop()
    return None


async def test_a_killed_process_is_restarted_and_keeps_its_log(pipe: Pipe, tmp_path: Path) -> None:
    async with supervised(pipe, [spec(pipe, "broker", "crash-once", str(tmp_path / "crashed"))]) as supervisor:
        _, first = await pipe.started()
        name, second = await pipe.started()
        assert (name, second != first) == ("broker", True)
        (child,) = supervisor.children
        assert (child.num_restarts, child.state, child.pid) == (1, "running", second)
        assert child.log_path.read_text().count("broker says hello") >= 1
    assert child.state == "stopped"
    assert not psutil.pid_exists(second)


async def test_a_process_has_its_place_and_its_python_also_after_a_restart(pipe: Pipe, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    own = dataclasses.replace(
        spec(pipe, "rollout-0", "crash-once", str(tmp_path / "crashed")),
        place=ProcessPlace(gpus=("2", "GPU-5d3a"), cores=(core,)), python=str(tmp_path / "own-python"),
    )  # fmt: skip
    (tmp_path / "own-python").write_text(f'#!/bin/sh\nSTARTED_BY=own-python exec "{sys.executable}" "$@"\n')
    (tmp_path / "own-python").chmod(0o755)
    async with supervised(pipe, [own, spec(pipe, "broker", "serve")]):
        started = [await pipe.started() for _ in range(3)]
        placed, free = (
            psutil.Process([pid for name, pid in started if name == whose][-1]) for whose in ("rollout-0", "broker")
        )
        wanted = {"CUDA_VISIBLE_DEVICES": "2,GPU-5d3a", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "STARTED_BY": "own-python"}
        assert wanted.items() <= placed.environ().items()
        assert placed.cpu_affinity() == [core]
        assert not wanted.keys() & free.environ().keys()
        assert set(free.cpu_affinity() or ()) == os.sched_getaffinity(0)


async def test_a_process_that_keeps_crashing_ends_the_run_with_the_end_of_its_log(pipe: Pipe, tmp_path: Path) -> None:
    specs = [spec(pipe, "learner", "exit", "7")]
    supervisor = Supervisor(specs, tmp_path / "logs", VirtualClock(), max_restarts=2, backoff_s=0.001)
    error = await ended(supervisor)
    assert isinstance(error, ServiceError)
    assert "learner ended 3 times" in str(error)
    assert "status 7, and run.max_restarts is 2" in str(error)
    assert str(tmp_path / "logs" / "learner.log") in str(error)
    assert str(error).endswith("    last words")


async def test_a_log_is_rotated_by_its_process_and_loses_nothing(pipe: Pipe, tmp_path: Path) -> None:
    limits = LogLimits(max_bytes=2**14, most_files=50)
    supervisor = Supervisor([spec(pipe, "broker", "chatter", "1000")], tmp_path / "logs", VirtualClock(), log_limits=limits)
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(supervisor.run())
        await pipe.started()
        assert await pipe.line() == "broker has spoken"
        await supervisor.stop()
        await keeping
    files = sorted((tmp_path / "logs").iterdir())
    assert len(files) > 3
    assert max(path.stat().st_size for path in files) < 2**14 + 1000
    lines = [line for path in files for line in path.read_text().splitlines() if line.startswith("{")]
    assert sorted(json.loads(line)["index"] for line in lines) == list(range(1000))


async def test_a_process_whose_log_cannot_be_opened_runs_all_the_same(pipe: Pipe, tmp_path: Path) -> None:
    async with supervised(pipe, [spec(pipe, "broker", "crash-once", str(tmp_path / "crashed"))]) as supervisor:
        (tmp_path / "logs").rename(tmp_path / "gone")
        (tmp_path / "logs").write_text("")
        await pipe.started()
        await pipe.started()
        assert supervisor.children[0].state == "running"


async def test_a_process_that_finds_no_room_on_its_disk_is_restarted_as_often_as_it_takes(
    pipe: Pipe, tmp_path: Path
) -> None:
    async with supervised(pipe, [spec(pipe, "broker", "exit", str(EXIT_NO_ROOM))]) as supervisor:
        for _ in range(MAX_RESTARTS + 3):
            await pipe.started()
        (child,) = supervisor.children
        assert child.num_restarts >= MAX_RESTARTS + 2
        assert len(child.restarts) == 0


async def test_a_process_that_found_no_room_is_restarted_as_soon_as_there_is_more(pipe: Pipe, tmp_path: Path) -> None:
    free = [0, 0, ROOM_BYTES - 1, ROOM_BYTES]
    looks: list[int] = []

    def look() -> int:
        looks.append(free[min(len(looks), len(free) - 1)])
        return looks[-1]

    async with supervised(pipe, [spec(pipe, "broker", "exit", str(EXIT_NO_ROOM))], free_bytes=look):
        await pipe.started()
        await pipe.started()
        assert looks[: len(free)] == free
        assert len(looks) <= len(free) + 1, "it did not wait as long as it would without"


async def test_crashes_far_apart_are_not_added_up(pipe: Pipe, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with supervised(pipe, [spec(pipe, "rollout-0", "serve")], clock) as supervisor:
        for _ in range(MAX_RESTARTS + 2):
            _, pid = await pipe.started()
            clock.advance(RESTART_WINDOW_S + 1)
            os.kill(pid, signal.SIGKILL)
        await pipe.started()
        assert supervisor.children[0].num_restarts == MAX_RESTARTS + 2


async def test_a_configuration_error_ends_everything_at_once(pipe: Pipe, tmp_path: Path) -> None:
    specs = [spec(pipe, "broker", "exit", "2"), spec(pipe, "learner", "serve")]
    supervisor = Supervisor(specs, tmp_path / "logs", VirtualClock(), backoff_s=0.001)
    error = await ended(supervisor)
    assert isinstance(error, ServiceError)
    assert str(error).startswith("broker cannot start:")
    assert "last words" in str(error)
    broker, learner = supervisor.children
    assert broker.num_restarts == 0
    assert (learner.state, learner.pid) == ("stopped", None)


@pytest.mark.parametrize("ends", ["9 2", "6", "6 9 6", "6 9 2"])
async def test_a_process_that_could_start_before_or_is_not_certain_may_once_say_that_it_cannot(
    pipe: Pipe, tmp_path: Path, ends: str
) -> None:
    async with supervised(pipe, [spec(pipe, "rollout-0", "refuse", str(tmp_path / "starts"), ends)]) as supervisor:
        for _ in [*ends.split(), "serves"]:
            await pipe.started()
        assert supervisor.children[0].num_restarts == len(ends.split())


@pytest.mark.parametrize(("ends", "num_restarts"), [("2", 0), ("9 2 2", 2), ("6 6", 1), ("6 2", 1), ("6 9 6 6", 3)])
async def test_a_process_that_says_twice_in_a_row_that_it_cannot_start_ends_everything(
    pipe: Pipe, tmp_path: Path, ends: str, num_restarts: int
) -> None:
    specs = [spec(pipe, "rollout-0", "refuse", str(tmp_path / "starts"), ends)]
    supervisor = Supervisor(specs, tmp_path / "logs", VirtualClock(), backoff_s=0.001)
    error = await ended(supervisor)
    assert str(error) == "rollout-0 cannot start: no such thing"
    assert supervisor.children[0].num_restarts == num_restarts


async def test_a_machine_that_cannot_start_a_process_now_is_asked_again(pipe: Pipe) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    async with supervised(pipe, [spec(pipe, "broker", "serve")], backoff_s=0.1) as supervisor:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limit[1]))  # The next file would be one too many.
            await asyncio.wait_for(until(lambda: supervisor.children[0].num_restarts > 0), PATIENCE_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        await pipe.started()
        assert "Too many open files" in supervisor.children[0].said


async def test_a_process_that_cannot_be_started_for_long_ends_the_run_with_the_reason(pipe: Pipe, tmp_path: Path) -> None:
    nowhere = dataclasses.replace(spec(pipe, "learner", "serve"), place=ProcessPlace(cores=(10**6,)))
    error = await ended(Supervisor([nowhere], tmp_path / "logs", VirtualClock(), max_restarts=2, backoff_s=0.001))
    assert "learner ended 3 times" in str(error)
    assert "it cannot be started: Exception occurred in preexec_fn" in str(error)


@pytest.mark.parametrize(
    ("status", "event", "words"),
    [
        (
            EXIT_REPLACED,
            "replaced",
            "learner was replaced by another process of its name, or found damage",
        ),
        (EXIT_OCCUPIED, "occupied", "learner found its place taken by a live process, and is not restarted: stop that one"),
    ],
)
async def test_a_process_whose_place_another_one_has_is_not_restarted(
    pipe: Pipe, tmp_path: Path, status: int, event: str, words: str
) -> None:
    error_line = json.dumps({"event": event, "error": "session a has this run"})
    specs = [spec(pipe, "learner", "exit", str(status), error_line)]
    supervisor = Supervisor(specs, tmp_path / "logs", VirtualClock(), backoff_s=0.001)
    error = await ended(supervisor)
    assert isinstance(error, ServiceError)
    assert str(error).startswith(words)
    assert str(error).endswith("; session a has this run")
    assert supervisor.children[0].num_restarts == 0


async def test_a_finished_process_is_not_restarted(pipe: Pipe, tmp_path: Path) -> None:
    supervisor = Supervisor([spec(pipe, "rollout-0", "exit", "0")], tmp_path / "logs", VirtualClock())
    assert not supervisor.all_ended
    supervisor.run_is_over()
    assert await ended(supervisor) is None
    assert supervisor.all_ended
    assert supervisor.children[0].num_restarts == 0


async def test_a_rollout_that_somebody_else_stopped_before_the_end_of_the_run_is_restarted(pipe: Pipe) -> None:
    async with supervised(pipe, [spec(pipe, "rollout-0", "serve")]) as supervisor:
        _, first = await pipe.started()
        os.kill(first, signal.SIGTERM)
        assert await pipe.line() == "rollout-0 stopping"
        _, second = await pipe.started()
        assert second != first
        (child,) = supervisor.children
        assert (child.num_restarts, child.state) == (1, "running")
        supervisor.run_is_over()
        os.kill(second, signal.SIGTERM)
        assert await pipe.line() == "rollout-0 stopping"
        await asyncio.wait_for(until(lambda: supervisor.all_ended), PATIENCE_S)
        assert child.num_restarts == 1


async def test_a_server_that_somebody_else_stopped_is_restarted(pipe: Pipe) -> None:
    serving = dataclasses.replace(spec(pipe, "broker", "serve"), ends_by_itself=False)
    async with supervised(pipe, [serving]) as supervisor:
        _, first = await pipe.started()
        os.kill(first, signal.SIGTERM)
        assert await pipe.line() == "broker stopping"
        _, second = await pipe.started()
        assert second != first
        assert (supervisor.children[0].num_restarts, supervisor.all_ended) == (1, False)


async def test_processes_are_stopped_in_order_each_after_the_one_before_has_ended(pipe: Pipe) -> None:
    specs = [
        spec(pipe, "broker", "serve", stop_order=2),
        spec(pipe, "learner", "serve", stop_order=1),
        spec(pipe, "rollout-0", "serve", stop_order=0),
        spec(pipe, "rollout-1", "serve", stop_order=0),
    ]
    async with supervised(pipe, specs) as supervisor:
        for _ in specs:
            await pipe.started()
        await supervisor.stop()
        said = [await pipe.line() for _ in specs]
        assert set(said[:2]) == {"rollout-0 stopping", "rollout-1 stopping"}
        assert said[2:] == ["learner stopping", "broker stopping"]
        assert [child.state for child in supervisor.children] == ["stopped"] * 4


async def test_a_process_that_does_not_stop_in_its_grace_period_is_killed(pipe: Pipe) -> None:
    async with supervised(pipe, [spec(pipe, "rollout-0", "stubborn", grace_s=1.5)]) as supervisor:
        _, pid = await pipe.started()
        await supervisor.stop()
        assert await pipe.line() == "rollout-0 refuses"
        assert not psutil.pid_exists(pid)
        assert supervisor.children[0].num_restarts == 0


async def test_no_process_outlives_a_supervisor_that_is_killed(pipe: Pipe, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.processes.supervising", str(pipe.path), str(tmp_path / "logs")]
    supervisor = await asyncio.create_subprocess_exec(*command)
    children = [psutil.Process((await pipe.started())[1]) for _ in range(2)]
    try:
        supervisor.kill()
        await supervisor.wait()
        said = {await pipe.line(), await pipe.line()}
        assert said == {"one stopping", "two stopping"}
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=PATIENCE_S)
        assert alive == []
    finally:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


async def test_a_broker_whose_port_is_taken_for_a_moment_is_started_again(pipe: Pipe, tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path)
    made = ProcessSpec(
        name="broker", module=broker.module, arguments=(str(broker.config),), stop_order=0, grace_s=PATIENCE_S,
        ends_by_itself=False,
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", int(broker.work_endpoint.rpartition(":")[2]))) as somebody:
        async with supervised(pipe, [made]) as supervisor:
            (child,) = supervisor.children
            await asyncio.wait_for(until(lambda: child.num_restarts > 0), PATIENCE_S)
            assert "cannot bind" in child.said
            somebody.close()
            await asyncio.wait_for(until(lambda: "broker_started" in child.log_path.read_text()), PATIENCE_S)
