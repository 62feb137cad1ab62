"""Episodes for tests of environments: a counting one, a broker that records every message, scripted rewards."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from gspo.tasks.environments import Environment, RewardJob, Start, Step
from gspo_protocol.codec import Array, decode, encode
from gspo_protocol.limits import MAX_TURNS
from gspo_protocol.messages import SEQUENCED, Chunk, Finish, GroupSampling, Lease, Message, Plain, Segment
from gspo_protocol.messages.journal import journal_array, pack_entry
from gspo_protocol.messages.pieces import Pieces, piece_arrays, pieces_in
from gspo_services.rollout.environment_loop import EnvironmentLoop
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.rollout.trajectory import Trajectory
from gspo_services.tasks.environments.generated import GeneratedTasks
from gspo_services.tasks.environments.reward_pool import RewardResult
from tests.support.engines.scripted_engine import ScriptedEngine


class CountingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    turns: int = 1
    """Actions until the episode is done."""
    slow_reward: bool = False
    reward_with_task: bool = False
    fails_at_turn: int = -1
    start_fails: bool = False
    any_task: bool = False
    """Take tasks of a real broker, which have no question."""
    deadly_seed: int = -1
    """The step kills the process in the episode of this seed."""
    reward: Any = None
    """None: a tenth for each character of the action."""
    state: Any = None
    """What the state holds besides the turn."""


class CountingEnvironment(Environment):
    """Answers every action with its number; keeps the actions in its state."""

    options_type = CountingOptions

    def __init__(self, options: CountingOptions) -> None:  # type: ignore[override]
        self._options = options

    def tasks(self, split: Literal["train", "eval"]) -> GeneratedTasks:
        raise NotImplementedError

    def start(self, task: dict[str, Any], seed: int) -> Start:
        if self._options.start_fails:
            raise RuntimeError("no such task")
        state = {"turn": 0, "said": [], "seed": seed, "more": self._options.state}
        return Start(
            state=state, messages=[{"role": "user", "content": str(task if self._options.any_task else task["question"])}]
        )

    def step(self, state: dict[str, Any], action: str) -> Step:
        turn = state["turn"]
        if state["seed"] == self._options.deadly_seed:
            os.kill(os.getpid(), signal.SIGKILL)
        if turn == self._options.fails_at_turn:
            raise ZeroDivisionError("an environment's bug")
        # In place, as a careless environment does.
        state["turn"] += 1
        state["said"].append(action)
        done = state["turn"] >= self._options.turns
        reward: Any = len(action) / 10 if self._options.reward is None else self._options.reward
        if self._options.slow_reward:
            arguments = {"text": action}
            reward = RewardJob(function="tests:length", arguments=arguments, with_task=self._options.reward_with_task)
        messages = [] if done else [{"role": "tool", "content": f"turn {turn}"}]
        return Step(state=state, messages=messages, reward=reward, done=done)


class ScriptedRewards:
    """Grades by the length of the text, as a pool of workers would; ``failure`` makes it fail."""

    def __init__(self) -> None:
        self.failure = ""
        self.components = False
        """The reward comes as named components."""
        self.num_graded = 0

    async def grade(self, job: RewardJob) -> RewardResult:
        self.num_graded += 1
        await asyncio.sleep(0)
        if self.failure:
            return RewardResult(reward=None, failure=self.failure, detail="scripted")
        size = len(str(job.arguments["text"])) / 10
        components = {"length": size, "once": 1.0} if self.components else {}
        return RewardResult(reward=size, components=components, failure=None, detail="")


class RecordingBroker:
    """Takes messages as the wire does: encoded, decoded, in order. ``credit`` bounds how many it takes; None: no bound."""

    def __init__(self, credit: int | None = None) -> None:
        self._credit = None if credit is None else asyncio.Semaphore(credit)
        self.starved = asyncio.Event()
        self.messages: list[Message] = []
        self.chunks: list[tuple[Chunk, dict[str, Array]]] = []

    async def send(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        if self._credit is not None and isinstance(message, SEQUENCED):
            if self._credit.locked():
                self.starved.set()
            await self._credit.acquire()
        received = decode([bytes(frame) for frame in encode(message, arrays)])
        self.messages.append(received.message)
        if isinstance(received.message, Chunk):
            self.chunks.append((received.message, received.arrays))

    def grant(self, number: int) -> None:
        assert self._credit is not None
        for _ in range(number):
            self._credit.release()

    async def acknowledged(self, trajectory_id: int) -> None:
        """Everything is durable when it is sent."""

    @property
    def finish(self) -> Finish:
        """The one Finish, which is the last message."""
        assert isinstance(self.messages[-1], Finish)
        assert sum(isinstance(message, Finish) for message in self.messages) == 1
        return self.messages[-1]


def a_new_lease(*, max_turn_tokens: int = 12, max_tokens: int = 512, **changes: Any) -> Lease:
    """A lease of a new trajectory."""
    sampling = GroupSampling(0.7, max_turn_tokens, max_tokens, max_tokens)
    fields: dict[str, Any] = {
        "trajectory_id": 7, "epoch": 1, "group_id": 3, "split": "train", "task": {"question": "What is 12 + 30?"},
        "seed": 99, "sampling": sampling, "lease_s": 15.0, "num_tokens": 0, "state": None,
        "turn_done": False,
    }  # fmt: skip
    return Lease(**{**fields, **changes})


def no_tokens(turn_rewards: Sequence[float] = ()) -> dict[str, Array]:
    pieces = piece_arrays([Pieces((), (), turn_rewards)])
    return {"token_ids": np.empty(0, np.int32), "logprobs": np.empty(0, np.float32), **pieces, **journal_array(())}


def resumed(
    lease: Lease, chunks: Sequence[tuple[Chunk, Mapping[str, Array]]], entries: Sequence[Plain] = ()
) -> tuple[Lease, dict[str, Array]]:
    """The lease of the next epoch after ``chunks`` and ``entries`` of the journal, as a broker grants it."""
    if not chunks:
        return msgspec.structs.replace(lease, epoch=lease.epoch + 1), no_tokens()
    offset = 0
    state = None
    for chunk, _ in chunks:
        assert chunk.offset == offset, "a gap between chunks"
        offset += chunk.num_tokens
        state = state if chunk.state is None else chunk.state
    last = chunks[-1][0]
    arrays = {name: np.concatenate([arrays[name] for _, arrays in chunks]) for name in ("token_ids", "logprobs")}
    arrays |= piece_arrays([Pieces(chunk.segments, chunk.version_runs, chunk.turn_rewards) for chunk, _ in chunks])
    arrays |= journal_array(map(pack_entry, entries))
    following = msgspec.structs.replace(
        lease, epoch=lease.epoch + 1, num_tokens=offset, state=state, turn_done=last.turn_done, num_entries=len(entries)
    )
    received = decode([bytes(frame) for frame in encode(following, arrays)])
    return received.message, received.arrays  # type: ignore[return-value]


class Whole(msgspec.Struct, frozen=True):
    """A trajectory as the learner receives it, token by token."""

    token_ids: list[int]
    logprobs: list[float]
    kinds: list[tuple[str, int]]
    versions: list[int]


def whole(chunks: Sequence[tuple[Chunk, Mapping[str, Array]]]) -> Whole:
    """Joined chunks; runs and segments are spelt out for each token, so that chunk borders leave no trace."""
    _, arrays = resumed(a_new_lease(), chunks)
    pieces = pieces_in(arrays)
    return Whole(
        arrays["token_ids"].tolist(),
        arrays["logprobs"].tolist(),
        _spelt(pieces.segments),
        [run.version for run in pieces.version_runs for _ in range(run.num_tokens)],
    )


def _spelt(segments: Sequence[Segment]) -> list[tuple[str, int]]:
    return [(segment.kind, segment.turn) for segment in segments for _ in range(segment.num_tokens)]


def an_environment_loop(
    tokenizer: ChatTokenizer,
    *,
    engine: ScriptedEngine | None = None,
    broker: Any = None,
    rewards: ScriptedRewards | None = None,
    chunk_tokens: int = 4,
    max_turns: int = MAX_TURNS,
    may_generate: asyncio.Event | None = None,
    metrics: RolloutMetrics | None = None,
    **options: Any,
) -> EnvironmentLoop:
    """An environment loop with doubles and a real tokenizer; ``options`` go to ``CountingEnvironment``."""
    if may_generate is None:
        may_generate = asyncio.Event()
        may_generate.set()
    return EnvironmentLoop(
        environment=CountingEnvironment(CountingOptions(**options)),
        tokenizer=tokenizer,
        engine=ScriptedEngine() if engine is None else engine,  # type: ignore[arg-type]
        rewards=ScriptedRewards() if rewards is None else rewards,  # type: ignore[arg-type]
        broker=RecordingBroker() if broker is None else broker,
        may_generate=may_generate,
        max_turns=max_turns,
        chunk_tokens=chunk_tokens,
        metrics=RolloutMetrics(CollectorRegistry()) if metrics is None else metrics,
    )


async def run_episode(loop: EnvironmentLoop, lease: Lease, arrays: Mapping[str, Array] | None = None) -> Trajectory:
    trajectory = Trajectory(lease, no_tokens() if arrays is None else arrays)
    await loop.run(lease, trajectory)
    return trajectory
