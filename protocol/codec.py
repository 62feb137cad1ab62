"""Message <-> frames. Frame 0 is a msgpack header, every further frame one raw little-endian array.

The header is a map: ``m`` the message (tagged), ``s`` its sequence number or nil, ``a`` a list of (name, dtype, shape) in
the order of the frames. Decoding never copies an array: the result is a read-only view of the frame.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, get_args

import msgpack
import msgspec
import numpy as np

from gspo_protocol import limits
from gspo_protocol.errors import ProtocolError
from gspo_protocol.messages import AnyMessage, Message

Array = np.ndarray[Any, Any]
Frame = bytes | bytearray | memoryview
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "uint8": np.dtype("u1"),
}


_EMPTY: Final = {name: np.frombuffer(b"", dtype) for name, dtype in DTYPES.items()}
"""Nobody can write into what has nothing in it, so each is there once."""


class Received(msgspec.Struct, frozen=True):
    """A decoded message: the struct, its arrays (read-only views), and its sequence number if it has one."""

    message: AnyMessage
    arrays: dict[str, Array]
    seq: int | None


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    m: AnyMessage
    s: int | None
    a: list[tuple[str, str, list[int]]]


class _ClaimedType(msgspec.Struct, frozen=True):
    type: str


class _Claim(msgspec.Struct, frozen=True):
    """What a header says it is; everything else in it is skipped without being built."""

    m: _ClaimedType
    s: int | None = None


_CLAIM: Final = msgspec.msgpack.Decoder(_Claim)
# msgspec resolves a struct's fields at first use, and two threads that do so at once end the process with a segmentation
# fault. Making a decoder resolves them now, while one thread imports this module.
_PREPARED: Final = msgspec.msgpack.Decoder(_Header)
_LARGE: Final = frozenset(str(kind.__struct_config__.tag) for kind in get_args(AnyMessage) if kind.LARGE_HEADER)


def encode(message: Message, arrays: Mapping[str, Array] | None = None, seq: int | None = None) -> list[Frame]:
    """Frames of ``message``. Arrays must be those of ``message.ARRAYS``, with or without its optional ones; contiguous ones
    are not copied.

    Raises: ProtocolError when arrays are missing or of another dtype, or a limit is exceeded.
    """
    arrays = {} if arrays is None else arrays
    kind = message_type(message)
    expected = _expected(message, arrays)
    if set(arrays) != set(expected):
        raise ProtocolError(f"{kind}: arrays {sorted(arrays)} given, {sorted(message.ARRAYS)} expected")
    described: list[tuple[str, str, tuple[int, ...]]] = []
    frames: list[Frame] = [b""]
    for name, dtype in expected.items():
        array = arrays[name]
        if array.dtype != DTYPES[dtype]:
            raise ProtocolError(f"{kind}: array {name} has dtype {array.dtype}, {dtype} expected")
        described.append((name, dtype, array.shape))
        if not array.size:
            frames.append(b"")
            continue
        frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    frames[0] = msgpack.packb({"m": msgspec.to_builtins(message), "s": seq, "a": described}, use_bin_type=True)
    _check_sizes(frames)
    _check_header_size(message, len(frames[0]))
    return frames


def decode(frames: Sequence[Frame]) -> Received:
    """Decode ``frames`` into a message.

    Raises: ProtocolError naming the message type, field, value and limit; nothing else, whatever the bytes.
    """
    _check_sizes(frames)
    _check_claim(frames[0])
    plain = _unpacked(frames[0])
    try:
        return _decoded(plain, frames)
    except ProtocolError as error:
        error.message_type, error.seq = _claimed_type(plain), _claimed_seq(plain)
        raise


def _decoded(plain: object, frames: Sequence[Frame]) -> Received:
    header = _header(plain)
    message = header.m
    kind = message_type(message)
    _check_header_size(message, memoryview(frames[0]).nbytes)
    expected = _expected(message, [name for name, _, _ in header.a])
    if [name for name, _, _ in header.a] != list(expected) or len(frames) != 1 + len(expected):
        raise ProtocolError(
            f"{kind}: arrays {[name for name, _, _ in header.a]} in {len(frames) - 1} frames, {list(expected)} expected"
        )
    if header.s is not None and header.s < 0:
        raise ProtocolError(f"{kind}: sequence number {header.s} is negative")
    arrays = {
        name: _array(kind, name, dtype, expected[name], shape, frame)
        for (name, dtype, shape), frame in zip(header.a, frames[1:], strict=True)
    }
    try:
        message.check_plain()
        message.check_arrays(arrays)
    except ValueError as error:
        raise ProtocolError(f"{kind}: {error}") from error
    return Received(message, arrays, header.s)


def _expected(message: Message, names: Collection[str]) -> dict[str, str]:
    """Return the arrays of a message that has these, with their dtypes, in order."""
    if not message.OPTIONAL_ARRAYS:
        return message.ARRAYS
    return message.ARRAYS | {name: dtype for name, dtype in message.OPTIONAL_ARRAYS.items() if name in names}


def message_type(message: Message) -> str:
    """Return the tag of a message, as it appears in errors, logs and metrics."""
    return str(message.__struct_config__.tag)


def _check_sizes(frames: Sequence[Frame]) -> None:
    if not 1 <= len(frames) <= limits.MAX_FRAMES:
        raise ProtocolError(f"message has {len(frames)} frames, 1 to {limits.MAX_FRAMES} allowed (MAX_FRAMES)")
    sizes = [memoryview(frame).nbytes for frame in frames]
    if sizes[0] > limits.MAX_LARGE_HEADER_BYTES:
        raise ProtocolError(f"header has {sizes[0]} bytes, {limits.MAX_LARGE_HEADER_BYTES} allowed (MAX_LARGE_HEADER_BYTES)")
    if max(sizes) > limits.MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame has {max(sizes)} bytes, {limits.MAX_FRAME_BYTES} allowed (MAX_FRAME_BYTES)")
    if sum(sizes) > limits.MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message has {sum(sizes)} bytes, {limits.MAX_MESSAGE_BYTES} allowed (MAX_MESSAGE_BYTES)")


def _check_header_size(message: Message, num_bytes: int) -> None:
    if num_bytes > limits.MAX_HEADER_BYTES and not message.LARGE_HEADER:
        raise ProtocolError(
            f"{message_type(message)}: header has {num_bytes} bytes, {limits.MAX_HEADER_BYTES} allowed (MAX_HEADER_BYTES)"
        )


def _check_claim(frame: Frame) -> None:
    """Refuse, before unpacking, a header that is too large for the type that it claims: each of its bytes could become an
    object of 64 bytes.
    """
    if memoryview(frame).nbytes <= limits.MAX_HEADER_BYTES:
        return
    try:
        claim = _CLAIM.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"header is not a message header: {error}") from error
    if claim.m.type not in _LARGE:
        refused = ProtocolError(
            f"{claim.m.type[:64]}: header has {memoryview(frame).nbytes} bytes, {limits.MAX_HEADER_BYTES} allowed "
            "(MAX_HEADER_BYTES)"
        )
        refused.message_type, refused.seq = claim.m.type[:64], claim.s
        raise refused


def _unpacked(frame: Frame) -> object:
    try:
        plain: object = msgpack.unpackb(frame, raw=False, strict_map_key=True, ext_hook=_no_extension)
    # msgpack documents ValueError (and its subclasses) and RecursionError-like StackError for every malformed input.
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"header is not msgpack: {type(error).__name__}: {error}") from error
    return plain


def _no_extension(code: int, _: bytes) -> object:
    raise ValueError(f"extension type {code}: messages have no extension types")


def _header(plain: object) -> _Header:
    try:
        return msgspec.convert(plain, _Header)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"{_claimed_type(plain)}: {error}") from error


def _claimed_type(plain: object) -> str:
    """Return the type that a malformed message claims, for the error; bounded, because it comes from outside."""
    if isinstance(plain, dict) and isinstance(plain.get("m"), dict):
        claimed = plain["m"].get("type")
        return claimed[:64] if isinstance(claimed, str) else "header"
    return "header"


def _claimed_seq(plain: object) -> int | None:
    seq = plain.get("s") if isinstance(plain, dict) else None
    return seq if isinstance(seq, int) and not isinstance(seq, bool) else None


def _array(kind: str, name: str, dtype: str, expected: str, shape: list[int], frame: Frame) -> Array:
    if dtype != expected:
        raise ProtocolError(f"{kind}: array {name} has dtype {dtype[:32]}, {expected} expected")
    if len(shape) > limits.MAX_ARRAY_DIMENSIONS or any(size < 0 for size in shape):
        raise ProtocolError(f"{kind}: array {name} has shape {shape[:8]}")
    num_bytes = memoryview(frame).nbytes
    if not num_bytes and shape == [0]:
        return _EMPTY[dtype]
    numpy_dtype = DTYPES[dtype]
    num_elements = 1
    for size in shape:
        num_elements *= size
    if num_elements * numpy_dtype.itemsize != num_bytes:
        raise ProtocolError(f"{kind}: array {name} of shape {shape} and dtype {dtype} does not fit {num_bytes} bytes")
    try:
        array: Array = np.frombuffer(frame, dtype=numpy_dtype).reshape(shape)
    except ValueError as error:  # a size of 0 beside one that numpy cannot hold
        raise ProtocolError(f"{kind}: array {name} has shape {shape}: {error}") from error
    array.flags.writeable = False
    return array
