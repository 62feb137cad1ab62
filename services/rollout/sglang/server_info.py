"""The fields of SGLang's answers that the client reads; others are ignored."""

from typing import Any, Final

import msgspec

from gspo_services.shared.settings import QUANTISING_FORMATS, REFUSED_OPTIONS, TEXT_ALONE
from gspo_services.shared.weights import Spread

_OF_RANKS: Final = (
    "attn_cp_size", "dcp_size", "moe_dp_size", "moe_dense_tp_size", "ep_num_redundant_experts", "enable_dp_attention",
    "enable_eplb", "enable_lora", "model_path",
)  # fmt: skip
"""What ``ServerInfo.spread`` looks at, and what the rollout sets."""


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """/server_info: a server's identity and its start options."""

    version: str
    device: str
    dtype: str
    tp_size: int
    model_path: str
    ep_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    attn_cp_size: int = 1
    dcp_size: int = 1
    moe_dp_size: int = 1
    moe_dense_tp_size: int | None = None
    ep_num_redundant_experts: int = 0
    enable_dp_attention: bool = False
    enable_eplb: bool = False
    incremental_streaming_output: bool = False
    enable_deterministic_inference: bool = False
    enable_return_routed_experts: bool = False
    disable_radix_cache: bool = False
    enable_fp32_lm_head: bool | None = None
    kv_cache_dtype: str = "auto"
    max_total_num_tokens: int | None = None
    enable_lora: bool | None = None
    max_lora_rank: int | None = None
    max_loras_per_batch: int = 0
    lora_target_modules: list[str] | None = None
    custom_weight_loader: list[str] = []
    """Also names the abilities that this project's plug-in adds to SGLang."""
    quantization: str | None = None
    load_format: str = "auto"
    speculative_algorithm: str | None = None

    preferred_sampling_params: Any = None
    json_model_override_args: Any = "{}"
    model_config_parser: str = "auto"
    disaggregation_mode: str | None = "null"
    allow_auto_truncate: bool = False
    is_embedding: bool = False
    encoder_only: bool = False
    language_only: bool = False
    enable_strict_thinking: bool = False
    enable_watermark: bool = False
    enable_hisparse: bool = False
    enable_paged_experts: bool = False
    dllm_algorithm: str | None = None
    kt_weight_path: str | None = None
    uno_lora_path: str | None = None
    rl_quant_profile: Any = None
    quantize_and_serve: bool = False

    def require_learners_policy(self) -> None:
        """Raises: ValueError that names the option by which the server is not the policy that it is sent.

        These are the values that options have after all sources, also a file; a newer server may not have a field.
        """
        for name in _POLICY:
            value = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            if value != _DEFAULTS[name] and (option, value) != TEXT_ALONE:
                raise ValueError(f"the SGLang server was started with {option} {value}: {REFUSED_OPTIONS[option]}")
        if self.load_format in (*QUANTISING_FORMATS, "dummy"):
            raise ValueError(
                f"the SGLang server was started with --load-format {self.load_format}: {REFUSED_OPTIONS['--quantization']}"
            )

    @property
    def spread(self) -> Spread:
        """The server's ranks. Raises: ValueError that names the option which shares a model in an unknown way."""
        known = {
            "--pp-size": self.pp_size == 1,
            "--attn-cp-size": self.attn_cp_size == 1,
            "--dcp-size": self.dcp_size == 1,
            "--moe-dp-size": self.moe_dp_size == 1,
            "--moe-dense-tp-size": self.moe_dense_tp_size is None or self.tp_size == 1,
            "--ep-num-redundant-experts": self.ep_num_redundant_experts == 0,
            "--enable-dp-attention": not self.enable_dp_attention,
            "--enable-eplb": not self.enable_eplb,
        }
        for option, is_known in known.items():
            if not is_known:
                raise ValueError(
                    f"the SGLang server was started with {option}: its shards cannot be verified; leave it out, and use "
                    "rollout.tensor_parallel, expert_parallel and data_parallel"
                )
        return Spread(tensor=self.tp_size, expert=self.ep_size, data=self.dp_size)


_POLICY: Final = [
    name
    for name in ServerInfo.__struct_fields__
    if f"--{name.replace('_', '-')}" in REFUSED_OPTIONS and name not in _OF_RANKS
]
_DEFAULTS: Final = {field.name: field.default for field in msgspec.structs.fields(ServerInfo)}


class ModelInfo(msgspec.Struct):
    """/model_info."""

    weight_version: str


class Placed(msgspec.Struct):
    """The position of a rank of /weights_checker."""

    tp_rank: int
    dp_rank: int | None = None
    """Which copy of the model; None: there is one."""
    role: str = "target"


class Rank(msgspec.Struct):
    """One rank of /weights_checker."""

    checksums: dict[str, str]
    parallelism_info: list[Placed] = []


class Checksums(msgspec.Struct):
    """/weights_checker with the action "checksum"."""

    ranks: list[Rank] = []


class RankChecksums(msgspec.Struct, frozen=True, kw_only=True):
    """The checksum of each parameter of one rank, by SGLang's names."""

    checksums: dict[str, str]
    rank: int = 0
    """Among the ranks that share one copy of the model."""
    replica: int = 0

    @property
    def label(self) -> str:
        """Such as "rank 1", or "rank 0 of replica 1"."""
        return f"rank {self.rank} of replica {self.replica}" if self.replica else f"rank {self.rank}"


def by_rank(answer: Checksums, spread: Spread) -> list[RankChecksums]:
    """Return an answer's ranks in order. Raises: ValueError when one has not answered or has answered twice."""
    found: dict[tuple[int, int], RankChecksums] = {}
    for each in answer.ranks:
        placed = each.parallelism_info[0] if each.parallelism_info else Placed(tp_rank=0)
        place = (placed.dp_rank or 0, placed.tp_rank)
        if place in found:
            raise ValueError(f"{found[place].label} has answered twice")
        found[place] = RankChecksums(checksums=each.checksums, rank=place[1], replica=place[0])
    wanted = {(replica, rank) for replica in range(spread.data) for rank in range(spread.tensor)}
    if set(found) != wanted:
        absent = [
            RankChecksums(checksums={}, rank=rank, replica=replica).label for replica, rank in sorted(wanted - set(found))
        ]
        raise ValueError(
            f"got checksums of {len(found)} ranks, but the server has {len(wanted)}: {', '.join(absent) or 'too many'} "
            f"{'are' if len(absent) > 1 else 'is'} {'missing' if absent else 'there'}"
        )
    return [found[place] for place in sorted(found)]
