"""Two real brokers of one run, as its operators see them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from gspo_services.runs.audit import audit_run
from gspo_services.shared.settings import SETTINGS_FILE
from tests.support.broker.commands import ALONE, command
from tests.support.broker.peers import ScriptedLearner, ScriptedRollout
from tests.support.broker.process import BrokerProcess, broker_process
from tests.support.processes.ports import free_ports
from tests.support.wire.zmq_ends import in_background, zmq_context

Pair = tuple[BrokerProcess, BrokerProcess]


@contextlib.asynccontextmanager
async def two_brokers(directory: Path, num_batches: int = 4) -> AsyncIterator[Pair]:
    """Started, of one run in ``directory / "0" / "run"``."""
    work, batch = free_ports(2)
    shared = {
        "work_endpoint": f"tcp://127.0.1.{{broker}}:{work}",
        "batch_endpoint": f"tcp://127.0.1.{{broker}}:{batch}",
        "num_brokers": 2,
        "metrics_port": 0,
    }
    run = {"directory": str(directory / "0" / "run"), "num_batches": num_batches}
    async with contextlib.AsyncExitStack() as stack:
        brokers = []
        for number in range(2):
            own = directory / str(number)
            own.mkdir(parents=True)
            settings = {"run": run, "broker": {**shared, "number": number}, "security": {"allow_plaintext": True}}
            brokers.append(await stack.enter_async_context(broker_process(own, **settings, **ALONE)))
        yield brokers[0], brokers[1]


@contextlib.asynccontextmanager
async def worked(brokers: Pair) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Each broker has a rollout and a learner of its own, which stand for those of the run. Gives the learners."""
    async with zmq_context() as context, contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        learners = []
        for number, broker in enumerate(brokers):
            started = broker.last("broker_started")
            rollout = ScriptedRollout(context, started["work_endpoint"], "rollout-0", f"r{number}")
            learner = ScriptedLearner(context, started["batch_endpoint"], f"l{number}")
            await stack.enter_async_context(in_background(rollout.run()))
            learners.append(tasks.create_task(learner.run()))
        yield learners


async def test_a_run_of_two_brokers_is_stopped_by_one_command(tmp_path: Path) -> None:
    async with two_brokers(tmp_path, num_batches=1000) as brokers:
        directory = tmp_path / "0" / "run"
        async with worked(brokers) as learners:
            for broker in brokers:
                await broker.logged("batch_trained", 2)
            status, said = await command("stop", str(directory), "--reason", "enough for today")
            assert status == 0, said
            for broker in brokers:
                await broker.logged("run_stops")
            async with asyncio.timeout(60):
                await asyncio.gather(*learners)


async def test_a_stop_beside_brokers_that_bind_every_address_is_told_theirs(tmp_path: Path) -> None:
    """In a pod the settings of the run say 0.0.0.0, where only its own broker answers."""
    async with two_brokers(tmp_path, num_batches=1000) as brokers:
        directory = tmp_path / "0" / "run"
        port = brokers[0].batch_endpoint.rpartition(":")[2]
        async with worked(brokers) as learners:
            for broker in brokers:
                await broker.logged("batch_trained", 1)
            kept = json.loads((directory / SETTINGS_FILE).read_text())
            kept["broker"]["batch_endpoint"] = f"tcp://0.0.0.0:{port}"
            (directory / SETTINGS_FILE).write_text(json.dumps(kept))
            told = f"broker.batch_endpoint=tcp://127.0.1.{{broker}}:{port}"
            status, said = await command("stop", str(directory), "--set", told)
            assert status == 0, said
            async with asyncio.timeout(60):
                await asyncio.gather(*learners)


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
        assert "broker 1 of 2 did not agree, the others did" in said
        await asyncio.wait_for(brokers[0].logged("run_stops"), 30)


async def test_a_whole_run_of_two_brokers_has_ended_when_both_have_and_is_audited_as_one(tmp_path: Path) -> None:
    directory = tmp_path / "0" / "run"
    async with two_brokers(tmp_path) as brokers:
        async with worked(brokers) as learners, asyncio.timeout(60):
            await asyncio.gather(*learners)
        status, said = await command("doctor", str(directory))
        assert status == 0, said
        assert "the run has ended after 4 batches" in said
        for name in ("broker", "broker-1"):
            assert f"│ {name} │ connected │" in said
    audit = audit_run(directory)
    assert audit.problems == []
    assert (audit.num_batches, audit.num_trained_batches) == (4, 4)
    assert [each.num_trained_trajectories for each in audit.brokers] == [8, 8]
