"""Every message of the work, batch and weight channels.

A message is a frozen struct: the docstring says who sends it, to whom and when. Arrays are not fields: they travel as raw
frames behind the header (see ``protocol.codec``) and are named by the message's ``ARRAYS``.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from protocol import limits

Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_CHARS)]
Reason = Annotated[str, Meta(max_length=limits.MAX_REASON_CHARS)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Version = Annotated[int, Meta(ge=0, le=2**53)]
Plain = dict[str, Any]
"""Plain data (null, bool, int, float, str, list, dict): tasks and environment states."""

Role = Literal["rollout", "learner", "operator"]
Split = Literal["train", "eval"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages. ``ARRAYS`` maps the name of an array to its dtype; the codec checks both."""

    ARRAYS: ClassVar[dict[str, str]] = {}
    LARGE_HEADER: ClassVar[bool] = False
    """The header may have MAX_LARGE_HEADER_BYTES instead of MAX_HEADER_BYTES."""

    def check_arrays(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Check the arrays against the fields; names and dtypes are checked already.

        Raises: ValueError with the array's name, the place and the value.
        """


def _require_finite(field: str, values: list[float]) -> None:
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"{field}[{index}] is {value}: a reward must be a finite number")


def _require_total(num_tokens: int, segments: list["Segment"], version_runs: list["VersionRun"]) -> None:
    for field, total in (
        ("segments", sum(segment.num_tokens for segment in segments)),
        ("version_runs", sum(run.num_tokens for run in version_runs)),
    ):
        if total != num_tokens:
            raise ValueError(f"{field} cover {total} tokens, num_tokens is {num_tokens}")


def _check_tokens(arrays: Mapping[str, np.ndarray[Any, Any]], num_tokens: int) -> None:
    for name in ("token_ids", "logprobs"):
        if arrays[name].shape != (num_tokens,):
            raise ValueError(f"array {name} has shape {arrays[name].shape}, num_tokens is {num_tokens}")
    if num_tokens and int(arrays["token_ids"].min()) < 0:
        raise ValueError(f"array token_ids holds {int(arrays['token_ids'].min())}: token ids are not negative")
    bad = ~(arrays["logprobs"] <= 1e-3)  # also true for NaN
    if bad.any():
        place = int(bad.argmax())
        raise ValueError(f"array logprobs[{place}] is {float(arrays['logprobs'][place])}: expected a log-prob (<= 0)")


# --- every connection ------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """Any peer -> broker or weight server: the first message of each connection, and again after a reconnect.

    A ``session`` is one life of a process: a new one ends the leases of the peer's former life.
    ``first_seq`` is the oldest sequence number that the sender has not seen acknowledged.
    """

    protocol_version: Count
    role: Role
    peer: Name
    session: Name
    first_seq: Count = 0


class Welcome(Message, frozen=True, tag="welcome"):
    """Broker or weight server -> peer: the answer to Hello. ``window`` bounds the peer's unacknowledged messages."""

    protocol_version: Count
    run_id: Name
    window: Annotated[int, Meta(ge=1, le=limits.MAX_WINDOW)]
    policy_version: Version
    """The newest published version; 0 when nothing was published yet. Never reused, also not after a restart."""
    weights_endpoint: str = ""
    """Where the newest version can be fetched; empty while no learner has announced one."""
    next_batch: Count = 0
    """Index of the first batch that no checkpoint covers (for the learner)."""
    fingerprint: str = ""
    """Digest of what all processes of a run must agree on (model, environment, sampling); empty when not checked."""


class Refused(Message, frozen=True, tag="refused"):
    """Anybody -> peer: a message was not accepted. The connection goes on unless ``fatal``."""

    reason: Reason
    message_type: str = ""
    fatal: bool = False


class Ack(Message, frozen=True, tag="ack"):
    """Receiver -> sender: every sequenced message below ``next_seq`` is durable (cumulative)."""

    next_seq: Count


# --- work channel: rollout <-> broker ------------------------------------------------------------------------------


class LeaseKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One right to extend one trajectory. A larger epoch fences all smaller ones."""

    trajectory_id: Count
    epoch: Count


class LeaseRequest(Message, frozen=True, tag="lease_request"):
    """Rollout -> broker: room for ``capacity`` more episodes; the engine serves ``policy_version``, verified."""

    request_id: Count
    capacity: Annotated[int, Meta(ge=1, le=limits.MAX_LEASES_PER_MESSAGE)]
    policy_version: Version


class VersionRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """``num_tokens`` consecutive tokens made by one policy version (-1: observation tokens, made by nobody)."""

    version: Annotated[int, Meta(ge=-1, le=2**53)]
    num_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_CHUNK_TOKENS)]


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Consecutive tokens of one kind: ``action`` (sampled by the policy) or ``observation`` (prompt, tool, user)."""

    kind: Literal["action", "observation"]
    turn: Annotated[int, Meta(ge=0, le=limits.MAX_TURNS)]
    num_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_CHUNK_TOKENS)]


