"""The section of the loss: the library's objective, and what the learner does around it."""

from dataclasses import fields
from typing import Any, Final, Literal

from pydantic import ConfigDict, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from gspo.settings import Objective, require_field

_LIBRARY_FIELDS: Final = {field.name: field for field in fields(Objective)}


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class ObjectiveSettings(Objective):
    """GSPO-token with staleness-aware sequence clipping; see docs/design.md for the formulas."""

    routing_replay: bool = False
    """Mixture of experts only: all mini-batches use the experts that the weights at the batch's start choose (the paper's
    Routing Replay, which GRPO needs and GSPO does not). It costs one more forward pass with anchor = "behaviour". It has no
    effect where mini_batches is 1."""
    advantage: Literal["sequence", "turn"] = "sequence"
    """Group-relative advantage of the whole trajectory, or per turn from the rewards that follow it."""
    normalise_by_std: bool = True
    """Divide group-relative advantages by the group's standard deviation, as the paper does."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:
            raise ValueError(f"objective.{error}") from error
        if self.advantage == "turn" and self.kl_coefficient > 0 and self.kl_in == "reward":
            raise ValueError(
                "objective.kl_in is 'reward' with advantage 'turn': the penalty is taken from the reward of the whole "
                "trajectory. Set kl_in = 'loss', or advantage = 'sequence'"
            )

    @field_validator(*_LIBRARY_FIELDS)
    @classmethod
    def _in_range(cls, value: Any, info: ValidationInfo) -> Any:
        """Judge each field of the library's by itself too, so that all mistakes are told at once."""
        assert info.field_name is not None
        try:
            require_field(_LIBRARY_FIELDS[info.field_name], value)
        except ValueError as error:
            raise ValueError(f"objective.{error}") from error
        return value
