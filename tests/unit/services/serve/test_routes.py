"""What the service says over HTTP where nothing is computed."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from gspo_services.serve.routes import ClientRoutes, ServedModel
from gspo_services.serve.table import CallTable, OtherCallError
from gspo_services.serve.wire import CallLimits
from tests.unit.services.serve.calls import request

MODEL = "s:train:0"
KEY = "tml-0123456789abcdef"
Asked = TestClient[web.Request, web.Application]


class Accepting:
    """Execution that only accepts."""

    def __init__(self) -> None:
        self.accepted: list[tuple[Any, ...]] = []

    def knows(self, model: str) -> bool:
        return model == MODEL

    def num_waiting(self, model: str) -> int:
        return 0

    def rank(self, model: str) -> int | None:
        return 8 if model == MODEL else None

    async def accept(self, model: str, seq: int, kind: str, body: bytes) -> str:
        if seq == 9:
            raise OtherCallError("call 9 was another")
        self.accepted.append((model, seq, kind))
        return f"{model}:{seq}"

    async def answer(self, request_id: str, timeout_s: float) -> bytes | None:
        answers = {f"{MODEL}:1": b'{"metrics": {}}', f"{MODEL}:2": b"\n\x00", f"{MODEL}:3": None}
        return answers[request_id]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Asked]:
    table, execution, nothing = CallTable(tmp_path / "calls.sqlite"), Accepting(), SimpleNamespace(knows=lambda _: False)
    routes = ClientRoutes(
        table, execution, nothing, nothing,
        model=ServedModel(names=("tiny",), path=tmp_path, longest=8), limits=CallLimits(vocabulary=9, longest=8),
        directory=tmp_path, key=KEY,
    )  # fmt: skip
    async with TestClient(TestServer(routes.application()), headers={"X-API-Key": KEY}) as asked:
        yield asked
    table.close()


async def said(client: Asked, path: str, **options: Any) -> tuple[int, Any]:
    async with client.post(f"/api/v1/{path}", **options) as answer:
        return answer.status, await answer.json()


async def test_calls_with_a_number_are_accepted_whatever_else_they_hold(client: Asked) -> None:
    body = request().SerializeToString()
    assert await said(client, "forward_backward", data=body) == (200, {"request_id": f"{MODEL}:4", "model_id": MODEL})
    odd = {"model_id": MODEL, "seq_id": 5, "adam_params": {"beta1": "x"}}
    assert (await said(client, "optim_step", json=odd))[0] == 200
    assert (await said(client, "create_model", json={"session_id": "s", "model_seq_id": 0, "base_model": "x"}))[0] == 200
    assert (await said(client, "save_weights", json={"model_id": MODEL, "seq_id": 9}))[0] == 409


async def test_what_cannot_be_told_apart_is_refused_with_words(client: Asked) -> None:
    status, text = await said(client, "forward_backward", data=b"\xff")
    assert (status, text["detail"][:78]) == (
        400,
        "/api/v1/forward_backward: the body is no ForwardBackwardRequest in protobuf: E",
    )
    status, text = await said(client, "optim_step", json={"model_id": "s:train:7", "seq_id": 1})
    assert (status, text["detail"]) == (404, "model 's:train:7' is not here; make it with create_model")
    status, text = await said(client, "optim_step", json={"model_id": MODEL, "seq_id": 0})
    assert (status, text["detail"]) == (400, "/api/v1/optim_step: seq_id is 0; a model's calls are counted from 1")
    status, text = await said(client, "optim_step", data=b"{")
    assert (status, text["detail"]) == (400, "/api/v1/optim_step: Input data was truncated")
    status, text = await said(client, "no/such", json={})
    assert (status, text["detail"][:37]) == (404, "POST /api/v1/no/such is not served he")
    status, text = await said(client, "asample", json={"sampling_session_id": "x", "seq_id": 1})
    assert (status, text["detail"]) == (404, "sampling session 'x' is not here")
    status, text = await said(client, "healthz", headers={"X-API-Key": "tml-other"})
    assert status == 401


async def test_futures_are_answered_in_the_form_that_they_have(client: Asked) -> None:
    found = []
    for number in (1, 2, 3, 4):
        async with client.post("/api/v1/retrieve_future", json={"request_id": f"{MODEL}:{number}"}) as answer:
            found.append((answer.status, answer.content_type))
    json = "application/json"
    assert found == [(200, json), (200, "application/x-protobuf"), (408, json), (410, json)]


async def test_a_model_is_described(client: Asked) -> None:
    status, told = await said(client, "get_info", json={"model_id": MODEL})
    assert (status, told["lora_rank"], told["model_name"]) == (200, 8, "tiny")
    assert (await said(client, "get_info", json={"model_id": "x"}))[0] == 404
    async with client.get("/api/v1/get_server_capabilities") as answer:
        (model,) = (await answer.json())["supported_models"]
    assert model == {"model_name": "tiny", "max_context_length": 8, "trainable": True, "sampleable": True}
    session = {"session_id": "s", "sampling_session_seq_id": 0}
    assert (await said(client, "create_sampling_session", json={**session, "base_model": "big"}))[0] == 404
    assert await said(client, "create_sampling_session", json={**session, "base_model": "tiny"}) == (
        200,
        {"type": "create_sampling_session", "sampling_session_id": "s:sample:0"},
    )
    assert (await said(client, "create_sampling_session", json={**session, "model_path": "tinker://a/b/c"}))[0] == 404
