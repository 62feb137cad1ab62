"""The environment loop: turns one lease into chunks and a Finish, for any environment."""

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeVar

import msgpack
import msgspec
import structlog

from gspo.tasks.environments import ChatMessage, Environment, RewardJob, Start, Step
from gspo_protocol.codec import Array
from gspo_protocol.errors import ProtocolError
from gspo_protocol.limits import MAX_STATE_BYTES
from gspo_protocol.messages import Finish, Lease, Plain
from gspo_protocol.messages.base import require_plain
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.model_reward import ModelReward, conversation
from gspo_services.rollout.sglang import EngineError, EngineRefused, GenerateRequest, SamplingParameters
from gspo_services.rollout.tokenizer import ChatTokenizer, Messages, TokenizerError
from gspo_services.rollout.trajectory import Trajectory
from gspo_services.rollout.work import EpisodeFailed, EpisodeIntake, PolicyEngine
from gspo_services.tasks.environments import DoorReason, RewardPool, Score, require_takeable, through_the_door
from gspo_services.tasks.worker.failures import described, is_a, kind_of, said
from gspo_services.tasks.worker.reward_value import number_of

log = structlog.get_logger()
T = TypeVar("T")


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
        """Run the episode to its end, whatever the environment and its rewards do.

        Raises: EpisodeFailed; EngineError. After a cancellation ``trajectory`` has the tokens that were not sent yet.
        """
        await through_the_door(self._run(lease, trajectory), self._refused, (EpisodeFailed, EngineError))

    async def _run(self, lease: Lease, trajectory: Trajectory) -> None:
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
        while (following := trajectory.next_chunk()) is not None:
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
        start = self._by_user("start", trajectory, lambda: _plain_start(self.environment.start(lease.task, lease.seed)))
        prompt = self._encoded(self.tokenizer.prompt_ids, start.messages)
        if len(prompt) >= lease.sampling.max_tokens:
            raise EpisodeFailed(
                f"the prompt has {len(prompt)} tokens, sampling.max_tokens is {lease.sampling.max_tokens}: raise it or "
                "leave such prompts out"
            )
        trajectory.state = start.state
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
            adapter=lease.sampling.adapter,
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
        # A copy: chunks under way share the state, and a rollout that repeats the step must begin with the same state.
        state = copy.deepcopy(trajectory.state)
        step = self._by_user("step", trajectory, lambda: _plain_step(self.environment.step(state, text)))
        if not isinstance(step.reward, RewardJob):
            reward = number_of(step.reward, "the reward of the environment's step")
            require_takeable([*trajectory.turn_rewards, reward], {})
            return step, Score(reward, {})
        result = await self.rewards.grade(step.reward.for_task(lease.task).for_turn(trajectory.action_ids))
        if result.failure is not None:
            # Also counted where it is worth 0 (reward.on_deadline).
            self.metrics.reward_failures.labels(failure=result.failure).inc()
        if result.reward is None and not (result.failure == "no_reward" and self.model is not None):
            raise EpisodeFailed(f"no reward: {result.failure}: {result.detail}")
        score = Score(result.reward or 0.0, result.components)
        await self._keep(trajectory, score)
        return step, score

    async def _keep(self, trajectory: Trajectory, score: Score) -> None:
        """Send the components of the turn's reward, once the broker is sure to take them."""
        journal = trajectory.graded(score.components) if score.components else None
        require_takeable([*trajectory.turn_rewards, score.reward], trajectory.components)
        if journal is not None:
            await self.broker.send(journal)

    def _text(self, action_ids: Sequence[int]) -> str:
        """What the policy said, without stop tokens."""
        stop_ids = self.tokenizer.stop_ids
        return self.tokenizer.action_text([token for token in action_ids if token not in stop_ids])

    async def _scored_by_model(self, model: ModelReward, lease: Lease, trajectory: Trajectory, own: Score) -> Score:
        """The last turn's reward with the model's score of the whole conversation. Raises: EpisodeFailed."""
        actions = [self._text(trajectory.action_of(turn)) for turn in range(trajectory.turn + 1)]

        def played() -> list[ChatMessage]:
            start = _plain_start(self.environment.start(lease.task, lease.seed))
            return conversation(start, actions, lambda state, action: _plain_step(self.environment.step(state, action)))

        verdict = await model.score(self._by_user("step", trajectory, played))
        if verdict.is_cut:
            self.metrics.reward_failures.labels(failure="truncated").inc()
        if verdict.score is None:
            self.metrics.reward_failures.labels(failure=verdict.failure).inc()
            raise EpisodeFailed(f"no reward of the reward model: {verdict.failure}: {verdict.detail}")
        score = model.added(own, trajectory.turn_rewards, trajectory.components, verdict.score)
        await self._keep(trajectory, score)
        return score

    def _refused(self, reason: DoorReason, detail: str) -> NoReturn:
        """Count an episode without a reward, and end it."""
        self.metrics.reward_failures.labels(failure=reason).inc()
        raise EpisodeFailed(f"no reward: {detail}")

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
        # Not text, or not Unicode.
        except Exception as error:
            raise EpisodeFailed(f"the environment's messages have no tokens: {described(error)}") from error
        if not tokens:
            raise EpisodeFailed(f"the chat template renders {len(messages)} messages to 0 tokens")
        return tokens

    def _by_user(self, what: str, trajectory: Trajectory, call: Callable[[], T]) -> T:
        """What the user's environment code returns: whatever is raised in it fails this episode and is reported with it."""
        try:
            return call()
        except EpisodeFailed:
            raise
        # Also what would end a process or a task: nobody but the user's code raises it here.
        except BaseException as error:
            log.warning("environment_failed", call=what, trajectory_id=trajectory.trajectory_id, error=described(error))
            reason: DoorReason = "memory" if is_a(error, MemoryError) else "raised"
            self.metrics.reward_failures.labels(failure=reason).inc()
            raise EpisodeFailed(f"environment {what} failed: {said(error)}") from error


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


