"""Decides what may be taken from a peer: nothing that whatever stands behind the ledger would choke on.

Message types bound each field by itself (``protocol.messages``). Here is what only the run knows: which tokens, turns and
versions a trajectory can have next, and how much of it fits a batch. Behind it are SQLite's integers, the headers and frames
of Lease and Batch, packing and loss of the learner, and JSON.
"""

from dataclasses import dataclass
from typing import Final

from protocol.endpoints import require_endpoint
from protocol.limits import MAX_VERSION_STEP, TrajectoryLimits
from protocol.messages import Chunk, Finish, Published, Trained
from protocol.messages.base import require_rewards
from services.broker.rows import TrajectoryRow, VersionRow

OBSERVATION: Final = -1
"""In place of a version: no policy made the token."""
RESERVED_METRICS: Final = frozenset({"event", "record", "time", "time_s"})
"""Fields of every line of metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class TokenFacts:
    """What the ledger, which never sees tokens, must know of the arrays that came with a chunk."""

    largest_token_id: int


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What a chunk adds to its trajectory. Versions are 0 where it has no action token."""

    num_actions: int
    version_sum: int
    oldest: int
    newest: int
    """Version of the last action token: the engine serves at least this."""
    last_version: int
    """Version of the last token, or OBSERVATION."""
    num_turns: int
    """Of the whole trajectory, as are the rest."""
    num_segments: int
    num_runs: int
    reward_size: float


def growth(
    row: TrajectoryRow, chunk: Chunk, facts: TokenFacts, *, newest: VersionRow, limits: TrajectoryLimits, max_tokens: int
) -> Growth:
    """What ``chunk`` adds to the trajectory of ``row``, which it follows without a gap.

    Raises: ValueError with the field, the value and the limit when it must not be taken.
    """
    end = chunk.offset + chunk.num_tokens
    if end > max_tokens:
        raise ValueError(f"{end} tokens, {max_tokens} allowed (sampling.max_tokens)")
    if facts.largest_token_id >= newest.vocabulary:
        raise ValueError(
            f"token_ids hold {facts.largest_token_id}: the model's vocabulary has {newest.vocabulary} tokens, from 0 on"
        )
    if chunk.offset == 0 and chunk.state is None:
        raise ValueError("state is missing from the first chunk: the trajectory could not be resumed")
    num_turns, num_segments = _turns(row, chunk)
    num_runs, runs = _runs(row, chunk, newest.policy_version)
    for name, found, allowed in (
        ("turns", num_turns, limits.turns),
        ("segments", num_segments, limits.segments),
        ("version runs", num_runs, limits.runs),
    ):
        if found > allowed:
            raise ValueError(f"{found} {name}, {allowed} allowed in a batch of this size: use a smaller batch")
    versions = [version for version, _ in runs if version != OBSERVATION]
    return Growth(
        num_actions=sum(num for version, num in runs if version != OBSERVATION),
        version_sum=sum(version * num for version, num in runs if version != OBSERVATION),
        oldest=min(versions, default=0),
        newest=versions[-1] if versions else 0,
        last_version=runs[-1][0],
        num_turns=num_turns,
        num_segments=num_segments,
        num_runs=num_runs,
        reward_size=require_rewards("turn_rewards", chunk.turn_rewards, row.reward_size),
    )


