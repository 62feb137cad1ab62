"""A rollout's own copy of a version: one buffer that deltas are applied to, bit for bit what the learner published.

It takes the model's bytes once in the process's memory, as long as the rollout lives. Applying a delta also takes a bucket's
values for each core, and the files that the engine loads lie below rollout.weights_directory.
"""

import asyncio
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Final

import numpy as np
from msgspec import structs

from protocol.deltas import DIGEST_BYTES, Bytes, apply_streams, check_bucket, decode_digests, stream_lengths
from protocol.digests import tensor_digest, version_digest
from protocol.messages import DeltaBucket, Manifest, TensorInfo
from services.weights import Parts, decompress

ROLLING_SHARE: Final = 1 / 16
"""With each delta this share of the version's bytes is checked among the tensors that the delta does not change."""


class DamagedWeightsError(ValueError):
    """The bytes do not match the manifest; the text names the first tensor or bucket."""


class Replica:
    """One verified version, from a snapshot or from deltas applied to one; empty at first.

    ``manifest`` describes the version as a snapshot, however it was fetched. It is None while the replica is empty, while a
    delta is applied, and after a damaged delta.
    """

    def __init__(self, *, keep_deltas: int = 0) -> None:
        """``keep_deltas``: how many of the last deltas are kept for other rollouts."""
        self.manifest: Manifest | None = None
        self.data = bytearray()
        self.coming = 0
        """The version that is being fetched or checked now; 0: none."""
        self._keep_deltas = keep_deltas
        # By base, oldest first.
        self._deltas: OrderedDict[int, Parts] = OrderedDict()
        self._changing = False
        self._unloaded: set[int] | None = None
        self._next_checked = 0

    @property
    def policy_version(self) -> int:
        """0: the replica is empty."""
        return 0 if self.manifest is None else self.manifest.policy_version

    @property
    def current(self) -> Manifest:
        """The version's manifest. Raises: ValueError when the replica is empty."""
        if self.manifest is None:
            raise ValueError("the replica is empty: fetch a snapshot first")
        return self.manifest

    @property
    def digest(self) -> str:
        """The digest of the whole version. Raises: ValueError when the replica is empty."""
        return self.current.digest

    @property
    def loads_all(self) -> bool:
        """Whether the engine needs all tensors."""
        return self._unloaded is None

    @property
    def newest_version(self) -> int:
        """The newest version that other rollouts can fetch from here, now or in a moment; 0: none."""
        return max(self.policy_version, self.coming)

    def parts(self, policy_version: int, base_version: int) -> Parts | None:
        """A version, or its delta against ``base_version`` (0: the snapshot), for others; None: not here (yet, or any more).

        Send it before the event loop continues: the replica changes.
        """
        if base_version:
            delta = self._deltas.get(base_version)
            return delta if delta is not None and delta.policy_version == policy_version else None
        if self._changing or self.manifest is None or self.manifest.policy_version != policy_version:
            return None
        return Parts(manifest=self.manifest, data=np.frombuffer(self.data, dtype=np.uint8))

    async def take(self, manifest: Manifest, data: bytearray) -> None:
        """``replace`` with a snapshot or ``apply`` a delta, in a thread: hashing takes seconds."""
        # Set in the loop's thread, because ``parts`` reads it there.
        self._changing = True
        try:
            await asyncio.to_thread(self.replace if manifest.kind == "snapshot" else self.apply, manifest, data)
        finally:
            self._changing = False
        if manifest.kind == "delta" and self._keep_deltas:
            self._deltas[manifest.base_version] = Parts(manifest=manifest, data=np.frombuffer(data, dtype=np.uint8))
            while len(self._deltas) > self._keep_deltas:
                self._deltas.popitem(last=False)

    def tensors(self) -> Iterator[tuple[TensorInfo, memoryview]]:
        """Each tensor's description and its bytes. Raises: ValueError when the replica is empty."""
        return self._some(range(len(self.current.tensors)))

    def unloaded_tensors(self) -> Iterator[tuple[TensorInfo, memoryview]]:
        """Tensors that changed since ``was_loaded``; all without that call. Never none: an engine needs a tensor to load."""
        tensors = self.current.tensors
        if self._unloaded is None:
            return self.tensors()
        return self._some(sorted(self._unloaded) or [min(range(len(tensors)), key=lambda at: tensors[at].num_bytes)])

    def was_loaded(self) -> None:
        """The engine has this version: from now on only tensors that change count as unloaded."""
        self._unloaded = set()

    def must_load_all(self) -> None:
        """Nobody knows which weights the engine has: all tensors count as unloaded."""
        self._unloaded = None

    def forget(self) -> None:
        """Become empty, and give the memory back."""
        self.manifest, self.data, self._unloaded = None, bytearray(), None
        self._deltas.clear()

    def replace(self, manifest: Manifest, data: bytearray) -> None:
        """Become the version of a snapshot. Raises: DamagedWeightsError; then the replica is empty."""
        self.forget()
        view = memoryview(data)
        self._check(
            (index, tensor.digest, view[tensor.offset : tensor.offset + tensor.num_bytes], tensor.name)
            for index, tensor in enumerate(manifest.tensors)
        )
        # A rollout that fetches from here does not need to know where this one fetched.
        self.manifest, self.data = structs.replace(manifest, sources=[]), data

    def apply(self, delta: Manifest, payload: bytes | bytearray) -> None:
        """Become ``delta.policy_version``, in place; takes a second for each gigabyte and core.

        Raises: ValueError for a delta against another version, which changes nothing; DamagedWeightsError for a payload that
        does not match the manifest or does not lead to its digest; then the replica is empty.
        """
        base = self.current
        if delta.kind != "delta" or delta.base_version != base.policy_version:
            raise ValueError(
                f"{delta.kind} of version {delta.policy_version} against {delta.base_version}; "
                f"the replica has {base.policy_version}"
            )
        # Bytes between two versions must not be taken for either of them, whatever happens here.
        self.manifest = None
        try:
            self.manifest = self._applied(base, delta, memoryview(payload))
        except ValueError as error:
            self.forget()
            raise DamagedWeightsError(f"delta {delta.base_version} -> {delta.policy_version}: {error}") from error

    def _applied(self, base: Manifest, delta: Manifest, payload: memoryview) -> Manifest:
        digests, begin = decode_digests(payload, len(base.tensors))
        _check_buckets(delta, base.tensors, digests.keys(), begin)
        target: Bytes = np.frombuffer(self.data, dtype=np.uint8)
        ends = np.cumsum([begin, *(sum(bucket.stream_bytes) for bucket in delta.buckets)]).tolist()
        parts = [payload[start:end] for start, end in pairwise(ends)]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for _ in pool.map(lambda bucket, part: _apply_bucket(target, bucket, part), delta.buckets, parts):
                pass
            actual = dict(zip(digests, pool.map(lambda index: self._digest_of(base.tensors[index]), digests), strict=True))
        tensors = list(base.tensors)
        for index, digest in actual.items():
            if bytes.fromhex(digest)[:DIGEST_BYTES] != digests[index]:
                raise ValueError(
                    f"tensor {base.tensors[index].name} has digest {digest} now, expected {digests[index].hex()}..."
                )
            tensors[index] = structs.replace(tensors[index], digest=digest)
        if version_digest(tensors) != delta.digest:
            raise ValueError("the version's digest does not match its tensors: the base was another one")
        self._check_some(tensors, digests.keys())
        if self._unloaded is not None:
            self._unloaded |= digests.keys()
        return structs.replace(
            base, policy_version=delta.policy_version, digest=delta.digest, tensors=tensors, checksums=delta.checksums
        )

    def _check_some(self, tensors: list[TensorInfo], fresh: Iterable[int]) -> None:
        """Check unchanged tensors, up to ROLLING_SHARE of the bytes, from where the last call ended."""
        fresh = set(fresh)
        left = ROLLING_SHARE * len(self.data)
        chosen: list[int] = []
        for _ in tensors:
            index = self._next_checked % len(tensors)
            if left <= 0:
                break
            self._next_checked = index + 1
            if index not in fresh:
                chosen.append(index)
                left -= tensors[index].num_bytes
        view = memoryview(self.data)
        self._check(
            (at, tensors[at].digest, view[tensors[at].offset : tensors[at].offset + tensors[at].num_bytes], tensors[at].name)
            for at in chosen
        )

    @staticmethod
    def _check(tensors: Iterable[tuple[int, str, memoryview, str]]) -> None:
        described = list(tensors)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            digests = list(pool.map(lambda each: tensor_digest(each[2]), described))
        for (_, expected, _, name), digest in zip(described, digests, strict=True):
            if digest != expected:
                raise DamagedWeightsError(f"tensor {name} has digest {digest}, the manifest says {expected}")

    def _digest_of(self, tensor: TensorInfo) -> str:
        return tensor_digest(memoryview(self.data)[tensor.offset : tensor.offset + tensor.num_bytes])

    def _some(self, indices: Iterable[int]) -> Iterator[tuple[TensorInfo, memoryview]]:
        tensors = self.current.tensors
        view = memoryview(self.data)
        for index in indices:
            tensor = tensors[index]
            yield tensor, view[tensor.offset : tensor.offset + tensor.num_bytes]


