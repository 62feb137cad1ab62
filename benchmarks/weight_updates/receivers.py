"""Receivers of weights in one process: ``python -m benchmarks.weight_updates.receivers ENDPOINT [--weight-peers] NAME ...``.

Each fetches as a rollout does, with its own sockets, and prints the version that it holds.
"""

import argparse
import asyncio
from collections.abc import Sequence
from typing import Final

import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo_protocol.channels import WEIGHTS
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.weights import WeightPeers
from gspo_services.rollout.weights.fetch import fetch_newest
from gspo_services.rollout.weights.replica import Replica
from gspo_services.shared.net import PLAINTEXT, PeerClient
from gspo_services.shared.runtime.clock import MonotonicClock

ANY_PORT: Final = "tcp://127.0.0.1:*"
ASK_S: Final = 0.05
STALL_S: Final = 60.0


async def receive(endpoint: str, name: str, weight_peers: bool) -> None:
    """Follow ``endpoint`` until cancelled; ``weight_peers``: fetch from other receivers where the server names some."""
    context = zmq.asyncio.Context()
    clock = MonotonicClock()
    shared = None
    if weight_peers:
        metrics = RolloutMetrics(CollectorRegistry())
        shared = WeightPeers(context, ANY_PORT, peer=name, session=name, clock=clock, metrics=metrics, security=PLAINTEXT)
    replica = Replica() if shared is None else shared.replica
    client = PeerClient(context, WEIGHTS, endpoint, role="rollout", peer=name, session=name, clock=clock)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.run(), name=f"{name}-client")
        if shared is not None:
            tasks.create_task(shared.run(), name=f"{name}-weight_peers")
        await client.connected_welcome()
        while True:
            weights = await fetch_newest(client, replica.policy_version, replica, sources=shared, stall_s=STALL_S)
            if weights is not None:
                print(name, weights.policy_version, weights.digest, flush=True)
            await asyncio.sleep(ASK_S)


async def receive_all(endpoint: str, names: Sequence[str], weight_peers: bool) -> None:
    """Run all receivers until the process ends."""
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(receive(endpoint, name, weight_peers), name=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint")
    parser.add_argument("--weight-peers", action="store_true")
    parser.add_argument("names", nargs="+")
    arguments = parser.parse_args()
    asyncio.run(receive_all(arguments.endpoint, arguments.names, arguments.weight_peers))


if __name__ == "__main__":
    main()
