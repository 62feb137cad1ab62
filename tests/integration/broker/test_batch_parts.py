"""A batch in parts, over real sockets: an end that dies in the middle, requests that make no sense, traffic in between."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import zmq.asyncio

from gspo_protocol.channels import BATCH
from gspo_protocol.messages import (
    Batch,
    BatchPart,
    BatchPartRequest,
    BatchRequest,
    Published,
    Refused,
    Resume,
    Status,
    StatusRequest,
)
from gspo_services.shared.net.peer import PeerClient
from gspo_services.shared.runtime.errors import flatten
from tests.support.broker.peers import (
    PROMPT_TOKENS,
    VOCABULARY,
    ScriptedLearner,
    ScriptedRollout,
    experts_of,
    running,
    tokens_of,
)
from tests.support.broker.process import broker_process
from tests.support.wire.zmq_ends import a_client

RUN_TIMEOUT_S = 120.0
PART_TOKENS = 5
ACTION_TOKENS = 37
PARTS_PER_BATCH = 4 * (PROMPT_TOKENS + ACTION_TOKENS) // PART_TOKENS


@dataclass
class LearnerInParts(ScriptedLearner):
    """Calls ``at_part`` when it has taken part ``number`` of all that it ever takes."""

    number: int = 0
    at_part: Callable[[], Awaitable[None]] | None = None
    taken: list[int] = field(default_factory=list)

    async def took_part(self, part: int) -> None:
        self.taken.append(part)
        if self.num_parts == self.number and self.at_part is not None:
            await self.at_part()


def expected(learner: ScriptedLearner) -> list[list[int]]:
    return [
        [int(token) for item in batch.items for token in tokens_of(item.trajectory_id, item.num_tokens)]
        for batch, _ in learner.batches
    ]


async def test_a_broker_that_is_killed_between_two_parts_goes_on_with_the_next(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    async with broker_process(tmp_path, broker={"batch_part_tokens": PART_TOKENS}, run={"num_batches": 2}) as broker:

        async def kill() -> None:
            await broker.kill()
            await broker.start()

        rollout = ScriptedRollout(context, broker.work_endpoint, "r", "s", action_tokens=ACTION_TOKENS)
        number = PARTS_PER_BATCH + 3
        learner = LearnerInParts(context, broker.batch_endpoint, "s", number=number, at_part=kill)
        async with asyncio.timeout(RUN_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(rollout.run())
            tasks.create_task(learner.run())
        assert broker.count("broker_started") == 2
        assert broker.count("batch_sent") == 2, "the second life sends parts of a batch that the first one has announced"
    assert learner.taken == 2 * list(range(PARTS_PER_BATCH))
    assert [tokens for _, tokens in learner.batches] == expected(learner)


@pytest.mark.parametrize("source", ["engine", "learner"])
async def test_experts_that_engines_report_reach_a_learner_that_replays_them_across_a_kill(
    tmp_path: Path, context: zmq.asyncio.Context, source: str
) -> None:
    """Otherwise the broker keeps none, and says so."""
    objective = {"routing_replay": True, "routing_replay_from": source}
    sections = {"broker": {"batch_part_tokens": PART_TOKENS}, "run": {"num_batches": 1}, "objective": objective}
    async with broker_process(tmp_path, **sections) as broker:

        async def kill() -> None:
            await broker.kill()
            await broker.start()

        rollout = ScriptedRollout(context, broker.work_endpoint, "r", "s", action_tokens=ACTION_TOKENS, with_experts=True)
        learner = LearnerInParts(context, broker.batch_endpoint, "s", number=3, at_part=kill)
        async with asyncio.timeout(RUN_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(rollout.run())
            tasks.create_task(learner.run())
        assert (broker.count("experts_not_kept") > 0) == (source == "learner")
    ((batch, tokens),) = learner.batches
    lengths = [item.num_tokens for item in batch.items]
    sampled = [each[PROMPT_TOKENS:] for each in np.split(np.array(tokens), np.cumsum(lengths)[:-1])]
    if source == "learner":
        assert learner.experts == [None] * PARTS_PER_BATCH
        return
    found = np.concatenate([each for each in learner.experts if each is not None])
    np.testing.assert_array_equal(found, np.concatenate([experts_of(each) for each in sampled]))


async def test_a_learner_that_dies_between_two_parts_is_followed_by_one_that_gets_all_of_them(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    async with broker_process(tmp_path, broker={"batch_part_tokens": PART_TOKENS}, run={"num_batches": 2}) as broker:
        rollout = ScriptedRollout(context, broker.work_endpoint, "r", "s", action_tokens=ACTION_TOKENS)
        died = asyncio.Event()

        async def die() -> None:
            died.set()
            await asyncio.Event().wait()

        first = LearnerInParts(context, broker.batch_endpoint, "first", number=PARTS_PER_BATCH + 3, at_part=die)
        async with asyncio.timeout(RUN_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(rollout.run())
            dying = tasks.create_task(first.run())
            await died.wait()
            first.peer._welcomed.clear()  # It says no Goodbye.
            dying.cancel()
            # The version after the first batch is published, and no checkpoint covers it.
            second = LearnerInParts(context, broker.batch_endpoint, "second", resume_at=0)
            await second.run()
    assert [batch.index for batch, _ in second.batches] == [0, 1]
    assert second.batches[0] == first.batches[0]
    assert [tokens for _, tokens in second.batches] == expected(second)


async def a_learner_with_a_batch(peer: PeerClient) -> Batch:
    """Publish, and ask for the first batch until it is there."""
    await peer.connected_welcome()
    await peer.send(Resume(next_batch=0))
    await peer.send(
        Published(
            policy_version=1, endpoint="tcp://127.0.0.1:1", digest="d", num_bytes=1, trained_batches=0, vocabulary=VOCABULARY
        )
    )  # fmt: skip
    await peer.send(BatchRequest(index=0, policy_version=1))
    while True:
        message = (await peer.inbox.get()).message
        if isinstance(message, Batch):
            return message


async def test_a_part_that_there_is_not_is_refused_and_other_requests_are_answered_between_two_parts(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    async with broker_process(tmp_path, broker={"batch_part_tokens": PART_TOKENS}) as broker:
        rollout = ScriptedRollout(context, broker.work_endpoint, "r", "s", action_tokens=ACTION_TOKENS)
        learner = a_client(context, BATCH, broker.batch_endpoint, role="learner", name="learner")
        operator = a_client(context, BATCH, broker.batch_endpoint, role="operator", name="operator")
        async with asyncio.timeout(RUN_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(rollout.run())
            async with running(learner), running(operator):
                batch = await a_learner_with_a_batch(learner)
                assert batch.num_parts == PARTS_PER_BATCH
                await learner.send(BatchPartRequest(index=0, part=PARTS_PER_BATCH, count=1))
                parts, refused = [], None
                while refused is None:
                    message = (await learner.inbox.get()).message
                    refused = message if isinstance(message, Refused) else None
                    parts += [message.part] if isinstance(message, BatchPart) else []
                assert (refused.fatal, refused.message_type) == (False, "batch_part_request")
                assert f"batch 0 has {PARTS_PER_BATCH} parts, counted from 0" in refused.reason
                assert parts == [0], "the first part comes unasked"
                await operator.connected_welcome()
                await learner.send(BatchPartRequest(index=0, part=0, count=16))
                seen = 0
                while seen < 4:
                    seen += isinstance((await learner.inbox.get()).message, BatchPart)
                await operator.send(StatusRequest())
                while not isinstance((await operator.inbox.get()).message, Status):
                    pass
                while seen < 16:
                    seen += isinstance((await learner.inbox.get()).message, BatchPart)
            task.cancel()


async def test_parts_of_a_batch_that_does_not_exist_end_who_asks_for_them(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    async with broker_process(tmp_path) as broker:
        learner = a_client(context, BATCH, broker.batch_endpoint, role="learner", name="learner")
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - the refusal comes whenever it comes
            async with asyncio.timeout(RUN_TIMEOUT_S), running(learner):
                await learner.connected_welcome()
                await learner.send(BatchPartRequest(index=7, part=0, count=1))
                await asyncio.Event().wait()
        assert "batch_part_request: index is 7: a checkpoint covers the batches below 0" in str(flatten(caught.value)[0])
