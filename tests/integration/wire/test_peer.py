"""A PeerClient and the other end over real ZeroMQ. Time is virtual where a timer matters."""

import asyncio
from collections.abc import Awaitable

import msgspec
import numpy as np
import pytest

from gspo_protocol.channels import BATCH, WORK, ChannelSpec
from gspo_protocol.delivery import MOST_PAUSES
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import (
    Ack,
    Chunk,
    Finish,
    Goodbye,
    Heartbeat,
    Hello,
    LeaseRequest,
    LedgerCommit,
    NoLease,
    Pulse,
    Refused,
    Role,
    Welcome,
)
from gspo_services.broker.ledger.actions import SessionKey
from gspo_services.broker.ledger.fencing import Peers, SessionRefused
from gspo_services.shared.net.peer import TICK_S, TURNED_AWAY_S
from gspo_services.shared.runtime.errors import OccupiedError, ReplacedError, ServiceError, flatten
from tests.support.broker.process import eventually
from tests.support.builders import a_chunk, token_arrays
from tests.support.clocks import VirtualClock
from tests.support.wire.zmq_ends import ScriptedEnd, a_client, a_welcome, connected, in_background, sequenced, zmq_context


def finish(number: int) -> Finish:
    return Finish(trajectory_id=number, epoch=1, num_tokens=5, reason="done", turn_rewards=[1.0])


async def ending(running: Awaitable[None]) -> BaseException:
    """The error that ends a connection."""
    try:
        await running
    except ExceptionGroup as group:
        (error,) = flatten(group)
        return error
    raise AssertionError("it ended without an error")


async def test_the_first_message_names_the_sender_and_the_welcome_is_delivered() -> None:
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK)
        client = a_client(context, WORK, end.endpoint, name="rollout-3")
        assert not client.connected
        async with in_background(client.run()):
            hello = await end.welcome(policy_version=9, weights_endpoint="tcp://w:1")
            assert (hello.peer, hello.role, hello.protocol_version) == ("rollout-3", "rollout", PROTOCOL_VERSION)
            assert hello.first_seq == 0
            assert (await client.connected_welcome()).policy_version == 9
            assert client.connected
            assert (await client.inbox.get()).message == a_welcome(policy_version=9, weights_endpoint="tcp://w:1")


async def test_hello_is_repeated_until_it_is_answered() -> None:
    clock = VirtualClock()
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK)
        client = a_client(context, WORK, end.endpoint, clock=clock)
        async with in_background(client.run()):
            first = await end.expect(Hello)
            clock.advance(1.1)
            assert await end.expect(Hello) == first
            assert not client.connected
            await end.reply(a_welcome())
            await client.connected_welcome()


async def test_several_answers_to_a_repeated_hello_are_one_handshake() -> None:
    """A busy broker finds one Hello per second of waiting. A request after each Welcome would send a batch as often."""
    async with connected(WORK) as (end, client):
        for version in (1, 2):
            await end.reply(a_welcome(policy_version=version))
        await end.reply(Pulse(policy_version=0, weights_endpoint=""))
        delivered = [(await client.inbox.get()).message for _ in range(2)]
        assert [type(message) for message in delivered] == [Welcome, Pulse]
        assert client.welcome is not None
        assert client.welcome.policy_version == 2


async def test_only_sequenced_messages_are_kept_for_the_welcome() -> None:
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK)
        client = a_client(context, WORK, end.endpoint, clock=VirtualClock())
        await client.send(Heartbeat(policy_version=0, status="starting", leases=[]))
        await client.send(finish(1))
        async with in_background(client.run()):
            await end.welcome()
            assert (await end.receive()).message == finish(1)


async def test_arrays_go_out_with_their_sequence_number() -> None:
    async with connected(WORK) as (end, client):
        await client.send(a_chunk(), token_arrays(5))
        received = await end.expect_received(Chunk)
        assert received.seq == 0
        np.testing.assert_array_equal(received.arrays["logprobs"], token_arrays(5)["logprobs"])


class CountedArrays(dict[str, np.ndarray]):
    """Counts how often the token ids are read: once for each encoding."""

    taken = 0

    def __getitem__(self, name: str) -> np.ndarray:
        self.taken += name == "token_ids"
        return super().__getitem__(name)


