"""Versions that are adapters (LoRA): loads each beside those in use, verifies it, and then has new requests begin with it.

Nothing of the model changes, so generation goes on, and a wrong adapter harms nobody: the former one is served until the new
one is verified. What is checked, in this order:

    the run         rank, scale and modules are those of this rollout's settings
    the model       the engine's own checksums of all its parameters are those of the learner's model; once for each model
    the bytes       every matrix has the learner's digest, when it came, and again in the file after the engine has read it
    the effect      with the adapter the engine computes the learner's log-probs of a fixed sequence
    the slot        checksums of the matrices as they lie in the engine, where it reports them (ours for the CPU does)

The slot shows a wrong bit. SGLang itself says nothing about adapters, so on a GPU the effect has to do: it shows a wrong
adapter, scale or layer, and no change that moves log-probs by less than the tolerance.
"""

import asyncio
import hashlib
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

import msgspec
import numpy as np
import structlog

from gspo_protocol.digests import tensor_digest
from gspo_protocol.messages import AdapterInfo, Manifest, TensorInfo
from gspo_services.rollout.sglang import Adapter, Engine, EngineError
from gspo_services.rollout.weights.adapter_parts import AdapterPart, adapter_parts
from gspo_services.rollout.weights.file import header_of
from gspo_services.rollout.weights.loader import LOADED, VerificationError
from gspo_services.rollout.weights.replica import Replica
from gspo_services.rollout.weights.verify import Verifier
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.settings import Settings
from gspo_services.shared.weights import (
    EMBEDDING,
    HEAD,
    MODULES,
    REPORTS_SLOTS,
    hash_function,
    peft_config,
    require_matrices,
    slot_checksums,
)

log = structlog.get_logger()

TOLERANCE: Final = {"float32": 1e-4, "bfloat16": 0.3, "float16": 0.05}
"""Largest mean difference of the log-probs of the probe: sums are added up in another order."""
_PREFIX: Final = "gspo-"
_ANY_TOKENS: Final = (0, 1)
_SHOWN: Final = 5


class BaseUnknownError(RuntimeError):
    """The learner has not said yet what an engine with its model reports: the manifest has to be asked for again."""


@dataclass(frozen=True, kw_only=True)
class AdapterPlan:
    """What adapters this run has, and how many an engine holds at once."""

    rank: int
    alpha: float
    names: tuple[str, ...] = ()
    """Of several adapters, which each version has all of."""
    slots: int
    """Versions."""
    tolerance: float
    mode: Literal["retract", "in_place"]
    """retract: generations go on with the next adapter. in_place: they end with the one that they began with."""

    @property
    def num_loaded(self) -> int:
        """Adapters that an engine holds at once."""
        return self.slots * max(1, len(self.names))

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """None: versions have all weights."""
        lora = settings.lora
        if lora.publish != "adapter":
            return None
        tolerance = max(TOLERANCE[settings.model.dtype], TOLERANCE[settings.learner.dtype])
        return cls(
            rank=lora.rank,
            alpha=lora.alpha,
            names=tuple(lora.adapters),
            slots=lora.max_loaded_loras,
            tolerance=tolerance,
            mode=settings.rollout.pause_mode,
        )


