"""The usual chunk, decided without an object for each of its parts: it goes on with the action under way, by one version."""

from msgspec.structs import replace

from protocol.limits import TrajectoryLimits
from protocol.messages import GroupSampling
from protocol.messages.gathered import Extension
from services.broker.rows import TrajectoryRow, VersionRow


def extended_row(
    row: TrajectoryRow,
    num_tokens: int,
    chunk: Extension,
    *,
    newest: VersionRow,
    limits: TrajectoryLimits,
    sampling: GroupSampling,
) -> TrajectoryRow | None:
    """The row with ``num_tokens`` more tokens of one action: what ``growth`` and ``grown_row`` make of such a chunk. None:
    it is another kind of chunk, or one that must not be taken, and ``growth`` says which.
    """
    version, end = chunk.version, row.num_tokens + num_tokens
    num_runs = row.num_runs + (version != row.last_version)
    goes_on = not row.sequences and row.last_version >= 1 and chunk.turn == row.num_turns - 1
    fits = (
        chunk.largest_token_id < newest.vocabulary
        and row.lease_version <= version <= newest.policy_version
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
        num_action_tokens=row.num_action_tokens + num_tokens,
        version_sum=row.version_sum + version * num_tokens,
        min_version=min(row.min_version, version) if row.min_version else version,
        lease_version=version,
        num_runs=num_runs,
        last_version=version,
    )
