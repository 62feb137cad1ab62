"""The task, the tokens and the weights of a simulated run: small enough that the audit can compute them again.

A log-prob names the version that made its token: it is -(version * 1024 + noise) / 1024, exact in float32.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from gspo.tasks.environments import Environment, RewardJob, Split, Start, State, Step, Task
from gspo_services.rollout.tokenizer import Messages

STOP = 1
FIRST_WORD = 3
NUM_WORDS = 150
FIRST_DIGIT = 200
MARK = 199
VOCABULARY = 210
STEPS = 1024


def logprob_of(version: int, noise: int) -> float:
    """The log-prob of a token that ``version`` made; 0 <= noise < 1024."""
    return -(version * STEPS + noise) / STEPS


def version_in(logprob: float) -> int:
    """The version that really made the token."""
    return math.floor(-logprob)


class SimOptions(msgspec.Struct, frozen=True, kw_only=True):
    max_turns: int
    slow_rewards: bool
    num_tasks: int | None = None


class SimEnvironment(Environment):
    """Adds up the numbers in its actions: each observation and reward depends on all turns before it."""

    options_type = SimOptions

    def __init__(self, options: SimOptions) -> None:
        self._options = options

    def tasks(self, split: Split) -> "SimTasks":
        return SimTasks(split, self._options.num_tasks)

    def start(self, task: Task, seed: int) -> Start:
        number = task["number"]
        assert isinstance(number, int)
        state: State = {"turn": 0, "turns": 1 + (number + seed) % self._options.max_turns, "sum": seed % 97}
        return Start(state=state, messages=[{"role": "user", "content": str(number)}])

    def step(self, state: State, action: str) -> Step:
        turn, turns, total = state["turn"], state["turns"], state["sum"]
        assert isinstance(turn, int)
        assert isinstance(turns, int)
        assert isinstance(total, int)
        total = (total * 31 + sum(int(word) for word in action.split()) + len(action)) % 9973
        done = turn + 1 >= turns
        following: State = {"turn": turn + 1, "turns": turns, "sum": total}
        reward: float | RewardJob = reward_of(total)
        if self._options.slow_rewards and total % 2:
            reward = RewardJob(function="tests.simulation:reward", arguments={"sum": total})
        return Step(
            state=following, messages=[] if done else [{"role": "tool", "content": str(total)}], reward=reward, done=done
        )


def reward_of(total: int) -> float:
    return (total % 8) / 8


def components_of(total: int) -> dict[str, float]:
    """What a slow reward is made of: some are one number, and others come as named components."""
    return {"eighths": float(total % 8), "jobs": 1.0} if total % 4 == 3 else {}


def compared(texts: Sequence[str], rewards: Sequence[float]) -> list[float | dict[str, float]]:
    """Rewards of answers beside each other: each depends on all of them, on their order and on what they are worth alone.
    Some are numbers, and others come as named components."""
    found: list[float | dict[str, float]] = []
    for place, (text, alone) in enumerate(zip(texts, rewards, strict=True)):
        digest = hashlib.blake2b(repr((place, text, *texts)).encode(), digest_size=1).digest()[0]
        worth = digest % 4 / 4 + alone
        found.append(worth if digest % 8 < 4 else {"beside": worth - 1.0, "one": 1.0})
    return found


def expected_components(rewards: Sequence[float], options: SimOptions) -> dict[str, float]:
    """The components of an episode with these rewards of its turns."""
    found: Counter[str] = Counter()
    if options.slow_rewards:
        for reward in rewards:
            found.update(components_of(int(reward * 8)))
    return dict(found)


class SimTasks:
    """Numbered tasks; without end if no number is given."""

    def __init__(self, split: Split, num_tasks: int | None = None) -> None:
        self._first = 0 if split == "train" else 500
        self.num_tasks = num_tasks if split == "train" else None

    def task(self, index: int) -> Task:
        return {"number": self._first + index}


class SimTokenizer:
    """Each digit and each of the policy's words is one token."""

    stop_ids = frozenset({STOP})

    def prompt_ids(self, messages: Messages) -> list[int]:
        return _encoded(messages)

    def observation_ids(self, messages: Messages) -> list[int]:
        return _encoded(messages)

    def action_text(self, token_ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in token_ids)


def _encoded(messages: Messages) -> list[int]:
    tokens = []
    for message in messages:
        tokens += [MARK, *(FIRST_DIGIT + int(digit) for digit in message["content"])]
    return tokens


def weights_after(history: Sequence[tuple[int, ...]], noise: Sequence[int] = ()) -> tuple[float, float]:
    """The whole model: two numbers that encode what it was trained on, in order, and the noise of training. A skipped batch
    changes nothing."""
    digest = hashlib.blake2b(repr([*(step for step in history if step), *noise]).encode(), digest_size=6).digest()
    return float(int.from_bytes(digest[:3], "big")), float(int.from_bytes(digest[3:], "big"))


TABLES = 3
ROWS = 300
"""Elements of each further tensor, in plans with versions that travel as deltas."""


def tables_after(history: Sequence[tuple[int, ...]]) -> list[tuple[str, np.ndarray[Any, np.dtype[np.uint16]]]]:
    """The rest of a larger model: uint16 [ROWS] each, the bits of bfloat16. A step changes some elements of one or two."""
    tables = [np.arange(ROWS, dtype=np.uint16) + 1000 * number for number in range(TABLES)]
    for step, trained in enumerate(step for step in history if step):
        digest = hashlib.blake2b(repr((step, trained)).encode(), digest_size=8).digest()
        for table, row, value in (digest[:3], digest[3:6]):
            tables[table % TABLES][row] = 256 * table + value
    return [(f"table.{number}", table) for number, table in enumerate(tables)]


Turn = tuple[list[int], list[int]]


def expected_turns(
    task: Task, seed: int, options: SimOptions, actions: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[float]]:
    """The observation before each of these actions in an episode, and each turn's reward."""
    environment, tokenizer = SimEnvironment(options), SimTokenizer()
    start = environment.start(task, seed)
    state, messages = start.state, start.messages
    observations: list[list[int]] = []
    rewards: list[float] = []
    for action in actions:
        observations.append(_encoded(messages))
        step = environment.step(state, tokenizer.action_text([token for token in action if token not in tokenizer.stop_ids]))
        state, messages = step.state, step.messages
        total = state["sum"]
        assert isinstance(total, int)
        rewards.append(reward_of(total))
    return observations, rewards


def plain(fields: dict[str, Any]) -> str:
    """An event's fields on one line."""
    return " ".join(f"{name}={value}" for name, value in fields.items())