async def test_a_sequenced_message_is_encoded_once_however_often_it_is_sent() -> None:
    clock = VirtualClock()
    arrays = CountedArrays(token_arrays(5))
    async with connected(WORK, clock=clock) as (end, client):
        await client.send(a_chunk(), arrays)
        first = await end.expect_received(Chunk)
        for _ in range(2):
            clock.advance(MOST_PAUSES * WORK.resend_s)
            again = await end.expect_received(Chunk)
            assert (again.seq, again.message) == (first.seq, first.message)
            assert again.arrays["token_ids"].tobytes() == first.arrays["token_ids"].tobytes()
    assert arrays.taken == 1


async def test_goodbye_is_said_only_at_the_end_of_a_connection_that_was_welcomed() -> None:
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK)
        async with in_background(a_client(context, WORK, end.endpoint, name="rollout-1").run()):
            await end.expect(Hello)
        client = a_client(context, WORK, end.endpoint, name="rollout-2")
        async with in_background(client.run()):
            while (await end.expect(Hello)).peer != "rollout-2":
                pass
            await end.reply(a_welcome())
            await client.connected_welcome()
            await client.send(finish(1))
        assert (await end.receive()).message == finish(1)
        assert (await end.receive()).message == Goodbye()
        assert [type(received.message) for received in end.seen].count(Goodbye) == 1


async def test_a_full_window_blocks_the_sender_until_an_acknowledgement() -> None:
    spec = msgspec.structs.replace(WORK, window=2)
    async with connected(spec) as (end, client):
        await client.send(finish(1))
        await client.send(finish(2))
        async with asyncio.TaskGroup() as tasks:
            third = tasks.create_task(client.send(finish(3)))
            await end.expect(Finish)
            await end.expect(Finish)
            assert client.num_unacknowledged == 2
            # Messages without a number need no credit, and the other end has nothing else to read.
            await client.send(LeaseRequest(request_id=1, capacity=1, policy_version=1))
            await end.expect(LeaseRequest)
            assert not third.done()
            await end.reply(Ack(next_seq=1))
        assert sequenced(end)[-1] == (1, finish(2))
        assert (await end.expect_received(Finish)).seq == 2


async def test_a_message_for_an_earlier_session_is_ignored() -> None:
    """Its acknowledgements are not for this session."""
    async with connected(WORK) as (end, client):
        await client.send(finish(1))
        await end.expect(Finish)
        await end.reply(Ack(next_seq=9, session="another life"))
        await end.reply(Refused(reason="session was replaced", message_type="hello", fatal=True, session="another life"))
        await end.reply(a_welcome(policy_version=7, session="another life"))
        await end.reply(Pulse(policy_version=0, weights_endpoint=""))
        while not isinstance((await client.inbox.get()).message, Pulse):
            pass
        assert client.num_unacknowledged == 1
        assert client.welcome is not None
        assert client.welcome.policy_version == 0
        await end.reply(Ack(next_seq=1, session="session of rollout-0"))
        await client.flushed()


async def test_unacknowledged_messages_are_sent_again_in_order_under_the_same_numbers() -> None:
    clock = VirtualClock()
    async with connected(WORK, clock=clock) as (end, client):
        for number in (1, 2, 3):
            await client.send(finish(number))
        for _ in range(3):
            await end.expect(Finish)
        await end.reply(Ack(next_seq=1))
        await end.reply(Pulse(policy_version=0, weights_endpoint=""))
        while not isinstance((await client.inbox.get()).message, Pulse):
            pass
        clock.advance(WORK.resend_s + 0.1)
        await end.expect(Finish)
        await end.expect(Finish)
        assert sequenced(end) == [
            (0, finish(1)), (1, finish(2)), (2, finish(3)),
            (1, finish(2)), (2, finish(3)),
        ]  # fmt: skip


async def test_flushed_returns_after_the_last_acknowledgement() -> None:
    async with connected(WORK) as (end, client):
        await client.send(finish(1))
        await client.send(finish(2))
        async with asyncio.TaskGroup() as tasks:
            flushed = tasks.create_task(client.flushed())
            received = [await end.expect_received(Finish) for _ in range(2)]
            await end.acknowledge(received[0])
            await end.reply(NoLease(request_id=1, reason="no_prompts", retry_s=1.0))
            while not isinstance((await client.inbox.get()).message, NoLease):
                pass
            assert not flushed.done()
            await end.acknowledge(received[1])
        assert client.num_unacknowledged == 0


