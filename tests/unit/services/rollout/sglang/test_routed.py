"""Experts that an engine reports: asked for, checked, and kept only where they are those that sampled the token."""

import asyncio
import base64
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest

from gspo_protocol.messages.experts import decode_experts
from gspo_services.rollout.sglang import client
from gspo_services.rollout.sglang.client import EngineError, PauseMode
from gspo_services.rollout.sglang.routed import RoutedExperts
from gspo_services.shared.weights import ServedError
from tests.support.engines import scripted_sglang
from tests.support.engines.scripted_sglang import answer, ask, event, scripted

ROUTED = RoutedExperts(num_layers=2, top_k=1, num_experts=4)


def encoded(*rows: list[int]) -> str:
    return base64.b64encode(np.array(rows, "<i4").tobytes()).decode()


def last(token_ids: list[int], total: int, experts: str | None, finish: str = "length", **more: Any) -> dict[str, Any]:
    """The end of an answer."""
    made = event(token_ids, total, finish)
    made["meta_info"] |= {"routed_experts": experts, **more}
    return made


@pytest.fixture(autouse=True)
def _reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scripted_sglang.INFO, "enable_return_routed_experts", True)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4}, RoutedExperts(4, 2, 8)),
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}, RoutedExperts(3, 2, 8)),
    ],
)
def test_the_shape_is_that_of_the_models_configuration(config: dict[str, Any], found: RoutedExperts) -> None:
    assert RoutedExperts.of(config) == found


def test_what_an_engine_reports_of_dense_layers_is_left_out() -> None:
    config = {"n_routed_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 3, "first_k_dense_replace": 1}
    routed = RoutedExperts.of(config)
    assert (routed.num_layers, routed.dense_layers) == (2, (0,))
    found = routed.read(encoded([0, 1, 2], [0, 3, 1]), [(1, 0, 2)], None)
    assert decode_experts(found).tolist() == [[[1], [2]], [[3], [1]]]
    with pytest.raises(ValueError, match="has 4 values, 2 tokens x 3 layers x 1 experts"):
        routed.read(encoded([1, 2], [3, 1]), [(1, 0, 2)], None)


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a qwen3 model has no experts .*; set objective.routing_replay = false"):
        RoutedExperts.of({"model_type": "qwen3", "num_hidden_layers": 4})
    with pytest.raises(ServedError, match=r"num_experts is eight: expected a number from 1 up; correct config\.json"):
        RoutedExperts.of({"num_experts": "eight", "num_hidden_layers": 4})


def test_a_model_whose_choices_no_message_has_room_for_is_refused_before_any_answer_is() -> None:
    large = {"num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 60}
    with pytest.raises(
        ValueError,
        match=r"10 of 512 experts in 60 layers take 1200 bytes a token, 1024 allowed .*; set .*_from = \"learner\"",
    ):
        RoutedExperts.of(large)
    routed = RoutedExperts.of(large | {"num_hidden_layers": 51})
    assert routed.read(None, [(1, 0, 2)], None, may_lack=True).shape == (2, 51, 10, 2)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("?", "routed_experts is not base64 of int32 values"),
        (encoded([0, 1]), "routed_experts has 2 values, 2 tokens x 2 layers x 1 experts expected: serve the model of"),
        (None, "routed_experts has 0 values, 2 tokens x 2 layers x 1 experts expected"),
        (encoded([0, 1], [4, 0]), "routed_experts has experts 0 to 4, the model has 0 to 3"),
        (encoded([0, 1], [-1, 0]), "routed_experts has experts -1 to 1, the model has 0 to 3"),
    ],
)
def test_what_is_no_choice_of_this_model_is_refused(text: str | None, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ROUTED.read(text, [(1, 0, 2)], None)


def test_after_a_retracted_update_only_tokens_of_the_servers_version_have_experts() -> None:
    spans, text = [(1, 0, 1), (2, 1, 3)], encoded([0, 1], [2, 3], [3, 0])
    assert decode_experts(ROUTED.read(text, spans, 2))[..., 0].tolist() == [[-1, -1], [2, 3], [3, 0]]
    assert decode_experts(ROUTED.read(text, spans, None))[..., 0].tolist() == [[0, 1], [2, 3], [3, 0]]
    assert decode_experts(ROUTED.read(None, spans, 2, may_lack=True)).max() == -1


async def test_tokens_come_with_their_experts_at_the_end_of_the_request() -> None:
    events = [event([5, 6, 7, 8], 4), last([9], 5, encoded(*[[each, 3] for each in (0, 1, 2, 3, 0)]))]
    async with scripted(lambda path, body: scripted_sglang.stream(*events), routed=ROUTED) as (engine, asked):
        (piece,) = await ask(engine, 5)
    assert piece.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert piece.experts is not None
    assert decode_experts(piece.experts)[:, 0, 0].tolist() == [0, 1, 2, 3, 0]
    first = piece.first(2).experts
    assert first is not None
    assert len(first) == 2
    body = asked[-1][1]
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 0)


