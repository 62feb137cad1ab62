"""What a worker says, checked: its process runs code of users, and may write anything into the connection."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from gspo.tasks.environments import Plain
from gspo_protocol.messages.base import require_plain
from gspo_protocol.messages.work import Components
from gspo_services.tasks.supervised import BadMessage

MAX_START_BYTES: Final = 64 * 1024 * 1024
"""Of a task with the recorded steps of its episode."""

Number = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=4_000)]
Digest = Annotated[str, msgspec.Meta(max_length=64)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class _Said(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", forbid_unknown_fields=True):
    """Base of every message."""


class WorkerReady(_Said, frozen=True, kw_only=True, tag="ready"):
    """The agent's function is imported."""


class WorkerUnusable(_Said, frozen=True, kw_only=True, tag="unusable"):
    """The agent's function cannot be imported."""

    detail: Text


class WorkerAlive(_Said, frozen=True, kw_only=True, tag="alive"):
    """How late the event loop is, and what it is busy with."""

    late_s: Annotated[float, msgspec.Meta(ge=0)]
    episode: Number | None
    where: Text


class WorkerPrinted(_Said, frozen=True, kw_only=True, tag="output"):
    """The user's code printed lines."""

    episode: Number | None
    text: str


class WorkerStep(_Said, frozen=True, kw_only=True, tag="step"):
    """A step has a result, which is to be recorded."""

    episode: Number
    ordinal: Number
    name: Name
    arguments: Digest
    result: Any


class WorkerComputer(_Said, frozen=True, kw_only=True, tag="computer"):
    """The episode's computer is asked for something."""

    episode: Number
    request: Number
    """Names the answer."""
    ordinal: Number
    """Of the step; of the next one for "read"."""
    do: Literal["run", "write", "read"]
    arguments: Digest = ""
    command: str = ""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    files: dict[str, bytes] = {}
    path: str = ""


class WorkerDiverged(_Said, frozen=True, kw_only=True, tag="diverged"):
    """A step is not the recorded one."""

    episode: Number
    ordinal: Number
    recorded: Name
    name: Name


class WorkerDone(_Said, frozen=True, kw_only=True, tag="done"):
    """An episode ended."""

    episode: Number
    reward: float | None
    components: Components | None
    turns: list[float] | None = None
    failure: Annotated[str, msgspec.Meta(max_length=20)] | None
    detail: Text
    spent: bool
    """The worker cannot be trusted with more episodes: a thread goes on, or memory is short."""


WorkerMessage = (
    WorkerReady | WorkerUnusable | WorkerAlive | WorkerPrinted | WorkerStep | WorkerComputer | WorkerDiverged | WorkerDone
)
_DECODER: Final = msgspec.json.Decoder(WorkerMessage)


def decoded(body: bytes) -> WorkerMessage:
    """The message in ``body``. Raises: BadMessage."""
    try:
        message: WorkerMessage = _DECODER.decode(body)
        if isinstance(message, WorkerStep):
            require_plain("result", message.result)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadMessage(f"not a message of a worker: {error}") from error
    return message


def start_message(number: int, task: dict[str, Plain], recorded: list[tuple[str, str, Plain]], has_computer: bool) -> bytes:
    """The order to run an episode: ``task`` has the fields of an AgentTask."""
    return msgspec.json.encode(
        {"do": "start", "episode": number, **task, "recorded": recorded, "has_computer": has_computer}
    )
