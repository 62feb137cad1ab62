"""Compares the engine's own checksums with those of the version that was published.

The learner sends them with the version. Where it has not computed them, they are computed here, from the tensors that came.
services/shared/weights/engine_parameters.py says which tensors make which parameter of the engine, and shards.py beside
it what each rank has of it. The learner publishes checksums of whole parameters; those of shards are always computed here,
from files whose every tensor has the learner's digest. Checksums cannot check weights that SGLang has quantised and MoE
backends that reorder experts (they show as mismatches) and merged parameters of which only a part was sent (unverified).
There one can still compare log-probs of a prompt with the learner's own: that shows a wrong layer, not a wrong bit. Weights
in FP8 by blocks could be checked if they were quantised here: SGLang 0.5.23 hashes them dequantised, and
benchmarks/fp8/emulation.py rounds as it does.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from gspo_protocol.messages import TensorInfo
from gspo_services.rollout.sglang import Engine, RankChecksums
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.weights import (
    EMBEDDING,
    HEAD,
    Buffer,
    Hash,
    Layout,
    Shard,
    ShardChecksums,
    Spread,
    engine_hash,
    layouts,
    shards,
)

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of the comparison."""

    mismatched: list[str] = field(default_factory=list)
    """Engine parameters that differ from what was sent; of a server of several ranks, with the rank that has them."""
    missing: list[str] = field(default_factory=list)
    """Sent tensors without a parameter in the engine, which skipped them in silence."""
    unsent: list[str] = field(default_factory=list)
    """Engine parameters for which nothing was sent."""
    unverified: list[str] = field(default_factory=list)
    """Sent tensors that could not be compared, because other parts of their parameter were not sent."""

    @property
    def ok(self) -> bool:
        """No parameter differs, is missing or unsent; the caller still has to look at ``unverified``."""
        return not (self.mismatched or self.missing or self.unsent)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The checksums that an engine must report, known before it is asked."""

    parameters: Mapping[str, Layout]
    ranks: Sequence[Mapping[str, str]]
    """For each rank that shares the model, by name, for complete parameters only."""


class Verifier:
    """Verifies the weights of one engine."""

    def __init__(self, engine: Engine, kv_heads: int = 1) -> None:
        """``kv_heads``: heads of keys and values of the model; only an engine of several ranks needs the number."""
        self._engine = engine
        self._kv_heads = kv_heads
        self._reported: list[RankChecksums] = []
        """The engine's last report; it shows which hash made it."""
        self._spread: Spread | None = None
        self._shards = ShardChecksums()
        self._former: Expected | None = None
        """What the engine was last seen to hold."""

    @property
    def known(self) -> Mapping[str, str]:
        """The checksums that the engine last reported, by its parameters' names; empty: it was not asked yet."""
        return self._reported[0].checksums if self._reported else {}

    async def hash(self) -> Hash:
        """Return the engine's checksum hash; the first call asks the engine for checksums.

        Raises: EngineError when the engine cannot report checksums; ServiceError for an engine on an unknown device.
        """
        info = await self._engine.server_info()
        self._spread = info.spread
        reported = self._reported or await self.checksums()
        try:
            return engine_hash(info.device, (checksum for rank in reported for checksum in rank.checksums.values()))
        except ValueError as error:
            raise ServiceError(f"the engine's weights cannot be verified: {error}") from error

    async def spread(self) -> Spread:
        """Return the engine's ranks as last reported with its hash. Raises: the same as ``hash``."""
        if self._spread is None:
            await self.hash()
        assert self._spread is not None
        return self._spread

    async def shards(self, tensors: Sequence[TensorInfo]) -> list[dict[str, Shard]]:
        """Return each rank's shard of these tensors. Raises: the same as ``hash``; SpreadError."""
        return shards(tensors, await self.spread(), self._kv_heads)

    async def checksums(self) -> list[RankChecksums]:
        """Ask for the checksums of each rank's parameters. Raises: EngineError."""
        self._reported = reported = await self._engine.weights_checksums()
        return reported

    async def expect(self, tensors: Iterable[tuple[TensorInfo, Buffer]]) -> Expected:
        """Compute the checksums of an engine that loaded these tensors: the slow half of the comparison, without a pause.
        ``published`` needs no tensors.

        Raises: the same as ``hash``; SpreadError for a model that is shared in an unknown way.
        """
        name, sent = await self.hash(), list(tensors)
        # Not in the event loop: hashing can take seconds for each gigabyte.
        ranks = await asyncio.to_thread(self._shards.of, sent, await self.spread(), self._kv_heads, name)
        return Expected(parameters=layouts([info for info, _ in sent]), ranks=ranks)

    async def verify(self, expected: Expected) -> Verification:
        """Ask the engine for its checksums, and compare. Raises: EngineError when it cannot report them."""
        verification = compare_ranks(expected, await self.checksums(), self._former)
        if verification.ok:
            self._former = expected
        else:
            log.warning(
                "engine_weights_differ",
                mismatched=len(verification.mismatched),
                missing=len(verification.missing),
                unsent=len(verification.unsent),
            )
        return verification


