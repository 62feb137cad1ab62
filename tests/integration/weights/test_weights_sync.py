"""An engine that follows the announced version: which tensors it gets, and when it serves."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_protocol.channels import WEIGHTS
from gspo_protocol.messages import Loaded, ManifestRequest, Probe, WeightChunk, WeightRequest
from gspo_services.rollout.weights.sync import MAX_FAILED_LOADS
from gspo_services.shared.runtime.errors import ConfigurationError, EndpointError, ServiceError, flatten
from tests.support.engines.following import RETRY_S, Following, following
from tests.support.wire.snapshots import snapshot_of
from tests.support.wire.zmq_ends import PATIENCE_S, ScriptedEnd, in_background, zmq_context


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


PROBE = Probe(5, 100, [-1.0, -2.0, -3.0, -4.0], "float32")


async def test_an_engine_scores_the_probe_of_its_first_version_and_no_later_one(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.probe = PROBE
        follow.publish(1)
        await follow.changed()
        assert follow.engine.calls == ["pause retract", "update 1", "resume", "probe"]
        follow.step(2, "model.norm.weight")
        await follow.changed()
        assert follow.engine.calls[4:] == ["pause retract", "update 2", "resume"]


@pytest.mark.parametrize("first", ["a snapshot", "a delta"])
async def test_an_engine_of_another_policy_never_serves_and_ends_the_rollout(first: str, tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - the end of the conversation is what is tested
        async with following(tmp_path) as follow:
            if first == "a delta":
                follow.publish(1)
                await follow.changed()
            follow.probe, follow.engine.moved = PROBE, 0.5
            follow.publish(4) if first == "a snapshot" else follow.step(4, "model.norm.weight")
            await asyncio.Event().wait()
    (error,) = flatten(caught.value)
    assert isinstance(error, ConfigurationError)
    assert str(error).startswith(
        "the server at http://scripted is not the learner's policy, and nothing was sampled: engine and"
    )
    assert not follow.sync.may_generate.is_set()
    assert follow.sync.policy_version == (0 if first == "a snapshot" else 1)


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

        await follow.three_versions_of_which_two_come_during_a_load()
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
    words = {"skipped tensor": "missing", "wrong version": "the server reports 3", "refused update": "out of memory"}[fault]
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
        assert "did not load policy version 2" in str(error)
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
