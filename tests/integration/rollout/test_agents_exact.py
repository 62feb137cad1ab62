"""Random agents on a real engine: every trained token has the log-prob that the learner's model gives it in its sequence."""

import os
from pathlib import Path

import numpy as np
import pytest

from gspo_services.rollout.episodes.log import Round
from gspo_services.rollout.rendering import create_renderer
from gspo_services.rollout.sglang import Engine
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.rollout.tokens import TokenIds
from tests.integration.conftest import SglangServer
from tests.support.engines.agreement import TOLERANCE, load
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE
from tests.support.policy import exact_conversations as conversations
from tests.support.policy.exact_conversations import Distances, Kind, distances
from tests.support.policy.random_agents import TEXTS
from tests.unit.services.rollout.rendering.models import TAGS, make

NUM_CONVERSATIONS = int(os.environ.get("GSPO_TEST_CONVERSATIONS", "60"))
KIND = Kind()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory: Path = tmp_path_factory.mktemp("agents-model")
    tokenizer = make(directory, TAGS)
    assert max(tokenizer.encode("".join(TEXTS))) < TINY_VOCAB_SIZE
    return tokenizer


async def played(server: SglangServer, tokenizer: ChatTokenizer, number: int) -> Distances:
    async with Engine(server.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=16) as engine:
        await load(engine, server.base, 1)  # no run has a version 0
        try:
            brokers = await conversations.played(engine, create_renderer(tokenizer, "template"), number, KIND)
        finally:
            await load(engine, server.base, 0)
    return distances(server.base_model, brokers, KIND.sampling.temperature)


async def test_engine_and_learner_agree_about_every_token(sglang_server: SglangServer, tokenizer: ChatTokenizer) -> None:
    found = await played(sglang_server, tokenizer, NUM_CONVERSATIONS)
    print(f"{dict(found.counted)}: largest difference {found.largest:.2e}")
    assert found.counted["sequences"] > NUM_CONVERSATIONS
    assert found.largest < TOLERANCE


async def test_a_prompt_that_is_rendered_again_is_caught(
    sglang_server: SglangServer, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = Round.prompt_ids

    def rendered_again(self: Round) -> TokenIds:
        text = tokenizer.decode(exact.fget(self).tolist())  # type: ignore[attr-defined]
        return np.array(tokenizer.encode(text), dtype=np.int32)

    monkeypatch.setattr(Round, "prompt_ids", property(rendered_again))
    assert (await played(sglang_server, tokenizer, 16)).largest > TOLERANCE
