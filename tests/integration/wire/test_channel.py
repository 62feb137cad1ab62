"""Both ends of a channel over real ZeroMQ, with a bad peer, a taken port or an absent peer."""

import asyncio
import re
import socket
import weakref

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from gspo_protocol.channels import WEIGHTS, WORK
from gspo_protocol.limits import MAX_FRAME_BYTES, MAX_WEIGHT_CHUNK_BYTES
from gspo_protocol.messages import Ack, Heartbeat, WeightChunk
from gspo_services.shared.net.channel import DealerChannel, RouterChannel
from gspo_services.shared.runtime.errors import EndpointError
from tests.support.builders import a_chunk, token_arrays
from tests.support.wire.zmq_ends import ANY_PORT, zmq_context

SOON_S = 10.0
HEARTBEAT = Heartbeat(policy_version=3, status="serving", leases=[])


def raw_dealer(context: zmq.asyncio.Context, endpoint: str, identity: bytes = b"stranger") -> zmq.asyncio.Socket:
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.IDENTITY, identity)
    peer.connect(endpoint)
    return peer


async def test_a_message_and_its_arrays_arrive_as_they_were_sent_and_so_does_the_answer() -> None:
    async with zmq_context() as context:
        router = RouterChannel(context, WORK, ANY_PORT)
        dealer = DealerChannel(context, WORK, router.endpoint, "rollout-7")
        chunk, arrays = a_chunk(), token_arrays(5)
        assert await dealer.send(chunk, arrays, seq=11)
        incoming = await router.receive()
        assert incoming.peer == b"rollout-7"
        assert incoming.received is not None
        assert (incoming.received.message, incoming.received.seq) == (chunk, 11)
        np.testing.assert_array_equal(incoming.received.arrays["token_ids"], arrays["token_ids"])
        np.testing.assert_array_equal(incoming.received.arrays["logprobs"], arrays["logprobs"])
        assert await router.send(b"rollout-7", Ack(next_seq=12))
        answer = await dealer.receive()
        assert answer.received is not None
        assert answer.received.message == Ack(next_seq=12)


@pytest.mark.parametrize("unchanging", [True, False])
async def test_arrays_that_never_change_are_sent_from_where_they_lie_and_let_go_once_they_have_left(
    unchanging: bool,
) -> None:
    async with zmq_context() as context:
        router = RouterChannel(context, WEIGHTS, ANY_PORT)
        stranger = raw_dealer(context, router.endpoint)
        # So that it reads nothing before it is asked to.
        await stranger.send_multipart([b""])
        assert (await router.receive()).peer == b"stranger"
        held = []
        for number in range(WEIGHTS.high_water_mark // 2):
            data = np.full(MAX_WEIGHT_CHUNK_BYTES, number, dtype=np.uint8)
            held.append(weakref.ref(data))
            message = WeightChunk(policy_version=1, chunk=number)
            assert await router.send(b"stranger", message, {"data": data}, unchanging=unchanging)
            del data
        assert any(each() is not None for each in held) == unchanging
        for number in range(len(held)):
            _, body = await stranger.recv_multipart()
            assert body == bytes([number]) * MAX_WEIGHT_CHUNK_BYTES
        async with asyncio.timeout(SOON_S):
            while any(each() is not None for each in held):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_garbage_is_reported_with_its_sender_and_the_socket_survives() -> None:
    async with zmq_context() as context:
        router = RouterChannel(context, WORK, ANY_PORT)
        stranger = raw_dealer(context, router.endpoint)
        await stranger.send_multipart([b"\xc1 not msgpack"])
        incoming = await router.receive()
        assert incoming.received is None
        assert incoming.peer == b"stranger"
        assert incoming.error.startswith("header is not msgpack")
        dealer = DealerChannel(context, WORK, router.endpoint, "rollout-0")
        await dealer.send(HEARTBEAT)
        following = await router.receive()
        assert following.received is not None
        assert following.received.message == HEARTBEAT


async def test_a_header_over_a_limit_is_reported_with_the_name_of_the_limit() -> None:
    async with zmq_context() as context:
        roomy = msgspec.structs.replace(WORK, max_frame_bytes_in=MAX_FRAME_BYTES)
        router = RouterChannel(context, roomy, ANY_PORT)
        stranger = raw_dealer(context, router.endpoint)
        await stranger.send_multipart([bytes(17 * 1024 * 1024)])
        incoming = await router.receive()
        assert incoming.received is None
        assert "HEADER_BYTES" in incoming.error
        await stranger.send_multipart([b"", b"", b""])
        assert (await router.receive()).error.startswith("header is not msgpack")


async def test_a_frame_over_the_limit_ends_only_its_senders_connection() -> None:
    async with zmq_context() as context:
        router = RouterChannel(context, WORK, ANY_PORT)
        dealer = DealerChannel(context, WORK, router.endpoint, "rollout-0")
        await dealer.send(HEARTBEAT)
        assert (await router.receive()).peer == b"rollout-0"
        stranger = raw_dealer(context, router.endpoint)
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        await stranger.send_multipart([bytes(65 * 1024 * 1024)], copy=False)
        await monitor.recv_multipart()
        stranger.disable_monitor()
        await dealer.send(HEARTBEAT)
        assert (await router.receive()).peer == b"rollout-0"


async def test_a_port_in_use_is_an_error_that_names_it_and_what_to_do() -> None:
    async with zmq_context() as context:
        router = RouterChannel(context, WORK, ANY_PORT)
        with pytest.raises(EndpointError, match=re.escape(router.endpoint)) as caught:
            RouterChannel(context, WORK, router.endpoint)
        assert "Choose another port" in str(caught.value)


@pytest.mark.parametrize("endpoint", ["7001", "tcp://", "http://127.0.0.1:1"])
async def test_either_end_names_a_malformed_endpoint(endpoint: str) -> None:
    async with zmq_context() as context:
        with pytest.raises(EndpointError, match=re.escape(endpoint)):
            DealerChannel(context, WORK, endpoint, "rollout-0")
        with pytest.raises(EndpointError, match=re.escape(endpoint)):
            RouterChannel(context, WORK, endpoint)


async def test_the_sender_learns_that_a_peer_is_not_there() -> None:
    async with zmq_context() as context:
        router = RouterChannel(context, WORK, ANY_PORT)
        assert await router.send(b"nobody", Ack(next_seq=1)) is False


async def test_a_full_queue_refuses_instead_of_growing() -> None:
    spec = msgspec.structs.replace(WORK, high_water_mark=3)
    # Its port is taken and nobody listens there: a port that is free may become another test's.
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        async with zmq_context() as context:
            dealer = DealerChannel(context, spec, f"tcp://127.0.0.1:{deaf.getsockname()[1]}", "rollout-0")
            taken = [await dealer.send(HEARTBEAT) for _ in range(5)]
            assert taken == [True, True, True, False, False]
