"""A rollout between a scripted broker and a scripted engine, over real ZeroMQ: leases and heartbeats."""

import asyncio
import contextlib

import msgspec
import numpy as np
import pytest

from gspo.tasks.environments import RewardJob
from gspo_protocol.messages import (
    Finish,
    Grade,
    Graded,
    GroupMember,
    Heartbeat,
    LeaseEnded,
    LeaseKey,
    LeaseRequest,
    Pulse,
    Release,
)
from gspo_services.rollout.environment_loop import EnvironmentEpisode
from gspo_services.rollout.group_rewards import GroupRewards
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.shared.settings.sections import RewardSection
from gspo_services.tasks.environments import RewardResult
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.episodes import a_new_lease, no_tokens, resumed, whole
from tests.support.processes.running_rollout import TURN_TOKENS, Running, Start, leases, starter


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(save_chat_model(tmp_path_factory.mktemp("model"), chat_tokenizer(TINY_TEMPLATE, "<|end|>")))


@pytest.fixture
def running(tokenizer: ChatTokenizer) -> Start:
    return starter(tokenizer)


# --- leases -----------------------------------------------------------------------------------------------------------


async def test_leases_are_taken_up_to_capacity_and_every_episode_is_finished(running: Start) -> None:
    async with running(max_running=4) as run:
        run.broker.grant(*leases(6))
        request = await run.broker.expect(LeaseRequest)
        assert (request.capacity, request.policy_version) == (4, 3)
        await run.broker.until(lambda: len(run.broker.of(Finish)) == 6)
    assert sorted(finish.trajectory_id for finish in run.broker.of(Finish)) == [1, 2, 3, 4, 5, 6]
    for trajectory_id in range(1, 7):
        assert whole(run.broker.chunks[trajectory_id]).kinds[-TURN_TOKENS:] == [("action", 0)] * TURN_TOKENS
    assert run.count("episodes_total", outcome="length") == 6
    assert run.count("episodes_running") == 0


async def test_only_the_free_places_are_asked_for(running: Start) -> None:
    async with running(max_running=3) as run:
        hold = run.engine.hold_at(run.prompt_tokens)
        run.broker.retry_s = 0.0
        run.broker.grant(*leases(2))
        await run.broker.until(lambda: run.broker.of(LeaseRequest) and run.broker.of(LeaseRequest)[-1].capacity == 1)
        assert run.broker.of(LeaseRequest)[0].capacity == 3
        hold.go.set()


async def test_leases_beyond_the_free_places_go_straight_back(running: Start) -> None:
    async with running(max_running=2) as run:
        hold = run.engine.hold_at(run.prompt_tokens)
        run.broker.grant(*leases(2))
        await hold.reached.wait()
        await run.broker.send(a_new_lease(trajectory_id=3), no_tokens())
        surplus = await run.broker.expect(Release)
        assert (surplus.trajectory_id, surplus.reason, surplus.failed) == (3, "no room", False)
        assert run.count("episodes_running") == 2


async def test_after_a_no_lease_the_rollout_does_not_ask_until_its_pause_is_over(running: Start) -> None:
    async with running() as run:
        await run.broker.expect(LeaseRequest)
        await run.heartbeats(3)
        assert len(run.broker.of(LeaseRequest)) == 1
        run.clock.advance(60.1)
        await run.broker.expect(LeaseRequest, 2)


async def test_a_rollout_asks_for_nothing_before_it_serves_a_verified_version(running: Start) -> None:
    async with running() as run:
        run.sync.serve(0)
        await run.broker.expect(Heartbeat)
        run.sync.serve(0, quarantined="wrong digest")
        await run.broker.until(lambda: run.broker.of(Heartbeat)[-1].status == "quarantined")
        assert run.broker.of(LeaseRequest) == []
        assert run.health.ready() == (False, "wrong digest")
        run.sync.serve(9)
        assert (await run.broker.expect(LeaseRequest)).policy_version == 9
        await run.broker.until(lambda: run.broker.of(Heartbeat)[-1].status == "serving")


