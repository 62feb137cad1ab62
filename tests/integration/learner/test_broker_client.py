"""The learner's connection to the broker, in a thread of its own, against a scripted broker over real ZeroMQ."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo_protocol.channels import BATCH, WEIGHTS
from gspo_protocol.messages import (
    Ack,
    BatchPartRequest,
    BatchPending,
    BatchRequest,
    Checkpointed,
    EndOfRun,
    Evaluated,
    Heartbeat,
    Hello,
    LedgerCommit,
    Published,
    Refused,
    Resume,
    SkipBatch,
    Trained,
    VersionScore,
)
from gspo_services.learner.broker.parts import CREDIT, MOST_DAMAGED
from gspo_services.learner.broker.port import BatchAnnounced, PartArrived, Publication
from gspo_services.learner.broker.thread import BrokerThread
from gspo_services.learner.checkpoints import Versions
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.opening import broker_thread
from gspo_services.learner.weights.weight_copy import WeightCopy, copy_weights
from gspo_services.rollout.weights.fetch import fetch_newest
from gspo_services.shared.net.channel import RouterChannel
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.errors import EndpointError, ServiceError, flatten
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings.sections import Broker, Learner, Run, SecuritySection, Settings
from tests.support.broker.made_batches import damaged, in_parts
from tests.support.builders import a_batch, a_part, batch_arrays, part_arrays
from tests.support.wire.replicas import content
from tests.support.wire.snapshots import bytes_of, snapshot_of
from tests.support.wire.zmq_ends import ANY_PORT, ScriptedEnd, a_client, a_welcome, in_background, sequenced, zmq_context

OFTEN_S = 0.05


def a_copy(value: float = 0.0, size: int = 1) -> WeightCopy:
    return copy_weights([("w", torch.full((size,), value))])


def a_client_of(batch_endpoint: str, weights_endpoint: str = ANY_PORT, advertised: str = "") -> BrokerThread:
    clock = MonotonicClock()
    settings = Settings(
        broker=Broker(batch_endpoint=batch_endpoint),
        learner=Learner(weights_endpoint=weights_endpoint, advertised_weights_endpoint=advertised),
        security=SecuritySection(allow_plaintext=bool(advertised)),
    )
    return BrokerThread(
        settings,
        session="life-1",
        clock=clock,
        health=Health(clock, 60.0),
        metrics=LearnerMetrics(CollectorRegistry()),
        request_interval_s=OFTEN_S,
    )


VOCABULARY = 256


def a_version(number: int, weights: WeightCopy, trained_batches: int) -> Publication:
    return Publication(
        policy_version=number, weights=weights, trained_batches=trained_batches, vocabulary=VOCABULARY, note_digest=no_note
    )


def no_note(digest: str) -> None:
    """In the place of the learner's note of a version's digest."""


@contextlib.asynccontextmanager
async def opened(client: BrokerThread) -> AsyncIterator[BrokerThread]:
    """Starts and stops the client, which both block, beside this loop."""
    await asyncio.to_thread(client.__enter__)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.__exit__, None, None, None)
        assert "broker-loop" not in {thread.name for thread in threading.enumerate()}


@contextlib.asynccontextmanager
async def connected(advertised: str = "") -> AsyncIterator[tuple[ScriptedEnd, BrokerThread, zmq.asyncio.Context]]:
    """The broker's end and a client that it has welcomed."""
    async with zmq_context() as context:
        end = ScriptedEnd(context, BATCH)
        async with opened(a_client_of(end.endpoint, advertised=advertised)) as client:
            hello = await end.welcome(policy_version=7)
            assert (hello.role, hello.session) == ("learner", "life-1")
            welcome = await asyncio.to_thread(client.wait_welcome, 20.0)
            assert welcome is not None
            assert welcome.policy_version == 7
            yield end, client, context


async def test_heartbeats_are_sent_while_the_training_thread_does_something_else() -> None:
    async with connected() as (end, client, _):
        await asyncio.to_thread(client.publish, a_version(8, a_copy(), 0))
        while await end.expect(Heartbeat) != Heartbeat(policy_version=8, status="serving", leases=[]):
            pass


