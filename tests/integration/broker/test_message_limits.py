"""What a peer may send: how large, how wrong, how much; against a real broker."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from gspo_protocol.channels import BATCH, WORK
from gspo_protocol.codec import decode, encode
from gspo_protocol.errors import ProtocolError
from gspo_protocol.limits import BAD_MESSAGES_BURST, CURVE_OVERHEAD_BYTES, PROTOCOL_VERSION
from gspo_protocol.messages import Ack, Chunk, Heartbeat, Hello, Message, Pulse, Refused, Release, Welcome
from tests.support.broker.peers import ScriptedLearner, ScriptedRollout
from tests.support.broker.process import broker_process, scraped
from tests.support.builders import a_chunk, an_overweight, token_arrays
from tests.support.wire.secured import without_commit
from tests.support.wire.zmq_ends import connected

SOON_S = 60.0


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


@contextlib.asynccontextmanager
async def raw_peer(context: zmq.asyncio.Context, endpoint: str, identity: bytes) -> AsyncIterator[zmq.asyncio.Socket]:
    """A DEALER that sends what it likes."""
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.IDENTITY, identity)
    peer.connect(endpoint)
    try:
        yield peer
    finally:
        peer.close(linger=0)


async def answer(peer: zmq.asyncio.Socket) -> Message:
    async with asyncio.timeout(SOON_S):
        return decode(await peer.recv_multipart()).message


async def greet(peer: zmq.asyncio.Socket, name: str) -> None:
    await peer.send_multipart(encode(Hello(protocol_version=PROTOCOL_VERSION, role="rollout", peer=name, session="s")))
    assert isinstance(await answer(peer), Welcome)


def undecodable_chunk(seq: int) -> list[bytes]:
    """A chunk with a sequence number, and with NaN as a log-prob."""
    arrays = token_arrays(5)
    arrays["logprobs"][2] = float("nan")
    return [bytes(frame) for frame in encode(a_chunk(), arrays, seq)]


async def test_an_undecodable_message_that_would_be_sent_for_ever_ends_its_sender_and_nobody_else(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    async with broker_process(tmp_path) as broker, raw_peer(context, broker.work_endpoint, b"bad") as bad:
        async with raw_peer(context, broker.work_endpoint, b"good") as good:
            await greet(good, "good")
            await greet(bad, "bad")
            # Behind a gap, it will come again: what is before it may still be taken.
            await bad.send_multipart(undecodable_chunk(seq=1))
            refused = await answer(bad)
            assert isinstance(refused, Refused)
            assert (refused.fatal, refused.message_type) == (False, "chunk")
            release = Release(trajectory_id=0, epoch=1, reason="", failed=False)
            await bad.send_multipart(encode(release, seq=0))
            taken = [await answer(bad), await answer(bad)]
            assert Ack(next_seq=1, session="s") in [without_commit(each) for each in taken if isinstance(each, Ack)]
            await bad.send_multipart(undecodable_chunk(seq=1))
            refused = await answer(bad)
            assert isinstance(refused, Refused)
            assert (refused.fatal, refused.message_type) == (True, "chunk")
            assert "logprobs[2] is nan" in refused.reason
            await good.send_multipart(encode(Heartbeat(policy_version=0, status="serving", leases=[])))
            assert isinstance(await answer(good), Pulse)
        await scraped(
            broker,
            'gspo_broker_refused_total{reason="fatal",type="chunk"} 1.0',
            'gspo_broker_refused_total{reason="undecodable",type="chunk"} 1.0',
        )
        assert broker.last("message_refused")["peer"] == "bad"


async def test_a_message_that_no_receiver_would_take_is_its_senders_error_and_takes_no_number() -> None:
    arrays = token_arrays(5)
    arrays["logprobs"][2] = float("nan")
    async with connected(WORK) as (end, client):
        with pytest.raises(ProtocolError, match=r"chunk: array logprobs\[2\] is nan"):
            await client.send(a_chunk(), arrays)
        assert client.num_unacknowledged == 0
        await client.send(a_chunk(), token_arrays(5))
        assert (await end.expect_received(Chunk)).seq == 0


async def test_a_message_with_a_larger_frame_than_the_other_end_takes_never_leaves_and_those_after_it_do() -> None:
    """It would end the connection, and would be sent again over the next one, for ever."""
    large, arrays = an_overweight()
    async with connected(WORK) as (end, client):
        with pytest.raises(
            ProtocolError, match="chunk: a frame has 4096000 bytes, the broker takes 4000000 on the work chan"
        ):
            await client.send(large, arrays)
        assert client.num_unacknowledged == 0
        await client.send(a_chunk(), token_arrays(5))
        assert (await end.expect_received(Chunk)).seq == 0


async def test_a_peer_that_sends_endless_garbage_is_ignored_for_a_while_and_others_are_served(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    async with broker_process(tmp_path) as broker:
        rollout = ScriptedRollout(context, broker.work_endpoint, "r", "s")
        learner = ScriptedLearner(context, broker.batch_endpoint, "s")
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(rollout.run())
            tasks.create_task(learner.run())
            async with raw_peer(context, broker.work_endpoint, b"flood") as flood:
                for _ in range(20 * BAD_MESSAGES_BURST):
                    await flood.send(b"\xc1")
                refused = [await answer(flood) for _ in range(BAD_MESSAGES_BURST)]
                assert {type(message) for message in refused} == {Refused}
                await broker.logged("connection_refused")
        assert learner.end is not None
        assert learner.end.reason == "all 4 batches are trained"
        _, metrics = await broker.http("/metrics")
        assert 'gspo_broker_refused_connections_total{reason="bad_messages"} 1.0' in metrics
        answered = next(line for line in metrics.splitlines() if 'reason="undecodable"' in line)
        assert BAD_MESSAGES_BURST <= float(answered.split()[-1]) < 2 * BAD_MESSAGES_BURST
        assert broker.last("connection_refused")["peer"] == "flood"
        assert broker.count("message_refused") == 1, "one line of a kind in ten seconds"


async def test_a_frame_larger_than_any_chunk_is_not_even_received(tmp_path: Path, context: zmq.asyncio.Context) -> None:
    async with broker_process(tmp_path) as broker, raw_peer(context, broker.work_endpoint, b"large") as large:
        monitor = large.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        await large.send(bytes(WORK.max_frame_bytes_in + CURVE_OVERHEAD_BYTES + 1))
        async with asyncio.timeout(SOON_S):
            await monitor.recv_multipart()
        large.disable_monitor()
        monitor.close(linger=0)
        await greet(large, "large")


def test_the_binding_ends_take_no_larger_frames_than_their_messages_have() -> None:
    assert WORK.max_frame_bytes_in == 4 * 1_000_000
    assert BATCH.max_frame_bytes_in == 1024 * 1024