async def test_acknowledged_waits_for_what_was_sent_before_and_for_nothing_later() -> None:
    async with connected(WORK) as (end, client), asyncio.TaskGroup() as tasks:
        await client.send(finish(1))
        acknowledged = tasks.create_task(client.acknowledged())
        await asyncio.sleep(0)  # the wait begins
        await client.send(finish(2))
        first = await end.expect_received(Finish)
        await end.expect_received(Finish)
        assert not acknowledged.done()
        await end.acknowledge(first)
        await acknowledged
        assert client.num_unacknowledged == 1


async def test_an_end_that_forgot_our_session_gets_a_handshake_and_all_unacknowledged_messages_at_once() -> None:
    # The clock does not move, so nothing is sent again for lack of an acknowledgement.
    async with connected(WORK, clock=VirtualClock()) as (end, client):
        await client.send(finish(1))
        await end.acknowledge(await end.expect_received(Finish))
        await client.send(finish(2))
        await client.send(finish(3))
        await end.expect(Finish)
        await end.expect(Finish)
        end.seen.clear()
        await end.refuse_session()
        hello = await end.welcome()
        assert hello.first_seq == 1
        await end.expect(Finish)
        await end.expect(Finish)
        assert sequenced(end) == [(1, finish(2)), (2, finish(3))]


async def test_one_hello_answers_the_refusals_of_all_messages_under_way() -> None:
    """A thousand clients with many messages each would otherwise drown a broker that starts again in Hellos."""
    async with connected(WORK, clock=VirtualClock()) as (end, client):
        for number in (1, 2, 3):
            await client.send(finish(number))
            await end.expect(Finish)
        end.seen.clear()
        for _ in range(3):
            await end.refuse_session()
        await end.welcome()
        for _ in range(3):
            await end.expect(Finish)
        assert [type(received.message) for received in end.seen].count(Hello) == 1


async def test_the_connection_survives_a_restart_of_the_other_end() -> None:
    async with zmq_context() as context, zmq_context() as former_life:
        end = ScriptedEnd(former_life, WORK)
        client = a_client(context, WORK, end.endpoint)
        async with in_background(client.run()):
            await end.welcome()
            await client.connected_welcome()
            former_life.destroy(linger=0)
            await client.send(finish(1))
            restarted = ScriptedEnd(context, WORK, end.endpoint)
            await restarted.welcome()
            assert isinstance(restarted.seen[0].message, Hello), "a new connection begins with a handshake"
            await restarted.acknowledge(await restarted.expect_received(Finish))
            await client.flushed()


async def test_a_fatal_refusal_ends_the_connection_with_its_reason() -> None:
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK)
        client = a_client(context, WORK, end.endpoint)
        async with asyncio.TaskGroup() as tasks:
            client_ends = tasks.create_task(ending(client.run()))
            await end.expect(Hello)
            await end.reply(Refused(reason="protocol version 1 does not match 2", fatal=True))
            error = await client_ends
        assert isinstance(error, ServiceError)
        assert not isinstance(error, ReplacedError)
        assert "protocol version 1 does not match 2" in str(error)
        assert end.endpoint in str(error)


async def test_a_replaced_process_is_recognised_by_the_brokers_own_words() -> None:
    peers = Peers(0.0)
    for session in ("old", "new"):
        peers.hello(SessionKey("r", session), "rollout", 0, 0.0)
    with pytest.raises(SessionRefused) as refusal:
        peers.hello(SessionKey("r", "old"), "rollout", 0, 1.0)
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK)
        client = a_client(context, WORK, end.endpoint)
        async with asyncio.TaskGroup() as tasks:
            client_ends = tasks.create_task(ending(client.run()))
            await end.expect(Hello)
            await end.reply(Refused(reason=f"hello: {refusal.value}", fatal=True))
            error = await client_ends
        assert isinstance(error, ReplacedError)
        assert "stop one of them" in str(error)