async def test_the_reason_to_wait_is_the_brokers_refusal_while_it_refuses() -> None:
    async with zmq_context() as context:
        end = ScriptedEnd(context, BATCH)
        async with opened(a_client_of(end.endpoint)) as client:
            await end.expect(Hello)
            await end.reply(Refused(reason="learner session a has this run", message_type="hello"))
            await end.expect(Hello)
            assert client.reason_to_wait == "learner session a has this run"
            assert await asyncio.to_thread(client.wait_welcome, 0.01) is None
            await end.welcome()
            assert await asyncio.to_thread(client.wait_welcome, 20.0) is not None
            assert client.reason_to_wait == "the broker"


async def test_the_broker_hears_what_the_learners_former_life_was_told_of_its_ledger(tmp_path: Path) -> None:
    former, newer = (LedgerCommit(run_id="test", number=number, digest="d") for number in (5, 8))
    Versions(tmp_path / "checkpoints", "former", lambda: former).begin(a_welcome())
    async with zmq_context() as context:
        end = ScriptedEnd(context, BATCH)
        clock = MonotonicClock()
        settings = Settings(
            run=Run(directory=tmp_path),
            broker=Broker(batch_endpoint=end.endpoint),
            learner=Learner(weights_endpoint=ANY_PORT),
        )
        opening = broker_thread(
            settings,
            session="life-1",
            clock=clock,
            health=Health(clock, 60.0),
            metrics=LearnerMetrics(CollectorRegistry()),
        )
        async with opened(opening) as client:
            assert (await end.welcome(commit=newer)).commit == former
            assert await asyncio.to_thread(client.wait_welcome, 20.0) is not None
            assert client.commit() == newer


async def test_no_welcome_in_time_is_none_and_not_an_error() -> None:
    async with zmq_context() as context:
        end = ScriptedEnd(context, BATCH)
        async with opened(a_client_of(end.endpoint)) as client:
            assert await asyncio.to_thread(client.wait_welcome, 0.05) is None
            assert client.reason_to_wait == f"no answer from the broker at {end.endpoint}"
            await end.welcome()
            assert await asyncio.to_thread(client.wait_welcome, 20.0) is not None


async def test_a_request_is_repeated_only_until_it_is_answered() -> None:
    async with connected() as (end, client, _):
        await asyncio.to_thread(client.tell, BatchRequest(index=4, policy_version=9))
        for _ in range(3):
            assert await end.expect(BatchRequest) == BatchRequest(index=4, policy_version=9)
        await end.reply(a_batch(), batch_arrays())
        await end.reply(a_part(), part_arrays())
        announced, arrived = [await asyncio.to_thread(client.take, 20.0) for _ in range(2)]
        assert isinstance(announced, BatchAnnounced)
        assert announced.batch == a_batch()
        assert isinstance(arrived, PartArrived)
        assert arrived.part == a_part()
        np.testing.assert_array_equal(arrived.arrays["token_ids"], part_arrays()["token_ids"])
        await asyncio.to_thread(client.tell, BatchRequest(index=5, policy_version=10))
        while await end.expect(BatchRequest) != BatchRequest(index=5, policy_version=10):
            pass
        await end.reply(a_batch(), batch_arrays())  # the answer to a repetition of the first request
        await end.reply(a_part(), part_arrays())
        await end.reply(EndOfRun(index=4, reason="another request's"))
        await end.reply(EndOfRun(index=5, reason="complete"))
        assert await asyncio.to_thread(client.take, 20.0) == EndOfRun(index=5, reason="complete")
        assert await asyncio.to_thread(client.take, 0.05) is None


async def test_the_reason_to_wait_is_what_a_pending_batch_waits_for() -> None:
    async with connected() as (end, client, _):
        await asyncio.to_thread(client.tell, BatchRequest(index=4, policy_version=9))
        await end.expect(BatchRequest)
        await end.reply(BatchPending(index=4, groups_ready=3, groups_needed=8, waiting_for="group 9: 2 of 4"))
        while client.reason_to_wait == "the broker":
            await end.expect(BatchRequest)
        assert client.reason_to_wait == "3 of 8 groups; group 9: 2 of 4"


