"""Tokens and log-probs of a model in this process are those of its own distribution."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo_services.prepare.env_try.torch_engine import TorchEngine
from gspo_services.rollout.sglang import EngineError, GenerateRequest, SamplingParameters

PROMPT = [11, 200, 37, 5]


@pytest.fixture(scope="module")
def engine(random_model: Path) -> TorchEngine:
    return TorchEngine(random_model, "float32")


async def sampled(engine: TorchEngine, input_ids: list[int] = PROMPT, **sampling: Any) -> tuple[list[int], list[float], Any]:
    parameters = SamplingParameters(**{"max_new_tokens": 6, "seed": 3, **sampling})
    request = GenerateRequest(rid="r", input_ids=input_ids, sampling=parameters)
    pieces = [piece async for piece in engine.generate(request)]
    tokens = [token for piece in pieces for token in piece.token_ids.tolist()]
    return tokens, [value for piece in pieces for value in piece.logprobs.tolist()], pieces[-1].finish_reason


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_log_probs_are_those_of_one_forward_pass(engine: TorchEngine, random_model: Path, temperature: float) -> None:
    tokens, logprobs, finish = await sampled(engine, temperature=temperature)
    assert (len(tokens), finish) == (6, "length")
    model = AutoModelForCausalLM.from_pretrained(random_model)
    with torch.inference_mode():
        logits_TV = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits_TV / temperature, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert max(logprobs) < -1e-3, "a distribution that is not flat, and not certain"


async def test_a_seed_gives_the_same_tokens_and_another_seed_others(engine: TorchEngine) -> None:
    first, again, other = [(await sampled(engine, seed=seed))[0] for seed in (3, 3, 4)]
    assert first == again != other


async def test_greedy_is_the_likeliest_token(engine: TorchEngine) -> None:
    ((token,), (logprob,), _) = await sampled(engine, temperature=0.0, max_new_tokens=1)
    drawn = [await sampled(engine, seed=seed, max_new_tokens=1) for seed in range(8)]
    assert all(other <= logprob + 1e-6 for _, (other,), _ in drawn)
    assert {tokens[0] for tokens, _, _ in drawn} != {token}


async def test_a_stop_token_is_the_last_one(engine: TorchEngine) -> None:
    tokens, _, _ = await sampled(engine)
    kept, _, finish = await sampled(engine, stop_token_ids=(tokens[2],))
    assert (kept, finish) == (tokens[: tokens.index(tokens[2]) + 1], "stop")


async def test_a_model_that_fails_is_an_engine_error(engine: TorchEngine) -> None:
    with pytest.raises(EngineError, match="the model has failed: IndexError"):
        await sampled(engine, input_ids=[100_000])
