"""Plays episodes of a configuration in this process, through the same code as a rollout, one after the other."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
from prometheus_client import CollectorRegistry

from gspo.tasks.environments import Split, Task, TaskSource
from gspo_protocol.codec import Array, decode, encode
from gspo_protocol.limits import MAX_TASK_BYTES
from gspo_protocol.messages import Finish, Graded, GroupSampling, Lease
from gspo_protocol.messages.base import require_plain
from gspo_protocol.messages.journal import journal_array
from gspo_protocol.messages.pieces import NO_PIECES, piece_arrays
from gspo_services.broker.ledger import trajectory_seed
from gspo_services.prepare.env_try.groups import PlayedAnswers, compared, played_of_each
from gspo_services.prepare.env_try.prompts import Prompts, WatchedTokenizer
from gspo_services.prepare.env_try.watcher import EpisodeWatch, PlayedTurn, TurnWatcher
from gspo_services.rollout.group_rewards import GroupRewards
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.opening import Policy, group_rewards, open_comparing, open_episodes, open_user_code
from gspo_services.rollout.sglang import EngineError
from gspo_services.rollout.work import EpisodeFailed, EpisodeRunner, PolicyEngine
from gspo_services.runs.local_play import LocalIntake, Mask, mask_of, of_the_configuration, places_of, told
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import ConfigurationError, ended_by, flatten
from gspo_services.shared.schedules import sampling_of
from gspo_services.shared.settings import Settings
from gspo_services.tasks.environments import MixedTasks, create_environment, create_task_set

NAME: Final = "try"
LEASE_S: Final = 1.0
"""Nobody renews this lease."""


@dataclass(kw_only=True)
class PlayedEpisode:
    """One episode and what came of it."""

    split: Split
    index: int
    """Of its task."""
    seed: int
    task: Task = field(default_factory=dict)
    turns: list[PlayedTurn] = field(default_factory=list)
    mask: Mask = field(default_factory=lambda: Mask(sequences=[]))
    turn_rewards: list[float] = field(default_factory=list)
    components: dict[str, float] = field(default_factory=dict)
    alone: float | None = None
    """What it is worth alone, if its group was compared after that (reward.group)."""
    end: Literal["done", "length", "failed"] = "failed"
    failure: str = ""
    """Why there is no reward, with the places of the user's error."""
    refused: list[Mapping[str, Any]] = field(default_factory=list)
    """Messages of the environment that the chat template has refused."""
    remark: str = ""
    """Why the learner makes something else of the tokens than is usual."""
    printed: list[str] = field(default_factory=list)
    """Lines that an agent has printed."""
    seconds: float = 0.0
    model_s: float = 0.0
    """Of these: at least one answer was under way."""

    @property
    def reward(self) -> float | None:
        """The sum over the turns; None for a failed episode."""
        return None if self.end == "failed" else sum(self.turn_rewards)


class Audience(TurnWatcher, Protocol):
    """Hears of each episode while it goes on."""

    def begins(self, episode: PlayedEpisode) -> None: ...

    def ended(self, episode: PlayedEpisode) -> None: ...

    def compared(self, group: list[PlayedEpisode]) -> None:
        """All episodes of a task have ended, and reward.group has compared them."""