async def test_a_process_that_is_asked_to_wait_repeats_hello_and_gives_up_in_the_end() -> None:
    clock = VirtualClock()
    no_room = Refused(reason="learner session a has this run", message_type="hello")
    async with zmq_context() as context:
        end = ScriptedEnd(context, BATCH)
        client = a_client(context, BATCH, end.endpoint, clock=clock, role="learner", name="learner")
        async with asyncio.TaskGroup() as tasks:
            client_ends = tasks.create_task(ending(client.run()))
            # The machine is suspended again and again: 2 s of each gap count.
            for _ in range(int(TURNED_AWAY_S / 2)):
                await end.expect(Hello)
                assert not client_ends.done()
                await end.reply(no_room)
                await eventually(lambda: client.refused == no_room.reason)
                client.refused = ""
                clock.advance(900.0)
            assert not client.connected
            await end.expect(Hello)
            await end.reply(no_room)
            error = await client_ends
        assert isinstance(error, OccupiedError)
        assert "refused this process for 30 s: learner session a has this run" in str(error)


async def test_a_process_that_waited_is_welcomed_when_there_is_room() -> None:
    async with zmq_context() as context:
        end = ScriptedEnd(context, BATCH)
        client = a_client(context, BATCH, end.endpoint, role="learner", name="learner")
        async with in_background(client.run()):
            await end.expect(Hello)
            await end.reply(Refused(reason="learner session a has this run", message_type="hello"))
            await end.welcome()
            await client.connected_welcome()
            assert client.refused == ""
            await client.send(finish(1))
            assert (await end.receive()).message == finish(1)


async def test_a_process_that_time_will_help_waits_without_end_and_says_why() -> None:
    clock = VirtualClock()
    no_place = Refused(reason="hello: no place", message_type="hello", retry_s=5.0)
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK)
        client = a_client(context, WORK, end.endpoint, clock=clock)
        async with in_background(client.run()):
            for _ in range(int(10 * TURNED_AWAY_S / 5)):
                await end.expect(Hello)
                await end.reply(no_place)
                await eventually(lambda: client.refused == no_place.reason)
                client.refused = ""
                clock.advance(5.0)
            await end.welcome()
            await client.connected_welcome()
            assert client.refused == ""


async def test_a_process_whose_session_is_ended_for_a_while_comes_back_with_everything() -> None:
    clock = VirtualClock()
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK)
        client = a_client(context, WORK, end.endpoint, clock=clock)
        async with in_background(client.run()):
            await end.welcome()
            await client.connected_welcome()
            await client.send(finish(1))
            await end.expect(Finish)
            await end.reply(Refused(reason="hello: r is shut out for 60 s", message_type="hello", retry_s=5.0))
            await eventually(lambda: not client.connected)
            assert "shut out" in client.refused
            clock.advance(5.0)
            await end.welcome()
            assert (await end.expect(Finish)) == finish(1)


@pytest.mark.parametrize(("spec", "role"), [(BATCH, "learner"), (WORK, "rollout"), (BATCH, "operator")])
async def test_two_processes_of_one_name_have_two_connections(spec: ChannelSpec, role: Role) -> None:
    async with zmq_context() as context:
        end = ScriptedEnd(context, spec)
        first = a_client(context, spec, end.endpoint, role=role, name="same", session="a")
        second = a_client(context, spec, end.endpoint, role=role, name="same", session="b")
        async with in_background(first.run()):
            await end.welcome()
            await first.connected_welcome()
            first_identity = end.peer
            async with in_background(second.run()):
                while (await end.expect(Hello)).session != "b":
                    pass
                assert end.peer != first_identity
                await end.channel.send(first_identity, Pulse(policy_version=3, weights_endpoint=""))
                assert isinstance((await first.inbox.get()).message, Welcome)
                assert (await first.inbox.get()).message == Pulse(policy_version=3, weights_endpoint="")


async def test_a_run_with_other_settings_ends_the_connection_and_names_what_must_agree() -> None:
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK)
        client = a_client(context, WORK, end.endpoint, fingerprint="aaaa")
        async with asyncio.TaskGroup() as tasks:
            client_ends = tasks.create_task(ending(client.run()))
            await end.expect(Hello)
            await end.reply(a_welcome(fingerprint="aaaa"))
            await client.connected_welcome()
            await end.reply(a_welcome(fingerprint="bbbb"))
            error = await client_ends
        assert isinstance(error, ServiceError)
        assert "fingerprint bbbb, here aaaa" in str(error)
        assert "[batch]" in str(error)


