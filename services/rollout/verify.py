"""Does the engine hold what was sent? Its own checksums, computed again from the tensors, without torch.

SGLang's /weights_checker hashes each parameter as it lies in memory, where it has merged what a checkpoint
keeps apart (one rank, Qwen3 and Qwen3-MoE). All merges are along the first dimension, so they are concatenations of bytes:

    self_attn.qkv_proj.weight        q_proj, k_proj, v_proj
    mlp.gate_up_proj.weight          gate_proj, up_proj
    mlp.experts.w13_weight           of each expert in turn gate_proj, up_proj
    mlp.experts.w2_weight            of each expert in turn down_proj
    embed_tokens, lm_head            padded with zero rows to a multiple of 64
    everything else                  as it is, under its own name

The hash is in services.rollout.checksums. What cannot be checked this way: quantised weights and MoE backends that reorder
experts (they show as mismatches), servers of several ranks (EngineError), merged parameters of which only a part was
sent (unverified). There `Engine.prompt_logprobs`, compared with the learner's own log-probs, is the probe that remains;
it sees a wrong layer, not a wrong bit.
"""

import asyncio
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import structlog

from protocol.messages import TensorInfo
from services.rollout.checksums import Checksum, checksum_of
from services.rollout.engine import Engine

log = structlog.get_logger()

_VOCAB_ROWS: Final = 64
"""SGLang pads embedding and output layer to a multiple of so many rows."""
_ATTENTION: Final = re.compile(r"(?P<prefix>.*\.self_attn)\.(?P<part>[qkv])_proj\.(?P<kind>weight|bias)")
_EXPERT: Final = re.compile(r"(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")
_MLP: Final = re.compile(r"(?P<prefix>.*\.mlp)\.(?P<part>gate|up)_proj\.(?P<kind>weight|bias)")
_VOCAB: Final = ("model.embed_tokens.weight", "lm_head.weight")

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What the comparison found."""

    mismatched: list[str] = field(default_factory=list)
    """Engine parameters that hold something else than what was sent."""
    missing: list[str] = field(default_factory=list)
    """Sent tensors for which the engine has no parameter: it skipped them in silence."""
    unsent: list[str] = field(default_factory=list)
    """Engine parameters for which nothing was sent."""
    unverified: list[str] = field(default_factory=list)
    """Sent tensors that could not be compared, because other parts of their parameter were not sent."""

    @property
    def ok(self) -> bool:
        """Nothing contradicts; `unverified` has to be looked at by itself."""
        return not (self.mismatched or self.missing or self.unsent)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """An engine parameter put together from sent tensors; `parts` holds their bytes in order of their place in it."""

    name: str
    tensors: list[str]
    parts: list[Buffer]
    complete: bool


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What an engine must say that it holds, worked out before it is asked."""

    parameters: Mapping[str, Parameter]
    checksums: Mapping[str, str]
    """Of the complete parameters, by name."""
    dtype: str


async def verify_loaded(engine: Engine, tensors: Iterable[tuple[TensorInfo, Buffer]]) -> Verification:
    """Compare a whole version with what the engine holds; call it while paused, before the engine goes on.

    Raises: EngineError, when the engine cannot say what it holds.
    """
    return await verify_against(engine, await expect(engine, tensors))


async def expect(engine: Engine, tensors: Iterable[tuple[TensorInfo, Buffer]]) -> Expected:
    """What the engine will say when it has loaded these tensors: the slow half of the comparison, which needs no pause.

    Raises: EngineError, when the engine cannot say what it is.
    """
    info = await engine.server_info()
    parameters = merge(tensors)
    # Hashing takes seconds for each gigabyte: not in the event loop.
    checksums = await asyncio.to_thread(checksums_of, parameters, checksum_of(info.device))
    return Expected(parameters=parameters, checksums=checksums, dtype=info.dtype)


async def verify_against(engine: Engine, expected: Expected) -> Verification:
    """Ask the engine what it holds, and compare. Raises: EngineError, when it cannot say so."""
    actual = await engine.weights_checksums()
    verification = compare(expected.parameters, actual, expected.checksums)
    if not verification.ok:
        log.warning(
            "engine_weights_differ",
            engine_dtype=expected.dtype,
            mismatched=len(verification.mismatched),
            missing=len(verification.missing),
            unsent=len(verification.unsent),
        )
    return verification


