"""Messages that take long to render do so beside the event loop."""

import asyncio
import threading
from typing import Any

import pytest

from gspo_services.rollout.endpoint import CallRefused
from gspo_services.rollout.episodes.place import LONG_TEXT
from gspo_services.rollout.rendering import Renderer
from tests.support.agent_episodes import LedgerBroker, an_episode, ask, sampling_of, shared_of, user
from tests.support.engines.scripted_engine import ScriptedEngine


class SlowRenderer:
    """Says how long its messages are when another thread says so; everything else is the real renderer's."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.begun, self.may_end = threading.Event(), threading.Event()

    def prompt_ids(self, *args: Any) -> list[int]:
        self.begun.set()
        assert self.may_end.wait(10), "nothing else ran while the messages were rendered"
        return self._renderer.prompt_ids(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)


async def test_other_episodes_go_on_while_long_messages_are_rendered(renderer: Renderer, engine: ScriptedEngine) -> None:
    slow: Any = SlowRenderer(renderer)
    sampling = sampling_of(max_tokens=100_000, max_episode_tokens=200_000)
    broker = LedgerBroker(sampling)
    shared = shared_of(slow, broker, engine)
    async with an_episode(shared, broker.lease()) as calls, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(ask(calls, [user("a" * (LONG_TEXT + 1))]))
        await asyncio.to_thread(slow.begun.wait, 10)
        assert not asked.done()
        slow.may_end.set()
        answer = await asked
        assert answer.prompt_tokens == len(broker.sequences()[0]) - len(answer.token_ids)


async def test_an_episode_that_ends_meanwhile_takes_no_call(renderer: Renderer, engine: ScriptedEngine) -> None:
    slow: Any = SlowRenderer(renderer)
    sampling = sampling_of(max_tokens=100_000, max_episode_tokens=200_000)
    broker = LedgerBroker(sampling)
    shared = shared_of(slow, broker, engine)
    async with an_episode(shared, broker.lease()) as calls, asyncio.TaskGroup() as tasks:

        async def is_refused() -> None:
            with pytest.raises(CallRefused, match="has ended"):
                await ask(calls, [user("a" * (LONG_TEXT + 1))])

        tasks.create_task(is_refused())
        await asyncio.to_thread(slow.begun.wait, 10)
        await calls.close()
        slow.may_end.set()
    assert broker.messages == []
