"""An engine that shares its device with the learner: versions are fetched at any time, and loaded while it has it."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gspo_services.rollout.weights.sync import MAX_FAILED_RELEASES
from gspo_services.shared.colocate import LOCK_FILE, DeviceLock
from gspo_services.shared.runtime.errors import ServiceError
from tests.support.engines.following import Following, following
from tests.support.engines.scripted_engine import Hold
from tests.support.wire.zmq_ends import PATIENCE_S, in_background

RELEASE = ["pause retract", "release"]
LOAD = ["resume weights", "pause retract", "update 1", "resume kv_cache", "resume"]


@dataclass(frozen=True)
class Locks:
    """Both ends of the device's lock."""

    rollout: DeviceLock
    learner: DeviceLock


@pytest.fixture
def locks(tmp_path: Path) -> Iterator[Locks]:
    both = Locks(DeviceLock(tmp_path / LOCK_FILE, "rollout-0"), DeviceLock(tmp_path / LOCK_FILE, "learner"))
    assert both.rollout.try_take()  # The server starts on the device.
    yield both
    both.rollout.close()
    both.learner.close()


async def until(follow: Following, call: str) -> None:
    """Wait for a call of the engine."""
    async with asyncio.timeout(PATIENCE_S):
        while call not in follow.engine.calls:  # noqa: ASYNC110 - the calls are a list of the scripted engine
            await asyncio.sleep(0.001)


async def until_all_wait() -> None:
    """Let every task run to where it waits for something outside of it."""
    for _ in range(20):
        await asyncio.sleep(0)


async def in_a_turn_with_a_version(follow: Following) -> None:
    follow.publish(1)
    await follow.changed()
    follow.engine.calls.clear()


async def test_a_turn_ends_with_the_engines_memory_released_and_the_version_kept(tmp_path: Path, locks: Locks) -> None:
    async with following(tmp_path, locks.rollout) as follow:
        await in_a_turn_with_a_version(follow)
        await follow.sync.give_up(lambda: False)
        assert follow.engine.calls == []
        await follow.sync.give_up(lambda: True)
        assert follow.engine.calls == RELEASE
        assert (follow.sync.has_device, follow.sync.may_generate.is_set(), follow.sync.policy_version) == (False, False, 1)
        assert locks.learner.try_take()
        await follow.sync.give_up(lambda: True)  # It has none to give.
        assert follow.engine.calls == RELEASE


async def test_a_version_is_fetched_in_the_learners_turn_and_loaded_whole_in_the_rollouts(
    tmp_path: Path, locks: Locks
) -> None:
    async with following(tmp_path, locks.rollout) as follow:
        await in_a_turn_with_a_version(follow)
        await follow.sync.give_up(lambda: True)
        assert locks.learner.try_take()
        follow.step(2, "model.norm.weight")
        async with asyncio.timeout(PATIENCE_S):
            while not follow.sync.loading:  # noqa: ASYNC110 - set by another task
                await asyncio.sleep(0.001)
        assert (follow.fetches("delta"), follow.engine.calls) == (1, RELEASE)
        locks.learner.give_back()
        await follow.changed()
        assert (follow.sync.policy_version, follow.holds_newest()) == (2, True)
        assert sorted(follow.engine.files[-1]) == sorted(follow.newest)
        assert follow.engine.calls[2:] == ["resume weights", "pause retract", "update 2", "resume kv_cache", "resume"]
        assert follow.registry.get_sample_value("gspo_rollout_device_acquired_total") == 1
        assert follow.registry.get_sample_value("gspo_rollout_has_device") == 1


async def test_the_served_version_is_loaded_again_from_the_copy_and_verified(tmp_path: Path, locks: Locks) -> None:
    async with following(tmp_path, locks.rollout) as follow:
        await in_a_turn_with_a_version(follow)
        await follow.sync.give_up(lambda: True)
        assert not follow.holds_newest()
        await follow.sync.bring_back()
        assert follow.engine.calls == [*RELEASE, *LOAD]
        assert (follow.holds_newest(), follow.sync.may_generate.is_set(), locks.rollout.held) == (True, True, True)
        assert follow.fetches("snapshot") == 1
        await follow.sync.bring_back()  # It is there.
        assert follow.engine.calls == [*RELEASE, *LOAD]


