"""Connections of a real broker process stall, break and stay half open: nothing is lost, and the run continues."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq.asyncio

from gspo_protocol.messages import Chunk
from tests.support.broker.ledger_audit import audit
from tests.support.broker.peers import ScriptedLearner, ScriptedRollout
from tests.support.broker.process import BrokerProcess, broker_process, eventually
from tests.support.wire.relay import Relay, tag_of
from tests.support.wire.zmq_ends import zmq_context

RUN_S = 60.0
LEASE_S = 1.0
NUM_BATCHES = 4


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def a_rollout(context: zmq.asyncio.Context, endpoint: str, name: str) -> ScriptedRollout:
    return ScriptedRollout(context, endpoint, name, f"session of {name}", action_tokens=21, chunk_delay_s=0.02)


def assert_clean(broker: BrokerProcess) -> None:
    report = audit(broker.run_directory)
    assert report.problems == []
    assert (report.num_batches, report.dropped, report.num_trained_again) == (NUM_BATCHES, {}, 0)


async def test_leases_of_a_stalled_rollout_end_and_its_messages_after_a_cut_are_refused(tmp_path: Path) -> None:
    settings = {"run": {"num_batches": NUM_BATCHES}, "broker": {"lease_s": LEASE_S}}
    async with zmq_context() as context, broker_process(tmp_path, **settings) as broker:
        with Relay(port_of(broker.work_endpoint)) as relay:
            far = a_rollout(context, relay.endpoint, "far")
            near = a_rollout(context, broker.work_endpoint, "near")

            async def stall_and_cut(tasks: asyncio.TaskGroup) -> None:
                await eventually(lambda: far.num_acknowledged >= 4)
                relay.stall()
                tasks.create_task(near.run())
                await broker.logged("lease_expired", 1)
                relay.cut()
                relay.heal()

            async with asyncio.timeout(RUN_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(far.run())
                tasks.create_task(ScriptedLearner(context, broker.batch_endpoint, "s").run())
                await stall_and_cut(tasks)
            # The other rollout continued its trajectories from what had been acknowledged.
            assert any(lease.num_tokens for lease in near.seen_leases)
            assert relay.num_reset >= 1
        assert await broker.terminate() == 0
    assert_clean(broker)


def cut(relay: Relay) -> None:
    relay.cut()


def half_open(relay: Relay) -> None:
    relay.half_open()


@pytest.mark.parametrize("fault", [cut, pytest.param(half_open, marks=pytest.mark.faults)])
async def test_a_connection_lost_with_a_chunk_in_it_costs_nothing(fault: Callable[[Relay], None], tmp_path: Path) -> None:
    """Half open: the rollout is not told; its heartbeats find out that the broker does not receive it."""
    settings = {"run": {"num_batches": NUM_BATCHES}, "broker": {"lease_s": LEASE_S}}
    async with zmq_context() as context, broker_process(tmp_path, **settings) as broker:
        with Relay(port_of(broker.work_endpoint)) as relay:
            rollout = a_rollout(context, relay.endpoint, "r")
            lost = relay.on(tag_of(Chunk), lambda: fault(relay))
            async with asyncio.timeout(RUN_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(rollout.run())
                tasks.create_task(ScriptedLearner(context, broker.batch_endpoint, "s").run())
            assert lost.seen.is_set()
            assert relay.num_connections >= 2
        assert await broker.terminate() == 0
    assert_clean(broker)


@pytest.mark.faults
async def test_a_learner_with_a_connection_that_stalls_and_breaks_gets_every_batch_once(tmp_path: Path) -> None:
    async with zmq_context() as context, broker_process(tmp_path, run={"num_batches": NUM_BATCHES}) as broker:
        with Relay(port_of(broker.batch_endpoint)) as relay:
            learner = ScriptedLearner(context, relay.endpoint, "s")

            async def stall_and_cut() -> None:
                await broker.logged("batch_trained", 1)
                relay.stall()
                relay.cut()
                await asyncio.sleep(2 * LEASE_S)  # a silence that both ends must outlast
                relay.heal()
                await broker.logged("batch_trained", 2)
                relay.half_open()

            async with asyncio.timeout(RUN_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(a_rollout(context, broker.work_endpoint, "r").run())
                tasks.create_task(learner.run())
                tasks.create_task(stall_and_cut())
            assert [batch.index for batch, _ in learner.batches] == list(range(NUM_BATCHES))
            assert relay.num_connections >= 3
        assert await broker.terminate() == 0
    assert_clean(broker)
