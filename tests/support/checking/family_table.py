"""docs/guide/families.md, made from what the code accepts and from the families that tests compare: ``make docs-families``.

The rows are published configurations, and the tiny ones of other families that tests/families compares. What a cell says is
asked of the code that ``gspo check``, learner and rollouts ask.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gspo.moe.mixture import mixture_of
from gspo_services.learner.start import (
    parallelism_of,
    require_adaptable,
    require_sequence_parallel,
    require_supported,
)
from gspo_services.prepare.check.model import learner_refusal
from gspo_services.prepare.check.weights import TRIED
from gspo_services.shared.settings import Learner, LoraSection
from gspo_services.shared.weights import Spread, reported_experts, require_served, require_spread
from tests.support.paper.shapes import MODELS
from tests.support.policy.families import FAMILIES, family_config

INTRODUCTION: Final = """\
# Families of models

Made by `make docs-families` from what `gspo check`, learner and rollouts accept, with transformers 5.19, SGLang 0.5.23 and
DeepSpeed 0.19.8. `make test-families` compares gradients of ranks that share experts, experts replayed, log-probs of a real
server, every parameter, exports, adapters. A number is the reason for a no. `gspo model dequantise` writes quantised
checkpoints (block FP8, MXFP4, INT4) in bfloat16.

- **EP**: `learner.expert_parallel`; **SP**: `learner.sequence_parallel`
- **R2**, **R3**: routing replay from the learner's passes, from the engine
- **CPU**: SGLang serves it without a GPU; **bits**: every parameter of a real server was compared
- **ranks**: `rollout.tensor_parallel`
- **adapters**: which of `attention`, `mlp` and `experts`; **sent**: `lora.publish = "adapter"`, tried with Qwen3-MoE
"""
_HEADS: Final = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256}
_SPARSE: Final = {"num_local_experts": 32, "num_experts_per_tok": 8, "intermediate_size": 512}
ROWS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Qwen3": MODELS["Qwen3-8B"],
    "Llama 3": {"model_type": "llama", "intermediate_size": 14336, **_HEADS},
    "Mistral": {"model_type": "mistral", "intermediate_size": 14336, **_HEADS},
    "Gemma 3, text": MODELS["Gemma-3-12B"],
    "Qwen3.5, text": MODELS["Qwen3.5-9B"] | {"layer_types": ["linear_attention", "full_attention"]},
    "Qwen3-MoE": MODELS["Qwen3-30B-A3B"],
    "Mixtral": MODELS["Mixtral-8x7B"] | {"sliding_window": None},
    "OLMoE": {"model_type": "olmoe", "num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": 1024, **_HEADS},
    "Granite-MoE": {"model_type": "granitemoe", **_HEADS, **_SPARSE},
    "GLM-4.5, 4.6, 4.7": MODELS["GLM-4.5"],
    "GLM-4.7-Flash": MODELS["DeepSeek-V3"] | {"model_type": "glm4_moe_lite"},
    "DeepSeek-V3, Kimi K2": MODELS["DeepSeek-V3"],
    "MiniMax-M2": MODELS["MiniMax-M2"],
    "gpt-oss": MODELS["gpt-oss-120b"],
    "Qwen3-Next": MODELS["Qwen3-Next-80B-A3B"] | {"layer_types": ["linear_attention", "full_attention"]},
    "Qwen3.5-MoE, text": MODELS["Qwen3.5-35B-A3B"] | {"layer_types": ["linear_attention", "full_attention"]},
    "Llama 4, text": {"model_type": "llama4_text", "layer_types": ["chunked_attention"], **_HEADS, **_SPARSE},
    "Nemotron-H": {"model_type": "nemotron_h", "ssm_state_size": 128, **_HEADS},
    "Kimi-Linear": {"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1]}, **_HEADS},
    "GLM-5": {"model_type": "glm_moe_dsa", "layer_types": ["indexed_attention"], **_HEADS},
}
COLUMNS: Final = ("trained", "EP", "SP", "R2", "R3", "CPU", "bits", "ranks", "adapters", "sent")


class _Reasons:
    """Each by its number, in the order in which they come; the same of several models is one."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self.names: tuple[str, ...] = ()
        """Of the model that a reason is about."""

    def cell(self, attempt: Callable[[], object]) -> str:
        """ "yes", or the number of the reason why not."""
        try:
            attempt()
        except ValueError as error:
            return self.number(str(error).partition("; ")[0])
        return "yes"

    def number(self, reason: str) -> str:
        for name in self.names:
            reason = reason.replace(name, "…")
        return str(self.known.setdefault(re.sub(r" \(known are .*?\)", "", reason), len(self.known) + 1))


def _cells(config: Mapping[str, Any], reasons: _Reasons) -> Iterator[str]:
    kind = str(config["model_type"])
    reasons.names = (str(config["architectures"][0]), kind)
    refused = learner_refusal(config)
    if refused:
        yield reasons.number(refused[0])
        yield from [""] * (len(COLUMNS) - 1)
        return
    yield "yes"

    def plan(**changes: Any) -> Callable[[], None]:
        given = {"num_ranks": 2, "expert_parallel": 1, "routing_replay": False} | changes
        return lambda: require_supported(parallelism_of(config, **given))

    has_experts = bool(mixture_of(config))
    yield reasons.cell(plan(expert_parallel=2)) if has_experts else "–"
    yield reasons.cell(lambda: require_sequence_parallel(config, 2, num_ranks=2))
    yield reasons.cell(plan(routing_replay=True)) if has_experts else "–"
    yield reasons.cell(lambda: reported_experts(config)) if has_experts else "–"
    yield reasons.cell(lambda: require_served(config, 1, on_cpu=True))
    yield "yes" if kind in TRIED else "not tried"
    yield reasons.cell(lambda: require_spread(config, Spread(tensor=2)))

    def adapted(target: str, publish: str) -> None:
        lora = LoraSection.model_validate({"rank": 8, "target_modules": [target], "publish": publish})
        require_adaptable(config, lora, Learner())

    targets = [
        target for target in ("attention", "mlp", "experts") if _is_accepted(lambda name=target: adapted(name, "merged"))
    ]
    yield ", ".join(targets)
    yield reasons.cell(lambda: adapted("attention", "adapter"))


def _is_accepted(attempt: Callable[[], object]) -> bool:
    """Whether it is accepted."""
    try:
        attempt()
    except ValueError:
        return False
    return True


def page() -> str:
    """The whole page."""
    reasons = _Reasons()
    lines = [f"| family | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    listed = {config["model_type"] for config in ROWS.values()}
    others = {kind: family_config(kind) for kind in FAMILIES if kind not in listed}
    for name, config in {**ROWS, **others}.items():
        whole = {**config, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[str(config["model_type"])]]}
        lines.append(f"| {name} | {' | '.join(_cells(whole, reasons))} |")
    numbered = [f"{number}. {reason}" for reason, number in reasons.known.items()]
    return "\n".join([INTRODUCTION, *lines, "", *numbered, ""])


if __name__ == "__main__":
    sys.stdout.write(page())
