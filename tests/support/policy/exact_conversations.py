"""Conversations of random agents on a real engine, and how far its log-probs are from those of the learner's model."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from gspo_protocol.messages import GroupSampling
from gspo_services.rollout.rendering import Renderer
from gspo_services.rollout.sglang import Engine, GenerateRequest, OutputPiece
from tests.support.agent_episodes import LedgerBroker, an_episode, sampling_of, shared_of
from tests.support.learner.tiny_model import reference_logprobs
from tests.support.policy.dialects import PATHS
from tests.support.policy.random_agents import MOST, STOPS, TEXTS, WHAT, act, learned

AT_A_TIME: Final = 32
SAMPLING: Final = sampling_of(max_tokens=1500, max_episode_tokens=8000, max_turn_tokens=8)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What random agents say, and how often."""

    texts: Sequence[str] = TEXTS
    most_acts: int = 5
    has_tools: bool = True
    sampling: GroupSampling = SAMPLING
    vocabulary: int = 600


class OwnRequests:
    """The engine for one of many brokers that all call their trajectory the same."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name

    def generate(self, request: GenerateRequest) -> AsyncGenerator[OutputPiece, None]:
        return self._engine.generate(replace(request, rid=f"{self._name}-{request.rid}"))


async def play(renderer: Renderer, engine: Any, rng: random.Random, kind: Kind) -> LedgerBroker:
    """One conversation, as a broker keeps it."""
    broker, said = LedgerBroker(kind.sampling, vocabulary=kind.vocabulary), []
    acts = [
        {
            "what": rng.choice(WHAT), "text": rng.choice(kind.texts), "tools": kind.has_tools and rng.random() < 0.5,
            "must": kind.has_tools and rng.random() < 0.3, "stop": rng.choice(STOPS), "max_tokens": rng.choice(MOST),
            "path": rng.choice(PATHS),
        }
        for _ in range(rng.randint(1, kind.most_acts))
    ]  # fmt: skip
    lease, arrays = broker.lease()
    async with an_episode(shared_of(renderer, broker, engine), (lease, arrays)) as calls:
        for each in acts:
            said = await calls.while_whole(act(calls, said, each))
        await calls.finish(1.0)
    return broker


async def played(engine: Engine, renderer: Renderer, number: int, kind: Kind) -> list[LedgerBroker]:
    """``number`` conversations at once; a failure ends the engine's requests of all."""
    places = asyncio.Semaphore(AT_A_TIME)

    async def one(seed: int) -> LedgerBroker:
        async with places:
            return await play(renderer, OwnRequests(engine, str(seed)), random.Random(seed), kind)

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(seed)) for seed in range(number)]
    finally:
        await engine.control("/abort_request", {"abort_all": True}, timeout_s=60.0)
    return [each.result() for each in running]


@dataclass
class Distances:
    """How far trained tokens' log-probs are from those of a model, which are subtracted."""

    counted: Counter[str]
    by_token: np.ndarray[Any, Any]
    by_sequence: np.ndarray[Any, Any]
    """The mean of each sequence's tokens."""

    @property
    def largest(self) -> float:
        return float(np.abs(self.by_token).max())


def distances(model: Any, brokers: Sequence[LedgerBroker], temperature: float) -> Distances:
    """Compare every trained token with ``model``, of transformers."""
    found = []
    for broker in brokers:
        for sequence in learned(broker):
            expected = reference_logprobs(model, sequence.token_ids.tolist(), temperature)
            actions = np.flatnonzero(sequence.action_mask)
            found.append(sequence.behaviour_logprobs[actions] - expected[actions - 1])
    counted = Counter(conversations=len(brokers), sequences=len(found), tokens=sum(map(len, found)))
    return Distances(counted, np.concatenate(found), np.array([each.mean() for each in found]))
