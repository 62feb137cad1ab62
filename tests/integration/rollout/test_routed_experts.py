"""The experts that a real engine reports are those that the learner chooses for the same tokens and weights."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray

from gspo.model.packing import TrainSequence, pack
from gspo.model.policy import load_policy, prepare_policy
from gspo.moe.experts import ExpertRecorder, ExpertShape
from gspo_protocol.messages.experts import decode_experts
from gspo_services.rollout.sglang.client import Engine, PauseMode
from gspo_services.rollout.sglang.generation import GenerateRequest, OutputPiece, SamplingParameters
from gspo_services.rollout.sglang.routed import RoutedExperts
from tests.integration.conftest import SglangServer
from tests.support.engines.agreement import load
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE
from tests.support.policy.forward import logprobs_of

PROMPT = [10, 20, 30, 40]


@pytest_asyncio.fixture
async def engine(sglang_server: SglangServer) -> AsyncIterator[Engine]:
    """A client that asks for experts; afterwards the server holds its base checkpoint as version 0 again."""
    shape = ExpertShape.of(sglang_server.base_model)
    routed = RoutedExperts(shape.num_layers, shape.top_k, shape.num_experts)
    async with Engine(sglang_server.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=16, routed=routed) as client:
        yield client
        await client.control("/abort_request", {"abort_all": True}, timeout_s=60.0)
        await load(client, sglang_server.base, 0)


def request(rid: str, num_tokens: int) -> GenerateRequest:
    sampling = SamplingParameters(max_new_tokens=num_tokens, ignore_eos=True, seed=5)
    return GenerateRequest(rid=rid, input_ids=PROMPT, sampling=sampling)


async def collected(engine: Engine, asked: GenerateRequest) -> tuple[list[int], NDArray[np.int16], NDArray[Any]]:
    """Token ids, experts and versions of an answer."""
    pieces: list[OutputPiece] = [piece async for piece in engine.generate(asked)]
    versions = [run.version for piece in pieces for run in piece.version_runs for _ in range(run.num_tokens)]
    experts = np.concatenate([decode_experts(piece.experts) for piece in pieces if piece.experts is not None])
    return [token for piece in pieces for token in piece.token_ids.tolist()], experts, np.array(versions)


def of_learner(model: Any, token_ids: list[int]) -> NDArray[np.int16]:
    """The experts with which the learner predicts each token of an answer to PROMPT, [n, layers, k], in order of number."""
    mask = np.arange(len(PROMPT) + len(token_ids)) >= len(PROMPT)
    sequence = TrainSequence(
        token_ids=np.array(PROMPT + token_ids), action_mask=mask, behaviour_logprobs=np.zeros(len(mask), np.float32),
        versions=np.where(mask, 0, -1), turn_ids=np.where(mask, 0, -1).astype(np.int32), temperature=1.0,
        advantages=np.zeros(len(mask), np.float32),
    )  # fmt: skip
    packed = pack([sequence], policy_version=0)
    recorder = ExpertRecorder(model)
    with recorder.recording():
        logprobs_of(model, packed)
    picks = recorder.take()
    assert picks is not None
    return np.sort(picks.indices_LTK.transpose(0, 1)[packed.mask_T].numpy().astype(np.int16), axis=-1)


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
    engine: Engine, sglang_server: SglangServer, mode: PauseMode
) -> None:
    """A retracted request is computed again, and the engine would report the new weights' experts for its old tokens."""
    beside = Engine(sglang_server.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=16)
    async with beside, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(collected(engine, request("long", 300)))
        watch = beside.generate(request("watch", 300))
        for _ in range(2):
            await anext(watch)  # The other request has about as many tokens by now.
        await engine.pause(mode)
        await engine.update_weights_from_disk(sglang_server.other, 1)
        await engine.resume()
        token_ids, experts, versions = await asking
        await watch.aclose()
    num_old = int((versions == 0).sum())
    assert 16 <= num_old < 300
    assert (experts >= 0).all()
    found = np.sort(experts, axis=-1)
    np.testing.assert_array_equal(found[:num_old], of_learner(policy(sglang_server, 0), token_ids)[:num_old])
    if mode == "retract":  # In place, new tokens see the old cache: no model chooses as they did.
        np.testing.assert_array_equal(found[num_old:], of_learner(policy(sglang_server, 1), token_ids)[num_old:])