class TaskPicker:
    """Some tasks of a split."""

    def __init__(self, settings: Settings, split: Split, first: int, most: int) -> None:
        """``most`` tasks, or as many as there are from ``first`` on. Raises: ConfigurationError."""
        self.split = split
        self.played_of_each = played_of_each(settings, split)
        name = settings.environment.name
        with of_the_configuration(f'environment "{name}"'):
            create = create_task_set if settings.agent.is_used else create_environment
            self._source: TaskSource = create(name, settings.environment.options).tasks(split)
            num_tasks = self._source.num_tasks
        if num_tasks is not None and first >= num_tasks:
            have = f"tasks 0 to {num_tasks - 1}" if num_tasks else "no task"
            raise ConfigurationError(f'--index is {first}: environment "{name}" has {have} in the split "{split}"')
        self.indices: Sequence[int] = range(first, first + most if num_tasks is None else min(first + most, num_tasks))

    @property
    def columns(self) -> Sequence[str]:
        """What became of the columns of each source of rows, for people."""
        return list(dict.fromkeys(map(str, self._source.columns))) if isinstance(self._source, MixedTasks) else []

    @property
    def num_episodes(self) -> int:
        """How many episodes are played of all of them."""
        return len(self.indices) * self.played_of_each

    def task(self, index: int) -> Task:
        """The task as a broker takes it. Raises: ValueError for what is none; whatever the user's code raises."""
        task = dict(self._source.task(index))
        require_plain("task", task, MAX_TASK_BYTES)
        return task


class EpisodePlayer:
    """Plays the episodes of one configuration."""

    def __init__(
        self,
        settings: Settings,
        runner: EpisodeRunner,
        intake: LocalIntake,
        watch: EpisodeWatch,
        printed: "Printed",
        clock: Clock,
        groups: GroupRewards | None = None,
    ) -> None:
        """``groups``: compares the episodes of a task; None: nothing does."""
        self._settings = settings
        self._runner = runner
        self._intake = intake
        self._watch = watch
        self._printed = printed
        self._clock = clock
        self._groups = groups

    async def play(self, tasks: TaskPicker, audience: Audience) -> list[PlayedEpisode]:
        """Play each task once, or a group of it where that is compared.

        Raises: ConfigurationError for what concerns every episode; ServiceError of the engine.
        """
        played: list[PlayedEpisode] = []
        for index in tasks.indices:
            answers = PlayedAnswers()
            group = [await self._one_of(tasks, index, number, answers, audience) for number in range(tasks.played_of_each)]
            if self._groups is not None and tasks.played_of_each > 1:
                await self._compare(self._groups, group, answers)
                audience.compared(group)
            played += group
        return played

    async def _one_of(
        self, tasks: TaskPicker, index: int, number: int, answers: PlayedAnswers, audience: Audience
    ) -> PlayedEpisode:
        """Play a task for the ``number``-th time."""
        trajectory = index * tasks.played_of_each + number
        episode = PlayedEpisode(split=tasks.split, index=index, seed=trajectory_seed(self._settings.run.seed, trajectory))
        try:
            episode.task = tasks.task(index)
            lease, arrays = _lease(episode, sampling_of(self._settings.sampling))
        # The user's own code: whatever it raises concerns this task only.
        except Exception as error:  # noqa: BLE001
            text = f"task {index} ({tasks.split}) cannot be leased: {type(error).__name__}: {error}"
            episode.failure = "\n".join([text, *places_of(error)])
            audience.begins(episode)
        else:
            audience.begins(episode)
            await self._play(episode, lease, arrays, audience)
        if episode.reward is not None:
            answers.add(self._intake)
        audience.ended(episode)
        return episode

    async def _compare(self, groups: GroupRewards, group: list[PlayedEpisode], answers: PlayedAnswers) -> None:
        """Give each episode its reward beside the others; none has one if they cannot be compared."""
        failed = sum(episode.reward is None for episode in group)
        found: Graded | str = f"{failed} of its {len(group)} episodes failed, so that they are not compared"
        if not failed:
            found = await compared(groups, self._intake, group[0].task, answers)
        for place, episode in enumerate(group):
            episode.alone = episode.reward
            if isinstance(found, str):
                episode.end, episode.failure = "failed", episode.failure or found
            else:
                episode.turn_rewards, episode.components = [found.rewards[place]], found.components[place]

    async def _play(self, episode: PlayedEpisode, lease: Lease, arrays: Mapping[str, Array], audience: Audience) -> None:
        self._intake.begin(lease)
        self._watch.begin(audience)
        begin = self._clock.now()
        with ended_by(EngineError):
            try:
                async with asyncio.TaskGroup() as tasks:
                    await self._runner.begin(lease, arrays, tasks).run()
            except* EpisodeFailed as errors:
                episode.failure = told(flatten(errors)[0])
        episode.seconds = self._clock.now() - begin
        episode.model_s = self._watch.model_s
        episode.turns = self._watch.turns
        episode.refused = self._watch.refused
        episode.printed = self._printed.new_lines()
        finish = None if episode.failure else self._intake.finish
        if finish is not None:
            episode.end, episode.turn_rewards = finish.reason, finish.turn_rewards
            episode.components = finish.components
        self._mask(episode, finish)

    def _mask(self, episode: PlayedEpisode, finish: Finish | None) -> None:
        limit = self._settings.objective.overlong_filter_tokens
        discarded = None if finish is None else finish.discarded_turns
        episode.mask = mask_of(self._intake.chunks, discarded)
        if finish is not None and limit is not None and episode.mask.longest >= limit:
            episode.mask = mask_of(self._intake.chunks, None)
            episode.remark = (
                f"{episode.mask.longest} tokens: objective.overlong_filter_tokens = {limit} leaves it out of the loss"
            )


