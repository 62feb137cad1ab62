"""An OpenEnv server: guess a number from 0 to 9 in three turns. Arguments: sessions, port or 0, added to each number.

It prints its port once it listens there.
"""

import asyncio
import random
import socket
import sys
from typing import Any

import uvicorn
from openenv.core import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Told(Observation):
    text: str


class GuessEnvironment(Environment[Guess, Told, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, shown: bool = False, **_: Any) -> Told:
        self._state = State(episode_id=episode_id)
        self._number = (random.Random(seed).randrange(10) + int(sys.argv[3])) % 10
        return Told(text=f"guess {self._number}" if shown else "guess")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Told:
        self._state.step_count += 1
        if action.number == self._number:
            return Told(text="right", reward=1.0, done=True)
        text = "more" if action.number < self._number else "less"
        return Told(text=text, reward=-0.125, done=self._state.step_count == 3)

    @property
    def state(self) -> State:
        return self._state


async def main(num_sessions: int, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:
        print(listener.getsockname()[1], flush=True)
        app = create_fastapi_app(GuessEnvironment, Guess, Told, max_concurrent_envs=num_sessions)
        await uvicorn.Server(uvicorn.Config(app, log_level="error")).serve([listener])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
