"""Messages of the weight channel, rollout <-> learner (and rollout <-> rollout): manifests and chunks of a version."""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from gspo_protocol import limits
from gspo_protocol.messages.base import (
    AdapterName,
    Count,
    Message,
    Name,
    Reason,
    Version,
)

HashName = Literal["cpu", "cuda", "xxh3"]
"""What an engine's checksums are made with: SGLang's hash on that device, or XXH3."""
EngineChecksums = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=1024)], Annotated[str, Meta(min_length=16, max_length=64)]],
    Meta(max_length=limits.MAX_TENSORS),
]
"""The checksum that an engine must report for each of its parameters."""


class TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One tensor of a version, in SGLang's parameter names, at ``offset`` of the version's bytes."""

    name: Annotated[str, Meta(min_length=1, max_length=1024)]
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: Annotated[list[Count], Meta(max_length=limits.MAX_ARRAY_DIMENSIONS)]
    offset: Count
    num_bytes: Count
    digest: Annotated[str, Meta(min_length=32, max_length=128)]
    """BLAKE2b-256 of the tensor's little-endian bytes, hexadecimal."""


class DeltaBucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Changes of ``num_elements`` elements from byte ``offset`` of the version on, written as gspo_protocol.deltas says.

    ``stream_bytes``: lengths of its compressed streams, which follow one another.
    """

    offset: Count
    num_elements: Annotated[int, Meta(ge=1, le=limits.MAX_DELTA_BUCKET_ELEMENTS)]
    item_bytes: Literal[2, 4]
    num_changed: Annotated[int, Meta(ge=1, le=limits.MAX_DELTA_BUCKET_ELEMENTS)]
    num_absolute: Annotated[int, Meta(ge=0, le=limits.MAX_DELTA_BUCKET_ELEMENTS)]
    num_gap_bytes: Annotated[int, Meta(ge=1, le=2 * limits.MAX_DELTA_BUCKET_ELEMENTS)]
    stream_bytes: Annotated[list[Count], Meta(min_length=2, max_length=6)]


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A rollout that serves its replica of a version. ``key``: its public key (Z85); empty without keys."""

    endpoint: Annotated[str, Meta(min_length=1, max_length=1024)]
    key: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)] = ""


class WeightPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A part of a manifest's bytes, which one rank of the learner has. It follows the part before it."""

    num_bytes: Count
    endpoint: Annotated[str, Meta(max_length=1024)] = ""
    """Where it is served, in chunks of its own; empty: where the manifest came from."""
    spans: Annotated[list[tuple[Count, Count]], Meta(max_length=limits.MAX_TENSORS)] = []
    """Of a snapshot: the bytes of the version that it has, each with its offset and length, in its order."""


class AdapterInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a version is that consists of an adapter (LoRA) alone: matrices A and B of weights W that become W + alpha / rank
    * B A. The model below it is not sent."""

    rank: Annotated[int, Meta(ge=1, le=4096)]
    alpha: Annotated[float, Meta(gt=0)]
    modules: Annotated[list[Annotated[str, Meta(min_length=1, max_length=64)]], Meta(min_length=1, max_length=16)]
    """The last part of the names of the adapted weights' modules, such as "q_proj"."""
    base_digest: Name
    """The digest that the model below would have as a version, in the type in which it is served."""
    probe_ids: Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=limits.MAX_PROBE_TOKENS)] = []
    """A fixed sequence of tokens."""
    probe_logprobs: Annotated[list[float], Meta(max_length=limits.MAX_PROBE_TOKENS * limits.MAX_ADAPTERS)] = []
    """The learner's own log-probs of ``probe_ids[1:]`` with this adapter, at temperature 1; of several, in turn."""
    names: Annotated[list[AdapterName], Meta(max_length=limits.MAX_ADAPTERS)] = []
    """Of several adapters: A of each weight has ``rank`` rows for each, in this order, B ``rank`` columns. Empty: one."""


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What the learner computes with a version of a fixed sequence (gspo_protocol.probes): engines must compute the same."""

    num_tokens: Annotated[int, Meta(ge=2, le=2**31 - 1)]
    vocabulary: Annotated[int, Meta(ge=2, le=2**31 - 1)]
    """Tokens are below it."""
    logprobs: Annotated[list[float], Meta(max_length=limits.MAX_PROBED)]
    """Of the tokens of ``gspo_protocol.probes.probe_spans``, in turn, at temperature 1."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """In which it computes."""
    config: Annotated[str, Meta(max_length=limits.MAX_CONFIG_CHARS)] = ""
    """The model's config.json as the learner has it; empty: it is too long, or unknown."""


