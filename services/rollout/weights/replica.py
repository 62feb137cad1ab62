"""A rollout's own copy of a version: files that deltas are applied to in place, bit for bit what the learner published.

The copy is the model's bytes once, below rollout.weights_directory. A mark beside the files says which version they are. It
is removed before a delta touches them and written after, so whoever follows a process that was killed in between finds no
mark, and fetches the version whole. After a delta only what changed is checked: the old and the new values of each bucket
have a digest. All tensors are checked when a version comes whole, when the files of an earlier process are taken over, and
a few with each delta.
"""

import asyncio
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import structlog
from msgspec import structs

from gspo_protocol.deltas import Bytes, DeltaHead, check_bucket, decode_head, decode_streams, stream_lengths
from gspo_protocol.digests import bytes_digest, tensor_digest, version_digest
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import DeltaBucket, Manifest, TensorInfo
from gspo_services.rollout.weights.files import SHARD_BYTES, WeightFiles, remove_files
from gspo_services.rollout.weights.patch import Touched
from gspo_services.shared.weights import Parts, StoredParts, decompress

log = structlog.get_logger()

ROLLING_SHARE: Final = 1 / 64
"""With each delta this share of the version's bytes is checked in full, in turn."""
PATCH_SHARE: Final = 1 / 16
"""An engine gets the changed elements one by one while these are fewer than this share of all."""
_MARK: Final = "version.msgpack"


