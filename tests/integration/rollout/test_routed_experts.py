"""The experts that a real engine reports are those that the learner chooses for the same tokens and weights."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from gspo.model.policy import load_policy, prepare_policy
from gspo.moe.experts import ExpertShape
from gspo_services.rollout.sglang.client import Engine, PauseMode
from gspo_services.rollout.sglang.generation import Output, OutputDecoder
from gspo_services.rollout.sglang.routed import RoutedExperts
from tests.integration.conftest import SglangServer
from tests.support.engines.agreement import load
from tests.support.engines.chosen_experts import collected, of_learner, request
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE


@pytest_asyncio.fixture
async def engine(sglang_server: SglangServer) -> AsyncIterator[Engine]:
    """A client that asks for experts; afterwards the server holds its base checkpoint as version 0 again."""
    shape = ExpertShape.of(sglang_server.base_model)
    routed = RoutedExperts(shape.num_layers, shape.top_k, shape.num_experts)
    async with Engine(sglang_server.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=16, routed=routed) as client:
        yield client
        await client.control("/abort_request", {"abort_all": True}, timeout_s=60.0)
        await load(client, sglang_server.base, 0)


def policy(sglang_server: SglangServer, version: int) -> Any:
    model: Any = load_policy((sglang_server.base, sglang_server.other)[version], torch.float32)
    prepare_policy(model, logprob_chunk_tokens=16)
    return model


async def test_the_engine_reports_the_experts_that_the_learner_chooses(engine: Engine, sglang_server: SglangServer) -> None:
    """Also for the second of two answers to one prompt, which the engine has in its cache."""
    for rid in ("first", "second"):
        token_ids, experts, _ = await collected(engine, request(rid, 40))
        assert experts.shape == (40, 2, 2)
        np.testing.assert_array_equal(np.sort(experts, axis=-1), of_learner(policy(sglang_server, 0), token_ids))
    assert (np.sort(experts, axis=-1) != of_learner(policy(sglang_server, 1), token_ids)).any(axis=(1, 2)).mean() > 0.5


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_around_an_update_each_token_has_the_experts_that_sampled_it(
    engine: Engine, sglang_server: SglangServer, mode: PauseMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retracted request is computed again, and the engine would report the new weights' experts for its old tokens."""
    events, begun, decode = 0, asyncio.Event(), OutputDecoder.decode

    def counted(decoder: OutputDecoder, payload: bytes) -> Output:
        nonlocal events
        events += 1
        if events == 2:
            begun.set()
        return decode(decoder, payload)

    # The client gives nothing before the end, so only what it decodes shows that the engine has sampled some of the answer.
    monkeypatch.setattr(OutputDecoder, "decode", counted)
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(collected(engine, request("long", 300)))
        await begun.wait()
        await engine.pause(mode)
        await engine.update_weights_from_disk(sglang_server.other, 1)
        await engine.resume()
        token_ids, experts, versions = await asking
    num_old = int((versions == 0).sum())
    assert 16 <= num_old < 300
    assert (experts >= 0).all()
    found = np.sort(experts, axis=-1)
    np.testing.assert_array_equal(found[:num_old], of_learner(policy(sglang_server, 0), token_ids)[:num_old])
    if mode == "retract":  # In place, new tokens see the old cache: no model chooses as they did.
        np.testing.assert_array_equal(found[num_old:], of_learner(policy(sglang_server, 1), token_ids)[num_old:])
