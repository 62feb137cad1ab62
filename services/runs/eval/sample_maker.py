"""Takes samples: plays episodes of a set through a rollout's code, many in parallel, on one engine."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np
from prometheus_client import CollectorRegistry

from gspo_protocol.codec import Array, decode, encode
from gspo_protocol.messages import GroupSampling, Lease, Message
from gspo_protocol.messages.journal import journal_array
from gspo_protocol.messages.pieces import NO_PIECES, piece_arrays
from gspo_services.broker.ledger import trajectory_seed
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.model_reward import ModelUse
from gspo_services.rollout.opening import Policy, open_episodes, open_user_code
from gspo_services.rollout.sglang import EngineError, GenerateRequest, OutputPiece
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.rollout.work import EpisodeFailed, EpisodeRunner, PolicyEngine
from gspo_services.runs.eval.samples import ScoredSample
from gspo_services.runs.eval.sets import ScoredSet, ScoredTask
from gspo_services.runs.local_play import LocalIntake, mask_of, places_of, told
from gspo_services.shared.eval_metrics import MAX_SAMPLES
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import ended_by, flatten
from gspo_services.shared.schedules import sampling_of
from gspo_services.shared.settings import Settings
from gspo_services.tasks.worker.failures import kind_of, said

NAME: Final = "eval"
LEASE_S: Final = 1.0
"""Nobody renews these leases."""


class BusyEngine:
    """The ``PolicyEngine`` of samples: counts the seconds in which it works."""

    def __init__(self, engine: PolicyEngine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._num_running = 0
        self._since_s = 0.0
        self._busy_s = 0.0

    def taken_s(self) -> float:
        """Return the seconds since the last call in which at least one answer was under way."""
        now = self._clock.now()
        busy = self._busy_s + (now - self._since_s if self._num_running else 0.0)
        self._busy_s, self._since_s = 0.0, now
        return busy

    async def stop_generating(self) -> None:
        """See ``Engine.stop_generating``."""
        await self._engine.stop_generating()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[OutputPiece, None]:
        """See ``Engine.generate``."""
        if not self._num_running:
            self._since_s = self._clock.now()
        self._num_running += 1
        try:
            async with aclosing(self._engine.generate(request)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._busy_s += self._clock.now() - self._since_s


class SampleIntake:
    """The ``EpisodeIntake`` of parallel episodes: takes what each sends, as a run's broker does."""

    def __init__(self, settings: Settings, vocabulary: int) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        self._open: dict[int, LocalIntake] = {}

    def begin(self, lease: Lease) -> LocalIntake:
        """Return the intake for one more episode, until ``end``."""
        intake = LocalIntake(self._settings, self._vocabulary)
        intake.begin(lease)
        self._open[lease.trajectory_id] = intake
        return intake

    def end(self, lease: Lease) -> None:
        """Take note that the episode sends nothing more."""
        del self._open[lease.trajectory_id]

    async def send(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        """See ``LocalIntake.send``."""
        trajectory_id: int = message.trajectory_id  # type: ignore[attr-defined]  # Every message of an episode has it.
        await self._open[trajectory_id].send(message, arrays)

    async def acknowledged(self) -> None:
        """Return at once: everything sent was taken."""


@dataclass(frozen=True, kw_only=True)
class SampleMaker:
    """Takes samples of one set."""

    chosen: ScoredSet
    runner: EpisodeRunner
    intake: SampleIntake
    engine: BusyEngine
    tokenizer: ChatTokenizer
    clock: Clock

    async def take(self, todo: Iterator[tuple[ScoredTask, int]], done: Callable[[ScoredSample], None]) -> None:
        """Take the samples of ``todo``, rollout.max_running at a time, and hand each to ``done`` when it has ended.

        produces:     samples, through ``done``, which makes them durable
        waits for:    the engine, user code and rewards, of as many episodes as run side by side
        unblocked by: tokens, a reward or its deadline; the end of the engine, which ends it
        Raises: ServiceError when the engine fails; ConfigurationError for what concerns every episode; OSError.
        """
        with ended_by(EngineError, what="the engine failed: "):
            async with asyncio.TaskGroup() as tasks:
                for worker in range(self.chosen.settings.rollout.max_running):
                    tasks.create_task(self._work(todo, done), name=f"sampling-{worker}")

    async def _work(self, todo: Iterator[tuple[ScoredTask, int]], done: Callable[[ScoredSample], None]) -> None:
        for task, number in todo:
            for attempt in range(self.chosen.settings.broker.max_attempts):
                sample = await self._sample(task, number, attempt)
                if sample.end != "failed":
                    break
            done(sample)

    async def _sample(self, task: ScoredTask, number: int, attempt: int) -> ScoredSample:
        settings = self.chosen.settings
        place = task.index * MAX_SAMPLES + number
        seed = trajectory_seed(settings.run.seed, place)
        lease, arrays = _lease(task, place, attempt, seed, self.chosen.terms.split, sampling_of(settings.sampling))
        intake, begin, failure = self.intake.begin(lease), self.clock.now(), ""
        try:
            async with asyncio.TaskGroup() as tasks:
                await self.runner.begin(lease, arrays, tasks).run()
        except* EpisodeFailed as errors:
            failure = told(flatten(errors)[0])
        finally:
            self.intake.end(lease)
        finish = None if failure else intake.finish
        if finish is None:
            failure = failure or "the episode ended without a reward"
        mask = mask_of(intake.chunks, None if finish is None else finish.discarded_turns)
        turns = self._texts([run.token_ids for runs in mask.sequences for run in runs if run.use == "trained"])
        answer = None
        if finish is not None and turns and self.chosen.environment is not None:
            try:
                answer = _vote(self.chosen.environment.answer(task.task, turns[-1]))
            # The user's own code, in which nobody else ends this task: whatever it raises fails only this sample.
            except BaseException as error:  # noqa: BLE001
                finish, failure = None, "\n".join([f"environment answer failed: {said(error)}", *places_of(error)])
        return ScoredSample(
            task=task.index,
            sample=number,
            seed=lease.seed,
            task_digest=task.digest,
            rating=task.rating,
            end="failed" if finish is None else finish.reason,
            reward=None if finish is None else sum(finish.turn_rewards),
            failure=failure,
            components={} if finish is None else finish.components,
            answer=answer,
            turns=turns,
            num_tokens=sum(mask.num_tokens(use) for use in ("trained", "context", "discarded")),
            num_action_tokens=mask.num_tokens("trained") + mask.num_tokens("discarded"),
            seconds=round(self.clock.now() - begin, 4),
            engine_s=round(self.engine.taken_s(), 6),
        )

    def _texts(self, turns: list[list[int]]) -> list[str]:
        stop_ids = self.tokenizer.stop_ids
        return [self.tokenizer.action_text([token for token in ids if token not in stop_ids]) for ids in turns]


def _vote(answer: object) -> str | None:
    """An environment's answer as its samples keep it. Raises: TypeError, UnicodeEncodeError for what no file holds."""
    if answer is None:
        return None
    if not isinstance(answer, str):
        raise TypeError(f"it returned an object of type {kind_of(answer)}: expected text, or None for no vote")
    return answer.encode().decode()


@asynccontextmanager
async def open_maker(
    chosen: ScoredSet, tokenizer: ChatTokenizer, engine: PolicyEngine, clock: Clock
) -> AsyncIterator[SampleMaker]:
    """Make a sampler for the set; the folder of its settings' run gets the logs of user code.

    Raises: ConfigurationError; EndpointError when the agents' endpoint cannot listen; ServiceError.
    """
    intake, busy, registry = (
        SampleIntake(chosen.settings, tokenizer.vocab_size),
        BusyEngine(engine, clock),
        CollectorRegistry(),
    )
    may_generate = asyncio.Event()
    may_generate.set()
    policy = Policy(
        tokenizer=tokenizer, engine=busy, broker=intake, may_generate=may_generate, metrics=RolloutMetrics(registry),
        clock=clock, wall_s=lambda: datetime.now(tz=UTC).timestamp(),
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        # A set with tasks of its own is measured by their own reward, where they have one.
        model: ModelUse = "needed" if chosen.terms.environment or chosen.terms.options else "always"
        user_code = await stack.enter_async_context(open_user_code(chosen.settings, NAME, policy.metrics, model=model))
        runner = await stack.enter_async_context(open_episodes(chosen.settings, policy, user_code, registry))
        yield SampleMaker(chosen=chosen, runner=runner, intake=intake, engine=busy, tokenizer=tokenizer, clock=clock)


def _lease(
    task: ScoredTask, place: int, attempt: int, seed: int, split: str, sampling: GroupSampling
) -> tuple[Lease, Mapping[str, Array]]:
    """The lease of a new episode, as it arrives at a rollout. Raises: ProtocolError for a task that no message holds."""
    lease = Lease(
        trajectory_id=place, epoch=attempt + 1, group_id=task.index, split="eval" if split == "eval" else "train",
        task=task.task, sampling=sampling, seed=seed, lease_s=LEASE_S, num_tokens=0, state=None, turn_done=False,
    )  # fmt: skip
    tokens = {"token_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)}
    arrays: dict[str, Array] = {**tokens, **piece_arrays([NO_PIECES]), **journal_array([])}
    received = decode([bytes(frame) for frame in encode(lease, arrays)])
    assert isinstance(received.message, Lease)
    return received.message, received.arrays
