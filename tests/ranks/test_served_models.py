"""Whether SGLang computes what a model's configuration says: log-probs of a real server against the learner's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo_services.rollout.sglang.client import Engine
from gspo_services.rollout.sglang.server_process import EngineServer, ServerOptions
from gspo_services.shared.weights import ServedError, require_served
from tests.support.engines.prompt_logprobs import prompt_logprobs
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, tiny_qwen3_moe
from tests.support.loss.sequences import random_sequence
from tests.support.policy.architectures import tiny_model
from tests.support.policy.learner_logprobs import learner_logprobs

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

TOLERANCE = 2e-5
WINDOW, SHORT, LONG = 7, 6, 40


async def largest_difference(folder: Path, length: int) -> float:
    """Largest |learner - engine| of the log-probs of a random sequence."""
    options = ServerOptions(model_path=folder, log_path=folder / "server.log", max_total_tokens=4096)
    async with EngineServer(options) as server:
        sequence = random_sequence(length, 0, vocab_size=60)
        found = await prompt_logprobs(server.url, sequence.token_ids.tolist())
    return float(np.abs(learner_logprobs(folder, sequence) - found).max())


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


@pytest.mark.parametrize("float32_head", [False, True])
async def test_a_float32_head_in_engine_and_learner_gives_the_same_log_probs_in_bfloat16(
    float32_head: bool, tmp_path: Path
) -> None:
    """Layers that add nothing: what differs is then the head's alone. The largest logits are near 40."""
    model = tiny_qwen3_moe()
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)
        model.model.norm.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.experts.down_proj.zero_()
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    options = ServerOptions(
        model_path=tmp_path,
        log_path=tmp_path / "server.log",
        max_total_tokens=4096,
        dtype="bfloat16",
        float32_head=float32_head,
    )
    sequence = random_sequence(200, 0, vocab_size=TINY_VOCAB_SIZE - 1)
    async with EngineServer(options) as server:
        found = await prompt_logprobs(server.url, sequence.token_ids.tolist())
        async with Engine(server.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=16) as client:
            assert (await client.server_info()).enable_fp32_lm_head is float32_head
    off = np.abs(learner_logprobs(tmp_path, sequence, torch.bfloat16, float32_head=True) - found)
    assert off.max() < 1e-4 if float32_head else off.mean() > 0.005
