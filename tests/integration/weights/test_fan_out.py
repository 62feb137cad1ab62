"""Weights from rollout to rollout over real sockets: bit for bit, and the learner sends them a constant number of times."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import torch
import zmq.asyncio
from msgspec import structs
from prometheus_client import CollectorRegistry

from gspo_protocol.channels import PEER_WEIGHTS, WEIGHTS
from gspo_protocol.messages import Source, WeightChunk, WeightRequest
from gspo_services.rollout.metrics import SOURCES, RolloutMetrics
from gspo_services.rollout.weights.fetch import DamagedError, fetch_newest
from gspo_services.rollout.weights.peers import MIN_RATES, WeightPeers
from gspo_services.shared.net.security import PLAINTEXT, Security
from gspo_services.shared.runtime.clock import MonotonicClock
from tests.support.wire.keys import make_keys, security_of
from tests.support.wire.replicas import content, flip
from tests.support.wire.served_weights import Publisher, Served
from tests.support.wire.snapshots import bytes_of, snapshot_of
from tests.support.wire.zmq_ends import ANY_PORT, PATIENCE_S, ScriptedEnd, a_client, in_background, zmq_context

SOON_S = 0.1
CONNECT_S = 0.5
"""For rollouts whose sources are all gone: a live source may take longer on a busy machine."""
STALL_S = 1.5


class Fetcher:
    """A rollout's own end of the weights, which fetches and serves; its context is its own, as in a process."""

    def __init__(self, name: str, learner: Publisher, security: Security = PLAINTEXT, connect_s: float = PATIENCE_S) -> None:
        self.name = name
        self.registry = CollectorRegistry()
        self.context = zmq.asyncio.Context()
        self.weight_peers = WeightPeers(
            self.context,
            ANY_PORT,
            peer=name,
            session="s",
            clock=MonotonicClock(),
            metrics=RolloutMetrics(self.registry),
            security=security,
            connect_s=connect_s,
            patience_s=SOON_S,
        )
        self.client = a_client(self.context, WEIGHTS, learner.served.endpoint, name=name, security=security)
        self.kinds: Counter[str] = Counter()

    @property
    def data(self) -> bytes:
        return content(self.weight_peers.replica)

    async def fetch(self) -> None:
        replica = self.weight_peers.replica
        have = replica.policy_version
        async with asyncio.timeout(PATIENCE_S):
            await self.client.connected_welcome()
            while True:
                try:
                    await fetch_newest(
                        self.client,
                        have,
                        replica,
                        sources=self.weight_peers,
                        fetched=lambda manifest: self.kinds.update([manifest.kind]),
                    )
                except DamagedError:
                    continue
                return

    def sources(self, outcome: str) -> float:
        return self.registry.get_sample_value("gspo_rollout_weight_sources_total", {"outcome": outcome}) or 0.0

    @property
    def served(self) -> float:
        return self.registry.get_sample_value("gspo_rollout_weight_bytes_served_total") or 0.0


@contextlib.asynccontextmanager
async def a_fleet(
    number: int, keys: Path | None = None, *, hasty: Sequence[int] = ()
) -> AsyncIterator[tuple[Publisher, list[Fetcher]]]:
    """``hasty``: rollouts that soon give up a source that they cannot connect to."""

    def security(role: str, name: str) -> Security:
        return PLAINTEXT if keys is None else security_of(keys, role, name)  # type: ignore[arg-type]

    async with zmq_context() as context:
        learner = Publisher(Served(context, security=security("learner", "")))
        rollouts = []
        for at in range(number):
            name, connect_s = f"rollout-{at}", CONNECT_S if at in hasty else PATIENCE_S
            rollouts.append(Fetcher(name, learner, security("rollout", name), connect_s))
        runs = [run for rollout in rollouts for run in (rollout.weight_peers.run(), rollout.client.run())]
        try:
            async with in_background(learner.served.authenticator.run(), learner.served.server.run(), *runs):
                yield learner, rollouts
        finally:
            for rollout in rollouts:
                rollout.weight_peers.close()
                rollout.client.close()
                rollout.context.destroy(linger=0)


