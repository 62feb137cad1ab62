"""Reading whole messages from a real ROUTER: frames, sizes and connections as they were, and no message lost or endless."""

import asyncio
import select
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_protocol.channels import WORK
from gspo_protocol.limits import MAX_FRAMES
from gspo_services.shared.net.authenticator import Authenticator, AuthenticatorCounters
from gspo_services.shared.net.frames import MAX_IN_A_ROW, SLICE_FRAMES, VIEWED_BYTES, FrameReader, WireParts, whole
from gspo_services.shared.net.watch import received
from gspo_services.shared.runtime.clock import MonotonicClock
from tests.support.wire.keys import make_keys, security_of
from tests.support.wire.zmq_ends import in_background

SOON_S = 10.0
SIZES = st.sampled_from([0, 1, 222, 223, 255, 256, 1000, VIEWED_BYTES, VIEWED_BYTES + 1])


@dataclass
class Line:
    """A DEALER that sends at once, and the reader of the ROUTER that it is connected to."""

    router: zmq.asyncio.Socket
    dealer: zmq.Socket[bytes]
    reader: FrameReader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.router.close(linger=0)
        self.dealer.close(linger=0)

    async def read(self) -> WireParts:
        async with asyncio.timeout(SOON_S):
            return await self.reader.read()


def blocking_dealer(context: zmq.asyncio.Context) -> zmq.Socket[bytes]:
    return context.socket(zmq.DEALER, socket_class=zmq.Socket)


def connected(context: zmq.asyncio.Context, endpoint: str = "tcp://127.0.0.1:*") -> Line:
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    dealer = blocking_dealer(context)
    dealer.setsockopt(zmq.IDENTITY, b"rollout-0/s")
    dealer.connect(router.getsockopt_string(zmq.LAST_ENDPOINT))
    return Line(router, dealer, FrameReader(router, secure=False))


@pytest.fixture
def line(context: zmq.asyncio.Context) -> Iterator[Line]:
    with connected(context) as made:
        yield made


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


async def until(condition: Callable[[], object]) -> None:
    """Let others run until ``condition`` holds: what it waits for is libzmq's, which sets no event."""
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def has_input(line: Line) -> bool:
    return bool(line.router.getsockopt(zmq.EVENTS) & zmq.POLLIN)


def bytes_of(parts: WireParts) -> list[bytes]:
    return [bytes(frame) for frame in parts.frames]


@settings(max_examples=20, deadline=None)
@given(sent=st.lists(st.lists(SIZES, min_size=1, max_size=5), min_size=1, max_size=8))
def test_a_message_is_what_was_sent_and_as_long_as_the_kernel_says(sent: list[list[int]]) -> None:
    messages = [[bytes([index % 256]) * size for index, size in enumerate(sizes)] for sizes in sent]

    async def scenario() -> None:
        context = zmq.asyncio.Context()
        try:
            with connected(context) as line:
                line.dealer.send(b"first")
                parts = await line.read()
                before = received(parts.fd)
                assert before is not None
                wire_bytes = 0
                for message in messages:
                    line.dealer.send_multipart(message)
                    parts = await line.read()
                    assert bytes_of(parts) == message
                    assert (parts.peer, parts.key, parts.num_frames) == (b"rollout-0/s", b"", len(message))
                    assert parts.num_bytes == sum(map(len, message))
                    wire_bytes += parts.wire_bytes
                after = received(parts.fd)
                assert after is not None
                assert after.num_bytes - before.num_bytes == wire_bytes
        finally:
            context.destroy(linger=0)

    asyncio.run(scenario())


async def test_an_encrypted_message_has_its_senders_key_and_is_as_long_as_the_kernel_says(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    keys = make_keys(tmp_path / "keys")
    ignored = AuthenticatorCounters(refused=lambda reason: None, connections=lambda kind: None)
    authenticator = Authenticator(context, security_of(keys, "broker"), MonotonicClock(), ignored)
    router, dealer = context.socket(zmq.ROUTER), blocking_dealer(context)
    line = Line(router, dealer, FrameReader(router, secure=True))
    authenticator.guard(router, WORK, line.reader, 1_000_000)
    router.bind("tcp://127.0.0.1:*")
    security = security_of(keys, "rollout")
    assert security.own is not None
    dealer.setsockopt(zmq.CURVE_SERVERKEY, security.server_key("broker"))
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, security.own.public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, security.own.secret)
    async with in_background(authenticator.run()):
        with line:
            dealer.connect(router.getsockopt_string(zmq.LAST_ENDPOINT))
            dealer.send_multipart([b"first"])
            before = received((await line.read()).fd)
            assert before is not None
            num_bytes = before.num_bytes
            for size in (0, 221, 222, 223, 224, 5000):
                dealer.send_multipart([bytes(size), b"", bytes(size)])
                parts = await line.read()
                after = received(parts.fd)
                assert after is not None
                assert after.num_bytes - num_bytes == parts.wire_bytes
                num_bytes = after.num_bytes
                assert parts.num_bytes == 2 * size, "what was sent, without what encryption adds"
                assert parts.key == security.own.public


