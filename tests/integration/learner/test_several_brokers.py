"""The learner of a run that several brokers share, against scripted brokers over real ZeroMQ."""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from gspo_protocol.messages import (
    Ack,
    BatchFailed,
    BatchPartRequest,
    BatchPending,
    BatchRequest,
    Checkpointed,
    EndOfRun,
    Evaluated,
    Heartbeat,
    Hello,
    Published,
    Pulse,
    Refused,
    Resume,
    SkipBatch,
    StopRequest,
    Trained,
    VersionScore,
)
from gspo_services.learner.broker import loop
from gspo_services.learner.broker.batches import Answer, BatchAnnounced, PartArrived
from gspo_services.learner.broker.parts import CREDIT, MOST_DAMAGED
from gspo_services.learner.several import connections, merged_answers
from gspo_services.learner.weights.weight_copy import copy_weights
from gspo_services.shared.runtime.errors import ServiceError, flatten
from tests.support.broker.made_batches import MadeBatch, damaged
from tests.support.shares.several import NUM_BROKERS, Brokers, connected, opened
from tests.support.shares.shares import a_share, answers_of_shares
from tests.support.wire.zmq_ends import in_background, sequenced

REQUEST = BatchRequest(index=4, policy_version=9)
EVERYONE = range(NUM_BROKERS)


@pytest.fixture
def directory() -> Iterator[Path]:
    """Sockets' paths are short."""
    with tempfile.TemporaryDirectory() as found:
        yield Path(found)


def no_note(digest: str) -> None:
    """In the place of the learner's note of a version's digest."""


async def failure_of(brokers: Brokers) -> ServiceError:
    await asyncio.to_thread(brokers.client._thread.join, 20.0)
    with pytest.raises(ExceptionGroup) as caught:
        await brokers.take()
    (error,) = flatten(caught.value)
    assert isinstance(error, ServiceError)
    return error


async def requested(brokers: Brokers, request: BatchRequest = REQUEST) -> None:
    await brokers.tell(request)
    for end in brokers.ends:
        while await end.expect(BatchRequest) != request:
            pass


def plain(answers: Sequence[Answer | None]) -> list[object]:
    """Without arrays: a part's digest says what is in them."""
    return [
        answer.part if isinstance(answer, PartArrived) else answer.batch if isinstance(answer, BatchAnnounced) else answer
        for answer in answers
    ]


def expected(shares: Sequence[MadeBatch]) -> list[object]:
    return plain(list(merged_answers(answers_of_shares(shares))))


async def test_only_the_learner_that_broker_0_has_welcomed_says_hello_to_the_others(directory: Path) -> None:
    async with opened(directory) as brokers:
        for _ in range(2):
            await brokers.ends[0].expect(Hello)
        # Whatever comes to them would be there by now.
        for end in brokers.ends[1:]:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(end.channel.receive(), 0.05)
        assert brokers.client.reason_to_wait == f"no answer from broker 0 at {brokers.ends[0].endpoint}"
        await brokers.welcome(0, policy_version=7)
        await brokers.welcome(2, policy_version=7)
        assert await asyncio.to_thread(brokers.client.wait_welcome, 0.05) is None
        assert brokers.client.reason_to_wait == f"no answer from broker 1 at {brokers.ends[1].endpoint}"
        await brokers.welcome(1, policy_version=8, trained_batches=3, weights_digest="d", next_batch=2)
        welcome = await asyncio.to_thread(brokers.client.wait_welcome, 20.0)
        assert welcome is not None
        assert (welcome.policy_version, welcome.trained_batches, welcome.weights_digest) == (7, 0, "")
        assert welcome.next_batch == 2
        assert [each.policy_version for each in brokers.client.welcomes()] == [7, 8, 7]


async def heard_until_quiet(brokers: Brokers, number: int, quiet_s: float = 0.5) -> None:
    """Raises: TimeoutError when the learner goes on to speak."""
    async with asyncio.timeout(20.0):
        with contextlib.suppress(TimeoutError):
            while True:
                await asyncio.wait_for(brokers.ends[number].channel.receive(), quiet_s)


