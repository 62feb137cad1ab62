"""Turns a trajectory's stored chunks into arrays over its tokens."""

from collections.abc import Sequence

import numpy as np

from gspo_services.broker.store import StoredChunk, chunk_header, join
from gspo_services.runs.reading.rows import RecordedChunk, RecordedLease, RecordedTokens


def tokens_of(trajectory_id: int, stored: Sequence[StoredChunk], discarded_turns: Sequence[int]) -> RecordedTokens:
    """Return the tokens of one trajectory. Raises: ValueError when the chunks are not what was stored, or have a gap."""
    payload = join(stored)
    chunks = tuple(_chunk(each) for each in stored)
    lengths = [segment.num_tokens for segment in payload.segments]
    run_lengths = [run.num_tokens for run in payload.version_runs]
    for what, covered in (("segments", sum(lengths)), ("version runs", sum(run_lengths))):
        if covered != payload.num_tokens:
            raise ValueError(f"trajectory {trajectory_id}: its {what} cover {covered} of {payload.num_tokens} tokens")
    is_action_T = np.repeat([segment.kind == "action" for segment in payload.segments], lengths).astype(np.bool_)
    turns_T = np.repeat(np.array([segment.turn for segment in payload.segments], np.int64), lengths)
    return RecordedTokens(
        trajectory_id=trajectory_id,
        token_ids_T=payload.token_ids,
        logprobs_T=payload.logprobs,
        versions_T=np.repeat(np.array([run.version for run in payload.version_runs], np.int64), run_lengths),
        is_action_T=is_action_T,
        is_trained_T=is_action_T & ~np.isin(turns_T, np.array(discarded_turns, np.int64)),
        turns_T=turns_T,
        sequences_T=np.repeat(np.array([segment.sequence for segment in payload.segments], np.int64), lengths),
        epochs_T=np.repeat(np.array([chunk.epoch for chunk in chunks], np.int64), [chunk.num_tokens for chunk in chunks]),
        segments=tuple(payload.segments),
        chunks=chunks,
        leases=leases_of(chunks),
    )


def leases_of(chunks: Sequence[RecordedChunk]) -> tuple[RecordedLease, ...]:
    """Return the leases that brought these chunks, in order."""
    found: list[RecordedLease] = []
    for chunk in chunks:
        last = found[-1] if found else None
        if last is not None and last.epoch == chunk.epoch:
            found[-1] = RecordedLease(
                epoch=last.epoch,
                peer=last.peer,
                start=last.start,
                num_tokens=last.num_tokens + chunk.num_tokens,
                num_chunks=last.num_chunks + 1,
                skipped_epochs=last.skipped_epochs,
            )
            continue
        # The first lease of a trajectory has epoch 1.
        skipped = chunk.epoch - (0 if last is None else last.epoch) - 1
        found.append(
            RecordedLease(
                epoch=chunk.epoch,
                peer=chunk.peer,
                start=chunk.start,
                num_tokens=chunk.num_tokens,
                num_chunks=1,
                skipped_epochs=max(0, skipped),
            )
        )
    return tuple(found)


def _chunk(stored: StoredChunk) -> RecordedChunk:
    header = chunk_header(stored.header)
    return RecordedChunk(
        start=stored.start,
        num_tokens=stored.num_tokens,
        epoch=stored.epoch,
        peer=header.peer,
        turn_done=header.turn_done,
        version_runs=tuple(header.version_runs),
    )