async def test_frames_beyond_a_messages_limit_are_thrown_away_and_counted_and_the_next_message_is_whole(
    line: Line,
) -> None:
    line.dealer.send_multipart([b"x"] * MAX_FRAMES)
    line.dealer.send_multipart([b"x"] * (MAX_FRAMES + 1))
    line.dealer.send_multipart([b"next"])
    assert len((await line.read()).frames) == MAX_FRAMES
    parts = await line.read()
    assert (parts.frames, parts.num_frames, parts.num_bytes) == ([], MAX_FRAMES + 1, MAX_FRAMES + 1)
    assert parts.wire_bytes == 3 * (MAX_FRAMES + 1)
    assert bytes_of(await line.read()) == [b"next"]


async def test_other_tasks_run_while_a_message_of_very_many_frames_is_read(line: Line) -> None:
    slices = 8
    line.dealer.send_multipart([b""] * (slices * SLICE_FRAMES))
    line.dealer.send_multipart([b"next"])
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += line.reader.is_waiting is False
            await asyncio.sleep(0)

    async with in_background(count_turns()):
        assert (await line.read()).num_frames == slices * SLICE_FRAMES
        assert turns >= slices - 1
        assert bytes_of(await line.read()) == [b"next"]


async def test_other_tasks_run_while_messages_come_without_end(line: Line) -> None:
    number = 4 * MAX_IN_A_ROW
    line.dealer.send(b"first")
    await line.read()
    for index in range(number):
        line.dealer.send(b"%d" % index)
    read: list[int] = []
    turns_at: list[int] = []

    async def count_turns() -> None:
        while True:
            turns_at.append(len(read))
            await asyncio.sleep(0)

    async with in_background(count_turns()):
        while len(read) < number:
            read.append(int(bytes_of(await line.read())[0]))
    assert read == list(range(number)), "all of them, in order"
    assert max(after - before for before, after in pairwise([*turns_at, number])) <= MAX_IN_A_ROW


@pytest.mark.parametrize("turns", range(5))
async def test_a_read_that_is_given_up_loses_no_message(line: Line, turns: int) -> None:
    """Whenever it is given up: before its reader wakes up, with the first frame in hand, or afterwards."""
    read: list[list[bytes]] = []
    messages = [[b"%d" % index, b"", b"end"] for index in range(30)]
    async with asyncio.TaskGroup() as tasks:
        for number, message in enumerate(messages):
            reading = tasks.create_task(line.read())
            await until(lambda: line.reader.is_waiting)
            line.dealer.send_multipart(message)
            # Without the event loop, so that the number of its turns says how far the reader gets.
            assert select.select([line.router.getsockopt(zmq.FD)], [], [], SOON_S)[0]
            for _ in range(turns):
                await asyncio.sleep(0)
            reading.cancel()
            with suppress(asyncio.CancelledError):
                read.append(bytes_of(await reading))
            assert not line.reader.is_waiting
            while len(read) <= number:
                read.append(bytes_of(await line.read()))
    assert read == messages


async def test_a_read_that_is_given_up_between_two_of_many_messages_loses_none(line: Line) -> None:
    number = 4 * MAX_IN_A_ROW
    line.dealer.send(b"first")
    await line.read()
    for index in range(number):
        line.dealer.send(b"%d" % index)
    read: list[int] = []
    num_cancelled = 0

    async def read_on() -> None:
        while len(read) < number:
            read.append(int(bytes_of(await line.reader.read())[0]))

    async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as tasks:
        while len(read) < number:
            reading = tasks.create_task(read_on())
            await asyncio.sleep(0)
            num_cancelled += reading.cancel()  # It gives way to others only after very many messages in a row.
            with suppress(asyncio.CancelledError):
                await reading
    assert read == list(range(number))
    assert num_cancelled >= 2


async def test_a_reader_that_waits_has_read_everything_whole(line: Line) -> None:
    line.dealer.send(b"one")
    await line.read()
    before = line.reader.num_drained
    line.dealer.send(b"two")
    await until(lambda: has_input(line))
    await line.read()
    assert line.reader.num_drained == before, "a message was there: nothing says that it was the last"
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(line.read())
        await until(lambda: line.reader.is_waiting)
        assert line.reader.num_drained == before + 1
        line.dealer.send(b"three")
        assert bytes_of(await waiting) == [b"three"]
    assert not line.reader.is_waiting


async def test_a_transport_without_descriptors_has_none(context: zmq.asyncio.Context) -> None:
    with connected(context, "inproc://frames") as line:
        line.dealer.send(b"x")
        parts = await line.read()
    assert (parts.fd, bytes_of(parts)) == (-1, [b"x"])


def test_a_message_that_was_read_already_is_of_the_one_peer_that_there_is() -> None:
    parts = whole([b"ab", b"", b"c"])
    assert (parts.peer, parts.fd, parts.frames, parts.num_frames, parts.num_bytes) == (b"", -1, [b"ab", b"", b"c"], 3, 3)
