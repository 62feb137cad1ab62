"""The launcher of a machine's ranks with real processes and signals. A rank reports through a named pipe."""

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from gspo_services.learner.start.ranks import Node, run_ranks
from tests.support.processes.supervised import PATIENCE_S, Pipe

LAUNCH = (
    "import sys; from gspo_services.learner.start.ranks import run_ranks; "
    "sys.exit(run_ranks('tests.support.processes.child', sys.argv[2:], 2, stop_s=float(sys.argv[1])))"
)


@pytest_asyncio.fixture
async def pipe(tmp_path: Path) -> AsyncIterator[Pipe]:
    async with Pipe(tmp_path / "pipe").opened() as pipe:
        yield pipe


@contextlib.asynccontextmanager
async def launcher(pipe: Pipe, *behaviour: str, stop_s: float = 60.0) -> AsyncIterator[tuple[Process, list[psutil.Process]]]:
    """Two ranks that have started, in the order of their ranks."""
    arguments = [str(stop_s), "rank", str(pipe.path), *behaviour]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", LAUNCH, *arguments)
    ranks: list[psutil.Process] = []
    try:
        # They are started in this order, but the second may report first.
        for pid in sorted([(await pipe.started())[1] for _ in range(2)]):
            with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended by now
                ranks.append(psutil.Process(pid))
        yield process, ranks
    finally:
        for each in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def status_of(process: Process) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return await process.wait()


async def test_a_clean_stop_reaches_every_rank_and_ends_with_status_0(pipe: Pipe) -> None:
    async with launcher(pipe, "serve") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert {await pipe.line(), await pipe.line()} == {"rank stopping"}
        assert await status_of(process) == 0


@pytest.mark.parametrize("rank", [0, 1])
async def test_one_rank_that_dies_ends_the_others_and_names_its_signal(pipe: Pipe, tmp_path: Path, rank: int) -> None:
    async with launcher(pipe, "when-told", "crash-once", str(tmp_path / "crashed")) as (process, ranks):
        ranks[rank].send_signal(signal.SIGUSR1)
        assert await pipe.line() == "rank stopping"
        assert await status_of(process) == 128 + signal.SIGKILL


async def test_if_all_ranks_end_with_one_status_the_launcher_does_too(pipe: Pipe) -> None:
    async with launcher(pipe, "when-told", "exit", "2") as (process, ranks):
        for rank in ranks:
            rank.send_signal(signal.SIGUSR1)
        assert await status_of(process) == 2


async def test_a_rank_that_a_stop_ends_by_its_signal_has_not_failed(pipe: Pipe) -> None:
    async with launcher(pipe, "unhandled") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert await status_of(process) == 0


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_another_process_ends_has_failed(pipe: Pipe, rank: int) -> None:
    async with launcher(pipe, "unhandled") as (process, ranks):
        ranks[rank].send_signal(signal.SIGTERM)
        assert await status_of(process) == 128 + signal.SIGTERM


def test_each_rank_learns_its_place_among_the_ranks_of_all_machines(tmp_path: Path) -> None:
    node = Node(index=2, num_nodes=3, host="10.0.0.1", port=29500)
    assert run_ranks("tests.support.learner.rank_place", [str(tmp_path)], 2, node=node) == 0
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert told == {"4": "4 0 6 2 10.0.0.1 29500", "5": "5 1 6 2 10.0.0.1 29500"}


async def test_ranks_that_do_not_stop_in_time_are_killed_and_the_launcher_fails(pipe: Pipe) -> None:
    async with launcher(pipe, "stubborn", stop_s=0.3) as (process, ranks):
        process.send_signal(signal.SIGTERM)
        assert await status_of(process) == 1
        _, alive = await asyncio.to_thread(psutil.wait_procs, ranks, timeout=PATIENCE_S)
        assert alive == []


async def test_ranks_do_not_outlive_a_launcher_that_is_killed(pipe: Pipe) -> None:
    async with launcher(pipe, "stubborn") as (process, ranks):
        process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, ranks, timeout=PATIENCE_S)
        assert alive == []
