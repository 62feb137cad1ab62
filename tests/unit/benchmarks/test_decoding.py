"""The study's engine for many versions at once gives what the plain model gives, one row and one token after the other."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from benchmarks.study.decoding import Answer, Decoder, Order
from gspo.moe.experts import ExpertRecorder
from gspo_services.prepare.tiny_models.tiny import build_model
from gspo_services.prepare.tiny_models.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
MOST = 20
NEVER = len(TOKENIZER)
PROMPTS = [[[5, 9, 11], [4], [8, 8]], [[3, 6, 9, 12, 15]], [[10, 2], [20, 21, 22], [4], [30, 1, 1, 1], [12]]]


@pytest.fixture(scope="module")
def models() -> list[Qwen3MoeForCausalLM]:
    """Three models with strong opinions, of which one about when to end."""
    made = []
    for seed in range(len(PROMPTS)):
        torch.manual_seed(seed)
        model = build_model(TOKENIZER)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
        made.append(model)
    return made


@pytest.fixture(scope="module")
def end_id(models: list[Qwen3MoeForCausalLM]) -> int:
    """A token that each of them says now and then."""
    found = Decoder(config=models[0].config, pad_id=0, end_id=NEVER).decode(orders_of(models), MOST)
    said = [Counter(token for answer in answers for token in answer.ids) for answers in found]
    return max(range(NEVER), key=lambda token: sum(min(counts[token], 3) for counts in said))


def orders_of(models: list[Qwen3MoeForCausalLM]) -> list[Order]:
    return [
        Order(model.state_dict(), prompts, seed) for seed, (model, prompts) in enumerate(zip(models, PROMPTS, strict=True))
    ]


@torch.no_grad()
def plainly(model: Qwen3MoeForCausalLM, prompts: list[list[int]], seed: int, end_id: int) -> list[Answer]:
    """Without a cache, a pad or a batch; the random numbers are drawn for the rows that have not ended, in their order."""
    answers = [Answer([], []) for _ in prompts]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(MOST):
        alive = [row for row, answer in enumerate(answers) if end_id not in answer.ids]
        if not alive:
            break
        logprobs_NV = torch.stack([next_logprobs(model, prompts[row] + answers[row].ids) for row in alive])
        drawn = torch.multinomial(logprobs_NV.exp(), 1, generator=generator)[:, 0].tolist()
        for place, (row, token) in enumerate(zip(alive, drawn, strict=True)):
            answers[row].ids.append(token)
            answers[row].logprobs.append(float(logprobs_NV[place, token]))
    return answers


def next_logprobs(model: Qwen3MoeForCausalLM, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float().log_softmax(-1)


def test_all_orders_at_once_give_what_each_row_gives_alone(models: list[Qwen3MoeForCausalLM], end_id: int) -> None:
    found = Decoder(config=models[0].config, pad_id=0, end_id=end_id).decode(orders_of(models), MOST)
    lengths = set()
    for answers, (seed, model), prompts in zip(found, enumerate(models), PROMPTS, strict=True):
        for answer, expected in zip(answers, plainly(model, prompts, seed, end_id), strict=True):
            assert answer.ids == expected.ids
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            lengths.add(len(answer.ids))
    assert len(lengths) > 2, "rows ended at different times, and blocks left"


def test_the_experts_of_each_token_are_those_of_the_pass_that_it_was_drawn_from(
    models: list[Qwen3MoeForCausalLM], end_id: int
) -> None:
    found = Decoder(config=models[0].config, pad_id=0, end_id=end_id).decode(orders_of(models), MOST)
    for model, prompts, answers in zip(models, PROMPTS, found, strict=True):
        recorder = ExpertRecorder(model)
        for prompt, answer in zip(prompts, answers, strict=True):
            with torch.no_grad(), recorder.recording():
                model(input_ids=torch.tensor([prompt + answer.ids]), use_cache=False)
            picks = recorder.take()
            assert picks is not None
            own_TLK = picks.indices_LTK.transpose(0, 1)[len(prompt) - 1 : -1].long().sort(dim=-1).values
            assert torch.tensor(np.stack(answer.experts)).long().sort(dim=-1).values.equal(own_TLK)


def test_an_order_does_not_depend_on_the_others(models: list[Qwen3MoeForCausalLM]) -> None:
    orders = orders_of(models)
    decoder = Decoder(config=models[0].config, pad_id=0, end_id=NEVER)
    together = decoder.decode(orders, MOST)
    assert [answer.ids for answer in together[2]] == [answer.ids for answer in decoder.decode([orders[2]], MOST)[0]]


def test_bfloat16_differs_from_float32_as_much_as_the_models_own(models: list[Qwen3MoeForCausalLM]) -> None:
    model, prompt = models[0], [5, 9, 11]
    decoder = Decoder(config=model.config, bf16=True, pad_id=0, end_id=NEVER)
    ids, logprobs = prompt, []
    ours, theirs = [], []
    rounded = build_model(TOKENIZER).to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    for seed in range(16):
        (answer,) = decoder.decode([Order(model.state_dict(), [prompt], seed)], 4)[0]
        ids, logprobs = prompt + answer.ids, answer.logprobs
        exact, own = (chosen_logprobs(each, ids, len(prompt)) for each in (model, rounded))
        ours.append(torch.tensor(logprobs) - exact)
        theirs.append(own - exact)
    noise, expected = (float(torch.cat(each).abs().median()) for each in (ours, theirs))
    assert expected > 1e-4
    assert 0.6 * expected < noise < 1.6 * expected


@torch.no_grad()
def chosen_logprobs(model: Qwen3MoeForCausalLM, ids: list[int], start: int) -> Tensor:
    logprobs_TV = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    return logprobs_TV[start - 1 : -1].gather(1, torch.tensor(ids[start:])[:, None])[:, 0]


def test_another_kind_of_model_is_refused(models: list[Qwen3MoeForCausalLM]) -> None:
    config: Mapping[str, object] = {**models[0].config.to_dict(), "norm_topk_prob": False}
    with pytest.raises(ValueError, match="normalised router weights"):
        Decoder(config=type(models[0].config)(**config), pad_id=0, end_id=NEVER)
