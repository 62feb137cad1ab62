"""Fetch a policy version over the weight channel, as a snapshot or as deltas, and write it for the engine to load.

A snapshot's chunks go straight into the replica's files, and are verified before any engine gets them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

import structlog
from msgspec import structs

from gspo_protocol.deltas import ITEM_BYTES
from gspo_protocol.digests import version_digest
from gspo_protocol.messages import Manifest, ManifestRequest, WeightGone
from gspo_services.rollout.weights.chunks import STALL_S, FetchError, GoneError
from gspo_services.rollout.weights.parts import RankConnections, check_parts, fetch_parts
from gspo_services.rollout.weights.replica import DamagedWeightsError, Landing, Replica
from gspo_services.shared.net import PeerClient
from gspo_services.shared.weights import Hash

log = structlog.get_logger()


class Sources(Protocol):
    """Other rollouts that can send weights."""

    def next_request(self) -> ManifestRequest:
        """Return the next request to the weight server; the caller fills in the version of its replica."""

    async def fetch(self, manifest: Manifest, landing: Landing) -> bool:
        """Put the bytes of ``manifest``, unchecked, from one of its sources into ``landing``; False: no source has them."""

    def were_wrong(self) -> None:
        """The bytes that came by ``fetch`` were damaged."""


class DamagedError(FetchError):
    """A complete version does not match its manifest. The replica is now empty; the next fetch is a snapshot."""


async def fetch_newest(
    client: PeerClient,
    have_version: int,
    replica: Replica | None = None,
    *,
    stall_s: float = STALL_S,
    fetched: Callable[[Manifest], None] = lambda _: None,
    sources: Sources | None = None,
    engine_hash: Hash | None = None,
    ranks: RankConnections | None = None,
) -> Replica | None:
    """Update ``replica`` to the weight server's newest version; None when ``have_version`` is the newest.

    It fetches deltas against the version in ``replica`` (None: an empty one) where the server has them. With ``sources`` it
    fetches from other rollouts where the server names some. ``fetched`` is called with the manifest of each snapshot or
    delta that came. A request is sent again after a silence of ``stall_s``. ``engine_hash``: the hash whose checksums the
    manifest should have, if the learner knows them; None: none. ``ranks``: connects to the learner's other ranks, which have
    parts of a version; None: the server passes those on.
    Returns ``replica``, verified. Raises: FetchError when the server says nothing for too long, drops the version, or sends
    wrong bytes.
    """
    replica = Replica() if replica is None else replica
    try:
        while True:
            request = ManifestRequest(have_version=0) if sources is None else sources.next_request()
            request = structs.replace(request, have_version=replica.policy_version, hash=engine_hash or "")
            manifest = await newest_manifest(client, request, stall_s)
            if manifest is None or manifest.policy_version <= have_version:
                return None
            if replica.manifest is not None and manifest.policy_version == replica.policy_version:
                return _same(replica, manifest)
            await _fetch(client, manifest, replica, stall_s, sources, ranks)
            fetched(manifest)
            if manifest.newest_version <= manifest.policy_version:
                return replica
    finally:
        replica.coming = 0


async def _fetch(
    client: PeerClient,
    manifest: Manifest,
    replica: Replica,
    stall_s: float,
    sources: Sources | None,
    ranks: RankConnections | None,
) -> None:
    """Bring ``replica`` to ``manifest``'s version. Raises: FetchError."""
    check_parts(manifest)
    if manifest.kind == "snapshot":
        _check_layout(manifest)
        # The old version is useless now, and there may be no room for both.
        replica.forget()
    else:
        _check_delta(manifest, replica)
    replica.coming = manifest.policy_version
    try:
        landing = replica.landing(manifest)
    except ValueError as error:
        raise FetchError(f"manifest of version {manifest.policy_version}: {error}") from error
    elsewhere = sources is not None and bool(manifest.sources) and await sources.fetch(manifest, landing)
    if not elsewhere:
        try:
            await fetch_parts(client, manifest, landing, stall_s, ranks)
        except GoneError:
            if manifest.kind == "delta" and manifest.parts:
                # A rank has forgotten its part of a delta that rank 0 still offers: only the whole version helps.
                replica.forget()
            raise
    try:
        await replica.take(manifest, landing)
    except DamagedWeightsError as error:
        if sources is not None and elsewhere:
            sources.were_wrong()
        raise DamagedError(f"version {manifest.policy_version}: {error}") from error


