"""A run's directory is copied to another machine and served there, too: a peer of the one broker never joins the other."""

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import zmq.asyncio

from gspo_services.shared.runtime.errors import ServiceError, flatten
from tests.support.broker.peers import ScriptedLearner, ScriptedRollout
from tests.support.broker.process import BrokerProcess, broker_process
from tests.support.wire.relay import Relay
from tests.support.wire.zmq_ends import PATIENCE_S, in_background, zmq_context

LONG = {"run": {"num_batches": 100_000}}


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


async def ending(running: Awaitable[None]) -> str:
    """Why a peer ends by itself."""
    try:
        await running
    except ExceptionGroup as group:
        (error,) = flatten(group)
        assert isinstance(error, ServiceError), error
        return str(error)
    raise AssertionError("it ended without an error")


def as_on_another_machine(directory: Path) -> None:
    """Nothing in the directory leads to the one that it was copied from."""
    path = directory / "settings.json"
    settings = json.loads(path.read_text())
    settings["run"]["directory"] = "/nowhere/run"
    path.write_text(json.dumps(settings))


@contextlib.asynccontextmanager
async def trains(context: zmq.asyncio.Context, broker: BrokerProcess, session: str) -> AsyncIterator[None]:
    """A learner and a rollout at ``broker`` for the duration of the block."""
    learner = ScriptedLearner(context, broker.batch_endpoint, session)
    learner.resume_at = max(0, broker.last("broker_started")["next_batch"] - 1)
    rollout = ScriptedRollout(context, broker.work_endpoint, f"rollout-{session}", session)
    async with in_background(learner.run(), rollout.run()):
        yield


async def test_peers_of_a_run_do_not_join_the_broker_of_its_copy(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    async with contextlib.AsyncExitStack() as stack:
        context = await stack.enter_async_context(zmq_context())
        here = await stack.enter_async_context(broker_process(tmp_path / "here", **LONG))
        work, batch = (stack.enter_context(Relay(port_of(each))) for each in (here.work_endpoint, here.batch_endpoint))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        learner = ScriptedLearner(context, batch.endpoint, "first", train_s=0.05)
        rollout = ScriptedRollout(context, work.endpoint, "rollout-0", "first")
        trained, sampled = (tasks.create_task(ending(each.run())) for each in (learner, rollout))
        await here.logged("batch_trained", 2)
        for relay in (work, batch):
            relay.shut()  # Nobody listens there, as without the relay.
        assert await here.terminate() == 0
        shutil.copytree(here.run_directory, tmp_path / "there" / "run")
        as_on_another_machine(tmp_path / "there" / "run")
        await here.start()
        for relay in (work, batch):
            relay.open()
        # An end and a new start do not count against a broker: it has all that its peers were told of.
        await here.logged("batch_trained", here.count("batch_trained") + 2)
        there = await stack.enter_async_context(broker_process(tmp_path / "there", **LONG))
        async with trains(context, there, "second"):
            await there.logged("batch_trained", 2)
        for relay, endpoint in ((work, there.work_endpoint), (batch, there.batch_endpoint)):
            relay.target = port_of(endpoint)
            relay.cut()
        run_id = there.last("broker_started")["run_id"]
        for name, task, its_own in (
            ("learner", trained, ", with the checkpoints that belong to it"),
            ("rollout-0", sampled, ""),
        ):
            async with asyncio.timeout(PATIENCE_S):
                said = await task
            assert f"this broker's ledger is not the one that {name} knows of run {run_id}: it" in said
            assert re.search(
                r"commit \d+ is another one than the one that this|ends at commit \d+, and this process was told", said
            )
            assert f"To go on with this ledger, start {name} again{its_own}" in said
        # Started again, a process knows nothing of the other ledger.
        async with trains(context, there, "third"):
            await there.logged("batch_trained", there.count("batch_trained") + 1)


async def test_an_older_copy_in_the_place_of_a_run_is_refused_by_peers_that_were_told_more(tmp_path: Path) -> None:
    async with zmq_context() as context, broker_process(tmp_path, **LONG) as broker, asyncio.TaskGroup() as tasks:
        sampled = tasks.create_task(ending(ScriptedRollout(context, broker.work_endpoint, "rollout-0", "first").run()))
        async with in_background(ScriptedLearner(context, broker.batch_endpoint, "first").run()):
            await broker.logged("batch_trained", 1)
            assert await broker.terminate() == 0
            shutil.copytree(broker.run_directory, tmp_path / "copy")
            await broker.start()
            # More than can be ready: the rollout has been told of commits that hold its newest chunks.
            await broker.logged("batch_trained", broker.count("batch_trained") + 5)
        await broker.kill()
        shutil.rmtree(broker.run_directory)
        (tmp_path / "copy").rename(broker.run_directory)
        await broker.start()
        async with asyncio.timeout(PATIENCE_S):
            said = await sampled
        assert "it ends at commit" in said
        assert "an older copy was put in its place" in said
