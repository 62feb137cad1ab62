"""Decides what to accept from a peer: nothing that a later stage cannot handle.

Message types bound each field by itself (``gspo_protocol.messages``). Here is what only the run knows: which tokens,
turns and
versions a trajectory can have next, and how much of it fits a batch. Behind it are SQLite's integers, the headers and frames
of Lease and Batch, packing and loss of the learner, and JSON.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from msgspec.structs import replace

from gspo_protocol.codec import Array
from gspo_protocol.endpoints import require_endpoint
from gspo_protocol.limits import MAX_ENTRIES, MAX_JOURNAL_BYTES, MAX_VERSION_STEP, TrajectoryLimits
from gspo_protocol.messages import Chunk, Finish, Graded, GroupSampling, Journal, Published, Trained
from gspo_protocol.messages.base import require_rewards
from gspo_protocol.messages.experts import MOST_EXPERTS, UNKNOWN, ModelExperts, highest_expert
from gspo_protocol.messages.journal import pack_entry
from gspo_services.broker.rows import NO_TURN, JournalRow, TrajectoryRow, VersionRow

OBSERVATION: Final = -1
"""In place of a version: no policy made the token."""
_NOTHING_PREDICTS_IT: Final = "the first token is an action: it must be an observation, because nothing predicts it"
RESERVED_METRICS: Final = frozenset({"event", "line", "time", "time_s"})
"""Fields of every line of metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class TokenFacts:
    """Facts about a chunk's arrays for the ledger, which never sees tokens."""

    largest_token_id: int
    expert_row: tuple[int, ...] = ()
    """Layers, experts of a token, bytes of an expert; empty: it has no experts."""
    highest_expert: int = UNKNOWN

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Self:
        """Those of a chunk's arrays."""
        largest, experts = int(arrays["token_ids"].max()), arrays.get("experts")
        if experts is None:
            return cls(largest_token_id=largest)
        return cls(largest_token_id=largest, expert_row=experts.shape[1:], highest_expert=highest_expert(experts))


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What a chunk adds to its trajectory. Versions are 0 where it has no action token."""

    num_actions: int
    version_sum: int
    oldest: int
    newest: int
    """Version of the last action token: the engine serves at least this. 0 with several sequences: of answers that are made
    at the same time, tokens of a former version may arrive later."""
    last_version: int
    """Version of the last token, or OBSERVATION."""
    last_sequence: int
    sequences: tuple[tuple[int, int], ...]
    """As in the row."""
    num_turns: int
    """For the whole trajectory, like the following fields."""
    num_segments: int
    num_runs: int
    reward_size: float


def growth(
    row: TrajectoryRow,
    chunk: Chunk,
    facts: TokenFacts,
    *,
    newest: VersionRow,
    limits: TrajectoryLimits,
    sampling: GroupSampling,
) -> Growth:
    """What ``chunk`` adds to the trajectory of ``row``, which it follows without a gap.

    Raises: ValueError with the field, the value and the limit when it must not be taken.
    """
    require_under_way(row)
    if facts.largest_token_id >= newest.vocabulary:
        raise ValueError(
            f"token_ids hold {facts.largest_token_id}: the model's vocabulary has {newest.vocabulary} tokens, from 0 on"
        )
    if chunk.offset == 0 and chunk.state is None:
        raise ValueError("state is missing from the first chunk: the trajectory could not be resumed")
    turns = _turns(row, chunk, sampling.max_tokens)
    end = chunk.offset + chunk.num_tokens
    most = sampling.max_episode_tokens
    if end > most:
        raise ValueError(f"{end} tokens in all sequences, {most} allowed (sampling.max_episode_tokens)")
    several = len(turns.sequences) > 1
    num_runs, runs = _runs(row, chunk, newest.policy_version, several=several)
    for name, found, allowed in (
        ("turns", turns.num_turns, limits.turns),
        ("segments", turns.num_segments, limits.segments),
        ("version runs", num_runs, limits.runs),
    ):
        if found > allowed:
            raise ValueError(f"{found} {name}, {allowed} allowed in a batch of this size: use a smaller batch")
    versions = [version for version, _ in runs if version != OBSERVATION]
    return Growth(
        num_actions=sum(num for version, num in runs if version != OBSERVATION),
        version_sum=sum(version * num for version, num in runs if version != OBSERVATION),
        oldest=min(versions, default=0),
        newest=versions[-1] if versions and not several else 0,
        last_version=runs[-1][0],
        last_sequence=turns.last_sequence,
        sequences=tuple(turns.sequences) if several else (),
        num_turns=turns.num_turns,
        num_segments=turns.num_segments,
        num_runs=num_runs,
        reward_size=require_rewards("turn_rewards", chunk.turn_rewards, row.reward_size),
    )


def require_experts(facts: TokenFacts, model: ModelExperts | None, former: tuple[int, ...]) -> None:
    """Check what an engine reported. ``model``: what the learner has told, ``former``: the rows of the trajectory's first
    experts; None and empty: not known.

    Raises: ValueError for experts that could not be trained, alone or beside the others.
    """
    if not facts.expert_row:
        return
    expected = former if model is None else model.row_shape
    if expected and facts.expert_row != expected:
        whose = "those before them" if model is None else "the model's"
        raise ValueError(
            f"experts have {list(facts.expert_row)} [layers, experts per token, bytes], {whose} {list(expected)}: serve the "
            "learner's model"
        )
    most = MOST_EXPERTS if model is None else model.num_experts
    if facts.highest_expert >= most:
        raise ValueError(f"experts hold {facts.highest_expert}: the model has at most {most} in a layer, from 0 on")


def grown_row(row: TrajectoryRow, chunk: Chunk, growth: Growth) -> TrajectoryRow:
    """The row with the chunk. Versions of an engine do not go back: the last one bounds what the holder makes next."""
    oldest = [version for version in (row.min_version, growth.oldest) if version]
    return replace(
        row,
        num_tokens=row.num_tokens + chunk.num_tokens,
        num_action_tokens=row.num_action_tokens + growth.num_actions,
        version_sum=row.version_sum + growth.version_sum,
        min_version=min(oldest, default=0),
        lease_version=max(row.lease_version, growth.newest),
        last_sequence=growth.last_sequence,
        sequences=growth.sequences,
        num_turns=growth.num_turns,
        num_segments=growth.num_segments,
        num_runs=growth.num_runs,
        last_version=growth.last_version,
        reward_size=growth.reward_size,
    )


@dataclass(frozen=True, kw_only=True)
class _Turns:
    """The trajectory's turns, segments and sequences with a chunk."""

    num_turns: int
    num_segments: int
    sequences: list[tuple[int, int]]
    last_sequence: int


