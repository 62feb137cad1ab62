"""A TCP relay that misbehaves on command. It stands between a connecting end and the port that it wants to reach.

It runs in a thread of its own, so that tests of processes and tests with an event loop use it alike. A marker is a string of
bytes that a test looks for in the stream, such as ``tag_of(Published)`` or b"POST /pause_generation".
"""

import asyncio
import concurrent.futures
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgpack

from gspo_protocol.messages import Message

Direction = Literal["up", "down"]
"""up: from the connecting end to the port behind; down: the answers."""
READ_BYTES: Final = 64 * 1024
CALL_S: Final = 20.0


def tag_of(kind: type[Message]) -> bytes:
    """The bytes that mark a message of this kind in a stream."""
    tag = kind.__struct_config__.tag
    return bytes(msgpack.packb(tag))


class Finder:
    """Finds a marker in a stream that comes in pieces, from ``place`` on. Places count bytes of the stream."""

    def __init__(self, marker: bytes, place: int = 0) -> None:
        self._marker = marker
        self._rest = b""
        self._place = place

    def feed(self, data: bytes) -> list[int]:
        """The place behind each occurrence that ends in ``data``."""
        window = self._rest + data
        begin = self._place - len(self._rest)
        self._place += len(data)
        ends, found = [], window.find(self._marker)
        while found >= 0:
            ends.append(begin + found + len(self._marker))
            found = window.find(self._marker, found + 1)
        self._rest = window[max(0, len(window) - len(self._marker) + 1) :]
        return ends


@dataclass(eq=False)
class Watch:
    """A marker, and what happens where it occurs."""

    marker: bytes
    direction: Direction
    times: int
    action: Callable[[], object] | None = None
    """Called in the relay's thread before the bytes are passed on. They are not, if it cuts the connection."""
    flip_behind: int = 0
    """Without an action: flip one bit of the byte this far behind the marker."""
    seen: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class _Connection:
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    pumps: list["asyncio.Task[None]"] = field(default_factory=list)
    silent: bool = False


