"""Decides when a trajectory has ended its holders often enough.

A rollout that ends without a word may have been killed: by a scale-down without time to hand back, a lost node, the memory
of another process. Or one of its trajectories has ended it: a step that crashes Python, a prompt that crashes the engine.
Nobody says which. So each trajectory that it held is counted, unless it brought a new token under that lease: one that
ends its holders dies at the same token again and again, and any other one gets on.

After two such losses in a row a trajectory is on trial: a rollout that has nothing else gets it, and gets nothing else until
it has brought a token. Only the loss of that rollout is the third one, for which it is given up: no other trajectory can
have ended it. While no rollout is free for that, it goes on as before after TRIAL_S, and its losses prove nothing.

If a lease of an innocent trajectory ends without a word before it brought a token with a probability of p, it is given up
with one of p ** 3. With a kill an hour for each rollout and a first token after 36 s that is one in a million.
"""

from typing import Final

from msgspec.structs import replace

from gspo_services.broker.rows import TrajectoryRow

MOST: Final = 3
TRIAL_S: Final = 120.0
"""For so long a trajectory on trial waits for a rollout that has nothing else: a killed one is back by then."""


def released(row: TrajectoryRow, *, is_lost: bool = False, was_alone: bool = False) -> TrajectoryRow:
    """The row with its losses after its lease. ``is_lost``: its holder has ended; ``was_alone``: it held nothing else."""
    if row.num_tokens > row.lease_start:
        return replace(row, losses=0)
    counts = is_lost and (was_alone or not is_on_trial(row))
    return replace(row, losses=row.losses + 1) if counts else row


def is_on_trial(row: TrajectoryRow) -> bool:
    """Whether one more loss ends the trajectory."""
    return row.losses >= MOST - 1


def verdict(row: TrajectoryRow) -> str:
    """Why the trajectory must be given up, after its lease; empty while it need not."""
    if row.losses < MOST:
        return ""
    return (
        f"trajectory {row.trajectory_id}: {row.losses} rollouts ended without a word while they held it, one after the "
        "other, and none brought a new token of it; their logs say what ended them: the engine, memory, or code of the "
        "environment"
    )
