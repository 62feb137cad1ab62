"""The user's agent: it goes on, compacts, edits, asks twice at once, has side effects; and some read the clock.

Which of it an episode does follows from its task and its seed. What an agent says depends on all answers before.
"""

import asyncio
import random
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from gspo_services.rollout.episodes.place import LONG_TEXT
from tests.simulation.agents.chat import FIRST_CHARACTER, PADDING
from tests.simulation.episodes import FIRST_WORD, NUM_WORDS

Messages = list[dict[str, Any]]
STOPS = tuple(chr(FIRST_CHARACTER + word) for word in range(FIRST_WORD, FIRST_WORD + NUM_WORDS, 10))
LONG = PADDING * LONG_TEXT
"""A message that a thread renders."""
ACTS = ("go on", "go on at length", "step", "step", "beside", "twice", "compact", "edit", "aside")
CLOCK_ACTS = ("clock", "dated step", "dated step")
"""What no replay repeats."""


class Ask(Protocol):
    """One call of the policy. ``goes_on``: nothing else has gone on from the answer that the messages end with."""

    def __call__(self, messages: Messages, *, goes_on: bool = False, stop: tuple[str, ...] = ()) -> Awaitable[str]: ...


@dataclass(frozen=True, kw_only=True)
class Outside:
    """The world around an agent."""

    ask: Ask
    step: Callable[[str, int], Awaitable[int]]
    """``episode.step`` with a side effect, by name and argument; no two effects have the same result."""
    now: Callable[[], float]
    reads_clock: bool


async def play(number: int, seed: int, outside: Outside) -> int:
    """A whole episode of the task of this number. Returns what its reward is made of."""
    agent = _Agent(random.Random(f"agent {number} {seed}"), outside)
    await agent.say("user", str(number), goes_on=False)
    for _ in range(agent.shape.randint(1, 4)):
        await agent.act(agent.shape.choice(ACTS + (CLOCK_ACTS if outside.reads_clock else ())))
    return agent.total


class _Agent:
    def __init__(self, shape: random.Random, outside: Outside) -> None:
        self.shape = shape
        self.said: Messages = []
        self.total = 0
        self._outside = outside

    async def say(self, role: str, text: str, *, goes_on: bool = True) -> None:
        self.said.append({"role": role, "content": text})
        self._hear(await self._outside.ask(self.said, goes_on=goes_on))

    async def act(self, what: str) -> None:
        match what:
            case "go on":
                await self.say("user", str(self.shape.randrange(100)))
            case "go on at length":
                await self.say("user", str(self.shape.randrange(100)) + LONG)
            case "step":
                await self._step("count", self.shape.randrange(3))
            case "dated step":
                await self._step("date", int(self._outside.now()))
            case "clock":
                await self.say("user", f"{self._outside.now():.0f}")
            case "beside":
                await self._beside(str(self.shape.randrange(100)), str(self.shape.randrange(100, 200)))
            case "twice":
                text = str(self.shape.randrange(100))
                await self._beside(text, text)
            case "compact":
                said = "".join(message["content"] for message in self.said)
                self.said = []
                await self.say("user", str(zlib.crc32(said.encode())), goes_on=False)
            case "edit":
                self.said[0] = {**self.said[0], "content": self.said[0]["content"] + " 1"}
                await self.say("user", str(self.shape.randrange(100)), goes_on=False)
            case "aside":
                question = [*self.said[:1], {"role": "user", "content": str(self.shape.randrange(100))}]
                self._count(await self._outside.ask(question, stop=STOPS))

    async def _step(self, name: str, argument: int) -> None:
        await self.say("tool", str(await self._outside.step(name, argument)))

    async def _beside(self, one: str, other: str) -> None:
        """Two calls from one point; the greater answer is gone on with."""
        questions = [[*self.said, {"role": "user", "content": text}] for text in (one, other)]
        answers = await _all([self._outside.ask(question) for question in questions])
        answer, self.said = max(zip(answers, questions, strict=True), key=lambda each: (each[0], each[1][-1]["content"]))
        self._hear(answer)

    def _hear(self, answer: str) -> None:
        self.said = [*self.said, {"role": "assistant", "content": answer}]
        self._count(answer)

    def _count(self, answer: str) -> None:
        self.total = zlib.crc32(answer.encode(), self.total)


async def _all(works: list[Awaitable[str]]) -> list[str]:
    async def done(work: Awaitable[str]) -> str:
        return await work

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(done(work)) for work in works]
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    return [task.result() for task in running]