def _turns(row: TrajectoryRow, chunk: Chunk, max_tokens: int) -> _Turns:
    """In each sequence a prompt, a turn, an observation, a turn, and so on; turns are numbered as they begin, wherever."""
    turns, num_segments, last = row.num_turns, row.num_segments, row.last_sequence
    sequences = list(row.sequence_states)
    completed = _completed(turns, sequences)
    former: tuple[str, int] | None = None
    if sequences:
        former = ("observation" if sequences[last][1] == NO_TURN else "action", last)
    for index, segment in enumerate(chunk.segments):
        kind, sequence = segment.kind, segment.sequence
        if sequence > len(sequences):
            raise ValueError(f"segments[{index}] is of sequence {sequence}, {len(sequences)} is the next that can begin")
        num_tokens, under_way = sequences[sequence] if sequence < len(sequences) else (0, NO_TURN)
        if not num_tokens and kind == "action":
            raise ValueError(_NOTHING_PREDICTS_IT if not sequences else f"segments[{index}]: {_NOTHING_PREDICTS_IT}")
        goes_on = kind == "action" and under_way != NO_TURN and segment.turn == under_way
        if segment.turn != turns and not goes_on:
            raise ValueError(f"segments[{index}] is an {kind} of turn {segment.turn}, {turns} must follow")
        num_tokens += segment.num_tokens
        if num_tokens > max_tokens:
            raise ValueError(f"{num_tokens} tokens, {max_tokens} allowed (sampling.max_tokens)")
        # A segment that continues one of the previous chunk is merged with it.
        num_segments += (kind, sequence) != former or (kind == "action" and not goes_on)
        turns += kind == "action" and not goes_on
        sequences[sequence:] = [(num_tokens, segment.turn if kind == "action" else NO_TURN), *sequences[sequence + 1 :]]
        former, last = (kind, sequence), sequence
    new = _completed(turns, sequences) - completed
    if len(chunk.turn_rewards) != new:
        raise ValueError(f"{len(chunk.turn_rewards)} turn_rewards for {new} turns that the chunk completes")
    if chunk.turn_done and chunk.segments[-1].kind != "action":
        raise ValueError("turn_done is set after an observation: only an action completes a turn")
    return _Turns(num_turns=turns, num_segments=num_segments, sequences=sequences, last_sequence=last)


