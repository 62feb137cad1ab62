"""Versions that consist of an adapter alone: what is copied of it, and the model below it, which every rollout must have.

The model is not sent. The learner says what an engine that has it must report: checksums of all its parameters, by the hash
that the engine uses. It keeps one copy of the model for that, as the hash is known when the first rollout asks.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from gspo.model.serving_layout import ServedParameter
from gspo_protocol.messages import AdapterInfo
from gspo_services.learner.weights.snapshot import Snapshot, build_snapshot
from gspo_services.learner.weights.weight_copy import WeightCopy, copy_parameters
from gspo_services.shared.weights import MODULES, Hash, hash_function, layouts, parts_of

log = structlog.get_logger()

NO_VERSION = 0
"""The model below adapters is no version: it is never served without one."""


class PublishedBase:
    """The model below the adapters."""

    def __init__(self, weights: WeightCopy) -> None:
        """``weights``: all that the model would be served with, in the type in which it is served."""
        self._snapshot: Snapshot = build_snapshot(NO_VERSION, weights)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="base-checksums")
        self._found: dict[Hash, Future[dict[str, str]]] = {}

    @property
    def digest(self) -> str:
        """Its digest, as that of a version."""
        return self._snapshot.manifest.digest

    @property
    def num_bytes(self) -> int:
        return self._snapshot.manifest.num_bytes

    def checksums(self, name: Hash) -> dict[str, str]:
        """Return the checksums of an engine with the model; empty while a thread still computes them: ask again."""
        if name not in self._found:
            self._found[name] = self._pool.submit(self._compute, name)
        return self._found[name].result() if self._found[name].done() else {}

    def _compute(self, name: Hash) -> dict[str, str]:
        checksum, data = hash_function(name), self._snapshot.tensor_data()
        complete = [each for each in layouts(self._snapshot.manifest.tensors).values() if each.complete]
        found = {each.name: checksum(parts_of(each, data)) for each in complete}
        log.info("base_checksums_computed", hash=name, parameters=len(found), base_digest=self.digest)
        return found


class AdapterCopy(WeightCopy):
    """The matrices of an adapter at one moment, and what they belong to."""

    def __init__(self, copied: WeightCopy, adapter: AdapterInfo, base: PublishedBase) -> None:
        super().__init__(copied.layout, copied.pieces)
        self.adapter = adapter
        self.base = base


def copy_adapter(
    matrices: Iterable[ServedParameter],
    *,
    rank: int,
    alpha: float,
    base: PublishedBase,
    probe: tuple[Sequence[int], Sequence[float]],
    names: Sequence[str] = (),
) -> AdapterCopy:
    """Copy an adapter's matrices, under the names of peft's files. ``probe``: tokens, and the learner's log-probs of all but
    the first with this adapter. ``names``: of several adapters, whose ``rank`` rows follow one another, as their probes."""
    token_ids, logprobs = probe
    info = AdapterInfo(
        rank=rank, alpha=alpha, modules=list(MODULES), base_digest=base.digest,
        probe_ids=list(token_ids), probe_logprobs=list(logprobs), names=list(names),
    )  # fmt: skip
    return AdapterCopy(copy_parameters(matrices), info, base)
