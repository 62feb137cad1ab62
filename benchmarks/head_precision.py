"""Log-probs of a mixture of experts in bfloat16, its head in bfloat16 or in float32: python -m benchmarks.head_precision

A random Qwen3-MoE (4 layers, 8 experts of which 2 are used, hidden size 256, vocabulary 4,096), with narrow weights, and
with wide ones, of which rounding changes more experts. Its output embedding is scaled until the largest logit has this mean;
models in use have 20 to 40. Two passes on a CPU stand for learner and engine: packed rows with attention per segment, and
each sequence alone in transformers' eager attention. Both have the same bfloat16 weights, which the float32 reference has,
too. |Differences| of the log-probs of all tokens, nats; the tokens are drawn from the reference. "The head alone": from a
float32 head on the same states.
"""

from __future__ import annotations

import copy
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from gspo.model.boundaries import Boundaries
from gspo.model.policy import prepare_policy

LENGTHS = (512, 384, 128)
LOGITS = (5.0, 20.0, 40.0)
DEVIATIONS = (0.02, 0.06)
"""Of the weights. 0.02 is transformers' own start."""


def main() -> None:
    torch.set_num_threads(1)
    print("| weights | logit | head | from float32: mean | max | the head alone: mean | max | the two passes: mean | max |")
    print("|---|---|---|---|---|---|---|---|---|")
    for deviation, largest in product(DEVIATIONS, LOGITS):
        _rows(deviation, largest)


def _rows(deviation: float, largest: float) -> None:
    ids, starts = torch.randint(0, 4096, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1)), [0]
    for length in LENGTHS:
        starts.append(starts[-1] + length)
    model = _model(deviation)
    with torch.no_grad():
        scale = largest / torch.cat(_eager(model, ids, starts)).amax(dim=-1).mean()
        model.lm_head.weight.mul_(scale)
        model.bfloat16().float()
        exact_TV = torch.cat(_eager(model, ids, starts)).log_softmax(-1)
        targets_T = torch.multinomial(exact_TV.exp(), 1, generator=torch.Generator().manual_seed(2)).squeeze(-1)
        exact_T = _chosen(exact_TV, targets_T)
        model.bfloat16()
        for module in model.modules():
            if hasattr(module, "original_inv_freq"):
                module.inv_freq = module.original_inv_freq.float()
        head = model.lm_head.weight
        states_TH = torch.cat(_states(model, ids, starts))
        exact_head_T = _chosen(states_TH.float() @ head.float().t(), targets_T)
        for name, logits_TV in (
            ("bfloat16", (states_TH @ head.t()).float()),
            ("float32", states_TH.float() @ head.float().t()),
        ):
            engine_T = _chosen(logits_TV, targets_T)
            learner_T = _packed(model, ids, starts, targets_T, float32=name == "float32")
            differences = ((engine_T - other_T).abs() for other_T in (exact_T, exact_head_T, learner_T))
            numbers = " | ".join(f"{x.mean():.2g} | {x.max():.2g}" for x in differences)
            print(f"| {deviation} | {largest:g} | {name} | {numbers} |")


def _chosen(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    return logits_TV.log_softmax(-1).gather(-1, targets_T[:, None]).squeeze(-1)


def _model(deviation: float) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, initializer_range=deviation, attn_implementation="eager",
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


def _states(model: Any, ids: Tensor, starts: list[int]) -> list[Tensor]:
    """[n, H] of each sequence alone."""
    return [model.model(input_ids=ids[:, a:b], use_cache=False).last_hidden_state[0] for a, b in pairwise(starts)]


def _eager(model: Any, ids: Tensor, starts: list[int]) -> list[Tensor]:
    return [states_TH @ model.lm_head.weight.t() for states_TH in _states(model, ids, starts)]


def _packed(model: Any, ids: Tensor, starts: list[int], targets_T: Tensor, *, float32: bool) -> Tensor:
    learner = copy.deepcopy(model)
    prepare_policy(learner, logprob_chunk_tokens=128, float32_head=float32)
    places = torch.cat([torch.arange(b - a) for a, b in pairwise(starts)])[None]
    result = learner(
        input_ids=ids,
        position_ids=places,
        cu_seqlens=Boundaries(tuple(starts)),
        targets_T=targets_T,
        temperatures_T=torch.ones(len(targets_T)),
    )
    return result.logprobs_T


if __name__ == "__main__":
    main()
