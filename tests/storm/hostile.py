"""A hostile peer with keys of its own that the run admits: python -m tests.storm.hostile WORK BATCH WEIGHTS KEYS SEED.

It attacks in bursts with pauses between them, because it shares the machine with the run: what is tested is what an attack
does to the run, not who gets the processor. Each attack is one function; its name is printed when it has ended.
"""

import argparse
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import numpy as np
import zmq

from gspo_protocol.codec import decode, encode
from gspo_protocol.errors import ProtocolError
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import (
    Chunk,
    Finish,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    LeaseRequest,
    Message,
    Role,
    Segment,
    StatusRequest,
    VersionRun,
    Welcome,
)
from gspo_services.shared.net import Security
from gspo_services.shared.settings.sections import SecuritySection

BURST_S: Final = 1.0
PAUSE_S: Final = 4.0
ANSWER_MS: Final = 500
NICE: Final = 5
ROLLOUT: Final = "rollout-hostile"
OPERATOR: Final = "operator-hostile"
REWARD: Final = 0.7071
PLAUSIBLE: Final = struct.pack(">d", REWARD)
ABSURD: Final = struct.pack(">d", 1.7e308)
NAMES: Final = (ROLLOUT, OPERATOR)
"""The names of its keys."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where the run listens, and the keys that it admits us with."""

    work: str
    batch: str
    weights: str
    rollout: Security
    operator: Security
    rng: random.Random


class Peer:
    """A DEALER with a key, at the mercy of nobody's rules."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, binds: str, security: Security, name: str
    ) -> None:
        self.name, self.session = name, os.urandom(8).hex()
        self.socket = context.socket(zmq.DEALER)
        own = security.own
        assert own is not None
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, security.server_key(binds))
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        self.socket.setsockopt(zmq.SNDTIMEO, ANSWER_MS)
        self.socket.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, 100)
        self.socket.setsockopt_string(zmq.IDENTITY, f"{name}/{self.session}")
        self.socket.connect(endpoint)

    def send(self, message: Message, arrays: dict[str, np.ndarray] | None = None, seq: int | None = None) -> bool:
        return self.send_raw([bytes(frame) for frame in encode(message, arrays, seq)])

    def send_raw(self, frames: list[bytes]) -> bool:
        try:
            self.socket.send_multipart(frames)
        except zmq.Again:
            return False
        return True

    def hello(self, role: Role = "rollout") -> bool:
        return self.send(Hello(protocol_version=PROTOCOL_VERSION, role=role, peer=self.name, session=self.session))

    def receive(self) -> Message | None:
        try:
            return decode(self.socket.recv_multipart()).message
        except (zmq.Again, ProtocolError):
            return None

    def close(self) -> None:
        """Without lingering: what is under way is cut off, and the other end sees a reset."""
        self.socket.close(linger=0)


Attack = Callable[[Target, "zmq.Context[zmq.Socket[bytes]]", float], None]


def garbage(target: Target, context: "zmq.Context[zmq.Socket[bytes]]", until: float) -> None:
    """Bytes that are no message, in frames of all sizes."""
    peer = Peer(context, target.work, "broker", target.rollout, ROLLOUT)
    while time.monotonic() < until:
        peer.send_raw(
            [target.rng.randbytes(target.rng.choice((0, 1, 100, 10_000))) for _ in range(target.rng.randrange(1, 9))]
        )
    peer.close()


def large_frames(target: Target, context: "zmq.Context[zmq.Socket[bytes]]", until: float) -> None:
    """As many of the largest frames as go out, then a reset."""
    peer = Peer(context, target.work, "broker", target.rollout, ROLLOUT)
    frame = bytes(4_000_000)
    while time.monotonic() < until:
        peer.send_raw([b"\x81", frame])
    peer.close()


def many_frames(target: Target, context: "zmq.Context[zmq.Socket[bytes]]", until: float) -> None:
    """Messages of very many empty frames."""
    peer = Peer(context, target.work, "broker", target.rollout, ROLLOUT)
    while time.monotonic() < until:
        peer.send_raw([b""] * 100_000)
    peer.close()


def hellos(target: Target, context: "zmq.Context[zmq.Socket[bytes]]", until: float) -> None:
    """One connection that says Hello without end, and many that say it once."""
    peer = Peer(context, target.work, "broker", target.rollout, ROLLOUT)
    while time.monotonic() < until:
        for number in range(200):
            session = f"{peer.session}-{number}"
            peer.send(Hello(protocol_version=PROTOCOL_VERSION, role="rollout", peer=f"{ROLLOUT}-{number}", session=session))
        other = Peer(context, target.work, "broker", target.rollout, ROLLOUT)
        other.hello()
        other.receive()
        other.close()
    peer.close()


def impostor(target: Target, context: "zmq.Context[zmq.Socket[bytes]]", until: float) -> None:
    """Other peers' names and roles, and their last words."""
    while time.monotonic() < until:
        for endpoint, security, claims in (
            (target.work, target.rollout, ("rollout-0", "rollout-1", "learner")),
            (target.batch, target.operator, ("learner", "rollout-0")),
        ):
            peer = Peer(context, endpoint, "broker", security, target.rng.choice(claims))
            peer.hello(target.rng.choice(("rollout", "learner", "operator")))
            peer.receive()
            peer.send(Goodbye(reason="[/bold] \x1b[2J nobody \n needs me"))
            peer.close()


def greedy(target: Target, context: "zmq.Context[zmq.Socket[bytes]]", until: float) -> None:
    """Takes leases and never works on them."""
    peer, welcome = _serving(target, context)
    while welcome is not None and time.monotonic() < until:
        peer.send(LeaseRequest(request_id=1, capacity=8, policy_version=welcome.policy_version))
        if not isinstance(peer.receive(), Lease):
            break
    peer.close()


