"""What a rollout checks and loads of its own copy: the engine's sums, patches in place of files, a second start."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from gspo_services.rollout.weights.loader import MAX_FAILED_PATCHES
from gspo_services.rollout.weights.replica import Replica
from gspo_services.shared.weights import PATCHER, SUMMER
from tests.support.engines.following import Following, following
from tests.support.wire.snapshots import snapshot_of
from tests.support.wire.zmq_ends import in_background, zmq_context


async def test_an_engine_that_sums_its_parameters_is_asked_for_nothing_else(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.engine.abilities = [SUMMER]
        follow.publish(1)
        await follow.changed()
        for version in (2, 3):
            follow.step(version, "model.norm.weight")
            await follow.changed()
            assert follow.sync.policy_version == version
            assert follow.holds_newest()
        assert (follow.engine.num_sums, follow.engine.num_checksums) == (3, 0)


@pytest.mark.parametrize("ability", [SUMMER, "another"])
async def test_an_engine_that_differs_from_what_was_sent_does_not_serve(tmp_path: Path, ability: str) -> None:
    def spoil(loaded: dict[str, Any]) -> None:
        follow.engine.damage = lambda _: None
        info, data = loaded["model.norm.weight"]
        loaded["model.norm.weight"] = (info, bytes([data[0] ^ 1, *data[1:]]))

    async with following(tmp_path) as follow:
        follow.engine.abilities = [ability]
        follow.publish(1)
        await follow.changed()
        follow.engine.damage = spoil
        follow.step(2, "model.embed_tokens.weight")
        await follow.changed()
        assert follow.sync.policy_version == 0
        assert "mismatched ['model.norm.weight']" in follow.sync.quarantined
        assert not follow.sync.may_generate.is_set()
        await follow.changed()
        assert (follow.sync.policy_version, follow.holds_newest()) == (2, True)


# --- engines that patch their parameters --------------------------------------------------------------------------------


async def test_an_engine_that_can_patches_what_changed_and_loads_nothing(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.engine.abilities = [PATCHER]
        follow.publish(1)
        await follow.changed()
        for version in range(2, 8):
            follow.step(version, "model.embed_tokens.weight", *["model.norm.weight"] * (version % 2))
            await follow.changed()
            assert follow.sync.policy_version == version
            assert follow.holds_newest()
        assert follow.engine.calls[-3:] == ["pause retract", "patch 7", "resume"]
        assert len(follow.engine.files) == 1
        assert [len(names) for names in follow.engine.patches] == [1, 2, 1, 2, 1, 2]
        assert follow.outcomes("no_patch") == 0
        assert "loaded" not in [path.name for path in follow.work_directory.iterdir()]


async def test_an_engine_that_cannot_loads_files_as_before(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.engine.abilities = ["other"]
        follow.publish(1)
        await follow.changed()
        follow.step(2, "model.embed_tokens.weight")
        await follow.changed()
        assert (follow.engine.patches, len(follow.engine.files)) == ([], 2)
        assert follow.holds_newest()


async def test_versions_that_came_while_one_was_loaded_are_one_patch(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.engine.abilities = [PATCHER]
        follow.publish(1)
        await follow.changed()

        await follow.three_versions_of_which_two_come_during_a_load()
        assert (follow.sync.policy_version, follow.holds_newest()) == (4, True)
        assert [sorted(names) for names in follow.engine.patches] == [
            ["model.norm.weight"],
            ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"],
        ]


@pytest.mark.parametrize("fault", ["refused", "damaged"])
async def test_a_patch_that_fails_is_followed_by_a_full_load_in_the_same_pause(tmp_path: Path, fault: str) -> None:
    def spoil(loaded: dict[str, Any]) -> None:
        follow.engine.damage = lambda _: None
        info, data = loaded["model.embed_tokens.weight"]
        loaded["model.embed_tokens.weight"] = (info, bytes([data[0] ^ 1, *data[1:]]))

    async with following(tmp_path) as follow:
        follow.engine.abilities = [PATCHER, SUMMER]
        follow.publish(1)
        await follow.changed()
        if fault == "refused":
            follow.engine.refuse_patch = "400 not patched"
        else:
            follow.engine.damage = spoil
        follow.step(2, "model.embed_tokens.weight")
        await follow.changed()
        assert (follow.sync.policy_version, follow.holds_newest()) == (2, True)
        assert follow.engine.calls[-4:] == ["pause retract", "patch 2", "update 2", "resume"]
        assert sorted(follow.engine.files[-1]) == sorted(follow.newest)
        assert (follow.outcomes("no_patch"), follow.outcomes("failed")) == (1, 0)
        # Nothing was fetched again, and the next version is a patch.
        assert (follow.fetches("snapshot"), follow.fetches("delta")) == (1, 1)
        follow.engine.refuse_patch = ""
        follow.step(3, "model.norm.weight")
        await follow.changed()
        assert follow.engine.calls[-3:] == ["pause retract", "patch 3", "resume"]
        assert follow.holds_newest()


async def test_an_engine_whose_patches_keep_failing_is_given_files(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.engine.abilities = [PATCHER]
        follow.engine.refuse_patch = "400 not patched"
        follow.publish(1)
        await follow.changed()
        for version in range(2, 4 + MAX_FAILED_PATCHES):
            follow.step(version, "model.norm.weight")
            await follow.changed()
            assert (follow.sync.policy_version, follow.holds_newest()) == (version, True)
        assert sum(call.startswith("patch") for call in follow.engine.calls) == MAX_FAILED_PATCHES


async def test_a_damaged_delta_is_no_patch(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.engine.abilities = [PATCHER]
        follow.publish(1)
        await follow.changed()
        follow.step(2, "model.norm.weight", damage=True)
        await follow.changed()
        assert (follow.sync.policy_version, follow.holds_newest()) == (2, True)
        assert follow.engine.patches == []
        assert follow.registry.get_sample_value("gspo_rollout_weights_damaged_total") == 1


async def test_a_rollout_that_starts_again_goes_on_from_its_own_copy(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.publish(1)
        await follow.changed()
        copy = shutil.copytree(follow.work_directory, tmp_path / "left")
        follow.step(2, "model.norm.weight")
        await follow.changed()
        store, newest = follow.served.store, follow.newest
    async with zmq_context() as context:
        again = Following(context, tmp_path)
        again.sync._replica = Replica(copy, shard_bytes=1)
        again.served.store.add(snapshot_of(1, Following.tensors(1).items()))
        again.served.store.add(store.snapshot(2), store.get(2, 1))  # type: ignore[arg-type]
        again.newest = newest
        async with in_background(again.served.authenticator.run(), again.served.server.run(), again.sync.run()):
            again.sync.announce(2, again.served.endpoint)
            await again.changed()
            assert (again.sync.policy_version, again.holds_newest()) == (2, True)
            assert (again.fetches("snapshot"), again.fetches("delta")) == (0, 1)
