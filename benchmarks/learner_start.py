"""What each rank of a learner takes to load a mixture of experts under ZeRO 3: by its own ranges, and by from_pretrained.

python -m benchmarks.learner_start --ranks 4 --layers 10

The model is a Qwen3-MoE in bfloat16 of 32 experts, some 100 MB a layer, with repeated random numbers. All figures are the
peak growth of the resident set (VmHWM), beyond a process that has loaded a small model before.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.support.learner.ranks import Ranks
from tests.support.starts.small_models import save_small_model

MIB = 2**20
SHAPE: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 512,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "max_position_embeddings": 4096,
}  # fmt: skip
LAYER_BYTES = 2 * 32 * 3 * 1024 * 512
WAYS = {"own ranges": False, "from_pretrained": True}


def save_large_model(directory: Path, layers: int) -> int:
    """Write it. Returns its bytes."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(num_hidden_layers=layers, **SHAPE), dtype=torch.bfloat16)
    drawn = torch.randn(MIB).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            for piece in parameter.view(-1).split(MIB):
                piece.copy_(drawn[: piece.numel()])
    model.save_pretrained(directory, max_shard_size="256MB")
    return sum(parameter.numel() * 2 for parameter in model.parameters())


def measure(work: Path, num_ranks: int) -> list[list[dict[str, float]]]:
    """By rank, what the small model and then each of WAYS took."""
    settings = {"zero_stage": 3, "dtype": "bfloat16"}
    starts = [
        {"model": str(work / "small")},
        *({"model": str(work / "large"), "by_transformers": way} for way in WAYS.values()),
    ]
    plan = work / "plan.json"
    plan.write_text(
        json.dumps([start | {"settings": settings, "with_optimizer": False} for start in starts]), encoding="utf-8"
    )
    with Ranks("tests.support.starts.start_worker", [str(plan)], num_ranks, plan) as ranks:
        ranks.finish(1800)
    return [json.loads(plan.with_suffix(f".{rank}.out").read_text(encoding="utf-8")) for rank in range(num_ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        save_small_model(work / "small", "qwen3_moe")
        model_bytes = save_large_model(work / "large", arguments.layers)
        found = measure(work, arguments.ranks)
    share = model_bytes / arguments.ranks
    print(
        f"model {model_bytes / MIB:,.0f} MiB, a rank's share {share / MIB:,.0f}, a layer's experts {LAYER_BYTES / MIB:,.0f}"
    )
    print("| | peak growth of a rank, MiB |\n|---|---|")
    for index, way in enumerate(WAYS):
        peak = [rank[index + 1]["loading"] / MIB for rank in found]
        print(f"| {way} | {min(peak):,.0f} to {max(peak):,.0f} |")


if __name__ == "__main__":
    main()
