"""The Python files of a new project: short programs to be changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from gspo_services.prepare.init.rows import TaskRows
from gspo_services.tasks.environments import LAST_MESSAGE, value_at

REWARD: Final = '''\
"""The reward: how good is an answer? Change `grade`, and see it work with `gspo env try run.toml --echo`."""

import re


def grade(completion: str, task: dict) -> dict[str, float]:
    """Called with the policy's text and the row. Returns a number, or named components: each becomes a curve.

    It runs in a worker process, without network and without files unless run.toml allows them in [reward]. An error fails
    the attempt, which is then repeated; it is never worth 0.
    """
    numbers = re.findall(r"-?\\d+", completion.replace(",", ""))
    right = bool(numbers) and numbers[-1] == str(task["answer"]).strip()
    return {"right": float(right), "brief": float(len(completion) <= 2000)}
'''

REWARD_ROWS: Final = '''\
"""The reward: how good is an answer? Change `grade`, and see it work with `gspo env try run.toml --echo`."""


def grade(completion: str, task: dict) -> dict[str, float]:
    """Called with the policy's text and the row. Returns a number, or named components: each becomes a curve.

    It runs in a worker process, without network and without files unless run.toml allows them in [reward]. An error fails
    the attempt, which is then repeated; it is never worth 0.
    """
    right = EXPECTED in completion
    return {"right": float(right), "brief": float(len(completion) <= 2000)}
'''

AGENT: Final = '''\
"""The agent: one episode as a program that calls the model. Change `solve`, and see it with `gspo env try run.toml --echo`.

Whatever the model samples through `client` is trained on, with the reward that `solve` returns. It may call tools, ask the
model several times, or ask several times at once: docs/guide/tasks-and-agents.md.
"""

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from gspo.tasks.agents import Episode

HTTP = DefaultAsyncHttpxClient()
"""One for all episodes of this process: to make one takes longer than a call."""


async def solve(episode: Episode) -> float:
    """Ask the task's question. Returns the reward: 1 when the answer is right, else 0. `episode.task` is the row."""
    client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, http_client=HTTP)
    messages = MESSAGES
    answer = await client.chat.completions.create(model=episode.model, messages=messages)
    text = answer.choices[0].message.content or ""
    return float(text.strip() == str(ANSWER).strip())
'''

ENVIRONMENT: Final = '''\
"""The environment: tasks, and an episode turn by turn. Change it, and see it work: `gspo env try run.toml --echo`."""

import random

from gspo.tasks.environments import Environment, Start, Step


class Sums:
    """The tasks of a split. The held-out ones are never trained on."""

    def __init__(self, split):
        self.split = split
        self.num_tasks = 64 if split == "eval" else None  # None: endless

    def task(self, index):
        """The same task for the same index, in every process. The last digit of the first number decides the split."""
        rng = random.Random(f"{self.split}-{index}")
        first = rng.choice([n for n in range(50) if (n % 10 == 7) == (self.split == "eval")])
        return {"first": first, "second": rng.randrange(50)}


class MyEnvironment(Environment):
    """Add two numbers."""

    def tasks(self, split):
        return Sums(split)

    def start(self, task, seed):
        """The first messages. The state is plain data: another process may continue the episode."""
        question = QUESTION.format(**task)
        return Start(state={"sum": task["first"] + task["second"]}, messages=[{"role": "user", "content": question}])

    def step(self, state, action):
        """`action` is what the policy said. For another turn: messages=[{"role": "user", ...}] and done=False."""
        right = action.strip() == str(state["sum"])
        return Step(state=state, messages=[], reward=float(right), done=True)
'''

QUESTIONS: Final = {True: "{first}+{second}=", False: "What is {first} + {second}? Reply with the number alone."}
"""For the tiny model, and for others."""


def reward_code(answer_column: str, *, is_sample: bool) -> str:
    """my_reward.py: for the sample rows the last number counts, for rows of one's own the answer must be in the text."""
    if is_sample:
        return REWARD
    expected = 'str(task["answer"]).strip()' if answer_column else '"yes"'
    return REWARD_ROWS.replace("EXPECTED", expected)


def agent_code(rows: TaskRows) -> str:
    """my_agent.py for these rows."""
    first, is_last = rows.train[0], rows.answer_column == LAST_MESSAGE
    prompt = _item(first, rows.prompt_column)
    messages = f'[{{"role": "user", "content": {prompt}}}]'
    answer = "" if is_last else _item(first, rows.answer_column)
    chat = value_at(first, rows.prompt_column)
    if isinstance(chat, list):
        content = "content" if "content" in chat[0] else "value"
        asked = f"{prompt}[:-1]" if is_last else prompt
        roles = '{"human": "user", "gpt": "assistant"}.get(each["from"], each["from"])'
        of_sharegpt = f'[{{"role": {roles}, "content": each["value"]}} for each in {asked}]'
        messages = asked if content == "content" else of_sharegpt
        answer = answer or f'{prompt}[-1]["{content}"]'
    return AGENT.replace("MESSAGES", messages).replace("ANSWER", answer)


def _item(row: Mapping[str, Any], column: str) -> str:
    """How a program reaches a column, which may be inside another."""
    parts = [column] if column in row else column.split(".")
    return "episode.task" + "".join(f"[{part if part.isdecimal() else json.dumps(part)}]" for part in parts)


def environment_code(*, tiny: bool) -> str:
    """my_environment.py."""
    return ENVIRONMENT.replace("QUESTION", repr(QUESTIONS[tiny]).replace("'", '"'))
