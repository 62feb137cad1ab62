"""For the same tokens and weights, the engine and the learner's own forward pass agree; any mix-up would show."""

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest_asyncio
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from gspo.model.packing import TrainSequence, pack
from gspo.model.policy import load_policy, prepare_policy
from gspo_services.rollout.sglang.client import Engine
from gspo_services.rollout.sglang.generation import GenerateRequest, SamplingParameters
from tests.integration.conftest import SglangServer
from tests.support.engines.agreement import TOLERANCE, load
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, checkpoint_tensors
from tests.support.policy.forward import logprobs_of
from tests.support.wire.engine_files import write_safetensors

CAUGHT = 100 * TOLERANCE
PROMPTS = ([10, 20, 30, 40], [7, 9], [100, 101, 102, 103, 104, 105, 106])


@pytest_asyncio.fixture
async def engine(sglang_server: SglangServer) -> AsyncIterator[Engine]:
    """A client; afterwards the server holds its base checkpoint as version 0 again."""
    async with Engine(sglang_server.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=16) as client:
        yield client
        await load(client, sglang_server.base, 0)


async def sampled(engine: Engine, temperature: float) -> list[TrainSequence]:
    """One trajectory for each prompt, as the learner receives it."""
    sequences = []
    for number, prompt in enumerate(PROMPTS):
        sampling = SamplingParameters(max_new_tokens=40, temperature=temperature, ignore_eos=True, seed=number)
        request = GenerateRequest(rid=f"agree-{temperature}-{number}", input_ids=prompt, sampling=sampling)
        pieces = [piece async for piece in engine.generate(request)]
        token_ids = np.concatenate([np.asarray(prompt), *(piece.token_ids for piece in pieces)]).astype(np.int64)
        is_action = np.arange(len(token_ids)) >= len(prompt)
        logprobs = np.zeros(len(token_ids), dtype=np.float32)
        logprobs[is_action] = np.concatenate([piece.logprobs for piece in pieces])
        sequences.append(
            TrainSequence(
                token_ids=token_ids,
                action_mask=is_action,
                behaviour_logprobs=logprobs,
                versions=np.where(is_action, 0, -1),
                turn_ids=np.where(is_action, 0, -1).astype(np.int32),
                temperature=temperature,
                advantages=np.zeros(len(token_ids), dtype=np.float32),
            )
        )
    return sequences


def largest_difference(checkpoint: Path, sequences: list[TrainSequence]) -> float:
    """Largest |learner - engine| over the action tokens, on the learner's packed path."""
    model: Any = load_policy(checkpoint, torch.float32)
    prepare_policy(model, logprob_chunk_tokens=16)
    packed = pack(sequences, policy_version=0)
    result = logprobs_of(model, packed)
    difference: NDArray[np.float32] = (result.logprobs_T - packed.behaviour_T)[packed.mask_T].abs().numpy()
    assert len(difference) == 40 * len(sequences)
    return float(difference.max())


async def test_the_learner_agrees_with_the_engine_at_the_sampling_temperature(
    engine: Engine, sglang_server: SglangServer
) -> None:
    assert largest_difference(sglang_server.base, await sampled(engine, 1.0)) <= TOLERANCE
    assert largest_difference(sglang_server.base, await sampled(engine, 0.6)) <= TOLERANCE


async def test_a_wrong_temperature_would_show(engine: Engine, sglang_server: SglangServer) -> None:
    wrong = [dataclasses.replace(sequence, temperature=1.02) for sequence in await sampled(engine, 1.0)]
    assert largest_difference(sglang_server.base, wrong) > CAUGHT


async def test_a_wrong_version_would_show(engine: Engine, sglang_server: SglangServer) -> None:
    await load(engine, sglang_server.other, 1)
    sequences = await sampled(engine, 1.0)
    assert largest_difference(sglang_server.other, sequences) <= TOLERANCE
    assert largest_difference(sglang_server.base, sequences) > CAUGHT


async def test_a_weight_name_that_the_engine_ignores_would_show(
    engine: Engine, sglang_server: SglangServer, tmp_path: Path
) -> None:
    renamed = [
        (replace(info, name=info.name.replace("experts.1.down_proj", "experts_1.down_proj")), data)
        for info, data in checkpoint_tensors(sglang_server.other)
    ]
    write_safetensors(tmp_path / "model.safetensors", renamed)
    await load(engine, tmp_path, 1)
    assert largest_difference(sglang_server.other, await sampled(engine, 1.0)) > CAUGHT
