"""Conversations that wait are scored as batches: each gets its own score or its own failure, whatever shares its batch."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from gspo_services.tasks.reward_model.conversations import Encoded, NoMemoryError
from gspo_services.tasks.reward_model.options import RewardModelOptions
from gspo_services.tasks.reward_model.server import FAILED, Server, WaitingConversation

BROKEN, LARGE, INFINITE = 7, 8, 9


class ByLength:
    """In place of the model: the score is the number of tokens; some lengths fail, and their whole batch with them."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.answers = threading.Event()
        self.answers.set()

    def scores(self, batch: Sequence[Encoded]) -> list[float]:
        self.answers.wait()
        self.sizes.append(len(batch))
        lengths = [len(each.ids) for each in batch]
        if BROKEN in lengths:
            raise RuntimeError("a kernel has failed")
        if LARGE in lengths:
            raise NoMemoryError("no room")
        return [float("inf") if length == INFINITE else float(length) for length in lengths]


async def answers(model: ByLength, *lengths: int, deadline_s: float = 60.0) -> list[dict[str, Any] | None]:
    """What each conversation gets that waits; None: nothing, because the server gave up."""
    classifier: Any = model
    server = Server(classifier, RewardModelOptions(path="", deadline_s=deadline_s))
    waiting = [WaitingConversation(Encoded([0] * length, [], is_cut=length == 1)) for length in lengths]
    server._waiting.extend(waiting)
    server._wanted.set()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        scoring = tasks.create_task(server.score_batches())
        ends: list[asyncio.Future[Any]] = [scoring, asyncio.gather(*(each.answer for each in waiting))]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if scoring.done():
            assert scoring.result() == FAILED
        scoring.cancel()
    return [each.answer.result() if each.answer.done() else None for each in waiting]


async def test_each_conversation_of_a_batch_gets_its_own_score() -> None:
    model = ByLength()
    assert [answer and answer["score"] for answer in await answers(model, 5, 1, 3, 2)] == [5.0, 1.0, 3.0, 2.0]
    assert model.sizes == [4], "they were one batch"


@pytest.mark.parametrize(
    ("length", "reason"), [(BROKEN, "raised"), (LARGE, "memory"), (INFINITE, "not_finite")], ids=["raised", "memory", "inf"]
)
async def test_one_that_cannot_be_scored_costs_the_others_nothing(length: int, reason: str) -> None:
    first, bad, last = await answers(ByLength(), 1, length, 3)
    assert (first, last) == ({"score": 1.0, "is_cut": True}, {"score": 3.0, "is_cut": False})
    assert bad is not None
    assert bad["failure"] == reason


async def test_a_model_that_hangs_ends_the_server_and_answers_nobody() -> None:
    model = ByLength()
    model.answers.clear()
    try:
        assert await answers(model, 1, 2, deadline_s=0.05) == [None, None]
    finally:
        model.answers.set()
