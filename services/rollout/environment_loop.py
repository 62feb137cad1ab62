"""The environment loop: turns one lease into chunks and a Finish, for any environment."""

import asyncio
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Literal

import msgpack
import msgspec
import structlog

from gspo.tasks.environments import Environment, RewardJob, Step
from gspo_protocol.codec import Array
from gspo_protocol.errors import ProtocolError
from gspo_protocol.limits import MAX_STATE_BYTES
from gspo_protocol.messages import Finish, Lease, Plain
from gspo_protocol.messages.base import require_components, require_plain, require_rewards
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.model_reward import ModelReward, conversation
from gspo_services.rollout.sglang import EngineError, EngineRefused, GenerateRequest, SamplingParameters
from gspo_services.rollout.tokenizer import ChatTokenizer, Messages, TokenizerError
from gspo_services.rollout.trajectory import Trajectory
from gspo_services.rollout.work import EpisodeFailed, EpisodeIntake, PolicyEngine
from gspo_services.tasks.environments import RewardPool, Score
from gspo_services.tasks.worker.reward_value import UnscoredError, UnscoredReason, number_of, require_count

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class EnvironmentLoop:
    """Everything that an environment's episode needs.

    produces:     Chunk and Finish on the work channel
    waits for:    the engine and its weight updates; the reward pool; credit on the work channel
    unblocked by: tokens; a reward or its deadline; the broker's acknowledgements
    """

    environment: Environment
    tokenizer: ChatTokenizer
    engine: PolicyEngine
    rewards: RewardPool
    model: ModelReward | None = None
    """Scores each episode when it ends."""
    broker: EpisodeIntake
    may_generate: asyncio.Event
    """Cleared while the engine's weights are replaced: a new request waits, a request under way continues afterwards."""
    max_turns: int
    """Turns that the broker takes of one trajectory (``gspo_protocol.limits.trajectory_limits``)."""
    chunk_tokens: int
    metrics: RolloutMetrics

    def begin(self, lease: Lease, arrays: Mapping[str, Array], tasks: asyncio.TaskGroup) -> "EnvironmentEpisode":
        """See ``EpisodeRunner.begin``."""
        return EnvironmentEpisode(self, lease, Trajectory(lease, arrays))

    async def stop_generating(self) -> None:
        """See ``EpisodeRunner.stop_generating``."""
        await self.engine.stop_generating()

    async def run(self, lease: Lease, trajectory: Trajectory) -> None:
        """Run the episode to its end.

        Raises: EpisodeFailed; EngineError. After a cancellation ``trajectory`` has the tokens that were not sent yet.
        """
        if trajectory.state is None:
            self._start(lease, trajectory)
        while True:
            if not trajectory.turn_done:
                await self._act(lease, trajectory)
            # Send before the step: a rollout that resumes from here repeats the step and gets the same result.
            await self.send_chunk(trajectory)
            cut = int(trajectory.token_ids[-1]) not in self.tokenizer.stop_ids
            step, score = await self._step(lease, trajectory)
            observation = [] if step.done or cut else self._observation(lease, trajectory, step)
            if not observation:
                break
            trajectory.end_turn(score.reward)
            trajectory.state = step.state
            trajectory.observe(observation)
            self.metrics.tokens.labels(kind="observation").inc(len(observation))
        if self.model is not None:
            score = await self._scored_by_model(self.model, lease, trajectory, score)
        trajectory.end_turn(score.reward)
        await self._finish(trajectory, "done" if step.done and not cut else "length")

    async def send_chunk(self, trajectory: Trajectory) -> None:
        """Send the tokens that were not sent yet."""
        following = trajectory.next_chunk()
        if following is not None:
            chunk, arrays = following
            try:
                await self.broker.send(chunk, arrays)
            except ProtocolError as error:
                raise EpisodeFailed(f"the generated tokens do not make a valid message: {error}") from error
            trajectory.sent(chunk)
            self.metrics.chunks.inc()

    async def _finish(self, trajectory: Trajectory, reason: Literal["done", "length"]) -> None:
        await self.broker.send(
            Finish(
                trajectory_id=trajectory.trajectory_id,
                epoch=trajectory.epoch,
                num_tokens=trajectory.num_tokens,
                reason=reason,
                turn_rewards=list(trajectory.turn_rewards),
                components=trajectory.components,
            )
        )
        self.metrics.episodes.labels(outcome=reason).inc()

    def _start(self, lease: Lease, trajectory: Trajectory) -> None:
        with _user_code("start", trajectory):
            start = self.environment.start(lease.task, lease.seed)
        prompt = self._encoded(self.tokenizer.prompt_ids, start.messages)
        if len(prompt) >= lease.sampling.max_tokens:
            raise EpisodeFailed(
                f"the prompt has {len(prompt)} tokens, sampling.max_tokens is {lease.sampling.max_tokens}: raise it or "
                "leave such prompts out"
            )
        trajectory.state = _as_it_travels(start.state)
        trajectory.observe(prompt)
        self.metrics.tokens.labels(kind="observation").inc(len(prompt))

    async def _act(self, lease: Lease, trajectory: Trajectory) -> None:
        """Sample the rest of the current turn: up to a stop token or a length limit."""
        action = trajectory.action_ids
        # A turn that was handed over after its stop token is complete: nothing may follow.
        complete = bool(action) and action[-1] in self.tokenizer.stop_ids
        limits = lease.sampling
        room = min(limits.max_turn_tokens - len(action), limits.max_tokens - trajectory.num_tokens)
        if not complete and room > 0:
            await self._generate(lease, trajectory, room)
        trajectory.turn_done = True

    async def _generate(self, lease: Lease, trajectory: Trajectory, room: int) -> None:
        sampling = SamplingParameters(
            max_new_tokens=room,
            temperature=lease.sampling.temperature,
            top_p=lease.sampling.top_p,
            top_k=lease.sampling.top_k,
            stop_token_ids=tuple(sorted(self.tokenizer.stop_ids)),
            seed=lease.seed,
        )
        rid = f"{trajectory.trajectory_id}-{trajectory.epoch}-{trajectory.turn}"
        request = GenerateRequest(rid=rid, input_ids=trajectory.token_ids, sampling=sampling)
        await self.may_generate.wait()
        try:
            async with aclosing(self.engine.generate(request)) as pieces:
                async for piece in pieces:
                    trajectory.act(piece)
                    self.metrics.tokens.labels(kind="action").inc(len(piece.token_ids))
                    if piece.finish_reason == "abort":
                        raise EngineError(f"generation {rid} was aborted by the engine")
                    if piece.finish_reason is None and trajectory.num_unsent >= self.chunk_tokens:
                        await self.send_chunk(trajectory)
        except EngineRefused as error:
            # The fault is in this request: another engine would refuse it as well.
            raise EpisodeFailed(f"the engine refused the request: {error}") from error

    async def _step(self, lease: Lease, trajectory: Trajectory) -> tuple[Step, Score]:
        """The environment's answer to the finished turn, with its reward. ``trajectory`` does not change."""
        assert trajectory.state is not None
        text = self._text(trajectory.action_ids)
        with _user_code("step", trajectory):
            # A copy: chunks under way share the state, and a rollout that repeats the step must begin with the same state.
            step = self.environment.step(copy.deepcopy(trajectory.state), text)
        step = msgspec.structs.replace(step, state=_as_it_travels(step.state))
        if isinstance(step.reward, RewardJob):
            result = await self.rewards.grade(step.reward.for_task(lease.task).for_turn(trajectory.action_ids))
            if result.failure is not None:
                # Also counted where it is worth 0 (reward.on_deadline).
                self.metrics.reward_failures.labels(failure=result.failure).inc()
            if result.reward is None and not (result.failure == "no_reward" and self.model is not None):
                raise EpisodeFailed(f"no reward: {result.failure}: {result.detail}")
            if result.components:
                await self._keep_components(trajectory, result.components)
            return step, Score(self._within_limits(trajectory, result.reward or 0.0), result.components)
        with _user_code("step", trajectory):
            reward = self._read(step.reward)
        return step, Score(self._within_limits(trajectory, reward), {})

    def _text(self, action_ids: Sequence[int]) -> str:
        """What the policy said, without stop tokens."""
        stop_ids = self.tokenizer.stop_ids
        return self.tokenizer.action_text([token for token in action_ids if token not in stop_ids])

    async def _scored_by_model(self, model: ModelReward, lease: Lease, trajectory: Trajectory, own: Score) -> Score:
        """The last turn's reward with the model's score of the whole conversation. Raises: EpisodeFailed."""
        with _user_code("step", trajectory):
            start = self.environment.start(lease.task, lease.seed)
            actions = [self._text(trajectory.action_of(turn)) for turn in range(trajectory.turn + 1)]
            messages = conversation(self.environment, start, actions, _as_it_travels)
        said = await model.score(messages)
        if said.is_cut:
            self.metrics.reward_failures.labels(failure="truncated").inc()
        if said.score is None:
            self.metrics.reward_failures.labels(failure=said.failure).inc()
            raise EpisodeFailed(f"no reward of the reward model: {said.failure}: {said.detail}")
        try:
            score = model.added(own, trajectory.turn_rewards, trajectory.components, said.score)
        except ValueError as error:
            raise self._unscored("bad_component", error) from error
        await self._keep_components(trajectory, score.components)
        return Score(self._within_limits(trajectory, score.reward), score.components)

    async def _keep_components(self, trajectory: Trajectory, components: Mapping[str, float]) -> None:
        """Raises: EpisodeFailed when the components of all turns together are too many, or too large."""
        journal = trajectory.graded(components)
        total = trajectory.components
        try:
            require_count(len(total))
            require_components("components", total)
        except UnscoredError as error:
            raise self._unscored(error.reason, error) from error
        except ValueError as error:
            raise self._unscored("not_finite", error) from error
        await self.broker.send(journal)

    def _read(self, reward: object) -> float:
        """Read the reward that the environment's step returned. Raises: EpisodeFailed when it is not one."""
        try:
            return number_of(reward, "the reward of the environment's step")
        except UnscoredError as error:
            raise self._unscored(error.reason, error) from error

    def _within_limits(self, trajectory: Trajectory, reward: float) -> float:
        """The turn's reward. Raises: EpisodeFailed when the broker will not take it after those of the turns before."""
        try:
            require_rewards("turn_rewards", [*trajectory.turn_rewards, reward])
        except ValueError as error:
            raise self._unscored("not_finite", error) from error
        return reward

    def _unscored(self, reason: UnscoredReason, error: ValueError) -> EpisodeFailed:
        """Count an episode without a reward, and return its failure."""
        self.metrics.reward_failures.labels(failure=reason).inc()
        return EpisodeFailed(f"no reward: {error}")

    def _observation(self, lease: Lease, trajectory: Trajectory, step: Step) -> list[int]:
        """Return the tokens of the environment's messages; empty if there is no room for them and an answer."""
        if trajectory.turn + 1 >= self.max_turns:
            return []
        tokens = self._encoded(self.tokenizer.observation_ids, step.messages)
        return tokens if trajectory.num_tokens + len(tokens) < lease.sampling.max_tokens else []

    def _encoded(self, encode: Callable[[Messages], list[int]], messages: Messages) -> list[int]:
        try:
            tokens = encode(messages)
        except TokenizerError as error:
            raise EpisodeFailed(str(error)) from error
        if not tokens:
            raise EpisodeFailed(f"the chat template renders {len(messages)} messages to 0 tokens")
        return tokens


