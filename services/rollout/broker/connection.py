"""A rollout's connection to its broker, and what a person is told of it."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Final

import zmq.asyncio

from gspo_protocol.channels import WORK
from gspo_protocol.sessions import new_session
from gspo_services.rollout.gathering import GatheringClient
from gspo_services.shared.net import PeerClient, Security
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.settings import Settings, run_fingerprint

HEARTBEAT_S: Final = 1.0
SILENT_S: Final = 7 * HEARTBEAT_S
"""The broker answers every heartbeat: after this silence it is away."""


@contextmanager
def open_broker(
    settings: Settings, context: zmq.asyncio.Context, *, name: str, clock: Clock, security: Security
) -> Iterator[GatheringClient]:
    """The connection of the rollout ``name``, closed at the end. Raises: EndpointError."""
    client = GatheringClient(
        context, WORK, settings.broker.work_endpoint,
        role="rollout", peer=name, session=new_session(), clock=clock, security=security,
        fingerprint=run_fingerprint(settings),
    )  # fmt: skip
    with closing(client):
        yield client


def why_away(client: PeerClient) -> str:
    """That the broker cannot be reached now; empty: it can."""
    return "the broker is away" if not client.connected or client.silent_s > SILENT_S else ""


def no_answer(client: PeerClient) -> str:
    """That the broker has never answered, and why if known; empty once it has."""
    if client.welcome is not None:
        return ""
    wait = f"no answer from the broker at {client.endpoint} for {client.silent_s:.0f} s"
    return f"{wait}: {client.refused}" if client.refused else wait
