"""An engine in virtual time that knows which weights it really has, and which of them made each token."""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from gspo.tasks.environments import RewardJob
from gspo_protocol.messages import TensorInfo, VersionRun
from gspo_services.rollout.sglang.client import EngineError
from gspo_services.rollout.sglang.generation import FinishReason, GenerateRequest, OutputPiece
from gspo_services.rollout.sglang.server_info import RankChecksums, ServerInfo
from gspo_services.shared.weights import PATCHER
from gspo_services.shared.weights.checksums import sha256_checksum
from gspo_services.tasks.environments import RewardResult, score_of
from tests.simulation.audit.audit import Audit
from tests.simulation.episodes import (
    FIRST_WORD,
    NUM_WORDS,
    STEPS,
    STOP,
    VOCABULARY,
    compared,
    components_of,
    logprob_of,
    reward_of,
)
from tests.simulation.loop import Process
from tests.support.engines.scripted_engine import Loaded, patched, read_directory


class SimEngine:
    """The part of ``gspo_services.rollout.sglang.client.Engine`` that the rollout uses; dies with its rollout.

    The weather sets ``fails``, ``fails_update``, ``damages`` and ``lies``: how many next calls go wrong. It sets ``dead``
    for good.
    """

    def __init__(self, process: Process, rng: random.Random, audit: Audit, *, token_s: float, mean_tokens: int) -> None:
        self._process = process
        self._rng = rng
        self._audit = audit
        self._token_s = token_s
        self._mean_tokens = mean_tokens
        self._running = asyncio.Event()
        self._running.set()
        self._loaded: list[tuple[TensorInfo, bytes]] = []
        self._said_version: int | None = None
        self._true_version: int | None = None
        """None: weights that no learner published."""
        self._unknown = False
        # Of its own, so that the weather of a seed stays what it was.
        self._takes_patches = random.Random(f"patches {process.session}").random() < 0.5
        self.num_live = 0
        self.fails = 0
        self.fails_update = 0
        self.damages = 0
        self.lies = 0
        self.dead = False

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[OutputPiece, None]:
        if int(request.rid.partition("-")[0]) in self._audit.deadly:
            self._audit.dies(self._process)
            await asyncio.Event().wait()
        generation = self._audit.generates(request)
        left = request.sampling.max_new_tokens
        self.num_live += 1
        try:
            while True:
                await self._running.wait()
                tokens, finish = self._sample(left)
                before = self._true_version
                await asyncio.sleep(self._token_s * len(tokens))
                await self._running.wait()
                self._check()
                # After an update meanwhile, some tokens were made before it and the rest after.
                split = len(tokens) if before == self._true_version else self._rng.randint(0, len(tokens))
                piece = self._piece(tokens, finish, [before] * split + [self._true_version] * (len(tokens) - split))
                lie = self._lie()
                if lie == "token":
                    piece.token_ids[-1] = VOCABULARY
                self._audit.generated(self._process, generation, piece)
                if lie == "logprob":
                    piece.logprobs[-1] = -1e30
                elif lie == "version":
                    runs = [VersionRun(0, run.num_tokens) for run in piece.version_runs]
                    piece = replace(piece, version_runs=runs)
                left -= len(tokens)
                yield piece
                if finish is not None:
                    return
        finally:
            self.num_live -= 1

    async def stop_generating(self) -> None:
        """It does not answer in time."""

    def _lie(self) -> str:
        """What is wrong with the next piece; empty: nothing."""
        if not self.lies:
            return ""
        self.lies -= 1
        lie = ("token", "logprob", "version")[self.lies % 3]
        self._audit.happened[f"engine lied: {lie}"] += 1
        return lie

    def _check(self) -> None:
        if self.dead:
            raise EngineError("the server is gone")
        if self._unknown:
            raise EngineError("a weight update failed, so the engine's weights are unknown")
        if self.fails:
            self.fails -= 1
            self._audit.happened["engine failed"] += 1
            raise EngineError("scripted failure")

    def _sample(self, left: int) -> tuple[list[int], FinishReason | None]:
        tokens: list[int] = []
        for _ in range(min(self._rng.randint(1, 4), left)):
            if self._rng.random() < 1 / self._mean_tokens:
                return [*tokens, STOP], "stop"
            tokens.append(self._rng.randrange(FIRST_WORD, FIRST_WORD + NUM_WORDS))
        return tokens, "length" if len(tokens) == left else None

    def _piece(self, tokens: list[int], finish: FinishReason | None, versions: list[int | None]) -> OutputPiece:
        runs: list[VersionRun] = []
        logprobs = []
        for version in versions:
            true = 0 if version is None else version
            logprobs.append(logprob_of(true, self._rng.randrange(STEPS)))
            if runs and runs[-1].version == true:
                runs[-1] = VersionRun(true, runs[-1].num_tokens + 1)
            else:
                runs.append(VersionRun(true, 1))
        if len(runs) > 1:
            self._audit.happened["weights changed within a piece"] += 1
        return OutputPiece(
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            version_runs=runs,
            finish_reason=finish,
        )

    # --- weights ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        await self._answer()
        self._running.clear()

    async def resume(self) -> None:
        await self._answer()
        self._running.set()

    async def update_weights_from_disk(
        self, path: Path, version: int, *, check: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        # Tensors that are not in the directory stay, as in SGLang.
        await self._update(version, check, lambda loaded: {**loaded, **_read(path)})

    async def patch_weights(self, path: Path, version: int, *, check: Callable[[], Awaitable[None]] | None = None) -> None:
        await self._update(version, check, lambda loaded: patched(loaded, path)[0])
        self._audit.happened["weights patched in place"] += 1

    async def _update(
        self,
        version: int,
        check: Callable[[], Awaitable[None]] | None,
        read: Callable[[dict[str, Loaded]], dict[str, Loaded]],
    ) -> None:
        assert not self._running.is_set(), "weights are replaced while the engine generates"
        self._unknown = True
        self._true_version = None
        self._audit.passes("loading")
        if self.num_live:
            self._audit.happened["weights replaced under episodes"] += 1
        await asyncio.sleep(self._rng.uniform(0.05, 0.4))
        if self.fails_update or self.dead:
            self.fails_update = max(0, self.fails_update - 1)
            self._audit.happened["engine failed in an update"] += 1
            raise EngineError("scripted failure in the middle of an update")
        self._loaded = list(read({each[0].name: each for each in self._loaded}).values())
        self._said_version = version
        self._unknown = False
        if self.damages:
            self.damages -= 1
            self._audit.happened["weights damaged"] += 1
            info, data = self._loaded[0]
            self._loaded[0] = (info, bytes([data[0] ^ 1]) + data[1:])
        content = b"".join(data for _, data in sorted(self._loaded, key=lambda each: each[0].name))
        self._true_version = self._audit.version_of(version, content)
        self._audit.loaded(self._process.session, self._true_version)
        if check is not None:
            await check()

    async def weight_version(self) -> int | None:
        await self._answer()
        return self._said_version

    async def weights_checksums(self) -> list[RankChecksums]:
        await self._answer()
        return [RankChecksums(checksums={info.name: sha256_checksum([data]) for info, data in self._loaded})]

    async def server_info(self) -> ServerInfo:
        await self._answer()
        return ServerInfo(
            version="0", device="cpu", dtype="float32", tp_size=1, model_path="simulated",
            custom_weight_loader=[PATCHER] if self._takes_patches else [],
        )  # fmt: skip

    async def _answer(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.001, 0.01))
        if self.dead:
            raise EngineError("the server is gone")


