"""A teacher on a real SGLang server: it scores as transformers does."""

import asyncio

import numpy as np
import pytest

from gspo_services.learner.teacher import TeacherError, TeacherServer, require_same_texts
from gspo_services.learner.teacher.client import SPARE_TOKENS
from tests.integration.conftest import SglangServer
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, reference_logprobs

TOLERANCE = 1e-4


@pytest.fixture
def teacher(sglang_server: SglangServer) -> TeacherServer:
    return TeacherServer(sglang_server.url, timeout_s=300.0)


async def test_a_served_teacher_scores_many_sequences_as_transformers_does(
    teacher: TeacherServer, sglang_server: SglangServer
) -> None:
    """Some of them begin alike, or are the same: the server's cache must leave no token out."""
    random = np.random.default_rng(0)
    # SGLang misreports the highest id.
    sequences = [random.integers(0, TINY_VOCAB_SIZE - 1, length).tolist() for length in (2, 3, 40, 200, 517)]
    sequences += [sequences[3][:100] + sequences[2], sequences[3], sequences[3][:64]]
    found: dict[int, np.ndarray] = {}
    await asyncio.to_thread(teacher.score, dict(enumerate(sequences)), found)
    assert len(found) == len(sequences)
    for place, logprobs in found.items():
        token_ids = sequences[place]
        assert logprobs.shape == (len(token_ids) - 1,)
        assert np.abs(logprobs - reference_logprobs(sglang_server.base_model, token_ids)).max() < TOLERANCE


async def test_a_server_without_its_tokenizer_is_no_teacher(teacher: TeacherServer, sglang_server: SglangServer) -> None:
    """As those are that a rollout starts."""
    with pytest.raises(TeacherError, match="start it with its tokenizer, without --skip-tokenizer-init"):
        await asyncio.to_thread(require_same_texts, teacher, sglang_server.base)


async def test_a_sequence_may_be_almost_as_long_as_the_servers_context(
    teacher: TeacherServer, sglang_server: SglangServer
) -> None:
    most = sglang_server.base_model.config.max_position_embeddings - SPARE_TOKENS
    await asyncio.to_thread(teacher.require_length, most)
    with pytest.raises(ValueError, match=rf"answered 400 .*--context-length of at least {most + SPARE_TOKENS + 1}"):
        await asyncio.to_thread(teacher.require_length, most + 1)