def _check_buckets(delta: Manifest, tensors: list[TensorInfo], changed: Iterable[int], begin: int) -> None:
    """Check that buckets follow each other, touch only changed tensors, and fill the payload. Raises: ValueError."""
    num_bytes = begin + sum(sum(bucket.stream_bytes) for bucket in delta.buckets)
    if num_bytes != delta.num_bytes:
        raise ValueError(f"head and buckets have {num_bytes} bytes, num_bytes is {delta.num_bytes}")
    is_changed = np.zeros(len(tensors), dtype=bool)
    is_changed[list(changed)] = True
    offsets = [tensor.offset for tensor in tensors]
    place = 0
    for bucket in delta.buckets:
        end = bucket.offset + bucket.num_elements * bucket.item_bytes
        if bucket.offset < place:
            raise ValueError(f"bucket at {bucket.offset} begins before {place}, where the bucket before it ends")
        # Without the empty tensors at its very beginning: they belong to the bucket before it.
        first = bisect_right(offsets, bucket.offset) - 1
        for index in range(first, bisect_right(offsets, end - 1)):
            if not is_changed[index] and tensors[index].num_bytes:
                raise ValueError(
                    f"bucket at {bucket.offset} changes tensor {tensors[index].name}, but the delta has no digest of it"
                )
        place = end


def _apply_bucket(target: Bytes, bucket: DeltaBucket, part: memoryview) -> None:
    check_bucket(bucket, target.nbytes)
    lengths = stream_lengths(bucket)
    if len(lengths) != len(bucket.stream_bytes):
        raise ValueError(f"bucket at {bucket.offset}: {len(bucket.stream_bytes)} streams, {len(lengths)} expected")
    streams: list[bytes] = []
    begin = 0
    for length, compressed in zip(lengths, bucket.stream_bytes, strict=True):
        streams.append(decompress(part[begin : begin + compressed], length))
        begin += compressed
    apply_streams(target, bucket, streams)
