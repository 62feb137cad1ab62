"""What a worker says is a stranger's word: a message that no honest worker sends ends it, and only it."""

from typing import Any

import msgspec
import pytest

from gspo.tasks.agents import MAX_STEP_DEPTH
from gspo_protocol.limits import MAX_PLAIN_DEPTH
from gspo_services.tasks.agents import RecordedStep
from gspo_services.tasks.agents.messages import decoded
from gspo_services.tasks.supervised import BadMessage
from tests.support.agent_pools import ListJournal, agent_pool, agent_task

DONE = {"say": "done", "episode": 1, "reward": 1.0, "components": None, "failure": None, "detail": "", "spent": False}
STEP = {"say": "step", "episode": 1, "ordinal": 0, "name": "a", "arguments": "", "result": 1}


@pytest.mark.parametrize(
    "message",
    [
        {**DONE, "episode": 2},
        {**DONE, "episode": -1},
        {**DONE, "episode": "1"},
        {**DONE, "reward": "1"},
        {**DONE, "components": {"a": None}},
        {**DONE, "components": {"a b": 0.0}},
        {**DONE, "components": {str(n): 0.0 for n in range(17)}},
        {**DONE, "detail": "x" * 4_001},
        {**DONE, "more": 1},
        {"say": "done", "episode": 1},
        {"say": "hello"},
        {"say": "ready"},
        {"say": "alive", "late_s": -1.0, "episode": None, "where": ""},
        {**STEP, "episode": 2},
        {**STEP, "ordinal": 1},
        {**STEP, "name": ""},
        {**STEP, "name": "x" * 201},
        {**STEP, "arguments": "x" * 65},
        {**STEP, "arguments": None},
        {"say": "diverged", "episode": 1, "ordinal": 0, "recorded": "a", "name": "b"},
        {"say": "computer", "episode": 1, "request": 1, "ordinal": 0, "do": "run", "command": "ls"},
        {"say": "computer", "episode": 1, "request": 1, "ordinal": 0, "do": "format"},
        {"say": "computer", "episode": 1, "request": 1, "ordinal": 0, "do": "write", "files": {"a": "not base64!"}},
        ["done"],
        7,
        "x" * (5 * 1024 * 1024),
    ],
)
async def test_a_message_that_no_honest_worker_sends_ends_the_worker_and_the_next_is_served(message: Any) -> None:
    journal = ListJournal()
    async with agent_pool() as pool:
        result = await pool.solve(agent_task("say", message=message), journal)
        assert result.failure == "bad_message", result
        assert journal.calls == []
        assert (await pool.solve(agent_task("answer", value=3))).reward == 3.0


async def test_a_false_result_harms_the_episode_that_reports_it_alone() -> None:
    async with agent_pool() as pool:
        assert (await pool.solve(agent_task("say", message={**DONE, "reward": None}))).failure == "no_result"
    async with agent_pool() as pool:
        result = await pool.solve(agent_task("say", message={**DONE, "reward": None, "failure": "closed", "detail": "so"}))
        assert (result.failure, result.detail) == ("raised", "so"), "only the pool says that it is closed"


async def test_steps_that_are_not_awaited_are_not_piled_up() -> None:
    async with agent_pool() as pool:

        class Slow(ListJournal):
            async def record(self, step: RecordedStep, ordinal: int) -> None:
                await super().record(step, ordinal)
                await pool._workers[0].ended.wait()

        journal = Slow()
        result = await pool.solve(agent_task("say_many", message=STEP, times=100), journal)
    assert (result.failure, "does not wait" in result.detail) == ("bad_message", True)
    assert len(journal.calls) <= 65


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b'{"say":',
        b'{"say":"step","episode":1,"result":' + b"[" * 100_000,
        b'{"say":"done","say":"done"}',
        b'{"say":"step","episode":1e400}',
        b"NaN",
    ],
)
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    with pytest.raises(BadMessage, match="not a message"):
        decoded(body)


def test_a_result_is_as_deep_as_the_wire_takes_it() -> None:
    deep: Any = 1
    for _ in range(MAX_PLAIN_DEPTH + 1):
        deep = [deep]
    with pytest.raises(BadMessage, match="nested"):
        decoded(msgspec.json.encode({**STEP, "result": deep}))
    assert MAX_STEP_DEPTH <= MAX_PLAIN_DEPTH