async def test_a_rollout_with_a_spent_window_gives_its_device_up_and_a_lease_waits_until_it_is_back(
    running: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[EnvironmentEpisode] = []
    play = EnvironmentEpisode.run

    async def noted(episode: EnvironmentEpisode) -> None:
        begun.append(episode)
        await play(episode)

    monkeypatch.setattr(EnvironmentEpisode, "run", noted)
    async with running(colocated=True) as run:
        run.broker.grant(*leases(2))
        await run.broker.expect(Finish, 2)
        assert not run.sync.given_up.is_set(), "there may be more leases"
        while not run.sync.given_up.is_set():
            # The broker's answer may come after the clock has moved, and then counts from there.
            run.clock.advance(60.1)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(run.sync.given_up.wait(), 1.0)
        run.broker.grant(a_new_lease(trajectory_id=9))
        run.clock.advance(60.1)
        await run.sync.asked_back.wait()
        run.clock.advance(20.0)  # More than the health's bound without progress.
        await run.heartbeats(2)
        assert (len(begun), run.health.ready()) == (2, (True, "ready"))
        assert run.broker.of(Heartbeat)[-1].leases == [LeaseKey(9, 1)]
        run.sync.device_free.set()
        await run.broker.expect(Finish, 3)
        assert len(begun) == 3


async def test_a_lease_that_waits_for_a_turn_goes_back_when_the_rollout_drains(running: Start) -> None:
    async with running(colocated=True, drain_s=0.5) as run:
        await run.sync.given_up.wait()
        run.broker.grant(a_new_lease(trajectory_id=9))
        run.clock.advance(60.1)
        await run.sync.asked_back.wait()
        run.stop.set()
        assert (await run.broker.expect(Release)).reason == "draining"
    assert run.engine.requests == []


async def test_announced_versions_reach_the_weight_sync(running: Start) -> None:
    async with running() as run:
        run.broker.pulse = Pulse(policy_version=12, weights_endpoint="tcp://w:1")
        await run.broker.until(lambda: (12, "tcp://w:1") in run.sync.announced)
        # The broker has gone back to what was left after a loss.
        run.broker.pulse = Pulse(policy_version=9, weights_endpoint="tcp://w:2")
        await run.broker.until(lambda: run.sync.announced[-1] == (9, "tcp://w:2"))


async def test_a_resumed_lease_continues_after_its_tokens(running: Start) -> None:
    async with running() as run:
        run.broker.grant(a_new_lease())
        await run.broker.expect(Finish)
        original = run.broker.chunks.pop(7)
        tokens = whole(original).token_ids
        half = msgspec.structs.replace(original[0][0], turn_done=False)
        lease, arrays = resumed(a_new_lease(), [(half, original[0][1])])
        cut = len(tokens) - 2
        lease = msgspec.structs.replace(lease, num_tokens=cut)
        shortened = {name: array.copy() for name, array in arrays.items()}
        for name in ("segments", "version_runs"):
            shortened[name][-1, -1] = TURN_TOKENS - 2
        for name in ("token_ids", "logprobs"):
            shortened[name] = shortened[name][:cut]
        await run.broker.send(lease, shortened)
        await run.broker.expect(Finish, 2)
        (chunk, chunk_arrays) = run.broker.chunks[7][0]
        assert (chunk.offset, chunk.epoch) == (cut, 2)
        assert chunk_arrays["token_ids"].tolist() == tokens[cut:]
    assert run.count("episodes_resumed_total") == 1


# --- heartbeats and ends ----------------------------------------------------------------------------------------------


async def test_heartbeats_name_exactly_the_running_leases(running: Start) -> None:
    async with running() as run:
        hold = run.engine.hold_at(run.prompt_tokens + 2)
        run.broker.grant(*leases(3))
        beat = await run.broker.heartbeat_with(LeaseKey(1, 1), LeaseKey(2, 1), LeaseKey(3, 1))
        assert (beat.status, beat.policy_version) == ("serving", 3)
        await run.broker.send(LeaseEnded(trajectory_id=2, epoch=1, reason="group dropped"))
        await run.broker.heartbeat_with(LeaseKey(1, 1), LeaseKey(3, 1))
        hold.go.set()
        await run.broker.until(lambda: set(run.broker.of(Heartbeat)[-1].leases) == set())
    assert {finish.trajectory_id for finish in run.broker.of(Finish)} == {1, 3}
    assert run.broker.ended(2) == []
    assert 2 not in run.broker.chunks
    assert run.count("episodes_total", outcome="lease_ended") == 1


async def test_the_end_of_another_epoch_ends_nothing(running: Start) -> None:
    async with running() as run:
        hold = run.engine.hold_at(run.prompt_tokens + 2)
        run.broker.grant(a_new_lease(trajectory_id=1, epoch=5))
        await hold.reached.wait()
        await run.broker.send(LeaseEnded(trajectory_id=1, epoch=4, reason="expired"))
        await run.broker.send(LeaseEnded(trajectory_id=2, epoch=5, reason="expired"))
        await run.broker.heartbeat_with(LeaseKey(1, 5))
        hold.go.set()
        await run.broker.expect(Finish)


async def test_a_newer_lease_replaces_the_older_one_and_a_repeated_or_older_one_changes_nothing(running: Start) -> None:
    async with running() as run:
        hold = run.engine.hold_at(run.prompt_tokens + 2)
        old, new = a_new_lease(trajectory_id=1, epoch=1), a_new_lease(trajectory_id=1, epoch=2)
        run.broker.grant(old)
        await hold.reached.wait()
        hold = run.engine.hold_at(run.prompt_tokens + 2)
        for lease in (new, new, old):
            run.broker.grant(lease)
            await run.broker.send(*run.broker.leases.pop())
        await hold.reached.wait()
        await run.broker.heartbeat_with(LeaseKey(1, 2))
        assert len(run.engine.requests) == 2
        assert run.engine.num_closed == 1
        hold.go.set()
        assert (await run.broker.expect(Finish)).epoch == 2
    assert [finish.epoch for finish in run.broker.of(Finish)] == [2]
    assert [chunk.epoch for chunk, _ in run.broker.chunks[1]] == [2]


# --- groups -----------------------------------------------------------------------------------------------------------


class HeldComparison:
    """In place of the pool of workers: compares when the test lets it."""

    def __init__(self) -> None:
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def grade(self, job: RewardJob, group_size: int) -> RewardResult:
        self.asked.set()
        await self.go.wait()
        return RewardResult(reward=None, of_answers=[RewardResult(reward=float(place)) for place in range(group_size)])


def a_grade(tokenizer: ChatTokenizer) -> tuple[Grade, dict[str, np.ndarray]]:
    ids = tokenizer.encode("four")
    member = GroupMember(num_tokens=len(ids), reward=0.5)
    grade = Grade(trajectory_id=5, epoch=2, group_id=1, task={}, members=[member, member])
    return grade, {"token_ids": np.array(ids * 2, np.int32)}


def comparing(run: Running) -> HeldComparison:
    pool = HeldComparison()
    run.group_rewards = GroupRewards(
        settings=RewardSection(group="my_rewards:rank"), rewards=pool, tokenizer=run.tokenizer, broker=run.client,
        metrics=run.metrics,
    )  # type: ignore[arg-type]  # fmt: skip
    return pool


async def test_a_group_is_compared_under_a_lease_that_is_renewed(running: Start, tokenizer: ChatTokenizer) -> None:
    async with running(prepare=comparing) as run:
        run.broker.leases.append(a_grade(tokenizer))
        await run.prepared.asked.wait()
        await run.heartbeats(2)
        assert run.broker.of(Heartbeat)[-1].leases == [LeaseKey(5, 2)]
        run.prepared.go.set()
        graded = await run.broker.expect(Graded)
    assert graded == Graded(trajectory_id=5, epoch=2, rewards=[0.0, 1.0], components=[{}, {}])


async def test_a_comparison_is_handed_back_by_a_rollout_that_drains(running: Start, tokenizer: ChatTokenizer) -> None:
    async with running(prepare=comparing, drain_s=2.0) as run:
        run.broker.leases.append(a_grade(tokenizer))
        await run.prepared.asked.wait()
        run.stop.set()
        released = await run.broker.expect(Release)
    assert (released.trajectory_id, released.epoch, released.failed) == (5, 2, False)
    assert run.broker.of(Graded) == []


async def test_a_comparison_whose_lease_ended_is_given_up(running: Start, tokenizer: ChatTokenizer) -> None:
    async with running(prepare=comparing) as run:
        run.broker.leases.append(a_grade(tokenizer))
        await run.prepared.asked.wait()
        await run.broker.until(lambda: run.broker.of(Heartbeat)[-1].leases)
        await run.broker.send(LeaseEnded(trajectory_id=5, epoch=2, reason="its group was dropped: stale"))
        await run.broker.until(lambda: run.broker.of(Heartbeat)[-1].leases == [])
        run.prepared.go.set()
    assert run.broker.of(Graded) == run.broker.of(Release) == []


async def test_a_colocated_rollout_compares_while_the_learner_has_the_device(
    running: Start, tokenizer: ChatTokenizer
) -> None:
    async with running(prepare=comparing, colocated=True) as run:
        await run.broker.expect(LeaseRequest)
        await run.sync.given_up.wait()
        run.prepared.go.set()
        run.broker.leases.append(a_grade(tokenizer))
        run.clock.advance(60.1)
        await run.broker.expect(Graded)
        assert not run.sync.may_generate.is_set()


async def test_a_rollout_without_the_function_says_so(running: Start, tokenizer: ChatTokenizer) -> None:
    async with running() as run:
        run.broker.leases.append(a_grade(tokenizer))
        released = await run.broker.expect(Release)
    assert (released.trajectory_id, released.failed) == (5, True)
    assert "this rollout has no reward.group" in released.reason
