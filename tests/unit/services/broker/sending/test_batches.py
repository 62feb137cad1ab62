"""A batch that is sent in parts is read once, and never as a whole."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from gspo_protocol.codec import encode
from gspo_protocol.messages import Segment, TrainingValues, VersionRun
from gspo_protocol.messages.pieces import Pieces
from gspo_services.broker.ledger import batch_stats
from gspo_services.broker.rows import BatchRow, GroupRow
from gspo_services.broker.sending import recorded_batch
from gspo_services.broker.store import RowChanges, Store, StoredChunk
from tests.support.broker.ledger import SAMPLING
from tests.support.broker.made_batches import Made

NUM, TOKENS, CHUNK, PART = 6, 60_000, 500, 8192
TOKEN_BYTES = 8


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A ledger with one batch of NUM trajectories, in chunks."""
    made = [
        Made(
            trajectory_id=number,
            group_id=0,
            token_ids=np.arange(TOKENS, dtype="<i4") + number,
            logprobs=np.zeros(TOKENS, "<f4"),
            pieces=Pieces(
                [Segment("observation", 0, 10), Segment("action", 0, TOKENS - 10)],
                [VersionRun(-1, 10), VersionRun(1, TOKENS - 10)],
                [1.0],
            ),
            cuts=tuple(range(CHUNK, TOKENS, CHUNK)),
        )
        for number in range(NUM)
    ]
    rows = [each.row for each in made]
    group = GroupRow(
        group_id=0, split="train", prompt=0, task_index=0, evaluation=None, status="batched", sampling=SAMPLING, batch=0
    )
    batch = BatchRow(
        index=0, policy_version=1, group_ids=(0,), stats=batch_stats(1, [rows]), samplings=(SAMPLING,),
        values=TrainingValues(),
    )  # fmt: skip
    opened = Store(tmp_path / "ledger.sqlite3", fingerprint="f", run_id="r")
    chunks = [chunk for each in made for chunk in each.chunks()]
    opened.commit(RowChanges(rows=[group, *rows, batch], chunks=chunks))
    return opened


def test_a_batch_is_read_once_and_some_parts_are_all_of_it_that_is_in_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    chunks = store.chunks

    def counted(trajectory_id: int, begin: int = 0, end: int = 2**62) -> list[StoredChunk]:
        nonlocal read
        found = chunks(trajectory_id, begin, end)
        read += sum(len(chunk.token_ids) + len(chunk.logprobs) for chunk in found)
        return found

    monkeypatch.setattr(store, "chunks", counted)
    with store:
        batch = recorded_batch(store, 0, part_tokens=PART)
        batch.announcement()
        assert read == 0, "what a batch consists of is known from its rows"
        batch.part(0)
        read, sent = 0, 0
        tracemalloc.start()
        for number in range(batch.num_parts):
            frames = encode(*batch.part(number))
            sent += sum(memoryview(frame).nbytes for frame in frames[1:3])
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    whole = NUM * TOKENS * TOKEN_BYTES
    assert sent == whole
    # A chunk over the edge of a part is read with both.
    assert whole <= read <= whole + batch.num_parts * CHUNK * TOKEN_BYTES
    # What was read, its trajectories' and the part's own arrays, and the part before, which is still being sent.
    assert most < 8 * PART * TOKEN_BYTES < whole / 5
