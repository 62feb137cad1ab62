"""Every message of the work, batch and weight channels.

A message is a frozen struct: its docstring says which end sends it, to which other and when. Arrays are not fields: they
travel as raw frames behind the header (see ``gspo_protocol.codec``) and are named by the message's ``ARRAYS``.
"""

from typing import get_args

from gspo_protocol.messages.base import (
    Count,
    GroupSampling,
    Message,
    Name,
    Plain,
    Reason,
    Role,
    Segment,
    Split,
    TrainingValues,
    Version,
    VersionRun,
)
from gspo_protocol.messages.batch import (
    Batch,
    BatchFailed,
    BatchItem,
    BatchPart,
    BatchPartRequest,
    BatchPending,
    BatchRequest,
    Checkpointed,
    EndOfRun,
    Evaluated,
    Published,
    Resume,
    SkipBatch,
    Trained,
    VersionScore,
)
from gspo_protocol.messages.connection import Ack, Goodbye, Hello, LedgerCommit, Refused, Welcome
from gspo_protocol.messages.gathered import Chunks
from gspo_protocol.messages.journal import Journal
from gspo_protocol.messages.operator import RequeueRequest, Status, StatusRequest, StopRequest
from gspo_protocol.messages.weights import (
    AdapterInfo,
    DeltaBucket,
    Loaded,
    Manifest,
    ManifestRequest,
    PartReady,
    PartRequest,
    Probe,
    Source,
    TensorInfo,
    WeightChunk,
    WeightGone,
    WeightPart,
    WeightRequest,
)
from gspo_protocol.messages.work import (
    Chunk,
    Finish,
    Grade,
    Graded,
    GroupMember,
    Heartbeat,
    Lease,
    LeaseEnded,
    LeaseKey,
    LeaseRequest,
    NoLease,
    Pulse,
    Release,
)

AnyMessage = (
    Hello | Goodbye | Welcome | Refused | Ack
    | LeaseRequest | Lease | NoLease | Chunk | Chunks | Journal | Finish | Grade | Graded | Release | LeaseEnded | Heartbeat
    | Pulse
    | BatchRequest | BatchPending | Batch | BatchPartRequest | BatchPart | SkipBatch | EndOfRun | Evaluated
    | Published | Trained | BatchFailed | Checkpointed | Resume
    | ManifestRequest | Manifest | WeightRequest | WeightChunk | WeightGone | Loaded
    | PartRequest | PartReady
    | StatusRequest | Status | StopRequest | RequeueRequest
)  # fmt: skip
SEQUENCED = (Chunk, Chunks, Journal, Finish, Graded, Release, Published, Trained, BatchFailed, Checkpointed)
"""Messages that must arrive: sent with a sequence number, kept by the sender until acknowledged."""

FOR_ONE_LIFE = (Welcome, Ack, Refused)
"""Messages that name the session they are for; see ``gspo_protocol.messages.connection.Session``."""

MESSAGE_TYPES = frozenset(str(kind.__struct_config__.tag) for kind in get_args(AnyMessage))
"""The tags of all messages."""

__all__ = [
    "FOR_ONE_LIFE",
    "MESSAGE_TYPES",
    "SEQUENCED",
    "Ack",
    "AdapterInfo",
    "AnyMessage",
    "Batch",
    "BatchFailed",
    "BatchItem",
    "BatchPart",
    "BatchPartRequest",
    "BatchPending",
    "BatchRequest",
    "Checkpointed",
    "Chunk",
    "Chunks",
    "Count",
    "DeltaBucket",
    "EndOfRun",
    "Evaluated",
    "Finish",
    "Goodbye",
    "Grade",
    "Graded",
    "GroupMember",
    "GroupSampling",
    "Heartbeat",
    "Hello",
    "Journal",
    "Lease",
    "LeaseEnded",
    "LeaseKey",
    "LeaseRequest",
    "LedgerCommit",
    "Loaded",
    "Manifest",
    "ManifestRequest",
    "Message",
    "Name",
    "NoLease",
    "PartReady",
    "PartRequest",
    "Plain",
    "Probe",
    "Published",
    "Pulse",
    "Reason",
    "Refused",
    "Release",
    "RequeueRequest",
    "Resume",
    "Role",
    "Segment",
    "SkipBatch",
    "Source",
    "Split",
    "Status",
    "StatusRequest",
    "StopRequest",
    "TensorInfo",
    "Trained",
    "TrainingValues",
    "Version",
    "VersionRun",
    "VersionScore",
    "WeightChunk",
    "WeightGone",
    "WeightPart",
    "WeightRequest",
    "Welcome",
]
