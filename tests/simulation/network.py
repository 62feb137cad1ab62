"""ZeroMQ's sockets without ZeroMQ: the calls that ``gspo_services.shared.net`` makes, over connections in all weathers.

A connection keeps its order, as TCP does. When it breaks, messages on their way are lost. A dealer keeps what it has not
sent yet; a router refuses to send to a peer that is gone (ROUTER_MANDATORY). A half-open connection takes everything and
delivers nothing, as one through a proxy whose other side is gone. Loss and duplication of single messages are harder than
anything that ZeroMQ does.
"""

import asyncio
import hashlib
import random
import struct
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import zmq

from gspo_services.shared.net.frames import receiver
from tests.simulation.loop import NOBODY, PROCESS, Process, VirtualLoop

TCP_TIMEOUT_S = 20.0
RECONNECT_S = (0.1, 2.0)
LATENCY_S = (0.0005, 0.004)

Frames = list[bytes]


class Network:
    """All sockets, and the messages on their way between them."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, happened: Counter[str]) -> None:
        self.loop = loop
        self.rng = rng
        self.happened = happened
        self.routers: dict[str, SimSocket] = {}
        self.connections: dict[Connection, None] = {}
        self.sockets: dict[SimSocket, None] = {}
        self.partitions: Counter[frozenset[str]] = Counter()
        self.slow_s: dict[str, float] = {}
        self.loss = 0.0
        self.duplication = 0.0
        self.corruption: dict[str, float] = {}
        """By process: the probability that one bit is wrong in a chunk of weights, or a part of a batch, that it sends."""

    def cut(self, one: Process, other: Process) -> bool:
        """Whether no message passes between the two."""
        return one.suspended or other.suspended or bool(self.partitions[frozenset((one.name, other.name))])

    def free_endpoint(self, name: str) -> str:
        """Where a rollout serves its peers: the same in every life, except for a second rollout of the same name."""
        port = 1000 + int.from_bytes(hashlib.blake2b(name.encode(), digest_size=2).digest(), "big") // 2
        while (endpoint := f"tcp://127.0.0.1:{port}") in self.routers:
            port += 1
        return endpoint

    def refresh(self) -> None:
        """Partitions or suspended processes have changed."""
        for connection in list(self.connections):
            connection.refresh()

    def half_open(self, one: str, other: str) -> int:
        """Break the connections between two processes without a word to the end that connects; returns how many."""
        pair = {one, other}
        between = [each for each in self.connections if {each.dealer.process.name, each.router.process.name} == pair]
        for connection in between:
            connection.half_open()
        return len(between)

    def kill(self, process: Process) -> None:
        """Close all sockets of a process at once; some of what it was sending has already left."""
        for socket in [socket for socket in self.sockets if socket.process is process]:
            for connection in socket.connections():
                connection.direction_from(socket).truncate(self.rng)
            socket.close()

    def latency_s(self, one: Process, other: Process) -> float:
        slow = self.slow_s.get(one.name, 0.0) + self.slow_s.get(other.name, 0.0)
        return self.rng.uniform(*LATENCY_S) + (self.rng.uniform(0.2, 1.0) * slow if slow else 0.0)


class _Parcel:
    """One message on its way."""

    __slots__ = ("frames", "lost")

    def __init__(self, frames: Frames) -> None:
        self.frames = frames
        self.lost = False


class Direction:
    """One direction of a connection. ``num_pending`` counts messages that were sent and not yet read."""

    def __init__(self, connection: "Connection", source: "SimSocket", sink: "SimSocket", prefix: Frames) -> None:
        self.connection = connection
        self._source = source
        self._sink = sink
        self._prefix = prefix
        self._transit: deque[_Parcel] = deque()
        self._late: deque[_Parcel] = deque()
        self._last_due = 0.0
        self.num_pending = 0
        self.limit = source.option(zmq.SNDHWM) + sink.option(zmq.RCVHWM)

    @property
    def has_room(self) -> bool:
        return self.num_pending < self.limit

    def send(self, frames: Frames) -> None:
        network = self.connection.network
        if self.connection.is_dead:
            return
        if network.loss and network.rng.random() < network.loss:
            network.happened["message lost"] += 1
            return
        frames = self._corrupted(frames)
        self._put(frames)
        if network.duplication and network.rng.random() < network.duplication:
            network.happened["message duplicated"] += 1
            self._put(frames)

    def _corrupted(self, frames: Frames) -> Frames:
        """The frames, maybe with one bit of weights or of a batch wrong before they are sent, which ZeroMQ, TCP and CURVE
        deliver."""
        network = self.connection.network
        probability = network.corruption.get(self._source.process.name, 0.0)
        what = (
            "chunk of weights" if b"weight_chunk" in frames[0] else "part of a batch" if b"batch_part" in frames[0] else ""
        )
        if not probability or not what or len(frames) == 1 or network.rng.random() >= probability:
            return frames
        network.happened[f"{what} damaged"] += 1
        place = len(frames) - 1 if what == "chunk of weights" else network.rng.randrange(1, len(frames))
        data = bytearray(frames[place])
        data[network.rng.randrange(len(data))] ^= 1 << network.rng.randrange(8)
        return [*frames[:place], bytes(data), *frames[place + 1 :]]

    def _put(self, frames: Frames) -> None:
        network = self.connection.network
        due = network.loop.time() + network.latency_s(self._source.process, self._sink.process)
        self._last_due = due = max(due, self._last_due + 1e-6)
        parcel = _Parcel([*self._prefix, *frames])
        self._transit.append(parcel)
        self.num_pending += 1
        network.loop.call_at(due, self._arrived, context=NOBODY)

    def _arrived(self) -> None:
        parcel = self._transit.popleft()
        if self.connection.is_stalled:
            self._late.append(parcel)
        else:
            self._hand_over(parcel)

    def catch_up(self) -> None:
        """The connection is no longer stalled: hand over what came meanwhile."""
        while self._late:
            self._hand_over(self._late.popleft())

    def _hand_over(self, parcel: _Parcel) -> None:
        if parcel.lost or self._sink.closed:
            self.num_pending -= 1
        else:
            self._sink.put(self, parcel.frames)

    def lose_all(self) -> None:
        for parcel in (*self._transit, *self._late):
            parcel.lost = True
        self.catch_up()

    def truncate(self, rng: random.Random) -> None:
        """Lose all but the first messages: only a part had left the sender."""
        parcels = [*self._late, *self._transit]
        for parcel in parcels[rng.randint(0, len(parcels)) :]:
            parcel.lost = True


class Connection:
    """A connection between a dealer and a router."""

    def __init__(self, network: Network, dealer: "SimSocket", router: "SimSocket") -> None:
        self.network = network
        self.dealer = dealer
        self.router = router
        self.up = Direction(self, dealer, router, [bytes(dealer.identity)])
        self.down = Direction(self, router, dealer, [])
        self.identity = dealer.identity
        self.is_stalled = False
        self.is_dead = False
        self._stalls = 0
        network.connections[self] = None

    def direction_from(self, socket: "SimSocket") -> Direction:
        return self.up if socket is self.dealer else self.down

    def refresh(self) -> None:
        stalled = self.network.cut(self.dealer.process, self.router.process)
        if stalled == self.is_stalled:
            return
        self.is_stalled = stalled
        self._stalls += 1
        if stalled:
            self.network.loop.call_later(TCP_TIMEOUT_S, self._timed_out, self._stalls, context=NOBODY)
        else:
            self.up.catch_up()
            self.down.catch_up()

    def _timed_out(self, stall: int) -> None:
        # The kernel of a suspended process still answers.
        suspended = self.dealer.process.suspended or self.router.process.suspended
        if self.is_stalled and not suspended and self._stalls == stall and self in self.network.connections:
            self.network.happened["connection timed out"] += 1
            self.close()

    def half_open(self) -> None:
        """Close it at the router's end only."""
        if not self.is_dead:
            self.is_dead = True
            self._leave_router()
            self.up.lose_all()
            self.down.lose_all()

    def _leave_router(self) -> None:
        if self.router.peers.get(self.identity) is self:
            del self.router.peers[self.identity]

    def close(self) -> None:
        """Close it at both ends; the dealer tries again."""
        if self not in self.network.connections:
            return
        del self.network.connections[self]
        if self.is_stalled:
            self.is_stalled = False
            self.up.lose_all()
            self.down.lose_all()
        self._leave_router()
        if self.dealer.connection is self:
            self.dealer.connection = None
            if not self.dealer.closed:
                self.dealer.reconnect_later()


