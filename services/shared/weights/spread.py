"""How the ranks of one server share a model, and which models can be shared in this way.

SGLang cuts attention and dense layers among ``tensor`` ranks. Experts are cut among tensor / expert of them, and each such
group holds its own whole experts. ``data`` replicas hold everything, each over its own ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gspo.moe.mixture import Mixture, mixture_of
from gspo_services.shared.settings import Settings

VOCAB_ROWS: Final = 64
"""SGLang pads the embedding and the output layer to a multiple of this number of rows."""
_KNOWN: Final = (
    *("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM"),
    *("Glm4MoeLiteForCausalLM", "DeepseekV3ForCausalLM"),
)
"""Architectures for which it is known how SGLang cuts every parameter. Others would never pass verification."""
_NOT_CUT: Final = {
    "OlmoeForCausalLM": "SGLang's class normalises the heads of a rank as if they were all",
}
"""Architectures that SGLang 0.5.23 computes on one rank alone."""


class SpreadError(ValueError):
    """A model cannot be spread in this way; the text names the value and what to do."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Ranks of a server: ``tensor`` for one copy of the model, in ``expert`` groups with experts of their own; ``data``
    copies. The keys of the settings are rollout.tensor_parallel, expert_parallel and data_parallel."""

    tensor: int = 1
    expert: int = 1
    data: int = 1

    @property
    def num_ranks(self) -> int:
        """The number of processes, and on GPUs of devices."""
        return self.tensor * self.data

    @property
    def is_whole(self) -> bool:
        """Whether each rank has the whole model."""
        return self.tensor == 1

    def expert_group(self, rank: int) -> int:
        """Return the number of the expert group of tensor rank ``rank``."""
        return rank // (self.tensor // self.expert)

    def rank_in_group(self, rank: int) -> int:
        """Return the index of tensor rank ``rank`` among those that cut the same experts."""
        return rank % (self.tensor // self.expert)


ONE_RANK: Final = Spread()


def require_spread(config: Mapping[str, Any], spread: Spread) -> None:
    """Check that a model with this config.json can be served by these ranks and be verified shard by shard.

    Raises: SpreadError.
    """
    if spread.tensor % spread.expert:
        raise SpreadError(
            f"rollout.expert_parallel is {spread.expert}, which does not divide rollout.tensor_parallel = {spread.tensor}: "
            "experts are dealt among the ranks of one copy of the model; make one a multiple of the other"
        )
    if spread.is_whole:
        return
    architecture = (config.get("architectures") or ["?"])[0]
    if architecture in _NOT_CUT:
        raise SpreadError(
            f"{architecture} over {spread.tensor} ranks: {_NOT_CUT[architecture]}; use rollout.tensor_parallel = 1, and "
            "more rollouts"
        )
    if architecture not in _KNOWN:
        raise SpreadError(
            f"{architecture} over {spread.tensor} ranks: it is not known how SGLang cuts it, so no shard could be verified "
            f"(known are {', '.join(_KNOWN)}); use rollout.tensor_parallel = 1, and more rollouts"
        )
    if spread.expert > 1 and not _mixture(config):
        raise SpreadError(
            f"rollout.expert_parallel is {spread.expert} and {architecture} has no experts: use rollout.expert_parallel = 1"
        )
    objection = _objection(config, spread)
    if objection:
        fitting = [
            Spread(tensor=tensor, expert=expert)
            for tensor in range(spread.tensor, 0, -1)
            for expert in range(min(spread.expert, tensor), 0, -1)
            if tensor % expert == 0 and not _objection(config, Spread(tensor=tensor, expert=expert))
        ]
        keys = f"rollout.tensor_parallel = {fitting[0].tensor}"
        keys += f" and rollout.expert_parallel = {fitting[0].expert}" * (spread.expert > 1)
        raise SpreadError(f"{objection}; use {keys}")


def _objection(config: Mapping[str, Any], spread: Spread) -> str:
    """Say what does not divide; empty: everything does, as it does for one rank."""
    if spread.is_whole:
        return ""
    for what, value, parts in _divided(config, spread):
        if value % parts:
            return f"{what} is {value}, which {parts} ranks do not divide"
    heads, tensor = kv_heads(config), spread.tensor
    if config.get("kv_lora_rank"):
        # Latent attention has keys of its own for each head of queries.
        return ""
    if heads % tensor and tensor % heads:
        return f"num_key_value_heads is {heads} and rollout.tensor_parallel is {tensor}: neither divides the other"
    return ""


def spread_of(settings: Settings) -> Spread:
    """Return the ranks of the servers that a rollout starts."""
    rollout = settings.rollout
    return Spread(tensor=rollout.tensor_parallel, expert=rollout.expert_parallel, data=rollout.data_parallel)


def kv_heads(config: Mapping[str, Any]) -> int:
    """Return the heads of keys and values, from config.json."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _divided(config: Mapping[str, Any], spread: Spread) -> Iterator[tuple[str, int, int]]:
    """Yield each dimension that is cut: its name, its size, and the number of parts."""
    yield "num_attention_heads", int(config["num_attention_heads"]), spread.tensor
    padded = -(-int(config["vocab_size"]) // VOCAB_ROWS) * VOCAB_ROWS
    yield f"vocab_size, padded to {VOCAB_ROWS},", padded, spread.tensor
    mixture = _mixture(config)
    if not mixture or mixture.dense_layers:
        yield "intermediate_size", int(config["intermediate_size"]), spread.tensor
    if mixture:
        yield "the number of experts", mixture.experts, spread.expert
        yield "the width of an expert", mixture.width, spread.tensor // spread.expert
        if mixture.shared_width:
            yield "the width of shared experts", mixture.shared_width, spread.tensor


def _mixture(config: Mapping[str, Any]) -> Mixture:
    try:
        return mixture_of(config)
    except ValueError as error:
        raise SpreadError(str(error)) from error
