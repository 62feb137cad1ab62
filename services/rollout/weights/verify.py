"""Compares what the engine says of its parameters with the version that was published.

An engine that can sums them by tiles of the version's tensors (``sums``). Any other reports SGLang's own checksums, and here
the same are computed from files whose every tensor has the learner's digest. services/shared/weights/engine_parameters.py
says which tensors make which parameter of the engine, and shards.py beside it what each rank has of it. Neither can check
weights that SGLang has quantised and MoE backends that reorder experts (they show as mismatches) and merged parameters of
which only a part was sent (unverified). There one can still compare log-probs of a prompt with the learner's own: that shows
a wrong layer, not a wrong bit. Weights in FP8 by blocks could be checked if they were quantised here: SGLang 0.5.23 hashes
them dequantised, and benchmarks/fp8/emulation.py rounds as it does.

No version has the towers of a model that are not of its text: the engine loaded them from the starting checkpoint, and they
are held against its first report.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from gspo_protocol.messages import TensorInfo
from gspo_services.rollout.sglang import Engine, RankChecksums
from gspo_services.rollout.weights.sums import Former, Summed, compare_sums
from gspo_services.rollout.weights.verification import HeldTowers, Verification, joined, tied_head
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.weights import (
    HEAD,
    SUMMER,
    Buffer,
    Hash,
    Layout,
    Shard,
    ShardChecksums,
    Spread,
    engine_hash,
    layouts,
    shards,
    source_of,
)

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The checksums that an engine must report, known before it is asked."""

    parameters: Mapping[str, Layout]
    ranks: Sequence[Mapping[str, str]]
    """For each rank that shares the model, by name, for complete parameters only."""


class Verifier:
    """Verifies the weights of one engine."""

    def __init__(self, engine: Engine, kv_heads: int = 1, directory: Path | None = None) -> None:
        """``kv_heads``: heads of keys and values of the model; only an engine of several ranks needs the number.
        ``directory``: through which the engine is asked for sums (gspo_services.rollout.weights.sums); None: it is asked
        for SGLang's own checksums, which then are computed here, too."""
        self._engine = engine
        self._kv_heads = kv_heads
        self._reported: list[RankChecksums] = []
        """The engine's last report; it shows which hash made it."""
        self._spread: Spread | None = None
        self._directory = directory
        self._checksums = ShardChecksums()
        self._former: Expected | None = None
        """What the engine was last seen to hold."""
        self._former_sums: Former | None = None
        self._towers = HeldTowers()
        self.known: Collection[str] = ()
        """The names of the parameters that the engine last reported; none: it was not asked yet."""

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
        self.known = reported[0].checksums if reported else ()
        return reported

    async def expect(self, tensors: Iterable[tuple[TensorInfo, Buffer]]) -> Expected | Summed:
        """Work out what an engine that loaded these tensors must have, without a pause.

        Raises: the same as ``hash``; SpreadError for a model that is shared in an unknown way; OSError.
        """
        sent = list(tensors)
        infos = [info for info, _ in sent]
        if await self._takes_sums():
            assert self._spread is not None
            assert self._directory is not None
            summed = Summed(sent=sent, shards=shards(infos, self._spread, self._kv_heads))
            await asyncio.to_thread(summed.write_places, self._directory)
            return summed
        name = await self.hash()
        # Not in the event loop: hashing can take seconds for each gigabyte.
        ranks = await asyncio.to_thread(self._checksums.of, sent, await self.spread(), self._kv_heads, name)
        return Expected(parameters=layouts(infos), ranks=ranks)

    async def verify(self, expected: Expected | Summed) -> Verification:
        """Ask the engine what it has, and compare. Raises: EngineError when it cannot say."""
        if isinstance(expected, Summed):
            verification = await self._verify_sums(expected)
        else:
            reported = await self.checksums()
            verification = compare_ranks(expected, reported, self._former)
            verification = self._towers.checked(verification, expected.parameters, [each.checksums for each in reported])
            if verification.ok:
                self._former = expected
        if not verification.ok:
            log.warning(
                "engine_weights_differ",
                mismatched=len(verification.mismatched),
                missing=len(verification.missing),
                unsent=len(verification.unsent),
            )
        return verification

    async def _takes_sums(self) -> bool:
        if self._directory is None:
            return False
        info = await self._engine.server_info()
        self._spread = info.spread
        # SGLang gives loaders nothing where it has replicas of the model.
        return SUMMER in info.custom_weight_loader and info.spread.data == 1

    async def _verify_sums(self, expected: Summed) -> Verification:
        assert self._directory is not None
        expected.drop_answers(self._directory)
        reported = await self._engine.weight_sums(self._directory)
        self.known = reported[0].sizes
        verification = await asyncio.to_thread(compare_sums, expected, reported, self._former_sums)
        parameters = layouts([info for info, _ in expected.sent])
        verification = self._towers.checked(verification, parameters, [each.others for each in reported])
        if verification.ok:
            self._former_sums = expected.shards, reported
        return verification


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
    return joined(found)


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
        elif not name.endswith(HEAD) or not tied_head(expected):
            missing += parameter.tensors
    unsent = [name for name in actual if source_of(name) not in parameters]
    return Verification(mismatched=mismatched, missing=missing, unsent=unsent, unverified=unverified)
