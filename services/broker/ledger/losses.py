"""Decides when a trajectory has ended its holders often enough.

A rollout that ends without a word may have been killed: a lost node, no time to hand back, the memory of another process.
Or one of its trajectories has ended it: a step that crashes Python, a prompt that crashes the engine. Nobody says which. So
each trajectory that it held notes this life, unless it brought a new token under that lease: one that ends its holders does
so at the same token again and again, and any other one gets on.

After MOST - 1 lives a trajectory is a suspect: a rollout that has nothing else gets it, and gets nothing else until it has
brought a token. Only the end of such a rollout ends the trajectory: no other one can be the reason. Where all rollouts have
work, the window closes, so that one will have none. The end does not count while all MOST lives have one name and another
rollout serves: then the fault may be that rollout's, and others get the trajectory, too.

A rollout that lives counts once, however many leases it loses, and not at all while it is heard. What is handed back is not
lost. If a lease of an innocent trajectory is lost before a new token with a probability of p, it is given up with one of
about p ** 3: with a kill an hour for each rollout, and a first token after 36 s, one in a million.
"""

from typing import Final

from msgspec.structs import replace

from gspo_protocol.sessions import session_tag
from gspo_services.broker.rows import TrajectoryRow

MOST: Final = 3


def is_unused(row: TrajectoryRow) -> bool:
    """Whether the lease has brought no new token."""
    return row.num_tokens == row.lease_start


def lost(row: TrajectoryRow) -> TrajectoryRow:
    """The leased row with its holder among those that ended. Of more than MOST the last ones are kept."""
    life = row.holder_peer, session_tag(row.holder_session)
    if not is_unused(row) or life in row.lost_by:
        return row
    return replace(row, lost_by=(*row.lost_by, life)[-MOST:])


def is_suspect(row: TrajectoryRow) -> bool:
    """Whether one more life may end the trajectory."""
    return len(row.lost_by) >= MOST - 1


def verdict(row: TrajectoryRow, *, others_serve: bool) -> str:
    """Why a trajectory that was lost by MOST lives must be given up; empty while it need not. ``others_serve``: rollouts
    beside the last one."""
    if others_serve and len({peer for peer, _ in row.lost_by}) == 1:
        return ""
    lives = ", ".join(f"{peer} (session {tag})" for peer, tag in row.lost_by)
    return (
        f"trajectory {row.trajectory_id} ended {len(row.lost_by)} rollouts, one after the other, before a new token of it: "
        f"{lives}; their logs say what ended them: the engine, memory, or code of the environment"
    )