async def test_a_long_answer_is_asked_for_in_parts_so_that_no_more_is_held() -> None:
    def reply(path: str, body: Any) -> bytes:
        if path != "/generate":
            return answer(200, {})
        if len(body["input_ids"]) == 1:
            return scripted_sglang.stream(
                event([5] * 4, 4), event([6] * 4, 8), last([7], 9, encoded(*[[1, 2]] * 9), "abort")
            )
        return answer(200, last([8], 1, encoded([3, 3])))

    async with scripted(reply, routed=ROUTED, hold_limit_tokens=6) as (engine, asked):
        pieces = await ask(engine, 10)
    assert [len(piece.token_ids) for piece in pieces] == [9, 1]
    asks = [body for path, body in asked if path == "/generate"]
    assert [(len(body["input_ids"]), body["routed_experts_start_len"]) for body in asks] == [(1, 0), (10, 9)]
    assert [path for path, _ in asked].count("/abort_request") == 1


async def test_before_a_retracted_update_requests_end_with_their_experts_and_the_rest_is_asked_for_after_it() -> None:
    begun, aborted = asyncio.Event(), asyncio.Event()

    async def first() -> bytes:
        begun.set()
        await aborted.wait()
        return scripted_sglang.stream(event([5, 6, 7, 8], 4), last([9], 5, encoded(*[[1, 1]] * 5), "abort"))

    def reply(path: str, body: Any) -> bytes | Awaitable[bytes]:
        if path == "/generate":
            return first() if len(body["input_ids"]) == 1 else answer(200, last([3], 1, encoded([2, 2])))
        if path == "/abort_request":
            aborted.set()
        return answer(200, {})

    async with scripted(reply, routed=ROUTED) as (engine, asked), asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(ask(engine, 6))
        await begun.wait()
        await engine.pause("retract")
        pieces = await asking
    assert [path for path, _ in asked] == ["/server_info", "/generate", "/abort_request", "/pause_generation", "/generate"]
    experts = [decode_experts(piece.experts)[:, 0, 0].tolist() for piece in pieces if piece.experts is not None]
    assert experts == [[1] * 5, [2]]


@pytest.mark.parametrize(("mode", "expected"), [("in_place", [1] * 5), ("retract", [-1, 1, 1, 1, 1])])
async def test_old_tokens_of_a_request_that_was_retracted_all_the_same_have_no_experts(
    mode: PauseMode, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CUTS_OF_ALL", 0)
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 5}]
    ending = last([9], 5, encoded(*[[1, 1]] * 5), weight_versions=spans, weight_version="2")
    pauses = []

    def reply(path: str, body: Any) -> bytes:
        if path != "/generate":
            return answer(200, {})
        pauses.append(asyncio.get_running_loop().create_task(engine.pause(mode)))
        return scripted_sglang.stream(event([5, 6, 7, 8], 4), ending)

    async with scripted(reply, routed=ROUTED) as (engine, _):
        (piece,) = await ask(engine, 5)
        await asyncio.gather(*pauses)
    assert piece.experts is not None
    assert decode_experts(piece.experts)[:, 0, 0].tolist() == expected


async def test_a_server_that_reports_no_experts_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(scripted_sglang.INFO, "enable_return_routed_experts")
    with pytest.raises(EngineError, match=r'start it with --enable-return-routed-experts, or set .* = "learner"'):
        async with scripted(lambda path, body: b"", routed=ROUTED):
            pass


async def test_an_answer_without_experts_is_an_engine_error() -> None:
    async with scripted(lambda path, body: answer(200, last([5], 1, None)), routed=ROUTED) as (engine, _):
        with pytest.raises(EngineError, match="routed_experts has 0 values, 1 tokens x 2 layers"):
            await ask(engine, 1)


async def test_without_the_setting_nothing_is_asked_for() -> None:
    async with scripted(lambda path, body: answer(200, event([5], 1, "stop"))) as (engine, asked):
        (piece,) = await ask(engine, 1)
    assert piece.experts is None
    assert not {"return_routed_experts", "routed_experts_start_len"} & set(asked[-1][1])