async def test_a_process_of_the_former_run_does_not_join_a_restored_one() -> None:
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK)
        client = a_client(context, WORK, end.endpoint)
        async with asyncio.TaskGroup() as tasks:
            client_ends = tasks.create_task(ending(client.run()))
            await end.welcome(run_id="first")
            await client.connected_welcome()
            await end.refuse_session()
            await end.welcome(run_id="restored")
            error = await client_ends
        assert isinstance(error, ServiceError)
        assert "serves run restored now, and served first before" in str(error)


async def test_a_process_says_what_it_was_told_of_the_ledger_also_in_its_former_life() -> None:
    former, first, second = (LedgerCommit(run_id="test", number=number, digest="d") for number in (3, 5, 6))
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK)
        client = a_client(context, WORK, end.endpoint, known=former)
        async with in_background(client.run()):
            assert (await end.welcome(commit=first)).commit == former
            await client.connected_welcome()
            assert client.commit == first
            await client.send(finish(0))
            seq = (await end.expect_received(Finish)).seq
            assert seq is not None
            await end.reply(Ack(next_seq=seq + 1, commit=second))
            await client.flushed()
            await end.refuse_session()
            # An older answer takes nothing back.
            assert (await end.welcome(commit=first)).commit == second
            await end.refuse_session()
            assert (await end.expect(Hello)).commit == second


async def test_a_process_does_not_join_another_run_than_its_former_life() -> None:
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK)
        client = a_client(context, WORK, end.endpoint, known=LedgerCommit(run_id="first", number=3, digest="d"))
        async with asyncio.TaskGroup() as tasks:
            client_ends = tasks.create_task(ending(client.run()))
            await end.welcome(run_id="second")
            error = await client_ends
    assert "serves run second now, and served first before" in str(error)
    assert "a learner with the run.directory of run second" in str(error)


async def test_a_refusal_that_is_not_fatal_is_delivered_and_the_connection_continues() -> None:
    async with connected(WORK) as (end, client):
        await end.reply(Refused(reason="unknown trajectory 7", message_type="chunk"))
        await end.reply(Pulse(policy_version=4, weights_endpoint=""))
        await client.inbox.get()
        assert (await client.inbox.get()).message == Refused(reason="unknown trajectory 7", message_type="chunk")
        assert (await client.inbox.get()).message == Pulse(policy_version=4, weights_endpoint="")


async def test_garbage_from_the_other_end_is_ignored() -> None:
    async with connected(WORK) as (end, client):
        await end.channel._socket.send_multipart([end.peer, b"\xff\xff"])
        await end.reply(Pulse(policy_version=4, weights_endpoint=""))
        await client.inbox.get()
        assert (await client.inbox.get()).message == Pulse(policy_version=4, weights_endpoint="")


async def test_silence_is_measured_from_the_last_message_of_the_other_end() -> None:
    clock = VirtualClock()
    async with connected(WORK, clock=clock) as (end, client):
        clock.advance(7)
        assert client.silent_s == 7
        await end.reply(Pulse(policy_version=4, weights_endpoint=""))
        while not isinstance((await client.inbox.get()).message, Pulse):
            pass
        assert client.silent_s == 0


async def test_an_end_that_waits_for_messages_acknowledged_long_ago_hears_where_we_are() -> None:
    """Our Hello was on its way while we still heard the acknowledgements of the other end's former life."""
    clock = VirtualClock()
    async with connected(WORK, clock=clock) as (end, client):
        await client.send(finish(1))
        await end.acknowledge(await end.expect_received(Finish))
        await client.flushed()
        await client.send(finish(2))
        await end.expect(Finish)
        clock.advance(1.1)
        await end.reply(Ack(next_seq=0))
        assert (await end.expect(Hello)).first_seq == 1


async def passing(clock: VirtualClock) -> None:
    """Time passes, four times as fast."""
    while True:
        clock.advance(TICK_S)
        await asyncio.sleep(TICK_S / 4)


async def test_an_end_that_answers_nothing_is_asked_and_then_connected_to_again() -> None:
    clock = VirtualClock()
    async with connected(WORK, clock=clock) as (end, client):
        former = end.peer
        await client.send(Heartbeat(policy_version=0, status="serving", leases=[]))
        await end.expect(Heartbeat)
        async with in_background(passing(clock)):
            await end.expect(Hello)
            assert end.peer == former
            assert client.connected
            while end.peer == former:
                await end.expect(Hello)
            assert end.peer == former + b"#1"
            await end.reply(a_welcome())
            await client.connected_welcome()