async def test_a_version_is_announced_when_it_can_be_fetched() -> None:
    async with connected() as (end, client, context):
        for version in (8, 9):
            snapshot = snapshot_of(version, [("w", torch.full((3,), float(version)))])
            await asyncio.to_thread(client.publish, a_version(version, a_copy(float(version), 3), version - 8))
            published = await end.expect(Published)
            assert (published.policy_version, published.trained_batches) == (version, version - 8)
            assert (published.digest, published.num_bytes) == (snapshot.manifest.digest, 12)
            rollout = a_client(context, WEIGHTS, published.endpoint)
            async with in_background(rollout.run()):
                await rollout.connected_welcome()
                fetched = await fetch_newest(rollout, version - 1)
            assert fetched is not None
            assert content(fetched) == bytes_of(snapshot)


async def test_the_advertised_address_is_what_is_announced() -> None:
    async with connected(advertised="tcp://learner.svc:7003") as (end, client, _):
        await asyncio.to_thread(client.publish, a_version(8, a_copy(), 0))
        assert (await end.expect(Published)).endpoint == "tcp://learner.svc:7003"


async def test_reports_arrive_in_order_and_flush_waits_for_their_acknowledgement() -> None:
    async with connected() as (end, client, _):
        await asyncio.to_thread(client.tell, Trained(index=4, policy_version=9, metrics={"loss": 0.5, "entropy": None}))
        await asyncio.to_thread(client.tell, Checkpointed(next_batch=5, policy_version=9))
        assert await asyncio.to_thread(client.flush, 0.05) is False
        await end.expect(Checkpointed)
        assert sequenced(end) == [
            (0, Trained(index=4, policy_version=9, metrics={"loss": 0.5, "entropy": None})),
            (1, Checkpointed(next_batch=5, policy_version=9)),
        ]
        await end.reply(Ack(next_seq=2))
        assert await asyncio.to_thread(client.flush, 20.0) is True


async def test_training_continues_while_a_version_is_announced_and_waits_before_it_publishes_the_next() -> None:
    """The broker acknowledges nothing until its window is full: the first version cannot be announced."""
    async with connected() as (end, client, _):
        for index in range(BATCH.window):
            await asyncio.to_thread(client.tell, Trained(index=index, policy_version=9, metrics={}))
        await asyncio.to_thread(client.publish, a_version(8, a_copy(8.0), 0))
        await asyncio.to_thread(client.tell, Trained(index=BATCH.window, policy_version=9, metrics={}))
        await asyncio.to_thread(client.tell, BatchRequest(index=1, policy_version=8))
        async with asyncio.TaskGroup() as tasks:
            second = tasks.create_task(asyncio.to_thread(client.publish, a_version(9, a_copy(9.0), 1)))
            while await end.expect(BatchRequest) != BatchRequest(index=1, policy_version=8):
                pass
            assert sequenced(end)[-1][0] == BATCH.window - 1
            await end.reply(Ack(next_seq=1))
            assert (await end.expect(Published)).policy_version == 8
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await asyncio.shield(second)
            await end.reply(Ack(next_seq=2))
        assert (await end.expect(Trained)).index == BATCH.window
        await end.reply(Ack(next_seq=3))
        assert (await end.expect(Published)).policy_version == 9


async def test_a_report_follows_the_version_that_its_batch_made_even_if_its_digests_take_long() -> None:
    async with connected() as (end, client, _):
        await asyncio.to_thread(client.publish, a_version(8, a_copy(size=1_000_000), 1))
        await asyncio.to_thread(client.tell, Trained(index=0, policy_version=8, metrics={}))
        await end.expect(Trained)
        assert [type(message) for _, message in sequenced(end)] == [Published, Trained]


async def test_batches_are_acknowledged_with_the_report_of_the_last_of_them() -> None:
    async with connected() as (end, client, _):
        assert await asyncio.to_thread(client.acknowledged, 0)
        await asyncio.to_thread(client.publish, a_version(8, a_copy(), 1))
        await asyncio.to_thread(client.tell, Trained(index=0, policy_version=8, metrics={}))
        await asyncio.to_thread(client.tell, Trained(index=1, policy_version=9, metrics={}))
        for _ in range(2):
            await end.expect(Trained)
        await end.reply(Ack(next_seq=1))
        assert await asyncio.to_thread(client.flush, 0.2) is False
        assert not await asyncio.to_thread(client.acknowledged, 1)
        await end.reply(Ack(next_seq=2))
        assert await asyncio.to_thread(client.flush, 0.2) is False, "the second report is not acknowledged"
        assert await asyncio.to_thread(client.acknowledged, 1)
        assert not await asyncio.to_thread(client.acknowledged, 2)


