"""Messages that take long to render do so beside the event loop."""

import asyncio
import random
import threading
from typing import Any

import pytest

from gspo_services.rollout.endpoint import CallRefused
from gspo_services.rollout.episodes.place import LONG_TEXT
from gspo_services.rollout.rendering import Renderer, create_renderer
from gspo_services.rollout.tokenizer import PIECE_CHARS, ChatTokenizer, TooManyTokens
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


async def test_a_text_that_can_never_fit_is_not_tokenised(
    tokenizer: ChatTokenizer, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one word, all of it took 600 MB and a minute of the processor; an attacker has many calls."""
    sampling = sampling_of(max_tokens=1000)
    shared = shared_of(create_renderer(tokenizer, "template", most_tokens=1000), broker := LedgerBroker(sampling), engine)
    encode, lengths = ChatTokenizer.encode, list[int]()
    monkeypatch.setattr(ChatTokenizer, "encode", lambda self, text: lengths.append(len(text)) or encode(self, text))
    async with an_episode(shared, broker.lease()) as calls:
        first = await ask(calls, [user("1+1=")])
        for before in ([], [user("1+1="), {"role": "assistant", "content": first.content}]):
            lengths.clear()
            with pytest.raises(CallRefused, match=r"200\d* characters has more than 1000 tokens") as refused:
                await ask(calls, [*before, user("1+" * 100_000)])
            assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
            assert sum(lengths) < 30_000


def test_no_text_that_fits_is_refused_without_a_count(tokenizer: ChatTokenizer) -> None:
    rng = random.Random(0)
    for alphabet in ("1+", "ab <|im_end|>", "é\u0301\U0001f600 \n"):
        text = "".join(rng.choices(alphabet, k=3 * PIECE_CHARS + 1))
        most = len(tokenizer.encode(text))
        tokenizer.require_fewer(text, most)
        with pytest.raises(TooManyTokens):
            tokenizer.require_fewer(text, most // 2 - 10)
