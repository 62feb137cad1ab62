"""Whether SGLang computes what a model's configuration says: log-probs of a real server against the learner's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo.model.packing import TrainSequence, pack
from gspo.model.policy import load_policy, prepare_policy
from gspo_services.rollout.sglang.server import EngineServer, ServerOptions
from gspo_services.shared.weights import ServedError, require_served
from tests.support.engines.prompt_logprobs import prompt_logprobs
from tests.support.loss.sequences import random_sequence
from tests.support.policy.architectures import tiny_model
from tests.support.policy.forward import logprobs_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

TOLERANCE = 2e-5
WINDOW, SHORT, LONG = 7, 6, 40


async def largest_difference(folder: Path, length: int) -> float:
    """Largest |learner - engine| of the log-probs of a random sequence."""
    options = ServerOptions(model_path=folder, log_path=folder / "server.log", max_total_tokens=4096)
    async with EngineServer(options) as server:
        sequence = random_sequence(length, 0, vocab_size=60)
        found = await prompt_logprobs(server.url, sequence.token_ids.tolist())
    return float(np.abs(own_logprobs(folder, sequence) - found).max())


def own_logprobs(folder: Path, sequence: TrainSequence) -> Any:
    """The learner's, float32 [T - 1]."""
    model = load_policy(folder, torch.float32)
    prepare_policy(model, logprob_chunk_tokens=100)
    scored = sequence.with_advantages(np.zeros(sequence.num_tokens, np.float32))
    return logprobs_of(model, pack([scored], policy_version=0)).logprobs_T[:-1].detach().numpy()


def saved(folder: Path, name: str) -> dict[str, Any]:
    """Save a tiny model of this architecture; returns its config.json."""
    model = tiny_model(name)
    model.save_pretrained(folder)
    found: dict[str, Any] = model.config.to_dict()
    return found


async def test_gemma_3_is_served_with_its_windows(tmp_path: Path) -> None:
    require_served(saved(tmp_path, "Gemma 3"), LONG, on_cpu=True)
    assert await largest_difference(tmp_path, LONG) <= TOLERANCE


@pytest.mark.parametrize("name", ["Qwen3, window", "Mistral, window"])
async def test_a_model_whose_windows_sglang_ignores_is_refused_from_its_window_on(name: str, tmp_path: Path) -> None:
    config = saved(tmp_path, name)
    with pytest.raises(ServedError, match="with a window of 7 tokens"):
        require_served(config, WINDOW + 1, on_cpu=True)
    require_served(config, WINDOW, on_cpu=True)
    # If this fails, SGLang has learnt what windows are: then the model need not be refused.
    assert await largest_difference(tmp_path, LONG) > 100 * TOLERANCE


async def test_a_model_with_windows_is_served_exactly_within_them(tmp_path: Path) -> None:
    require_served(saved(tmp_path, "Qwen3, window"), SHORT, on_cpu=True)
    assert await largest_difference(tmp_path, SHORT) <= TOLERANCE
