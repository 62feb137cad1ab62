"""Builders of valid protocol messages, to be varied by tests."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from gspo_protocol import limits
from gspo_protocol.digests import part_digest
from gspo_protocol.messages import (
    Ack,
    Batch,
    BatchFailed,
    BatchItem,
    BatchPart,
    BatchPartRequest,
    BatchPending,
    BatchRequest,
    Checkpointed,
    Chunk,
    DeltaBucket,
    EndOfRun,
    Evaluated,
    Finish,
    Goodbye,
    Grade,
    Graded,
    GroupMember,
    GroupSampling,
    Heartbeat,
    Hello,
    Journal,
    Lease,
    LeaseEnded,
    LeaseKey,
    LeaseRequest,
    LedgerCommit,
    Loaded,
    Manifest,
    ManifestRequest,
    Message,
    NoLease,
    PartReady,
    PartRequest,
    Published,
    Pulse,
    Refused,
    Release,
    RequeueRequest,
    Resume,
    Segment,
    SkipBatch,
    Source,
    Status,
    StatusRequest,
    StopRequest,
    TensorInfo,
    Trained,
    TrainingValues,
    VersionRun,
    VersionScore,
    WeightChunk,
    WeightGone,
    WeightPart,
    WeightRequest,
    Welcome,
)
from gspo_protocol.messages.gathered import gather
from gspo_protocol.messages.journal import journal_array, pack_entry
from gspo_protocol.messages.pieces import NO_PIECES, SPAN_ARRAYS, Pieces, piece_arrays

Arrays = dict[str, np.ndarray[Any, Any]]
A_COMMIT = LedgerCommit(run_id="run", number=5, digest="0a" * 16)


def token_arrays(num_tokens: int) -> Arrays:
    """Distinct token ids and log-probs."""
    return {
        "token_ids": np.arange(num_tokens, dtype=np.int32) + 5,
        "logprobs": -np.arange(num_tokens, dtype=np.float32) / 8,
    }


def a_chunk(**changes: Any) -> Chunk:
    """Two observation tokens and three action tokens of two versions."""
    fields: dict[str, Any] = {
        "trajectory_id": 7,
        "epoch": 2,
        "offset": 0,
        "num_tokens": 5,
        "segments": [Segment("observation", 0, 2), Segment("action", 0, 3)],
        "version_runs": [VersionRun(-1, 2), VersionRun(3, 1), VersionRun(4, 2)],
        "state": {"answer": 42, "nested": [1, None, "x", 0.5]},
        "turn_done": True,
        "turn_rewards": [0.5],
    }
    return Chunk(**{**fields, **changes})


def an_extension(**changes: Any) -> Chunk:
    """Three more tokens of the action that ``a_chunk`` begins: the usual chunk."""
    fields: dict[str, Any] = {
        "offset": 5,
        "num_tokens": 3,
        "segments": [Segment("action", 0, 3)],
        "version_runs": [VersionRun(4, 3)],
        "state": None,
        "turn_done": False,
        "turn_rewards": [],
    }
    return a_chunk(**{**fields, **changes})


def an_overweight(**changes: Any) -> tuple[Chunk, Arrays]:
    """A chunk whose tokens each have the most bytes of experts, and all together more than a frame takes."""
    size, runs = 4000, {"segments": [Segment("action", 0, 4000)], "version_runs": [VersionRun(4, 4000)]}
    experts = np.zeros((size, limits.MAX_EXPERT_BYTES, 1, 1), np.uint8)
    return an_extension(num_tokens=size, **runs, **changes), token_arrays(size) | {"experts": experts}


def a_lease(**changes: Any) -> Lease:
    """A lease that resumes the tokens of ``a_chunk``."""
    chunk = a_chunk()
    fields: dict[str, Any] = {
        "trajectory_id": 7,
        "epoch": 3,
        "group_id": 1,
        "split": "train",
        "task": {"question": "1+1="},
        "seed": 99,
        "sampling": GroupSampling(0.7, 12, 512, 512),
        "lease_s": 15.0,
        "num_tokens": 5,
        "state": chunk.state,
        "turn_done": False,
    }
    return Lease(**{**fields, **changes})


def a_batch() -> Batch:
    """Two trajectories of five tokens, in one part."""
    item = BatchItem(7, 1, 5, 1, 1, 3, "done", 1.0, 64)
    other = BatchItem(8, 1, 5, 1, 1, 3, "length", 1.0, 64)
    values = TrainingValues(learning_rate=1e-6, eps_high=4e-4)
    return Batch(index=4, policy_version=5, part_tokens=16, items=[item, other], values=values)


def lease_arrays(num_tokens: int = 5, turn_rewards: Sequence[float] = (), num_entries: int = 0) -> Arrays:
    """Those of ``a_lease``."""
    chunk = a_chunk()
    pieces = Pieces(chunk.segments, chunk.version_runs, turn_rewards) if num_tokens else NO_PIECES
    return {**token_arrays(num_tokens), **piece_arrays([pieces]), **journal_array(packed_entries(num_entries))}


def packed_entries(num_entries: int) -> list[bytes]:
    """Entries of a journal."""
    return [pack_entry({"step": "search", "result": [number, None, "x"]}) for number in range(num_entries)]


def batch_arrays() -> Arrays:
    """Those of ``a_batch``."""
    num_actions = sum(segment.num_tokens for segment in a_chunk().segments if segment.kind == "action")
    return {
        "turn_rewards": np.array([1.0, 0.0]),
        "sequences": np.array([[5, num_actions], [5, num_actions]], np.int32),
    }


def a_part(index: int = 4, part: int = 0) -> BatchPart:
    """The only part of ``a_batch``."""
    return BatchPart(index=index, part=part, digest=part_digest(index, part, part_arrays()))


def part_arrays() -> Arrays:
    """Those of ``a_part``."""
    chunk = a_chunk()
    pieces = piece_arrays([Pieces(chunk.segments, chunk.version_runs, [])] * 2)
    return {**token_arrays(10), **{name: pieces[name] for name in SPAN_ARRAYS}}


def a_manifest() -> Manifest:
    """One tensor of eight bytes."""
    tensor = TensorInfo("model.norm.weight", "float32", [2], 0, 8, "ab" * 32)
    return Manifest(
        policy_version=5, kind="snapshot", base_version=0, num_bytes=8, chunk_bytes=1024, digest="cd" * 32, tensors=[tensor]
    )


def an_offer() -> Manifest:
    """A manifest that uses every field."""
    bucket = DeltaBucket(0, 2, 4, 2, 1, 2, [9, 9, 9, 9, 9, 9])
    return msgspec.structs.replace(
        a_manifest(), base_version=4, newest_version=6, buckets=[bucket], sources=[Source("tcp://r:2", "k" * 40)],
        head_digest="ab" * 32, checksums={"model.norm.weight": "ef" * 8},
        parts=[WeightPart(3), WeightPart(5, "tcp://learner-1:7003", [(3, 5)])],
    )  # fmt: skip


def a_publication() -> Published:
    """A version of a model with 512 token ids."""
    return Published(
        policy_version=5, endpoint="tcp://x:1", digest="cd" * 32, num_bytes=8, trained_batches=4, vocabulary=512
    )


def one_of_each() -> list[tuple[Message, Arrays]]:
    """Every message type once, with its arrays."""
    return [
        (
            Hello(protocol_version=1, role="rollout", peer="r0", session="s", first_seq=3, fingerprint="f", commit=A_COMMIT),
            {},
        ),
        (
            Welcome(
                protocol_version=1,
                run_id="run",
                policy_version=2,
                weights_endpoint="tcp://x:1",
                next_batch=1,
                commit=A_COMMIT,
            ),
            {},
        ),
        (Goodbye(reason="drained"), {}),
        (Refused(reason="no", message_type="hello", fatal=True, protocol_version=2), {}),
        (Ack(next_seq=9, commit=A_COMMIT), {}),
        (LeaseRequest(request_id=1, capacity=4, policy_version=2), {}),
        (a_lease(num_entries=2), lease_arrays(num_entries=2)),
        (NoLease(request_id=1, reason="window_full", retry_s=0.5), {}),
        (a_chunk(), token_arrays(5)),
        gather([(a_chunk(), token_arrays(5)), (an_extension(), token_arrays(3))]),
        (Journal(trajectory_id=7, epoch=2, place=3, entry={"step": "search", "result": [1, None, "x"]}), {}),
        (
            Finish(
                trajectory_id=7, epoch=2, num_tokens=5, reason="done", turn_rewards=[0.5, 1.0], components={"format": 0.5}
            ),
            {},
        ),
        (
            Grade(
                trajectory_id=7,
                epoch=3,
                group_id=3,
                task={"question": "2 + 2?"},
                members=[
                    GroupMember(num_tokens=2, reward=0.5, components={"format": 0.5}),
                    GroupMember(num_tokens=1, reward=1),
                ],
            ),
            {"token_ids": np.array([5, 6, 7], np.int32)},
        ),
        (
            Graded(trajectory_id=7, epoch=3, rewards=[1.0, -1.0], components=[{"format": 0.5, "rank": 1.0}, {"rank": 2.0}]),
            {},
        ),
        (Release(trajectory_id=7, epoch=2, reason="draining", failed=False), {}),
        (LeaseEnded(trajectory_id=7, epoch=2, reason="expired"), {}),
        (Heartbeat(policy_version=2, status="serving", leases=[LeaseKey(7, 2)]), {}),
        (Pulse(policy_version=3, weights_endpoint="tcp://x:1", stopping=True), {}),
        (BatchRequest(index=4, policy_version=5), {}),
        (BatchPending(index=4, groups_ready=3, groups_needed=8, waiting_for="group 9"), {}),
        (a_batch(), batch_arrays()),
        (BatchPartRequest(index=4, part=1, count=3), {}),
        (a_part(), part_arrays()),
        (SkipBatch(index=4, reason="2 learners could not train it: the loss is nan"), {}),
        (EndOfRun(index=60, reason="complete"), {}),
        (Evaluated(scores=[VersionScore(7, True, None), VersionScore(3, False, 0.5)]), {}),
        (
            Published(
                policy_version=5, endpoint="tcp://x:1", digest="cd" * 32, num_bytes=8, trained_batches=4, vocabulary=512
            ),
            {},
        ),
        (Trained(index=4, policy_version=5, metrics={"loss": 0.25, "entropy": None}), {}),
        (BatchFailed(index=4, reason="the loss is nan", raised=True), {}),
        (Checkpointed(next_batch=5, policy_version=6), {}),
        (Resume(next_batch=5), {}),
        (ManifestRequest(have_version=4, endpoint="tcp://r:1", hash="cuda"), {}),
        (an_offer(), {}),
        (WeightRequest(policy_version=5, base_version=4, first_chunk=0, num_chunks=1, part=1), {}),
        (WeightChunk(policy_version=5, base_version=4, chunk=0), {"data": np.arange(8, dtype=np.uint8)}),
        (WeightGone(policy_version=5, newest_version=6), {}),
        (PartRequest(policy_version=5), {}),
        (
            PartReady(policy_version=5, base_version=4, buckets=an_offer().buckets),
            {
                "spans": np.array([[0, 8]], dtype=np.int64),
                "sums": np.array([-5], dtype=np.int64),
                "digests": np.arange(16, dtype=np.uint8).reshape(1, 16),
            },
        ),
        (Loaded(policy_version=5, digest="cd" * 32, pause_s=0.25), {}),
        (StatusRequest(), {}),
        (Status(status={"batches_trained": 3, "reward": None}), {}),
        (StopRequest(reason="enough"), {}),
        (RequeueRequest(batches=[4, 7]), {}),
    ]
