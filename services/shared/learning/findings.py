"""What may keep a run from learning: the names, and the bound of each with its reason."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, get_args

FindingName = Literal[
    "no_signal", "cut_off", "entropy", "length", "one_component", "held_out_falls", "clipped", "mismatch", "no_effect",
    "same_tasks",
]  # fmt: skip
FINDINGS: Final[tuple[FindingName, ...]] = get_args(FindingName)
Row = Mapping[str, Any]
"""A line of metrics.jsonl."""


class Bound(NamedTuple):
    """The bound of a rule."""

    value: float
    batches: int
    """The evidence that it takes."""
    reason: str


BOUNDS: Final[dict[FindingName, Bound]] = {
    "no_signal": Bound(24, 3, "groups in a row; of groups of 8 that pass 1 of 20 answers, a third have a signal"),
    "cut_off": Bound(0.95, 3, "share of the answers; a policy that ends by itself sometimes has fewer"),
    "entropy": Bound(
        0.2, 3, "of its first value; the demo falls to 0.1 while it learns: only where the reward is no better"
    ),
    "length": Bound(0.25, 3, "of its first value, or 4 times it; again only where the reward is no better"),
    "one_component": Bound(1e-9, 5, "range of a component's means over the batches: exactly constant"),
    "held_out_falls": Bound(3.0, 2, "standard errors below the best, twice in a row, because the best is chosen of many"),
    "clipped": Bound(0.9, 5, "share of the answers with an advantage; with eps 1e-9 the demo clips 0.8 of them, and learns"),
    "mismatch": Bound(0.2, 3, "nats a token at lag 0, or 5 times what the first batch had, from 0.01 on"),
    "no_effect": Bound(1e-5, 3, "distance of the farthest ratio from 1; a learning rate of 1e-6 moves ratios by 1e-4"),
    "same_tasks": Bound(20, 3, "draws of each task; published runs take 1 to 10"),
}
"""Value, batches of evidence, and the reason. They are silent on recorded runs that learn, and name those that cannot:
``tests/unit/services/shared/learning/``."""


@dataclass(frozen=True, kw_only=True)
class LearningFinding:
    """One reason why a run does not learn, as of its newest batch."""

    name: FindingName
    since: int
    """The first batch of the evidence."""
    text: str
    """What is wrong, with the figures."""
    advice: str
    """What to try."""
    figures: Mapping[str, float] = field(default_factory=dict)
    is_wrong: bool = True
    """False: it may be as it should be."""

    def __str__(self) -> str:
        return f"{self.text}, since batch {self.since}. {self.advice}"
