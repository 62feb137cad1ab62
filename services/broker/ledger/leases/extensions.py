"""The usual chunks, decided without an object for each of their parts: they go on with the action under way."""

from msgspec.structs import replace

from protocol.limits import TrajectoryLimits
from protocol.messages import GroupSampling
from protocol.messages.gathered import Stretch
from services.broker.rows import TrajectoryRow, VersionRow


def extended_row(
    row: TrajectoryRow, stretch: Stretch, *, newest: VersionRow, limits: TrajectoryLimits, sampling: GroupSampling
) -> TrajectoryRow | None:
    """The row with all chunks of a stretch: what ``growth`` and ``grown_row`` make of one after the other. None: they are
    not usual ones that go on from here, or one of them must not be taken, and ``growth`` says which.
    """
    if not stretch.is_usual or stretch.offset != row.num_tokens:
        return None
    oldest, last = stretch.versions[0][0], stretch.versions[-1][0]
    end = row.num_tokens + stretch.num_tokens
    num_runs = row.num_runs + len(stretch.versions) - (oldest == row.last_version)
    goes_on = not row.sequences and row.last_version >= 1 and stretch.turn == row.num_turns - 1
    fits = (
        stretch.largest_token_id < newest.vocabulary
        and row.lease_version <= oldest
        and last <= newest.policy_version
        and end <= sampling.max_tokens
        and end <= sampling.max_episode_tokens
        and num_runs <= limits.runs
        and row.num_segments <= limits.segments
        and row.num_turns <= limits.turns
    )
    if not goes_on or not fits:
        return None
    return replace(
        row,
        num_tokens=end,
        num_action_tokens=row.num_action_tokens + stretch.num_tokens,
        version_sum=row.version_sum + stretch.version_sum,
        min_version=min(row.min_version, oldest) if row.min_version else oldest,
        lease_version=last,
        num_runs=num_runs,
        last_version=last,
    )