def checksums_of(parameters: Mapping[str, Parameter], checksum: Checksum) -> dict[str, str]:
    """The checksum of each complete parameter; `checksum` is the hash of the engine's device."""
    complete = [parameter for parameter in parameters.values() if parameter.complete]
    # Both hashes release the interpreter lock; numpy's does 80 MiB/s on one core, so a large model needs them all.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        digests = list(pool.map(lambda parameter: checksum(parameter.parts), complete))
    return {parameter.name: digest for parameter, digest in zip(complete, digests, strict=True)}


def compare(parameters: Mapping[str, Parameter], actual: Mapping[str, str], expected: Mapping[str, str]) -> Verification:
    """Compare parameters and their checksums with the engine's."""
    missing: list[str] = []
    unverified: list[str] = []
    mismatched = [name for name, digest in expected.items() if name in actual and actual[name] != digest]
    for name, parameter in parameters.items():
        if not parameter.complete:
            unverified += parameter.tensors
        elif name not in actual and not _is_tied_head(parameter, parameters):
            missing += parameter.tensors
    unsent = [name for name in actual if name not in parameters]
    return Verification(mismatched=mismatched, missing=missing, unsent=unsent, unverified=unverified)


def merge(tensors: Iterable[tuple[TensorInfo, Buffer]]) -> dict[str, Parameter]:
    """The engine's parameters, by name, that checkpoint tensors make up. Raises: ValueError for a tensor sent twice."""
    places: dict[str, dict[tuple[int, ...], tuple[TensorInfo, Buffer]]] = {}
    for info, data in tensors:
        name, place = _place(info.name)
        parts = places.setdefault(name, {})
        if place in parts:
            raise ValueError(f"tensor {info.name} was sent twice")
        parts[place] = (info, data)
    return {name: _parameter(name, parts) for name, parts in places.items()}


def _place(name: str) -> tuple[str, tuple[int, ...]]:
    """The engine's parameter that a checkpoint tensor is part of, and its place in it."""
    if match := _ATTENTION.fullmatch(name):
        return f"{match['prefix']}.qkv_proj.{match['kind']}", ("qkv".index(match["part"]),)
    if match := _EXPERT.fullmatch(name):
        expert = int(match["expert"])
        if match["part"] == "down":
            return f"{match['prefix']}.w2_weight", (expert, 0)
        return f"{match['prefix']}.w13_weight", (expert, ("gate", "up").index(match["part"]))
    if match := _MLP.fullmatch(name):
        return f"{match['prefix']}.gate_up_proj.{match['kind']}", (("gate", "up").index(match["part"]),)
    return name, (0,)


def _parameter(name: str, places: Mapping[tuple[int, ...], tuple[TensorInfo, Buffer]]) -> Parameter:
    ordered = [places[place] for place in sorted(places)]
    parts = [data for _, data in ordered]
    if name in _VOCAB:
        parts.append(_vocab_padding(ordered[0][0]))
    return Parameter(
        name=name,
        tensors=[info.name for info, _ in ordered],
        parts=parts,
        complete=set(places) == _expected_places(name, places),
    )


def _expected_places(name: str, places: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    experts = range(max(place[0] for place in places) + 1)
    if name.endswith(".w13_weight"):
        return {(expert, part) for expert in experts for part in range(2)}
    if name.endswith(".w2_weight"):
        return {(expert, 0) for expert in experts}
    if ".qkv_proj." in name:
        return {(0,), (1,), (2,)}
    if ".gate_up_proj." in name:
        return {(0,), (1,)}
    return {(0,)}


def _vocab_padding(info: TensorInfo) -> bytes:
    if not info.shape or not info.shape[0]:
        return b""
    return bytes(-info.shape[0] % _VOCAB_ROWS * (info.num_bytes // info.shape[0]))


def _is_tied_head(parameter: Parameter, parameters: Mapping[str, Parameter]) -> bool:
    """An output layer that is the embedding: some checkpoints hold it twice, the engine once."""
    embedding = parameters.get("model.embed_tokens.weight")
    return parameter.name == "lm_head.weight" and embedding is not None and parameter.parts[0] == embedding.parts[0]