class Relay:
    """Relays 127.0.0.1:``port`` to 127.0.0.1:``target``. Use as a context manager; faults can be set from any thread."""

    def __init__(self, target: int, port: int = 0) -> None:
        """``port`` 0: any free one, known inside the context."""
        self.target = target
        self.port = port
        self.delay_s = 0.0
        """Each piece of the stream is held back for this long."""
        self.bytes_per_s: float | None = None
        self.num_connections = 0
        self.num_reset = 0
        self.num_flipped = 0
        self.num_bytes: dict[Direction, int] = {"up": 0, "down": 0}
        self._watches: list[Watch] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[_Connection] = set()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.result(CALL_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CALL_S)

    @property
    def endpoint(self) -> str:
        """The address for a ZeroMQ socket."""
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The address for an HTTP client."""
        return f"http://127.0.0.1:{self.port}"

    # --- faults ---------------------------------------------------------------------------------------------------------

    def stall(self) -> None:
        """Stop reading in both directions. Until ``heal``, connections are accepted and lead nowhere."""
        self._call(self._flowing.clear)

    def heal(self) -> None:
        """End a stall, a delay and a bandwidth limit."""
        self.delay_s, self.bytes_per_s = 0.0, None
        self._call(self._flowing.set)

    def cut(self) -> None:
        """Reset every connection on both sides. New ones are accepted."""
        self._call(self._cut)

    def half_open(self) -> None:
        """Close the far side of every connection. The near side is neither told nor read."""
        self._call(self._half_open)

    def shut(self) -> None:
        """Refuse new connections until ``open``, like a host where nothing listens. Existing ones stay."""
        self._call(self._server.close)

    def open(self) -> None:
        """Accept connections again."""
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(CALL_S)

    def flip(self, marker: bytes, behind: int, *, times: int = 1, direction: Direction = "down") -> Watch:
        """Flip a bit of the byte ``behind`` bytes after each of the next ``times`` occurrences of ``marker``."""
        return self._watch(Watch(marker, direction, times, flip_behind=behind))

    def on(self, marker: bytes, action: Callable[[], object], *, times: int = 1, direction: Direction = "up") -> Watch:
        """Call ``action`` when the marker comes, before its message is passed on."""
        return self._watch(Watch(marker, direction, times, action=action))

    def _watch(self, watch: Watch) -> Watch:
        self._call(lambda: self._watches.append(watch))
        return watch

    # --- the relay's own thread -----------------------------------------------------------------------------------------

    def _call(self, function: Callable[[], object]) -> None:
        """Run ``function`` in the relay's thread and return when it is done."""
        if threading.current_thread() is self._thread:
            function()
            return

        async def call() -> None:
            function()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(CALL_S)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._flowing, self._stop = asyncio.Event(), asyncio.Event()
        self._flowing.set()
        async with asyncio.TaskGroup() as tasks:
            self._group = tasks
            await self._listen()
            self._started.set_result(None)
            await self._stop.wait()
            self._server.close()
            for connection in self._connections:
                _abort(connection.near)
                _abort(connection.far)
            for task in self._tasks:
                task.cancel()

    async def _listen(self) -> None:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.num_connections += 1
            self._start(self._group, self._relay(self._group, reader, writer))

        self._server = await asyncio.start_server(accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def _start(self, tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = tasks.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _relay(self, tasks: asyncio.TaskGroup, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        try:
            far_reader, far = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            _abort(writer)
            return
        connection = _Connection(near=writer, far=far)
        self._connections.add(connection)
        ways = [self._pump(connection, reader, far, "up"), self._pump(connection, far_reader, writer, "down")]
        connection.pumps = [self._start(tasks, way) for way in ways]
        await asyncio.wait(connection.pumps, return_when=asyncio.FIRST_COMPLETED)
        if connection.silent:
            return  # it stays as it is until the end
        self._connections.discard(connection)
        for pump in connection.pumps:
            pump.cancel()
        for end in (connection.near, connection.far):
            end.close()

    async def _pump(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        finders: dict[Watch, Finder] = {}
        flips: set[int] = set()
        place = 0
        with suppress(OSError):
            while True:
                await self._flowing.wait()
                limit = self.bytes_per_s
                data = await reader.read(READ_BYTES if limit is None else max(1, int(limit / 20)))
                if not data:
                    return
                await self._flowing.wait()
                limit = self.bytes_per_s  # It may have been set while nothing came.
                if limit is not None or self.delay_s:
                    await asyncio.sleep(self.delay_s + (len(data) / limit if limit is not None else 0.0))
                ends = self._look(finders, place, data, direction)
                flips |= {end + watch.flip_behind for end, watch in ends if watch.action is None}
                here = {at for at in flips if at < place + len(data)}
                data = _flipped(data, [at - place for at in here])
                self.num_flipped += len(here)
                flips -= here
                sent = 0
                for end, watch in ends:
                    if watch.action is None:
                        continue
                    # What came before the marker is passed on first.
                    begin = max(sent, end - len(watch.marker) - place)
                    await self._write(writer, data[sent:begin], direction)
                    sent = begin
                    watch.action()
                    watch.seen.set()
                    if connection not in self._connections or connection.silent:
                        return
                    await self._flowing.wait()
                place += len(data)
                await self._write(writer, data[sent:], direction)

    async def _write(self, writer: asyncio.StreamWriter, data: bytes, direction: Direction) -> None:
        writer.write(data)
        self.num_bytes[direction] += len(data)
        await writer.drain()

    def _look(self, finders: dict[Watch, Finder], place: int, data: bytes, direction: Direction) -> list[tuple[int, Watch]]:
        """The ends of this direction's markers that still count, in order."""
        ends: list[tuple[int, Watch]] = []
        for watch in [watch for watch in self._watches if watch.direction == direction]:
            for end in finders.setdefault(watch, Finder(watch.marker, place)).feed(data):
                if watch.times:
                    watch.times -= 1
                    ends.append((end, watch))
                    if watch.action is None:
                        watch.seen.set()
        return sorted(ends, key=lambda found: found[0])

    def _cut(self) -> None:
        for connection in [connection for connection in self._connections if not connection.silent]:
            self._connections.discard(connection)
            self.num_reset += 1
            for end in (connection.near, connection.far):
                _abort(end)

    def _half_open(self) -> None:
        for connection in self._connections:
            connection.silent = True
            for pump in connection.pumps:
                pump.cancel()
            _abort(connection.far)


def _flipped(data: bytes, places: list[int]) -> bytes:
    changed = bytearray(data)
    for place in places:
        changed[place] ^= 1
    return bytes(changed)


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with a reset, like a router that has forgotten the connection."""
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
