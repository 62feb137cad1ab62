"""Options of an objective that contradict each other: each ValueError names both and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gspo.settings import Objective


def require_compatible(objective: Objective) -> None:
    """Raises: ValueError for the first pair of options that cannot both be meant."""
    if objective.aggregation == "constant" and objective.aggregation_tokens is None:
        raise ValueError(
            "aggregation is 'constant' and aggregation_tokens is not set; set it to the length that every sequence's sum is "
            "divided by, such as the most tokens of an answer"
        )
    if objective.aggregation != "constant" and objective.aggregation_tokens is not None:
        raise ValueError(
            f"aggregation_tokens is {objective.aggregation_tokens} with aggregation {objective.aggregation!r}: an objective "
            "has one aggregation, and only 'constant' divides by it. Leave it out, or set aggregation = 'constant'"
        )
