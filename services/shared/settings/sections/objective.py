"""The section of the loss: the library's objective, and the learner's options around it."""

from dataclasses import fields
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from gspo.settings import Baseline, Objective, StdOver, require_field

_LIBRARY_FIELDS: Final = {field.name: field for field in fields(Objective)}


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class ObjectiveSettings(Objective):
    """GSPO-token with staleness-aware sequence clipping; see docs/gspo.md for the formulas."""

    routing_replay: bool = False
    """Mixture of experts only: all mini-batches use the experts that the weights at the batch's start choose (the paper's
    Routing Replay, which GRPO needs and GSPO does not). It costs one more forward pass with anchor = "behaviour". It has no
    effect where mini_batches is 1."""
    routing_replay_from: Literal["learner", "engine"] = "learner"
    """For routing_replay. engine: sampled tokens use the experts that the engine chose for them, in all passes (Rollout
    Routing Replay, R3); other tokens choose theirs. Tokens are sent when an answer ends or has 1,024 of them, each with
    layers x experts per token bytes. A server at rollout.server_url needs --enable-return-routed-experts."""
    load_balance_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Mixture of experts only: weight of the auxiliary loss that keeps experts in use (Switch Transformer), per token of the
    optimizer step. 0: none. Models are pre-trained with about 0.001."""
    expert_bias_rate: Annotated[float, Field(ge=0)] = 0.0
    """Mixture of experts of DeepSeek-V3's kind only: the step by which, after each optimizer step, each expert's bias of its
    router moves against its load (Loss-Free Balancing; DeepSeek-V3 used 0.001). Biases are served, saved and exported
    like weights. 0: they stay. Not with adapters."""
    advantage: Literal["sequence", "turn", "role"] = "sequence"
    """Group-relative advantage of the whole trajectory; per turn from the rewards that follow it; or per role from its
    rewards, where agent.roles are several. turn and role compare a role with itself alone."""
    normalise_by_std: bool = True
    """Divide group-relative advantages by a standard deviation, as the paper does by the group's."""
    std_over: StdOver = "group"
    """The standard deviation that divides the advantages. group: of the group's rewards. batch: of all rewards of the batch
    (Lite PPO); then a group whose rewards hardly differ is not scaled up to the size of the others."""
    advantage_baseline: Baseline = "mean"
    """The baseline of a reward. mean: the mean of its group. leave_one_out: the mean of the group's other members (RLOO),
    which is unbiased with normalise_by_std = false."""
    overlong_buffer_tokens: Annotated[int | None, Field(ge=1)] = None
    """Overlong shaping (DAPO): over the last tokens before sampling.max_tokens, this many, a trajectory's reward falls
    linearly, by overlong_penalty at the end. Tokens are counted like those of sampling.max_tokens, including the prompt. Not
    set: rewards do not depend on the length."""
    overlong_penalty: Annotated[float, Field(gt=0)] = 1.0
    """For overlong_buffer_tokens: the reward that a trajectory of sampling.max_tokens loses."""
    overlong_filter_tokens: Annotated[int | None, Field(ge=1)] = None
    """Overlong filter (DAPO): trajectories of this many tokens or more get advantage 0. The value of sampling.max_tokens
    filters those that it cut off. Their rewards stay in the baseline. Not set: no filter."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:
            raise ValueError(f"objective.{error}") from error
        if self.routing_replay_from == "engine" and not self.routing_replay:
            raise ValueError(
                "objective.routing_replay_from is 'engine' with routing_replay = false, which replays nothing. Set "
                "routing_replay = true, or omit routing_replay_from"
            )
        if self.std_over == "batch" and not self.normalise_by_std:
            raise ValueError(
                "objective.std_over is 'batch' with normalise_by_std = false, which divides by no deviation. Set "
                "normalise_by_std = true, or omit std_over"
            )
        if self.advantage != "sequence" and self.kl_coefficient > 0 and self.kl_in == "reward":
            raise ValueError(
                f"objective.kl_in is 'reward' with advantage {self.advantage!r}: the penalty is taken from the reward of "
                "the whole trajectory. Set kl_in = 'loss', or advantage = 'sequence'"
            )

    @field_validator(*_LIBRARY_FIELDS)
    @classmethod
    def _in_range(cls, value: Any, info: ValidationInfo) -> Any:
        """Validate each of the library's fields by itself too, so that all mistakes are reported at once."""
        assert info.field_name is not None
        try:
            require_field(_LIBRARY_FIELDS[info.field_name], value)
        except ValueError as error:
            raise ValueError(f"objective.{error}") from error
        return value