async def test_without_broker_0_nothing_is_said_to_the_others_until_it_is_back(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a learner that broker 0 has admitted in its place would wait for the others for ever."""
    monkeypatch.setattr(loop, "HEARTBEAT_S", 0.02)
    async with connected(directory) as brokers:
        await brokers.ends[1].expect(Heartbeat)
        monkeypatch.setattr(connections, "WITHOUT_FIRST_S", 0.3)
        await heard_until_quiet(brokers, 1)
        await brokers.tell(Resume(next_batch=4))
        await heard_until_quiet(brokers, 2)
        monkeypatch.setattr(connections, "WITHOUT_FIRST_S", 20.0)
        await brokers.reply(0, Pulse(policy_version=0, weights_endpoint=""))
        for number in EVERYONE[1:]:
            await brokers.welcome(number)
            await brokers.ends[number].expect(Resume)
            await brokers.ends[number].expect(Heartbeat)


async def test_when_broker_0_has_ended_the_run_and_is_gone_the_others_still_hear_of_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "HEARTBEAT_S", 0.02)
    async with connected(directory) as brokers:
        await requested(brokers)
        await brokers.reply(0, EndOfRun(index=REQUEST.index, reason="gspo stop"))
        await brokers.ends[1].expect(StopRequest)
        monkeypatch.setattr(connections, "WITHOUT_FIRST_S", 0.1)
        for _ in range(20):
            await brokers.ends[1].expect(Heartbeat)
            await brokers.ends[2].expect(StopRequest)


async def test_an_endpoint_that_another_broker_answers_is_named(directory: Path) -> None:
    async with opened(directory) as brokers:
        await brokers.welcome(0)
        await brokers.ends[2].welcome(broker=1, num_brokers=NUM_BROKERS)
        error = await failure_of(brokers)
        text = f"broker.batch_endpoint of broker 2 ({brokers.ends[2].endpoint}) is answered by broker 1"
        assert text in str(error)


async def test_the_shares_come_as_one_batch_whatever_the_order_in_which_they_arrive(directory: Path) -> None:
    shares = [a_share(number) for number in EVERYONE]
    async with connected(directory) as brokers:
        await requested(brokers)
        await brokers.announce({2: shares[2], 0: shares[0]})
        await brokers.send_part(2, shares[2], 0)
        assert await brokers.take(0.05) is None
        await brokers.announce({1: shares[1]})
        async with in_background(serve_parts(brokers, shares)):
            found = plain([await brokers.take() for _ in expected(shares)])
            assert found == expected(shares)
        assert await brokers.take(0.05) is None


async def serve_parts(brokers: Brokers, shares: Sequence[MadeBatch], *, backwards: bool = False) -> None:
    """Send the parts that are asked for, and those that come unasked, twice and in the reverse order if wanted."""

    async def serve(number: int) -> None:
        await brokers.send_part(number, shares[number], 0)
        while True:
            request = await brokers.ends[number].expect(BatchPartRequest)
            parts = list(range(request.part, request.part + request.count))
            for part in [*reversed(parts), *parts] if backwards else parts:
                await brokers.send_part(number, shares[number], part)

    async with asyncio.TaskGroup() as tasks:
        for number in range(len(shares)):
            tasks.create_task(serve(number))


async def test_parts_that_are_reordered_and_come_twice_are_taken_once_and_in_order(directory: Path) -> None:
    shares = [a_share(number, lengths=(2, 6)) for number in EVERYONE]
    async with connected(directory) as brokers:
        await requested(brokers)
        await brokers.announce(dict(enumerate(shares)))
        async with in_background(serve_parts(brokers, shares, backwards=True)):
            assert plain([await brokers.take() for _ in expected(shares)]) == expected(shares)


async def test_a_share_of_later_parts_waits_by_its_own_credit_and_never_whole(directory: Path) -> None:
    shares = [a_share(number, lengths=(9, 9)) for number in EVERYONE]
    async with connected(directory) as brokers:
        await requested(brokers)
        await brokers.announce(dict(enumerate(shares)))
        assert isinstance(await brokers.take(), BatchAnnounced)
        for number in EVERYONE:
            request = await brokers.ends[number].expect(BatchPartRequest)
            assert (request.part, request.count) == (1, CREDIT - 1)
        for part in range(CREDIT):
            await brokers.send_part(2, shares[2], part)
        # Nobody takes them: what is asked for again after silence is only what there is room for.
        for part in range(CREDIT):
            await brokers.send_part(0, shares[0], part)
        for part in range(CREDIT):
            arrived = await brokers.take()
            assert isinstance(arrived, PartArrived)
            assert arrived.part.part == part
        assert await brokers.take(0.1) is None, "the parts of broker 2 wait for their turn"
        while (request := await brokers.ends[0].expect(BatchPartRequest)).part + request.count < 2 * CREDIT:
            pass
        asked = [seen.message for seen in brokers.ends[2].seen if isinstance(seen.message, BatchPartRequest)]
        assert all(each.part + each.count <= CREDIT for each in asked)


async def test_a_broker_that_is_away_delays_the_batch_and_nothing_is_lost(directory: Path) -> None:
    shares = [a_share(number) for number in EVERYONE]
    async with connected(directory) as brokers:
        await brokers.tell(Resume(next_batch=4))
        await requested(brokers)
        brokers.ends[1].close()
        await brokers.announce({0: shares[0], 2: shares[2]})
        assert await brokers.take(0.1) is None
        await brokers.tell(Trained(index=3, policy_version=9, metrics={}))
        brokers.ends[1] = brokers.end(1)
        await brokers.welcome(1)
        assert (await brokers.ends[1].expect(Resume)).next_batch == 4
        await brokers.ends[1].expect(BatchRequest)
        assert [message for _, message in sequenced(brokers.ends[1])] == [Trained(index=3, policy_version=9, metrics={})]
        await brokers.announce({1: shares[1]})
        async with in_background(serve_parts(brokers, shares)):
            assert plain([await brokers.take() for _ in expected(shares)]) == expected(shares)


async def test_a_damaged_part_is_asked_for_again_and_in_the_end_names_the_broker(directory: Path) -> None:
    shares = [a_share(number) for number in EVERYONE]
    async with connected(directory) as brokers:
        await requested(brokers)
        await brokers.announce(dict(enumerate(shares)))
        part, arrays = damaged(shares[2].parts[0])
        await brokers.ends[2].expect(BatchPartRequest)
        for _ in range(MOST_DAMAGED - 1):
            await brokers.ends[2].reply(part, arrays)
            while (await brokers.ends[2].expect(BatchPartRequest)).part:
                pass
        await brokers.ends[2].reply(part, arrays)
        error = await failure_of(brokers)
        assert f"the broker at {brokers.ends[2].endpoint}: part 0 of batch 4 arrived damaged {MOST_DAMAGED} times" in str(
            error
        )


async def test_a_share_that_was_quarantined_is_left_out_and_its_broker_hears_that_it_was_skipped(directory: Path) -> None:
    shares = [a_share(0), a_share(2)]
    async with connected(directory) as brokers:
        await requested(brokers)
        await brokers.reply(1, SkipBatch(index=4, reason="it crashed twice"))
        await brokers.announce({0: shares[0], 2: shares[1]})
        announced = await brokers.take()
        assert plain([announced]) == expected(shares)[:1]
        assert isinstance(announced, BatchAnnounced)
        await brokers.tell(Trained(index=4, policy_version=10, metrics={"loss": 0.5}))
        for number, end in enumerate(brokers.ends):
            metrics = {"loss": 0.5, **announced.batch.report}
            told = Trained(index=4, policy_version=10, metrics=metrics, skipped=number == 1)
            assert await end.expect(Trained) == told
        assert announced.batch.report["num_tokens"] == sum(share.batch.num_tokens for share in shares)


async def test_a_batch_is_skipped_when_every_broker_has_set_its_share_aside(directory: Path) -> None:
    skip = SkipBatch(index=4, reason="it crashed twice")
    async with connected(directory) as brokers:
        await requested(brokers)
        for number in EVERYONE:
            await brokers.reply(number, skip)
        assert await brokers.take() == skip


async def test_a_share_that_cannot_be_read_makes_the_others_come_once_more(directory: Path) -> None:
    shares = [a_share(number) for number in EVERYONE]
    async with connected(directory) as brokers:
        await requested(brokers)
        await brokers.announce(dict(enumerate(shares)))
        await brokers.send_part(0, shares[0], 0)
        before = [await brokers.take() for _ in range(2)]
        assert plain(before) == expected(shares)[:2]
        for end in brokers.ends:
            await end.expect(BatchPartRequest)
        await brokers.reply(1, SkipBatch(index=4, reason="it cannot be delivered"))
        left = [shares[0], shares[2]]
        for number, end in ((0, brokers.ends[0]), (2, brokers.ends[2])):
            while (request := await end.expect(BatchPartRequest)).part:
                pass
            for part in range(request.count):
                await brokers.send_part(number, shares[number], part)
        async with in_background(serve_parts(brokers, shares)):
            assert plain([await brokers.take() for _ in expected(left)]) == expected(left)


async def test_a_broker_that_ends_the_run_early_makes_the_others_stop_before_the_learner_ends(directory: Path) -> None:
    share = a_share(0)
    async with connected(directory) as brokers:
        await requested(brokers)
        await brokers.announce({0: share})
        end = EndOfRun(index=4, reason="20 groups in a row failed")
        await brokers.reply(1, end)
        for number in (0, 2):
            stop = await brokers.ends[number].expect(StopRequest)
            assert stop.reason == "broker 1 has ended the run: 20 groups in a row failed"
        # Broker 0 has assembled its share: the next one is what it cannot give.
        assert await brokers.ends[0].expect(BatchRequest) == BatchRequest(index=5, policy_version=9)
        assert await brokers.ends[2].expect(BatchRequest) == REQUEST
        # One of the two may be lost, or come late: both are repeated, and a share that is ready meanwhile is not trained.
        await brokers.announce({2: a_share(2)})
        while await brokers.ends[2].expect(BatchRequest) != BatchRequest(index=5, policy_version=9):
            pass
        await brokers.ends[2].expect(StopRequest)
        await brokers.reply(2, EndOfRun(index=5, reason="stopped by learner: ..."))
        assert await brokers.take(0.1) is None
        await brokers.ends[0].expect(StopRequest)
        await brokers.reply(0, EndOfRun(index=5, reason="stopped by learner: ..."))
        assert await brokers.take() == end
        assert await brokers.take(0.1) is None


async def test_at_the_end_of_the_run_nobody_is_stopped_and_the_last_one_is_waited_for(directory: Path) -> None:
    async with connected(directory) as brokers:
        request = BatchRequest(index=100, policy_version=101)
        await requested(brokers, request)
        for number in (1, 2):
            await brokers.reply(number, EndOfRun(index=100, reason="all 100 batches are trained"))
        await brokers.reply(0, BatchPending(index=100, groups_ready=0, groups_needed=1, waiting_for="evaluation"))
        for _ in range(4):
            await brokers.ends[0].expect(BatchRequest)
        assert await brokers.take(0.05) is None
        assert brokers.client.reason_to_wait == "broker 0: 0 of 1 groups; evaluation"
        end = EndOfRun(index=100, reason="all 100 batches are trained")
        await brokers.reply(0, end)
        assert await brokers.take() == end
        seen = [received.message for each in brokers.ends for received in each.seen]
        assert not any(isinstance(message, StopRequest) for message in seen)


async def test_the_reason_to_wait_names_the_broker_that_is_waited_for(directory: Path) -> None:
    async with connected(directory) as brokers:
        assert brokers.client.reason_to_wait == "broker 0"
        await requested(brokers)
        await brokers.announce({0: a_share(0), 1: a_share(1)})
        await brokers.reply(2, BatchPending(index=4, groups_ready=3, groups_needed=8, waiting_for="group 9: 2 of 4"))
        while brokers.client.reason_to_wait != "broker 2: 3 of 8 groups; group 9: 2 of 4":
            await brokers.ends[2].expect(BatchRequest)
        await brokers.reply(1, Refused(reason="unknown session: say hello"))
        await brokers.ends[1].expect(Hello)
        await brokers.reply(1, Refused(reason="its place is taken", message_type="hello"))
        while brokers.client.reason_to_wait != "broker 1: its place is taken":
            await brokers.ends[1].expect(Hello)


async def test_everyone_hears_of_versions_then_reports_then_checkpoints_and_all_must_acknowledge(directory: Path) -> None:
    async with connected(directory, policy_version=7) as brokers:
        await asyncio.to_thread(brokers.client.publish, 8, copy_weights([("w", torch.zeros(1))]), 5, 256, no_note)
        await brokers.tell(Trained(index=4, policy_version=8, metrics={}))
        for end in brokers.ends:
            await end.expect(Trained)
            assert [type(message) for _, message in sequenced(end)] == [Published, Trained]
        for number in (0, 2):
            await brokers.reply(number, Ack(next_seq=2))
        assert await asyncio.to_thread(brokers.client.flush, 0.2) is False
        assert not await asyncio.to_thread(brokers.client.acknowledged, 5)
        assert brokers.client._loop.endpoint == brokers.ends[1].endpoint
        await brokers.reply(1, Ack(next_seq=2))
        assert await asyncio.to_thread(brokers.client.flush, 20.0) is True
        assert await asyncio.to_thread(brokers.client.acknowledged, 5)
        await brokers.tell(Checkpointed(next_batch=5, policy_version=8))
        await brokers.tell(BatchFailed(index=5, reason="no", raised=True))
        for end in brokers.ends:
            await end.expect(BatchFailed)
            assert [type(message) for _, message in sequenced(end)][2:] == [Checkpointed, BatchFailed]


async def test_every_broker_hears_that_the_learner_lives_and_broker_0_tells_the_scores(directory: Path) -> None:
    async with connected(directory) as brokers:
        for end in brokers.ends:
            await end.expect(Heartbeat)
        await brokers.reply(1, Evaluated(scores=[VersionScore(3, False, 0.25)]))
        await brokers.reply(0, Evaluated(scores=[VersionScore(3, False, 0.5)]))
        await requested(brokers)
        await brokers.announce({number: a_share(number) for number in EVERYONE})
        assert isinstance(await brokers.take(), BatchAnnounced)
        assert brokers.client.scores() == {3: 0.5}
