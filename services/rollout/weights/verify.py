"""Compares the engine's own checksums with those of the version that was published.

The learner sends them with the version. Where it has not computed them, they are computed here, from the tensors that came.
``services.weights.engine_parameters`` says which tensors make which parameter of the engine. Checksums cannot check
quantised weights and MoE backends that reorder experts (they show as mismatches), servers of several ranks (EngineError) and
merged parameters of which only a part was sent (unverified). There one can still compare log-probs of a prompt with the
learner's own: that shows a wrong layer, not a wrong bit.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from protocol.messages import TensorInfo
from services.rollout.sglang import Engine
from services.weights import EMBEDDING, HEAD, Buffer, Hash, Layout, checksums_of, engine_hash, hash_function, layouts, merge

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of the comparison."""

    mismatched: list[str] = field(default_factory=list)
    """Engine parameters that differ from what was sent."""
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
    checksums: Mapping[str, str]
    """By name, for complete parameters only."""


class Verifier:
    """Verifies the weights of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._checksums: Mapping[str, str] | None = None
        """Checksums last reported by the engine; they name the hash that made them."""

    @property
    def known(self) -> Mapping[str, str]:
        """The checksums that the engine last reported, by its parameters' names; empty: it was not asked yet."""
        return self._checksums or {}

    async def hash(self) -> Hash:
        """The hash that makes the engine's checksums; the first call asks the engine for them.

        Raises: EngineError when the engine cannot report checksums; ValueError for an engine on an unknown device.
        """
        info = await self._engine.server_info()
        checksums = await self.checksums() if self._checksums is None else self._checksums
        return engine_hash(info.device, checksums.values())

    async def checksums(self) -> dict[str, str]:
        """The checksum of each of the engine's parameters, by SGLang's names. Raises: EngineError."""
        self._checksums = checksums = await self._engine.weights_checksums()
        return checksums

    async def expect(self, tensors: Iterable[tuple[TensorInfo, Buffer]]) -> Expected:
        """The checksums of an engine that has loaded these tensors: the slow half of the comparison, which needs no pause.
        ``published`` needs no tensors.

        Raises: the same as ``hash``.
        """
        checksum = hash_function(await self.hash())
        parameters = merge(tensors)
        # Not in the event loop: hashing can take seconds for each gigabyte.
        return Expected(parameters=parameters, checksums=await asyncio.to_thread(checksums_of, parameters, checksum))

    async def verify(self, expected: Expected) -> Verification:
        """Ask the engine for its checksums, and compare. Raises: EngineError when it cannot report them."""
        verification = compare(expected.parameters, await self.checksums(), expected.checksums)
        if not verification.ok:
            log.warning(
                "engine_weights_differ",
                mismatched=len(verification.mismatched),
                missing=len(verification.missing),
                unsent=len(verification.unsent),
            )
        return verification


def published(tensors: Sequence[TensorInfo], checksums: Mapping[str, str]) -> Expected:
    """What an engine must report for the version with these tensors, as its learner says."""
    return Expected(parameters=layouts(tensors), checksums=checksums)


async def verify_loaded(engine: Engine, tensors: Iterable[tuple[TensorInfo, Buffer]]) -> Verification:
    """Compare a whole version with the engine's weights; call it while paused, before ``resume``.

    Raises: EngineError when the engine cannot report its checksums.
    """
    verifier = Verifier(engine)
    return await verifier.verify(await verifier.expect(tensors))


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


def compare_checksums(expected: Mapping[str, str], actual: Mapping[str, str]) -> Verification:
    """Compare the checksums of all of an engine's parameters, when nothing else is known about them."""
    mismatched = [name for name, digest in expected.items() if name in actual and actual[name] != digest]
    missing = [name for name in expected if name not in actual and not _is_tied_head(name, expected)]
    return Verification(mismatched=mismatched, missing=missing, unsent=[name for name in actual if name not in expected])


def _is_tied_head(name: str, expected: Mapping[str, str]) -> bool:
    """Whether this is an output layer that is the embedding: some checkpoints have it twice, the engine once."""
    return name == HEAD and name in expected and expected[name] == expected.get(EMBEDDING)