def liar(target: Target, context: "zmq.Context[zmq.Socket[bytes]]", until: float) -> None:
    """Takes leases and answers them with what nothing behind the broker could use."""
    peer, welcome = _serving(target, context)
    seq = 0
    while welcome is not None and time.monotonic() < until:
        peer.send(LeaseRequest(request_id=1, capacity=1, policy_version=welcome.policy_version))
        lease = peer.receive()
        while lease is not None and not isinstance(lease, Lease):
            lease = peer.receive()
        if lease is None:
            break
        for message, arrays in _lies(lease, welcome.policy_version, target.rng):
            # No message of ours may be made with such a reward, so it is put in afterwards.
            frames = [bytes(frame).replace(PLAUSIBLE, ABSURD) for frame in encode(message, arrays, seq)]
            seq += int(peer.send_raw(frames))
    peer.close()


def _lies(lease: Lease, version: int, rng: random.Random) -> list[tuple[Message, dict[str, np.ndarray] | None]]:
    key = {"trajectory_id": lease.trajectory_id, "epoch": lease.epoch, "offset": lease.num_tokens}
    two = {"token_ids": np.array([1, 2], "<i4"), "logprobs": np.array([0, -1], "<f4")}
    segments = [Segment("observation", 0, 1), Segment("action", 0, 1)]
    runs = [VersionRun(-1, 1), VersionRun(version, 1)]
    unknown = {**two, "token_ids": np.array([1, 2**31 - 1], "<i4")}
    absurd = {**two, "logprobs": np.array([0, -3e38], "<f4")}
    kind = rng.randrange(5)
    if kind == 0:
        return [(Chunk(num_tokens=2, segments=segments, version_runs=runs, **key), unknown)]
    if kind == 1:
        return [(Chunk(num_tokens=2, segments=segments, version_runs=runs, **key), absurd)]
    if kind == 2:
        first = [Segment("action", 0, 2)]
        return [(Chunk(num_tokens=2, segments=first, version_runs=[VersionRun(version, 2)], **key), two)]
    if kind == 3:
        return [(Chunk(num_tokens=2, segments=segments, version_runs=[VersionRun(-1, 1), VersionRun(1, 1)], **key), two)]
    finish = Finish(
        trajectory_id=lease.trajectory_id,
        epoch=lease.epoch,
        num_tokens=lease.num_tokens + 2,
        reason="done",
        turn_rewards=[REWARD],
    )
    return [(Chunk(num_tokens=2, segments=segments, version_runs=runs, **key), two), (finish, None)]


def _serving(target: Target, context: "zmq.Context[zmq.Socket[bytes]]") -> tuple[Peer, Welcome | None]:
    """A peer that claims to serve the newest version; None: it was not welcomed."""
    peer = Peer(context, target.work, "broker", target.rollout, ROLLOUT)
    peer.hello()
    welcome = peer.receive()
    if isinstance(welcome, Welcome):
        peer.send(Heartbeat(policy_version=welcome.policy_version, status="serving", leases=[]))
        return peer, welcome
    return peer, None


def questions(target: Target, context: "zmq.Context[zmq.Socket[bytes]]", until: float) -> None:
    """An operator that asks without end and does not read the answers."""
    peer = Peer(context, target.batch, "broker", target.operator, OPERATOR)
    peer.hello("operator")
    while time.monotonic() < until:
        peer.send(StatusRequest())
    peer.close()


def weights(target: Target, context: "zmq.Context[zmq.Socket[bytes]]", until: float) -> None:
    """The learner's own socket: garbage, Hellos, and resets."""
    while time.monotonic() < until:
        peer = Peer(context, target.weights, "learner", target.rollout, ROLLOUT)
        peer.hello()
        for _ in range(100):
            peer.send_raw([target.rng.randbytes(target.rng.choice((1, 1000, 100_000)))])
        peer.close()


def strangers(target: Target, context: "zmq.Context[zmq.Socket[bytes]]", until: float) -> None:
    """Connections that do not speak ZeroMQ, or stop in the middle of the handshake."""
    while time.monotonic() < until:
        for endpoint in (target.work, target.batch, target.weights):
            address = urlsplit(endpoint)
            with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=1) as stranger:
                stranger.sendall(target.rng.choice((b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03", bytes(64))))
        time.sleep(0.05)


ATTACKS: Final[tuple[Attack, ...]] = (
    garbage,
    large_frames,
    many_frames,
    hellos,
    impostor,
    greedy,
    liar,
    questions,
    weights,
    strangers,
)


def main() -> None:
    """Attack until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work")
    parser.add_argument("batch")
    parser.add_argument("weights")
    parser.add_argument("keys", type=Path)
    parser.add_argument("seed", type=int)
    arguments = parser.parse_args()
    os.nice(NICE)
    section = SecuritySection(keys=str(arguments.keys))
    target = Target(
        work=arguments.work,
        batch=arguments.batch,
        weights=arguments.weights,
        rollout=Security.load(section, "rollout", ROLLOUT),
        operator=Security.load(section, "operator", OPERATOR),
        rng=random.Random(arguments.seed),
    )
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while not poller.poll(int(PAUSE_S * 1000)):
        attack = target.rng.choice(ATTACKS)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            attack(target, context, time.monotonic() + BURST_S)
            print(attack.__name__, flush=True)
        except OSError:
            print(f"{attack.__name__} (nobody there)", flush=True)
        finally:
            context.destroy(linger=0)


if __name__ == "__main__":
    main()