def _read(path: Path) -> dict[str, tuple[TensorInfo, bytes]]:
    return {name: (info, data) for name, info, data in read_directory(path)}


class SimRewards:
    """Stands in for the reward pool; ``failing`` is the probability that a reward cannot be computed, or is
    larger than can be trained on."""

    def __init__(self, rng: random.Random, audit: Audit) -> None:
        self._rng = rng
        self._audit = audit
        self.failing = 0.0
        self._num_failed = 0

    async def grade(self, job: RewardJob, group_size: int | None = None) -> RewardResult:
        await asyncio.sleep(self._rng.uniform(0.05, 0.5))
        if self._rng.random() < self.failing:
            self._audit.happened["reward failed"] += 1
            self._num_failed += 1
            if self._num_failed % 2:
                self._audit.happened["reward absurd"] += 1
                return RewardResult(reward=1e300, of_answers=[RewardResult(reward=1e300)] * (group_size or 0))
            return RewardResult(reward=None, failure="deadline", detail="simulated")
        if group_size is not None:
            self._audit.happened["group compared"] += 1
            completions, rewards = job.arguments["completions"], job.arguments["rewards"]
            assert isinstance(completions, list)
            assert isinstance(rewards, list)
            found = compared([str(each) for each in completions], [float(str(each)) for each in rewards])
            return RewardResult(reward=None, of_answers=[_scored(each) for each in found])
        total = job.arguments["sum"]
        assert isinstance(total, int)
        return RewardResult(reward=reward_of(total), components=components_of(total))


def _scored(value: float | dict[str, float]) -> RewardResult:
    score = score_of(value, None)
    return RewardResult(reward=score.reward, components=score.components)