class ManifestRequest(Message, frozen=True, tag="manifest_request"):
    """Rollout -> weight server: what is the newest version? ``have_version`` allows a delta against it."""

    have_version: Version
    """The version that the rollout's replica holds, bit for bit. 0: none."""
    endpoint: Annotated[str, Meta(max_length=1024)] = ""
    """Where this rollout serves its replica to others; empty: it does not."""
    direct: bool = False
    """Do not refer this rollout to another source: what it got from one was damaged."""
    hash: Literal["", HashName] = ""
    """The hash of its engine's checksums, in which the manifest of an adapter shall have them; empty: it wants none."""


class Manifest(Message, frozen=True, tag="manifest"):
    """Weight server -> rollout: a version that can be fetched.

    A snapshot holds every tensor's bytes, needs no base, and has no buckets. A delta is against ``base_version`` and
    shares its tensors' names, types, shapes and places: ``tensors`` is empty, and its bytes are the head of
    ``gspo_protocol.deltas.encode_head`` and the streams of ``buckets``.
    ``digest`` is that of the whole version in both cases. ``sources``: where to fetch the same bytes; empty: here.
    """

    LARGE_HEADER: ClassVar[bool] = True

    policy_version: Version
    kind: Literal["snapshot", "delta"]
    base_version: Version
    num_bytes: Count
    chunk_bytes: Annotated[int, Meta(ge=1, le=limits.MAX_WEIGHT_CHUNK_BYTES)]
    digest: Name
    """BLAKE2b-256 over all tensors' names, dtypes, shapes and digests."""
    tensors: Annotated[list[TensorInfo], Meta(max_length=limits.MAX_TENSORS)]
    buckets: Annotated[list[DeltaBucket], Meta(max_length=limits.MAX_DELTA_BUCKETS)] = []
    head_digest: Annotated[str, Meta(max_length=128)] = ""
    """BLAKE2b-256 of a delta's head, which has the digests of everything behind it; empty for a snapshot."""
    newest_version: Version = 0
    """The version at the end of the chain of deltas that begins with this one; 0: this is the newest version."""
    sources: Annotated[list[Source], Meta(max_length=limits.MAX_SOURCES)] = []
    checksums: EngineChecksums = {}
    """Of an adapter: of the model below it, by the hash that was asked for; empty: not computed yet, ask again."""
    adapter: AdapterInfo | None = None
    """None: the version has all weights."""
    parts: Annotated[list[WeightPart], Meta(max_length=limits.MAX_WEIGHT_PARTS)] = []
    """Together all bytes; those of a delta follow one another in it. Empty: there is one part, here."""
    probe: Probe | None = None
    """What engines must compute with this version."""


class WeightRequest(Message, frozen=True, tag="weight_request"):
    """Rollout -> weight server: chunks ``first_chunk`` .. ``first_chunk + num_chunks - 1`` of a version: its credit.

    ``base_version``: chunks of the delta against it; 0: of the snapshot.
    """

    policy_version: Version
    first_chunk: Count
    num_chunks: Annotated[int, Meta(ge=1, le=64)]
    base_version: Version = 0
    part: Count = 0
    """Of which part of the manifest; 0: of what this end has of its own, all or one part. Rank 0 passes the others on."""


class WeightChunk(Message, frozen=True, tag="weight_chunk"):
    """Weight server -> rollout: one chunk of a snapshot's or (``base_version`` is not 0) a delta's bytes."""

    ARRAYS: ClassVar[dict[str, str]] = {"data": "uint8"}

    policy_version: Version
    chunk: Count
    base_version: Version = 0
    part: Count = 0


class WeightGone(Message, frozen=True, tag="weight_gone"):
    """Weight server -> rollout: it does not have that version, or no longer; ask for the manifest again."""

    policy_version: Version
    newest_version: Version


class PartRequest(Message, frozen=True, tag="part_request"):
    """Rank 0 of a learner -> another rank: say what its part of a version is, once it can be fetched."""

    policy_version: Version


class PartReady(Message, frozen=True, tag="part_ready"):
    """A rank of a learner -> rank 0: its part of a version can be fetched, and its part of a delta."""

    LARGE_HEADER: ClassVar[bool] = True
    ARRAYS: ClassVar[dict[str, str]] = {"spans": "int64", "sums": "int64", "digests": "uint8"}
    """``spans`` [any, 2]: offset and length of each range of the version that it has, in its order. ``sums``: of the tiles
    that each range touches (the bits of unsigned numbers). ``digests`` [buckets, 16]: of the changes of each bucket."""

    policy_version: Version
    base_version: Version
    """Of the delta; 0: there is none."""
    buckets: Annotated[list[DeltaBucket], Meta(max_length=limits.MAX_DELTA_BUCKETS)] = []
    bytes_sent: Annotated[int, Meta(ge=0)] = 0
    """Of weights, since the rank has started."""


class Loaded(Message, frozen=True, tag="loaded"):
    """Rollout -> weight server: the engine serves ``policy_version``, verified (``error`` empty), or it does not."""

    policy_version: Version
    digest: str
    error: Reason = ""
    pause_s: float = 0.0
