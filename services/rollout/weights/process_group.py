"""The learner sends a version straight into the engine, in a process group of the two (SGLang's distributed update).

The rollout decides: it asks the learner for the version and its checksums, lets the engine join, pauses it, asks for the
bytes, and trusts only the engine's own checksums.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import structlog

from protocol.messages import BroadcastRequest, Manifest, ProcessGroup, ProcessGroupRequest, Refused, TensorInfo, WeightGone
from services.rollout.sglang import Engine, EngineError, EngineHttp, EngineUnreachable, PauseMode
from services.rollout.weights.verify import Verification, Verifier, compare_checksums
from services.runtime.net import PeerClient

log = structlog.get_logger()

BUCKET_BYTES: Final = 512 * 1024 * 1024
"""How many bytes the engine receives at a time, in addition to the weights that it has."""
ANSWER_S: Final = 60.0
"""Enough for the learner to hash a version once, and for the engine to join."""
CONNECT_S: Final = 5.0
MAX_FAILURES: Final = 3


class GroupError(RuntimeError):
    """A version cannot come through the group now; the text says why."""


class ReceivingGroup:
    """The engine's place in a group with the learner.

    The engine leaves a group that failed at once, and the version is fetched in chunks. After MAX_FAILURES in a row the
    group is not used any more.
    """

    def __init__(self, engine: Engine, *, answer_s: float = ANSWER_S, bucket_bytes: int = BUCKET_BYTES) -> None:
        """``answer_s``: how long the learner or the engine may take for one answer."""
        self._engine = engine
        self._verifier = Verifier(engine)
        self._answer_s = answer_s
        self._bucket_bytes = bucket_bytes
        self._name = ""
        self._expected: dict[str, str] = {}
        self._held: dict[str, str] = {}
        """Checksums of the version that the engine was last seen to hold; empty when it came in another way."""
        self._num_failures = 0

    @property
    def usable(self) -> bool:
        return self._num_failures < MAX_FAILURES

    async def join(self, client: PeerClient, manifest: Manifest, endpoint: str) -> None:
        """Prepare the learner at ``endpoint`` to send ``manifest``'s version, and the engine to receive it.

        Raises: GroupError, EngineError.
        """
        try:
            device = await self._verifier.hash()
            if (ranks := (await self._verifier.spread()).num_ranks) > 1:
                raise GroupError(f"the engine has {ranks} ranks, and a group has two members")
        except ValueError as error:
            raise GroupError(str(error)) from error
        await client.send(
            ProcessGroupRequest(
                policy_version=manifest.policy_version,
                device=device,
                group=self._name,
            )
        )
        answer = await self._answer(client, manifest.policy_version)
        if answer.group != self._name:
            await self.leave()
            await require_open(host_of(endpoint), answer.port)
            await self._engine.control(
                "/init_weights_update_group",
                {
                    "master_address": host_of(endpoint),
                    "master_port": answer.port,
                    "rank_offset": 1,
                    "world_size": 2,
                    "group_name": answer.group,
                    "backend": answer.backend,
                },
                timeout_s=self._answer_s,
            )
            self._name = answer.group
        self._expected = answer.checksums

    async def load(self, client: PeerClient, manifest: Manifest, mode: PauseMode) -> None:
        """Give the paused engine the version. Raises: EngineError."""
        async with self._engine.updating(manifest.policy_version) as http:
            await self._begin(http)
            try:
                await self._receive(http, client, manifest, mode)
            except EngineError:
                # SGLang refuses an update while another is open. The first error is the one to raise.
                with suppress(EngineError):
                    await http.post("/end_weight_update", {})
                raise
            await http.post("/end_weight_update", {})

    async def verify(self) -> Verification:
        """Compare the engine's checksums with the learner's. Raises: EngineError."""
        verification = compare_checksums(self._expected, await self._checksums())
        if verification.ok:
            self._num_failures = 0
            self._held = self._expected
        return verification

    async def holds_former(self) -> bool:
        """Whether the engine still holds what the last update in the group gave it, bit for bit. Raises: EngineError."""
        return bool(self._held) and compare_checksums(self._held, await self._checksums()).ok

    async def _checksums(self) -> Mapping[str, str]:
        await self._verifier.checksums()
        return self._verifier.known

    def forget_former(self) -> None:
        """The engine has been given weights in another way."""
        self._held = {}

    async def failed(self) -> None:
        """Leave the group, because nobody knows what is under way in it."""
        self._num_failures += 1
        await self.leave()

    async def leave(self) -> None:
        """Take the engine out of its group, if it is in one."""
        name, self._name = self._name, ""
        if not name:
            return
        try:
            await self._engine.control("/destroy_weights_update_group", {"group_name": name}, timeout_s=self._answer_s)
        except EngineError as error:
            log.warning("weights_group_not_left", group=name, error=str(error))

    async def _begin(self, http: EngineHttp) -> None:
        try:
            await http.post("/begin_weight_update", {})
        except EngineUnreachable:
            raise
        except EngineError:
            # A rollout that was killed during an update left it open at a server that it did not start.
            await http.post("/end_weight_update", {})
            await http.post("/begin_weight_update", {})

    async def _receive(self, http: EngineHttp, client: PeerClient, manifest: Manifest, mode: PauseMode) -> None:
        first = 0
        for tensors in buckets(manifest.tensors, self._bucket_bytes):
            await client.send(
                BroadcastRequest(
                    policy_version=manifest.policy_version,
                    group=self._name,
                    first_tensor=first,
                    num_tensors=len(tensors),
                )
            )
            first += len(tensors)
            body: dict[str, Any] = {
                "names": [tensor.name for tensor in tensors],
                "dtypes": [tensor.dtype for tensor in tensors],
                "shapes": [tensor.shape for tensor in tensors],
                "group_name": self._name,
                "load_format": "flattened_bucket",
                "weight_version": str(manifest.policy_version),
                "flush_cache": first == len(manifest.tensors) and mode != "in_place",
            }
            await http.post("/update_weights_from_distributed", body, timeout_s=self._answer_s)

    async def _answer(self, client: PeerClient, policy_version: int) -> ProcessGroup:
        """The learner's answer about the group. Raises: GroupError."""
        try:
            async with asyncio.timeout(self._answer_s):
                while True:
                    message = (await client.inbox.get()).message
                    if isinstance(message, ProcessGroup) and message.policy_version == policy_version:
                        return message
                    if isinstance(message, WeightGone) and message.policy_version == policy_version:
                        raise GroupError(f"version {policy_version} is gone, newest is {message.newest_version}")
                    if isinstance(message, Refused):
                        raise GroupError(f"the learner refused: {message.reason}; is learner.weights_group_backend set?")
        except TimeoutError as error:
            raise GroupError(f"the learner did not answer within {self._answer_s:g} s") from error


def buckets(tensors: Sequence[TensorInfo], max_bytes: int) -> Iterator[list[TensorInfo]]:
    """``tensors``, in their order, in lists of at most ``max_bytes``; a larger tensor is a list of its own."""
    bucket: list[TensorInfo] = []
    num_bytes = 0
    for tensor in tensors:
        if bucket and num_bytes + tensor.num_bytes > max_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += tensor.num_bytes
    if bucket:
        yield bucket


def host_of(endpoint: str) -> str:
    """The host of a weights endpoint, where the learner's group can also be reached."""
    return urlsplit(endpoint).hostname or "127.0.0.1"


async def require_open(host: str, port: int) -> None:
    """Check that the learner's group listens. Raises: GroupError.

    An engine that is sent to a closed port tries for half an hour, and answers nothing meanwhile.
    """
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        raise GroupError(f"the learner's group cannot be reached at {host}:{port}: {str(error) or 'no answer'}") from error
    writer.close()
