"""Loads a version into a paused engine, as a patch of its parameters or as files, and compares its checksums.

An engine that can do so patches the elements that changed since the version that it serves. Any other loads the files with
changed tensors, and all files when its version is unknown.
"""

import asyncio
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.sglang import Engine, EngineError, EngineUnreachable
from gspo_services.rollout.weights.patch import NoPatchError, write_patch
from gspo_services.rollout.weights.replica import Replica
from gspo_services.rollout.weights.sums import Summed
from gspo_services.rollout.weights.verification import Verification
from gspo_services.rollout.weights.verify import Expected, Verifier
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.weights import PATCHER, SpreadError

log = structlog.get_logger()

MAX_FAILED_PATCHES: Final = 3
"""After this many failures in a row the engine gets only files."""
LOADED: Final = "loaded"
"""The directory of the engine's files, below the rollout's own; it exists only during a load."""


class VerificationError(RuntimeError):
    """The engine's weights differ from what was sent."""


@dataclass(frozen=True, kw_only=True)
class PreparedLoad:
    """The preparation before the pause. ``patch``: a directory; None: the engine has to load files."""

    expected: Expected | Summed
    patch: Path | None


class EngineLoader:
    """Loads versions into one engine."""

    def __init__(self, engine: Engine, verifier: Verifier, work_directory: Path, metrics: RolloutMetrics) -> None:
        self._engine = engine
        self._verifier = verifier
        self._work_directory = work_directory
        self._metrics = metrics
        self._takes_parts = True
        self._takes_patches: bool | None = None
        """None: the engine has not been asked yet."""
        self._failed_patches = 0

    async def prepare(self, weights: Replica) -> PreparedLoad:
        """Do what is possible while the engine still generates.

        Raises: EngineError; ServiceError when there is no room, or when no shard of the engine could be verified.
        """
        try:
            return PreparedLoad(expected=await self._verifier.expect(weights.tensors()), patch=await self._patch(weights))
        except SpreadError as error:
            raise ServiceError(str(error)) from error
        except OSError as error:
            raise self._no_room(weights, error) from error

    async def load(self, weights: Replica, prepared: PreparedLoad) -> None:
        """Give the paused engine the version. Raises: EngineError, VerificationError; ServiceError when there is no room."""
        expected, patch = prepared.expected, prepared.patch
        if patch is None or not await self._patched(weights, patch, expected):
            await self._load_files(weights, expected)
        weights.was_loaded()

    async def tidy(self) -> None:
        """Remove the files that the engine has loaded."""
        await asyncio.to_thread(shutil.rmtree, self._work_directory / LOADED, ignore_errors=True)

    def doubt(self) -> None:
        """Ask the engine again for its abilities, after a failed load."""
        self._takes_patches = None if self._takes_patches else self._takes_patches

    async def _patch(self, weights: Replica) -> Path | None:
        """Write the changes since the engine's version to a directory; None: the engine must load tensors."""
        touched, known = weights.touched, self._verifier.known
        if touched is None or not touched or not await self._asked_for_patches():
            return None
        directory = self._work_directory / LOADED / "patch"
        try:
            tensors = weights.current.tensors
            ranks = await self._verifier.shards(tensors)
            num_bytes = await asyncio.to_thread(write_patch, directory, weights.files, tensors, touched, known, ranks)
        except NoPatchError as error:
            log.info("weights_not_patched", policy_version=weights.policy_version, error=str(error))
            return None
        except OSError as error:
            raise self._no_room(weights, error) from error
        log.debug("weights_patch_written", policy_version=weights.policy_version, num_bytes=num_bytes)
        return directory

    async def _asked_for_patches(self) -> bool:
        """Ask whether the engine can patch its parameters: once, and again after patches failed."""
        if self._takes_patches is None:
            info = await self._engine.server_info()
            # SGLang gives loaders nothing where it has replicas of the model.
            self._takes_patches = PATCHER in info.custom_weight_loader and info.spread.data == 1
            log.info("engine_updates", takes_patches=self._takes_patches)
        return self._takes_patches

    async def _patched(self, weights: Replica, patch: Path, expected: Expected | Summed) -> bool:
        """Patch the paused engine; False: it must now load all tensors, because its elements are unknown."""
        try:
            await self._engine.patch_weights(patch, weights.policy_version, check=partial(self._verify, expected))
        except EngineUnreachable:
            raise
        except (EngineError, VerificationError) as error:
            log.warning("weights_patch_failed", policy_version=weights.policy_version, error=str(error))
            self._metrics.weight_updates.labels(outcome="no_patch").inc()
            weights.must_load_all()
            self._failed_patches += 1
            if self._failed_patches >= MAX_FAILED_PATCHES:
                self._takes_patches = False
            return False
        self._failed_patches = 0
        return True

    async def _load_files(self, weights: Replica, expected: Expected | Summed) -> None:
        """Let the paused engine load the files with what it lacks. Raises: EngineError, VerificationError."""
        if not self._takes_parts:
            weights.must_load_all()
        directory = self._work_directory / LOADED / f"version-{weights.policy_version}"
        try:
            await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
            num_bytes = await asyncio.to_thread(weights.files.link, directory, weights.unloaded())
        except OSError as error:
            raise self._no_room(weights, error) from error
        log.debug("weights_linked", policy_version=weights.policy_version, num_bytes=num_bytes)
        check = partial(self._verify, expected)
        try:
            await self._engine.update_weights_from_disk(directory, weights.policy_version, check=check)
        except (EngineError, VerificationError):
            # Some engines rearrange the weights that they load, and cannot load a part: from now on they get all tensors.
            self._takes_parts = self._takes_parts and weights.loads_all
            raise

    @staticmethod
    def _no_room(weights: Replica, error: OSError) -> ServiceError:
        return ServiceError(
            f"the engine's files of policy version {weights.policy_version} cannot be written: {error}; make room "
            "there or choose another rollout.weights_directory"
        )

    async def _verify(self, expected: Expected | Summed) -> None:
        """Compare checksums. The engine's client has already asked which version the engine serves."""
        self.require(await self._verifier.verify(expected))

    @staticmethod
    def require(verification: Verification) -> None:
        """Raises: VerificationError when the weights differ."""
        if not verification.ok:
            raise VerificationError(
                f"the engine's weights differ from what was sent: mismatched {verification.mismatched[:5]}, "
                f"missing {verification.missing[:5]}, never sent {verification.unsent[:5]}"
            )
        if verification.unverified:
            log.warning("tensors_unverified", number=len(verification.unverified), names=verification.unverified[:5])