def _turns(row: TrajectoryRow, chunk: Chunk) -> tuple[int, int]:
    """The trajectory's turns and segments with ``chunk``: prompt, turn 0, observation, turn 1, and so on."""
    turns, num_segments = row.num_turns, row.num_segments
    acting = row.last_version > 0
    completed = _completed(turns, acting=acting)
    if chunk.offset == 0 and chunk.segments[0].kind == "action":
        raise ValueError("the first token is an action: it must be an observation, because nothing predicts it")
    for index, segment in enumerate(chunk.segments):
        is_action = segment.kind == "action"
        goes_on = acting and is_action and segment.turn == turns - 1
        if segment.turn != turns and not goes_on:
            raise ValueError(f"segments[{index}] is an {segment.kind} of turn {segment.turn}, {turns} must follow")
        goes_on |= bool(num_segments) and not acting and not is_action
        num_segments += not goes_on
        turns += is_action and not goes_on
        acting = is_action
    new = _completed(turns, acting=acting) - completed
    if len(chunk.turn_rewards) != new:
        raise ValueError(f"{len(chunk.turn_rewards)} turn_rewards for {new} turns that the chunk completes")
    if chunk.turn_done and not acting:
        raise ValueError("turn_done is set after an observation: only an action completes a turn")
    return turns, num_segments


def _completed(turns: int, *, acting: bool) -> int:
    """Turns with a reward: the one that the last token belongs to has none yet."""
    return turns - acting


def _runs(row: TrajectoryRow, chunk: Chunk, newest_version: int) -> tuple[int, list[tuple[int, int]]]:
    """The trajectory's version runs with ``chunk``, and those of the chunk, cut where a segment ends."""
    cut: list[tuple[int, int]] = []
    num_runs, last = row.num_runs, row.last_version
    oldest = row.lease_version
    rest = iter(chunk.version_runs)
    version = left_in_run = 0
    for segment in chunk.segments:
        left_in_segment = segment.num_tokens
        while left_in_segment:
            if not left_in_run:
                run = next(rest)
                version, left_in_run = run.version, run.num_tokens
            step = min(left_in_segment, left_in_run)
            left_in_segment -= step
            left_in_run -= step
            if segment.kind == "observation":
                if version != OBSERVATION:
                    raise ValueError(f"version_runs give version {version} to observation tokens: it must be -1")
            else:
                oldest = _next_version(version, oldest, newest_version)
            num_runs += version != last
            last = version
            cut.append((version, step))
    return num_runs, cut


def _next_version(version: int, oldest: int, newest: int) -> int:
    if not 1 <= version <= newest:
        raise ValueError(f"version_runs give version {version} to action tokens: published are 1 to {newest}")
    if version < oldest:
        raise ValueError(
            f"version_runs give version {version} to action tokens: the lease's engine served {oldest} before, and an "
            "engine's versions do not go back"
        )
    return version


def check_finish(row: TrajectoryRow, finish: Finish) -> None:
    """Raises: ValueError with the field and the value when the episode cannot end like this."""
    if finish.num_tokens != row.num_tokens:
        raise ValueError(f"num_tokens is {finish.num_tokens}, {row.num_tokens} tokens are acknowledged")
    if row.num_action_tokens == 0:
        raise ValueError("it has no action token: there is nothing to train on")
    if len(finish.turn_rewards) != row.num_turns:
        raise ValueError(f"{len(finish.turn_rewards)} turn_rewards for {row.num_turns} action turns")


def check_published(published: Published, newest: VersionRow | None) -> None:
    """Raises: ValueError for an endpoint that no rollout can connect to, and for a version far above the newest one, or of
    another model.
    """
    require_endpoint("endpoint", published.endpoint)
    highest = (0 if newest is None else newest.policy_version) + MAX_VERSION_STEP
    if published.policy_version > highest:
        raise ValueError(f"policy_version is {published.policy_version}, {highest} allowed now (MAX_VERSION_STEP)")
    if newest is not None and published.vocabulary != newest.vocabulary:
        raise ValueError(
            f"vocabulary is {published.vocabulary}, that of version {newest.policy_version} is {newest.vocabulary}: the "
            "model was changed; continue with the one that the run began with, or use another run.directory"
        )


def check_trained(trained: Trained) -> None:
    """Raises: ValueError for metrics that would hide the fields of metrics.jsonl."""
    reserved = sorted(RESERVED_METRICS & trained.metrics.keys())
    if reserved:
        raise ValueError(f"metrics has {reserved[0]!r}, a name that every line of metrics.jsonl has already")