async def test_no_more_than_two_versions_are_held_while_a_third_is_copied() -> None:
    async with connected() as (_, client, _):
        store = client._loop._publisher._store
        for version in (8, 9):
            await asyncio.to_thread(client.publish, a_version(version, a_copy(float(version)), 0))
            await asyncio.to_thread(client._call, client._loop.announced(), 20.0)
            store.fetches(b"slow", 8)
        assert [store.snapshot(version) is not None for version in (8, 9)] == [True, True]
        await asyncio.to_thread(client.wait_for_room)
        assert [store.snapshot(version) is not None for version in (8, 9)] == [False, True]


async def test_a_failed_publication_is_raised_in_the_training_thread() -> None:
    async with connected() as (_, client, _):
        await asyncio.to_thread(client.publish, a_version(8, a_copy(), 0))
        await asyncio.to_thread(client.publish, a_version(8, a_copy(1.0), 1))
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.to_thread(client.wait_for_room)
        (error,) = flatten(caught.value)
        assert "policy version 8 after 8: versions grow and are never reused" in str(error)


async def test_a_restarted_broker_is_told_where_the_checkpoint_stands_and_which_batch_is_wanted() -> None:
    async with connected() as (end, client, _):
        await asyncio.to_thread(client.tell, Resume(next_batch=4))
        assert await end.expect(Resume) == Resume(next_batch=4)
        await asyncio.to_thread(client.tell, BatchRequest(index=4, policy_version=9))
        await end.expect(BatchRequest)
        await end.refuse_session()
        end.seen.clear()
        await end.welcome(policy_version=7)
        await end.expect(Resume)
        await end.expect(BatchRequest)
        heard = [received.message for received in end.seen if not isinstance(received.message, Heartbeat)]
        after_hello = heard[[isinstance(message, Hello) for message in heard].index(True) + 1 :]
        assert after_hello[:2] == [Resume(next_batch=4), BatchRequest(index=4, policy_version=9)]


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.take(20.0),
        lambda client: client.flush(20.0),
        lambda client: client.tell(BatchRequest(index=1, policy_version=1)),
        lambda client: client.wait_welcome(20.0),
    ],
)
async def test_a_failure_of_the_loop_is_raised_in_the_training_thread(call: Callable[[BrokerThread], Any]) -> None:
    async with connected() as (end, client, _):
        await end.reply(Refused(reason="a newer learner took over", fatal=True))
        await asyncio.to_thread(client._thread.join, 20.0)
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.to_thread(call, client)
        (error,) = flatten(caught.value)
        assert isinstance(error, ServiceError)
        assert "a newer learner took over" in str(error)


async def test_a_call_that_waits_while_the_loop_fails_ends_with_the_reason() -> None:
    async with connected() as (end, client, _):
        await asyncio.to_thread(client.tell, Trained(index=0, policy_version=1, metrics={}))
        async with asyncio.TaskGroup() as tasks:
            flushing = tasks.create_task(asyncio.to_thread(failure_of, client.flush, 60.0))
            await end.expect(Trained)
            await end.reply(Refused(reason="a newer learner took over", fatal=True))
        error = flushing.result()
        assert isinstance(error, ExceptionGroup)
        assert isinstance(flatten(error)[0], ServiceError)


def failure_of(call: Callable[..., Any], *arguments: Any) -> BaseException | None:
    try:
        call(*arguments)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
    return None


async def test_a_closed_client_refuses_calls_instead_of_waiting() -> None:
    async with connected() as (_, client, _):
        pass
    for call in (
        lambda: client.tell(BatchRequest(index=1, policy_version=1)),
        lambda: client.take(1.0),
        lambda: client.flush(1.0),
    ):
        with pytest.raises(ServiceError, match="the learner's sockets are closed"):
            call()