def _plain_start(start: object) -> Start:
    if not isinstance(start, Start):
        raise TypeError(f"it returned an object of type {kind_of(start)}: expected a Start of gspo.tasks.environments")
    return Start(state=_as_it_travels(start.state), messages=_listed(start.messages))


def _plain_step(step: object) -> Step:
    """What the environment's step returned, with no code of the user's left in it, except in the reward and in messages."""
    if not isinstance(step, Step):
        raise TypeError(f"it returned an object of type {kind_of(step)}: expected a Step of gspo.tasks.environments")
    return Step(state=_as_it_travels(step.state), messages=_listed(step.messages), reward=step.reward, done=bool(step.done))


def _listed(messages: object) -> list[ChatMessage]:
    if not isinstance(messages, list | tuple):
        raise TypeError(f"its messages are an object of type {kind_of(messages)}: expected a list")
    # Past what a class of the user's may do when it is iterated over.
    whole = list.__iter__(messages) if isinstance(messages, list) else tuple.__iter__(messages)
    return list(whole)


def _as_it_travels(state: Plain) -> Plain:
    """Return ``state`` as another rollout receives it with the lease. Raises: EpisodeFailed when it does not fit a chunk."""
    try:
        packed = msgpack.packb(state, use_bin_type=True)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EpisodeFailed(f"the environment's state is not plain data: {error}") from error
    if len(packed) > MAX_STATE_BYTES:
        raise EpisodeFailed(f"the environment's state has {len(packed)} bytes, {MAX_STATE_BYTES} allowed (MAX_STATE_BYTES)")
    try:
        travelled = msgspec.convert(msgpack.unpackb(packed, raw=False, strict_map_key=True), Plain)
        require_plain("state", travelled)
    except (ValueError, msgspec.ValidationError) as error:
        raise EpisodeFailed(f"the environment's state is not plain data: {error}") from error
    return travelled