class Printed:
    """What the user's processes print, as their log has it."""

    def __init__(self, directory: Path) -> None:
        """``directory``: the run's, whose folder of logs is made here."""
        self._path = directory / "logs" / f"{NAME}-agents.log"
        self._path.parent.mkdir()
        self._num_read = 0

    def new_lines(self) -> list[str]:
        """The lines since the last call, without the name of the process before each."""
        if not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8").splitlines()
        new, self._num_read = lines[self._num_read :], len(lines)
        return [line.partition(": ")[2] for line in new]


@asynccontextmanager
async def open_player(
    settings: Settings, tokenizer: WatchedTokenizer, prompts: Prompts, engine: PolicyEngine, clock: Clock
) -> AsyncIterator[EpisodePlayer]:
    """A player of ``settings``, whose run.directory is an empty folder for files of the episodes.

    Raises: ConfigurationError; EndpointError when the agents' endpoint cannot listen.
    """
    watch = EpisodeWatch(engine, tokenizer, prompts, clock)
    intake = LocalIntake(settings, tokenizer.vocab_size)
    registry = CollectorRegistry()
    may_generate = asyncio.Event()
    may_generate.set()
    policy = Policy(
        tokenizer=tokenizer, engine=watch, broker=intake, may_generate=may_generate, metrics=RolloutMetrics(registry),
        clock=clock, wall_s=lambda: datetime.now(tz=UTC).timestamp(), watched=watch.watched,
    )  # fmt: skip
    printed = Printed(settings.run.directory)
    async with AsyncExitStack() as stack:
        user_code = await stack.enter_async_context(open_user_code(settings, NAME, policy.metrics))
        comparing = await stack.enter_async_context(open_comparing(settings, user_code, policy.metrics))
        runner = await stack.enter_async_context(open_episodes(settings, policy, user_code, registry))
        groups = group_rewards(settings, policy, comparing)
        yield EpisodePlayer(settings, runner, intake, watch, printed, clock, groups)


def _lease(episode: PlayedEpisode, sampling: GroupSampling) -> tuple[Lease, Mapping[str, Array]]:
    """The lease of a new episode, as it arrives at a rollout. Raises: ProtocolError for a task that no message holds."""
    lease = Lease(
        trajectory_id=episode.index,
        epoch=1,
        group_id=episode.index,
        split=episode.split,
        task=episode.task,
        seed=episode.seed,
        sampling=sampling,
        lease_s=LEASE_S,
        num_tokens=0,
        state=None,
        turn_done=False,
    )
    tokens = {"token_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)}
    arrays: dict[str, Array] = {**tokens, **piece_arrays([NO_PIECES]), **journal_array([])}
    received = decode([bytes(frame) for frame in encode(lease, arrays)])
    assert isinstance(received.message, Lease)
    return received.message, received.arrays