async def together(rollouts: list[Fetcher]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for rollout in rollouts:
            tasks.create_task(rollout.fetch())


async def test_a_fleet_gets_a_version_and_a_delta_while_the_learner_sends_them_twice() -> None:
    async with a_fleet(9) as (learner, rollouts):
        first = learner.publish()
        await together(rollouts)
        assert learner.served.count("weight_bytes_sent") == 2 * first.manifest.num_bytes
        assert all(rollout.data == bytes_of(first) for rollout in rollouts)
        second = learner.publish()
        await together(rollouts)
        delta = learner.served.store.get(2, 1)
        assert delta is not None
        num_bytes = delta.manifest.num_bytes
        assert learner.served.count("weight_bytes_sent") == 2 * (first.manifest.num_bytes + num_bytes)
        assert all(rollout.data == bytes_of(second) for rollout in rollouts)
        assert all(rollout.kinds == {"snapshot": 1, "delta": 1} for rollout in rollouts)
        assert sum(rollout.served for rollout in rollouts) == 7 * (first.manifest.num_bytes + num_bytes)
        assert sum(rollout.sources("fetched") for rollout in rollouts) == 14
        assert learner.served.count("weight_sources_failed") == 0


async def test_a_newcomer_gets_the_snapshot_from_a_peer_that_joined_before() -> None:
    async with a_fleet(4) as (learner, rollouts):
        learner.publish()
        await together(rollouts[:1])
        for _ in range(3):
            newest = learner.publish()
            await together(rollouts[:1])
        # Two that ask for the newest snapshot get it from the learner; the first rollout has it too, and nobody asks it.
        await rollouts[1].fetch()
        await rollouts[2].fetch()
        sent = learner.served.count("weight_bytes_sent")
        await rollouts[3].fetch()
        assert learner.served.count("weight_bytes_sent") == sent
        assert rollouts[1].served == newest.manifest.num_bytes
        assert rollouts[3].data == bytes_of(newest)


async def test_damage_by_a_peer_is_found_and_the_bytes_come_from_the_learner_instead() -> None:
    async with a_fleet(3) as (learner, rollouts):
        first = learner.publish()
        await together(rollouts[:2])
        for rollout in rollouts[:2]:
            flip(rollout.weight_peers.replica, 17)
        await rollouts[2].fetch()
        assert rollouts[2].data == bytes_of(first)
        assert rollouts[2].sources("damaged") == 1
        assert learner.served.count("weight_bytes_sent") == 3 * first.manifest.num_bytes
        assert learner.served.count("weight_sources_failed") == 1


async def test_after_damage_the_learner_is_asked_for_its_own_bytes_once() -> None:
    """Also for the snapshot after a damaged delta, although other rollouts have fetched it from each other."""
    async with a_fleet(1) as (_, rollouts):
        weight_peers = rollouts[0].weight_peers
        assert not weight_peers.next_request().direct
        weight_peers.were_wrong()
        assert weight_peers.next_request().direct
        assert not weight_peers.next_request().direct


async def test_a_peer_that_is_gone_or_has_nothing_is_skipped() -> None:
    async with a_fleet(5, hasty=[2]) as (learner, rollouts):
        first = learner.publish()
        await together(rollouts[:2])
        rollouts[0].weight_peers._server.close()
        rollouts[1].weight_peers.replica.forget()
        for rollout in rollouts[2:]:
            await rollout.fetch()
        assert [rollout.data == bytes_of(first) for rollout in rollouts[2:]] == [True] * 3
        assert [rollout.sources("failed") for rollout in rollouts[2:]] == [2, 0, 0]
        # The learner names the failed sources to no other rollout: the others get it from the third.
        assert learner.served.count("weight_sources_failed") == 1
        assert rollouts[2].served == 2 * first.manifest.num_bytes
        assert learner.served.count("weight_bytes_sent") == 3 * first.manifest.num_bytes


async def test_when_one_peer_fails_another_is_asked_before_the_learner() -> None:
    async with a_fleet(4) as (learner, rollouts):
        first = learner.publish()
        # One after the other: the learner names first the one that asked first.
        for rollout in rollouts[:2]:
            await rollout.fetch()
        rollouts[0].weight_peers.replica.forget()
        await together(rollouts[2:])
        assert [rollout.data == bytes_of(first) for rollout in rollouts[2:]] == [True] * 2
        assert [rollout.sources("failed") for rollout in rollouts[2:]] == [1, 1]
        assert [rollout.sources("fetched") for rollout in rollouts[2:]] == [1, 1]
        assert learner.served.count("weight_bytes_sent") == 2 * first.manifest.num_bytes
        assert learner.served.count("weight_sources_failed") == 0


async def test_a_peer_that_is_far_slower_than_usual_is_given_up() -> None:
    """It is never silent: it sends the first chunk over and over."""
    snapshot = snapshot_of(1, [("w", torch.ones(5000))])
    async with zmq_context() as context, zmq_context() as outside:
        registry = CollectorRegistry()
        end = ScriptedEnd(outside, PEER_WEIGHTS)
        weight_peers = WeightPeers(
            context, ANY_PORT, peer="r", session="s", clock=MonotonicClock(), metrics=RolloutMetrics(registry),
            security=PLAINTEXT, stall_s=STALL_S,
        )  # fmt: skip
        manifest = structs.replace(snapshot.manifest, chunk_bytes=4096, sources=[Source(end.endpoint)])
        size = snapshot.manifest.num_bytes
        chunks = [snapshot.read(begin, min(begin + 4096, size)) for begin in range(0, size, 4096)]

        async def answer() -> None:
            while True:
                await end.welcome()
                request = await end.expect(WeightRequest)
                for index in range(request.num_chunks):
                    await end.reply(WeightChunk(policy_version=1, chunk=index), {"data": chunks[index]})

        async def repeat() -> None:
            await end.welcome()
            await end.expect(WeightRequest)
            # The fetch ends by closing its socket, so the last of these sends may find nobody.
            while await end.channel.send(end.peer, WeightChunk(policy_version=1, chunk=0), {"data": chunks[0]}):  # noqa: ASYNC110
                await asyncio.sleep(STALL_S / 100)

        try:
            async with in_background(answer()):
                for _ in range(MIN_RATES):
                    landing = weight_peers.replica.landing(manifest)
                    assert await weight_peers.fetch(manifest, landing)
                    weight_peers.replica.replace(manifest, landing)  # type: ignore[arg-type]
                    assert content(weight_peers.replica) == bytes_of(snapshot)
            async with in_background(repeat()), asyncio.timeout(PATIENCE_S):
                assert not await weight_peers.fetch(manifest, weight_peers.replica.landing(manifest))
        finally:
            weight_peers.close()
        counts = [registry.get_sample_value("gspo_rollout_weight_sources_total", {"outcome": o}) for o in SOURCES]
        assert dict(zip(SOURCES, counts, strict=True)) == {"fetched": MIN_RATES, "failed": 0, "slow": 1, "damaged": 0}


async def test_with_keys_rollouts_admit_each_other_and_no_stranger(tmp_path: Path) -> None:
    names = ["learner", "operator", *(f"rollout-{number}" for number in range(4))]
    keys = make_keys(tmp_path / "keys", names)
    async with a_fleet(4, keys) as (learner, rollouts):
        first = learner.publish()
        await together(rollouts)
        assert all(rollout.data == bytes_of(first) for rollout in rollouts)
        assert learner.served.count("weight_bytes_sent") == 2 * first.manifest.num_bytes
        assert sum(rollout.sources("fetched") for rollout in rollouts) == 2
        async with zmq_context() as outside:
            stranger = a_client(
                outside,
                rollouts[0].weight_peers._server._spec,
                rollouts[0].weight_peers.endpoint,
                security=security_of(keys, "operator").with_server(
                    "rollout", (keys / "rollout-0.public").read_text().strip()
                ),
            )
            async with in_background(stranger.run()):
                async with asyncio.timeout(PATIENCE_S):
                    while not stranger.refused:  # noqa: ASYNC110 - the client keeps no event
                        await asyncio.sleep(0.01)
                assert "refused the key operator" in stranger.refused


async def test_a_rollout_does_not_connect_to_a_source_with_an_unknown_key(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", ["learner", "rollout", "rollout-a", "rollout-b"])
    async with a_fleet(3, keys) as (learner, rollouts):
        first = learner.publish()
        await together(rollouts[:2])
        apart = make_keys(tmp_path / "apart", ["learner"])
        for name in ("rollout-2.secret", "rollout-2.public", "learner.public"):
            source = keys / name.replace("rollout-2", "rollout-a")
            (apart / name).write_text(source.read_text())
        rollouts[2].weight_peers._security = security_of(apart, "rollout", "rollout-2")
        await rollouts[2].fetch()
        assert rollouts[2].data == bytes_of(first)
        assert rollouts[2].sources("failed") == 2
        assert learner.served.count("weight_bytes_sent") == 3 * first.manifest.num_bytes