class SimContext:
    """Stands in for ``zmq.asyncio.Context``: makes the sockets of one process."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    def socket(self, kind: int) -> "SimSocket":
        return SimSocket(self._network, self._process, kind)

    def destroy(self, linger: int | None = None) -> None:
        for socket in [socket for socket in self._network.sockets if socket.process is self._process]:
            socket.close()

    def term(self) -> None:
        self.destroy()


class SimSocket:
    """A ROUTER that binds, or a DEALER that connects."""

    def __init__(self, network: Network, process: Process, kind: int) -> None:
        self._network = network
        self.process = process
        self._kind = kind
        self._options: dict[int, Any] = {}
        self._endpoint = ""
        self._inbox: deque[tuple[Direction, Frames]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._unsent: deque[Frames] = deque()
        self.rest: list[SimFrame] = []
        self.closed = False
        self.peers: dict[bytes, Connection] = {}
        self.connection: Connection | None = None
        self._monitor: Monitor | None = None
        network.sockets[self] = None

    # --- zmq's interface ----------------------------------------------------------------------------------------------

    def setsockopt(self, option: int, value: Any) -> None:
        self._options[option] = value

    def setsockopt_string(self, option: int, value: str) -> None:
        self._options[option] = value.encode()

    def getsockopt_string(self, option: int) -> str:
        assert option == zmq.LAST_ENDPOINT
        return self._endpoint

    def bind(self, endpoint: str) -> None:
        if endpoint in self._network.routers:
            raise zmq.ZMQError(zmq.EADDRINUSE)
        self._endpoint = endpoint
        self._network.routers[endpoint] = self

    def connect(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._network.loop.call_later(0.001, self._try_to_connect, context=NOBODY)

    def disconnect(self, endpoint: str) -> None:
        assert endpoint == self._endpoint
        self._unsent.clear()
        connection, self.connection = self.connection, None
        if connection is not None:
            self._network.happened["connection given up"] += 1
            connection.close()

    def get_monitor_socket(self, events: int) -> "Monitor":
        self._monitor = Monitor()
        return self._monitor

    def disable_monitor(self) -> None:
        """Does nothing: the monitor has no socket of its own."""

    async def recv_multipart(self, copy: bool = True) -> Frames:
        while not self._inbox:
            self._waiter = self._network.loop.create_future()
            await self._waiter
        direction, frames = self._inbox.popleft()
        direction.num_pending -= 1
        return frames

    def recv(self, copy: bool = True) -> "asyncio.Future[SimFrame]":
        """A future of the first frame, as pyzmq's; ``rest`` has the others then."""
        return self._network.loop.create_task(self._recv())  # type: ignore[return-value]

    async def _recv(self) -> "SimFrame":
        frames = await self.recv_multipart()
        first, *self.rest = [SimFrame(frame, more=number + 1 < len(frames)) for number, frame in enumerate(frames)]
        return first

    async def send_multipart(self, frames: Sequence[Any], flags: int = 0, copy: bool = True) -> None:
        assert flags == zmq.NOBLOCK
        # Without a copy a frame arrives as it is by then.
        kept = [frame if not copy and index else bytes(frame) for index, frame in enumerate(frames)]
        process = PROCESS.get()
        assert process is None or process is self.process, f"{process} uses a socket of {self.process}"
        if self._kind == zmq.ROUTER:
            identity, *rest = kept
            connection = self.peers.get(identity)
            if connection is None:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            self._send_over(connection.down, rest)
        elif self.connection is not None:
            self._send_over(self.connection.up, kept)
        elif len(self._unsent) < self.option(zmq.SNDHWM):
            self._unsent.append(kept)
        else:
            self._network.happened["queue full"] += 1
            raise zmq.Again

    def close(self, linger: int | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        del self._network.sockets[self]
        if self._kind == zmq.ROUTER:
            del self._network.routers[self._endpoint]
        for connection in self.connections():
            connection.close()

    # --- for the network -----------------------------------------------------------------------------------------------

    @property
    def identity(self) -> bytes:
        return bytes(self._options[zmq.IDENTITY])

    def option(self, option: int) -> int:
        return int(self._options[option])

    @property
    def num_waiting(self) -> int:
        """Messages that were received and not read, or not sent yet."""
        return len(self._inbox) + len(self._unsent)

    def connections(self) -> list[Connection]:
        own = [] if self.connection is None else [self.connection]
        return [*self.peers.values(), *own]

    def put(self, direction: Direction, frames: Frames) -> None:
        self._inbox.append((direction, [bytes(frame) for frame in frames]))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _send_over(self, direction: Direction, frames: Frames) -> None:
        if not direction.has_room:
            self._network.happened["queue full"] += 1
            raise zmq.Again
        direction.send(frames)

    def reconnect_later(self) -> None:
        self._network.happened["reconnected"] += 1
        self._tell(zmq.EVENT_DISCONNECTED)
        self._network.loop.call_later(self._network.rng.uniform(*RECONNECT_S), self._try_to_connect, context=NOBODY)

    def _try_to_connect(self) -> None:
        if self.closed or self.connection is not None:
            return
        router = self._network.routers.get(self._endpoint)
        if router is None or self._network.cut(self.process, router.process):
            self._network.loop.call_later(self._network.rng.uniform(*RECONNECT_S), self._try_to_connect, context=NOBODY)
            return
        assert self.identity not in router.peers, "a router does not hear a second connection under an identity"
        self.connection = router.peers[self.identity] = Connection(self._network, self, router)
        self._tell(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        while self._unsent:
            self.connection.up.send(self._unsent.popleft())

    def _tell(self, event: int) -> None:
        if self._monitor is not None:
            self._monitor.events.put_nowait([struct.pack("=HI", event, 0), self._endpoint.encode()])


class SimFrame:
    """A frame as ``zmq.Frame`` shows it."""

    def __init__(self, data: bytes, *, more: bool) -> None:
        self.bytes = data
        self.buffer = memoryview(data)
        self.more = more

    def __len__(self) -> int:
        return len(self.bytes)

    def get(self, option: int) -> int:
        return -1


@receiver.register
def _(socket: SimSocket) -> Any:
    def recv(flags: int, copy: bool = True) -> SimFrame:
        """The next frame of a message that is being read. A message's first one is always waited for in the loop."""
        if not socket.rest:
            raise zmq.Again
        return socket.rest.pop(0)

    return recv


class Monitor:
    """A monitor of a socket: it tells when the handshake of a connection has succeeded, and when a connection is lost."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Frames] = asyncio.Queue()

    async def recv_multipart(self) -> Frames:
        return await self.events.get()

    def close(self, linger: int | None = None) -> None:
        """Does nothing: there is nothing to close."""