class AdapterLoader:
    """The adapters of one engine."""

    def __init__(self, engine: Engine, verifier: Verifier, work_directory: Path, plan: AdapterPlan) -> None:
        self._engine = engine
        self._verifier = verifier
        self._directory = work_directory / LOADED
        self._plan = plan
        # A name is never used again, not even by another process at the same server.
        self._session = secrets.token_hex(4)
        self._num_loads = 0
        self._base = ""
        self._base_version = 0
        self._held: list[dict[str, Adapter]] = []
        """Of each version, by their names in the run; oldest first. The last ones are served."""
        self._reports_slots = False
        self._former: dict[str, tuple[int, str]] = {}
        """By the adapter and the place of a matrix: the version that was verified last, and its checksum there."""

    @property
    def wants_checksums(self) -> bool:
        """Whether the next manifest must say what the engine reports of the model."""
        return not self._base

    async def load(self, weights: Replica) -> dict[str, Adapter]:
        """Load a version's adapters into the engine, and verify them; by their names in the run. They are not served yet.

        Raises: BaseUnknownError; VerificationError, EngineError: the version is not in the engine then; ServiceError for
        settings, a model or a server with which no version can be served.
        """
        manifest = weights.current
        info = self._require_planned(manifest)
        await self._require_base(info, manifest.checksums)
        for held in self._held[: max(0, len(self._held) + 1 - self._plan.slots)]:
            await self._retire(held)
        self._num_loads += 1
        version, loaded = manifest.policy_version, dict[str, Adapter]()
        try:
            for part in adapter_parts(info, manifest.tensors, [data for _, data in weights.tensors()]):
                name = f"{_PREFIX}{self._session}-{self._num_loads}-v{version}{part.name and '-' + part.name}"
                await self._load(name, part, version)
                loaded[part.name] = Adapter(name=name, version=version, base_version=self._base_version)
        except BaseException:
            for adapter in loaded.values():
                await self._forget(adapter.name)
            raise
        return loaded

    async def _load(self, name: str, part: AdapterPart, version: int) -> None:
        directory = self._directory / name
        try:
            await asyncio.to_thread(_write, directory, part)
            await self._engine.adapters.load(name, directory)
            try:
                await self._verify(name, directory, part, version)
            except BaseException:
                await self._forget(name)
                raise
        except OSError as error:
            raise ServiceError(
                f"the adapter of policy version {version} cannot be written: {error}; make room there, or choose another "
                "rollout.weights_directory"
            ) from error
        finally:
            # Without its files SGLang cannot load an adapter again that somebody names after it was unloaded.
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def _forget(self, name: str) -> None:
        """Unload an adapter that was never served. One that stays is in nobody's way: no request names it."""
        with suppress(EngineError):
            await self._engine.adapters.unload(name)

    def serve(self, adapters: dict[str, Adapter]) -> None:
        """From now on requests begin with them."""
        self._engine.serve(adapters)
        self._held.append(dict(adapters))

    async def retire_former(self) -> None:
        """Unload the adapters that are not served any more: with retract all, after what still has them was cut; otherwise
        those that no request has."""
        for held in self._held[:-1]:
            if self._plan.mode == "retract" or not any(self._engine.uses(adapter.name) for adapter in held.values()):
                try:
                    await self._retire(held)
                except EngineError as error:
                    # Its slot is wanted some versions later, and then it is tried again.
                    log.warning("adapter_not_unloaded", adapters=[each.name for each in held.values()], error=str(error))

    async def _retire(self, held: dict[str, Adapter]) -> None:
        for key, adapter in list(held.items()):
            if not await self._engine.cut(adapter.name):
                # SGLang waits with requests when there are more adapters than slots: nothing breaks.
                log.warning("adapter_still_in_use", adapter=adapter.name)
                continue
            await self._engine.adapters.unload(adapter.name)
            del held[key]
        if not held:
            self._held = [each for each in self._held if each is not held]

    def _require_planned(self, manifest: Manifest) -> AdapterInfo:
        info, plan = manifest.adapter, self._plan
        if info is None:
            raise ServiceError(
                f'lora.publish is "adapter" and policy version {manifest.policy_version} has all weights: the learner has '
                "other settings; give learner and rollouts the same, and start them again"
            )
        if (info.rank, info.alpha, info.modules) != (plan.rank, plan.alpha, list(MODULES)):
            raise ServiceError(
                f"the adapter of policy version {manifest.policy_version} has rank {info.rank}, alpha {info.alpha:g} and "
                f"modules {', '.join(info.modules)}, and [lora] says rank {plan.rank}, alpha {plan.alpha:g} and modules "
                f"{', '.join(MODULES)}: give learner and rollouts the same settings"
            )
        if tuple(info.names) != plan.names:
            raise ServiceError(
                f"policy version {manifest.policy_version} has the adapters {', '.join(info.names) or 'of one name'}, and "
                f"lora.adapters are {', '.join(plan.names) or 'none'}: give learner and rollouts the same settings"
            )
        try:
            require_matrices(info, manifest.tensors)
        except ValueError as error:
            raise VerificationError(f"policy version {manifest.policy_version}: {error}") from error
        return info

    async def _require_base(self, info: AdapterInfo, checksums: Mapping[str, str]) -> None:
        if info.base_digest == self._base:
            return
        self._base = ""
        await self._require_server()
        if not checksums:
            # Without a hash that this engine reports, the learner would be asked for ever.
            await self._verifier.hash()
            raise BaseUnknownError(f"the learner computes the checksums of the model {info.base_digest}")
        reported = (await self._verifier.checksums())[0].checksums
        wrong = _differing(checksums, reported)
        if wrong:
            raise ServiceError(
                f"the engine's model is not the one that the adapters belong to: its parameters have digest "
                f"{_digest(reported)}, those of the learner's model {_digest(checksums)}; {len(wrong)} differ, such as "
                f"{', '.join(wrong[:_SHOWN])}; start the server with the learner's model.path and model.dtype, and start it "
                "again if other weights were loaded into it"
            )
        self._base = info.base_digest
        log.info("base_verified", parameters=len(reported), base_digest=info.base_digest, digest=_digest(reported))

    async def _require_server(self) -> None:
        """Raises: ServiceError when this server cannot hold the adapters of this run. EngineError."""
        info, plan = await self._engine.server_info(), self._plan
        if not info.spread.is_whole:
            raise ServiceError(
                'lora.publish is "adapter" and the SGLang server has several ranks, whose model cannot be verified; use '
                'one rank, or lora.publish = "merged"'
            )
        modules = info.lora_target_modules or []
        faults = {
            "without --enable-lora": not info.enable_lora,
            f"with --max-lora-rank {info.max_lora_rank}": (info.max_lora_rank or 0) < plan.rank,
            f"with --max-loras-per-batch {info.max_loras_per_batch}": info.max_loras_per_batch <= plan.num_loaded,
            f"with --lora-target-modules {' '.join(modules)}": "all" not in modules and not {*MODULES} <= {*modules},
        }
        for fault, found in faults.items():
            if found:
                wanted = " ".join(lora_arguments(plan.rank, plan.num_loaded))
                raise ServiceError(f"the SGLang server was started {fault}; start it with {wanted}")
        version = await self._engine.weight_version()
        if version is None:
            raise ServiceError("the SGLang server was started without a number as --weight-version; start it with 0")
        self._base_version = version
        self._reports_slots = REPORTS_SLOTS in info.custom_weight_loader
        for name in await self._engine.adapters.names():
            if name.startswith(_PREFIX) and not name.startswith(_PREFIX + self._session):
                log.info("adapter_of_a_former_process", adapter=name)
                await self._engine.adapters.unload(name)

    async def _verify(self, name: str, directory: Path, part: AdapterPart, version: int) -> None:
        """Raises: VerificationError, EngineError."""
        changed = await asyncio.to_thread(_changed, directory / _FILE, part.tensors)
        if changed:
            raise VerificationError(
                f"policy version {version}: {changed} in {directory / _FILE} is no longer what came from the learner"
            )
        await self._verify_effect(name, version, part.info)
        await self._verify_slot(name, version, part)

    async def _verify_effect(self, name: str, version: int, info: AdapterInfo) -> None:
        # Also without anything to compare: only then does it get a slot.
        found = np.array(await self._engine.adapters.prompt_logprobs(name, info.probe_ids or list(_ANY_TOKENS)))
        if not info.probe_logprobs:
            return
        expected = np.array(info.probe_logprobs)
        if found.shape != expected.shape:
            raise VerificationError(f"policy version {version}: {len(found)} log-probs, the learner has {len(expected)}")
        differences = np.abs(found - expected)
        mean = float(differences.mean())
        # Not ``> tolerance``, which NaN passes.
        if not mean <= self._plan.tolerance:
            place = int(np.argmax(differences))
            raise VerificationError(
                f"policy version {version}: with its adapter the engine gives token {place + 1} of the probe the log-prob "
                f"{found[place]:.5f}, the learner {expected[place]:.5f}; the mean difference is {mean:.2g}, at most "
                f"{self._plan.tolerance:g} is rounding"
            )
        log.info("adapter_probed", policy_version=version, mean_difference=mean)

    async def _verify_slot(self, name: str, version: int, part: AdapterPart) -> None:
        if not self._reports_slots:
            return
        reported = await self._engine.adapters.slots(name)
        checksum = hash_function(await self._verifier.hash())
        expected = slot_checksums(name, part.tensors, part.data, checksum)
        places = {key: key.rpartition("/")[2] for key in expected}
        wrong = [key for key in expected if reported.get(key) != expected[key]]
        if wrong or set(reported) != set(expected):
            said = [
                f"{places[key]}{self._whose(f'{part.name}/{places[key]}', reported.get(key, ''))}" for key in wrong[:_SHOWN]
            ]
            beside = sorted(set(reported) - set(expected))[:_SHOWN]
            raise VerificationError(
                f"policy version {version}: {len(wrong)} of {len(expected)} matrices in the engine differ from what was "
                f"loaded: {', '.join([*said, *beside])}"
            )
        self._former |= {f"{part.name}/{places[key]}": (version, expected[key]) for key in expected}

    def _whose(self, place: str, checksum: str) -> str:
        """Identify a wrong matrix, where possible."""
        version, known = self._former.get(place, (0, ""))
        return f" (it is that of version {version})" if known and checksum == known else ""