def published(tensors: Sequence[TensorInfo], checksums: Mapping[str, str]) -> Expected:
    """Return what an engine must report for a version with these tensors, according to its learner."""
    return Expected(parameters=layouts(tensors), ranks=[checksums])


def compare_ranks(expected: Expected, reported: Sequence[RankChecksums], former: Expected | None = None) -> Verification:
    """Compare each rank's parameters with what it must have. ``former``: what the engine had before, to say so."""
    if {each.rank for each in reported} != set(range(len(expected.ranks))):
        text = f"the server has {len(reported)} ranks, but had {len(expected.ranks)} before: it is a different server"
        return Verification(mismatched=[text])
    if len(reported) == 1:
        return compare(expected.parameters, reported[0].checksums, expected.ranks[0])
    found: list[Verification] = []
    for each in reported:
        one = compare(expected.parameters, each.checksums, expected.ranks[each.rank])
        found.append(
            Verification(
                mismatched=[f"{each.label}: {name}{_whose(each, name, expected, former)}" for name in one.mismatched],
                missing=[f"{each.label}: {name}" for name in one.missing],
                unsent=[f"{each.label}: {name}" for name in one.unsent],
                unverified=one.unverified,
            )
        )
    return Verification(
        mismatched=[name for each in found for name in each.mismatched],
        missing=[name for each in found for name in each.missing],
        unsent=[name for each in found for name in each.unsent],
        unverified=found[0].unverified,
    )


def _whose(actual: RankChecksums, name: str, expected: Expected, former: Expected | None) -> str:
    """Identify a wrong shard, where possible."""
    checksum = actual.checksums[name]
    for rank, checksums in enumerate(expected.ranks):
        if checksums.get(name) == checksum:
            return f" (it has the shard of rank {rank})"
    if former is not None and actual.rank < len(former.ranks) and former.ranks[actual.rank].get(name) == checksum:
        return " (it has the shard of the version before)"
    return ""


def compare(parameters: Mapping[str, Layout], actual: Mapping[str, str], expected: Mapping[str, str]) -> Verification:
    """Compare parameters and their checksums with the engine's. A complete parameter without a checksum differs."""
    mismatched: list[str] = []
    missing: list[str] = []
    unverified: list[str] = []
    for name, parameter in parameters.items():
        if not parameter.complete:
            unverified += parameter.tensors
        elif name in actual:
            mismatched += [name] if actual[name] != expected.get(name) else []
        elif not _is_tied_head(name, expected):
            missing += parameter.tensors
    unsent = [name for name in actual if name not in parameters]
    return Verification(mismatched=mismatched, missing=missing, unsent=unsent, unverified=unverified)


def _is_tied_head(name: str, expected: Mapping[str, str]) -> bool:
    """Return whether this output layer is the tied embedding: some checkpoints store it twice, the engine once."""
    return name == HEAD and name in expected and expected[name] == expected.get(EMBEDDING)