class EnvironmentEpisode:
    """One episode; see ``EpisodeWork``."""

    is_in_user_code = False

    def __init__(self, loop: EnvironmentLoop, lease: Lease, trajectory: Trajectory) -> None:
        self._loop = loop
        self._lease = lease
        self._trajectory = trajectory

    @property
    def num_tokens(self) -> int:
        return self._trajectory.num_tokens

    async def run(self) -> None:
        """See ``EpisodeWork.run``."""
        await self._loop.run(self._lease, self._trajectory)

    async def send_rest(self) -> None:
        """See ``EpisodeWork.send_rest``."""
        await self._loop.send_chunk(self._trajectory)


@contextmanager
def _user_code(what: str, trajectory: Trajectory) -> Iterator[None]:
    """Run the user's environment code: any error in it fails this episode and is reported with it."""
    try:
        yield
    except EpisodeFailed:
        raise
    except Exception as error:
        log.exception("environment_failed", call=what, trajectory_id=trajectory.trajectory_id)
        raise EpisodeFailed(f"environment {what} failed: {type(error).__name__}: {error}") from error


def _as_it_travels(state: Plain) -> Plain:
    """Return ``state`` as another rollout receives it with the lease. Raises: EpisodeFailed when it does not fit a chunk."""
    try:
        packed = msgpack.packb(state, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise EpisodeFailed(f"the environment's state is not plain data: {error}") from error
    if len(packed) > MAX_STATE_BYTES:
        raise EpisodeFailed(f"the environment's state has {len(packed)} bytes, {MAX_STATE_BYTES} allowed (MAX_STATE_BYTES)")
    try:
        travelled = msgspec.convert(msgpack.unpackb(packed, raw=False, strict_map_key=True), Plain)
        require_plain("state", travelled)
    except (ValueError, msgspec.ValidationError) as error:
        raise EpisodeFailed(f"the environment's state is not plain data: {error}") from error
    return travelled
