"""Two real brokers of one run, as its operators see them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from tests.integration.broker.test_doctor_and_stop import ALONE, command
from tests.support.broker.peers import ScriptedLearner, ScriptedRollout
from tests.support.broker.process import BrokerProcess, broker_process, eventually
from tests.support.processes.ports import free_ports
from tests.support.wire.zmq_ends import in_background, zmq_context

Pair = tuple[BrokerProcess, BrokerProcess]


@contextlib.asynccontextmanager
async def two_brokers(directory: Path, num_batches: int = 4) -> AsyncIterator[Pair]:
    """Started, of one run in ``directory / "0" / "run"``."""
    work, batch = next(
        pair for _ in range(100) if not {each + 2 for each in (pair := free_ports(2))} & set(pair)
    )
    shared = {
        "work_endpoint": f"tcp://127.0.0.1:{work}",
        "batch_endpoint": f"tcp://127.0.0.1:{batch}",
        "num_brokers": 2,
        "metrics_port": 0,
    }
    run = {"directory": str(directory / "0" / "run"), "num_batches": num_batches}
    async with contextlib.AsyncExitStack() as stack:
        brokers = []
        for number in range(2):
            own = directory / str(number)
            own.mkdir(parents=True)
            settings = {"run": run, "broker": {**shared, "number": number}}
            brokers.append(await stack.enter_async_context(broker_process(own, **settings, **ALONE)))
        yield brokers[0], brokers[1]


@contextlib.asynccontextmanager
async def worked(brokers: Pair) -> AsyncIterator[None]:
    """Each broker has a rollout and a learner of its own, which stand for those of the run."""
    async with zmq_context() as context, contextlib.AsyncExitStack() as stack:
        for number, broker in enumerate(brokers):
            endpoints = [f"{part.rpartition(':')[0]}:{int(part.rpartition(':')[2])}" for part in endpoints_of(broker)]
            rollout = ScriptedRollout(context, endpoints[0], "rollout-0", f"r{number}")
            learner = ScriptedLearner(context, endpoints[1], f"l{number}")
            await stack.enter_async_context(in_background(rollout.run()))
            await stack.enter_async_context(in_background(learner.run()))
        yield


def endpoints_of(broker: BrokerProcess) -> tuple[str, str]:
    """Where the broker says that it is."""
    started = broker.last("broker_started")
    return started["work_endpoint"], started["batch_endpoint"]


async def test_a_run_of_two_brokers_is_stopped_by_one_command_and_has_ended_when_both_have(tmp_path: Path) -> None:
    async with two_brokers(tmp_path, num_batches=1000) as brokers:
        directory = tmp_path / "0" / "run"
        async with worked(brokers):
            for broker in brokers:
                await broker.logged("batch_trained", 2)
            status, said = await command("stop", str(directory), "--reason", "enough for today")
            assert status == 0, said
            for broker in brokers:
                await broker.logged("run_stopping")
            await eventually(lambda: all(broker.count("peer_left") >= 1 for broker in brokers))
        status, said = await command("doctor", str(directory))
        assert "the run has ended after" in said
        assert status == 0, said


async def test_a_broker_that_is_gone_is_named_and_a_stop_says_that_it_has_not_agreed(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as brokers:
        directory = tmp_path / "0" / "run"
        await brokers[1].terminate()
        status, said = await command("doctor", str(directory))
        assert status == 1
        assert "broker-1" in said
        assert "broker 1 to answer" in said
        status, said = await command("stop", str(directory))
        assert status == 1
        assert "broker 1 of 2 did not agree, and the others did" in said
        await asyncio.wait_for(brokers[0].logged("run_stopping"), 30)
