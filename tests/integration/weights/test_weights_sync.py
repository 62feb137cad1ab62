"""An engine that follows the announced version: which tensors it gets, and when it serves."""

import asyncio
import contextlib
import gc
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq.asyncio
from prometheus_client import CollectorRegistry

from protocol.channels import WEIGHTS
from protocol.messages import Loaded, ManifestRequest, WeightChunk, WeightRequest
from services.learner.weights.delta import encode_delta
from services.learner.weights.snapshot import Delta
from services.rollout.metrics import RolloutMetrics
from services.rollout.weights.loading import MAX_FAILED_PATCHES
from services.rollout.weights.replica import Replica
from services.rollout.weights.sync import MAX_FAILED_LOADS, WeightSync
from services.rollout.weights.verify import Expected, Verifier
from services.runtime.clock import MonotonicClock
from services.runtime.errors import EndpointError, ServiceError, flatten
from services.weights import ABILITY
from tests.support.engines.scripted_engine import ScriptedEngine
from tests.support.wire.served_weights import Served, weights
from tests.support.wire.snapshots import snapshot_of
from tests.support.wire.zmq_ends import PATIENCE_S, ScriptedEnd, in_background, zmq_context

RETRY_S = 0.05


class Following:
    """A WeightSync between a real weight server and a scripted engine."""

    def __init__(self, context: zmq.asyncio.Context, directory: Path) -> None:
        self.served = Served(context)
        self.engine = ScriptedEngine()
        self.work_directory = directory / "work"
        self.registry = CollectorRegistry()
        self.sync = WeightSync(
            context=context,
            engine=self.engine,  # type: ignore[arg-type]
            work_directory=self.work_directory,
            pause_mode="retract",
            peer="rollout-0",
            session="s",
            clock=MonotonicClock(),
            metrics=RolloutMetrics(self.registry),
            retry_s=RETRY_S,
        )
        # A file for each tensor: the engine loads the files with changed tensors.
        self.sync._replica = Replica(self.work_directory, shard_bytes=1)
        self._changed = asyncio.Event()
        self.sync.on_change(self._changed.set)

    def publish(self, version: int) -> None:
        self.newest = self.tensors(version)
        self.served.store.add(snapshot_of(version, self.tensors(version).items()))
        self.sync.announce(version, self.served.endpoint)

    def step(self, version: int, *changed: str, damage: bool = False, computes: bool = False) -> None:
        """Publish the newest version with another value in each of the tensors ``changed``, and the delta to it.

        ``computes``: with the checksums that were asked for.
        """
        newest = self.served.store.newest
        assert newest is not None
        self.newest = {name: tensor.clone() for name, tensor in self.newest.items()}
        for name in changed:
            self.newest[name].view(-1)[0] += 1
        snapshot = snapshot_of(version, self.newest.items())
        delta = encode_delta(newest, snapshot)
        assert delta is not None
        if damage:
            delta = Delta(manifest=delta.manifest, data=delta.data ^ np.uint8(255))
        if computes:
            self.served.checksums.renew(newest, snapshot)
        self.served.store.add(snapshot, delta)
        self.sync.announce(version, self.served.endpoint)

    def holds_newest(self) -> bool:
        """Whether the engine has every tensor of the last published version."""
        return {name: data for name, (_, data) in self.engine.loaded.items()} == {
            name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in self.newest.items()
        }

    @staticmethod
    def tensors(version: int) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in weights(version).items() if "experts" not in name}

    async def changed(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._changed.wait()
        self._changed.clear()

    async def counted(self, name: str, number: float) -> None:
        """Wait until the server has counted this many."""
        async with asyncio.timeout(PATIENCE_S):
            while self.served.count(name) < number:  # noqa: ASYNC110 - what it waits for is in another task's counter
                await asyncio.sleep(0.005)

    def fetches(self, kind: str) -> float | None:
        return self.registry.get_sample_value("gspo_rollout_weight_fetches_total", {"kind": kind})

    def outcomes(self, outcome: str) -> float | None:
        return self.registry.get_sample_value("gspo_rollout_weight_updates_total", {"outcome": outcome})


@contextlib.asynccontextmanager
async def following(directory: Path) -> AsyncIterator[Following]:
    async with zmq_context() as context:
        follow = Following(context, directory)
        async with in_background(follow.served.authenticator.run(), follow.served.server.run(), follow.sync.run()):
            yield follow


async def test_an_announced_version_is_loaded_verified_and_reported(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        assert (follow.sync.policy_version, follow.sync.may_generate.is_set()) == (0, False)
        follow.publish(4)
        await follow.changed()
        assert (follow.sync.policy_version, follow.sync.quarantined) == (4, "")
        assert follow.sync.may_generate.is_set()
        assert follow.engine.calls == ["pause retract", "update 4", "resume"]
        for name, tensor in follow.tensors(4).items():
            assert follow.engine.loaded[name][1] == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        await follow.counted("weight_loads", 1)
        assert sorted(path.name for path in follow.work_directory.iterdir()) == [
            "version.msgpack", *(f"weights-{number:05}.safetensors" for number in range(4))
        ]  # fmt: skip
        follow.publish(5)
        await follow.changed()
        assert follow.sync.policy_version == 5


async def test_the_engine_gets_the_tensors_that_changed_since_the_version_that_it_serves(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.publish(1)
        await follow.changed()
        for version, changed in ((2, "model.norm.weight"), (3, "model.embed_tokens.weight")):
            follow.step(version, changed)
            await follow.changed()
            assert follow.sync.policy_version == version
            assert follow.engine.files[-1] == [changed]
            assert follow.holds_newest()
        assert sorted(follow.engine.files[0]) == sorted(follow.newest)
        assert (follow.fetches("snapshot"), follow.fetches("delta")) == (1, 2)


async def test_nothing_is_generated_while_weights_are_loaded(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        seen: list[bool] = []
        follow.publish(1)
        await follow.changed()
        follow.engine.damage = lambda _: seen.append(follow.sync.may_generate.is_set())
        follow.step(2, "model.norm.weight")
        await follow.changed()
        assert seen == [False]
        assert follow.sync.may_generate.is_set()


async def test_versions_that_were_skipped_are_loaded_together(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.publish(1)
        await follow.changed()

        def publish_more(_: dict[str, Any]) -> None:
            follow.engine.damage = lambda _: None
            follow.step(3, "model.layers.0.input_layernorm.weight")
            follow.step(4, "model.embed_tokens.weight")

        follow.engine.damage = publish_more
        follow.step(2, "model.norm.weight")
        await follow.changed()
        await follow.changed()
        assert follow.sync.policy_version == 4
        assert [sorted(file) for file in follow.engine.files[1:]] == [
            ["model.norm.weight"],
            ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"],
        ]
        assert follow.holds_newest()
        assert follow.fetches("delta") == 3


async def test_a_damaged_delta_is_counted_and_the_snapshot_fetched(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.publish(1)
        await follow.changed()
        follow.step(2, "model.norm.weight", damage=True)
        await follow.changed()
        assert follow.sync.policy_version == 2
        assert follow.holds_newest()
        assert follow.registry.get_sample_value("gspo_rollout_weights_damaged_total") == 1
        assert (follow.fetches("snapshot"), follow.fetches("delta")) == (2, 0)
        # The engine continued to serve meanwhile.
        assert (follow.outcomes("failed"), follow.outcomes("not_fetched")) == (0, 1)


async def test_an_engine_that_cannot_load_a_part_gets_all_tensors_from_then_on(tmp_path: Path) -> None:
    def spoil_when_partial(loaded: dict[str, Any]) -> None:
        if len(follow.engine.files[-1]) < len(follow.newest):
            info, data = loaded["model.embed_tokens.weight"]
            loaded["model.embed_tokens.weight"] = (info, bytes(len(data)))

    async with following(tmp_path) as follow:
        follow.engine.damage = spoil_when_partial
        follow.publish(1)
        await follow.changed()
        follow.step(2, "model.norm.weight")
        await follow.changed()
        assert follow.sync.policy_version == 0
        assert not follow.sync.may_generate.is_set()
        await follow.changed()
        assert (follow.sync.policy_version, follow.holds_newest()) == (2, True)
        follow.step(3, "model.norm.weight")
        await follow.changed()
        assert (follow.sync.policy_version, follow.holds_newest()) == (3, True)
        assert [len(file) for file in follow.engine.files] == [4, 1, 4, 4]
        assert follow.fetches("delta") == 2


async def test_a_version_that_is_announced_again_while_it_is_loaded_opens_no_connection_to_close_at_once(
    tmp_path: Path,
) -> None:
    async with following(tmp_path) as follow:
        follow.engine.damage = lambda _: follow.sync.announce(4, follow.served.endpoint)
        follow.publish(4)
        await follow.changed()
        await follow.counted("weight_loads", 1)
        follow.engine.damage = lambda _: None
        follow.publish(5)
        await follow.changed()
        await follow.counted("weight_loads", 2)
        assert follow.served.count("connections", outcome="accepted") == 2
        assert follow.served.count("refused_connections", reason="handshake") == 0


async def test_weights_that_arrive_damaged_in_the_engine_are_not_served(tmp_path: Path) -> None:
    def flip_a_bit(loaded: dict[str, Any]) -> None:
        info, data = loaded["model.norm.weight"]
        loaded["model.norm.weight"] = (info, bytes([data[0] ^ 1, *data[1:]]))

    async with following(tmp_path) as follow:
        follow.publish(1)
        await follow.changed()
        await follow.counted("weight_loads", 1)
        follow.engine.damage = flip_a_bit
        follow.publish(2)
        await follow.changed()
        assert follow.sync.policy_version == 0
        assert "model.norm.weight" in follow.sync.quarantined
        assert not follow.sync.may_generate.is_set()
        assert follow.engine.paused
        await follow.counted("weight_loads_failed", 1)
        assert follow.served.count("weight_loads") == 1
        assert follow.outcomes("failed") == 1
        follow.engine.damage = lambda _: None
        await follow.changed()
        assert (follow.sync.policy_version, follow.sync.quarantined) == (2, "")
        assert follow.sync.may_generate.is_set()
        assert not follow.engine.paused


@pytest.mark.parametrize("fault", ["skipped tensor", "wrong version", "refused update"])
async def test_an_engine_that_does_not_take_a_version_is_quarantined_and_in_the_end_given_up(
    fault: str, tmp_path: Path
) -> None:
    words = {"skipped tensor": "missing", "wrong version": "serves 3", "refused update": "out of memory"}[fault]
    async with zmq_context() as context:
        follow = Following(context, tmp_path)
        if fault == "skipped tensor":
            follow.engine.damage = lambda loaded: loaded.pop("model.norm.weight", None)
        elif fault == "wrong version":
            follow.engine.said_version = 3
        else:
            follow.engine.refuse_update = "out of memory"
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - the end of the conversation is what is tested
            async with in_background(follow.served.authenticator.run(), follow.served.server.run(), follow.sync.run()):
                follow.publish(2)
                async with asyncio.timeout(PATIENCE_S):
                    await asyncio.Event().wait()
        (error,) = flatten(caught.value)
        assert isinstance(error, ServiceError)
        assert "did not take policy version 2" in str(error)
        assert words in str(error)
        assert words in follow.sync.quarantined
        assert follow.sync.policy_version == 0
        assert follow.engine.paused
        assert "resume" not in follow.engine.calls
        assert sum(call == "update 2" for call in follow.engine.calls) == MAX_FAILED_LOADS
        assert follow.outcomes("loaded") == 0


async def test_an_announcement_that_precedes_the_version_is_followed_when_it_comes(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.sync.announce(1, follow.served.endpoint)
        async with asyncio.timeout(PATIENCE_S):
            while not follow.served.server._peers:  # noqa: ASYNC110 - the server keeps no event
                await asyncio.sleep(0.005)
        assert follow.engine.calls == []
        follow.publish(1)
        await follow.changed()
        assert follow.sync.policy_version == 1


async def test_one_step_catches_up_with_versions_published_during_a_load(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:

        def publish_more(_: dict[str, Any]) -> None:
            follow.engine.damage = lambda _: None
            follow.publish(2)
            follow.publish(3)

        follow.engine.damage = publish_more
        follow.publish(1)
        await follow.changed()
        assert follow.sync.policy_version == 1
        await follow.changed()
        assert follow.sync.policy_version == 3
        assert "update 2" not in follow.engine.calls


@pytest.mark.parametrize("announced", [2, 3])
async def test_a_version_that_the_broker_has_not_announced_is_fetched_and_not_loaded(tmp_path: Path, announced: int) -> None:
    """Version 2 is served already. It is announced next, or its learner dies first and version 3 takes its place."""
    async with following(tmp_path) as follow:
        for version in (1, 2):
            follow.served.store.add(snapshot_of(version, follow.tensors(version).items()))
        num_bytes = snapshot_of(2, follow.tensors(2).items()).manifest.num_bytes
        follow.sync.announce(1, follow.served.endpoint)
        await follow.counted("weight_bytes_sent", num_bytes)
        for _ in range(3):  # the broker repeats itself
            follow.sync.announce(1, follow.served.endpoint)
            await asyncio.sleep(RETRY_S)
        assert follow.engine.calls == []
        if announced == 3:
            follow.publish(3)
        else:
            follow.sync.announce(2, follow.served.endpoint)
        await follow.changed()
        assert follow.engine.calls == ["pause retract", f"update {announced}", "resume"]
        assert follow.sync.policy_version == announced


async def test_a_full_directory_is_named_with_the_way_out(tmp_path: Path) -> None:
    async with zmq_context() as context:
        follow = Following(context, tmp_path)
        follow.work_directory.write_text("a file where a directory should be")
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - the end of the conversation is what is tested
            async with in_background(follow.served.authenticator.run(), follow.served.server.run(), follow.sync.run()):
                follow.publish(1)
                async with asyncio.timeout(PATIENCE_S):
                    await asyncio.Event().wait()
        (error,) = flatten(caught.value)
        assert isinstance(error, ServiceError)
        assert "choose another rollout.weights_directory" in str(error)
        assert follow.engine.calls == []


async def test_a_load_is_reported_with_the_digest_that_was_sent(tmp_path: Path) -> None:
    """Against a scripted server, to see the report itself."""
    snapshot = snapshot_of(6, Following.tensors(6).items())
    async with zmq_context() as context:
        follow = Following(context, tmp_path)
        end = ScriptedEnd(context, WEIGHTS)
        async with in_background(follow.sync.run()):
            follow.sync.announce(6, end.endpoint)
            await end.welcome()
            await end.expect(ManifestRequest)
            await end.reply(snapshot.manifest)
            await end.expect(WeightRequest)
            await end.reply(WeightChunk(policy_version=6, chunk=0), {"data": snapshot.chunk(0)})
            loaded = await end.expect(Loaded)
    assert (loaded.policy_version, loaded.digest, loaded.error) == (6, snapshot.manifest.digest, "")
    assert loaded.pause_s > 0


async def test_a_hint_of_a_version_that_is_served_already_does_no_harm(tmp_path: Path) -> None:
    """The connection to the weight server ends before it began; its socket must not be left to libzmq's thread."""
    async with following(tmp_path) as follow:
        # The broker repeats the newest version about every second, also during the load.
        follow.engine.damage = lambda _: follow.sync.announce(2, follow.served.endpoint)
        follow.publish(2)
        await follow.changed()
        await follow.counted("weight_loads", 1)
        gc.collect()
        follow.publish(3)
        await follow.changed()
        assert follow.sync.policy_version == 3


async def test_an_endpoint_that_nobody_can_connect_to_costs_a_serving_rollout_nothing(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.publish(1)
        await follow.changed()
        follow.sync.announce(2, "tcp://w")
        async with asyncio.timeout(PATIENCE_S):
            while not follow.outcomes("not_fetched"):  # noqa: ASYNC110 - what it waits for is in another task's counter
                await asyncio.sleep(RETRY_S)
        assert follow.sync.policy_version == 1
        assert follow.sync.may_generate.is_set()
        follow.publish(3)
        await follow.changed()
        assert follow.sync.policy_version == 3


async def test_a_first_version_that_nobody_can_connect_to_ends_the_rollout_with_the_reason(tmp_path: Path) -> None:
    async with zmq_context() as context:
        follow = Following(context, tmp_path)
        follow.sync.announce(1, "tcp://w")
        with pytest.raises(EndpointError, match="cannot connect to 'tcp://w'"):
            async with asyncio.timeout(PATIENCE_S):
                await follow.sync.run()


async def test_the_learner_computes_the_checksums_after_it_was_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []
    expect = Verifier.expect

    async def counted(self: Verifier, tensors: Any) -> Expected:
        computed.append("here")
        return await expect(self, tensors)

    monkeypatch.setattr(Verifier, "expect", counted)
    async with following(tmp_path) as follow:
        follow.publish(1)
        await follow.changed()
        assert computed == ["here"]
        for version in (2, 3):
            follow.step(version, "model.norm.weight", computes=True)
            await follow.changed()
            assert follow.sync.policy_version == version
            assert follow.holds_newest()
        assert computed == ["here"]


async def test_an_engine_that_differs_from_what_the_learner_says_does_not_serve(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.publish(1)
        await follow.changed()
        follow.served.checksums.known("", "cpu")
        lie = {"model.norm.weight": "0" * 16}
        known = follow.served.checksums.known
        follow.served.checksums.known = lambda *of: {**known(*of), **lie}  # type: ignore[method-assign]
        follow.step(2, "model.embed_tokens.weight", computes=True)
        await follow.changed()
        assert follow.sync.policy_version == 0
        assert "mismatched ['model.norm.weight']" in follow.sync.quarantined
        assert not follow.sync.may_generate.is_set()
        lie.clear()
        await follow.changed()
        assert (follow.sync.policy_version, follow.holds_newest()) == (2, True)


async def test_a_version_whose_checksums_lack_a_parameter_is_not_served(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.publish(1)
        await follow.changed()
        follow.served.checksums.known = lambda *_: {"model.norm.weight": "0" * 16}  # type: ignore[method-assign]
        follow.step(2, "model.embed_tokens.weight")
        await follow.changed()
        assert follow.sync.policy_version == 0
        assert "model.embed_tokens.weight" in follow.sync.quarantined


# --- engines that patch their parameters --------------------------------------------------------------------------------


async def test_an_engine_that_can_patches_what_changed_and_loads_nothing(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.engine.abilities = [ABILITY]
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
        follow.engine.abilities = [ABILITY]
        follow.publish(1)
        await follow.changed()

        def publish_more(_: dict[str, Any]) -> None:
            follow.engine.damage = lambda _: None
            follow.step(3, "model.layers.0.input_layernorm.weight")
            follow.step(4, "model.embed_tokens.weight")

        follow.engine.damage = publish_more
        follow.step(2, "model.norm.weight")
        await follow.changed()
        await follow.changed()
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
        follow.engine.abilities = [ABILITY]
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
        follow.engine.abilities = [ABILITY]
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
        follow.engine.abilities = [ABILITY]
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
