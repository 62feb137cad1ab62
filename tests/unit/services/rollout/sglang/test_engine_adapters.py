"""Which version a token has that was made with an adapter, and what is made of SGLang's answers about adapters."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_protocol.messages import Probe, VersionRun
from gspo_services.rollout.sglang import client
from gspo_services.rollout.sglang.client import EngineError, EngineRefused
from gspo_services.rollout.sglang.engine_adapters import Adapter
from gspo_services.rollout.sglang.generation import GenerateRequest, Output, SamplingParameters
from gspo_services.shared.weights import slot_name
from tests.support.engines.scripted_sglang import answer, ask, event, scripted, stream

ONE = Adapter(name="gspo-a-1-v4", version=4, base_version=1)
TWO = Adapter(name="gspo-a-2-v5", version=5, base_version=1)


def output(server_version: int, spans: list[tuple[int, int, int]] | None) -> Output:
    token_ids, logprobs = np.array([3, 4], dtype=np.int32), np.array([-1.0, -2.0], dtype=np.float32)
    return Output(token_ids=token_ids, logprobs=logprobs, server_version=server_version, finish_reason=None, spans=spans)


def test_output_has_the_version_of_its_adapter() -> None:
    tagged = ONE.of_version(output(1, [(1, 0, 2)]))
    assert (tagged.server_version, tagged.spans, tagged.token_ids.tolist()) == (4, [(4, 0, 2)], [3, 4])
    assert ONE.of_version(output(1, None)).spans is None


@pytest.mark.parametrize(("server_version", "spans"), [(2, None), (1, [(1, 0, 1), (2, 1, 2)]), (2, [(1, 0, 2)])])
def test_output_of_a_server_whose_own_weights_were_updated_has_no_version(
    server_version: int, spans: list[tuple[int, int, int]] | None
) -> None:
    with pytest.raises(ValueError, match="adapter of version 4 belongs to 1: somebody else has updated it"):
        ONE.of_version(output(server_version, spans))


async def test_a_request_names_the_adapter_that_is_served_and_its_tokens_have_that_version() -> None:
    async with scripted(lambda path, body: answer(200, event([5, 6, 7], 3, "length"))) as (engine, asked):
        before = await ask(engine)
        engine.serve({"": ONE})
        after = await ask(engine)
    assert [body.get("lora_path") for path, body in asked if path == "/generate"] == [None, ONE.name]
    assert [piece.version_runs for piece in (*before, *after)] == [[VersionRun(1, 3)], [VersionRun(4, 3)]]


async def test_of_several_adapters_a_request_has_its_own_and_none_without_a_name() -> None:
    async with scripted(lambda path, body: answer(200, event([5, 6, 7], 3, "length"))) as (engine, asked):
        engine.serve({"sums": ONE, "words": TWO})
        for name in ("words", "sums"):
            await ask(engine, adapter=name)
        for name in ("", "verbs"):
            with pytest.raises(ValueError, match=f"the request is for adapter '{name}', and sums, words are served: broker"):
                await ask(engine, adapter=name)
    assert [body["lora_path"] for path, body in asked if path == "/generate"] == [TWO.name, ONE.name]


async def test_a_request_that_is_cut_asks_for_its_rest_with_the_adapter_that_is_served_by_then() -> None:
    told: list[str] = []

    def reply(path: str, body: Any) -> bytes:
        if path == "/abort_request":
            told.append(body["rid"])
            return answer(200, {})
        if body["lora_path"] == TWO.name:
            return answer(200, event([8], 1, "length"))
        return stream(event([5, 6, 7, 8], 4), event([9], 5, "abort"))

    async with scripted(reply) as (engine, asked):
        engine.serve({"": ONE})
        pieces = engine.generate(_request(6))
        first = await anext(pieces)
        assert engine.uses(ONE.name)
        engine.serve({"": TWO})
        async with asyncio.TaskGroup() as tasks:
            cutting = tasks.create_task(engine.cut(ONE.name), name="cut")
            while not told:  # noqa: ASYNC110 - the scripted server has no event
                await asyncio.sleep(0.001)
            rest = [piece async for piece in pieces]
            await cutting
        assert not engine.uses(ONE.name)
    assert [piece.version_runs for piece in (first, *rest)] == [[VersionRun(4, 4)], [VersionRun(4, 1)], [VersionRun(5, 1)]]
    assert [piece.finish_reason for piece in rest] == [None, "length"]
    requests = [body for path, body in asked if path == "/generate"]
    assert requests[1]["input_ids"] == [1, 5, 6, 7, 8, 9]
    assert requests[1]["sampling_params"]["max_new_tokens"] == 1
    assert requests[0]["rid"] in told


def _request(num_tokens: int) -> GenerateRequest:
    return GenerateRequest(rid="r", input_ids=[1], sampling=SamplingParameters(max_new_tokens=num_tokens))


async def test_a_request_that_is_ended_for_good_is_not_asked_for_again() -> None:
    """A rollout drains while an adapter is being replaced."""
    async with scripted(lambda path, body: stream(event([5, 6, 7, 8], 4), event([9], 5, "abort"))) as (engine, asked):
        engine.serve({"": ONE})
        pieces = engine.generate(_request(6))
        await anext(pieces)
        for request in engine._open.values():
            request.cut = True
        await engine.stop_generating()
        assert [piece.finish_reason async for piece in pieces] == ["abort"]
    assert len([path for path, _ in asked if path == "/generate"]) == 1


@pytest.mark.parametrize(
    "reply",
    [
        answer(400, {"success": False, "error_message": "rank 16"}),
        answer(200, {"success": True, "loaded_adapters": {"other": "/w/n"}}),
        answer(200, {"success": True, "loaded_adapters": {"n": "/w/other"}}),
    ],
)
async def test_an_adapter_counts_as_loaded_when_the_server_names_it_with_its_path(reply: bytes) -> None:
    async with scripted(lambda path, body: reply) as (engine, _):
        with pytest.raises(EngineError, match=r"rank 16|adapter n was to be loaded from /w/n"):
            await engine.adapters.load("n", Path("/w/n"))


async def test_what_lies_in_other_slots_is_no_answer_and_no_parameter() -> None:
    mine, other = slot_name("n", 0, "o_proj", "A"), slot_name("n2", 0, "o_proj", "A")
    checksums = {"model.norm.weight": "1", mine: "2", other: "3"}
    async with scripted(lambda path, body: answer(200, {"ranks": [{"checksums": checksums}]})) as (engine, asked):
        assert await engine.adapters.slots("n") == {mine: "2"}
        assert [each.checksums for each in await engine.weights_checksums()] == [{"model.norm.weight": "1"}]
    assert asked[1][1] == {"action": "checksum", "skip_tensor_list": ["model.", "lm_head"]}


@pytest.mark.parametrize("logprobs", [[[None, 1, None], [-1.0, 2, None]], [[None, 1, None], [None, 2, None], [-1, 3, None]]])
async def test_log_probs_that_lack_a_token_are_an_error(logprobs: list[Any]) -> None:
    async with scripted(lambda path, body: answer(200, {"meta_info": {"input_token_logprobs": logprobs}})) as (engine, _):
        with pytest.raises(EngineError, match="log-probs of 2 tokens were asked for"):
            await engine.adapters.prompt_logprobs("n", [1, 2, 3])


async def test_a_probe_is_scored_window_by_window_with_the_adapter_that_is_served() -> None:
    """Each token and its whole vocabulary take memory in the server."""

    def score(path: str, body: Any) -> bytes:
        places = range(body["logprob_start_len"], len(body["input_ids"]))
        return answer(200, {"meta_info": {"input_token_logprobs": [[-float(place), 0, None] for place in places]}})

    async with scripted(score) as (engine, asked):
        found = await engine.probed(Probe(300, 50, [], "float32"))
        engine.serve({"sums": ONE, "words": TWO})
        await engine.probed(Probe(2, 50, [], "float32"))
    spans = [(1, 64), (96, 128), (224, 256), (268, 300)]
    assert found == [-float(place) for first, last in spans for place in range(first, last)]
    bodies = [body for path, body in asked if path == "/generate"]
    assert [(body["logprob_start_len"] + 1, len(body["input_ids"])) for body in bodies] == [*spans, (1, 2)]
    assert [body.get("lora_path") for body in bodies] == [None, None, None, None, ONE.name]


async def test_a_server_that_no_longer_has_the_adapter_fails_and_does_not_refuse_the_request() -> None:
    """A refused request would count against its trajectory."""
    said = [f"Got LoRA adapter that has never been loaded: {ONE.name}", "too long"]
    async with scripted(lambda path, body: answer(400, {"error": {"message": said[0]}})) as (engine, _):
        engine.serve({"": ONE})
        with pytest.raises(EngineError, match="never been loaded") as caught:
            await ask(engine)
        assert not isinstance(caught.value, EngineRefused)
        said.pop(0)
        with pytest.raises(EngineRefused, match="too long"):
            await ask(engine)


async def test_requests_whose_output_nobody_takes_do_not_hold_up_the_next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CUT_AGAIN_S", 0.01)
    async with scripted(lambda path, body: stream(event([5, 6, 7, 8], 4), event([9], 5, "abort"))) as (engine, asked):
        engine.serve({"": ONE})
        pieces = engine.generate(_request(6))
        await anext(pieces)
        engine.serve({"": TWO})
        assert not await engine.cut(ONE.name)
        assert [path for path, _ in asked].count("/abort_request") == client.CUTS
        await pieces.aclose()
        assert await engine.cut(ONE.name)