async def test_a_weights_port_in_use_is_reported_when_the_client_is_opened() -> None:
    async with zmq_context() as context:
        taken = RouterChannel(context, WEIGHTS, ANY_PORT)
        client = a_client_of("tcp://127.0.0.1:1", taken.endpoint)
        with pytest.raises(EndpointError, match="Choose another port"):
            await asyncio.to_thread(client.__enter__)
        await asyncio.to_thread(client._thread.join, 20.0)
        assert not client._thread.is_alive()


async def test_parts_are_asked_for_as_they_are_taken_and_again_after_damage_or_a_new_handshake() -> None:
    made = in_parts(8)
    async with connected() as (end, client, _):
        await asyncio.to_thread(client.tell, BatchRequest(index=4, policy_version=9))
        await end.expect(BatchRequest)
        await end.reply(made.batch, made.arrays)
        assert await end.expect(BatchPartRequest) == BatchPartRequest(index=4, part=1, count=CREDIT - 1)
        for part in (made.parts[0], made.parts[0], made.parts[1]):
            await end.reply(*part)
        assert isinstance(await asyncio.to_thread(client.take, 20.0), BatchAnnounced)
        assert await taken_part(client) == 0
        assert await end.expect(BatchPartRequest) == BatchPartRequest(index=4, part=CREDIT, count=1)
        assert await taken_part(client) == 1
        assert await end.expect(BatchPartRequest) == BatchPartRequest(index=4, part=CREDIT + 1, count=1)
        await end.reply(*damaged(made.parts[2]))
        assert await end.expect(BatchPartRequest) == BatchPartRequest(index=4, part=2, count=CREDIT)
        await end.refuse_session()
        await end.welcome(policy_version=7)
        assert await end.expect(BatchPartRequest) == BatchPartRequest(index=4, part=2, count=CREDIT)
        for number in range(2, 8):
            await end.reply(*made.parts[number])
            assert await taken_part(client) == number
        assert await asyncio.to_thread(client.take, 0.05) is None


async def test_parts_that_arrive_damaged_again_and_again_end_the_loop_and_name_the_broker() -> None:
    made = in_parts(2)
    async with connected() as (end, client, _):
        await asyncio.to_thread(client.tell, BatchRequest(index=4, policy_version=9))
        await end.expect(BatchRequest)
        await end.reply(made.batch, made.arrays)
        for _ in range(MOST_DAMAGED):
            await end.reply(*damaged(made.parts[0]))
        await asyncio.to_thread(client._thread.join, 20.0)
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.to_thread(client.take, 20.0)
        (error,) = flatten(caught.value)
        assert isinstance(error, ServiceError)
        assert f"the broker at {end.endpoint}: part 0 of batch 4 arrived damaged {MOST_DAMAGED} times" in str(error)


async def test_the_scores_are_what_the_broker_has_said() -> None:
    async with connected() as (end, client, _):
        await asyncio.to_thread(client.tell, BatchRequest(index=4, policy_version=9))
        await end.expect(BatchRequest)
        await end.reply(Evaluated(scores=[VersionScore(3, False, 0.5)]))
        await end.reply(EndOfRun(index=4, reason="complete"))
        assert isinstance(await asyncio.to_thread(client.take, 20.0), EndOfRun)
        assert client.scores() == {3: 0.5}


async def test_a_batch_of_which_a_part_cannot_be_read_is_skipped_after_the_parts_that_came() -> None:
    made = in_parts(8)
    async with connected() as (end, client, _):
        await asyncio.to_thread(client.tell, BatchRequest(index=4, policy_version=9))
        await end.expect(BatchRequest)
        await end.reply(made.batch, made.arrays)
        await end.reply(*made.parts[0])
        skip = SkipBatch(index=4, reason="it cannot be delivered")
        await end.reply(SkipBatch(index=3, reason="of another request"))
        await end.reply(skip)
        await end.reply(*made.parts[1])
        assert isinstance(await asyncio.to_thread(client.take, 20.0), BatchAnnounced)
        assert await taken_part(client) == 0
        assert await asyncio.to_thread(client.take, 20.0) == skip
        assert await asyncio.to_thread(client.take, 0.05) is None


async def taken_part(client: BrokerThread) -> int:
    arrived = await asyncio.to_thread(client.take, 20.0)
    assert isinstance(arrived, PartArrived), arrived
    return arrived.part.part
