"""The relay of the fault tests injects the faults that it is told to, and no others."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.wire.relay import Finder, Relay

PATIENCE_S = 10.0
QUIET_S = 0.1
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Behind:
    """The port behind a relay, and all ends of connections that must be closed."""

    def __init__(self) -> None:
        self.connections: asyncio.Queue[Ends] = asyncio.Queue()
        self.writers: list[asyncio.StreamWriter] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        await self.connections.put((reader, writer))

    async def near(self, relay: Relay) -> Ends:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        self.writers.append(writer)
        return reader, writer


@contextlib.asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Relay, Behind]]:
    behind = Behind()
    server = await asyncio.start_server(behind.accept, "127.0.0.1", 0)
    async with asyncio.timeout(PATIENCE_S):
        with Relay(server.sockets[0].getsockname()[1]) as relay:
            yield relay, behind
        server.close()
        for writer in behind.writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def connect(relay: Relay, behind: Behind) -> tuple[Ends, Ends]:
    """The near and the far end of a connection through the relay."""
    near = await behind.near(relay)
    far = await behind.connections.get()
    near[1].write(b"?")
    await far[0].readexactly(1)
    return near, far


async def silent(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(QUIET_S):
            await reader.readexactly(1)
    except TimeoutError:
        return True
    return False


@given(st.lists(st.binary(max_size=8)), st.binary(min_size=1, max_size=3))
def test_a_marker_is_found_wherever_the_stream_is_broken(pieces: list[bytes], marker: bytes) -> None:
    whole, finder = b"".join(pieces), Finder(marker, 5)
    expected = [5 + end for end in range(len(marker), len(whole) + 1) if whole[:end].endswith(marker)]
    assert [end for piece in pieces for end in finder.feed(piece)] == expected


async def test_bytes_pass_in_both_directions_and_an_end_is_passed_on() -> None:
    async with relayed() as (relay, behind):
        (near, near_out), (far, far_out) = await connect(relay, behind)
        near_out.write(b"question")
        far_out.write(b"answer")
        assert await far.readexactly(8) == b"question"
        assert await near.readexactly(6) == b"answer"
        near_out.close()
        assert await far.read() == b""
        assert (relay.num_connections, relay.num_bytes) == (1, {"up": 9, "down": 6})


async def test_a_stall_holds_everything_back_and_loses_nothing() -> None:
    async with relayed() as (relay, behind):
        (_, near_out), (far, _) = await connect(relay, behind)
        relay.stall()
        near_out.write(b"held")
        _, late_out = await behind.near(relay)
        late_out.write(b"late")
        assert await silent(far)
        assert behind.connections.empty()
        relay.heal()
        assert await far.readexactly(4) == b"held"
        late, _ = await behind.connections.get()
        assert await late.readexactly(4) == b"late"


async def test_a_cut_resets_both_ends_and_the_next_connection_is_fine() -> None:
    async with relayed() as (relay, behind):
        (near, _), (far, _) = await connect(relay, behind)
        relay.cut()
        for reader in (near, far):
            with pytest.raises(ConnectionResetError):
                await reader.read()
        assert relay.num_reset == 1
        (_, near_out), (far, _) = await connect(relay, behind)
        near_out.write(b"again")
        assert await far.readexactly(5) == b"again"


async def test_half_open_resets_the_far_end_and_tells_the_near_end_nothing() -> None:
    async with relayed() as (relay, behind):
        (near, near_out), (far, _) = await connect(relay, behind)
        relay.half_open()
        near_out.write(b"anybody?")
        with pytest.raises(ConnectionResetError):
            await far.read()
        assert await silent(near)


async def test_a_limit_slows_down_and_a_delay_holds_back() -> None:
    async with relayed() as (relay, behind):
        (_, near_out), (far, _) = await connect(relay, behind)
        clock = asyncio.get_running_loop().time
        relay.bytes_per_s = 10_000
        begin = clock()
        near_out.write(bytes(2_000))
        await far.readexactly(2_000)
        assert clock() - begin > 0.15
        relay.heal()
        relay.delay_s = 0.15
        begin = clock()
        near_out.write(b"x")
        await far.readexactly(1)
        assert clock() - begin > 0.14


async def test_only_the_chosen_bit_is_flipped_and_as_often_as_chosen() -> None:
    async with relayed() as (relay, behind):
        (near, _), (_, far_out) = await connect(relay, behind)
        far_out.write(b"before tag12345")
        assert await near.readexactly(15) == b"before tag12345"
        watch = relay.flip(b"tag", 2, times=2)
        far_out.write(b"tag12345 ta")
        assert await near.readexactly(11) == b"tag12245 ta"
        far_out.write(b"g12345 tag12345")
        assert await near.readexactly(15) == b"g12245 tag12345"
        assert watch.seen.is_set()
        assert relay.num_flipped == 2


async def test_an_action_runs_before_its_marker_arrives_and_can_prevent_that() -> None:
    async with relayed() as (relay, behind):
        (_, near_out), (far, _) = await connect(relay, behind)
        told: list[str] = []
        relay.on(b"now", lambda: told.append("now"))
        near_out.write(b"now")
        assert await far.readexactly(3) == b"now"
        assert told == ["now"]
        relay.on(b"never", relay.cut)
        near_out.write(b"never")
        with pytest.raises(ConnectionResetError):
            await far.read()
        assert relay.num_bytes["up"] == 4


async def test_a_relay_that_is_shut_refuses_new_connections_and_keeps_the_others() -> None:
    async with relayed() as (relay, behind):
        (near_reader, near_writer), (_, far_writer) = await connect(relay, behind)
        port = relay.port
        relay.shut()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        far_writer.write(b"still there")
        assert await near_reader.readexactly(11) == b"still there"
        relay.open()
        assert relay.port == port
        await connect(relay, behind)
        near_writer.close()
