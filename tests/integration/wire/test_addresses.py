"""A client of several addresses, behind which one end at a time answers."""

import asyncio

import pytest

from gspo_protocol.channels import WORK
from gspo_protocol.messages import Hello
from gspo_services.shared.net import RouterChannel
from gspo_services.shared.net.addresses import NEXT_ADDRESS_S
from gspo_services.shared.net.liveness import GIVE_UP_S
from gspo_services.shared.runtime.errors import EndpointError
from tests.support.broker.process import eventually
from tests.support.clocks import VirtualClock
from tests.support.processes.ports import free_ports
from tests.support.wire.zmq_ends import ScriptedEnd, a_client, a_welcome, in_background, zmq_context


def addresses(number: int) -> list[str]:
    return [f"tcp://127.0.0.1:{port}" for port in free_ports(number)]


async def answer(end: ScriptedEnd) -> None:
    """Welcome whoever says Hello; a connection that was given up may have said it, too."""
    while True:
        await end.expect(Hello)
        await end.channel.send(end.peer, a_welcome())


async def test_the_next_address_is_tried_when_nobody_answers_at_the_first() -> None:
    first, second = addresses(2)
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK, second)
        client = a_client(context, WORK, f"{first}, {second}", name="r")
        assert client.endpoint == first
        async with in_background(client.run()):
            began = asyncio.get_running_loop().time()
            await end.welcome()
            await client.connected_welcome()
            assert client.endpoint == second
            # Sooner than a connection that has died without a word is given up.
            assert asyncio.get_running_loop().time() - began < GIVE_UP_S
        end.close()


async def test_after_the_end_of_one_the_other_is_tried_at_once_and_then_each_in_turn() -> None:
    first, second = addresses(2)
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK, first)
        client = a_client(context, WORK, f"{first},{second}", name="r")
        async with in_background(client.run()):
            await end.welcome()
            await client.connected_welcome()
            end.close()
            began = asyncio.get_running_loop().time()
            # Nobody is at the second address yet: a standby that takes over binds it later.
            await eventually(lambda: client.endpoint == second)
            assert asyncio.get_running_loop().time() - began < NEXT_ADDRESS_S
            await eventually(lambda: client.endpoint == first)
            standby = ScriptedEnd(context, WORK, second)
            async with in_background(answer(standby)):
                await eventually(lambda: client.num_handshakes == 2)
            assert client.endpoint == second
        standby.close()


async def test_an_end_that_answered_is_kept_however_long_it_is_silent_while_nothing_is_asked() -> None:
    first, second = addresses(2)
    clock = VirtualClock()
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK, first)
        client = a_client(context, WORK, f"{first},{second}", name="r", clock=clock)
        async with in_background(client.run()):
            await end.welcome()
            await client.connected_welcome()
            clock.advance(10 * NEXT_ADDRESS_S)
            await client._look(clock.now())
            assert client.endpoint == first
        end.close()


async def test_a_malformed_address_among_several_is_refused_and_so_are_several_to_bind() -> None:
    async with zmq_context() as context:
        with pytest.raises(
            EndpointError, match=r"cannot connect to 'tcp://127.0.0.1:1,b': one of its addresses is 'b': expected tcp://"
        ):
            a_client(context, WORK, "tcp://127.0.0.1:1,b", name="r")
        with pytest.raises(
            EndpointError, match=r"'tcp://a:1,tcp://b:1' has several .* --set broker.work_endpoint=tcp://a:1$"
        ):
            RouterChannel(context, WORK, "tcp://a:1,tcp://b:1")