class _Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The files beside it are this version, whole. Written by a process of this protocol."""

    protocol_version: int
    shard_bytes: int
    manifest: Manifest


class DeltaBytes:
    """The bytes of a delta, as they arrive."""

    def __init__(self) -> None:
        # It grows with what arrives: a manifest alone must not take the memory that it names.
        self.data = bytearray()

    def put(self, begin: int, data: memoryview) -> None:
        """Keep bytes of the delta from ``begin`` on."""
        end = begin + len(data)
        if end > len(self.data):
            self.data.extend(bytes(end - len(self.data)))
        self.data[begin:end] = data


Landing = WeightFiles | DeltaBytes
"""Where the bytes of a manifest go."""


@dataclass(frozen=True, kw_only=True)
class _Filed(Parts):
    """The version in the files, for other rollouts."""

    files: WeightFiles

    def read(self, begin: int, end: int) -> Bytes:
        # A copy: the next delta changes the files, perhaps while a slow peer still takes this.
        return self.files.read(begin, end).copy()


class DamagedWeightsError(ValueError):
    """The bytes do not match the manifest; the text names the first tensor or bucket."""


class Replica:
    """One verified version, from a snapshot or from deltas applied to one; empty at first.

    ``manifest`` describes the version as a snapshot, however it was fetched. It is None while the replica is empty, while a
    delta is applied, and after a damaged delta.
    """

    def __init__(self, directory: Path | None = None, *, keep_deltas: int = 0, shard_bytes: int = SHARD_BYTES) -> None:
        """``directory``: where the files lie; None: files without a name, which no engine can load and which end with the
        process. ``keep_deltas``: how many of the last deltas are kept for other rollouts.
        """
        self.manifest: Manifest | None = None
        self.coming = 0
        """The version that is being fetched or checked now; 0: none."""
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._files: WeightFiles | None = None
        self._keep_deltas = keep_deltas
        # By base, oldest first.
        self._deltas: OrderedDict[int, Parts] = OrderedDict()
        self._changing = False
        self._unloaded: set[int] | None = None
        self._touched: list[Touched] | None = None
        self._next_checked = 0
        self._may_check = 0.0

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
        """Return a version, or its delta against ``base_version`` (0: the snapshot), for other rollouts; None: not stored.

        Send it before the event loop continues: the replica changes.
        """
        if base_version:
            delta = self._deltas.get(base_version)
            return delta if delta is not None and delta.policy_version == policy_version else None
        if self._changing or self.manifest is None or self.manifest.policy_version != policy_version:
            return None
        return _Filed(manifest=self.manifest, files=self.files)

    def landing(self, manifest: Manifest) -> Landing:
        """Return the buffer for the bytes of ``manifest``, before ``take``. For a snapshot the replica must be empty.

        Raises: ValueError for names of tensors that cannot be written.
        """
        if manifest.kind == "delta":
            return DeltaBytes()
        return WeightFiles(manifest.tensors, self._directory, self._shard_bytes)

    async def take(self, manifest: Manifest, landed: Landing) -> None:
        """``replace`` with a snapshot or ``apply`` a delta, in a thread: hashing takes seconds."""
        # Set in the loop's thread, because ``parts`` reads it there.
        self._changing = True
        try:
            if isinstance(landed, WeightFiles):
                await asyncio.to_thread(self.replace, manifest, landed)
            else:
                await asyncio.to_thread(self.apply, manifest, landed.data)
        finally:
            self._changing = False
        if isinstance(landed, DeltaBytes) and self._keep_deltas:
            kept = structs.replace(manifest, sources=[], checksums={}, parts=[])
            self._deltas[manifest.base_version] = StoredParts(manifest=kept, data=np.frombuffer(landed.data, dtype=np.uint8))
            while len(self._deltas) > self._keep_deltas:
                self._deltas.popitem(last=False)

    @property
    def files(self) -> WeightFiles:
        """The version's bytes. Raises: ValueError when the replica is empty."""
        if self._files is None:
            raise ValueError("the replica is empty: fetch a snapshot first")
        return self._files

    def tensors(self) -> Iterator[tuple[TensorInfo, memoryview]]:
        """Yield each tensor's description and bytes. Raises: ValueError when the replica is empty."""
        return ((info, self.files.tensor(index)) for index, info in enumerate(self.current.tensors))

    def unloaded(self) -> list[int]:
        """Tensors that changed since ``was_loaded``; all without that call. Never none: an engine needs a tensor to load."""
        tensors = self.current.tensors
        if self._unloaded is None:
            return list(range(len(tensors)))
        return sorted(self._unloaded) or [min(range(len(tensors)), key=lambda at: tensors[at].num_bytes)]

    @property
    def touched(self) -> list[Touched] | None:
        """The elements that changed since ``was_loaded``; None: unknown, or so many that all tensors are better loaded."""
        return self._touched

    def was_loaded(self) -> None:
        """Note that the engine has this version: from now on only changes count as unloaded."""
        self._unloaded = set()
        self._touched = []

    def must_load_all(self) -> None:
        """Count all tensors as unloaded, because the engine's weights are unknown."""
        self._unloaded = None
        self._touched = None

    def forget(self) -> None:
        """Become empty, and free the memory."""
        self._unmark()
        if self._files is not None:
            self._files.close()
        self.manifest, self._files = None, None
        self.must_load_all()
        remove_files(self._directory)
        self._deltas.clear()

    def replace(self, manifest: Manifest, files: WeightFiles) -> None:
        """Become the version of a snapshot. Raises: DamagedWeightsError; then the replica is empty."""
        self._unmark()
        self.manifest, self._files = None, files
        self.must_load_all()
        self._deltas.clear()
        try:
            files.map()
            self._check(manifest.tensors, range(len(manifest.tensors)))
        except BaseException:
            self.forget()
            raise
        # A rollout that fetches from here need not know this one's sources.
        self.manifest = structs.replace(manifest, sources=[], parts=[])
        self._mark()

    def restore(self) -> bool:
        """Take over the version that an earlier process left, if its mark is there and every tensor is right.

        Otherwise whatever it left is removed. Takes seconds for each gigabyte, like ``replace``.
        """
        if self._directory is None or not self._directory.is_dir():
            return False
        had_files = any(self._directory.iterdir())
        try:
            mark = msgspec.msgpack.decode((self._directory / _MARK).read_bytes(), type=_Mark)
            if (mark.protocol_version, mark.shard_bytes) != (PROTOCOL_VERSION, self._shard_bytes):
                raise ValueError(f"it was left by a process with protocol version {mark.protocol_version}")
            files = self._files = WeightFiles(mark.manifest.tensors, self._directory, self._shard_bytes)
            files.reopen()
            self._check(mark.manifest.tensors, range(len(mark.manifest.tensors)))
            if version_digest(mark.manifest.tensors, mark.manifest.adapter) != mark.manifest.digest:
                raise ValueError("its digest does not match its tensors")
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self.forget()
            if had_files:
                log.warning("weights_left_unusable", directory=str(self._directory), error=str(error))
            return False
        self.manifest = structs.replace(mark.manifest, checksums={})
        log.info("weights_taken_over", policy_version=self.policy_version, num_bytes=files.num_bytes)
        return True

    def apply(self, delta: Manifest, payload: bytes | bytearray) -> None:
        """Become ``delta.policy_version``, in place; takes time for what changes, not for the whole version.

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
        self._unmark()
        self.manifest = None
        try:
            self.manifest = self._applied(base, delta, memoryview(payload))
        except ValueError as error:
            self.forget()
            raise DamagedWeightsError(f"delta {delta.base_version} -> {delta.policy_version}: {error}") from error
        self._mark()

    def _applied(self, base: Manifest, delta: Manifest, payload: memoryview) -> Manifest:
        head = decode_head(payload, len(base.tensors), len(delta.buckets))
        found = bytes_digest(payload[: head.num_bytes])
        if found != delta.head_digest:
            raise ValueError(f"its head has digest {found}, the manifest says {delta.head_digest}")
        _check_buckets(delta, base.tensors, head)
        tensors = list(base.tensors)
        for index, digest in head.tensors.items():
            tensors[index] = structs.replace(tensors[index], digest=digest)
        if version_digest(tensors) != delta.digest:
            raise ValueError("the version's digest does not match its tensors: the base was a different one")
        files = self.files
        ends = np.cumsum([head.num_bytes, *(sum(bucket.stream_bytes) for bucket in delta.buckets)]).tolist()
        parts = [payload[start:end] for start, end in pairwise(ends)]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            touched = list(pool.map(lambda *each: _apply_bucket(files, *each), delta.buckets, parts, head.buckets))
        self._check_some(tensors)
        if self._unloaded is not None:
            self._unloaded |= head.tensors.keys()
        self._touch(touched, base)
        return structs.replace(
            base,
            policy_version=delta.policy_version,
            digest=delta.digest,
            tensors=tensors,
            checksums=delta.checksums,
            probe=delta.probe,
        )

    def _touch(self, touched: list[Touched], base: Manifest) -> None:
        if self._touched is not None:
            # What an earlier delta wrote may have changed again.
            former = [replace(each, values=None) for each in self._touched]
            self._touched = [*former, *(replace(each, values=None) if former else each for each in touched)]
            num_bytes = sum(len(each.places) * each.item_bytes for each in self._touched)
            if num_bytes > PATCH_SHARE * base.num_bytes:
                self._touched = None

    def _check_some(self, tensors: list[TensorInfo]) -> None:
        """Check tensors in turn, so that ROLLING_SHARE of the bytes is checked with each call, over many calls."""
        self._may_check = min(self._may_check + ROLLING_SHARE * self.files.num_bytes, self.files.num_bytes)
        chosen: list[int] = []
        while len(chosen) < len(tensors) and tensors[self._next_checked % len(tensors)].num_bytes <= self._may_check:
            index = self._next_checked % len(tensors)
            self._may_check -= tensors[index].num_bytes
            chosen.append(index)
            self._next_checked = index + 1
        self._check(tensors, chosen)

    def _check(self, tensors: list[TensorInfo], indices: Iterable[int]) -> None:
        chosen = list(indices)
        files = self.files
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            digests = list(pool.map(lambda index: tensor_digest(files.tensor(index)), chosen))
        for index, digest in zip(chosen, digests, strict=True):
            if digest != tensors[index].digest:
                raise DamagedWeightsError(
                    f"tensor {tensors[index].name} has digest {digest}, the manifest says {tensors[index].digest}"
                )

    def _unmark(self) -> None:
        if self._directory is not None:
            with suppress(FileNotFoundError, NotADirectoryError):
                (self._directory / _MARK).unlink()

    def _mark(self) -> None:
        """Mark the files on disk as this version. Without the mark they are merely useless to the next process."""
        if self._directory is None or self.manifest is None:
            return
        mark = _Mark(protocol_version=PROTOCOL_VERSION, shard_bytes=self._shard_bytes, manifest=self.manifest)
        written = self._directory / f"{_MARK}.new"
        try:
            written.write_bytes(msgspec.msgpack.encode(mark))
            written.replace(self._directory / _MARK)
        except OSError as error:
            log.warning("weights_not_marked", directory=str(self._directory), error=str(error))


def _check_buckets(delta: Manifest, tensors: list[TensorInfo], head: DeltaHead) -> None:
    """Check that buckets follow each other, touch only changed tensors, and fill the payload. Raises: ValueError."""
    num_bytes = head.num_bytes + sum(sum(bucket.stream_bytes) for bucket in delta.buckets)
    if num_bytes != delta.num_bytes:
        raise ValueError(f"head and buckets have {num_bytes} bytes, num_bytes is {delta.num_bytes}")
    is_changed = np.zeros(len(tensors), dtype=bool)
    is_changed[list(head.tensors)] = True
    offsets = [tensor.offset for tensor in tensors]
    place = 0
    # Those of each rank follow one another.
    for bucket in sorted(delta.buckets, key=lambda each: each.offset):
        end = bucket.offset + bucket.num_elements * bucket.item_bytes
        if bucket.offset < place:
            raise ValueError(f"bucket at {bucket.offset} begins before {place}, where the bucket before it ends")
        # Without the empty tensors at its very beginning: they belong to the bucket before it.
        first = bisect_right(offsets, bucket.offset) - 1
        for index in range(first, bisect_right(offsets, end - 1)):
            if not is_changed[index] and tensors[index].num_bytes:
                raise ValueError(
                    f"bucket at {bucket.offset} changes tensor {tensors[index].name}, but the delta lacks its digest"
                )
        place = end


def _apply_bucket(files: WeightFiles, bucket: DeltaBucket, part: memoryview, digest: bytes) -> Touched:
    check_bucket(bucket, files.num_bytes)
    lengths = stream_lengths(bucket)
    if len(lengths) != len(bucket.stream_bytes):
        raise ValueError(f"bucket at {bucket.offset}: {len(bucket.stream_bytes)} streams, {len(lengths)} expected")
    streams: list[bytes] = []
    begin = 0
    for length, compressed in zip(lengths, bucket.stream_bytes, strict=True):
        streams.append(decompress(part[begin : begin + compressed], length))
        begin += compressed
    changes = decode_streams(bucket, streams, files.num_bytes)
    was = files.gather(bucket.offset, bucket.item_bytes, changes.positions)
    now = changes.new_values(was)
    found = changes.digest(was, now)
    if found != digest:
        raise ValueError(f"bucket at {bucket.offset}: its changes have digest {found.hex()}, expected {digest.hex()}")
    files.scatter(bucket.offset, bucket.item_bytes, changes.positions, now)
    places = changes.positions.astype(np.uint32)
    return Touched(offset=bucket.offset, item_bytes=bucket.item_bytes, places=places, values=now)