async def test_weights_that_do_not_come_back_as_they_were_generate_nothing(tmp_path: Path, locks: Locks) -> None:
    async with following(tmp_path, locks.rollout) as follow:
        await in_a_turn_with_a_version(follow)
        await follow.sync.give_up(lambda: True)
        info, data = follow.engine.loaded["model.norm.weight"]
        follow.engine.damage = lambda loaded: loaded.update({"model.norm.weight": (info, bytes(len(data)))})
        with pytest.raises(ServiceError, match="did not load policy version 1 again: the engine's weights differ"):
            await follow.sync.bring_back()
        assert not follow.sync.may_generate.is_set()


async def test_a_server_that_refuses_to_release_its_memory_keeps_the_turn_until_its_rollout_ends(
    tmp_path: Path, locks: Locks
) -> None:
    async with following(tmp_path, locks.rollout) as follow:
        await in_a_turn_with_a_version(follow)
        follow.engine.refuse_release = "it is busy"
        for _ in range(MAX_FAILED_RELEASES - 1):
            await follow.sync.give_up(lambda: True)
            assert not locks.learner.try_take()
            assert not follow.sync.may_generate.is_set()
        with pytest.raises(ServiceError, match=r"does not release its memory, for which the learner waits: it is busy; "):
            await follow.sync.give_up(lambda: True)
        assert not locks.learner.try_take()


async def test_a_refusal_that_passes_is_forgotten(tmp_path: Path, locks: Locks) -> None:
    async with following(tmp_path, locks.rollout) as follow:
        await in_a_turn_with_a_version(follow)
        for _ in range(MAX_FAILED_RELEASES):
            follow.engine.refuse_release = "it is busy"
            await follow.sync.give_up(lambda: True)
            follow.engine.refuse_release = ""
            await follow.sync.give_up(lambda: True)
            await follow.sync.bring_back()
        assert follow.holds_newest()


async def test_an_engine_without_a_version_ends_its_turn_after_it_has_said_how_it_hashes(
    tmp_path: Path, locks: Locks
) -> None:
    async with following(tmp_path, locks.rollout) as follow:
        await follow.sync.give_up(lambda: True)
        assert locks.learner.try_take()
        follow.publish(1)  # The fetch asks for checksums of the engine's kind.
        async with asyncio.timeout(PATIENCE_S):
            while not follow.sync.loading:  # noqa: ASYNC110 - set by another task
                await asyncio.sleep(0.001)
        locks.learner.give_back()
        await follow.changed()
        assert (follow.sync.policy_version, follow.holds_newest()) == (1, True)


async def test_a_version_that_comes_while_the_former_is_brought_back_is_loaded_after_it(
    tmp_path: Path, locks: Locks
) -> None:
    async with following(tmp_path, locks.rollout) as follow:
        await in_a_turn_with_a_version(follow)
        await follow.sync.give_up(lambda: True)
        assert locks.learner.try_take()
        async with in_background(follow.sync.bring_back()):
            async with asyncio.timeout(PATIENCE_S):
                while not follow.sync.loading:  # noqa: ASYNC110 - set by another task
                    await asyncio.sleep(0.001)
            follow.step(2, "model.norm.weight")
            locks.learner.give_back()
            await until(follow, "update 2")
            await follow.changed()
        assert [call for call in follow.engine.calls if "update" in call] == ["update 1", "update 2"]
        assert (follow.sync.policy_version, follow.holds_newest()) == (2, True)


async def test_a_turn_does_not_end_while_a_version_is_loaded(tmp_path: Path, locks: Locks) -> None:
    async with following(tmp_path, locks.rollout) as follow:
        await in_a_turn_with_a_version(follow)
        await follow.sync.give_up(lambda: True)
        follow.engine.update_hold = hold = Hold()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow.sync.bring_back())
            await hold.reached.wait()
            tasks.create_task(follow.sync.give_up(lambda: True))
            await until_all_wait()
            assert follow.engine.calls == [*RELEASE, *LOAD[:3]]
            hold.go.set()
        assert follow.engine.calls == [*RELEASE, *LOAD, *RELEASE]


async def test_the_copy_is_not_read_while_the_next_version_is_written_into_it(
    tmp_path: Path, locks: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(tmp_path, locks.rollout) as follow:
        await in_a_turn_with_a_version(follow)
        await follow.sync.give_up(lambda: True)
        hold, take = Hold(), follow.sync._replica.take

        async def held(*arguments: Any) -> None:
            hold.reached.set()
            await hold.go.wait()
            await take(*arguments)

        monkeypatch.setattr(follow.sync._replica, "take", held)
        follow.step(2, "model.norm.weight")
        await hold.reached.wait()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow.sync.bring_back())
            await until_all_wait()
            assert follow.engine.calls == RELEASE
            hold.go.set()
        await until(follow, "update 2")
        assert "update 1" not in follow.engine.calls
