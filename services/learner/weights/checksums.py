"""Computes the checksums that engines must report for a version, once at the learner instead of in every rollout.

A version's checksums come from those of the one before: a parameter is hashed again only if a tensor of it has another
digest, and with SGLang's hash on CUDA only its changed words are. A hash is computed once a rollout has asked for it.
"""

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import structlog
import torch

from gspo_protocol.messages import Manifest
from gspo_services.learner.weights.adapter_copy import PublishedBase
from gspo_services.learner.weights.device_checksums import DeviceChecksums
from gspo_services.learner.weights.snapshot import Snapshot
from gspo_services.shared.weights import WORD_BYTES, Hash, Layout, TileSums, Work, hash_function, layouts, parts_of

log = structlog.get_logger()

T = TypeVar("T")

KEPT_VERSIONS: Final = 2
"""The newest version, and the one before it, which rollouts may still be asking about."""


def likely_hash() -> Hash:
    """Return the hash that most engines use: they run on the same kind of device as the learner."""
    return "cuda" if torch.cuda.is_available() else "xxh3"


def hashing_device(*, shared: bool) -> torch.device | None:
    """Return the device that computes SGLang's hash on CUDA; None: the host does. ``shared``: the learner leaves it."""
    return torch.device("cuda") if torch.cuda.is_available() and not shared else None


class PublishedChecksums:
    """By the engine's names, for the newest versions; parameters that lack a part have none."""

    def __init__(self, wanted: Iterable[Hash] = (), *, device: torch.device | None = None) -> None:
        """``wanted``: the hashes that are computed before anybody has asked for them. ``device``: computes SGLang's hash on
        CUDA, where the learner has one for itself."""
        self._wanted: set[Hash] = set(wanted)
        self._device = device
        # One for all versions: each stream keeps memory of its own.
        self._hashes: DeviceChecksums | None = None
        # By the version's digest and the hash, oldest first.
        self._found: dict[tuple[str, Hash], dict[str, str]] = {}
        self._lock = threading.Lock()
        # Of the version of this digest.
        self._tiles: tuple[str, dict[str, TileSums]] = ("", {})
        self._base: PublishedBase | None = None

    def keep_base(self, base: PublishedBase) -> None:
        """Adapters are published from now on, above this model."""
        self._base = base

    def asked(self, manifest: Manifest, name: Hash) -> dict[str, str]:
        """What an engine must report that serves this version; empty: not computed yet. Of an adapter: for its model."""
        if manifest.adapter is None:
            return self.known(manifest.digest, name)
        return {} if self._base is None else self._base.checksums(name)

    def known(self, digest: str, name: Hash) -> dict[str, str]:
        """Return the checksums of the version with this digest; empty: not computed, but later versions will be."""
        self._wanted.add(name)
        return self._found.get((digest, name), {})

    def renew(self, base: Snapshot | None, snapshot: Snapshot) -> None:
        """Compute them for a new version, whose predecessor is ``base``. Takes up to seconds for each gigabyte."""
        for name in tuple(self._wanted):
            self._compute(base, snapshot, name)

    def _compute(self, base: Snapshot | None, snapshot: Snapshot, name: Hash) -> dict[str, str]:
        changed = _changed(base, snapshot)
        complete = [each for each in layouts(snapshot.manifest.tensors).values() if each.complete]
        with self._lock:
            before = {} if base is None else self._found.get((base.manifest.digest, name), {})
            stale = [each for each in complete if each.name not in before or not changed.isdisjoint(each.indices)]
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                if name == "cuda":
                    fresh = self._on_device(snapshot, stale) or self._tiled(pool, base, snapshot, stale, changed)
                else:
                    checksum, data = hash_function(name), snapshot.tensor_data()
                    fresh = _by_name(stale, pool.map(lambda each: checksum(parts_of(each, data)), stale))
            found = {each.name: fresh.get(each.name) or before[each.name] for each in complete}
            self._keep(snapshot.manifest.digest, name, found)
        return found

    def _on_device(self, snapshot: Snapshot, stale: list[Layout]) -> dict[str, str]:
        """Checksums of the stale parameters by the device, all of whose bytes it reads; none where it cannot."""
        if self._device is None:
            return {}
        data = snapshot.tensor_data()
        self._hashes = hashes = self._hashes or DeviceChecksums(self._device)
        try:
            return {each.name: hashes.checksum(parts_of(each, data)) for each in stale}
        except torch.OutOfMemoryError as error:
            log.warning("checksums_on_host", reason=str(error))
            self._device = self._hashes = None
            return {}

    def _tiled(
        self, pool: ThreadPoolExecutor, base: Snapshot | None, snapshot: Snapshot, stale: list[Layout], changed: set[int]
    ) -> dict[str, str]:
        """Checksums of the stale parameters, by SGLang's hash on CUDA; keeps the sums of all tiles for the next version."""
        digest, sums = self._tiles
        old = [] if base is None or base.manifest.digest != digest else base.tensor_data()
        data, tensors = snapshot.tensor_data(), snapshot.manifest.tensors
        # Sums under correction belong to no version.
        self._tiles = ("", {})

        # A few parameters can be most of a model: threads share each of them.
        work: list[Work] = []

        def renewed(layout: Layout) -> TileSums:
            known = sums.get(layout.name)
            if not old or known is None or any(tensors[index].num_bytes % WORD_BYTES for index in layout.indices[:-1]):
                return TileSums(parts_of(layout, data), do=work.extend)
            begin = 0
            for index in layout.indices:
                if index in changed:
                    work.extend(known.changes(begin, old[index], data[index]))
                begin += tensors[index].num_bytes
            return known

        fresh = _by_name(stale, map(renewed, stale))
        for _ in pool.map(_do, work):
            pass
        self._tiles = (snapshot.manifest.digest, (sums if old else {}) | fresh)
        return {name: each.checksum() for name, each in fresh.items()}

    def _keep(self, digest: str, name: Hash, found: dict[str, str]) -> None:
        self._found[digest, name] = found
        versions = list(dict.fromkeys(each for each, _ in self._found))
        for old in versions[:-KEPT_VERSIONS]:
            self._found = {key: each for key, each in self._found.items() if key[0] != old}


def _changed(base: Snapshot | None, snapshot: Snapshot) -> set[int]:
    """Return the tensors whose digest differs from ``base``; all of them where the layout differs."""
    after = snapshot.manifest.tensors
    before = [] if base is None else base.manifest.tensors
    if [(each.name, each.num_bytes) for each in before] != [(each.name, each.num_bytes) for each in after]:
        return set(range(len(after)))
    return {index for index, (was, now) in enumerate(zip(before, after, strict=True)) if was.digest != now.digest}


def _do(work: Work) -> None:
    work()


def _by_name(parameters: Sequence[Layout], values: Iterable[T]) -> dict[str, T]:
    return dict(zip((each.name for each in parameters), values, strict=True))
