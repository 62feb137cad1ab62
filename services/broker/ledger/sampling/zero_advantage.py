"""Decides whether anything can be learned from a group, and how many groups a batch may filter out.

A group whose rewards are all equal has advantage 0 everywhere, and so no gradient. Dynamic sampling (DAPO, arXiv 2503.14476,
section 3.2) filters it out, and another prompt takes its place while the batch fills. Admission's proof holds as it is: a
group that is filtered out only lowers the number of those outstanding, and its replacement is admitted like any other.

The run ends whatever the rewards: a batch filters out at most ``max_filtered`` groups. Zero-advantage groups that become
complete after that are trained, as they would be without dynamic sampling. So n batches of B groups take at most
n * (max_filtered + B) groups, besides those that fail.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gspo_services.broker.rows import TrajectoryRow


@dataclass(frozen=True, kw_only=True)
class SamplingRules:
    """What the settings say about zero-advantage groups, and about tasks that have had several."""

    max_filtered: int = 0
    """Groups that may be filtered out while one batch fills; 0: none ever is."""
    by_turn: bool = False
    """Advantages are made of each turn's rewards, and not of their sum."""
    overlong_buffer_tokens: int | None = None
    """Of trajectories that reach into so many tokens below their group's limit the learner changes the rewards."""
    rest_after_groups: int = 0
    """A task rests after this many zero-advantage groups in a row; 0: none does."""
    rest_batches: int = 1
    """For how many batches."""


def _kept_turns(row: TrajectoryRow) -> tuple[tuple[float, int], ...]:
    """Reward and role of each turn but those of attempts that began again, which no turn is compared with."""
    roles = row.turn_roles or (0,) * len(row.turn_rewards)
    turns = zip(row.turn_rewards, roles, strict=True)
    return tuple(turn for place, turn in enumerate(turns) if place not in row.discarded_turns)


def has_equal_rewards(members: Sequence[TrajectoryRow], *, by_turn: bool) -> bool:
    """Whether the rewards of a complete group are all the same: turn by turn where advantages are made of turns."""
    return len({_kept_turns(row) if by_turn else row.reward for row in members}) == 1


def has_advantage(members: Sequence[TrajectoryRow], rules: SamplingRules, max_tokens: int) -> bool:
    """Whether the advantages of a complete group may differ from 0. In doubt they may: a group that could teach something is
    never filtered out. ``max_tokens``: of a sequence, when the group was sampled; a schedule may have changed it since.
    """
    buffer = rules.overlong_buffer_tokens
    if buffer is not None and any(row.num_tokens > max_tokens - buffer for row in members):
        return True
    return not has_equal_rewards(members, by_turn=rules.by_turn)
