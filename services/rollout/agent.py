"""The agent loop: turns one lease into chunks and a Finish, whatever the environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from protocol.messages import Finish, Lease
from services.environments.base import Environment, RewardJob, Step
from services.environments.reward_pool import RewardPool
from services.rollout.engine import Engine, EngineError
from services.rollout.generation import GenerateRequest
from services.rollout.generation import Sampling as EngineSampling
from services.rollout.metrics import RolloutMetrics
from services.rollout.tokens import ChatTokenizer
from services.rollout.trajectory import Trajectory
from services.runtime.peer import PeerClient
from services.runtime.settings import Sampling

log = structlog.get_logger()


class EpisodeFailed(RuntimeError):
    """The episode cannot go on for a reason of its own; its lease is released as failed, with this text."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """Everything that an episode needs.

    produces:     Chunk and Finish on the work channel
    waits for:    the engine; the reward pool; credit on the work channel
    unblocked by: tokens; a reward or its deadline; the broker's acknowledgements
    """

    environment: Environment
    tokenizer: ChatTokenizer
    engine: Engine
    rewards: RewardPool
    broker: PeerClient
    sampling: Sampling
    chunk_tokens: int
    metrics: RolloutMetrics

    async def run(self, lease: Lease, arrays: Mapping[str, np.ndarray[Any, Any]], trajectory: Trajectory) -> None:
        """Run the episode to its end.

        Raises: EpisodeFailed; EngineError. Cancelled: ``trajectory`` holds what was not sent yet.
        """
        if trajectory.state is None:
            self._start(lease, trajectory)
        while True:
            cut = not trajectory.turn_done and await self._act(lease, trajectory)
            step = await self._step(trajectory)
            if step.done or cut or not self._observe(trajectory, step):
                break
        await self.send_chunk(trajectory)
        reason = "done" if step.done else "length"
        await self.broker.send(
            Finish(
                trajectory_id=trajectory.trajectory_id,
                epoch=trajectory.epoch,
                num_tokens=trajectory.num_tokens,
                reason="done" if reason == "done" else "length",
                turn_rewards=list(trajectory.turn_rewards),
            )
        )
        self.metrics.episodes.labels(outcome=reason).inc()

    async def send_chunk(self, trajectory: Trajectory) -> None:
        """Stream what was not sent yet."""
        taken = trajectory.take_chunk()
        if taken is not None:
            await self.broker.send(*taken)
            self.metrics.chunks.inc()

    def _start(self, lease: Lease, trajectory: Trajectory) -> None:
        start = self.environment.start(lease.task, lease.seed)
        prompt = self.tokenizer.prompt_ids(start.messages)
        if len(prompt) >= self.sampling.max_tokens:
            raise EpisodeFailed(
                f"the prompt has {len(prompt)} tokens, sampling.max_tokens is {self.sampling.max_tokens}: raise it or leave "
                "such prompts out"
            )
        trajectory.state = start.state
        trajectory.observe(prompt)
        self.metrics.tokens.labels(kind="observation").inc(len(prompt))

    async def _act(self, lease: Lease, trajectory: Trajectory) -> bool:
        """Sample the rest of the current turn; True when it was cut by a length limit."""
        room = min(
            self.sampling.max_turn_tokens - len(trajectory.action_ids), self.sampling.max_tokens - trajectory.num_tokens
        )
        stopped = False
        if room > 0:
            sampling = EngineSampling(
                max_new_tokens=room,
                temperature=self.sampling.temperature,
                stop_token_ids=tuple(sorted(self.tokenizer.stop_ids)),
                seed=lease.seed,
            )
            rid = f"{trajectory.trajectory_id}-{trajectory.epoch}-{trajectory.turn}"
            request = GenerateRequest(rid=rid, input_ids=trajectory.token_ids, sampling=sampling)
            async for piece in self.engine.generate(request):
                versions = [run.version for run in piece.version_runs for _ in range(run.num_tokens)]
                trajectory.act(piece.token_ids.tolist(), piece.logprobs.tolist(), versions)
                self.metrics.tokens.labels(kind="action").inc(len(versions))
                if piece.finish_reason == "abort":
                    raise EngineError(f"generation {rid} was aborted by the engine")
                stopped = piece.finish_reason == "stop"
                if trajectory.num_unsent >= self.chunk_tokens and not stopped:
                    await self.send_chunk(trajectory)
        trajectory.turn_done = True
        return not stopped

    async def _step(self, trajectory: Trajectory) -> Step:
        """The environment's answer to the finished turn, with its reward."""
        assert trajectory.state is not None
        action = trajectory.action_ids
        stop_ids = self.tokenizer.stop_ids
        text = self.tokenizer.action_text([token for token in action if token not in stop_ids])
        try:
            step = self.environment.step(trajectory.state, text)
        # The environment is the user's own code: whatever it raises is about this episode, and is reported with it.
        except Exception as error:
            log.exception("environment_failed", trajectory_id=trajectory.trajectory_id)
            raise EpisodeFailed(f"environment step failed: {type(error).__name__}: {error}") from error
        reward = step.reward
        if isinstance(reward, RewardJob):
            # The reward can take long: what the policy made is made durable first.
            await self.send_chunk(trajectory)
            result = await self.rewards.grade(reward)
            if result.reward is None:
                self.metrics.reward_failures.labels(failure=result.failure).inc()
                raise EpisodeFailed(f"no reward: {result.failure}: {result.detail}")
            reward = result.reward
        trajectory.end_turn(reward)
        trajectory.state = step.state
        return step

    def _observe(self, trajectory: Trajectory, step: Step) -> bool:
        """Append the environment's messages; False when there is no room for them and an answer."""
        last = trajectory.token_ids[-1]
        tokens = self.tokenizer.observation_ids(step.messages, after_stop=last in self.tokenizer.stop_ids)
        if trajectory.num_tokens + len(tokens) >= self.sampling.max_tokens:
            return False
        trajectory.observe(tokens)
        self.metrics.tokens.labels(kind="observation").inc(len(tokens))
        return True
