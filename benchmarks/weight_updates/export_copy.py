"""How long training stops for the copy of a version: tensor by tensor as they are served, and parameter by parameter.

    python -m benchmarks.weight_updates.export_copy --json export.json

A model of Qwen3-30B-A3B's shape, narrow: 48 layers of 128 experts, 18,867 serving tensors in 531 parameters. Both ways
are measured in turn, in CPU seconds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo.model.serving import served_parameters
from gspo.model.serving_layout import ServingLayout, serving_tensors
from gspo_services.learner.weights import WeightCopy, build_snapshot, copy_parameters, copy_weights


def narrow_model(hidden_size: int) -> Any:
    """48 layers of 128 experts, in bfloat16."""
    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=1024, hidden_size=hidden_size, moe_intermediate_size=hidden_size * 3 // 8, num_hidden_layers=48,
        num_attention_heads=4, num_key_value_heads=1, head_dim=hidden_size // 4, num_experts=128, num_experts_per_tok=8,
        tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(shape).to(torch.bfloat16)


def one_by_one(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every serving tensor by itself, as transformers converts it."""
    for name, value in model.state_dict().items():
        for serving_name, tensor in serving_tensors(model, name, value):
            yield serving_name, tensor.contiguous()


def cpu_seconds(action: Callable[[], WeightCopy]) -> tuple[float, WeightCopy]:
    begin = time.process_time()
    copied = action()
    return time.process_time() - begin, copied


def measure(hidden_size: int, rounds: int) -> dict[str, Any]:
    """Medians over the rounds, in CPU seconds."""
    model = narrow_model(hidden_size)
    layout = ServingLayout(model)
    first, _ = cpu_seconds(lambda: copy_parameters(served_parameters(model, gathered=nullcontext, layout=layout)))
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    tensors, parameters = [], []
    for _ in range(rounds):
        seconds, slow = cpu_seconds(lambda: copy_weights(one_by_one(model)))
        tensors.append(seconds)
        seconds, fast = cpu_seconds(lambda: copy_parameters(served_parameters(model, gathered=nullcontext, layout=layout)))
        parameters.append(seconds)
    # One after the other: a snapshot uses its copy up.
    same = build_snapshot(1, slow).manifest.digest == build_snapshot(1, fast).manifest.digest
    assert same, "both ways copy the same version"
    return {
        "mib": round(num_bytes / 2**20),
        "serving_tensors": sum(1 for _ in one_by_one(model)),
        "parameters": len(list(model.parameters())),
        "by_tensor_s": round(statistics.median(tensors), 4),
        "by_parameter_s": round(statistics.median(parameters), 4),
        "first_by_parameter_s": round(first, 4),
        "ratio": round(statistics.median(parameters) / statistics.median(tensors), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=64, help="the model's width, a multiple of 8 (64: 56 MiB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(arguments.hidden_size, arguments.rounds)
    print(json.dumps(found, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
