"""Messages of the weight channel, rollout <-> learner: manifests and chunks of a version's bytes."""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from protocol import limits
from protocol.messages.base import (
    Count,
    Message,
    Name,
    Reason,
    Version,
)


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
