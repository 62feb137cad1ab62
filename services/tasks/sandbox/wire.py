"""What a client and a server of sandboxes say to each other, over one WebSocket for each sandbox.

A sandbox is a GET of ``SANDBOX_PATH`` that is upgraded: the server answers 101 when it has one free, which then lives as
long as the connection. Otherwise it says why: 401 without the key, 404 for another version of this contract, 429 when all
is taken and 503 when it stops or cannot start a sandbox, both with Retry-After. Each binary message is one frame as in
``frames.py``: a request (put, prepare, run), and one answer to it, in this order. A client that asks a second thing
meanwhile is cut off.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gspo_services.tasks.sandbox.interface import MAX_FILES, MAX_FILES_BYTES, RunOutcome, SandboxLimits

VERSION: Final = 1
SANDBOX_PATH: Final = f"/v{VERSION}/sandbox"
INFO_PATH: Final = f"/v{VERSION}/info"
KEY_VARIABLE: Final = "GSPO_SANDBOX_KEY"
MAX_HEADER_BYTES: Final = 1 << 20
MAX_OUTPUT_BYTES: Final = 64 << 20
"""Of each of the two outputs that a server gives back."""
MAX_MESSAGE_BYTES: Final = 2 * MAX_FILES_BYTES + 4 + MAX_HEADER_BYTES
HEARTBEAT_S: Final = 15.0
"""A client takes a server for dead that does not answer within about so long."""


class PutFiles(msgspec.Struct, frozen=True, tag_field="do", tag="put"):
    """Client -> server: files, whose contents follow in this order. Answered by SandboxDone, SandboxRefused or
    SandboxFailed."""

    names: list[str]


class RunCommand(msgspec.Struct, frozen=True, tag_field="do", tag="run"):
    """Client -> server: a program, whose standard input follows. Answered by SandboxOutcome, SandboxRefused or
    SandboxFailed."""

    command: list[str]
    prepares: bool
    limits: SandboxLimits


class SandboxDone(msgspec.Struct, frozen=True, tag_field="is", tag="done"):
    """Server -> client: the files are there."""


class SandboxOutcome(msgspec.Struct, frozen=True, tag_field="is", tag="outcome"):
    """Server -> client: how a run ended; its two outputs follow. Fields as in ``RunOutcome``."""

    exit_code: int | None
    signal: int | None
    limit: str | None
    wall_s: float
    cpu_s: float


class SandboxRefused(msgspec.Struct, frozen=True, tag_field="is", tag="refused"):
    """Server -> client: no sandbox takes that; it would be refused again."""

    text: str


class SandboxFailed(msgspec.Struct, frozen=True, tag_field="is", tag="failed"):
    """Server -> client: the sandbox has failed, whatever was asked, and ends. Another one may do it."""

    text: str


SandboxRequest = PutFiles | RunCommand
SandboxAnswer = SandboxDone | SandboxOutcome | SandboxRefused | SandboxFailed
_REQUESTS: Final = msgspec.json.Decoder(SandboxRequest)
_ANSWERS: Final = msgspec.json.Decoder(SandboxAnswer)


class WireError(ValueError):
    """A message that is none."""


class SandboxInfo(msgspec.Struct, frozen=True):
    """What GET of ``INFO_PATH`` answers, as JSON."""

    version: int
    max_sandboxes: int
    used: int
    waiting: int
    max_wall_s: float
    max_memory_bytes: int
    memory: str = ""
    """What counts the memory of programs, in words: a cgroup, or why there is none."""


def packed(message: SandboxRequest | SandboxAnswer, *blobs: bytes) -> bytes:
    """A message and its bytes. Raises: WireError for a header that the other end would not take."""
    fields: Mapping[str, Any] = msgspec.to_builtins(message)
    text = json.dumps({**fields, "sizes": [len(blob) for blob in blobs]}).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise WireError(f"names, command and limits take {len(text)} bytes: {MAX_HEADER_BYTES} are allowed")
    return struct.pack(">I", len(text)) + text + b"".join(blobs)


def request_of(data: bytes) -> tuple[SandboxRequest, list[bytes]]:
    """What a client asks, and its bytes. Raises: WireError; ProgramRefused for limits that no sandbox takes."""
    text, blobs = _parts(data)
    try:
        request: SandboxRequest = _REQUESTS.decode(text)
    # Limits may be numbers that are none of this machine's.
    except (msgspec.MsgspecError, OverflowError) as error:
        raise WireError(f"the request is not one: {error}") from error
    if len(blobs) != (len(request.names) if isinstance(request, PutFiles) else 1):
        raise WireError(f"the request has {len(blobs)} parts")
    return request, blobs


def answer_of(data: bytes) -> SandboxDone | RunOutcome | SandboxRefused | SandboxFailed:
    """What a server answers. Raises: WireError."""
    text, blobs = _parts(data)
    try:
        answer: SandboxAnswer = _ANSWERS.decode(text)
        if not isinstance(answer, SandboxOutcome):
            return answer
        if len(blobs) != 2:
            raise WireError(f"the outcome has {len(blobs)} outputs")
        fields = {**msgspec.structs.asdict(answer), "stdout": blobs[0], "stderr": blobs[1]}
        return msgspec.convert(fields, RunOutcome)
    except msgspec.MsgspecError as error:
        raise WireError(f"the answer is not one: {error}") from error


def _parts(data: bytes) -> tuple[bytes, list[bytes]]:
    if len(data) < 4:
        raise WireError(f"a message of {len(data)} bytes")
    (length,) = struct.unpack_from(">I", data)
    if length > MAX_HEADER_BYTES or length + 4 > len(data):
        raise WireError(f"a header of {length} bytes in a message of {len(data)}")
    text = data[4 : 4 + length]
    try:
        sizes = json.loads(text)["sizes"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"the header cannot be read: {error}") from error
    if not isinstance(sizes, list) or len(sizes) > MAX_FILES or not all(type(size) is int and size >= 0 for size in sizes):
        raise WireError(f"parts of {sizes!r:.100} bytes")
    if sum(sizes) != len(data) - 4 - length:
        raise WireError(f"parts of {sum(sizes)} bytes, and {len(data) - 4 - length} came")
    blobs, place = [], 4 + length
    for size in sizes:
        blobs.append(data[place : place + size])
        place += size
    return text, blobs