async def newest_manifest(client: PeerClient, request: ManifestRequest, stall_s: float) -> Manifest | None:
    """Ask for the server's newest manifest; None when it has no version. Late answers to older requests are ignored.

    Raises: FetchError after a silence.
    """
    await client.send(request)
    try:
        async with asyncio.timeout(stall_s):
            while True:
                message = (await client.inbox.get()).message
                if isinstance(message, Manifest) and message.base_version in (0, request.have_version):
                    return message
                if isinstance(message, WeightGone) and message.policy_version == 0:
                    return None
    except TimeoutError as error:
        raise FetchError(f"the weight server did not answer within {stall_s:g} s") from error


def _same(replica: Replica, manifest: Manifest) -> Replica:
    """The replica has the server's newest version already, although the engine does not serve it."""
    assert replica.manifest is not None
    if manifest.digest != replica.manifest.digest:
        replica.forget()
        raise FetchError(
            f"version {manifest.policy_version} has digest {manifest.digest}, the replica has a different one for it"
        )
    replica.manifest = structs.replace(
        replica.manifest, checksums=manifest.checksums, adapter=manifest.adapter, probe=manifest.probe
    )
    return replica


def _check_delta(manifest: Manifest, replica: Replica) -> None:
    """Check that the delta fits the replica and is no larger: a manifest must not take more memory than its version."""
    if replica.manifest is None or manifest.base_version != replica.policy_version:
        raise FetchError(
            f"version {manifest.policy_version} is a delta against {manifest.base_version}, the replica has "
            f"{replica.policy_version}"
        )
    if manifest.policy_version <= replica.policy_version:
        raise FetchError(f"version {manifest.policy_version} is a delta against the newer {replica.policy_version}")
    if manifest.num_bytes > replica.manifest.num_bytes:
        raise FetchError(
            f"version {manifest.policy_version} is a delta of {manifest.num_bytes} bytes, larger than the "
            f"{replica.manifest.num_bytes} of the version itself"
        )


def _check_layout(manifest: Manifest) -> None:
    """Check that there is a tensor, that names differ, and that tensors follow each other and fill the version exactly."""
    if manifest.kind != "snapshot":
        raise FetchError(f"manifest: version {manifest.policy_version} is a {manifest.kind}, a snapshot was asked for")
    if not manifest.tensors:
        raise FetchError(f"manifest: the snapshot of version {manifest.policy_version} has no tensors")
    offset = 0
    names: set[str] = set()
    for tensor in manifest.tensors:
        if tensor.offset != offset:
            raise FetchError(f"manifest: tensor {tensor.name} is at {tensor.offset}, expected {offset}")
        expected = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if tensor.num_bytes != expected:
            raise FetchError(
                f"manifest: tensor {tensor.name} has {tensor.num_bytes} bytes, {tensor.dtype} {tensor.shape} has {expected}"
            )
        if tensor.name in names:
            raise FetchError(f"manifest: tensor {tensor.name} occurs twice")
        names.add(tensor.name)
        offset += tensor.num_bytes
    if offset != manifest.num_bytes:
        raise FetchError(f"manifest: tensors have {offset} bytes, num_bytes is {manifest.num_bytes}")
    if version_digest(manifest.tensors, manifest.adapter) != manifest.digest:
        raise FetchError(f"manifest of version {manifest.policy_version}: its digest does not match its tensors")