def _completed(turns: int, sequences: Sequence[tuple[int, int]]) -> int:
    """Turns with a reward: those that a sequence's last token belongs to have none yet."""
    return turns - sum(turn != NO_TURN for _, turn in sequences)


def _runs(row: TrajectoryRow, chunk: Chunk, newest_version: int, *, several: bool) -> tuple[int, list[tuple[int, int]]]:
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
                _require_version(version, oldest, newest_version)
                oldest = oldest if several else version
            num_runs += version != last
            last = version
            cut.append((version, step))
    return num_runs, cut


def _require_version(version: int, oldest: int, newest: int) -> None:
    if not 1 <= version <= newest:
        raise ValueError(f"version_runs give version {version} to action tokens: published are 1 to {newest}")
    if version < oldest:
        raise ValueError(
            f"version_runs give version {version} to action tokens: the lease's engine served {oldest} before, and an "
            "engine's versions do not go back"
        )


def journal_entry(row: TrajectoryRow, message: Journal) -> JournalRow:
    """The entry as it is kept. Raises: ValueError with the value and the limit when it must not be taken."""
    require_under_way(row)
    if message.place != row.num_entries:
        raise ValueError(f"gap: place is {message.place}, {row.num_entries} entries are acknowledged")
    if row.num_entries >= MAX_ENTRIES:
        raise ValueError(f"{row.num_entries + 1} entries, {MAX_ENTRIES} allowed (MAX_ENTRIES)")
    entry = pack_entry(message.entry)
    if row.journal_bytes + len(entry) > MAX_JOURNAL_BYTES:
        raise ValueError(
            f"the journal has {row.journal_bytes + len(entry)} bytes, {MAX_JOURNAL_BYTES} allowed (MAX_JOURNAL_BYTES): keep "
            "large results in files"
        )
    return JournalRow(trajectory_id=row.trajectory_id, place=message.place, entry=entry)


def require_under_way(row: TrajectoryRow) -> None:
    """Raises: ValueError when the episode has ended."""
    if row.finish_reason is not None:
        raise ValueError("its episode has ended: only Graded can follow")


def check_graded(graded: Graded, members: Sequence[TrajectoryRow]) -> None:
    """Raises: ValueError with the value when these are not the rewards of these ``members``."""
    for field, found in (("rewards", len(graded.rewards)), ("components", len(graded.components))):
        if found != len(members):
            raise ValueError(f"{found} {field} for the {len(members)} trajectories of the group")
    if unfinished := [each.trajectory_id for each in members if each.finish_reason is None]:
        raise ValueError(f"trajectory {unfinished[0]} of its group has not ended: there is nothing to compare yet")


def check_finish(row: TrajectoryRow, finish: Finish) -> None:
    """Raises: ValueError with the field and the value when the episode cannot end like this."""
    require_under_way(row)
    if finish.num_tokens != row.num_tokens:
        raise ValueError(f"num_tokens is {finish.num_tokens}, {row.num_tokens} tokens are acknowledged")
    if row.num_action_tokens == 0:
        raise ValueError("it has no action token: there is nothing to train on")
    if len(finish.turn_rewards) != row.num_turns:
        raise ValueError(f"{len(finish.turn_rewards)} turn_rewards for {row.num_turns} action turns")
    discarded = finish.discarded_turns
    if discarded != sorted(set(discarded)) or (discarded and discarded[-1] >= row.num_turns):
        raise ValueError(
            f"discarded_turns is {discarded!s:.100}: expected turns from 0 to {row.num_turns - 1}, each once, in order"
        )
    if len(discarded) == row.num_turns:
        raise ValueError(f"discarded_turns are all {row.num_turns} turns: there is nothing to train on")
    for turn in discarded:
        if finish.turn_rewards[turn] != 0:
            raise ValueError(
                f"turn_rewards[{turn}] is {finish.turn_rewards[turn]:g}, and turn {turn} is discarded: give it 0"
            )


def check_published_experts(published: Published, known: ModelExperts | None) -> None:
    """Raises: ValueError for a version whose experts are not those that a learner has told before."""
    if published.experts is not None and known not in (None, published.experts):
        raise ValueError(
            f"experts are {published.experts}, those of the versions before are {known}: the model was changed; continue "
            "with the one that the run began with, or use another run.directory"
        )


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
