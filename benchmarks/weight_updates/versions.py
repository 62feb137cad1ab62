"""Versions to publish: from a small model that learns, and random ones of any size."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo.model.serving import serving_weights
from gspo_services.learner.weights.snapshot import Delta, Snapshot
from tests.support.wire.snapshots import snapshot_of

VOCABULARY = 264


def a_model(*, hidden: int = 128, layers: int = 4, experts: int = 8) -> Qwen3MoeForCausalLM:
    """Make a random model, of 1.8 million parameters by default."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=2048,
    )
    return Qwen3MoeForCausalLM(config).float()


def training(model: Qwen3MoeForCausalLM, learning_rate: float) -> Iterator[int]:
    """Make one AdamW step per item on a loss like a policy gradient's: log-probs weighted by random advantages.

    The forward pass is in float32 like the master weights; the published weights are rounded to bfloat16, as DeepSpeed does.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    step = 0
    while True:
        ids = torch.randint(0, VOCABULARY, (16, 48), generator=generator)
        advantages = torch.randn(16, 1, generator=generator)
        logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        optimizer.zero_grad()
        (-(advantages * logprobs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        yield step


def published(model: Qwen3MoeForCausalLM, version: int) -> Snapshot:
    """Return the weights as the learner publishes them: in the serving layout, in bfloat16."""
    return snapshot_of(version, serving_weights(model, gathered=nullcontext, dtype=torch.bfloat16))


def random_versions(num_bytes: int, number: int, changed: float) -> list[Snapshot]:
    """Make bfloat16 weights in tensors of 2 MiB; each version moves a share ``changed`` of the elements by one step."""
    rows = num_bytes // 2 // 1024
    weight = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    tensors = [(f"w{at}", weight[at : at + 1024]) for at in range(0, rows, 1024)]
    snapshots = [snapshot_of(1, tensors)]
    for version in range(2, number + 1):
        step([weight], changed, seed=version)
        snapshots.append(snapshot_of(version, tensors))
    return snapshots


def step(tensors: Sequence[torch.Tensor], changed: float, seed: int) -> None:
    """Change ``changed`` of each bfloat16 tensor's elements by one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        bits = tensor.view(torch.int16).view(-1)
        chosen = torch.randint(0, len(bits), (max(1, int(changed * len(bits))),), generator=generator)
        # Never a NaN: the exponent stays the same.
        bits[chosen] ^= 1


def must(delta: Delta | None) -> Delta:
    """Return the delta. Raises: RuntimeError without one."""
    if delta is None:
        raise RuntimeError("the delta would not pay")
    return delta