_FILE: Final = "adapter_model.safetensors"


def lora_arguments(rank: int, num_loaded: int) -> list[str]:
    """The arguments with which an SGLang server holds this many adapters."""
    return [
        "--enable-lora",
        "--max-lora-rank", str(rank),
        "--max-loras-per-batch", str(num_loaded + 1),
        "--lora-target-modules", *MODULES,
    ]  # fmt: skip


def _write(directory: Path, part: AdapterPart) -> None:
    """peft's files. A copy, and not a link: SGLang may map the file, and goes on reading it. Raises: OSError."""
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_bytes(msgspec.json.encode(peft_config(part.info)))
    with (directory / _FILE).open("wb") as file:
        file.write(header_of(part.tensors))
        for data in part.data:
            file.write(data)


def _changed(path: Path, tensors: Sequence[TensorInfo]) -> str:
    """Return the first tensor in the file that does not match its digest, or "the header"; empty: all match."""
    content, header = memoryview(path.read_bytes()), header_of(tensors)
    if bytes(content[: len(header)]) != header:
        return "the header"
    for info in tensors:
        begin = len(header) + info.offset
        if tensor_digest(content[begin : begin + info.num_bytes]) != info.digest:
            return f"tensor {info.name}"
    return ""


def _differing(expected: Mapping[str, str], reported: Mapping[str, str]) -> list[str]:
    """Return the parameters with different checksums, or that only one side has."""
    if HEAD not in reported and expected.get(HEAD) == expected.get(EMBEDDING):
        # Some checkpoints have the embedding twice; the engine has it once.
        expected = {name: checksum for name, checksum in expected.items() if name != HEAD}
    return [name for name in {**expected, **reported} if expected.get(name) != reported.get(name)]


def _digest(checksums: Mapping[str, str]) -> str:
    """One digest of all parameters' checksums."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(checksums):
        state.update(f"{name}\0{checksums[name]}\n".encode())
    return state.hexdigest()
