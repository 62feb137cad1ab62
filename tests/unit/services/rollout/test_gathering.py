"""What leaves a rollout together, and in which order."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace as replaced

import numpy as np
import pytest
from msgspec.structs import replace

from gspo_protocol.channels import WORK
from gspo_protocol.errors import ProtocolError
from gspo_protocol.limits import MAX_CHUNKS_PER_MESSAGE, MAX_GATHERED_TOKENS
from gspo_protocol.messages import Ack, Chunk, Finish, Journal, Message, Segment, VersionRun
from gspo_protocol.messages.gathered import Chunks, Gathered
from gspo_services.rollout.gathering import MAX_WAITING, GatheringClient, Waiting, gathered_next
from tests.support.broker.process import eventually
from tests.support.builders import an_extension, an_overweight, token_arrays
from tests.support.clocks import VirtualClock
from tests.support.wire.zmq_ends import ScriptedEnd, in_background, zmq_context


def a_wait(message: Chunk | Finish | Journal) -> Waiting:
    arrays = token_arrays(message.num_tokens) if isinstance(message, Chunk) else {}
    return Waiting(message=message, arrays=arrays, since=0.0)


def finish(number: int) -> Finish:
    return Finish(trajectory_id=number, epoch=2, num_tokens=8, reason="done", turn_rewards=[1.0])


def of(number: int, offset: int = 5) -> Chunk:
    return an_extension(trajectory_id=number, offset=offset)


def test_chunks_overtake_what_others_sent_and_nothing_of_their_own_episode() -> None:
    waiting = [a_wait(each) for each in (of(1), finish(1), of(2), of(1, 8), of(2, 8), finish(2), of(3))]
    assert gathered_next(waiting) == [waiting[place] for place in (0, 2, 4, 6)]
    assert gathered_next(waiting[1:2]) == waiting[1:2]
    rest = [waiting[place] for place in (1, 3, 5)]
    assert gathered_next(rest) == rest[:1]


def test_a_chunk_with_experts_leaves_alone() -> None:
    """A message of many chunks has no room for them."""
    waiting = [a_wait(each) for each in (of(1), of(2), of(1, 8), of(3))]
    waiting[1] = replaced(waiting[1], arrays={**waiting[1].arrays, "experts": np.zeros((3, 1, 1, 1), np.uint8)})
    assert gathered_next(waiting) == [waiting[place] for place in (0, 2, 3)]
    assert gathered_next(waiting[1:]) == [waiting[2], waiting[3]]
    assert gathered_next(waiting[1:2]) == [waiting[1]]


def test_messages_of_an_episode_keep_their_order_whatever_waits() -> None:
    rng = random.Random(5)
    for _ in range(200):
        waiting = [a_wait(rng.choice([of, finish])(rng.randrange(3))) for _ in range(rng.randrange(1, 12))]
        sent: list[Waiting] = []
        left = list(waiting)
        while left:
            leaving = gathered_next(left)
            assert len(leaving) == 1 or all(isinstance(each.message, Chunk) for each in leaving)
            sent += leaving
            left = [each for each in left if each not in leaving]
        for number in range(3):
            assert [each for each in sent if each.message.trajectory_id == number] == [
                each for each in waiting if each.message.trajectory_id == number
            ]


def test_what_leaves_together_fits_one_message() -> None:
    many = [a_wait(of(number)) for number in range(MAX_CHUNKS_PER_MESSAGE + 5)]
    assert gathered_next(many) == many[:MAX_CHUNKS_PER_MESSAGE]
    size = MAX_GATHERED_TOKENS + 1
    long = an_extension(num_tokens=size, segments=[Segment("action", 0, size)], version_runs=[VersionRun(4, size)])
    huge = Waiting(message=long, arrays={}, since=0.0)
    assert gathered_next([huge, *many]) == [huge]
    assert gathered_next([many[0], huge, many[1]]) == many[:1] + many[1:2]


@asynccontextmanager
async def gathering(window: int = WORK.window) -> AsyncIterator[tuple[ScriptedEnd, GatheringClient, VirtualClock]]:
    """A client whose clock stands still, and the end that has welcomed it."""
    async with zmq_context() as context:
        end, clock, spec = ScriptedEnd(context, WORK), VirtualClock(), replace(WORK, window=window)
        client = GatheringClient(context, spec, end.endpoint, role="rollout", peer="rollout-0", session="s", clock=clock)
        async with in_background(client.run()):
            await end.welcome()
            await client.connected_welcome()
            yield end, client, clock


async def send(client: GatheringClient, *messages: Message) -> None:
    for message in messages:
        await client.send(message, token_arrays(message.num_tokens) if isinstance(message, Chunk) else None)


async def test_the_first_chunk_leaves_at_once_and_those_behind_it_together_when_it_is_acknowledged() -> None:
    async with gathering() as (end, client, _):
        await send(client, of(1), of(1, 8), of(2), finish(2))
        first = await end.expect_received(Chunk)
        assert (first.message, client.num_unacknowledged) == (of(1), 4)
        await end.acknowledge(first)
        together = await end.expect_received(Chunks)
        chunks = Gathered(together.arrays)
        assert [chunks.chunk(place)[0] for place in range(len(chunks))] == [of(1, 8), of(2)]
        await end.acknowledge(together)
        last = await end.expect_received(Finish)
        assert (last.message, last.seq, client.num_unacknowledged) == (finish(2), 2, 1)
        await end.acknowledge(last)
        await client.flushed()


async def test_nothing_waits_longer_than_its_time_or_for_who_asks_for_its_acknowledgement() -> None:
    async with gathering() as (end, client, clock):
        await send(client, of(1), of(2), of(3))
        clock.advance(0.02)
        await end.expect_received(Chunks)
        await send(client, of(4))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.acknowledged())
            assert (await end.expect_received(Chunk)).message == of(4)
            await end.reply(Ack(next_seq=3))
        assert client.num_unacknowledged == 0


async def test_who_sends_what_is_no_message_hears_it_and_nobody_else() -> None:
    async with gathering() as (end, client, _):
        await send(client, of(1))
        bad = token_arrays(3)
        bad["logprobs"][1] = 0.5
        with pytest.raises(ProtocolError, match=r"logprobs\[1\]"):
            await client.send(of(2), bad)
        with pytest.raises(ProtocolError, match="chunk: a frame has 4096000 bytes, the broker takes 4000000"):
            await client.send(*an_overweight(trajectory_id=2))
        await send(client, of(3))
        await end.acknowledge(await end.expect_received(Chunk))
        assert (await end.expect_received(Chunk)).message == of(3)


async def test_who_sends_more_than_may_wait_waits() -> None:
    async with gathering(window=2) as (end, client, _), asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(send(client, *(of(number) for number in range(3 * MAX_WAITING))))
        await eventually(lambda: client.num_unacknowledged == 1 + 2 * MAX_WAITING)
        assert len(Gathered((await end.expect_received(Chunks)).arrays)) == MAX_WAITING
        assert not sending.done()
        await end.reply(Ack(next_seq=2))
