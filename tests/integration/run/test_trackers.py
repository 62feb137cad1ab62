"""Processes that a run can do without: trackers that hang, refuse or cannot start."""

import asyncio
import dataclasses
from pathlib import Path

import psutil
import pytest

from gspo_services.cli.run.supervisor import MAX_RESTARTS, ProcessSpec
from tests.support.processes.evaluated_run import write_evaluated_run
from tests.support.processes.supervised import PATIENCE_S, Pipe, pipe, spec, supervised

__all__ = ["pipe"]


def optional(made: ProcessSpec, **changes: object) -> ProcessSpec:
    return dataclasses.replace(made, is_essential=False, **changes)  # type: ignore[arg-type]


async def test_a_tracker_that_sleeps_for_ever_costs_the_run_nothing_but_its_grace(pipe: Pipe, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_evaluated_run(run)
    sleeping = ProcessSpec(
        name="tracker-tensorboard",
        module="tests.support.processes.sleeping_tracker",
        arguments=(str(pipe.path), str(run), "--to", "tensorboard", "--follow"),
        stop_order=3,
        grace_s=0.2,
        is_essential=False,
        ends_by_itself=False,
    )
    async with supervised(pipe, [spec(pipe, "broker", "serve", stop_order=2), sleeping]) as supervisor:
        told = {(await pipe.line()).partition(" ")[2].split()[0] for _ in range(2)}
        assert told == {"started", "sleeps"}
        broker, tracker = supervisor.children
        assert tracker.pid is not None
        process = psutil.Process(tracker.pid)
        assert (broker.state, tracker.state) == ("running", "running")
        used = process.cpu_times()
        async with asyncio.timeout(PATIENCE_S):
            await supervisor.stop()
    assert await pipe.line() == "broker stopping"
    assert (broker.state, tracker.state) == ("stopped", "stopped")
    assert not process.is_running()
    assert used.user > 0.0, "it was there and worked until it slept"


@pytest.mark.parametrize("status", ["2", "4"])
async def test_an_optional_process_that_cannot_start_is_given_up_and_the_others_go_on(status: str, pipe: Pipe) -> None:
    specs = [spec(pipe, "broker", "serve"), optional(spec(pipe, "tracker", "exit", status, "no key"))]
    async with supervised(pipe, specs) as supervisor:
        names = {(await pipe.started())[0] for _ in range(2)}
        assert names == {"broker", "tracker"}
        broker, tracker = supervisor.children
        async with asyncio.timeout(PATIENCE_S):
            while not tracker.given_up:  # noqa: ASYNC110 - the supervisor keeps no event
                await asyncio.sleep(0)
        assert tracker.state == "given up"
        assert "no key" in tracker.given_up
        assert broker.state == "running"
        assert not supervisor.all_ended


async def test_an_optional_process_that_ends_again_and_again_is_given_up(pipe: Pipe) -> None:
    async with supervised(pipe, [optional(spec(pipe, "tracker", "exit", "1", "refused"))]) as supervisor:
        for _ in range(MAX_RESTARTS + 1):
            await pipe.started()
        (tracker,) = supervisor.children
        async with asyncio.timeout(PATIENCE_S):
            while not tracker.given_up:  # noqa: ASYNC110 - the supervisor keeps no event
                await asyncio.sleep(0)
        assert (tracker.num_restarts, tracker.last_status) == (MAX_RESTARTS, 1)
        assert "refused" in tracker.given_up


async def test_a_run_has_ended_when_all_that_it_needs_has(pipe: Pipe) -> None:
    learner = dataclasses.replace(spec(pipe, "learner", "when-told", "exit", "0"), ends_by_itself=True)
    async with supervised(pipe, [learner, optional(spec(pipe, "tracker", "serve"), ends_by_itself=False)]) as supervisor:
        pids = dict([await pipe.started(), await pipe.started()])
        assert not supervisor.all_ended
        supervisor.run_is_over()
        psutil.Process(pids["learner"]).send_signal(10)
        async with asyncio.timeout(PATIENCE_S):
            while not supervisor.all_ended:  # noqa: ASYNC110 - the supervisor keeps no event
                await asyncio.sleep(0)
        assert supervisor.children[1].state == "running"
