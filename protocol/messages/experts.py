"""The experts that an engine's routers chose for sampled tokens, as bytes; only where ``routing_replay_from`` asks for them.

    experts     uint8 [n, layers, k, b]: for each sampled token, in order, the k experts of each layer in the pass that
                predicted it. An expert has b bytes, little-endian: 1 below 256 experts, otherwise 2.

A token whose experts are not known has all bits set: no expert has that number.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta

from gspo_protocol import limits
from gspo_protocol.messages.pieces import OBSERVATION

Array = np.ndarray[Any, Any]
EXPERT_ARRAYS: Final[dict[str, str]] = {"experts": "uint8"}
UNKNOWN: Final = -1
MAX_BYTES: Final = limits.MAX_EXPERT_BYTES
MOST_EXPERTS: Final = 2**15 - 1


class ModelExperts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The choices of a model: layers with routers, the experts of a token in each of them, and the experts of a layer."""

    num_layers: Annotated[int, Meta(ge=1, le=MAX_BYTES)]
    top_k: Annotated[int, Meta(ge=1, le=MAX_BYTES)]
    num_experts: Annotated[int, Meta(ge=1, le=MOST_EXPERTS)]

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """What a token has in the array: layers, experts, bytes of an expert."""
        return self.num_layers, self.top_k, 1 if self.num_experts < 256 else 2

    @property
    def token_bytes(self) -> int:
        return math.prod(self.row_shape)

    @property
    def is_encodable(self) -> bool:
        """Whether messages have room for them."""
        return 1 <= self.num_experts <= MOST_EXPERTS and 1 <= self.token_bytes <= MAX_BYTES


def encode_experts(indices: Array, num_experts: int) -> Array:
    """Return int [n, layers, k], UNKNOWN where no expert is known, as bytes.

    Raises: ValueError for an index that is no expert, and for experts that no message has room for.
    """
    if indices.ndim != 3 or not (model := ModelExperts(indices.shape[1], indices.shape[2], num_experts)).is_encodable:
        raise ValueError(
            f"{list(indices.shape)} choices among {num_experts} experts: [tokens, layers, experts per token] with at most "
            f'{MAX_BYTES} bytes a token (MAX_EXPERT_BYTES) can be replayed; set objective.routing_replay_from = "learner"'
        )
    if indices.size and not (int(indices.min()) >= UNKNOWN and int(indices.max()) < num_experts):
        raise ValueError(f"experts {int(indices.min())} to {int(indices.max())}: the model has 0 to {num_experts - 1}")
    size = model.row_shape[-1]
    # Two's complement: -1 has all bits set in either width.
    narrow = np.ascontiguousarray(indices.astype("<i8").astype(f"<u{size}"))
    encoded: Array = narrow.view(np.uint8).reshape(*indices.shape, size)
    return encoded


def decode_experts(experts: Array) -> Array:
    """Return what ``encode_experts`` encoded, int16 [n, layers, k]."""
    *shape, size = experts.shape
    indices: Array = np.ascontiguousarray(experts).view(f"<u{size}").reshape(shape).astype(np.int32)
    indices[indices == 2 ** (8 * size) - 1] = UNKNOWN
    return indices.astype(np.int16)


def highest_expert(experts: Array) -> int:
    """Return the highest number that ``decode_experts`` would find; UNKNOWN: it would find none."""
    numbers = np.ascontiguousarray(experts).view(f"<u{experts.shape[-1]}")
    # One above each: that of an unknown expert has all bits set, and becomes 0.
    return int((numbers + numbers.dtype.type(1)).max(initial=0)) - 1


def check_experts(arrays: Mapping[str, Array], num_sampled: int) -> None:
    """Raises: ValueError with the shape when the array is there, and is not one row for each of ``num_sampled`` tokens."""
    if "experts" not in arrays:
        return
    shape = arrays["experts"].shape
    if len(shape) != 4 or shape[0] != num_sampled or shape[3] not in (1, 2) or not 1 <= math.prod(shape[1:]) <= MAX_BYTES:
        raise ValueError(
            f"array experts has shape {list(shape)}, expected [{num_sampled}, layers, experts per token, 1 or 2] with at "
            f"most {MAX_BYTES} bytes a token (MAX_EXPERT_BYTES)"
        )


def joined_experts(parts: Sequence[tuple[Array | None, int]]) -> Array | None:
    """Lay the experts of consecutive tokens end to end, given with the number of sampled tokens. None: none are known.

    Raises: ValueError when they have different shapes.
    """
    shapes = {experts.shape[1:] for experts, _ in parts if experts is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(
            f"experts of [layers, experts per token, bytes] {' and '.join(str(list(each)) for each in sorted(shapes))} "
            "together: the engines of this run serve different models"
        )
    (shape,) = shapes
    unknown = np.uint8(0xFF)
    return np.concatenate([np.full((num, *shape), unknown) if each is None else each for each, num in parts])


def sampled_between(segments: Array, begin: int, end: int) -> tuple[int, int]:
    """Return which of the sampled tokens of ``segments`` are among tokens [begin, end): the first, and the one after them.

    Args:
        segments: int [n, m], as in ``gspo_protocol.messages.pieces``; the first column is the kind, the last the length.
    """
    ends = np.cumsum(segments[:, -1], dtype=np.int64)
    starts = ends - segments[:, -1]
    is_sampled = segments[:, 0] != OBSERVATION
    before, until = (int((np.clip(at - starts, 0, ends - starts) * is_sampled).sum()) for at in (begin, end))
    return before, until