class Lease(Message, frozen=True, tag="lease"):
    """Broker -> rollout: extend this trajectory. With acknowledged tokens (``num_tokens`` > 0) it goes on from there.

    Arrays: all acknowledged tokens of the trajectory so far.
    """

    ARRAYS: ClassVar[dict[str, str]] = {"token_ids": "int32", "logprobs": "float32"}

    trajectory_id: Count
    epoch: Count
    group_id: Count
    split: Split
    task: Plain
    seed: Count
    lease_s: float
    num_tokens: Count
    segments: list[Segment]
    version_runs: list[VersionRun]
    state: Plain | None
    """Environment state after the acknowledged tokens; None before the first chunk."""
    turn_done: bool
    """The last action segment is complete: the environment steps next."""
    turn_rewards: list[float]

    def check_arrays(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        _check_tokens(arrays, self.num_tokens)


class NoLease(Message, frozen=True, tag="no_lease"):
    """Broker -> rollout: the answer to a LeaseRequest that could not be filled now; ask again after ``retry_s``."""

    request_id: Count
    reason: Literal["window_full", "version_too_old", "no_prompts", "stopping"]
    retry_s: float


class Chunk(Message, frozen=True, tag="chunk"):
    """Rollout -> broker: tokens appended to one trajectory; acknowledged once durable. Idempotent by
    (trajectory, epoch, offset). ``state`` is the environment's state after these tokens; None: unchanged.
    """

    ARRAYS: ClassVar[dict[str, str]] = {"token_ids": "int32", "logprobs": "float32"}

    trajectory_id: Count
    epoch: Count
    offset: Count
    num_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_CHUNK_TOKENS)]
    segments: Annotated[list[Segment], Meta(min_length=1, max_length=limits.MAX_TURNS)]
    version_runs: Annotated[list[VersionRun], Meta(min_length=1, max_length=limits.MAX_CHUNK_TOKENS)]
    state: Plain | None = None
    turn_done: bool = False
    turn_rewards: Annotated[list[float], Meta(max_length=limits.MAX_TURNS)] = []
    """Rewards of all turns completed so far in the trajectory."""

    def __post_init__(self) -> None:
        _require_finite("turn_rewards", self.turn_rewards)
        _require_total(self.num_tokens, self.segments, self.version_runs)

    def check_arrays(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        _check_tokens(arrays, self.num_tokens)


class Finish(Message, frozen=True, tag="finish"):
    """Rollout -> broker: the episode is complete; ``num_tokens`` is its whole length."""

    trajectory_id: Count
    epoch: Count
    num_tokens: Annotated[int, Meta(ge=1)]
    reason: Literal["done", "length"]
    turn_rewards: Annotated[list[float], Meta(min_length=1, max_length=limits.MAX_TURNS)]
    """One finite reward per action turn; their sum is the trajectory's reward."""

    def __post_init__(self) -> None:
        _require_finite("turn_rewards", self.turn_rewards)


class Release(Message, frozen=True, tag="release"):
    """Rollout -> broker: hands a lease back; the trajectory goes on elsewhere from its last acknowledged token.

    ``failed``: the episode could not go on here for a reason of its own (counted as an attempt); otherwise a drain.
    """

    trajectory_id: Count
    epoch: Count
    reason: Reason
    failed: bool


class LeaseEnded(Message, frozen=True, tag="lease_ended"):
    """Broker -> rollout: this lease is not valid (any more): stop that episode, its tokens will not be accepted."""

    trajectory_id: Count
    epoch: Count
    reason: Reason


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Rollout -> broker, about every second: renews exactly the leases it names, and says what the engine serves."""

    policy_version: Version
    status: Literal["starting", "verifying", "serving", "draining", "quarantined"]
    leases: Annotated[list[LeaseKey], Meta(max_length=limits.MAX_LEASES_PER_MESSAGE)]
    metrics: dict[str, float] = {}


class Pulse(Message, frozen=True, tag="pulse"):
    """Broker -> peer: the answer to a Heartbeat; also sent unasked, as a hint, when a version is published."""

    policy_version: Version
    weights_endpoint: str
    stopping: bool = False


# --- batch channel: learner <-> broker -------------------------------------------------------------------------------


class BatchRequest(Message, frozen=True, tag="batch_request"):
    """Learner -> broker: wants batch ``index``, to be trained at ``policy_version``. Repeated until answered: the same
    index always gets the same batch.
    """

    index: Count
    policy_version: Version


class BatchPending(Message, frozen=True, tag="batch_pending"):
    """Broker -> learner: batch ``index`` is not complete yet; what it waits for, so that no wait is silent."""

    index: Count
    groups_ready: Count
    groups_needed: Count
    waiting_for: Reason


class BatchItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One trajectory of a batch; its tokens are the next ``num_tokens`` of the batch's arrays."""

    trajectory_id: Count
    group_id: Count
    num_tokens: Count
    segments: list[Segment]
    version_runs: list[VersionRun]
    turn_rewards: list[float]
    reason: Literal["done", "length"]


class Batch(Message, frozen=True, tag="batch"):
    """Broker -> learner: whole groups for one policy version, in a recorded order.

    ``policy_version`` is the version for which the batch was first assembled: lag is counted from it, also when the batch
    is delivered again after a restart of the learner.
    """

    LARGE_HEADER: ClassVar[bool] = True

    ARRAYS: ClassVar[dict[str, str]] = {"token_ids": "int32", "logprobs": "float32"}

    index: Count
    policy_version: Version
    temperature: float
    items: Annotated[list[BatchItem], Meta(min_length=1, max_length=limits.MAX_TRAJECTORIES_PER_BATCH)]

    def check_arrays(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        _check_tokens(arrays, sum(item.num_tokens for item in self.items))


class EndOfRun(Message, frozen=True, tag="end_of_run"):
    """Broker -> learner: there is no batch ``index``: the run is complete (or stops) after the batches before it."""

    index: Count
    reason: Reason


class Published(Message, frozen=True, tag="published"):
    """Learner -> broker: ``policy_version`` can be fetched at ``endpoint`` now. Durable: versions are never reused."""

    policy_version: Version
    endpoint: Annotated[str, Meta(min_length=1, max_length=1024)]
    digest: Name
    num_bytes: Count
    trained_batches: Count
    """Number of batches that these weights have been trained on."""


class Trained(Message, frozen=True, tag="trained"):
    """Learner -> broker: batch ``index`` has been trained; its metrics for the run's record."""

    index: Count
    policy_version: Version
    metrics: Annotated[dict[str, float | None], Meta(max_length=limits.MAX_METRICS)]


class Checkpointed(Message, frozen=True, tag="checkpointed"):
    """Learner -> broker: a durable checkpoint covers all batches below ``next_batch``; they are not delivered again."""

    next_batch: Count
    policy_version: Version


class Resume(Message, frozen=True, tag="resume"):
    """Learner -> broker, after Hello: the checkpoint it starts from covers all batches below ``next_batch``."""

    next_batch: Count


# --- weight channel: rollout <-> learner -----------------------------------------------------------------------------


class TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One tensor of a version, in SGLang's parameter names, at ``offset`` of the version's bytes."""

    name: Annotated[str, Meta(min_length=1, max_length=1024)]
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: Annotated[list[Count], Meta(max_length=limits.MAX_ARRAY_DIMENSIONS)]
    offset: Count
    num_bytes: Count
    digest: Annotated[str, Meta(min_length=32, max_length=128)]
    """BLAKE2b-256 of the tensor's little-endian bytes, hexadecimal."""


class ManifestRequest(Message, frozen=True, tag="manifest_request"):
    """Rollout -> weight server: what is the newest version? ``have_version`` allows a delta against it."""

    have_version: Version
    """0: nothing."""


class Manifest(Message, frozen=True, tag="manifest"):
    """Weight server -> rollout: a version that can be fetched, tensor by tensor.

    ``kind`` "delta" is against ``base_version``; a snapshot needs no base.
    ``sources``: other endpoints that hold the same bytes.
    """

    LARGE_HEADER: ClassVar[bool] = True

    policy_version: Version
    kind: Literal["snapshot", "delta"]
    base_version: Version
    num_bytes: Count
    chunk_bytes: Annotated[int, Meta(ge=1, le=limits.MAX_WEIGHT_CHUNK_BYTES)]
    digest: Name
    """BLAKE2b-256 over all tensors' names, dtypes, shapes and digests."""
    tensors: Annotated[list[TensorInfo], Meta(min_length=1, max_length=limits.MAX_TENSORS)]
    sources: list[str] = []


class WeightRequest(Message, frozen=True, tag="weight_request"):
    """Rollout -> weight server: chunks ``first_chunk`` .. ``first_chunk + num_chunks - 1`` of a version: its credit."""

    policy_version: Version
    first_chunk: Count
    num_chunks: Annotated[int, Meta(ge=1, le=64)]


class WeightChunk(Message, frozen=True, tag="weight_chunk"):
    """Weight server -> rollout: one chunk of a version's bytes."""

    ARRAYS: ClassVar[dict[str, str]] = {"data": "uint8"}

    policy_version: Version
    chunk: Count


class WeightGone(Message, frozen=True, tag="weight_gone"):
    """Weight server -> rollout: that version is not held (any more); ask for the manifest again."""

    policy_version: Version
    newest_version: Version


class Loaded(Message, frozen=True, tag="loaded"):
    """Rollout -> weight server: the engine serves ``policy_version``, verified (``error`` empty), or it does not."""

    policy_version: Version
    digest: str
    error: Reason = ""
    pause_s: float = 0.0


# --- operator: anyone who watches a run ----------------------------------------------------------------------------


class StatusRequest(Message, frozen=True, tag="status_request"):
    """Operator (`gspo run`, `gspo status`) -> broker."""


class Status(Message, frozen=True, tag="status"):
    """Broker -> operator: a snapshot of the run, plain data for display."""

    LARGE_HEADER: ClassVar[bool] = True

    status: Plain


class StopRequest(Message, frozen=True, tag="stop_request"):
    """Operator -> broker: finish the batch under way and stop the run."""

    reason: Reason


WorkMessage = LeaseRequest | Chunk | Finish | Release | Heartbeat
AnyMessage = (
    Hello | Welcome | Refused | Ack
    | LeaseRequest | Lease | NoLease | Chunk | Finish | Release | LeaseEnded | Heartbeat | Pulse
    | BatchRequest | BatchPending | Batch | EndOfRun | Published | Trained | Checkpointed | Resume
    | ManifestRequest | Manifest | WeightRequest | WeightChunk | WeightGone | Loaded
    | StatusRequest | Status | StopRequest
)  # fmt: skip
SEQUENCED = (Chunk, Finish, Release, Published, Trained, Checkpointed)
"""Messages that must arrive: sent with a sequence number, kept by the sender until acknowledged."""
