"""Random agents on a real engine: every trained token has the log-prob that the learner's model gives it in its sequence."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from gspo_services.rollout.episodes.log import Round
from gspo_services.rollout.rendering import Renderer, create_renderer
from gspo_services.rollout.sglang import Engine, GenerateRequest, OutputPiece
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.rollout.tokens import TokenIds
from tests.integration.conftest import SglangServer
from tests.support.agent_episodes import LedgerBroker, an_episode, sampling_of, shared_of
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, reference_logprobs
from tests.support.policy.dialects import PATHS
from tests.support.policy.random_agents import MOST, STOPS, TEXTS, WHAT, act, learned
from tests.unit.services.rollout.rendering.models import TAGS, make

NUM_CONVERSATIONS = int(os.environ.get("GSPO_TEST_CONVERSATIONS", "60"))
AT_A_TIME = 32
MOST_ACTS = 5
TOLERANCE = 2e-5
"""Float32 against float32: only the order of additions differs."""
SAMPLING = sampling_of(max_tokens=1500, max_episode_tokens=8000, max_turn_tokens=8)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory: Path = tmp_path_factory.mktemp("agents-model")
    tokenizer = make(directory, TAGS)
    assert max(tokenizer.encode("".join(TEXTS))) < TINY_VOCAB_SIZE
    return tokenizer


class OwnRequests:
    """The engine for one of many brokers that all call their trajectory the same."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name

    def generate(self, request: GenerateRequest) -> AsyncGenerator[OutputPiece, None]:
        return self._engine.generate(replace(request, rid=f"{self._name}-{request.rid}"))


async def play(renderer: Renderer, engine: Any, rng: random.Random) -> LedgerBroker:
    """One conversation, as a broker keeps it."""
    broker, said = LedgerBroker(SAMPLING), []
    acts = [
        {
            "what": rng.choice(WHAT), "text": rng.choice(TEXTS), "tools": rng.random() < 0.5, "must": rng.random() < 0.3,
            "stop": rng.choice(STOPS), "max_tokens": rng.choice(MOST), "path": rng.choice(PATHS),
        }
        for _ in range(rng.randint(1, MOST_ACTS))
    ]  # fmt: skip
    lease, arrays = broker.lease()
    async with an_episode(shared_of(renderer, broker, engine), (lease, arrays)) as calls:
        for each in acts:
            said = await calls.while_whole(act(calls, said, each))
        await calls.finish(1.0)
    return broker


async def played(server: SglangServer, tokenizer: ChatTokenizer, number: int) -> list[LedgerBroker]:
    renderer, places = create_renderer(tokenizer, "template"), asyncio.Semaphore(AT_A_TIME)

    async def one(seed: int, engine: Engine) -> LedgerBroker:
        async with places:
            return await play(renderer, OwnRequests(engine, str(seed)), random.Random(seed))

    async with Engine(server.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=16) as engine:
        await load(engine, server, 1)  # no run has a version 0
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(one(seed, engine)) for seed in range(number)]
        finally:
            await engine.control("/abort_request", {"abort_all": True}, timeout_s=60.0)
            await load(engine, server, 0)
    return [each.result() for each in running]


async def load(engine: Engine, server: SglangServer, version: int) -> None:
    await engine.pause("retract")
    await engine.update_weights_from_disk(server.base, version)
    await engine.resume()


def worst(server: SglangServer, brokers: list[LedgerBroker], counted: Counter[str]) -> float:
    """The largest difference of a trained token's log-prob from the learner's."""
    found = 0.0
    for broker in brokers:
        for sequence in learned(broker):
            expected = reference_logprobs(server.base_model, sequence.token_ids.tolist(), SAMPLING.temperature)
            actions = np.flatnonzero(sequence.action_mask)
            found = max(found, float(np.abs(sequence.behaviour_logprobs[actions] - expected[actions - 1]).max()))
            counted["sequences"] += 1
            counted["tokens"] += len(actions)
    return found


async def test_engine_and_learner_agree_about_every_token(sglang_server: SglangServer, tokenizer: ChatTokenizer) -> None:
    counted = Counter[str]()
    brokers = await played(sglang_server, tokenizer, NUM_CONVERSATIONS)
    difference = worst(sglang_server, brokers, counted)
    print(f"{NUM_CONVERSATIONS} conversations, {dict(counted)}: largest difference {difference:.2e}")
    assert counted["sequences"] > NUM_CONVERSATIONS
    assert difference < TOLERANCE


async def test_a_prompt_that_is_rendered_again_is_caught(
    sglang_server: SglangServer, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = Round.prompt_ids

    def rendered_again(self: Round) -> TokenIds:
        text = tokenizer.decode(exact.fget(self).tolist())  # type: ignore[attr-defined]
        return np.array(tokenizer.encode(text), dtype=np.int32)

    monkeypatch.setattr(Round, "prompt_ids", property(rendered_again))
    brokers = await played(sglang_server, tokenizer, 16)
    assert worst(sglang_server, brokers, Counter()) > TOLERANCE
